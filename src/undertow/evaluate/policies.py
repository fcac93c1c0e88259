"""One text, one model, several ways to read it: what does it cost to forget, and what is memory worth?

=============== ======================================================================================================
``carry``       as the model is: an SRU++, or a retrofit with its slots and selected keys
``disjoint``    windows of N tokens, each on its own
``overlap``     windows of N tokens, each beginning in the middle of the one before: twice the compute
``sliding``     always the last N tokens, and the text's first four (attention sinks)
``select``      the last N / 2 tokens and, of what has left the window, the N / 2 keys that received most attention; the
                model is not trained for it
``everything``  a sliding window of 2,048 tokens, or of as many as the model knows: what could be had without forgetting
=============== ======================================================================================================

N is the number of *remembered positions*, the same for all but the last: window, slots and selected keys together. The
sinks come on top, for everyone.

All of them are scored by :func:`undertow.evaluate.evaluate`, on the same targets.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from undertow.evaluate.costs import Peak, ReadingCosts, peak_memory, reading_costs
from undertow.evaluate.evaluator import EvalResult, check, evaluate
from undertow.evaluate.protocol import attention_window as set_attention_window
from undertow.evaluate.protocol import base_of, carries_state, unwrap

if TYPE_CHECKING:
    from undertow.retrofit import RecurrenceConfig
    from undertow.retrofit.anatomy import Anatomy

POLICIES = ("carry", "disjoint", "overlap", "sliding", "select", "everything")
REMEMBERED = 256
CONTEXT = 2048
SWAPPED = "states swapped"
CHANCE = "by chance"


class Unable(ValueError):
    """A policy that a model cannot follow, with the reason."""


@dataclass(frozen=True)
class Way:
    """How one model reads under one policy; numbers of positions are None where the model has no such thing."""

    policy: str
    note: str
    """In a person's words."""
    window: int | None = None
    stride: int | None = None
    """Tokens from one boundary to the next."""
    slots: int = 0
    selected: int = 0
    sinks: int = 0
    settings: RecurrenceConfig | None = None
    """Wrap the base in this; None: read with the model as it is."""
    alone: bool = False
    """The evaluator cuts the windows and reads each on its own, without a state."""
    carries: bool = False
    """There is a memory beyond the window, whose worth swapping shows."""
    lead: int = 0
    """In an overlap, tokens of a window that were scored in the one before."""
    span: int | None = None
    """N, over which losses by position are laid, so that windows that slide stand beside those that do not."""

    @property
    def remembered(self) -> int | None:
        """Window, slots and selected keys; the sinks come on top."""
        return None if self.window is None else self.window + self.slots + self.selected

    def reader(self, model: nn.Module) -> Any:
        """The module that reads: the model itself, or its base under this policy."""
        if self.settings is None:
            return model
        from undertow.retrofit import add_recurrence

        plain = unwrap(model)
        return add_recurrence(base_of(plain) or plain, self.settings, freeze_base=False)


