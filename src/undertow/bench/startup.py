"""Suite `startup`: what a person waits for before anything happens, in processes of their own.

======== =============================================================================================================
import   `import undertow` beside `import torch`; its language models beside transformers'
forward  a first forward pass of layers, from the process's start on: ours beside nn.LSTM, and sru, which compiles C++
         when it is first imported (`cold`: into a new folder) and loads that afterwards (`warm`)
======== =============================================================================================================
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from undertow.bench.pairs import OURS
from undertow.bench.peers import absent
from undertow.bench.record import Record
from undertow.bench.suites import Cases, Options

PEERS = ("torch", "transformers", "lstm", "sru")

CASES: Cases = {"import": ("torch", "transformers"), "forward": ("lstm", "sru")}
SMOKE: Cases = {"import": ("torch",), "forward": ("lstm",)}

_FIRST = "import torch; from {module} import {layers}; {layers}(64, 64{more})(torch.zeros(8, 2, 64))"
_SRU = _FIRST.format(module="sru", layers="SRUpp", more=", 16")


def check(case: str) -> str:
    """The name itself.

    Raises:
        ValueError: there is no such case.
    """
    if case not in CASES:
        raise ValueError(f"a case of startup is named {' or '.join(CASES)}, not {case!r}")
    return case


def run(cases: Cases, options: Options, record: Record) -> None:
    """Measure seconds from the start of a Python process to its end; less is better.

    What `import torch` takes is taken off too, turn by turn, where ours loads it (`beyond_torch`).
    """
    for case, peers in cases.items():
        if check(case) == "import":
            _imports(peers, options, record)
        else:
            _forward(peers, options, record)


def _imports(peers: tuple[str, ...], options: Options, record: Record) -> None:
    codes = {"undertow": "import undertow", "layers": "import undertow.nn", "nothing": "pass"}
    if "torch" in peers:
        codes["torch"] = "import torch"
    if "transformers" in peers:
        codes |= {
            "models": "from undertow.models import SRUppForCausalLM",
            "transformers": "from transformers import LlamaForCausalLM",
        }
    record.say(f"startup, import: {', '.join(codes)}")
    spent = _in_turns(codes, options)
    pairs = [("import", "undertow", "nothing", "python alone")]
    if "torch" in peers:
        pairs += [("import", "undertow", "torch", "import torch"), ("import_nn", "layers", "torch", "import torch")]
    if "transformers" in peers:
        pairs.append(("import_models", "models", "transformers", "transformers LlamaForCausalLM"))
    for metric, mine, theirs, name in pairs:
        record.spent("startup", "import", f"{metric}_seconds", {OURS: spent[mine], name: spent[theirs]})
    if "torch" in peers:
        beyond = [mine - theirs for mine, theirs in zip(spent["layers"], spent["torch"], strict=True)]
        record.spent("startup", "import", "import_nn_beyond_torch_seconds", {OURS: beyond})


def _forward(peers: tuple[str, ...], options: Options, record: Record) -> None:
    codes = {OURS: _FIRST.format(module="undertow.nn", layers="SRUpp", more=", 16")}
    if "lstm" in peers:
        codes["torch LSTM"] = _FIRST.format(module="torch.nn", layers="LSTM", more="")
    with tempfile.TemporaryDirectory() as folder:
        cold: dict[str, list[float]] = {}
        environment = {"TORCH_EXTENSIONS_DIR": folder}
        if "sru" in peers and (why := absent("sru")) is not None:
            record.skip("startup", "forward", "sru", why)
        elif "sru" in peers:
            record.say("startup, forward: sru compiles, once")
            try:
                cold["sru dev6, cold"] = [_run(_SRU, environment)]
                codes["sru dev6, warm"] = _SRU
            except RuntimeError as error:
                record.failed("startup", "forward", "sru", error)
        record.say(f"startup, forward: {', '.join(codes)}")
        spent = _in_turns(codes, options, environment)
    record.spent("startup", "forward", "first_forward_seconds", spent | cold)


def _in_turns(codes: Mapping[str, str], options: Options, environment: Mapping[str, str] | None = None
              ) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of each program, turn by turn; the first turn, which reads files from disk, does not count."""
    spent: dict[str, list[float]] = {name: [] for name in codes}
    for turn in range(0 if options.smoke else -1, options.repeats):
        for name in list(codes) if turn % 2 == 0 else list(codes)[::-1]:
            took = _run(codes[name], environment or {})
            if turn >= 0:
                spent[name].append(took)
    return spent


def _run(code: str, environment: Mapping[str, str]) -> float:
    """Seconds of a process; where it fails, what it said last."""
    start = time.perf_counter()
    # Ninja is found beside the interpreter, as it would be in an activated environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=os.environ | {"PATH": path} | dict(environment),
        capture_output=True, text=True, cwd=tempfile.gettempdir(),
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1])
    return time.perf_counter() - start
