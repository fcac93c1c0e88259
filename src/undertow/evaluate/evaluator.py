"""What a text costs a model: summed negative log-likelihood, every target scored exactly once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
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
        max_tokens: score only the first so many tokens of the store; None: all.
        device: where to compute; None: where the model is.
        precision: "float32", or "bfloat16" for matrix products under autocast.
        carry_state: False: treat a model with a state as one without.
        progress: called with (targets scored, targets in all) after each piece.

    Raises:
        ValueError: nothing to score; sizes below 1; a model without ``attention_window`` asked to change it.
        FloatingPointError: the loss is not finite.
    """
    from undertow.data import evaluation_pieces

    for name, value in (("batch_size", batch_size), ("window", window), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} should be at least 1, not {value}")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision should be float32 or bfloat16, not {precision!r}")
    if device is not None:
        model.to(device)
    place = next(model.parameters()).device
    text, cut = store.head(max_tokens) if max_tokens is not None and max_tokens < store.targets else (store, False)
    if text.targets == 0:
        raise ValueError("there is nothing to score: the text has no tokens")
    stateful = carries_state(model) and carry_state
    nll, targets, began = 0.0, 0, time.perf_counter()
    training = model.training
    model.eval()
    autocast = torch.autocast(place.type, torch.bfloat16, enabled=precision == "bfloat16")
    try:
        with set_attention_window(model, attention_window), autocast:
            state = None
            for piece in evaluation_pieces(text, batch_size, window):
                # A row that has ended is padded for the rest: rows that are all padding need not be read … but the
                # state has one row a batch row, so they stay.
                wanted = piece.targets.to(place)
                reading = read(
                    model,
                    piece.input_ids.to(place),
                    state=state,
                    resets=piece.resets.to(place) if carries_state(model) else None,
                    attention_mask=None if piece.attention_mask is None else piece.attention_mask.to(place),
                )
                state = reading.state if stateful else None
                nll += float(token_nll(reading.logits, wanted).double().sum())
                targets += int((piece.targets != -100).sum())
                if progress is not None:
                    progress(targets, text.targets)
            used = getattr(getattr(model, "config", None), "attention_window", None)
    finally:
        model.train(training)
    seconds = time.perf_counter() - began
    if targets != text.targets:
        raise RuntimeError(f"{targets} targets were scored of {text.targets}: the pieces do not cover the text")
    if not math.isfinite(nll):
        raise FloatingPointError(f"the loss is {nll}: the model's weights or the precision {precision} give no numbers")
    return EvalResult(
        nll=nll,
        targets=targets,
        documents=text.documents.count,
        bytes=text.documents.total("bytes"),
        characters=text.documents.total("characters"),
        words=text.documents.total("words"),
        seconds=seconds,
        tokens_per_second=targets / max(seconds, 1e-9),
        batch_size=batch_size,
        window=window,
        attention_window=used,
        state_carried=stateful,
        precision=precision,
        cut=cut,
    )
