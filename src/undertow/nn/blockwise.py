"""Attention on a CPU, a block of queries at a time: each block is two matrix products, four on the way back.

`scaled_dot_product_attention` computes what a mask hides as well, and its CPU kernels take twice as long as the
products in them do; bfloat16 makes them no faster. Here a block meets no key but those that some of its queries see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from undertow.ops.eager import traced

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Block:
    """`queries` attend to `keys`, and of the last n of these to those that `allowed` is true at; None: to all.

    `allowed` is bool, (t, n), the same for all rows, or (B, 1, t, n). A query that sees nothing gets zeros, which is
    looked for where rows differ.
    """

    queries: slice
    keys: slice
    allowed: Tensor | None

    def mask(self) -> Tensor | None:
        """As `scaled_dot_product_attention` takes it: over all of `keys`."""
        if self.allowed is None:
            return None
        return F.pad(self.allowed, (self.keys.stop - self.keys.start - self.allowed.shape[-1], 0), value=True)


def serves(*tensors: Tensor) -> bool:
    """Whether these are plain tensors on a CPU, of a dtype known here, that no compiler or transform looks at."""
    return not traced() and all(type(t) is Tensor and t.device.type == "cpu" and t.dtype in DTYPES for t in tensors)


def blockwise(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block]) -> Tensor:
    """softmax(q kᵀ / sqrt(e)) v.

    Args:
        q: (B, H, T, e) queries.
        k: (B, H, S, e) keys.
        v: (B, H, S, e) values, as wide as the keys. All float32, bfloat16 or float64, on a CPU.
        blocks: who sees whom; each query is in one of them.

    Returns:
        (B, H, T, e), in the dtype of q. Scores and their softmax are float32 where that is shorter.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with torch.autocast("cpu", enabled=False):
        out: Tensor = _Blockwise.apply(q, k.to(q.dtype), v.to(q.dtype), blocks)
    return out


class _Blockwise(torch.autograd.Function):
    """Heads are rows: below, q (N, T, e), k and v (N, S, e) with N = B H."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.blocks = blocks
        ctx.weights = []
        needed = any(ctx.needs_input_grad)
        out = torch.empty(q.shape, dtype=q.dtype)  # contiguous, whatever q is a view of
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        into = out.flatten(0, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        q_scaled, wide_k = q.to(wide) * q.shape[-1] ** -0.5, k.to(wide)
        for block in blocks:
            s = torch.bmm(q_scaled[:, block.queries], wide_k[:, block.keys].mT)  # (N, t, s)
            p = _softmax(s, block.allowed, out.shape[1]).to(q.dtype)
            torch.bmm(p, v[:, block.keys], out=into[:, block.queries])
            if needed:
                ctx.weights.append(p)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are to be differentiated themselves: by formulas that torch knows
            return (*_differentiable(q, k, v, ctx.blocks, grad_out), None)
        shapes = [x.shape for x in (q, k, v)]
        q, k, v, grad_out = (x.flatten(0, 1) for x in (q, k, v, grad_out))
        scale = q.shape[-1] ** -0.5
        grad_q = torch.empty(q.shape, dtype=q.dtype)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=x.dtype) for x in (k, v))
        for block, p in zip(ctx.blocks, ctx.weights, strict=True):
            rows, seen = block.queries, block.keys
            g = grad_out[:, rows]
            grad_v[:, seen].baddbmm_(p.mT, g)
            grad_p = torch.bmm(g, v[:, seen].mT)
            grad_s = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)  # p (grad_p - Σ p grad_p)
            to = grad_q[:, rows]
            torch.baddbmm(to, grad_s, k[:, seen], beta=0, alpha=scale, out=to)
            grad_k[:, seen].baddbmm_(grad_s.mT, q[:, rows], alpha=scale)
        grads = (grad_q, grad_k, grad_v)
        return (*(x.view(shape) for x, shape in zip(grads, shapes, strict=True)), None)


def _softmax(s: Tensor, allowed: Tensor | None, heads: int) -> Tensor:
    """Of scores (N, t, s), which are overwritten."""
    if allowed is None:
        return s.softmax(-1)
    hidden = ~allowed
    last = s[..., s.shape[-1] - allowed.shape[-1] :]
    if allowed.dim() == 2:  # a band: each query sees itself
        last.masked_fill_(hidden, -torch.inf)
        return s.softmax(-1)
    last.unflatten(0, (-1, heads)).masked_fill_(hidden, -torch.inf)
    return torch.ops.aten._safe_softmax(s, -1)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], grad_out: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, with a graph of their own."""
    # Views of their own: the search for gradients must end here, not run on into the graph that made these tensors.
    inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = inputs
    parts = []
    for block in blocks:
        s = (q[:, :, block.queries] * q.shape[-1] ** -0.5) @ k[:, :, block.keys].mT
        mask = block.mask()
        s = s if mask is None else s.masked_fill(~mask, -torch.inf)
        parts.append(torch.ops.aten._safe_softmax(s, -1) @ v[:, :, block.keys])
    return torch.autograd.grad(torch.cat(parts, 2), inputs, grad_out, create_graph=True)
