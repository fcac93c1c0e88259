"""What a run does: its numbers, its files, its ends."""

from __future__ import annotations

import errno
import json
import math
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.train.conftest import close, records, small_config, small_model
from undertow.data import Document, Stream, TokenStore, byte_tokenizer, files
from undertow.evaluate import EvalResult, evaluate
from undertow.train import CheckpointError, TrainConfig, TrainResult, checkpoint, loop, train

Go = Callable[..., TrainResult]

# Losses (nats) of the run below. They may move with torch's kernels in the last digits, never more.
GOLDEN = (5.505769, 5.023746, 3.850966, 2.840774, 2.208383)


def test_golden_curve(go: Go, tmp_path: Path) -> None:
    go("run", model=small_model(), steps=40, eval_every=0, checkpoint_every=0, optimizer="adamw", warmup=4)
    losses = [line[3] for line in records(tmp_path / "run")]
    assert losses[::8] == pytest.approx(GOLDEN, rel=2e-4)


def test_first_step_is_what_a_hand_computes(go: Go, stores: dict[str, TokenStore], tmp_path: Path) -> None:
    model = small_model()
    piece = next(Stream(stores["train"], 4, 16, seed=0))
    with torch.no_grad():
        logits = model(input_ids=piece.input_ids, resets=piece.resets).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece.targets.flatten())
    go("run", model=small_model(), steps=1)
    line = records(tmp_path / "run")[0]
    assert line[:3] == ("train", 1, 64)
    assert line[3] == pytest.approx(float(loss), rel=1e-6)


def test_state_is_carried_and_cut_from_the_graph(go: Go, stores: dict[str, TokenStore]) -> None:
    """The second step's loss is that of a model which has read the first piece, too."""
    model = small_model()
    stream = Stream(stores["train"], 4, 16, seed=0)
    first, second = next(stream), next(stream)
    with torch.no_grad():
        state = model(input_ids=first.input_ids, resets=first.resets, use_cache=True).cache
        logits = model(input_ids=second.input_ids, resets=second.resets, cache=state).logits
        carried = float(nn.functional.cross_entropy(logits.flatten(0, 1), second.targets.flatten()))
        logits = model(input_ids=second.input_ids, resets=second.resets).logits
        fresh = float(nn.functional.cross_entropy(logits.flatten(0, 1), second.targets.flatten()))
    assert abs(carried - fresh) > 1e-5
    still = {"learning_rate": 1e-12, "weight_decay": 0.0}  # the weights stay, so only what is read can differ
    assert go("a", model=small_model(), steps=2, **still).loss == pytest.approx(carried, rel=1e-6)
    assert go("b", model=small_model(), steps=2, carry_state=False, **still).loss == pytest.approx(fresh, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_accumulation_is_a_bigger_batch(go: Go, tmp_path: Path, rows: int) -> None:
    go("whole", model=small_model())
    go("parts", model=small_model(), micro_batch_size=rows)
    assert close(records(tmp_path / "parts"), records(tmp_path / "whole"), rel=1e-4)


def test_plain_transformers_model_reads_windows(go: Go, stores: dict[str, TokenStore], tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=256,
            eos_token_id=256,
        )
    )
    piece = next(Stream(stores["train"], 4, 16, seed=0))
    with torch.no_grad():
        logits = llama(input_ids=piece.input_ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece.targets.flatten())
    result = go("run", model=llama, steps=30, micro_batch_size=2, optimizer="adamw")
    lines = records(tmp_path / "run")
    assert lines[0][3] == pytest.approx(float(loss), rel=1e-5)
    assert result.loss is not None
    assert result.loss < 0.9 * float(loss)
    first = go("again", model=LlamaForCausalLM(llama.config), steps=3)
    resumed = go("again", model=LlamaForCausalLM(llama.config), steps=3, resume=True)
    assert resumed.step == first.step


