"""Timing in pairs: a noisy machine slows both alike when they take turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """One line of a benchmark.

    `ours` and `theirs` are rates (more is better), `ratio` is the median of the quotients of neighbouring turns,
    `limit_fraction` the machine's shortest possible time over ours; None where there is no such limit or peer.
    """

    suite: str
    case: str
    peer: str | None
    metric: str
    dtype: str
    ours: float
    theirs: float | None = None
    ratio: float | None = None
    limit_fraction: float | None = None


@dataclass(frozen=True)
class Pair:
    """Median seconds of both, and the median of the quotients theirs / ours: above 1 where we are faster."""

    ours: float
    theirs: float
    ratio: float


def seconds(work: Callable[[], object], repeats: int = 5, warmup: int = 2) -> float:
    """Median seconds of `work`."""
    for _ in range(warmup):
        work()
    return median(_once(work) for _ in range(repeats))


def paired(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 7, warmup: int = 2) -> Pair:
    """Both in turn, `repeats` times."""
    return together([ours, theirs], repeats, warmup)[1]


def together(works: Sequence[Callable[[], object]], repeats: int = 7, warmup: int = 2) -> list[Pair]:
    """Several in turn, `repeats` times; each one's pair with the first (the first's own has ratio 1)."""
    for _ in range(warmup):
        for work in works:
            work()
    times: list[list[float]] = [[] for _ in works]
    gc.collect()
    for _ in range(repeats):
        for work, took in zip(works, times, strict=True):
            took.append(_once(work))
    first = times[0]
    return [
        Pair(median(first), median(took), median(t / f for t, f in zip(took, first, strict=True))) for took in times
    ]


def _once(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
