"""Benchmarks: us and a peer in turn, in one run, beside the machine's own limits. Never part of a test's verdict.

Each suite is a module: `CASES` and `SMOKE` (its cases by name, and the peers of each by default), `PEERS`,
`check(case)`, and `run(cases, options, record)`.
"""

from undertow.bench.machine import describe_machine
from undertow.bench.pairs import OURS, Spread, Times, in_turns
from undertow.bench.record import LIMIT, SCHEMA, Limit, Record, Row, Skipped
from undertow.bench.suites import SUITES, Options, Suite, suite

__all__ = [
    "LIMIT",
    "OURS",
    "SCHEMA",
    "SUITES",
    "Limit",
    "Options",
    "Record",
    "Row",
    "Skipped",
    "Spread",
    "Suite",
    "Times",
    "describe_machine",
    "in_turns",
    "suite",
]
