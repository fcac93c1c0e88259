"""A recurrence for any pretrained Hugging Face causal language model.

Importing the room is light; transformers loads with the first class of it that needs it, and its Auto classes then know
`RecurrentForCausalLM`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import RecurrenceConfig

if TYPE_CHECKING:
    from .anatomy import UnsuitableBase
    from .cache import RecurrentCache
    from .modeling import RecurrentConfig, RecurrentForCausalLM, add_recurrence
    from .storage import load_recurrent

__all__ = [
    "RecurrenceConfig",
    "RecurrentCache",
    "RecurrentConfig",
    "RecurrentForCausalLM",
    "UnsuitableBase",
    "add_recurrence",
    "load_recurrent",
]

_PLACES = {
    "RecurrentCache": "cache",
    "RecurrentConfig": "modeling",
    "RecurrentForCausalLM": "modeling",
    "UnsuitableBase": "anatomy",
    "add_recurrence": "modeling",
    "load_recurrent": "storage",
}


def __getattr__(name: str) -> Any:
    """Load a class when it is first asked for (PEP 562)."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
