"""The C++ kernels behind tensors: float32 and bfloat16 on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from undertow.ops.backends import extension

__all__ = ["instruction_set"]

_NO_HIGHWAY, _HIGHWAY_X, _HIGHWAY_U = 0, 1, 2

# Steps between the states that the forward pass keeps for the backward pass.
CHUNK = 16
assert extension is None or extension.CHUNK == CHUNK, "the compiled part is of another version: install undertow again"


def saved_rows(T: int) -> int:
    """States kept: before step 0, CHUNK, 2 CHUNK, ... up to T, in the order of the steps, and the last one.

    Never fewer than two: torch's compilers take sizes 0 and 1 for special cases, which would bound T.
    """
    return T // CHUNK + 2


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Use another instruction set than the best one, in the whole process (for tests and measurements).

    Args:
        name: "avx512", "avx2" or "portable".

    Raises:
        ValueError: this processor (or this build) has no such instruction set.
    """
    if extension is None:
        raise RuntimeError("undertow's compiled part is missing, so there is no instruction set to choose")
    before = extension.instruction_set()
    _use(extension, name, "instruction_set")
    try:
        yield
    finally:
        extension.use_instruction_set(before)


def _use(module: ModuleType, name: str, source: str) -> None:
    if name not in module.instruction_sets():
        here = ", ".join(map(repr, module.instruction_sets()))
        raise ValueError(f"{source}: no instruction set {name!r} here; expected one of {here}")
    module.use_instruction_set(name)


if extension is not None and os.environ.get("UNDERTOW_INSTRUCTION_SET"):
    _use(extension, os.environ["UNDERTOW_INSTRUCTION_SET"], "UNDERTOW_INSTRUCTION_SET")


def _rows(a: Tensor) -> Tensor:
    """The kernels take any strides but the last: there the elements must lie side by side."""
    return a if a.stride(-1) == 1 or a.shape[-1] == 1 else a.contiguous()


def _address(a: Tensor | None) -> int:
    return 0 if a is None else a.data_ptr()


def _arguments(
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
    saved: Tensor | None,
) -> tuple[list[Any], list[Tensor | None]]:
    """What both passes are called with, and the tensors that must live until the call is over."""
    B, T, k, d = u.shape
    u = _rows(u)
    x = None if x is None else _rows(x)
    others = [None if a is None else a.contiguous() for a in (weight, bias, c0, dropout_mask, padding_mask, resets)]
    arguments = [
        torch.get_num_threads(), B, T, d, int(u.dtype == torch.bfloat16),
        _HIGHWAY_U if k == 4 else _NO_HIGHWAY if x is None else _HIGHWAY_X,
        tanh, reverse, scale,
        u.data_ptr(), u.stride(0), u.stride(1), u.stride(2),
        _address(x), 0 if x is None else x.stride(0), 0 if x is None else x.stride(1),
        *map(_address, others),
        _address(saved),
    ]  # fmt: skip
    return arguments, [u, x, *others]


def forward(
    module: ModuleType,
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
    *,
    save: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """h (B, T, d), the last c (B, d), and unless told otherwise the states that the backward pass starts from."""
    B, T, _, d = u.shape
    h = u.new_empty((B, T, d))
    c = weight.new_empty((B, d))
    saved = weight.new_empty((B, saved_rows(T), d)) if save else None
    arguments, _alive = _arguments(
        u, x, weight, bias, c0, tanh, scale, dropout_mask, padding_mask, resets, reverse, saved
    )
    module.forward(*arguments, h.data_ptr(), c.data_ptr())
    return h, c, saved


def backward(
    module: ModuleType,
    grad_h: Tensor,
    grad_c: Tensor,
    u: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    c0: Tensor | None,
    saved: Tensor,
    tanh: bool,
    scale: float,
    dropout_mask: Tensor | None,
    padding_mask: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of u, x (None without x), weight, bias and c0."""
    B, T, k, d = u.shape
    grad_h, grad_c, saved = _rows(grad_h), grad_c.contiguous(), saved.contiguous()
    grad_u = u.new_empty((B, T, k, d))
    grad_x = None if x is None else u.new_empty((B, T, d))
    grad_weight, grad_bias, grad_c0 = weight.new_empty((2, d)), weight.new_empty((2, d)), weight.new_empty((B, d))
    arguments, _alive = _arguments(
        u, x, weight, bias, c0, tanh, scale, dropout_mask, padding_mask, resets, reverse, saved
    )
    module.backward(
        *arguments, grad_h.data_ptr(), grad_h.stride(0), grad_h.stride(1), grad_c.data_ptr(),
        grad_u.data_ptr(), _address(grad_x), grad_weight.data_ptr(), grad_bias.data_ptr(), grad_c0.data_ptr(),
    )  # fmt: skip
    return grad_u, grad_x, grad_weight, grad_bias, grad_c0
