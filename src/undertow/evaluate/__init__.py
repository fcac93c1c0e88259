"""Evaluation: what a text costs a model, in bits and in perplexity, each target scored once, and what reading takes.

Loads lightly: torch and transformers are imported when something is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.evaluate.costs import flop_counter, peak_memory, reading_costs
    from undertow.evaluate.evaluator import DocumentResult, EvalResult, evaluate
    from undertow.evaluate.policies import POLICIES, PolicyResult, compare, plan

_EXPORTS = {
    "costs": ("flop_counter", "peak_memory", "reading_costs"),
    "evaluator": ("DocumentResult", "EvalResult", "evaluate"),
    "policies": ("POLICIES", "PolicyResult", "compare", "plan"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "POLICIES",
    "DocumentResult",
    "EvalResult",
    "PolicyResult",
    "compare",
    "evaluate",
    "flop_counter",
    "peak_memory",
    "plan",
    "reading_costs",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"undertow.evaluate.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
