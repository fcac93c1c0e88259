"""Which backend serves, who chose it, and what is said where the compiled part is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.ops.cases import compiled
from undertow import ops
from undertow.ops import backends, cpu


def test_an_unknown_backend_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"unknown backend 'cuda'; expected one of 'reference', 'cpu'"), \
            ops.backend("cuda"):  # fmt: skip
        pass


@pytest.mark.skipif(not compiled, reason="undertow was installed without its compiled part")
def test_backends_nest_and_are_left_again(monkeypatch):
    monkeypatch.delenv("UNDERTOW_BACKEND", raising=False)
    with ops.backend("reference"):
        with ops.backend("cpu"):
            assert ops.backend_info().name == "cpu"
        assert ops.backend_info().name == "reference"
        assert "undertow.ops.backend" in ops.backend_info().reason


@pytest.mark.skipif(not compiled, reason="undertow was installed without its compiled part")
def test_an_unknown_instruction_set_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"no instruction set 'mmx' here; expected one of .*'portable'"), \
            cpu.instruction_set("mmx"):  # fmt: skip
        pass
    with cpu.instruction_set("portable"):
        assert ops.backend_info().instruction_set == "portable"


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UNDERTOW_")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **env})


SHORT_CALL = """
import torch
from undertow import ops
def call():
    return ops.recurrence(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 4), torch.ones(2, 4), torch.ones(2, 4))
"""


def test_the_environment_chooses():
    shown = python(SHORT_CALL + "call(); print(ops.backend_info())", UNDERTOW_BACKEND="reference")
    assert shown.stdout.startswith("reference"), shown
    assert "chosen by UNDERTOW_BACKEND" in shown.stdout
    assert not shown.stderr
    wrong = python(SHORT_CALL + "call()", UNDERTOW_BACKEND="fast")
    assert "ValueError: UNDERTOW_BACKEND: unknown backend 'fast'; expected one of 'reference', 'cpu'" in wrong.stderr


def test_without_the_compiled_part_one_warning_says_why():
    code = "import sys; sys.modules['undertow._C'] = None" + SHORT_CALL
    shown = python(code + "call(); call(); print(ops.backend_info())")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("reference"), shown
    assert shown.stderr.count("RuntimeWarning") == 1
    assert "no compiled part" in shown.stderr
    assert "C++ compiler" in shown.stderr
    asked = python(code + "call()", UNDERTOW_BACKEND="cpu")
    assert "RuntimeError: UNDERTOW_BACKEND: the 'cpu' backend cannot run: " in asked.stderr


def test_the_import_is_light():
    code = "import sys, undertow.ops; print([m for m in ('transformers', 'accelerate', 'sympy') if m in sys.modules])"
    assert python("import torch; " + code).stdout.strip() in ("[]", "['sympy']")


def test_info_counts_torchs_threads():
    torch.set_num_threads(1)
    info = ops.backend_info()
    assert info.threads == 1
    assert info.compiled == (backends.extension is not None)
    assert info.name in str(info)
