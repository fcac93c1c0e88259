"""Training: a loop that carries the state from piece to piece, on any causal language model.

Loads lightly: torch and transformers are imported when :func:`train` is first used.
"""

from typing import TYPE_CHECKING, Any

from undertow.train.config import TrainConfig

if TYPE_CHECKING:
    from undertow.train.checkpoint import CheckpointError
    from undertow.train.loop import TrainResult, train

__all__ = ["CheckpointError", "TrainConfig", "TrainResult", "train"]


def __getattr__(name: str) -> Any:
    if name in ("train", "TrainResult"):
        # The function has a module's name for a neighbour nowhere, so the plain import is enough.
        from undertow.train import loop

        return getattr(loop, name)
    if name == "CheckpointError":
        from undertow.train.checkpoint import CheckpointError

        return CheckpointError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
