"""Runs as processes: killed, told to stop, out of disk, several at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.conftest import records, text
from undertow.cli.main import main
from undertow.train import checkpoint

SETTINGS: dict[str, Any] = {
    "data": ["text.txt"],
    "steps": 40,
    "batch_size": 4,
    "window": 16,
    "log_every": 1,
    "eval_every": 6,
    "eval_tokens": 100,
    "checkpoint_every": 4,
    "keep": 2,
    "device": "cpu",
    "learning_rate": 0.01,
    "model": {
        "hidden_size": 16,
        "projection_size": 8,
        "num_hidden_layers": 2,
        "attention_window": 20,
        "hidden_dropout": 0.1,
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text and a configuration, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process: bit for bit is a promise for equal threads
    (tmp_path / "text.txt").write_bytes(text(3, 600))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(SETTINGS))
    return tmp_path


def start(*words: str, **more: Any) -> subprocess.Popen[str]:
    """``undertow train`` with the configuration and these words."""
    command = [sys.executable, "-m", "undertow", "train", "--config", "c.yaml", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    """Return as soon as metrics.jsonl has a line of that step."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit and process.poll() is None:
        try:
            lines = (out / "metrics.jsonl").read_text().splitlines()
            if any(f'"step": {step},' in line for line in lines[-5:]) or len(lines) > step + 8:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.002)
    raise AssertionError(f"no step {step}; the process said: {process.communicate()[1]}")


def test_kill_at_random_moments_loses_nothing(folder: Path) -> None:
    """Killed (SIGKILL) wherever it stands, and gone on: the same losses, bit for bit, as the run that never stopped."""
    assert main(["train", "--config", "c.yaml", "--out", "whole", "--quiet"]) == 0
    whole = records(folder / "whole")
    chosen = random.Random(5)
    words = ["--out", "parts", "--quiet"]
    for low, high in ((5, 14), (20, 34)):
        process = start(*words, *(["--resume"] if (folder / "parts").exists() else []))
        wait_for_step(process, folder / "parts", chosen.randint(low, high))
        time.sleep(chosen.random() * 0.02)
        process.kill()
        process.wait()
        good = checkpoint.newest_good(folder / "parts" / "checkpoints")
        assert good is not None
        assert good == checkpoint.steps_in(folder / "parts" / "checkpoints")[-1], "a kill left a bad checkpoint"
    assert main(["train", "--config", "c.yaml", *words, "--resume"]) == 0
    assert records(folder / "parts") == whole
    name = "checkpoints/step-00000040/model.safetensors"
    assert (folder / "parts" / name).read_bytes() == (folder / "whole" / name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop(folder: Path, number: signal.Signals) -> None:
    process = start("--out", "run", "--steps", "100000", "--eval_every", "0", "--checkpoint_every", "0")
    wait_for_step(process, folder / "run", 3)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    found = checkpoint.steps_in(folder / "run" / "checkpoints")
    assert len(found) == 1
    checkpoint.check(found[0])
    assert f"stopped by {number.name} after step {checkpoint.step_of(found[0])}" in said
    assert "go on with: undertow train --config run/config.yaml --resume" in said
    last = checkpoint.step_of(found[0])
    steps = [line[1] for line in records(folder / "run")]
    assert steps == list(range(1, last + 1))
    more = ["--steps", str(last + 2), "--eval_every", "0", "--quiet"]
    assert main(["train", "--config", "run/config.yaml", "--resume", *more]) == 0
    assert [line[1] for line in records(folder / "run")] == [*steps, last + 1, last + 2]


def test_disk_that_is_really_full(folder: Path) -> None:
    """No file may grow beyond a limit that the metrics stay under and the weights do not."""
    assert main(["train", "--config", "c.yaml", "--out", "run", "--steps", "4", "--quiet"]) == 0
    code = (
        "import resource, signal, sys\n"
        "from undertow.cli.main import main\n"
        "import undertow.train.loop as loop\n"
        "opened = loop._Run.open\n"
        "def limited(self, *words):\n"
        "    opened(self, *words)\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "loop._Run.open = limited\n"
        "sys.exit(main(['train', '--config', 'c.yaml', '--out', 'run', '--steps', '8', '--resume',"
        " '--quiet', '--tensorboard', 'false', '--eval_every', '0']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    first, second = done.stderr.splitlines()[-2:]
    assert first.startswith("undertow: error: could not write run/checkpoints/step-00000008: ")
    assert second.endswith("the last good checkpoint stands: run/checkpoints/step-00000004")
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert main(["train", "--config", "c.yaml", "--out", "run", "--steps", "8", "--resume", "--quiet"]) == 0


def test_two_processes_are_one(folder: Path) -> None:
    """Data parallel over two processes: the losses of one; and a checkpoint of two goes on in one."""
    settings = SETTINGS | {"steps": 8, "model": SETTINGS["model"] | {"hidden_dropout": 0.1}}
    (folder / "c.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", "--config", "c.yaml", "--out", "one", "--micro_batch_size", "2", "--quiet"]) == 0
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0",
        "rank.py", "train", "--config", "c.yaml", "--out", "two",
    ]  # fmt: skip
    # What is registered first is called last. A group that is open then is left to the interpreter's end, and aborts.
    (folder / "rank.py").write_text(
        "import atexit, sys\n"
        "from torch import distributed\n"
        "atexit.register(lambda: distributed.is_initialized() and print('left open', file=sys.stderr))\n"
        "from undertow.cli.main import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "left open" not in done.stderr
    one, two = records(folder / "one"), records(folder / "two")
    assert len(one) == len(two)
    for ours, theirs in zip(two, one, strict=True):
        assert ours[:3] == theirs[:3]
        assert ours[3] == pytest.approx(theirs[3], rel=1e-5)
    assert json.loads((folder / "two" / "summary.json").read_text())["steps"] == 8
    assert sorted(os.listdir(folder / "two" / "checkpoints" / "step-00000008")) == sorted(
        os.listdir(folder / "one" / "checkpoints" / "step-00000008")
    )
    more = ["--steps", "10", "--quiet", "--resume"]
    assert main(["train", "--config", "c.yaml", "--out", "two", "--micro_batch_size", "2", *more]) == 0
    assert main(["train", "--config", "c.yaml", "--out", "one", "--micro_batch_size", "2", *more]) == 0
    assert records(folder / "two")[-1][3] == pytest.approx(records(folder / "one")[-1][3], rel=1e-5)