@dataclass(frozen=True)
class PolicyResult:
    """What one way of reading found, and what it cost."""

    model: str
    way: Way = field(repr=False)
    evaluation: EvalResult
    costs: ReadingCosts
    peak: Peak
    """Memory during the evaluation, the program and the model included."""
    control: str | None = None
    """What was done to the memory, for comparison; None: nothing."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.way.policy

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        way = self.way
        sizes = ("window", "slots", "selected", "sinks", "stride", "remembered")
        return {
            "model": self.model,
            "policy": way.policy,
            "control": self.control,
            "note": way.note,
            "memory": {name: getattr(way, name) for name in sizes},
            "flops_per_token": self.costs.flops_per_token,
            "state_bytes": self.costs.state_bytes,
            "peak_memory_bytes": self.peak.bytes,
            "peak_memory_of": self.peak.measure,
            **self.evaluation.as_dict(details=True),
        }


def check_policies(policies: Sequence[str]) -> list[str]:
    """The policies, each once, in the order given.

    Raises:
        ValueError: one that does not exist; the nearest is named.
    """
    for name in policies:
        if name not in POLICIES:
            near = difflib.get_close_matches(name, POLICIES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"there is no policy {name!r}{hint}; policies are {', '.join(POLICIES)}")
    return list(dict.fromkeys(policies))


def remembered_by(model: nn.Module) -> int | None:
    """How many positions a model remembers by its own design; None where that is open."""
    plain: Any = unwrap(model)
    if base_of(plain) is not None:
        return int(plain.settings.remembered)
    if carries_state(plain):
        previous = getattr(getattr(plain, "config", None), "attention_window", None)
        return None if previous is None else int(previous) + 1
    return None


def own_policies(model: nn.Module) -> list[str]:
    """What to evaluate a model by where nothing is said."""
    return ["carry"] if carries_state(unwrap(model)) else ["disjoint"]


def plan(
    model: nn.Module, policies: Sequence[str], *, remembered: int | None = None, context: int | None = None
) -> list[Way]:
    """How a model reads under each policy; every refusal comes from here, before anything is read.

    Args:
        model: any causal language model.
        policies: of :data:`POLICIES`.
        remembered: N; by default what the model remembers by its own design, or 256.
        context: the window of ``everything``; by default 2,048, or what the model knows where that is less.

    Raises:
        Unable: a policy that this model cannot follow.
        ValueError: an unknown policy; sizes that are out of bounds.
    """
    for name, value in (("remembered", remembered), ("context", context)):
        if value is not None and value < 1:
            raise ValueError(f"{name} should be at least 1, not {value}")
    planner = _Planner(unwrap(model), remembered, context)
    return [planner.way(policy) for policy in check_policies(policies)]


class _Planner:
    def __init__(self, model: Any, remembered: int | None, context: int | None) -> None:
        self.model, self.context = model, context
        self.kind = type(model).__name__
        self.own = remembered_by(model)
        self.given = remembered
        self.base = base_of(model)
        self.stateful = carries_state(model)
        self.N = remembered or self.own or REMEMBERED
        self._anatomy: Anatomy | None = None

    def way(self, policy: str) -> Way:
        if policy == "carry":
            return self._carry()
        if self.base is None and self.stateful:
            return self._alone(policy, f"{self.kind} carries a state of its own")
        try:
            anatomy = self.anatomy
        except ValueError as error:
            if type(error).__name__ != "UnsuitableBase":
                raise
            return self._alone(policy, str(error))
        try:
            return getattr(self, f"_{policy}")(anatomy)
        except Unable:
            raise
        except ValueError as error:
            raise ValueError(f"policy {policy}: {error}") from error

    @property
    def anatomy(self) -> Anatomy:
        if self._anatomy is None:
            from undertow.retrofit.anatomy import dissect

            self._anatomy = dissect(self.model if self.base is None else self.base)
        return self._anatomy

    def _carry(self) -> Way:
        if not self.stateful:
            others = ", ".join(POLICIES[1:])
            raise Unable(f"policy carry: {self.kind} carries no state; read it with {others}")
        if self.given is not None and self.own is not None and self.given != self.own:
            remedy = "leave --remembered out, or ask for as many"
            if self.base is None:
                remedy += f", or set --attention_window {self.given - 1}"
            raise ValueError(f"policy carry: {self.kind} remembers {self.own} positions, not {self.given}: {remedy}")
        if self.base is None:
            note = f"attends to {self.own} positions and carries a recurrent state" if self.own else "carries a state"
            return Way("carry", note, window=self.own)
        settings = self.model.settings
        parts = [f"{settings.policy} window of {settings.window}"]
        parts += [f"{settings.slots} slots ({settings.update})"] if settings.slots else []
        parts += [f"{settings.selected} selected keys"] if settings.selected else []
        return Way(
            "carry", f"{' + '.join(parts)}, stride {settings.stride}", settings.window, settings.stride, settings.slots,
            settings.selected, settings.sinks, carries=settings.carries, span=self.N,
            lead=settings.stride if settings.policy == "overlap" else 0,
        )  # fmt: skip

    def _alone(self, policy: str, why: str) -> Way:
        """Windows that the evaluator cuts, for models whose attention is out of reach."""
        if policy not in ("disjoint", "overlap"):
            raise Unable(f"policy {policy}: {why}; it can be read with disjoint and overlap")
        config = getattr(self.model, "config", None)
        limit = None if config is None else getattr(config, "max_position_embeddings", None)
        if limit is not None and limit < self.N:
            raise ValueError(f"policy {policy}: a window of {self.N} is above the {limit} positions {self.kind} knows")
        stride = self.N
        if policy == "overlap":
            if self.N % 2:
                raise ValueError(f"policy overlap: it halves the window, so it should be even, not {self.N}")
            stride //= 2
        note = _NOTES[policy].format(self.N)
        return Way(policy, note, self.N, stride, alone=True, lead=self.N - stride)

    def _disjoint(self, anatomy: Anatomy) -> Way:
        return self._wrapped("disjoint", anatomy, policy="disjoint", window=self.N)

    def _overlap(self, anatomy: Anatomy) -> Way:
        return self._wrapped("overlap", anatomy, policy="overlap", window=self.N)

    def _sliding(self, anatomy: Anatomy) -> Way:
        self._need_rotary("sliding", anatomy)
        return self._wrapped("sliding", anatomy, policy="sliding", window=self.N)

    def _select(self, anatomy: Anatomy) -> Way:
        self._need_rotary("select", anatomy)
        if self.N < 2:
            raise ValueError("half of the remembered positions are selected, so there should be 2 or more")
        return self._wrapped("select", anatomy, policy="sliding", window=self.N - self.N // 2, selected=self.N // 2)

    def _everything(self, anatomy: Anatomy) -> Way:
        limit = anatomy.limit
        if not anatomy.relative:
            window = self.context or min(CONTEXT, limit or CONTEXT) // 2 * 2
            return self._wrapped("everything", anatomy, policy="overlap", window=window)
        sinks = self._sinks
        window = self.context or min(CONTEXT, limit or CONTEXT)
        stride = _stride(window)
        if self.context is None and limit is not None:
            window = min(window, limit - stride - sinks + 1)
            if window < 1:
                raise ValueError(f"{anatomy.architecture} knows {limit} positions only: name a --context")
        return self._wrapped("everything", anatomy, policy="sliding", window=window, stride=stride)

    @property
    def _sinks(self) -> int:
        from undertow.retrofit import RecurrenceConfig

        if self.base is not None and self.model.settings.policy == "sliding":
            return int(self.model.settings.sinks)
        return RecurrenceConfig.sinks

    def _need_rotary(self, policy: str, anatomy: Anatomy) -> None:
        if not anatomy.relative:
            raise Unable(
                f"policy {policy} needs rotary positions, and {anatomy.architecture} has absolute ones: "
                "take disjoint, overlap or everything"
            )

    def _wrapped(self, name: str, anatomy: Anatomy, **settings: Any) -> Way:
        from undertow.retrofit import RecurrenceConfig

        config = RecurrenceConfig(**{"slots": 0, "selected": 0, "sinks": self._sinks} | settings)
        made = config.resolved(
            layers=len(anatomy.layers), hidden_size=anatomy.hidden_size, relative=anatomy.relative,
            limit=anatomy.limit, natural=anatomy.natural,
            architecture=anatomy.architecture,
        )  # fmt: skip
        note = _NOTES[name if name != "everything" else made.policy].format(made.window, made.selected)
        if name == "everything" and self.context is None and made.window < CONTEXT:
            note += f" (the most that the {anatomy.limit:,} which the model knows have room for)"
        return Way(
            name, note, made.window, made.stride, 0, made.selected, made.sinks, settings=config,
            carries=made.carries, lead=made.stride if made.policy == "overlap" else 0, span=self.N,
        )  # fmt: skip


_NOTES = {
    "disjoint": "windows of {0:,}, each on its own",
    "overlap": "windows of {0:,}, each beginning in the middle of the one before",
    "sliding": "the last {0:,} positions",
    "select": "the last {0:,} positions and, of those before, the {1:,} keys that received most attention",
}


def _stride(window: int) -> int:
    """Of a long window: short enough to waste little, long enough that the base reads many tokens at once."""
    return max(1, min(128, window // 16))


def compare(
    model: nn.Module,
    store: Any,
    policies: Sequence[str] | Sequence[Way],
    *,
    name: str = "",
    remembered: int | None = None,
    context: int | None = None,
    controls: bool = True,
    batch_size: int = 8,
    window: int = 256,
    attention_window: int | None = None,
    max_tokens: int | None = None,
    skip_tokens: int = 0,
    per_document_tokens: int | None = None,
    precision: str = "float32",
    progress: Callable[[str, int, int], None] | None = None,
) -> list[PolicyResult]:
    """Score the same targets under several policies, each with its cost.

    Each document begins with the store's separator where it has one, and windows inside a document get none of their
    own: the same for all. A retrofitted model is read as it is by ``carry``; by the other policies its base is read,
    with the LoRA that was trained with it.

    Args:
        model: any causal language model.
        store: the text, an ``undertow.data.TokenStore``.
        policies: of :data:`POLICIES`, or what :func:`plan` made of them.
        name: the model's, for the results.
        remembered, context: see :func:`plan`.
        controls: after a retrofit's ``carry`` read once more with the memories of the texts swapped: each document is
            read with what was remembered of another. What is lost by that is what memory is worth. (It needs two
            documents.) After ``select`` read once more with keys kept by chance: what is lost shows what choosing is
            worth.
        batch_size, window, attention_window, max_tokens, skip_tokens, per_document_tokens, precision: as for
            :func:`undertow.evaluate.evaluate`.
        progress: called with (way, targets scored, targets in all), first when none is scored yet.

    Raises:
        ValueError: see :func:`plan` and :func:`undertow.evaluate.evaluate`.
    """
    from undertow.data.stream import window_pieces

    check(batch_size, window, max_tokens, None, skip_tokens, per_document_tokens, precision)
    # Is there something to score?
    scored = window_pieces(store, 1, 1, limit=max_tokens, skip=skip_tokens, per_document=per_document_tokens).scored
    with set_attention_window(model, attention_window):  # also while planning: it is what an SRU++ remembers
        ways = [
            *(way for way in policies if isinstance(way, Way)),
            *plan(model, [p for p in policies if isinstance(p, str)], remembered=remembered, context=context),
        ]
        results: list[PolicyResult] = []
        for way in ways:
            reader = way.reader(model)

            def score(way: Way, reader: Any, control: str | None, rows: int, costs: ReadingCosts) -> PolicyResult:
                label = f"{way.policy}, {control}" if control else way.policy
                place = next(reader.parameters()).device
                if progress is not None:
                    progress(label, 0, scored)
                with peak_memory(place) as peak:
                    evaluation = evaluate(
                        reader,
                        store,
                        batch_size=rows,
                        window=way.window if way.alone and way.window else window,
                        max_tokens=max_tokens,
                        precision=precision,
                        stride=way.stride if way.alone else None,
                        skip_tokens=skip_tokens,
                        per_document_tokens=per_document_tokens,
                        period=_period(way, window),
                        progress=None if progress is None else lambda done, of: progress(label, done, of),
                    )
                return PolicyResult(name, way, evaluation, costs, peak, control)

            costs = _costs(way, reader, store, window, precision)
            results.append(score(way, reader, None, batch_size, costs))
            if controls and way.policy == "carry" and way.carries and results[-1].evaluation.documents > 1:
                reader.swap_states = True
                try:
                    results.append(score(way, reader, SWAPPED, max(2, batch_size), costs))
                finally:
                    reader.swap_states = False
            if controls and way.policy == "select":
                assert way.settings is not None
                by_chance = replace(way, settings=replace(way.settings, selected_by="chance"))
                results.append(score(way, by_chance.reader(model), CHANCE, batch_size, costs))
        return results


def _period(way: Way, window: int) -> tuple[int, int]:
    """What ``loss_by_position`` counts: places in a window that stands still, else in as many strides as fit N."""
    if way.stride is None:
        return 0, window
    if way.lead:
        return way.lead, way.stride
    return 0, max(1, (way.span or way.stride) // way.stride) * way.stride


def _costs(way: Way, reader: nn.Module, store: Any, window: int, precision: str) -> ReadingCosts:
    ids = torch.from_numpy(store.tokens[: 1 << 16].astype("int64"))
    if way.alone:
        assert way.window is not None
        assert way.stride is not None
        return reading_costs(reader, ids, window=way.window, stride=way.stride, alone=True, precision=precision)
    stride = way.stride or 1
    window = stride * max(1, window // stride)
    warm = (way.remembered or 0) + way.sinks + window
    return reading_costs(reader, ids, warm=warm, window=window, stride=stride, precision=precision)
