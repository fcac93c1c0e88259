"""Train a language model on text: an SRU++ from scratch, or any saved causal language model further.

undertow train --data my.txt
undertow train --data corpus/ --minutes 30 --model.hidden_size 768
undertow train --init-from runs/first/best --data more.txt
undertow train --config runs/first/config.yaml --resume
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from undertow.data import DataConfig
from undertow.train.config import TrainConfig
from undertow.train.progress import silent_bars

if TYPE_CHECKING:
    from torch import nn

ADAPTER = "undertow_recurrent"  # the model type of a recurrence that is saved without its base
HUB = "hub:"  # what stands before a name of the Hugging Face hub; nothing is downloaded unasked


@dataclass
class ModelConfig:
    """An SRU++ to train from scratch (unused with init_from)."""

    hidden_size: int = 512
    """d: width of the recurrence."""
    projection_size: int = 128
    """d': width of attention and bottleneck; d / 4 or d / 8 in the paper."""
    num_hidden_layers: int = 4
    """Layers."""
    num_attention_heads: int = 1
    """Heads; the paper needs one. projection_size is divided among them."""
    attention_every: int = 1
    """Every k-th layer attends, the others have only the recurrence: k = 5 of 10 costs almost nothing in quality."""
    attention_last: int | None = None
    """Instead of attention_every: only the last n layers attend."""
    attention_window: int = 256
    """Previous positions that a position attends to beside itself."""
    hidden_dropout: float = 0.0
    """Dropout inside the layers; worth having when the text is read more than a few times."""
    attention_dropout: float = 0.0
    """Dropout on the attention map."""
    embedding_dropout: float = 0.0
    """Dropout on the embeddings."""
    embedding_size: int | None = None
    """Width of the token embeddings where it differs from hidden_size."""
    highway_bias: float = -2.0
    """Initial bias of the highway gate."""
    layer_norm: Literal["none", "before", "after"] = "none"
    """A LayerNorm before the projections, after the layer, or none, as in the paper."""
    activation: Literal["identity", "tanh"] = "identity"
    """On the recurrent vector c."""
    alpha_init: float = 0.0
    """Initial weight of attention beside the bottleneck; 0 in the paper."""
    tie_word_embeddings: bool = False
    """Output weights = embeddings."""


