"""All that training and evaluation know of a model: how to read a piece of text with it, and what that text cost.

A causal language model here is a module that is called as Hugging Face models are,
``model(input_ids=..., attention_mask=..., cache=state, use_cache=True)``, and returns ``.logits`` (B, T, V). It
*carries a state* where its ``forward`` takes ``resets`` (B, T), which say where a new document starts: then
``.cache`` is given back to it with the next piece. Any other model reads every window on its own.

A model that adds to a pretrained one keeps that as ``.base``. One that computes its loss bit by bit, never holding all
logits at once, returns ``.logits`` None with it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def carries_state(model: nn.Module) -> bool:
    """Whether the model takes ``resets``, and so can be given the state of the piece before."""
    return "resets" in inspect.signature(unwrap(model).forward).parameters


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of data parallelism and compilation."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def base_of(model: nn.Module) -> nn.Module | None:
    """The pretrained model inside one that adds to it, None where there is none."""
    base = getattr(unwrap(model), "base", None)
    return base if isinstance(base, nn.Module) else None


@dataclass
class Reading:
    """What reading a piece gave.

    ``logits`` (B, T, V), None only where the model computed the loss without ever holding all of them; the state after
    the piece; the loss where the model computed it.
    """

    logits: Tensor | None
    state: Any
    loss: Tensor | None


def read(
    model: nn.Module,
    input_ids: Tensor,
    *,
    state: Any = None,
    resets: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **labels: Any,
) -> Reading:
    """Call the model on one piece.

    Args:
        model: see above; may be wrapped.
        input_ids: (B, T) int64.
        state: ``.state`` of the reading before, or None at the start; ignored by models that carry none.
        resets: (B, T) bool, True where a document starts.
        attention_mask: (B, T), 0 at padding.
        labels: what the model needs to compute its loss itself.
    """
    given: dict[str, Any] = {"input_ids": input_ids, **labels}
    if attention_mask is not None:
        given["attention_mask"] = attention_mask
    stateful = carries_state(model)
    if stateful:
        given |= {"cache": state, "use_cache": True, "resets": resets}
    elif "use_cache" in inspect.signature(unwrap(model).forward).parameters:
        given["use_cache"] = False
    out = model(**given)
    return Reading(out.logits, out.cache if stateful else None, getattr(out, "loss", None))


def load_state(model: nn.Module, path: str | os.PathLike[str]) -> Any:
    """The state that a model's state wrote to a file with ``save``, where the model is.

    Raises:
        ValueError: the model carries no state; the file is damaged, no state, or the state of another model.
    """
    plain: Any = unwrap(model)
    if not carries_state(plain):
        raise ValueError(f"{type(plain).__name__} carries no state, so {path} cannot be one of its states")
    return type(plain.new_cache()).load(path, plain).to(next(plain.parameters()).device)


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nats, (B, T) float32; 0 where the target is -100.

    Row by row, so that no float32 copy of all logits is ever made.
    """
    rows = [
        F.cross_entropy(row.float(), target, ignore_index=-100, reduction="none")
        for row, target in zip(logits, targets, strict=True)
    ]
    return torch.stack(rows)


@contextlib.contextmanager
def attention_window(model: nn.Module, window: int | None) -> Iterator[None]:
    """Let the model attend to ``window`` previous positions inside the block; None changes nothing.

    Raises:
        ValueError: the model's configuration has no ``attention_window``.
    """
    if window is None:
        yield
        return
    config: Any = getattr(unwrap(model), "config", None)
    if not hasattr(config, "attention_window"):
        kind = type(unwrap(model)).__name__
        raise ValueError(f"{kind} has no attention_window to set; leave attention_window out for it")
    before = config.attention_window
    config.attention_window = window
    try:
        yield
    finally:
        config.attention_window = before