class Shifting(nn.Module):
    """A model whose own loss shifts labels that were shifted already, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.config = self.inner.config

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **ignored: Any) -> Any:
        logits = self.inner(input_ids=input_ids, use_cache=False).logits
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + 1
        return SimpleNamespace(logits=logits, loss=loss)

    def save_pretrained(self, folder: Path) -> None:
        self.inner.save_pretrained(folder)


def test_a_models_own_loss_is_not_trusted_blindly(go: Go, stores: dict[str, TokenStore]) -> None:
    model = Shifting()
    piece = next(Stream(stores["train"], 4, 16, seed=0))
    with torch.no_grad():
        logits = model(piece.input_ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece.targets.flatten())
    assert go("run", model=model, steps=1).loss == pytest.approx(float(loss), rel=1e-5)


def test_files_of_a_run(go: Go, tmp_path: Path, stores: dict[str, TokenStore]) -> None:
    model = small_model()
    result = train(
        model, stores["train"], small_config(tensorboard=True), tmp_path / "run", valid_store=stores["valid"],
        tokenizer=byte_tokenizer(), record={"anything": 1}, quiet=True,
    )  # fmt: skip
    out = tmp_path / "run"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in training] == list(range(1, 13))
    assert [line["step"] for line in lines if line["kind"] == "valid"] == [5, 10, 12]
    for line in training:
        assert line["tokens"] == 64 * line["step"]
        assert line["bits_per_token"] == pytest.approx(line["loss"] / math.log(2))
        assert {"bits_per_byte", "learning_rate", "grad_norm", "tokens_per_second", "seconds"} <= line.keys()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["parameters"] == sum(p.numel() for p in model.parameters()) == result.parameters
    assert summary["best"] == result.best
    assert (out / "config.yaml").read_text() == "anything: 1\n"
    assert list((out / "tensorboard").rglob("events.*"))
    best = AutoModelForCausalLM.from_pretrained(out / "best")
    assert result.best is not None
    again = evaluate(best, stores["valid"], batch_size=4, window=16, max_tokens=200)
    assert again.loss == pytest.approx(result.best["loss"], rel=1e-6)
    assert AutoTokenizer.from_pretrained(out / "best").encode("ab") == [97, 98]
    assert not [path for path in out.rglob(".*") if path.name.startswith((".unfinished", ".replaced"))]


def test_best_is_kept_not_the_last(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def falls_and_rises(model: Any, *args: Any, **options: Any) -> EvalResult:
        seen.append(model.lm_head.weight.detach().clone())
        result = evaluate(model, *args, **options)
        return replace(result, nll=result.targets * [5.0, 3.0, 4.0, 3.5][len(seen) - 1])

    monkeypatch.setattr("undertow.train.loop.evaluate", falls_and_rises)
    result = go("run", model=small_model(), steps=4, eval_every=1)
    assert result.best is not None
    assert (result.best["step"], result.best["loss"]) == (2, pytest.approx(3.0))
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best")
    assert torch.equal(best.lm_head.weight, seen[1])
    assert not torch.equal(seen[1], seen[3])


def test_without_validation_best_is_the_last(go: Go, tmp_path: Path) -> None:
    model = small_model()
    assert go("run", model=model, valid_store=None).best is None
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best")
    assert torch.equal(best.lm_head.weight, model.lm_head.weight)


def test_log_lines_are_means_over_their_steps(go: Go, tmp_path: Path) -> None:
    go("each", eval_every=0)
    go("five", eval_every=0, log_every=5)
    each = [line[3] for line in records(tmp_path / "each")]
    five = records(tmp_path / "five")
    assert [line[1] for line in five] == [5, 10, 12]
    assert [line[3] for line in five] == pytest.approx(
        [sum(each[:5]) / 5, sum(each[5:10]) / 5, sum(each[10:]) / 2], rel=1e-12
    )


def test_minutes_end_a_run(go: Go, tmp_path: Path) -> None:
    result = go("run", steps=None, minutes=0.01, eval_every=0, checkpoint_every=0)
    assert 0.6 <= result.seconds < 5
    assert result.step > 1
    rates = [line[5] for line in records(tmp_path / "run")]
    assert max(rates) <= 1e-2
    assert rates[-1] < 0.5 * max(rates)
    assert (tmp_path / "run" / "summary.json").exists()


def test_bfloat16_trains(go: Go) -> None:
    full = go("full", model=small_model())
    half = go("half", model=small_model(), precision="bfloat16")
    assert half.loss != full.loss
    assert half.loss == pytest.approx(full.loss, rel=2e-2)


def test_gradient_checkpointing_changes_nothing(go: Go, tmp_path: Path) -> None:
    go("a", model=small_model(), micro_batch_size=2)
    go("b", model=small_model(), micro_batch_size=2, gradient_checkpointing=True)
    assert close(records(tmp_path / "a"), records(tmp_path / "b"), rel=1e-5)


# -- exact resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adamw", "micro_batch_size": 1},
        {"micro_batch_size": 2, "log_every": 4, "eval_every": 4},
        {"schedule": "constant", "warmup": 6, "precision": "bfloat16"},
        {"carry_state": False},
    ],
    ids=str,
)
def test_resume_is_exact(go: Go, tmp_path: Path, changes: dict[str, Any]) -> None:
    """From every checkpoint the run goes on bit for bit as the one that never stopped."""
    whole = go("whole", **changes)
    final = (tmp_path / "whole" / "checkpoints" / "step-00000012" / "model.safetensors").read_bytes()
    for step in (3, 6, 9):
        out = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole", out)
        for later in checkpoint.steps_in(out / "checkpoints"):
            if checkpoint.step_of(later) > step:
                shutil.rmtree(later)
        torch.manual_seed(step)  # whatever state the new process is in
        resumed = go(out.name, model=small_model(hidden_dropout=0.1, highway_bias=-2.0), resume=True, **changes)
        assert records(out) == records(tmp_path / "whole")
        assert resumed.best is not None
        assert whole.best is not None
        assert resumed.best["loss"] == whole.best["loss"]
        assert (out / "checkpoints" / "step-00000012" / "model.safetensors").read_bytes() == final


def test_resume_after_a_stop_that_postponed_an_evaluation(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go("whole")
    calls = 0

    def stop_in_the_middle(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # during the evaluation at step 10
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(loop, "evaluate", stop_in_the_middle)
    stopped = go("parts")
    assert (stopped.interrupted, stopped.step) == (signal.SIGTERM, 10)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")[: 10 + 1]
    assert go("parts", resume=True).interrupted is None
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


def test_resume_of_a_finished_run_changes_nothing(go: Go, tmp_path: Path) -> None:
    go("run")
    before = records(tmp_path / "run")
    assert go("run", resume=True).step == 12
    assert records(tmp_path / "run") == before


def test_longer_budget_goes_on_and_says_what_changed(
    go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go("run")
    assert go("run", resume=True, steps=15, learning_rate=1e-3, quiet=False).step == 15
    assert "learning_rate 0.001 instead of 0.01, steps 15 instead of 12" in capsys.readouterr().err
    assert [line[1] for line in records(tmp_path / "run") if line[0] == "train"] == list(range(1, 16))


def test_metrics_after_the_checkpoint_are_cut(go: Go, tmp_path: Path) -> None:
    go("run", steps=12)
    whole = records(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    for step in (12,):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    path.write_text(path.read_text() + '{"kind": "train", "step": 13, "lo')
    go("run", resume=True)
    assert records(tmp_path / "run") == whole


def test_resume_from_an_earlier_checkpoint_puts_later_ones_aside(go: Go, tmp_path: Path) -> None:
    go("run")
    whole = records(tmp_path / "run")
    go("run", resume="step-00000006")
    assert records(tmp_path / "run") == whole
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert [name for name in names if name.startswith("step")] == [f"step-{n:08d}" for n in (3, 6, 9, 12)]
    assert len([name for name in names if name.startswith("aside-step-")]) == 2


def test_only_the_newest_checkpoints_stay(go: Go, tmp_path: Path) -> None:
    go("run", keep=2)
    assert [path.name for path in checkpoint.steps_in(tmp_path / "run" / "checkpoints")] == [
        "step-00000009",
        "step-00000012",
    ]


# -- a model of which only a part is trained ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A pretrained model, kept as it is, with something small and trained around it."""

    def __init__(self, seed: int = 1, silent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = small_model()
        self.base.requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(257))
        self.config = self.base.config
        self.silent = silent

    def forward(self, input_ids: Tensor, shift_labels: Any = None, labels: Any = None, **given: Any) -> Any:
        out = self.base(input_ids=input_ids, **given)
        logits = out.logits + self.bias
        if shift_labels is None or not self.silent:
            return SimpleNamespace(logits=logits, cache=out.cache, loss=None)
        count = given["num_items_in_batch"]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum") / count
        return SimpleNamespace(logits=None, cache=out.cache, loss=loss)

    def new_cache(self) -> Any:
        return self.base.new_cache()

    def save_pretrained(self, folder: Path) -> None:
        save_file({"bias": self.bias.detach()}, folder / "model.safetensors")


