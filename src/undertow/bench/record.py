"""What a run finds out: rows of figures, what the machine could do at best, and who was left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from undertow.bench.pairs import OURS, Spread, Times

SCHEMA = 2
"""Version of what `Record.facts` gives; it grows when a key is renamed, removed or means something else."""

LIMIT = "limit"
"""The name, in a comparison, of the machine's own work that nobody can be faster than."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    `metric` ends with the unit of `ours`, `theirs` and `limit`. Where it ends with "per_second" more is better, else
    ("seconds", "bytes") less.
    """

    suite: str
    case: str
    """Sizes; each suite says what its names mean."""
    peer: str | None
    """Whom we are compared with; None: nobody but the limit."""
    metric: str
    dtype: str | None
    """In which we compute; a peer that does not says so in its name. None: it does not matter."""
    ours: float
    """Median."""
    theirs: float | None = None
    """Median."""
    ratio: float | None = None
    """How many times better ours is: the median of the quotients within each turn."""
    ratio_low: float | None = None
    """The first quartile of these."""
    ratio_high: float | None = None
    """The third."""
    limit: float | None = None
    """What the machine can do at best, measured in the same turns."""
    limit_fraction: float | None = None
    """How near to it we are, at most 1 but for noise: the median of the quotients within each turn."""
    parameters: int | None = None
    """Of our model."""
    their_parameters: int | None = None


@dataclass(frozen=True)
class Limit:
    """What the machine can do at best, and at which sizes."""

    suite: str
    case: str
    what: str
    metric: str
    dtype: str
    value: float


@dataclass(frozen=True)
class Skipped:
    """Who took no part, and why."""

    suite: str
    case: str
    what: str
    reason: str


def _nobody(_: str) -> None:
    return None


@dataclass
class Record:
    """The rows, limits and absences of one run."""

    say: Callable[[str], None] = _nobody
    """Told what is being done."""
    rows: list[Row] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def compare(
        self,
        suite: str,
        case: str,
        metric: str,
        dtype: str,
        times: Mapping[str, Times],
        amount: float,
        *,
        parameters: Mapping[str, int] | None = None,
    ) -> None:
        """Add what was timed in turns, as rates: a row a peer, or one without where there is none.

        Args:
            suite, case, metric, dtype: see `Row`.
            times: ours as `OURS`, perhaps the machine's as `LIMIT`, and the peers' by name.
            amount: what was done in a turn, in the metric's unit without "per_second".
            parameters: of the models, by the same names.
        """
        ours, limit = times[OURS], times.get(LIMIT)
        sizes = parameters or {}
        common: dict[str, Any] = {
            "suite": suite, "case": case, "metric": metric, "dtype": dtype, "ours": amount / ours.median,
            "parameters": sizes.get(OURS),
        }  # fmt: skip
        if limit is not None:
            common |= {"limit": amount / limit.median, "limit_fraction": limit.over(ours).median}
        peers = [name for name in times if name not in (OURS, LIMIT)]
        for peer in peers:
            theirs = times[peer]
            ratio = theirs.over(ours)
            self.rows.append(
                Row(
                    **common, peer=peer, theirs=amount / theirs.median, **_ratio(ratio),
                    their_parameters=sizes.get(peer),
                )
            )  # fmt: skip
        if not peers:
            self.rows.append(Row(**common, peer=None))

    def spent(
        self, suite: str, case: str, metric: str, spent: Mapping[str, list[float]], dtype: str | None = None
    ) -> None:
        """Add what was spent (seconds, bytes), less of which is better: a row a peer, or one without.

        Args:
            suite, case, metric, dtype: see `Row`.
            spent: turn by turn; ours as `OURS`, the peers' by name, who may have had fewer turns.
        """
        ours = spent[OURS]
        peers = [name for name in spent if name != OURS]
        common: dict[str, Any] = {
            "suite": suite, "case": case, "metric": metric, "dtype": dtype, "ours": Spread.of(ours).median,
        }  # fmt: skip
        for peer in peers:
            ratio = Spread.of([b / a for a, b in zip(ours, spent[peer], strict=False)])
            self.rows.append(Row(**common, peer=peer, theirs=Spread.of(spent[peer]).median, **_ratio(ratio)))
        if not peers:
            self.rows.append(Row(**common, peer=None))

    def limit(self, suite: str, case: str, what: str, metric: str, dtype: str, value: float) -> None:
        """Add what the machine can do."""
        self.limits.append(Limit(suite, case, what, metric, dtype, value))

    def skip(self, suite: str, case: str, what: str, reason: str) -> None:
        """Add who is left out, and say so."""
        skipped = Skipped(suite, case, what, reason)
        if skipped not in self.skipped:
            self.skipped.append(skipped)
            self.say(f"{suite}, {case}: without {what}: {reason}")

    def failed(self, suite: str, case: str, what: str, error: BaseException) -> None:
        """Add who could not go on."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        self.skip(suite, case, what, f"it failed: {type(error).__name__}{': ' + lines[0][:200] if lines else ''}")

    def facts(self, machine: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """All of it, for JSON: docs/performance.md tells what the keys mean."""
        import undertow

        return {
            "schema": SCHEMA,
            "undertow": undertow.__version__,
            "options": dict(options),
            "machine": dict(machine),
            "limits": [asdict(limit) for limit in self.limits],
            "skipped": [asdict(skipped) for skipped in self.skipped],
            "rows": [asdict(row) for row in self.rows],
        }


def _ratio(ratio: Spread) -> dict[str, Any]:
    return {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
