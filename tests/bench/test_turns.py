"""Everyone in turn, and what is made of the times."""

from __future__ import annotations

import gc
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.bench import LIMIT, OURS, Record, Spread, Times, in_turns

seconds = st.floats(1e-6, 1e3)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(1, 64))
def test_what_slows_a_whole_turn_leaves_the_ratio_alone(turns: list[float], factor: int) -> None:
    ours, theirs = Times(tuple(turns)), Times(tuple(factor * turn for turn in turns))
    spread = theirs.over(ours)
    assert spread.low == pytest.approx(factor, rel=1e-12)
    assert spread.median == pytest.approx(factor, rel=1e-12)
    assert spread.high == pytest.approx(factor, rel=1e-12)


@given(st.lists(seconds, min_size=1, max_size=12))
def test_quartiles_lie_around_the_median_and_within_the_values(values: list[float]) -> None:
    spread = Spread.of(values)
    around = (min(values), spread.low, spread.median, spread.high, max(values))
    for below, above in itertools.pairwise(around):
        assert below <= above * (1 + 1e-12)


def test_rounds_alternate_warm_ups_do_not_count_and_nothing_is_collected_meanwhile() -> None:
    order: list[str] = []
    collecting: list[bool] = []

    def work(name: str):
        def once() -> None:
            order.append(name)
            collecting.append(gc.isenabled())

        return once

    times = in_turns({name: work(name) for name in "abc"}, repeats=3, warmup=1)
    assert "".join(order) == "cba" + "abc" + "cba" + "abc"
    assert {name: len(taken.seconds) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert not any(collecting)
    assert gc.isenabled()


@pytest.mark.parametrize("after", [0, 1, 4])
def test_who_fails_is_out_and_the_others_go_on(after: int) -> None:
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise MemoryError("no room")

    failed: list[str] = []
    works = {OURS: lambda: None, "bad": fails, "good": lambda: None}
    times = in_turns(works, 3, 2, lambda name, error: failed.append(f"{name}: {error}"))
    assert failed == ["bad: no room"]
    assert calls == after + 1
    assert {name: len(taken.seconds) for name, taken in times.items()} == {OURS: 3, "good": 3}


def test_our_own_error_is_raised() -> None:
    def fails() -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        in_turns({OURS: fails, "good": lambda: None}, 1, 1, lambda name, error: None)
    assert gc.isenabled()


def test_a_rate_its_ratio_and_its_limit() -> None:
    record = Record()
    times = {OURS: Times((2.0, 4.0, 2.0)), LIMIT: Times((1.0, 2.0, 1.0)), "peer": Times((6.0, 12.0, 5.0))}
    record.compare("s", "c", "train_tokens_per_second", "float32", times, 100, parameters={OURS: 7, "peer": 8})
    (row,) = record.rows
    assert (row.ours, row.theirs, row.limit) == (50, 100 / 6, 100)
    assert (row.ratio_low, row.ratio, row.ratio_high) == (2.75, 3.0, 3.0)
    assert row.limit_fraction == 0.5
    assert (row.parameters, row.their_parameters) == (7, 8)


def test_what_is_spent_is_better_the_less() -> None:
    record = Record()
    record.spent("s", "c", "import_seconds", {OURS: [1.0, 2.0], "peer": [4.0, 8.0], "cold": [30.0]})
    assert [(row.peer, row.ratio) for row in record.rows] == [("peer", 4.0), ("cold", 30.0)]
