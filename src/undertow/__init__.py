"""Undertow: language models that carry a state from window to window, so that text of any length costs constant memory.

    from undertow.nn import SRU, SRUpp                      # layers, used like torch.nn.LSTM
    from undertow.models import SRUppConfig, SRUppForCausalLM
    from undertow.ops import recurrence                     # the elementwise recurrence alone

    model = undertow.add_recurrence(model, undertow.RecurrenceConfig(window=256))   # any Hugging Face causal LM
    model = undertow.load_recurrent("adapter/")

Importing the package is light: what needs transformers, accelerate or matplotlib loads when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow import data, evaluate, models, nn, ops, report, retrofit, train
    from undertow.models import SRUppCache, SRUppConfig, SRUppForCausalLM
    from undertow.retrofit import (
        RecurrenceConfig,
        RecurrentCache,
        RecurrentForCausalLM,
        add_recurrence,
        load_recurrent,
    )

__version__ = "0.1.0"

_ROOMS = ("data", "evaluate", "models", "nn", "ops", "report", "retrofit", "train")
_EXPORTS = dict.fromkeys(("SRUppCache", "SRUppConfig", "SRUppForCausalLM"), "undertow.models") | dict.fromkeys(
    ("RecurrenceConfig", "RecurrentCache", "RecurrentForCausalLM", "add_recurrence", "load_recurrent"),
    "undertow.retrofit",
)

__all__ = [
    "RecurrenceConfig",
    "RecurrentCache",
    "RecurrentForCausalLM",
    "SRUppCache",
    "SRUppConfig",
    "SRUppForCausalLM",
    "add_recurrence",
    "data",
    "evaluate",
    "load_recurrent",
    "models",
    "nn",
    "ops",
    "report",
    "retrofit",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load a room or a class when it is first asked for (PEP 562)."""
    if name in _ROOMS:
        return importlib.import_module(f"undertow.{name}")
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'undertow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