@dataclass
class Config(TrainConfig, DataConfig):
    """What to train, on what, how, and where to."""

    out: str | None = None
    """The run's folder; by default runs/NAME-N, with the text's name and the first free number."""
    resume: bool | str = False
    """Go on from the newest checkpoint of out, or from the one named (step-00000200)."""
    overwrite: bool = False
    """Remove the run that is in out first."""
    init_from: str | None = None
    """A saved model or adapter to train further: its folder, a run's folder (its best model), or hub:owner/name."""
    base: str | None = None
    """The base of an adapter, where it is not found by the name that the adapter has for it."""
    quiet: bool = False
    """Say nothing but errors."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the SRU++."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)


def run(config: Config) -> int:
    """Train; 0, or 128 + the number of the signal that stopped it."""
    from undertow.allocator import keep_freed_memory
    from undertow.data import prepare
    from undertow.train.loop import check_out, train

    if config.out is None:
        if config.resume:
            raise ValueError("--resume needs the run to go on with: --out FOLDER, or --config FOLDER/config.yaml")
        config.out = str(free_name(config.data))
    check_out(Path(config.out), bool(config.resume), config.overwrite)
    if config.init_from is not None and config.tokenizer == DataConfig.tokenizer:
        config.tokenizer = saved_model(config.init_from)  # a model reads with the vocabulary that it was trained with
    data = prepare(data_config(asdict(config)))
    model = make_model(config, data.tokenizer)
    record = asdict(config) | {"resume": False, "overwrite": False}
    keep_freed_memory()
    result = train(
        model,
        data.train,
        config,
        config.out,
        valid_store=data.valid,
        tokenizer=data.tokenizer,
        resume=config.resume,
        overwrite=config.overwrite,
        record=record,
        quiet=config.quiet,
    )
    return 128 + result.interrupted if result.interrupted is not None else 0


def data_config(settings: Mapping[str, Any]) -> DataConfig:
    """The part of a run's settings that says what text it reads.

    The held-out documents do not follow the run's seed: runs with several seeds are to be compared on the same text.
    """
    known = {item.name for item in fields(DataConfig)} - {"seed"}
    return DataConfig(**{name: value for name, value in settings.items() if name in known})


def make_model(config: Config, tokenizer: Any) -> nn.Module:
    """The model to start from."""
    import torch

    from undertow.models import SRUppConfig, SRUppForCausalLM

    if config.init_from is not None:
        return load_model(config.init_from, base=config.base)
    torch.manual_seed(config.seed)
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return SRUppForCausalLM(
        SRUppConfig(
            vocab_size=len(tokenizer),
            bos_token_id=bos,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **asdict(config.model),
        )
    )


def saved_model(place: str) -> str:
    """The folder with the weights: a run's folder stands for its best model; hub:owner/name stays as it is.

    Raises:
        FileNotFoundError: no such folder, or one without a saved model.
    """
    if place.startswith(HUB):
        return place
    path = Path(place).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {place} with a saved model ({HUB}owner/name asks the hub for one)")
    for folder in (path, path / "best"):
        if (folder / "config.json").is_file():
            return str(folder)
    raise FileNotFoundError(f"{place} holds no saved model: neither config.json nor best/config.json is there")


def load_model(place: str, device: str | None = None, base: str | None = None) -> nn.Module:
    """A saved causal language model, or an adapter with its base, in float32 as training wants it.

    Args:
        place: see :func:`saved_model`.
        device: where to put it; by default the CPU.
        base: the base of an adapter, by name; by default the one that the adapter names.

    Raises:
        FileNotFoundError: see :func:`saved_model`; the base of an adapter is not there.
        ValueError: weights that are damaged, or do not fit the configuration beside them; an adapter of another base;
            a base for a model that is no adapter.
    """
    from undertow.retrofit.loading import load_causal_lm

    folder = saved_model(place)
    if is_adapter(folder):
        return _load_adapter(folder, device, base)
    if base is not None:
        raise ValueError(f"{place} is no adapter, so it has no base; leave --base out")
    model: Any = load_causal_lm(folder)
    return model.to(device) if device is not None else model


def hold_weights(model: nn.Module, weights: str) -> nn.Module:
    """A model for inference with its weights held otherwise than they were saved, "bfloat16" or "int8", in place."""
    import torch

    from undertow.nn.linear import to_int8

    if weights == "bfloat16":
        return model.to(torch.bfloat16)
    return to_int8(model) if weights == "int8" else model


def is_adapter(folder: str) -> bool:
    """Whether a folder holds a recurrence without its base, as ``undertow retrofit`` saves it."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == ADAPTER


def _load_adapter(folder: str, device: str | None, base: str | None) -> nn.Module:
    from undertow.retrofit import load_recurrent

    try:
        with silent_bars():
            return load_recurrent(folder, base, device=device)
    except OSError as error:
        if base is None and not str(error).startswith(folder):
            raise type(error)(f"the base of {folder} is not there: {error}; --base names another place") from error
        raise


def choose_device(name: str | None) -> str:
    """The device asked for, or a GPU where there is one.

    Raises:
        ValueError: a CUDA device, and torch finds none.
    """
    import torch

    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, and torch finds no CUDA device")
    return device


def free_name(data: list[str]) -> Path:
    """``runs/NAME-N``: the first of the numbers for which there is no folder."""
    first = data[0] if data else "text"
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(first).name.split(".")[0]).strip("-") or "text"
    number = 1
    while Path("runs", f"{name}-{number}").exists():
        number += 1
    return Path("runs", f"{name}-{number}")
