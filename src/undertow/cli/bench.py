"""Speed against peers and against the machine's own limits, paired in one run.

undertow bench train                      SRU++ layers: forward pass and training step, and the recurrence alone
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
    cases = tuple(config.cases) or suite.DEFAULT_CASES
    peers = tuple(suite.PEERS if config.peers is None else config.peers)
    rows = suite.run(cases, peers, config.repeats, say)
    if suite is train:
        # What is ours in a layer is the recurrence: beside the whole, it alone.
        alone = dict.fromkeys(ops.Case(case.T, case.B, case.d).name for case in map(train.Case.parse, cases))
        rows += ops.run(tuple(alone), repeats=config.repeats, say=say)
    table(machine.items())
    for case in dict.fromkeys(row.case for row in rows):
        print()
        table(
            [_line(row) for row in rows if row.case == case],
            headers=(case, "peer", "ours", "theirs", "ratio", "of limit"),
        )
    if config.json is not None:
        write_json(Path(config.json), machine, rows)


def write_json(path: Path, machine: dict[str, object], rows: list[Row]) -> None:
    """`{"machine": ..., "rows": [{suite, case, peer, metric, dtype, ours, theirs, ratio, limit_fraction}]}`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


_UNITS = {"tokens_per_second": (1.0, "tokens/s"), "bytes_per_second": (1e9, "GB/s")}


def _line(row: Row) -> tuple[object, ...]:
    """A row as a person reads it."""
    ending = next(ending for ending in _UNITS if row.metric.endswith(ending))
    scale, unit = _UNITS[ending]
    what = row.metric.removesuffix("_" + ending).replace("_", " + ")
    return (
        f"{what}, {row.dtype}, {unit}",
        row.peer,
        row.ours / scale,
        None if row.theirs is None else row.theirs / scale,
        None if row.ratio is None else f"{row.ratio:.2f}x",
        None if row.limit_fraction is None else f"{100 * row.limit_fraction:.0f}%",
    )
