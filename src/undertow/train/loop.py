"""The training loop: read a piece, step, carry the state on; log, evaluate, save, stop and continue exactly."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import inspect
import json
import math
import os
import random
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from undertow.data.files import atomic_folder, recover
from undertow.evaluate.evaluator import EvalResult, evaluate
from undertow.evaluate.protocol import carries_state, load_state, read, token_nll, unwrap
from undertow.models.state import fingerprint
from undertow.train import checkpoint
from undertow.train.checkpoint import CheckpointError
from undertow.train.config import BOUND, LOOSE, TrainConfig
from undertow.train.optim import learning_rate, load_optimizer, make_optimizer, progress
from undertow.train.progress import Talk, duration, rate, silent_bars

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Everything a run writes into its folder; --overwrite removes these and nothing else.
PARTS = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "best", "tensorboard")
LOCK = ".lock"
LN2 = math.log(2)

# Of a model's configuration, what may differ between a checkpoint and the run that goes on from it. A base is known by
# its weights, which are compared, and may have been moved.
_UNSAID = (
    "transformers_version", "auto_map", "torch_dtype", "dtype", "architectures", "use_cache", "base",
    "base_model_name_or_path", "peft_version",
)  # fmt: skip


@dataclass
class TrainResult:
    """How a run ended. ``best`` is the validation line of metrics.jsonl that was lowest, None without validation."""

    out: Path
    step: int
    tokens: int
    seconds: float
    loss: float | None
    best: dict[str, Any] | None
    parameters: int
    trainable: int
    """Parameters that were trained; the others were left as they came."""
    interrupted: int | None = None
    """The number of the signal that stopped the run, None where it reached its end."""


def train(
    model: nn.Module,
    train_store: Any,
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    valid_store: Any = None,
    tokenizer: Any = None,
    resume: bool | str = False,
    overwrite: bool = False,
    record: dict[str, Any] | None = None,
    quiet: bool = False,
    command: str = "train",
) -> TrainResult:
    """Train a causal language model by truncated back-propagation, its state carried from piece to piece.

    Every optimiser step reads ``window`` tokens of each of ``batch_size`` rows; row b goes on where it was left, with
    the state it was left in, detached. A model whose ``forward`` takes no ``resets`` reads every window on its own.
    The loss is the sum of the targets' negative log-likelihood over their number in the *whole* step, so that neither
    accumulation nor the number of devices changes it. Random numbers of a step (dropout) are drawn from a generator
    seeded by run, step and group of rows: they do not depend on where the run was interrupted or on its devices.

    The folder ``out`` gets ``config.yaml``, ``metrics.jsonl`` (one JSON object a line), ``checkpoints/``, ``best/``
    (a folder for ``from_pretrained``, with the tokenizer: the weights with the lowest validation loss, or the last
    ones without validation), ``tensorboard/`` and at the end ``summary.json``. Parameters that take no gradient when
    training begins are not trained, and not written into checkpoints either: whoever resumes gives them again.

    Args:
        model: see :mod:`undertow.evaluate.protocol`; trained in place. At the end it holds the last weights.
        train_store: the text, an ``undertow.data.TokenStore``.
        config: how.
        out: the run's folder, made if missing.
        valid_store: the text to evaluate on during training.
        tokenizer: saved beside the weights.
        resume: go on from the newest checkpoint of ``out``, or from the one named (``"step-00000200"``). On CPU and
            with a budget in steps, the losses are bit for bit those of a run that never stopped.
        overwrite: remove the run that is in ``out`` first.
        record: what to write as ``config.yaml``; by default ``config``.
        quiet: no progress on the terminal.
        command: the command of undertow to name when telling how a run that was stopped goes on.

    Raises:
        FileExistsError: ``out`` is not empty and neither resume nor overwrite was asked for.
        CheckpointError: nothing to resume from, or a checkpoint that is damaged or of another configuration.
        FloatingPointError: loss or gradient are not finite; the weights are those before that step.
        ValueError: shapes, vocabulary or batch sizes that do not fit; text shorter than one window.
        OSError: a checkpoint could not be written; those before it stand.
    """
    run = _Run(model, train_store, config, Path(out), valid_store, tokenizer, quiet, command)
    check_out(run.out, bool(resume), overwrite)
    run.accelerator.wait_for_everyone()
    with _alone_in(run.out, run.main), _catch_signals() as stop:
        try:
            run.open(resume, overwrite, record)
            return run.loop(stop)
        finally:
            run.close()


def check_out(out: Path, resume: bool, overwrite: bool) -> None:
    """Whether a run may start in ``out``; changes nothing.

    Raises:
        FileExistsError, NotADirectoryError, CheckpointError, ValueError: see :func:`train`.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file, and a run wants a folder")
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other")
    if resume and not checkpoint.steps_in(out / "checkpoints"):
        raise CheckpointError(f"there is no checkpoint in {out} to resume from; start without --resume")
    if resume or not out.is_dir() or not any(path.name != LOCK for path in out.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"the output folder {out} is not empty: --resume goes on with the run in it, --overwrite starts it anew, "
            "--out takes another"
        )
    if not (out / "metrics.jsonl").exists() and not (out / "config.yaml").exists():
        raise FileExistsError(f"{out} does not hold a run, so it is not overwritten; take another --out")


