"""What a run tells the person in front of it: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

QUIET_SECONDS = 10.0  # between two lines where the output is not a terminal


def duration(seconds: float) -> str:
    """``1:02:03``, ``2:03`` or ``3 s``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(tokens_per_second: float) -> str:
    """``12.3k tok/s``."""
    if tokens_per_second >= 10_000:
        return f"{tokens_per_second / 1000:.1f}k tok/s"
    return f"{tokens_per_second:.0f} tok/s"


@contextlib.contextmanager
def silent_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar for every model that is saved or loaded."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class Talk:
    """Progress of one run, on rank 0 only (``quiet`` elsewhere).

    Args:
        steps: steps in all, or None where the budget is in minutes.
        quiet: say nothing.
        console: where to write; stderr by default, so that stdout stays for results.
    """

    def __init__(self, steps: int | None, quiet: bool = False, console: Console | None = None) -> None:
        self.steps = steps
        self.quiet = quiet
        self.console = console or Console(stderr=True, highlight=False)
        self.valid = ""
        self._last_line = 0.0
        self._progress: Progress | None = None
        if not quiet and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[left]}"),
                console=self.console, transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("starting", total=1.0, left="")
            self._progress.start()

    def line(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            (self._progress.console if self._progress else self.console).print(text, soft_wrap=True, markup=False)

    def step(self, step: int, share: float, bits: float, unit: str, tokens_per_second: float, left: float) -> None:
        """Where the run stands.

        Args:
            step: steps done.
            share: of the budget used, in [0, 1].
            bits: training loss in bits per ``unit``.
            unit: byte or token.
            tokens_per_second: lately.
            left: seconds of training that remain, as far as can be told.
        """
        if self.quiet:
            return
        total = f"/{self.steps}" if self.steps is not None else ""
        text = f"step {step}{total}  {bits:.3f} bits/{unit}{self.valid}  {rate(tokens_per_second)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=share, description=text, left=f"{duration(left)} left")
        elif time.monotonic() - self._last_line >= QUIET_SECONDS or share >= 1:
            self._last_line = time.monotonic()
            self.line(f"{text}  {duration(left)} left")

    def evaluated(self, bits: float, unit: str) -> None:
        """Remember the last validation result for the live line."""
        self.valid = f"  valid {bits:.3f}"

    def busy(self, text: str) -> None:
        """What keeps the run from its next step, on the live line only."""
        if self._progress is not None:
            self._progress.update(self._task, left=text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