class Resetting(Adapted):
    """The same, with the state carried."""

    def forward(self, input_ids: Tensor, resets: Any = None, **given: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, resets=resets, **given)


def test_what_is_frozen_stays_and_is_not_written(go: Go, tmp_path: Path) -> None:
    model = Resetting()
    before = {name: p.clone() for name, p in model.base.named_parameters()}
    whole = go("whole", model=model)
    assert all(torch.equal(before[name], p) for name, p in model.base.named_parameters())
    assert whole.trainable == 257
    assert whole.parameters == 257 + sum(p.numel() for p in before.values())
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["trainable_parameters"] == 257
    last = tmp_path / "whole" / "checkpoints" / "step-00000012"
    assert load_file(last / "model.safetensors").keys() == {"bias"}
    moments = torch.load(last / "trainer.pt", weights_only=True)["optimizer"]["state"]
    assert sum(m["exp_avg"].numel() for m in moments.values()) == 257
    for step in (3, 9):
        shutil.copytree(tmp_path / "whole", tmp_path / f"from {step}")
        for later in checkpoint.steps_in(tmp_path / f"from {step}" / "checkpoints"):
            if checkpoint.step_of(later) > step:
                shutil.rmtree(later)
        go(f"from {step}", model=Resetting(), resume=True)
        assert records(tmp_path / f"from {step}") == records(tmp_path / "whole")


