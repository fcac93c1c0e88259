"""What a training run can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_STEPS = 2000


@dataclass
class TrainConfig:
    """How to train: budget, batch, optimiser, schedule, evaluation, checkpoints.

    The defaults suit a model of a few million parameters on one machine. Nothing in a result depends on how the
    batch is spread: ``batch_size`` counts rows over all devices and accumulation groups.
    """

    steps: int | None = None
    """Optimiser steps in all; 2000 where minutes is not given either. Only a budget in steps resumes exactly."""
    minutes: float | None = None
    """Minutes of training in all (evaluation and saving not counted). With steps too: whichever is reached first."""
    batch_size: int = 32
    """Rows in one optimiser step, over all devices and accumulation groups. Each row is a stream of text of its own."""
    micro_batch_size: int | None = None
    """Rows a device handles at once; smaller needs less memory (gradient accumulation). None: all its rows at once."""
    window: int = 64
    """Tokens of each row in one step. Gradients do not flow further back; the state does."""
    optimizer: Literal["radam", "adamw"] = "adamw"
    """AdamW, or RAdam, with decoupled weight decay (the papers' choice, for long runs: it starts slowly)."""
    learning_rate: float = 4e-3
    """The highest learning rate. Larger models want less: the paper trains 100M parameters with 3e-4."""
    base_learning_rate: float | None = None
    """The same for what is trained of a pretrained base inside the model (LoRA, or its own weights); by default
    learning_rate. It follows the same schedule."""
    weight_decay: float = 0.1
    """Decoupled weight decay: each step multiplies the weights by 1 - learning_rate * weight_decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """Which parameters decay: matrices only (no gains, biases and recurrent gate vectors), or all as in the paper."""
    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.99
    """Decay of the running mean of squared gradients."""
    eps: float = 1e-8
    """Added to the square root of the running mean of squared gradients."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: a cosine down to min_learning_rate at the end of the budget, or no change."""
    warmup: float = 0.02
    """Linear warm-up from zero: below 1 a share of the budget, from 1 on a number of steps."""
    min_learning_rate: float = 0.0
    """Where the cosine ends."""
    clip: float = 1.0
    """The gradient is scaled down to this norm where it is longer; 0: never."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: matrix products under autocast; weights, optimiser and the recurrence's state stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    seed: int = 0
    """Decides the order of documents and every random number of the run (the weights are made before it)."""
    carry_state: bool = True
    """Give each piece the state its row was left in. Off: every window is read on its own (for comparison)."""
    eval_every: int = 200
    """Evaluate on the validation text every so many steps, and at the end; 0: never."""
    eval_tokens: int | None = 200_000
    """How many validation tokens an evaluation during training scores; None: all."""
    checkpoint_every: int = 200
    """Write a checkpoint every so many steps, and at the end; 0: only at the end or when stopped."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write the curves for TensorBoard too, under tensorboard/ of the output folder."""
    device: str | None = None
    """cpu, cuda, …; None: what accelerate finds (a GPU where there is one)."""

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            self.steps = DEFAULT_STEPS
        for name in ("steps", "batch_size", "micro_batch_size", "window", "keep", "log_every", "eval_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} should be at least 1, not {value}")
        for name in ("weight_decay", "min_learning_rate", "clip", "warmup", "eval_every", "checkpoint_every", "eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} should not be negative, but is {getattr(self, name)}")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes should be above 0, not {self.minutes}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate should be above 0, not {self.learning_rate}")
        if self.base_learning_rate is not None and not self.base_learning_rate > 0:
            raise ValueError(f"base_learning_rate should be above 0, not {self.base_learning_rate}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} should be in [0, 1), not {getattr(self, name)}")
        for name, choices in (
            ("optimizer", ("radam", "adamw")),
            ("decay", ("matrices", "all")),
            ("schedule", ("cosine", "constant")),
            ("precision", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} should be one of {', '.join(choices)}, not {getattr(self, name)!r}")


# What makes a checkpoint's numbers mean something else: these may not change between a run and its continuation.
BOUND = ("batch_size", "window", "optimizer", "decay", "seed", "carry_state")
# What may change, at the price that the run is no longer the one that would have gone on.
LOOSE = (
    "learning_rate", "base_learning_rate", "weight_decay", "beta1", "beta2", "eps", "schedule", "warmup",
    "min_learning_rate", "clip", "precision", "steps", "minutes",
)  # fmt: skip
