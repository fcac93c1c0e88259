"""Timing in turns: a noisy machine slows everyone alike, and what is compared is what was neighbour in time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

from undertow.allocator import give_back

Work = Callable[[], object]
"""What is timed: one turn of it."""

OURS = "undertow"
"""The name of the first in every comparison."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Those of one or more values."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return Spread(low, median(values), high)


@dataclass(frozen=True)
class Times:
    """Seconds of each turn, in the order of the turns."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.seconds)

    def over(self, other: Times) -> Spread:
        """Our seconds over the other's, turn by turn: how many times faster the other is."""
        return Spread.of([a / b for a, b in zip(self.seconds, other.seconds, strict=True)])


Failed = Callable[[str, Exception], object]


def in_turns(
    works: Mapping[str, Work], repeats: int, warmup: int = 2, failed: Failed | None = None
) -> dict[str, Times]:
    """Everyone once, `repeats` times over; every second round backwards, so that nobody always follows the same one.

    The first is ours, and its errors are raised. Garbage collection waits until all are done.

    Args:
        works: by name; the first is ours.
        repeats: rounds that count.
        warmup: rounds before that.
        failed: told who raised an error and which; that one is then out. None: any error is raised.

    Returns:
        The times of all that finished.
    """
    ours, *_ = works
    running = dict(works)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    with collected():
        for round_ in range(-warmup, repeats):
            for name in list(running) if round_ % 2 == 0 else list(reversed(running)):
                start = time.perf_counter()
                try:
                    running[name]()
                except Exception as error:  # of any kind: it is another's program
                    if name == ours or failed is None:
                        raise
                    failed(name, error)
                    del running[name]
                    continue
                if round_ >= 0:
                    seconds[name].append(time.perf_counter() - start)
    return {name: Times(tuple(seconds[name])) for name in works if name in running}


@contextmanager
def collected() -> Iterator[None]:
    """No garbage and no freed memory of earlier work at the start, and no collection before the end."""
    enabled = gc.isenabled()
    gc.collect()
    give_back()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
