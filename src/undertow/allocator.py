"""What the C library does with memory that tensors on the CPU have freed: keep it for the next ones, or give it back.

By itself glibc hands blocks above a limit, which it moves about, back to the system at once and asks for them anew;
each page of a new block then costs an interruption. Where something else than glibc serves, nothing here has an effect.
"""

from __future__ import annotations

import ctypes
from typing import Any

# Numbers of mallopt's parameters (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for the next tensors of that size: for loops, whose steps are all alike.

    A training step of SRU++ gets a twentieth faster. The process holds on to the most that it ever needed, as it does
    on a GPU. It is for programs to call, not for libraries: it changes how the whole process allocates.

    Returns:
        Whether it could.
    """
    mallopt = _from_libc("mallopt")
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def return_large_blocks() -> None:
    """Let this process return tensors of a MiB and more as soon as they are freed: for the smallest peak.

    The limit that glibc moves goes up to 32 MiB; what a step takes at most then differs from step to step.
    """
    if (mallopt := _from_libc("mallopt")) is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 20)


def give_back() -> None:
    """Return all that is free to the system now.

    What is kept lies in holes of the sizes that the last tensors had, and those that come next may fit badly.
    """
    if (trim := _from_libc("malloc_trim")) is not None:
        trim(0)


def _from_libc(name: str) -> Any:
    """A function of glibc, None where that is not what runs here."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
