"""Calls of the recurrence to test with, and an independent formulation to test against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from undertow import ops
from undertow.ops import backends

compiled = backends.extension is not None
INSTRUCTION_SETS = backends.extension.instruction_sets() if backends.extension is not None else []

# One by one and in pairs. "none" is the plain call.
OPTIONS = ("none", "k4", "tanh", "noskip", "scale", "dropout", "padding", "resets", "reverse", "no c0")


@dataclass
class Case:
    """Arguments of one call: those that have gradients, and the options."""

    inputs: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another precision, parameters and state too."""
        inputs = {name: a.to(dtype) for name, a in self.inputs.items()}
        options = {n: a.to(dtype) if n == "dropout_mask" else a for n, a in self.options.items()}
        return Case(inputs, options)

    def leaves(self) -> dict[str, Tensor]:
        return {name: a.detach().clone().requires_grad_() for name, a in self.inputs.items()}

    def call(self, inputs: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        return ops.recurrence(**{"x": None, **(inputs or self.inputs)}, **self.options)  # type: ignore[arg-type]


def make(
    B: int, T: int, d: int, *wanted: str, dtype: torch.dtype = torch.float32, seed: int = 0, state_scale: float = 1.0
) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    def flags(share: float) -> Tensor:
        return torch.rand(B, T, generator=g) < share

    k = 4 if "k4" in wanted else 3
    inputs = {"u": (1.5 * normal(B, T, k, d)).to(dtype)}
    if k == 3 and "noskip" not in wanted:
        inputs["x"] = normal(B, T, d).to(dtype)
    # Small enough for the gradients to fade rather than to explode over a thousand steps.
    inputs |= {"weight": state_scale * (2 * torch.rand(2, d, generator=g) - 1), "bias": normal(2, d)}
    if "no c0" not in wanted:
        inputs["c0"] = normal(B, d)
    if dtype is torch.float64:
        inputs = {name: a.double() for name, a in inputs.items()}
    options: dict[str, Any] = {}
    if "tanh" in wanted:
        options["activation"] = "tanh"
    if "noskip" in wanted:
        options["skip"] = False
    if "scale" in wanted:
        options["scale"] = 1.37
    if "dropout" in wanted:
        options["dropout_mask"] = (torch.rand(B, d, generator=g) < 0.7).to(inputs["weight"].dtype) / 0.7
    if "padding" in wanted:
        options["padding_mask"] = flags(0.3)
    if "resets" in wanted:
        options["resets"] = flags(0.2)
    if "reverse" in wanted:
        options["reverse"] = True
    return Case(inputs, options)


def run(case: Case, seed: int = 1) -> dict[str, Tensor]:
    """Outputs, final state and every gradient."""
    leaves = case.leaves()
    h, c = case.call(leaves)
    g = torch.Generator().manual_seed(seed)
    # Numbers that every dtype holds, so that calls in different dtypes get the same.
    grads = [torch.randn(a.shape, generator=g).bfloat16().to(a.dtype) for a in (h, c)]
    torch.autograd.backward([h, c], grads)
    found = {f"grad {name}": a.grad for name, a in leaves.items()}
    assert all(a is not None for a in found.values())
    return {"h": h.detach(), "c": c.detach(), **found}  # type: ignore[dict-item]


def scalar(case: Case) -> tuple[list[list[list[float]]], list[list[float]]]:
    """h and c by the equations for single numbers, step by step, without tensors."""
    o = case.options
    u, weight, bias = (case.inputs[name].tolist() for name in ("u", "weight", "bias"))
    x, c0 = (case.inputs[name].tolist() if name in case.inputs else None for name in ("x", "c0"))
    m, padding, resets = (o[n].tolist() if n in o else None for n in ("dropout_mask", "padding_mask", "resets"))
    B, T, k, d = case.inputs["u"].shape
    h = [[[0.0] * d for _ in range(T)] for _ in range(B)]
    last = [[0.0] * d for _ in range(B)]

    def sigmoid(a: float) -> float:
        return 1 / (1 + math.exp(-a)) if a >= 0 else math.exp(a) / (1 + math.exp(a))

    for b in range(B):
        for j in range(d):
            c = c0[b][j] if c0 is not None else 0.0
            for t in range(T - 1, -1, -1) if o.get("reverse") else range(T):
                if padding is not None and padding[b][t]:
                    continue
                starts = resets is not None and resets[b][t]
                if starts and not o.get("reverse"):
                    c = 0.0
                f = sigmoid(u[b][t][1][j] + weight[0][j] * c + bias[0][j])
                r = sigmoid(u[b][t][2][j] + weight[1][j] * c + bias[1][j])
                c = f * c + (1 - f) * u[b][t][0][j]
                g = math.tanh(c) if o.get("activation") == "tanh" else c
                keep = m[b][j] if m is not None else 1.0
                if o.get("skip", True):
                    carried = o.get("scale", 1.0) * (u[b][t][3][j] if k == 4 else x[b][t][j])  # type: ignore[index]
                    h[b][t][j] = carried + keep * r * (g - carried)
                else:
                    h[b][t][j] = keep * r * g
                if starts and o.get("reverse"):
                    c = 0.0
            last[b][j] = c
    return h, last
