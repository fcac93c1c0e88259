"""One token at a time on a CPU: matrices times a few vectors, and one query's attention.

Both are bound by how fast memory can be read; torch's own products reach a fifth of that where the other factor is a
vector. Forward only: nothing here is differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.ops.backends import extension, serving
from undertow.ops.eager import plain

__all__ = ["attend", "product", "serves"]

ROWS = 8
"""Rows of x, at most: with more a matrix product is the faster way."""

INT8_IN = 1 << 14
"""Columns of int8 weights, at most: the sums of so many products fit."""

STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""How the compiled part calls the dtypes in which weights, keys and values are kept."""

assert extension is None or (extension.PRODUCT_ROWS, extension.INT8_IN) == (ROWS, INT8_IN)


def serves(*tensors: Tensor) -> bool:
    """Whether these are served here: plain tensors on a CPU, float32 or bfloat16, none of which wants a gradient."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return plain(*tensors) and all(serving(t.device, t.dtype) is not None for t in tensors)


def product(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """x Wᵀ, for up to `ROWS` rows.

    Args:
        x: (..., k), float32 or bfloat16.
        weight: (o, k), contiguous: float32, bfloat16, or int8, of which row o counts scale[o] times. Beside int8 each
            row of x is rounded to 14 bits, so that products and their sums are whole numbers; k is at most `INT8_IN`.
        scale: (o,) float32, with int8.

    Returns:
        (..., o) in the dtype of x; summed in float32.
    """
    assert extension is not None
    y = torch.empty((*x.shape[:-1], weight.shape[0]))
    wide = x.float().contiguous()
    rows = wide.numel() // max(1, wide.shape[-1])
    extension.product(
        torch.get_num_threads(), rows, weight.shape[1], weight.shape[0], STORED[weight.dtype], wide.data_ptr(),
        weight.data_ptr(), 0 if scale is None else scale.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(e)) v for one query a head.

    Args:
        q: (B, H, 1, e), float32 or bfloat16.
        k, v: (B, H, S, e) in one dtype, float32 or bfloat16; the last dimension contiguous.

    Returns:
        (B, H, 1, e) in the dtype of q; computed in float32.
    """
    assert extension is not None
    B, H, S, e = k.shape
    wide = (q.float() * e**-0.5).contiguous()
    out = torch.empty((B, H, 1, e))
    extension.attend(
        torch.get_num_threads(), B * H, H, S, e, STORED[k.dtype], wide.data_ptr(),
        k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3], out.data_ptr(),
    )  # fmt: skip
    return out if q.dtype == torch.float32 else out.to(q.dtype)
