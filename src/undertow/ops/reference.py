"""The recurrence and its gradients in plain torch: the definition that every fast path is tested against.

Any dtype, any device, differentiable as often as wanted; slow, since it walks over time in Python.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["gradients", "recurrence", "states"]


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is for storage only: arithmetic, state and parameters are float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


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
    """Arguments and results of :func:`undertow.ops.recurrence`; nothing is checked here."""
    x = x if skip else None
    h, cs = states(u, x, weight, bias, c0, activation == "tanh", scale, dropout_mask, padding_mask, resets, reverse)
    return h, cs[-1]


def states(
    u: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    c0: Tensor | None,
    tanh: bool,
    scale: float,
    dropout_mask: Tensor | None,
    padding_mask: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, list[Tensor]]:
    """h (B, T, d), and c (B, d) before the first step and after each one, in the order in which steps are taken."""
    B, T, _, d = u.shape
    out_dtype, dtype = u.dtype, work_dtype(u.dtype)
    u, highway = _inputs(u, x, scale, padding_mask)
    weight, bias = weight.to(dtype), bias.to(dtype)
    c = u.new_zeros(B, d) if c0 is None else c0.to(dtype)
    m = 1.0 if dropout_mask is None else dropout_mask.to(dtype)

    h: list[Tensor] = [c] * T
    cs = [c]
    for t, padded, reset in _steps(T, padding_mask, resets, reverse):
        if reset is not None and not reverse:
            c = c.masked_fill(reset, 0.0)

        f = torch.sigmoid(u[:, t, 1] + weight[0] * c + bias[0])
        r = torch.sigmoid(u[:, t, 2] + weight[1] * c + bias[1])
        new_c = f * c + (1 - f) * u[:, t, 0]
        g = torch.tanh(new_c) if tanh else new_c
        h[t] = m * r * g if highway is None else highway[:, t] + m * r * (g - highway[:, t])

        if padded is not None:
            new_c = torch.where(padded, c, new_c)
            h[t] = h[t].masked_fill(padded, 0.0)
        # A document starts at t: read backwards, it ends here, and the one before it must not see its state.
        if reset is not None and reverse:
            new_c = new_c.masked_fill(reset, 0.0)
        c = new_c
        cs.append(c)

    # Without a step there is nothing to stack; the slice keeps device, dtype and graph.
    return (torch.stack(h, dim=1) if T else u[:, :, 0]).to(out_dtype), cs


def gradients(
    grad_h: Tensor,
    grad_c: Tensor,
    u: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    c0: Tensor | None,
    tanh: bool,
    scale: float,
    dropout_mask: Tensor | None,
    padding_mask: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of u, x (None without x), weight, bias and c0, written out; themselves differentiable.

    With dh the gradient of h and dc that of c from all later steps::

        dc += dh m r g'(c)
        du0 = dc (1 - f)        du1 = du0 (c_before - u0) f        du2 = dh m r (g(c) - x') (1 - r)
        dx' = dh (1 - m r)      dc_before = dc f + du1 v_f + du2 v_r
    """
    _, cs = states(u, x, weight, bias, c0, tanh, scale, dropout_mask, padding_mask, resets, reverse)
    _, T, k, _ = u.shape
    out_dtype, dtype = u.dtype, work_dtype(u.dtype)
    u, highway = _inputs(u, x, scale, padding_mask)
    weight, bias, dc, grad_h = weight.to(dtype), bias.to(dtype), grad_c.to(dtype), grad_h.to(dtype)
    m = 1.0 if dropout_mask is None else dropout_mask.to(dtype)

    du: list[list[Tensor]] = [[]] * T
    dweight, dbias = [torch.zeros_like(weight)], [torch.zeros_like(bias)]
    for t, padded, reset in reversed(list(_steps(T, padding_mask, resets, reverse))):
        c = cs[T - 1 - t if reverse else t]
        if reset is not None:
            if reverse:
                dc = dc.masked_fill(reset, 0.0)
            else:
                c = c.masked_fill(reset, 0.0)

        f = torch.sigmoid(u[:, t, 1] + weight[0] * c + bias[0])
        r = torch.sigmoid(u[:, t, 2] + weight[1] * c + bias[1])
        new_c = f * c + (1 - f) * u[:, t, 0]
        g = torch.tanh(new_c) if tanh else new_c
        dh = grad_h[:, t] if padded is None else grad_h[:, t].masked_fill(padded, 0.0)
        step_dc = dc + dh * m * r * (1 - g * g if tanh else 1.0)
        du0 = step_dc * (1 - f)
        du1 = du0 * (c - u[:, t, 0]) * f
        du2 = dh * m * r * (g if highway is None else g - highway[:, t]) * (1 - r)
        du[t] = [du0, du1, du2, scale * dh * (1 - m * r)]
        step_dc = step_dc * f + du1 * weight[0] + du2 * weight[1]

        if padded is not None:
            du[t] = [v.masked_fill(padded, 0.0) for v in du[t]]
            step_dc = torch.where(padded, dc, step_dc)
        if reset is not None and not reverse:
            step_dc = step_dc.masked_fill(reset, 0.0)
        dc = step_dc
        dweight.append(torch.stack([(du[t][1] * c).sum(0), (du[t][2] * c).sum(0)]))
        dbias.append(torch.stack([du[t][1].sum(0), du[t][2].sum(0)]))

    grad_u = torch.stack([torch.stack(v[: max(k, 3)], dim=1) for v in du], dim=1) if T else torch.zeros_like(u)
    grad_x = None
    if x is not None:
        grad_x = (torch.stack([v[3] for v in du], dim=1) if T else torch.zeros_like(x)).to(out_dtype)
    return grad_u.to(out_dtype), grad_x, torch.stack(dweight).sum(0), torch.stack(dbias).sum(0), dc


def _inputs(u: Tensor, x: Tensor | None, scale: float, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """U and the scaled highway input (None without one) in working precision, with the padding blanked."""
    dtype = work_dtype(u.dtype)
    u = u.to(dtype)
    highway = u[:, :, 3] if u.shape[2] == 4 else None if x is None else x.to(dtype)
    if highway is not None:
        highway = scale * highway
    if padding_mask is not None:
        # Whatever lies in the padding, NaN included, must reach neither values nor gradients.
        u = u.masked_fill(padding_mask[:, :, None, None], 0.0)
        highway = None if highway is None else highway.masked_fill(padding_mask[:, :, None], 0.0)
    return u, highway


def _steps(
    T: int, padding_mask: Tensor | None, resets: Tensor | None, reverse: bool
) -> Iterator[tuple[int, Tensor | None, Tensor | None]]:
    """Positions in the order of the steps, each with its padding and reset flags (B, 1). Padding is never a reset."""
    if resets is not None and padding_mask is not None:
        resets = resets & ~padding_mask
    for t in reversed(range(T)) if reverse else range(T):
        yield (
            t,
            None if padding_mask is None else padding_mask[:, t, None],
            None if resets is None else resets[:, t, None],
        )