class _Run:
    """One run: what is carried from step to step."""

    def __init__(
        self,
        model: nn.Module,
        train_store: Any,
        config: TrainConfig,
        out: Path,
        valid_store: Any,
        tokenizer: Any,
        quiet: bool,
        command: str,
    ) -> None:
        from undertow.data.stream import Stream

        self.command = command
        self.config, self.out, self.valid_store, self.tokenizer = config, out, valid_store, tokenizer
        self.store = train_store
        self.accelerator = _accelerator(config, out)
        self.main = self.accelerator.is_main_process
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.device = self.accelerator.device
        self.groups, self.rows = _split(config, self.world)
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        for store in (train_store, valid_store):
            if store is not None and vocabulary is not None:
                store.check_vocabulary(vocabulary)
        self.stream = Stream(
            train_store, config.batch_size, config.window, seed=config.seed, rank=self.rank, world_size=self.world
        )
        if config.gradient_checkpointing:
            # Its name changes with transformers 6; its first argument does not.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable: Any = next((getattr(model, name) for name in names if hasattr(model, name)), None)
            if enable is None:
                raise ValueError(f"{type(model).__name__} has no gradient checkpointing; leave it out")
            enable({"use_reentrant": False})
        self.stateful = carries_state(model) and config.carry_state
        self.takes_resets = carries_state(model)
        self.plain = model
        self.model = self.accelerator.prepare(model)
        self.plain = unwrap(self.model)
        self.optimizer = make_optimizer(self.plain, config)
        self.trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.parameters = sum(p.numel() for p in self.plain.parameters())
        self.trainable = sum(p.numel() for p in self.trained)
        frozen = {name: p for name, p in self.plain.named_parameters() if not p.requires_grad}
        self.frozen = fingerprint(frozen) if frozen else None
        self.talk = Talk(config.steps if config.minutes is None else None, quiet or not self.main)
        self.metrics: Any = None
        # Whether the loss may be left to the model; None: to be found out at the first piece.
        self.own_loss: bool | None = None if _takes_targets(self.plain) else False
        # The run's position: all of it goes into a checkpoint.
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.states: list[Any] = [None] * self.groups
        self.since = {"nll": 0.0, "targets": 0, "seconds": 0.0}  # since the last line of metrics.jsonl
        self.evaluated = 0  # the step that was last evaluated
        self.best: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def loop(self, stop: _Stop) -> TrainResult:
        config = self.config
        saved: int | None = None
        while True:
            stopped = self._agree(stop)
            finished = progress(config, self.step, self.seconds) >= 1
            due = config.eval_every and (finished or self.step % config.eval_every == 0)
            if due and self.step > self.evaluated and not stopped and self.valid_store is not None:
                with contextlib.suppress(_Interrupted):
                    self._evaluate(stop)
                stopped = self._agree(stop)
            due = finished or stopped or (config.checkpoint_every and self.step % config.checkpoint_every == 0)
            if due and self.step > 0 and saved != self.step and self.step != self.resumed:
                self._save()
                saved = self.step
            if finished or stopped:
                break
            self._step()
        if finished and not stopped:
            self._finish()
        elif self.main:
            self._say_how_to_resume(stop)
        loss = self.last["loss"] if self.last else None
        number = stop.number or (signal.SIGTERM if stopped else None)
        return TrainResult(
            self.out, self.step, self.tokens, self.seconds, loss, self.best, self.parameters, self.trainable,
            number if stopped else None,
        )  # fmt: skip

    def _step(self) -> None:
        """One optimiser step."""
        begun = time.perf_counter()
        config, step = self.config, self.step + 1
        piece = next(self.stream)
        targets = int((piece.targets != -100).sum())
        if self.world > 1:
            targets = int(self._sum(targets))
        lr = learning_rate(config, self.step, self.seconds)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["pace"]
        self.model.train()
        losses: list[Tensor] = []
        for index in range(self.groups):
            rows = slice(index * self.rows, (index + 1) * self.rows)
            ids, wanted, resets = (t[rows].to(self.device) for t in (piece.input_ids, piece.targets, piece.resets))
            _seed(config.seed, step, self.rank * self.groups + index)
            last = index == self.groups - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                loss = self._loss(index, ids, wanted, resets, targets)
                # Data parallelism averages gradients over ranks; the loss is already over the targets of all of them.
                self.accelerator.backward(loss * self.world if self.world > 1 else loss)
            losses.append(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, config.clip or math.inf))
        total = float(torch.stack(losses).cpu().double().sum()) * targets
        if self.world > 1:
            total = float(self._sum(total))
        if not math.isfinite(total) or not math.isfinite(norm):
            raise FloatingPointError(self._diverged(step, total / targets, norm, lr))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        took = time.perf_counter() - begun
        self.step, self.tokens, self.seconds = step, self.tokens + targets, self.seconds + took
        self.since["nll"] += total
        self.since["targets"] += targets
        self.since["seconds"] += took
        self._log(lr, norm)

    def _loss(self, index: int, ids: Tensor, targets: Tensor, resets: Tensor, count: int) -> Tensor:
        """The group's share of the step's mean loss, in nats; moves the group's state on."""
        if self.own_loss is not False:
            labels: dict[str, Any] = {"labels": targets, "shift_labels": targets, "num_items_in_batch": count}
        else:
            labels = {}
        state = self.states[index] if self.stateful else None
        with self._autocast():
            reading = read(self.model, ids, state=state, resets=resets if self.takes_resets else None, **labels)
        if self.stateful:
            reading.state.detach_()
            self.states[index] = reading.state
        if reading.logits is None:
            # A model that leaves the logits out has made the loss of the labels as they are; there is nothing to check.
            if reading.loss is None:
                raise ValueError(f"{type(self.plain).__name__} returned neither logits nor a loss")
            return reading.loss
        if self.own_loss is None or self.own_loss is False or reading.loss is None:
            from_logits = token_nll(reading.logits, targets).sum() / count
            if self.own_loss is None and reading.loss is not None:
                # Some models shift labels that were already shifted, or add terms of their own: look, once.
                own, true = float(reading.loss.detach()), float(from_logits.detach())
                self.own_loss = math.isclose(own, true, rel_tol=1e-2) or not math.isfinite(true)
            else:
                self.own_loss = False
            if not self.own_loss:
                return from_logits
        assert reading.loss is not None
        return reading.loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _sum(self, value: float | Tensor) -> Tensor:
        """Over all ranks."""
        tensor = torch.as_tensor(value, dtype=torch.float64).reshape(1).to(self.device)
        return self.accelerator.reduce(tensor, "sum")[0]

    def _agree(self, stop: _Stop) -> bool:
        """Whether any rank was told to stop. Makes rank 0's clock everyone's."""
        if self.world == 1:
            return stop.number is not None
        mine = [float(stop.number is not None), self.seconds if self.rank == 0 else 0.0]
        both = self.accelerator.reduce(torch.tensor(mine, dtype=torch.float64, device=self.device), "sum")
        self.seconds = float(both[1])
        return bool(both[0] > 0)

    # -- what it tells -----------------------------------------------------------------------------------------------

    def _log(self, lr: float, norm: float) -> None:
        config, since = self.config, self.since
        share = progress(config, self.step, self.seconds)
        per_byte = self.stream.tokens_per_epoch / self.store.bytes if self.store.bytes else None
        bits = since["nll"] / since["targets"] / LN2
        pace = since["targets"] / max(since["seconds"], 1e-9)
        left = self.seconds * (1 - share) / max(share, 1e-9)
        shown, unit = (bits * per_byte, "byte") if per_byte else (bits, "token")
        self.talk.step(self.step, share, shown, unit, pace, left)
        if self.step % config.log_every and share < 1:
            return
        line = {
            "kind": "train",
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "loss": since["nll"] / since["targets"],
            "bits_per_token": bits,
            "bits_per_byte": bits * per_byte if per_byte else None,
            "learning_rate": lr,
            "grad_norm": norm,
            "tokens_per_second": round(pace, 1),
        }
        self.last = line
        self._write(line)
        self.since = {"nll": 0.0, "targets": 0, "seconds": 0.0}

    def _write(self, line: dict[str, Any]) -> None:
        if not self.main:
            return
        self.metrics.write(json.dumps(line) + "\n")
        self.metrics.flush()
        if self.config.tensorboard:
            kind = line["kind"]
            values = {f"{kind}/{k}": v for k, v in line.items() if isinstance(v, float) and k != "seconds"}
            self.accelerator.log(values, step=line["step"])

    def _diverged(self, step: int, loss: float, norm: float, lr: float) -> str:
        good = checkpoint.newest_good(self.out / "checkpoints")
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        where = f"the last good checkpoint is {good}" if good else "no checkpoint had been written yet"
        return (
            f"{what} at step {step} (learning rate {lr:.3g}): stopped before the weights were touched\n"
            f"{where}; try a lower --learning_rate, a longer --warmup or a smaller --clip"
        )

    def _say_how_to_resume(self, stop: _Stop) -> None:
        name = signal.Signals(stop.number).name if stop.number else "another process"
        self.talk.line(
            f"stopped by {name} after step {self.step}; "
            + (
                f"checkpoint: {self.out / 'checkpoints' / f'step-{self.step:08d}'}"
                if self.step
                else "nothing to save yet"
            )
        )
        words = ["undertow", self.command, "--config", str(self.out / "config.yaml"), "--resume"]
        if "out" not in self.record:
            words += ["--out", str(self.out)]
        command = shlex.join(words) if "data" in self.record else "train(..., resume=True)"
        self.talk.line(f"go on with: {command}")

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self, stop: _Stop) -> None:
        """On rank 0; the others meet it again at the next step."""
        if self.main:

            def look(scored: int, targets: int) -> None:
                if stop.number is not None:
                    raise _Interrupted
                self.talk.busy(f"evaluating: {scored / targets:.0%}")

            result = evaluate(
                self.plain,
                self.valid_store,
                batch_size=self.rows,
                window=self.config.window,
                max_tokens=self.config.eval_tokens,
                precision=self.config.precision,
                carry_state=self.config.carry_state,
                progress=look,
            )
            self._keep(result)
        self.evaluated = self.step

    def _keep(self, result: EvalResult) -> None:
        better = self.best is None or result.loss < self.best["loss"]
        line = {
            "kind": "valid",
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "loss": result.loss,
            "bits_per_token": result.bits_per_token,
            "bits_per_byte": result.bits_per_byte,
            "perplexity": result.perplexity,
            "targets": result.targets,
            "best": better,
        }
        if better:
            self.best = line
            self._save_best()
        self._write(line)
        bits, unit = (
            (result.bits_per_byte, "byte") if result.bits_per_byte is not None else (result.bits_per_token, "token")
        )
        self.talk.evaluated(bits, unit)
        self.talk.line(f"step {self.step}  valid {bits:.4f} bits/{unit}{'  best so far' if better else ''}")

    def _save_best(self) -> None:
        with atomic_folder(self.out / "best") as folder, silent_bars():
            self.plain.save_pretrained(folder)  # type: ignore[operator]
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        states = [(self.rank * self.groups + i, _to_bytes(s)) for i, s in enumerate(self.states) if s is not None]
        if self.world > 1:
            states = gather_object(states)
        if not self.main:
            return
        position = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "since": self.since,
            "evaluated": self.evaluated,
            "best": self.best,
            "last": self.last,
            "stream": self.stream.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": _random_state(),
        }
        writers: dict[str, Callable[[Path], object]] = {
            "model.safetensors": self._save_weights,
            "trainer.pt": lambda path: torch.save(position, path),
        }
        for group, data in states:
            writers[f"state-{group:04d}.safetensors"] = lambda path, data=data: path.write_bytes(data)  # type: ignore[misc]
        folder = self.out / "checkpoints"
        try:
            checkpoint.save(folder, self.step, writers, {"run": self._facts()}, self.config.keep)
        except OSError as error:
            good = checkpoint.newest_good(folder)
            stands = f"the last good checkpoint stands: {good}" if good else "there is no checkpoint before it"
            raise OSError(f"{error}\n{stands}") from error

    def _save_weights(self, path: Path) -> None:
        """What training changes: all of a model that trains as a whole, else its trained parameters and its buffers."""
        if self.frozen is None:
            save_model(self.plain, str(path))
            return
        save_file({name: tensor.detach().contiguous() for name, tensor in self._changing().items()}, path)

    def _changing(self) -> dict[str, Tensor]:
        """Trained parameters, and buffers that are saved."""
        kept: dict[str, Tensor] = {name: p for name, p in self.plain.named_parameters() if p.requires_grad}
        there = self.plain.state_dict().keys()
        return kept | {name: b for name, b in self.plain.named_buffers() if name in there}

    def _load_weights(self, path: Path) -> None:
        """What `_save_weights` has written."""
        if self.frozen is None:
            missing, unexpected = load_model(self.plain, str(path), strict=False)
            unfit = {*missing, *unexpected}
        else:
            kept, saved = self._changing(), load_file(path)
            unfit = kept.keys() ^ saved.keys()
            with torch.no_grad():
                for name in kept.keys() & saved.keys():
                    kept[name].copy_(saved[name])
        if unfit:
            raise CheckpointError(f"checkpoint {path.parent} does not fit the model: {sorted(unfit)[:3]}")

    def _facts(self) -> dict[str, Any]:
        """What a run has to have in common with a checkpoint to go on from it."""
        shapes = {name: list(p.shape) for name, p in self.plain.named_parameters()}
        model_config: Any = getattr(self.plain, "config", None)
        described = model_config.to_dict() if hasattr(model_config, "to_dict") else {}
        described = {key: value for key, value in described.items() if not key.startswith("_") and key not in _UNSAID}
        return {
            "train": {name: getattr(self.config, name) for name in (*BOUND, *LOOSE)},
            "rows_per_group": self.rows,
            "model_class": type(self.plain).__name__,
            "model": json.loads(json.dumps(described, default=str)),
            "shapes": shapes,
            "frozen": self.frozen,
            "data": self.store.content,
        }

    def _fits(self, path: Path, manifest: dict[str, Any]) -> list[str]:
        """Make sure that a checkpoint is of this run; returns what differs without harm.

        Raises:
            CheckpointError: it is of another configuration.
        """
        theirs, ours = manifest["run"], json.loads(json.dumps(self._facts()))
        other: list[str] = []
        if theirs["model_class"] != ours["model_class"]:
            other.append(f"model {theirs['model_class']} there, {ours['model_class']} here")
        there, here = _flat(theirs["model"]), _flat(ours["model"])
        for key in sorted(there.keys() & here.keys()):
            if there[key] != here[key]:
                other.append(f"model.{key} {there[key]} there, {here[key]} here")
        if not other and theirs["shapes"] != ours["shapes"]:
            names = sorted(theirs["shapes"].keys() | ours["shapes"].keys())
            name = next(n for n in names if theirs["shapes"].get(n) != ours["shapes"].get(n))
            other.append(f"{name} has shape {theirs['shapes'].get(name)} there, {ours['shapes'].get(name)} here")
        if not other and theirs.get("frozen") != ours["frozen"]:
            other.append("the weights that are not trained are others there than here")
        other += [
            f"{name} {theirs['train'].get(name)} there, {ours['train'][name]} here"
            for name in BOUND
            if theirs["train"].get(name) != ours["train"][name]
        ]
        if self.stateful and theirs["rows_per_group"] != ours["rows_per_group"]:
            other.append(
                f"{theirs['rows_per_group']} rows at once there, {ours['rows_per_group']} here: "
                f"--micro_batch_size {theirs['rows_per_group']} goes on with it"
            )
        if theirs["data"] != ours["data"]:
            other.append("other text or another tokenizer there than here")
        if other:
            raise CheckpointError(
                f"checkpoint {path} is of another configuration: {'; '.join(other[:3])}"
                + ("; …" if len(other) > 3 else "")
                + f"\n{checkpoint.offer(path.parent, path) if self._fits_before(path) else 'it was left as it is'}"
            )
        return [
            f"{name} {ours['train'][name]} instead of {theirs['train'].get(name)}"
            for name in LOOSE
            if theirs["train"].get(name) != ours["train"][name]
        ]

    def _fits_before(self, path: Path) -> bool:
        """Whether a good checkpoint before ``path`` is of this configuration."""
        before = checkpoint.newest_good(path.parent, checkpoint.step_of(path))
        if before is None:
            return False
        try:
            self._fits(before, checkpoint.check(before))
        except CheckpointError:
            return False
        return True

    # -- beginning and end -------------------------------------------------------------------------------------------

    def open(self, resume: bool | str, overwrite: bool, record: dict[str, Any] | None) -> None:
        """Make the folder, and take up the checkpoint where there is one to go on from."""
        self.resumed: int | None = None
        self.record = record if record is not None else asdict(self.config)
        if resume:
            self._resume(None if resume is True else str(resume))
        if self.main:
            if overwrite:
                for part in PARTS:
                    path = self.out / part
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self.out.mkdir(parents=True, exist_ok=True)
            recover(self.out)
            write_yaml(self.out / "config.yaml", self.record)
            path = self.out / "metrics.jsonl"
            if resume:
                _cut_metrics(path, self.step)
            self.metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        if self.config.tensorboard:
            settings = {"purge_step": self.step + 1} if resume else {}
            self.accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": settings})

    def _resume(self, which: str | None) -> None:
        folder = self.out / "checkpoints"
        if self.main:
            recover(folder)
        self.accelerator.wait_for_everyone()
        path, manifest = checkpoint.choose(folder, which)
        changed = self._fits(path, manifest)
        position = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
        self._load_weights(path / "model.safetensors")
        load_optimizer(self.optimizer, position["optimizer"])
        self.stream.load_state_dict(position["stream"])
        for name in ("step", "tokens", "seconds", "since", "evaluated", "best", "last"):
            setattr(self, name, position[name])
        if self.stateful:
            for index in range(self.groups):
                file = path / f"state-{self.rank * self.groups + index:04d}.safetensors"
                self.states[index] = load_state(self.plain, file)
        _set_random_state(position["rng"])
        self.resumed = self.step
        self.accelerator.wait_for_everyone()
        if self.main:
            for later in checkpoint.steps_in(folder):
                if checkpoint.step_of(later) > self.step:
                    # Of a course that is being left: nothing is lost, and --resume will not mix the two.
                    aside = later.with_name(f"aside-{later.name}-{time.time_ns()}")
                    later.rename(aside)
                    self.talk.line(f"{later} was put aside as {aside.name}")
            self.talk.line(f"going on from {path}")
            if changed:
                self.talk.line(f"not the same course as before: {', '.join(changed)}")

    def _finish(self) -> None:
        if not self.main:
            return
        if self.best is None:
            self._save_best()
        summary = {
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
            "steps": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
            "train": self.last,
            "best": self.best,
            "best_model": str(self.out / "best"),
        }
        text = json.dumps(summary, indent=1) + "\n"
        temporary = self.out / ".summary.json"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.out / "summary.json")
        best = ""
        if self.best:
            unit = "byte" if self.best["bits_per_byte"] is not None else "token"
            best = f", best valid {self.best[f'bits_per_{unit}']:.4f} bits/{unit}"
        self.talk.line(
            f"done: {self.step} steps, {self.tokens} tokens in {duration(self.seconds)}, "
            f"{rate(summary['tokens_per_second'])}{best}; model: {self.out / 'best'}"
        )

    def close(self) -> None:
        self.talk.close()
        if self.metrics is not None:
            self.metrics.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()


