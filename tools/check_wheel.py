"""Check the undertow that is installed here: its kernels run, they agree with the reference, on torch's own threads."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import time
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # idle threads sleep, so that one can see who works

import torch

import undertow
from undertow import ops
from undertow.ops import backends, cpu

B, T, d = 4, 64, 500  # work enough for two threads, and a rest that fills no vector


def installed() -> None:
    """What is imported is the installation, not a source tree."""
    places = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    for module in (undertow, backends.extension):
        assert module is not None, f"no compiled part: {ops.backend_info()}"
        file = Path(str(module.__file__)).resolve()
        assert any(place in file.parents for place in places), f"{file} is not in {places}"


def results(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs, last state and gradients of one call."""
    torch.manual_seed(0)
    shapes = [(B, T, 3, d), (B, T, d), (2, d), (2, d), (B, d)]
    u, x, *rest = (torch.randn(shape).requires_grad_() for shape in shapes)
    inputs = [u.detach().to(dtype).requires_grad_(), x.detach().to(dtype).requires_grad_(), *rest]
    with ops.backend(backend):
        h, c = ops.recurrence(*inputs)
        gradients = torch.autograd.grad(h.float().square().sum() + c.sum(), inputs)
    return [h, c, *gradients]


def agree() -> None:
    """Every instruction set that this processor has gives what the reference gives, up to rounding."""
    assert backends.extension is not None
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        expected = results("reference", dtype)
        for name in backends.extension.instruction_sets():
            with cpu.instruction_set(name):
                for got, want in zip(results("cpu", dtype), expected, strict=True):
                    error = (got - want).abs().max().item() / want.abs().max().item()
                    assert error < tolerance, f"{name}, {dtype}: off by {error}"


def threads() -> set[str]:
    """Numbers of this process's threads."""
    return set(os.listdir("/proc/self/task"))


def naps(thread: str) -> int:
    """How often a thread has gone to sleep of its own accord."""
    status = Path("/proc/self/task", thread, "status").read_text()
    return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[0])


def one_pool() -> None:
    """torch's threads do the work, no others are there, and one OpenMP runtime is loaded."""
    torch.set_num_threads(2)
    before = threads()
    torch.ones(1 << 22).add_(1)
    pool = threads() - before
    assert len(pool) == 1, f"torch was to start one thread beside the main one, not {pool}"
    (worker,) = pool
    time.sleep(0.1)
    asleep = naps(worker)
    time.sleep(0.1)
    assert naps(worker) == asleep, "torch's idle thread does not sleep"
    with torch.inference_mode(), ops.backend("cpu"):
        u, parameters = torch.randn(B, T, 3, d), torch.randn(2, 2, d)
        for _ in range(10):
            ops.recurrence(u, u[:, :, 0], *parameters)
            time.sleep(0.02)  # called at once again, it would find work before it has gone to sleep
    assert naps(worker) >= asleep + 5, "torch's thread did not do the work"
    assert threads() == before | pool, "there are other threads than torch's"
    runtimes = set(re.findall(r"\S*/lib(?:gomp|i?omp\d*)[-.]\S*", Path("/proc/self/maps").read_text()))
    assert len(runtimes) == 1, f"not one OpenMP runtime: {runtimes}"
    print("OpenMP runtime:", *runtimes)


if __name__ == "__main__":
    installed()
    if sys.platform == "linux":
        one_pool()
    agree()
    print("instruction sets:", *backends.extension.instruction_sets())  # type: ignore[union-attr]
    print(ops.backend_info())
