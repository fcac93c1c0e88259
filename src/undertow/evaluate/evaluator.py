"""What a text costs a model: summed negative log-likelihood, every target scored exactly once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from undertow.evaluate.protocol import attention_window as set_attention_window
from undertow.evaluate.protocol import carries_state, read, token_nll

LN2 = math.log(2)


@dataclass(frozen=True)
class DocumentResult:
    """What one document cost: ``nll`` nats over ``targets`` tokens; sizes are those of what was scored of it."""

    name: str
    nll: float
    targets: int
    bytes: int | None
    words: int | None

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.nll / self.targets)

    @property
    def perplexity_per_word(self) -> float | None:
        """Per word."""
        return _exp(self.nll / self.words) if self.words else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text."""
        return self.nll / LN2 / self.bytes if self.bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        names = ("perplexity", "perplexity_per_word", "bits_per_byte")
        return asdict(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found, and under which conditions.

    ``nll`` is the sum in nats, in float64, over ``targets`` tokens. With N the number of bytes (characters) of the
    documents scored, bits per byte (character) are ``nll / (N ln 2)``; perplexity per token is
    ``exp(nll / targets)`` and per word ``exp(nll / words)``. The separator between documents is read, never scored.
    """

    nll: float
    targets: int
    documents: int
    bytes: int | None
    characters: int | None
    words: int | None
    seconds: float
    tokens_per_second: float
    batch_size: int
    window: int
    attention_window: int | None
    """What the model attended to; None where it has no such setting."""
    state_carried: bool
    """False: each window was read on its own, so the first tokens of a window had little or no text before them."""
    precision: str
    cut: bool = False
    """True where a document was scored in part: bytes, characters and words of it are in proportion to its tokens."""
    stride: int | None = None
    """Tokens that each window scores where windows are read on their own (the others of it are text before them)."""
    skip_tokens: int = 0
    """First tokens of each document that were read and not scored."""
    per_document_tokens: int | None = None
    """Tokens of each document that were read at most, those skipped included."""
    bos_token_id: int | None = None
    """What stands before each document, read and never scored; None: nothing, so that first tokens were not scored.
    Windows inside a document get none of their own."""
    read: int = 0
    """Tokens of text that were read to score the targets, each counted once; ``tokens_per_second`` is of these."""
    nll_by_position: tuple[float, ...] = field(default=(), repr=False)
    """Nats at each position of the window, summed; see :func:`evaluate` for what is counted as a position."""
    targets_by_position: tuple[int, ...] = field(default=(), repr=False)
    """Targets at each position of the window."""
    by_document: tuple[DocumentResult, ...] = field(default=(), repr=False)
    """Each document of which anything was scored, in the store's order."""

    @property
    def loss_by_position(self) -> list[float | None]:
        """Mean nats at each position of the window; None where nothing was scored."""
        pairs = zip(self.nll_by_position, self.targets_by_position, strict=True)
        return [nll / count if count else None for nll, count in pairs]

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.targets

    @property
    def bits_per_token(self) -> float:
        """Bits per token."""
        return self.loss / LN2

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None where the store does not know its bytes."""
        return self.nll / LN2 / self.bytes if self.bytes else None

    @property
    def bits_per_character(self) -> float | None:
        """Bits per Unicode character; None for text that is not UTF-8."""
        return self.nll / LN2 / self.characters if self.characters else None

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.loss)

    @property
    def perplexity_per_word(self) -> float | None:
        """Per word (what white space separates), whatever the tokens are: comparable between tokenizers."""
        return _exp(self.nll / self.words) if self.words else None

    def as_dict(self, details: bool = False) -> dict[str, Any]:
        """Everything, ready for JSON; what is long (by position, by document) only with ``details``."""
        long = ("nll_by_position", "targets_by_position", "by_document")
        facts = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in long}
        if details:
            facts["loss_by_position"] = self.loss_by_position
            facts["targets_by_position"] = list(self.targets_by_position)
            facts["by_document"] = [document.as_dict() for document in self.by_document]
        return facts | {
            name: getattr(self, name)
            for name in (
                "loss", "bits_per_token", "bits_per_byte", "bits_per_character", "perplexity", "perplexity_per_word",
            )
        }  # fmt: skip


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module,
    store: Any,
    *,
    batch_size: int = 8,
    window: int = 256,
    attention_window: int | None = None,
    max_tokens: int | None = None,
    device: torch.device | str | None = None,
    precision: str = "float32",
    carry_state: bool = True,
    stride: int | None = None,
    skip_tokens: int = 0,
    per_document_tokens: int | None = None,
    period: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Score every token of every document exactly once.

    A model that carries a state (its ``forward`` takes ``resets``) reads each document from its start to its end,
    piece after piece, and starts afresh with each document; the result does not depend on ``batch_size`` and
    ``window``, which only trade memory for speed. Any other model, and any model with ``stride`` or without
    ``carry_state``, reads windows of single documents, each on its own; the result says so (``state_carried``) and
    depends on ``window`` and ``stride``, not on ``batch_size``.

    Args:
        model: see :mod:`undertow.evaluate.protocol`. Comes back in the mode (training or evaluation) it was in.
        store: the text, an ``undertow.data.TokenStore``.
        batch_size: rows read at once.
        window: tokens of each row read at once.
        attention_window: previous positions to attend to, instead of the model's own setting.
        max_tokens: score only so many tokens, the first of the store; None: all.
        device: where to compute; None: where the model is.
        precision: "float32", or "bfloat16" for matrix products under autocast.
        carry_state: False: treat a model with a state as one without.
        stride: read windows on their own, each beginning so many tokens after the one before and scoring what it does
            not share with it: ``window``: disjoint ones (what a model without a state does anyway); less: each target
            but the first ones has at least ``window - stride`` tokens before it, at ``window / stride`` times the cost.
        skip_tokens: read the first so many tokens of each document without scoring them.
        per_document_tokens: read only so many tokens of each document, those skipped included.
        period: (lead, C): what is a position of the window in ``loss_by_position``, for a model that rolls windows
            itself: that of the first ``lead`` inputs of a document is their own place in it, and from there on they
            count from ``lead`` to ``lead + C - 1`` and again. None: the place in the window, where windows are read on
            their own; else (0, ``window``).
        progress: called with (targets scored, targets in all) after each piece.

    Raises:
        ValueError: nothing to score; sizes below 1; tokens outside the vocabulary; ``attention_window`` for a model
            that has none; a stride above the window.
        FloatingPointError: the loss is not finite.
    """
    from undertow.data.stream import evaluation_pieces, window_pieces

    check(batch_size, window, max_tokens, stride, skip_tokens, per_document_tokens, precision)
    if device is not None:
        model.to(device)
    place = next(model.parameters()).device
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is not None:
        store.check_vocabulary(vocabulary)
    takes_resets = carries_state(model)
    stateful = takes_resets and carry_state and stride is None
    part: dict[str, Any] = {"limit": max_tokens, "skip": skip_tokens, "per_document": per_document_tokens}
    pieces: evaluation_pieces | window_pieces
    if stateful:
        lead, cycle = (0, window) if period is None else period
        pieces = evaluation_pieces(store, batch_size, window, **part)
        if pieces.batch_size < batch_size:
            # Too few documents to fill the rows: read further at a time instead, which changes no result.
            window = window * batch_size // pieces.batch_size
            pieces = evaluation_pieces(store, batch_size, window, **part)
    else:
        stride = window if stride is None else stride
        lead, cycle = (window - stride, stride) if period is None else period
        pieces = window_pieces(store, batch_size, window, stride, **part)
    by_document = _Sums(len(store.documents))
    by_position = _Sums(lead + cycle)
    began = time.perf_counter()
    training = model.training
    model.eval()
    autocast = torch.autocast(place.type, torch.bfloat16, enabled=precision == "bfloat16")
    try:
        with set_attention_window(model, attention_window), autocast:
            state = None
            for piece in pieces:
                reading = read(
                    model,
                    piece.input_ids.to(place),
                    state=state,
                    resets=piece.resets.to(place) if takes_resets else None,
                    attention_mask=None if piece.attention_mask is None else piece.attention_mask.to(place),
                )
                state = reading.state if stateful else None
                assert reading.logits is not None  # only a model that was given labels may leave them out
                nll = token_nll(reading.logits, piece.targets.to(place)).cpu().double()
                del reading
                assert piece.documents is not None
                assert piece.positions is not None
                wanted = piece.targets != -100
                by_document.add(piece.documents[wanted], nll[wanted])
                at = piece.positions[wanted]
                by_position.add(torch.where(at < lead, at, lead + (at - lead) % cycle), nll[wanted])
                if progress is not None:
                    progress(by_document.total, pieces.scored)
            used = getattr(getattr(model, "config", None), "attention_window", None)
    finally:
        model.train(training)
    seconds = time.perf_counter() - began
    total, targets = float(by_document.nll.sum()), by_document.total
    if targets != pieces.scored:
        raise RuntimeError(f"{targets} targets were scored of {pieces.scored}: the pieces do not cover the text")
    if not math.isfinite(total):
        raise FloatingPointError(
            f"the loss is {total}: the model's weights or the precision {precision} give no numbers"
        )
    sized = _sizes(store, by_document.count)
    return EvalResult(
        nll=total,
        targets=targets,
        documents=int((by_document.count > 0).sum()),
        **_total(sized, by_document.count),
        seconds=seconds,
        tokens_per_second=pieces.tokens / max(seconds, 1e-9),
        batch_size=pieces.batch_size,
        window=window,
        attention_window=used,
        state_carried=stateful,
        precision=precision,
        stride=stride,
        skip_tokens=skip_tokens,
        per_document_tokens=per_document_tokens,
        bos_token_id=store.bos_token_id,
        read=pieces.tokens,
        nll_by_position=tuple(by_position.nll.tolist()),
        targets_by_position=tuple(by_position.count.tolist()),
        by_document=_documents(store, by_document, sized),
    )


def check(
    batch_size: int,
    window: int,
    max_tokens: int | None,
    stride: int | None,
    skip_tokens: int,
    per_document_tokens: int | None,
    precision: str,
) -> None:
    """Refuse what :func:`evaluate` cannot do, whatever the model and the text.

    Raises:
        ValueError: sizes out of bounds; an unknown precision.
    """
    sizes = {
        "batch_size": batch_size, "window": window, "max_tokens": max_tokens, "stride": stride,
        "per_document_tokens": per_document_tokens,
    }  # fmt: skip
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} should be at least 1, not {value}")
    if skip_tokens < 0:
        raise ValueError(f"skip_tokens should be 0 or more, not {skip_tokens}")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision should be float32 or bfloat16, not {precision!r}")


