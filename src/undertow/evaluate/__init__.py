"""Evaluation: what a text costs a model, in bits and in perplexity, every target scored exactly once.

Loads lightly: torch and transformers are imported when :func:`evaluate` is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.evaluate.evaluator import EvalResult, evaluate

__all__ = ["EvalResult", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from undertow.evaluate import evaluator

        return getattr(evaluator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
