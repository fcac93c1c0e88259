"""transformers' Trainer on a recurrent model, with nothing of this library around it."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import undertow
from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.retrofit import RecurrenceConfig, RecurrentForCausalLM, add_recurrence, load_recurrent


class Windows(Dataset[Any]):
    """Rows of 40 ids, the same ones each time; the last third of some is padding."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(index))
        mask = torch.ones_like(ids)
        if index % 3 == 0:
            mask[27:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def model(base: str, lora: bool = False, **settings: Any) -> RecurrentForCausalLM:
    torch.manual_seed(1)
    inner: Any = LlamaForCausalLM.from_pretrained(base)
    if lora:
        from peft import LoraConfig, get_peft_model

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            inner = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return add_recurrence(inner, RecurrenceConfig(**{"window": 8, "slots": 3, "sinks": 2, **settings}))


def run(recurrent: RecurrentForCausalLM, out: Path, steps: int = 5, resume: bool = False, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, save_steps=3, logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], use_cpu=True, seed=3, disable_tqdm=True,
        eval_strategy="steps", eval_steps=5, **more,
    )  # fmt: skip
    trainer = Trainer(model=recurrent, args=arguments, train_dataset=Windows(), eval_dataset=Windows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("lora", "settings", "more"),
    [
        (False, {}, {}),
        (True, {}, {}),
        (True, {"recompute": True}, {"bf16": True}),
        (False, {"policy": "disjoint", "update": "sru"}, {"gradient_accumulation_steps": 2}),
        (False, {}, {"gradient_checkpointing": True}),
    ],
    ids=["module", "lora", "recompute in bfloat16", "accumulation", "gradient checkpointing"],
)
def test_trainer_trains_saves_and_resumes(
    base: str, tmp_path: Path, lora: bool, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    recurrent = model(base, lora, **settings)
    before = {name: p.detach().clone() for name, p in recurrent.named_parameters()}
    trained = {name for name, p in recurrent.named_parameters() if p.requires_grad}
    trainer = run(recurrent, tmp_path / "run", **more)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 5
    assert all(0 < loss < 6 for loss in losses)
    moved = {name for name, p in recurrent.named_parameters() if not torch.equal(before[name], p)}
    assert moved <= trained
    assert any(name.startswith("recurrence.") for name in moved)
    assert lora == any(".lora_" in name for name in moved)

    # A checkpoint is an adapter: megabytes, loaded like any other.
    saved = load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors")
    assert saved.keys() == {name.replace(".base_model.model", "", 1) if lora else name for name in trained}
    loaded = load_recurrent(tmp_path / "run" / "checkpoint-5")
    assert all(torch.equal(loaded.get_parameter(name), p) for name, p in recurrent.named_parameters())
    assert all("eval_loss" in line for line in trainer.state.log_history if "eval_runtime" in line)

    # From the third step on in a new process's place: the same weights as without the stop.
    other = model(base, lora, **settings)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-5")
    run(other, tmp_path / "again", resume=True, **more)
    for name, p in recurrent.named_parameters():
        assert torch.allclose(p, other.get_parameter(name), atol=1e-6), name


def test_the_best_adapter_is_loaded_at_the_end(base: str, tmp_path: Path) -> None:
    recurrent = model(base, lora=True)
    more = {"load_best_model_at_end": True, "save_strategy": "steps", "metric_for_best_model": "loss"}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2, report_to=[],
        use_cpu=True, learning_rate=1e-2, disable_tqdm=True, **more,
    )  # fmt: skip
    trainer = Trainer(model=recurrent, args=arguments, train_dataset=Windows(), eval_dataset=Windows())
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint or "") / "model.safetensors")
    for name, parameter in recurrent.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(best[name.replace(".base_model.model", "", 1)], parameter), name
    trainer.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "undertow_recurrent"
    assert isinstance(undertow.load_recurrent(tmp_path / "saved"), RecurrentForCausalLM)


def test_predictions_are_logits(base: str, tmp_path: Path) -> None:
    """The state, which is returned beside them, is no prediction."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    srupp = SRUppForCausalLM(SRUppConfig(vocab_size=64, hidden_size=16, projection_size=8, num_hidden_layers=1, **ids))
    for recurrent in (model(base), srupp):
        arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
        found = Trainer(model=recurrent, args=arguments).predict(Windows())
        assert found.predictions.shape == (16, 40, 64)
        assert found.metrics is not None
        assert "test_loss" in found.metrics