def test_other_frozen_weights_are_refused(go: Go, tmp_path: Path) -> None:
    go("run", model=Resetting(), steps=3)
    other = Resetting()
    with torch.no_grad():
        other.base.lm_head.weight[3, 4] += 1e-3
    with pytest.raises(CheckpointError, match="weights that are not trained are others"):
        go("run", model=other, steps=6, resume=True)
    thawed = Resetting()
    thawed.base.lm_head.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match="weights that are not trained are others"):
        go("run", model=thawed, steps=6, resume=True)


def test_a_loss_without_logits_is_the_models_word(go: Go, tmp_path: Path) -> None:
    go("logits", model=Resetting())
    go("silent", model=Resetting(silent=True))
    assert close(records(tmp_path / "silent"), records(tmp_path / "logits"), rel=1e-5)


class Silent(nn.Module):
    """Neither logits nor loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=None)


def test_neither_logits_nor_loss(go: Go) -> None:
    with pytest.raises(ValueError, match="Silent returned neither logits nor a loss"):
        go("run", model=Silent())


def test_settings_given_anew_count_when_a_run_goes_on(go: Go, tmp_path: Path) -> None:
    """Not those that the optimiser had when it was saved."""
    for name, changes in (("a", {}), ("b", {"weight_decay": 50.0}), ("c", {"beta2": 0.5})):
        go(name, model=small_model(), steps=3)
        go(name, model=small_model(), steps=6, resume=True, **changes)
    finals = [records(tmp_path / name)[-1][3] for name in "abc"]
    assert len(set(finals)) == 3


# -- bad input and bad luck ------------------------------------------------------------------------------------------


def test_folder_that_is_not_empty(go: Go, tmp_path: Path) -> None:
    go("run", steps=2)
    with pytest.raises(FileExistsError, match="not empty"):
        go("run", steps=2)
    go("run", steps=3, overwrite=True)
    assert records(tmp_path / "run")[-1][1] == 3
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    (foreign / "best").mkdir()
    with pytest.raises(FileExistsError, match="not empty"):
        go("foreign")
    with pytest.raises(FileExistsError, match="does not hold a run"):
        go("foreign", overwrite=True)
    assert (foreign / "thesis.txt").read_text() == "years of work"
    assert (foreign / "best").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        go("file")


def test_overwrite_leaves_what_is_not_of_the_run(go: Go, tmp_path: Path) -> None:
    go("run", steps=2)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    go("run", steps=1, overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_nothing_to_resume(go: Go, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        go("run", resume=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="exclude"):
        go("run", resume=True, overwrite=True)


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        (file, harm)
        for file in ("model.safetensors", "trainer.pt", "state-0000.safetensors", "manifest.json")
        for harm in ("cut", "flip", "gone")
        if (file, harm) != ("manifest.json", "flip")  # a flipped bit there may be harmless
    ],
)
def test_bad_checkpoint_is_named_and_the_one_before_offered(go: Go, tmp_path: Path, file: str, harm: str) -> None:
    go("run", steps=6)
    bad = tmp_path / "run" / "checkpoints" / "step-00000006"
    content = (bad / file).read_bytes()
    if harm == "cut":
        (bad / file).write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        middle = len(content) // 2
        (bad / file).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        (bad / file).unlink()
    before = {path: path.read_bytes() for path in bad.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        go("run", steps=6, resume=True)
    message = str(caught.value)
    assert "step-00000006" in message.splitlines()[0]
    assert "--resume step-00000003" in message.splitlines()[1]
    assert {path: path.read_bytes() for path in bad.iterdir()} == before
    whole = records(tmp_path / "run")
    go("run", steps=6, resume="step-00000003")
    assert records(tmp_path / "run") == whole


@pytest.mark.parametrize(
    ("changes", "model", "named"),
    [
        ({}, {"hidden_size": 24}, "hidden_size 16 there, 24 here"),
        ({"window": 8}, {}, "window 16 there, 8 here"),
        ({"optimizer": "adamw"}, {}, "optimizer radam there, adamw here"),
        ({"batch_size": 2}, {}, "batch_size 4 there, 2 here"),
        ({"micro_batch_size": 2}, {}, "4 rows at once there, 2 here"),
    ],
)
def test_checkpoint_of_another_configuration(
    go: Go, tmp_path: Path, changes: dict[str, Any], model: dict[str, Any], named: str
) -> None:
    go("run", steps=3, model=small_model())
    before = records(tmp_path / "run")
    with pytest.raises(CheckpointError, match=named):
        go("run", steps=6, model=small_model(**model), resume=True, **changes)
    assert records(tmp_path / "run") == before


def test_checkpoint_of_another_text(stores: dict[str, TokenStore], tmp_path: Path, go: Go) -> None:
    go("run", steps=3, model=small_model())
    other = TokenStore.build([Document("other", bytes(range(256)) * 8)], byte_tokenizer(), tmp_path / "other")
    with pytest.raises(CheckpointError, match="other text"):
        train(small_model(), other, small_config(steps=6), tmp_path / "run", resume=True, quiet=True)


def test_loss_that_is_not_finite_stops_the_run(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    inner = type(model).forward
    calls = 0

    def poisoned(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        out = inner(self, *args, **kwargs)
        if self.training:
            calls += 1
            if calls == 8:
                out.loss = out.loss * math.nan
        return out

    monkeypatch.setattr(type(model), "forward", poisoned)
    monkeypatch.setattr(loop, "carries_state", lambda _: True)  # the signature is hidden by the patch
    monkeypatch.setattr("undertow.evaluate.protocol.carries_state", lambda _: True)
    monkeypatch.setattr("undertow.evaluate.evaluator.carries_state", lambda _: True)
    monkeypatch.setattr(loop, "_takes_targets", lambda _: True)
    with pytest.raises(FloatingPointError) as caught:
        go("run", model=model)
    message = str(caught.value)
    assert "loss is nan at step 8" in message
    assert "step-00000006" in message
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert checkpoint.newest_good(tmp_path / "run" / "checkpoints") is not None


def test_gradient_that_is_not_finite_stops_the_run(go: Go) -> None:
    model = small_model()
    model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"gradient's norm is (inf|nan) at step 1.*\n.*no checkpoint"):
        go("run", model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_disk_full_while_saving(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = files.sync

    def full(path: Path) -> None:
        if "unfinished-step-00000006" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        sync(path)

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        go("run")
    assert "step-00000003" in str(caught.value).splitlines()[1]
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    checkpoint.check(folder / "step-00000003")
    monkeypatch.undo()
    go("run", resume=True)


def test_text_shorter_than_a_window(go: Go) -> None:
    with pytest.raises(ValueError, match="too short"):
        go("run", window=10_000)


def test_tokens_outside_the_vocabulary(go: Go) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 100"):
        go("run", model=small_model(vocab_size=100, bos_token_id=0, eos_token_id=0, pad_token_id=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps should be at least 1"),
        ({"minutes": 0.0}, "minutes should be above 0"),
        ({"learning_rate": 0.0}, "learning_rate should be above 0"),
        ({"learning_rate": math.nan}, "learning_rate should be above 0"),
        ({"min_learning_rate": 1.0}, "is above learning_rate"),
        ({"beta2": 1.0}, r"beta2 should be in \[0, 1\)"),
        ({"optimizer": "sgd"}, "one of radam, adamw"),
        ({"clip": -1.0}, "should not be negative"),
    ],
)
def test_configurations_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_rows_that_cannot_be_shared(go: Go) -> None:
    with pytest.raises(ValueError, match="not divisible by micro_batch_size 3"):
        go("run", micro_batch_size=3)
    with pytest.raises(ValueError, match="device should be"):
        go("run", device="tpu")


def test_signals_are_given_back_and_a_second_interrupt_is_at_once() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with loop._catch_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_training_works_outside_of_the_main_thread(go: Go) -> None:
    results: list[TrainResult] = []
    thread = threading.Thread(target=lambda: results.append(go("run", steps=2)))
    thread.start()
    thread.join()
    assert results[0].step == 2


@pytest.mark.parametrize("again", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_in_which_a_run_is_going_on_is_left_alone(go: Go, tmp_path: Path, again: dict[str, bool]) -> None:
    go("run", steps=2, checkpoint_every=1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with (
        loop._alone_in(tmp_path / "run", True),
        pytest.raises(FileExistsError, match=r"a run is going on|not empty"),
    ):
        go("run", steps=2, checkpoint_every=1, **again)
    assert before == {path: path.read_bytes() for path in before}
    go("run", steps=2, overwrite=True)
