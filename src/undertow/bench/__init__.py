"""Benchmarks: us and a peer in turn, in one run, beside the machine's own limits. Never part of a test's verdict."""

from undertow.bench.machine import describe_machine
from undertow.bench.pairs import Pair, Row, paired, seconds

__all__ = ["Pair", "Row", "describe_machine", "paired", "seconds"]
