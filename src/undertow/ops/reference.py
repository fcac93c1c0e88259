"""The recurrence in plain torch: the definition that every fast path is tested against.

Differentiable as often as wanted, in any dtype, on any device; slow, since it walks over time in Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["recurrence", "states"]


def recurrence(
    u: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    c0: Tensor | None = None,
    *,
    activation: str = "identity",
    skip: bool = True,
    scale: float = 1.0,
    dropout_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    resets: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Same arguments, same results as :func:`undertow.ops.recurrence`; nothing is checked here."""
    h, c = states(
        u, x, weight, bias, c0,
        activation=activation, skip=skip, scale=scale,
        dropout_mask=dropout_mask, padding_mask=padding_mask, resets=resets, reverse=reverse,
    )  # fmt: skip
    return h, c[-1]


def states(
    u: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    c0: Tensor | None,
    *,
    activation: str,
    skip: bool,
    scale: float,
    dropout_mask: Tensor | None,
    padding_mask: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, list[Tensor]]:
    """h (B, T, d), and c before the first step and after each one, in the order in which steps are taken."""
    B, T, k, d = u.shape
    out_dtype = u.dtype
    # Half precision is for storage only: the arithmetic and the state are float32.
    dtype = torch.float32 if u.dtype in (torch.bfloat16, torch.float16) else u.dtype
    u, weight, bias = u.to(dtype), weight.to(dtype), bias.to(dtype)
    c = u.new_zeros(B, d) if c0 is None else c0.to(dtype)
    m = 1.0 if dropout_mask is None else dropout_mask.to(dtype)

    highway = None
    if skip:
        highway = scale * (u[:, :, 3] if k == 4 else x.to(dtype))  # type: ignore[union-attr]
    if padding_mask is not None:
        # Whatever lies in the padding, NaN included, must reach neither values nor gradients.
        u = u.masked_fill(padding_mask[:, :, None, None], 0.0)
        if highway is not None:
            highway = highway.masked_fill(padding_mask[:, :, None], 0.0)
        if resets is not None:
            resets = resets & ~padding_mask

    h: list[Tensor] = [u[:, 0, 0]] * T
    cs = [c]
    for t in reversed(range(T)) if reverse else range(T):
        if resets is not None and not reverse:
            c = c.masked_fill(resets[:, t, None], 0.0)

        f = torch.sigmoid(u[:, t, 1] + weight[0] * c + bias[0])
        r = torch.sigmoid(u[:, t, 2] + weight[1] * c + bias[1])
        new_c = f * c + (1 - f) * u[:, t, 0]
        g = torch.tanh(new_c) if activation == "tanh" else new_c
        h_t = m * r * g if highway is None else highway[:, t] + m * r * (g - highway[:, t])

        if padding_mask is not None:
            padded = padding_mask[:, t, None]
            new_c = torch.where(padded, c, new_c)
            h_t = h_t.masked_fill(padded, 0.0)
        # A document starts at t: read backwards, it ends here, and the one before it must not see its state.
        if resets is not None and reverse:
            new_c = new_c.masked_fill(resets[:, t, None], 0.0)
        h[t] = h_t
        c = new_c
        cs.append(c)

    # Without a step there is nothing to stack; the slice keeps device, dtype and graph.
    return (torch.stack(h, dim=1) if T else u[:, :, 0]).to(out_dtype), cs