# -- helpers ---------------------------------------------------------------------------------------------------------


class _Interrupted(Exception):
    """Raised inside an evaluation that should not be finished."""


@contextlib.contextmanager
def _alone_in(out: Path, main: bool) -> Iterator[None]:
    """Keep a second run out of a folder in which one is going on."""
    if not main or fcntl is None:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"a run is going on in {out}; wait for its end, or take another --out") from None
        except OSError:  # a file system without locks
            pass
        yield


@dataclass
class _Stop:
    number: int | None = None


@contextlib.contextmanager
def _catch_signals() -> Iterator[_Stop]:
    """Note SIGINT and SIGTERM instead of dying; a second Ctrl-C raises KeyboardInterrupt."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, _: Any) -> None:
        if stop.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.number = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _accelerator(config: TrainConfig, out: Path) -> Accelerator:
    device = config.device
    if device not in (None, "cpu") and not str(device).startswith("cuda"):
        raise ValueError(f"device should be cpu or cuda, not {device!r}")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, and torch finds no CUDA device")
    return Accelerator(
        cpu=device == "cpu",
        mixed_precision="no",  # autocast is put around the forward pass here, where it is seen
        # While rank 0 evaluates and saves, the others wait longer than the usual ten minutes, if need be.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],
        log_with="tensorboard" if config.tensorboard else None,
        project_config=ProjectConfiguration(project_dir=str(out), logging_dir=str(out)),
    )


@atexit.register
def _close_process_group() -> None:
    """What Accelerate opened lasts as long as the process, for the next run in it.

    Every rank has to close it before the interpreter goes: its threads outlive that otherwise, and now and then abort
    the process.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _split(config: TrainConfig, world: int) -> tuple[int, int]:
    """(groups a rank, rows a group)."""
    if config.batch_size % world:
        raise ValueError(f"batch_size {config.batch_size} is not divisible by the number of processes, {world}")
    share = config.batch_size // world
    rows = min(config.micro_batch_size or share, share)
    if share % rows:
        raise ValueError(f"the {share} rows a device has to read are not divisible by micro_batch_size {rows}")
    return share // rows, rows


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by names such as ``outer.inner``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in _UNSAID:
            flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _takes_targets(model: nn.Module) -> bool:
    """Whether ``forward`` may know what to do with labels that are already shifted."""
    parameters = inspect.signature(model.forward).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "labels" in parameters and ("shift_labels" in parameters or anything)


def _seed(seed: int, step: int, group: int) -> None:
    digest = hashlib.blake2b(f"{seed} {step} {group}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])


def _to_bytes(state: Any) -> bytes:
    if not hasattr(state, "save"):
        raise TypeError(f"the model's state, {type(state).__name__}, has no save(path), so no checkpoint can hold it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        try:
            state.save(path)
        except SafetensorError as error:  # what a full disk looks like from there
            raise OSError(f"could not write the carried state to {folder} for the checkpoint: {error}") from error
        return path.read_bytes()


def _cut_metrics(path: Path, step: int) -> None:
    """Drop lines after ``step``, and a last line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    temporary = path.with_name(".metrics.jsonl")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def write_yaml(path: Path, tree: dict[str, Any]) -> None:
    """Write options in the order they are declared."""
    import yaml

    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
