"""Speed against peers and against the machine's own limits, paired in one run.

undertow bench train                      SRU++ layers: forward pass and training step
undertow bench ops                        the recurrence alone, against a plain copy
undertow bench train --json FILE
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undertow.bench import Row

POSITIONAL = ("suite",)

SUITES = ("train", "ops")


@dataclass
class Config:
    """What to measure."""

    suite: str | None = None
    """The suite: train or ops."""
    cases: list[str] = field(default_factory=list)
    """Sizes, named like T256-B8-d512-p128-l4 (train) or T256-B8-d512 (ops); by default those of the documentation."""
    peers: list[str] | None = None
    """Whom to compare with, of those the suite knows; by default all that are installed."""
    repeats: int = 7
    """Turns that everyone takes; figures are medians."""
    json: str | None = None
    """Write machine and rows to this file too."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats should be at least 1, not {self.repeats}")


def run(config: Config) -> None:
    """Measure, print a table."""
    from undertow.bench import describe_machine, ops, train
    from undertow.report import table

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    if config.suite not in SUITES:
        asked = "which suite?" if config.suite is None else f"there is no suite {config.suite!r}:"
        raise ValueError(f"{asked} undertow bench {' or '.join(SUITES)}")
    machine = describe_machine()
    suite = {"train": train, "ops": ops}[config.suite]
    rows = suite.run(
        tuple(config.cases) or suite.DEFAULT_CASES,
        tuple(suite.PEERS if config.peers is None else config.peers),
        config.repeats,
        say,
    )
    table(machine.items())
    print()
    table(
        [
            (r.case, r.metric, r.dtype, r.peer, r.ours, r.theirs, _times(r.ratio), _percent(r.limit_fraction))
            for r in rows
        ],
        headers=("case", "metric", "dtype", "peer", "ours", "theirs", "ratio", "of the limit"),
    )
    if config.json is not None:
        write_json(Path(config.json), machine, rows)


def write_json(path: Path, machine: dict[str, object], rows: list[Row]) -> None:
    """`{"machine": ..., "rows": [{suite, case, peer, metric, dtype, ours, theirs, ratio, limit_fraction}]}`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def _times(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}x"


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{100 * fraction:.0f}%"
