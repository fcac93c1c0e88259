"""Which implementation of the recurrence runs, and why."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch

__all__ = ["BACKENDS", "BackendInfo", "backend", "backend_info"]

BACKENDS = ("reference", "cpu")

_CPU_DTYPES = (torch.float32, torch.bfloat16)

extension: ModuleType | None
try:
    from undertow import _C as extension  # type: ignore[no-redef]

    _missing = ""
except ImportError as error:
    extension = None
    if "undertow._C" in str(error) or "'_C'" in str(error):
        _missing = "this installation has no compiled part (no C++ compiler was found when undertow was installed)"
    else:
        _missing = f"the compiled part cannot be loaded: {error}"

_asked: ContextVar[str | None] = ContextVar("undertow_backend", default=None)
_warned = False


@dataclass(frozen=True)
class BackendInfo:
    """What :func:`backend_info` tells."""

    name: str
    """The backend that serves float32 and bfloat16 tensors on the CPU now."""
    reason: str
    """Why that one."""
    compiled: bool
    """Whether the C++ part is there."""
    instruction_set: str | None
    """"avx512", "avx2" or "portable"; None without the C++ part."""
    threads: int
    """Threads used: ``torch.get_num_threads()``."""
    pool: str | None
    """Whose threads these are; None without the C++ part."""

    def __str__(self) -> str:
        how = f", {self.instruction_set}, {self.threads} of {self.pool}" if self.compiled else ""
        return f"{self.name}{how} ({self.reason})"


def _check(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: unknown backend {name!r}; expected one of {', '.join(map(repr, BACKENDS))}")
    if name == "cpu" and extension is None:
        raise RuntimeError(f"{source}: the 'cpu' backend cannot run: {_missing}")
    return name


def _choice() -> tuple[str, str]:
    """The backend asked for, and by whom; "" where nobody asked."""
    name = _asked.get()
    if name is not None:
        return name, "chosen by undertow.ops.backend"
    name = os.environ.get("UNDERTOW_BACKEND", "")
    return (_check(name, "UNDERTOW_BACKEND"), "chosen by UNDERTOW_BACKEND") if name else ("", "")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the backend within a ``with`` block, over the environment variable ``UNDERTOW_BACKEND``.

    Args:
        name: "reference" (plain torch: any dtype and device) or "cpu" (C++: float32 and bfloat16 on the CPU; tensors
            that it cannot serve still go to the reference).

    Raises:
        ValueError: no backend of that name.
        RuntimeError: "cpu", but undertow was installed without its compiled part.
    """
    token = _asked.set(_check(name, "undertow.ops.backend"))
    try:
        yield
    finally:
        _asked.reset(token)


def serving(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The C++ extension if it is to serve these tensors, else None: the reference does."""
    if device.type != "cpu" or dtype not in _CPU_DTYPES:
        return None
    name, _ = _choice()
    if name == "reference":
        return None
    if extension is None:
        _warn()
    return extension


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"undertow runs its plain torch reference, which is many times slower than its C++ kernels, because "
            f"{_missing}. Install one of undertow's wheels, or a C++ compiler and then undertow again.",
            RuntimeWarning,
            stacklevel=4,
        )


def backend_info() -> BackendInfo:
    """Tell which backend runs and why.

    Raises:
        ValueError: ``UNDERTOW_BACKEND`` names no backend.
    """
    name, reason = _choice()
    if not name:
        name = "reference" if extension is None else "cpu"
        reason = _missing if extension is None else "the compiled part is there"
    return BackendInfo(
        name=name,
        reason=reason,
        compiled=extension is not None,
        instruction_set=None if extension is None else extension.instruction_set(),
        threads=torch.get_num_threads(),
        pool=None if extension is None else extension.pool(),
    )
