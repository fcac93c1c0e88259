"""What all suites have in common: how they are found, what they are told, how their cases are named."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from undertow.bench.record import Record

SUITES = ("ops", "train", "decode", "retrofit", "memory", "startup")

Cases = Mapping[str, tuple[str, ...]]
"""Names of cases, and whom each is compared with."""


@dataclass(frozen=True)
class Options:
    """What a person chooses beside cases and peers."""

    repeats: int = 7
    """Turns that count."""
    smoke: bool = False
    """Sizes so small that the figures mean nothing."""
    precisions: tuple[str, ...] = ("float32", "bfloat16", "int8")
    """Of weights in `decode`."""
    device: str = "cpu"
    """Where `train` runs."""
    base: str | None = None
    """The pretrained model of `retrofit` and `memory`; None: the suite's own."""
    gguf: str | None = None
    """The model that llama.cpp runs in `decode`."""
    text: tuple[str, ...] = ()
    """What `memory` reads; none: the source of Python's standard library."""

    @property
    def warmup(self) -> int:
        """Turns before those that count."""
        return 1 if self.smoke else 2


class Suite(Protocol):
    """A module of this room."""

    CASES: Cases
    """The cases of the documentation, and whom each is compared with."""
    SMOKE: Cases
    """The same in sizes that take a moment."""
    PEERS: tuple[str, ...]
    """Everyone that can be asked for."""

    def check(self, case: str) -> object:
        """The sizes that a case's name tells.

        Raises:
            ValueError: it tells none; the message shows a name that does.
        """

    def run(self, cases: Cases, options: Options, record: Record) -> None:
        """Measure; rows, limits and absences go to the record."""


def suite(name: str) -> Suite:
    """The suite of that name, loaded when first asked for."""
    return cast(Suite, importlib.import_module(f"undertow.bench.{name}"))


def sizes(case: str, form: str) -> dict[str, int]:
    """The numbers in a name such as T256-B8-d512.

    Args:
        case: the name.
        form: one of that kind; its words and the letters before its numbers have to be there, in its order.

    Raises:
        ValueError: it is not of this form, or a number is 0.
    """
    pattern = re.sub(r"([A-Za-z]+)\d+", r"\1(?P<\1>[0-9]+)", form)
    match = re.fullmatch(pattern, case)
    found: dict[str, Any] = {name: int(text) for name, text in match.groupdict().items()} if match else {}
    if not found or min(found.values()) < 1:
        raise ValueError(f"a case is named like {form}, not {case!r}")
    return found
