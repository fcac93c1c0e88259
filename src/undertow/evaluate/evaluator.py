"""What a text costs a model: summed negative log-likelihood, every target scored exactly once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from undertow.evaluate.protocol import attention_window as set_attention_window
from undertow.evaluate.protocol import carries_state, read, token_nll

LN2 = math.log(2)


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
    """True where ``max_tokens`` cut a document: bytes, characters and words of it are in proportion to its tokens."""

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

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self) | {
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
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Score every token of every document exactly once.

    A model that carries a state (its ``forward`` takes ``resets``) reads each document from its start to its end,
    piece after piece, and starts afresh with each document; the result does not depend on ``batch_size`` and
    ``window``, which only trade memory for speed. Any other model reads disjoint windows: the result says so
    (``state_carried``) and depends on ``window``.

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
        progress: called with (targets scored, targets in all) after each piece.

    Raises:
        ValueError: nothing to score; sizes below 1; tokens outside the vocabulary; ``attention_window`` for a model
            that has none.
        FloatingPointError: the loss is not finite.
    """
    from undertow.data.stream import evaluation_pieces

    for name, value in (("batch_size", batch_size), ("window", window), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} should be at least 1, not {value}")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision should be float32 or bfloat16, not {precision!r}")
    if device is not None:
        model.to(device)
    place = next(model.parameters()).device
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is not None:
        store.check_vocabulary(vocabulary)
    stateful = carries_state(model) and carry_state
    pieces = evaluation_pieces(store, batch_size, window, limit=max_tokens)
    if stateful and pieces.batch_size < batch_size:
        # Too few documents to fill the rows: read further at a time instead, which the result does not depend on.
        window = window * batch_size // pieces.batch_size
        pieces = evaluation_pieces(store, batch_size, window, limit=max_tokens)
    scored = np.zeros(len(store.documents), dtype=np.int64)  # targets by document
    nll, targets, began = 0.0, 0, time.perf_counter()
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
                    resets=piece.resets.to(place) if carries_state(model) else None,
                    attention_mask=None if piece.attention_mask is None else piece.attention_mask.to(place),
                )
                state = reading.state if stateful else None
                assert reading.logits is not None  # only a model that was given labels may leave them out
                nll += float(token_nll(reading.logits, piece.targets.to(place)).cpu().double().sum())
                targets += piece.scored
                assert piece.documents is not None
                scored += np.bincount(piece.documents[piece.targets != -100].numpy(), minlength=len(scored))
                if progress is not None:
                    progress(targets, pieces.scored)
            used = getattr(getattr(model, "config", None), "attention_window", None)
    finally:
        model.train(training)
    seconds = time.perf_counter() - began
    if targets != pieces.scored:
        raise RuntimeError(f"{targets} targets were scored of {pieces.scored}: the pieces do not cover the text")
    if not math.isfinite(nll):
        raise FloatingPointError(f"the loss is {nll}: the model's weights or the precision {precision} give no numbers")
    return EvalResult(
        nll=nll,
        targets=targets,
        documents=int((scored > 0).sum()),
        **_sizes(store, scored),
        seconds=seconds,
        tokens_per_second=targets / max(seconds, 1e-9),
        batch_size=pieces.batch_size,
        window=window,
        attention_window=used,
        state_carried=stateful,
        precision=precision,
    )


def _sizes(store: Any, scored: NDArray[np.int64]) -> dict[str, Any]:
    """Bytes, characters and words of the text that was scored (``scored``: targets by document)."""
    records = store.documents
    touched = scored > 0
    whole = records["tokens"] - (store.bos_token_id is None)  # without a separator a first token cannot be scored
    share = np.divide(scored, whole, out=np.zeros(len(scored)), where=touched)
    sizes: dict[str, Any] = {}
    for name in ("bytes", "characters", "words"):
        column = records[name].astype(np.float64)
        unknown = bool((column[touched] < 0).any())
        sizes[name] = None if unknown else round(float((column * share)[touched].sum()))
    sizes["cut"] = bool((share[touched] < 1).any())
    return sizes