class _Sums:
    """Nats and targets in so many boxes, in float64."""

    def __init__(self, boxes: int) -> None:
        self.nll = np.zeros(boxes)
        self.count = np.zeros(boxes, dtype=np.int64)
        self.total = 0

    def add(self, box: Tensor, nll: Tensor) -> None:
        boxes = len(self.count)
        self.nll += np.bincount(box.numpy(), weights=nll.numpy(), minlength=boxes)
        self.count += np.bincount(box.numpy(), minlength=boxes)
        self.total += len(box)


def _sizes(store: Any, scored: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Bytes, characters and words of what was scored of each document (``scored``: targets); NaN: not known."""
    records = store.documents
    whole = records["tokens"] - (store.bos_token_id is None)  # without a separator a first token cannot be scored
    share = np.divide(scored, whole, out=np.zeros(len(scored)), where=scored > 0)
    sizes = {"share": share}
    for name in ("bytes", "characters", "words"):
        column = records[name].astype(np.float64)
        sizes[name] = np.where(column < 0, math.nan, column) * share
    return sizes


def _total(sized: dict[str, NDArray[np.float64]], scored: NDArray[np.int64]) -> dict[str, Any]:
    touched = scored > 0
    found: dict[str, Any] = {}
    for name in ("bytes", "characters", "words"):
        total = float(sized[name][touched].sum())
        found[name] = None if math.isnan(total) else round(total)
    return found | {"cut": bool((sized["share"][touched] < 1).any())}


def _documents(store: Any, sums: _Sums, sized: dict[str, NDArray[np.float64]]) -> tuple[DocumentResult, ...]:
    names = store.names
    found = []
    for index in np.flatnonzero(sums.count).tolist():
        size, words = (sized[name][index] for name in ("bytes", "words"))
        found.append(
            DocumentResult(
                name=names[index],
                nll=float(sums.nll[index]),
                targets=int(sums.count[index]),
                bytes=None if math.isnan(size) else round(size),
                words=None if math.isnan(words) else round(words),
            )
        )
    return tuple(found)
