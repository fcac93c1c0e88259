"""The recurrence as a torch operator: eager, autograd, ``torch.compile``, ``torch.export``, autocast, FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from undertow.ops import backends, cpu, reference
from undertow.ops.eager import plain

__all__ = ["recurrence"]

ACTIVATIONS = ("identity", "tanh")


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
    r"""The elementwise recurrence of SRU and SRU++ over a batch of sequences.

    .. math::
        f_t &= \sigma(u^1_t + v_f \odot c_{t-1} + b_f) \\
        r_t &= \sigma(u^2_t + v_r \odot c_{t-1} + b_r) \\
        c_t &= f_t \odot c_{t-1} + (1 - f_t) \odot u^0_t \\
        h_t &= x'_t + m \odot r_t \odot (g(c_t) - x'_t)

    where :math:`x' = s \cdot x`, or the fourth part of u, or nothing. From Lei et al., *Simple Recurrent Units for
    Highly Parallelizable Recurrence* (arXiv 1709.02755), and Lei, *When Attention Meets Fast Recurrence*
    (arXiv 2102.12459).

    Cutting a sequence anywhere and passing c on gives the same numbers, bit for bit.

    Args:
        u: (B, T, k, d), the pre-activations: candidate, forget gate, highway gate and, with k = 4, what the highway
            carries instead of x (for layers whose input is not d wide). float32, bfloat16, float16 or float64; half
            precision is computed in float32. Any strides; fastest where the last dimension is contiguous.
        x: (B, T, d), what the highway carries, in u's dtype. None with k = 4 or ``skip=False``.
        weight: (2, d), how the gates see the state: :math:`v_f, v_r`. In u's dtype, or float32 with half precision u.
        bias: (2, d): :math:`b_f, b_r`, likewise.
        c0: (B, d), the initial state, float32 where u is half precision, else in u's dtype. None: zeros.
        activation: g, "identity" (as in SRU++ and later SRU) or "tanh" (as in the first SRU).
        skip: False leaves the highway out: :math:`h_t = m \odot r_t \odot g(c_t)`.
        scale: s, the factor on what the highway carries (SRU's rescaling).
        dropout_mask: (B, d), m, shared over time: 0 where dropped, 1 / (1 - p) elsewhere. Not differentiated.
        padding_mask: (B, T) bool, True at padding: there the state stays as it is, h is 0, and whatever u and x hold
            (NaN too) has no influence.
        resets: (B, T) bool, True where a document starts: the state is zero before that step. In reverse direction the
            state is zero *after* that step, so that nothing passes from a document to the one before it. A flag on
            padding is ignored.
        reverse: walk from the last step to the first.

    Returns:
        h (B, T, d) in u's dtype, and the state after the last step taken, c (B, d), in c0's dtype.

    Under autocast u and x are cast to the autocast dtype; parameters and state stay float32.

    FLOPs counted (``torch.utils.flop_counter``), every +, -, ×, ÷, exp and tanh of an element and step being one:
    forward 18 (16 without skip), backward 37 (35); tanh adds 1 and 4, a dropout mask 1 and 1, a scale 1 and 2.

    Raises:
        ValueError: shapes or devices do not fit together, or an option has no such value.
        TypeError: dtypes do not fit together.
    """
    device = u.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        if u.dtype in (torch.float32, torch.bfloat16, torch.float16):
            u = u.to(dtype)
            x = None if x is None else x.to(dtype)
    _check(u, x, weight, bias, c0, activation, skip, dropout_mask, padding_mask, resets)

    out_dtype = u.dtype
    if out_dtype is torch.float16:
        # The kernels know one half precision; this one is stored by few on a CPU.
        u = u.float()
        x = None if x is None else x.float()
    dtype = reference.work_dtype(u.dtype)
    if weight.dtype is not dtype:
        weight = weight.to(dtype)
    if bias.dtype is not dtype:
        bias = bias.to(dtype)
    if c0 is not None and c0.dtype is not dtype:
        c0 = c0.to(dtype)
    if dropout_mask is not None and dropout_mask.dtype is not dtype:
        dropout_mask = dropout_mask.to(dtype)
    options = (activation == "tanh", scale, dropout_mask, padding_mask, resets, reverse)
    if not plain(u, x, weight, bias, c0):
        h, c, _ = _forward_op(u, x, weight, bias, c0, *options)
    elif torch.is_grad_enabled():
        h, c, _ = _Direct.apply(u, x, weight, bias, c0, *options)
    else:
        h, c, _ = _forward(u, x, weight, bias, c0, *options, save=False)
    return (h if h.dtype is out_dtype else h.to(out_dtype)), c


def _check(
    u: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    c0: Tensor | None,
    activation: str,
    skip: bool,
    dropout_mask: Tensor | None,
    padding_mask: Tensor | None,
    resets: Tensor | None,
) -> None:
    if u.dim() != 4 or u.shape[2] not in (3, 4):
        raise ValueError(f"u: expected shape (B, T, 3 or 4, d), got {tuple(u.shape)}")
    if u.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(f"u: expected float32, bfloat16, float16 or float64, got {u.dtype}")
    B, T, k, d = u.shape
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if skip and k == 3 and x is None:
        raise ValueError("x: with k = 3 and skip=True the highway needs x of shape (B, T, d), got None")
    if k == 4 and (x is not None or not skip):
        raise ValueError("with k = 4 the highway carries u's fourth part: expected x=None and skip=True")
    if not skip and x is not None:
        raise ValueError("x: expected None with skip=False, since there is no highway to carry it")

    work = reference.work_dtype(u.dtype)
    dtypes = (u.dtype,) if work is u.dtype else (work, u.dtype)
    for name, tensor, shape, allowed in (
        ("x", x, (B, T, d), (u.dtype,)),
        ("weight", weight, (2, d), dtypes),
        ("bias", bias, (2, d), dtypes),
        ("c0", c0, (B, d), dtypes),
        ("dropout_mask", dropout_mask, (B, d), dtypes),
        ("padding_mask", padding_mask, (B, T), (torch.bool,)),
        ("resets", resets, (B, T), (torch.bool,)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected shape {shape} beside u of shape {tuple(u.shape)}, "
                             f"got {tuple(tensor.shape)}")  # fmt: skip
        if tensor.dtype not in allowed:
            expected = " or ".join(str(dtype) for dtype in allowed)
            raise TypeError(f"{name}: expected {expected} beside u of {u.dtype}, got {tensor.dtype}")
        if tensor.device != u.device:
            raise ValueError(f"{name}: expected on {u.device}, where u is, got {tensor.device}")
    if dropout_mask is not None and dropout_mask.requires_grad:
        raise ValueError("dropout_mask: expected a tensor that needs no gradient")


# ---- the operators: undertow::recurrence and undertow::recurrence_backward ----------------------------------------

_OPTIONS = "bool tanh, float scale, Tensor? dropout_mask, Tensor? padding_mask, Tensor? resets, bool reverse"

_library = torch.library.Library("undertow", "DEF")
_library.define(
    f"recurrence(Tensor u, Tensor? x, Tensor weight, Tensor bias, Tensor? c0, {_OPTIONS})"
    " -> (Tensor h, Tensor c, Tensor saved)"
)
_library.define(
    "recurrence_backward(Tensor grad_h, Tensor grad_c, Tensor u, Tensor? x, Tensor weight, Tensor bias, Tensor? c0,"
    f" Tensor saved, {_OPTIONS})"
    " -> (Tensor grad_u, Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_c0)"
)
_forward_op = torch.ops.undertow.recurrence.default
_backward_op = torch.ops.undertow.recurrence_backward.default


def _forward(
    u: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor, c0: Tensor | None, *options: Any, save: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    extension = backends.serving(u.device, u.dtype) if u.shape[-1] else None  # nothing to compute: no kernel for it
    if extension is not None:
        h, c, saved = cpu.forward(extension, u, x, weight, bias, c0, *options, save=save)
        return h, c, c if saved is None else saved
    h, cs = reference.states(u, x, weight, bias, c0, *options)
    c = cs[-1]
    if len(cs) == 1:
        # Without a step these are views of u and c0, which an operator must not return.
        h, c = h.clone(), c.clone()
    return h, c, torch.stack([*cs[:: cpu.CHUNK], cs[-1]], dim=1) if save else c


def _backward(
    grad_h: Tensor, grad_c: Tensor, u: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor, c0: Tensor | None,
    saved: Tensor, *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    extension = backends.serving(u.device, u.dtype) if u.shape[-1] else None  # nothing to compute: no kernel for it
    if extension is not None:
        grad_u, grad_x, *others = cpu.backward(extension, grad_h, grad_c, u, x, weight, bias, c0, saved, *options)
    else:
        grad_u, grad_x, *others = reference.gradients(grad_h, grad_c, u, x, weight, bias, c0, *options)
    grad_weight, grad_bias, grad_c0 = others
    # Without a step the state's gradient is grad_c itself, which an operator must not return.
    grad_c0 = grad_c0.clone() if grad_c0 is grad_c else grad_c0
    return grad_u, _empty(u) if grad_x is None else grad_x, grad_weight, grad_bias, grad_c0


def _empty(u: Tensor) -> Tensor:
    """What stands for the gradient of an x that is not there: an operator cannot return None."""
    return u.new_empty((0,))


@torch.library.register_fake("undertow::recurrence", lib=_library)
def _forward_fake(
    u: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor, c0: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, _, d = u.shape
    return u.new_empty((B, T, d)), weight.new_empty((B, d)), weight.new_empty((B, cpu.saved_rows(T), d))


@torch.library.register_fake("undertow::recurrence_backward", lib=_library)
def _backward_fake(
    grad_h: Tensor, grad_c: Tensor, u: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor, c0: Tensor | None,
    saved: Tensor, *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, k, d = u.shape
    grad_x = _empty(u) if x is None else u.new_empty((B, T, d))
    grad_c0 = weight.new_empty((B, d))
    return u.new_empty((B, T, k, d)), grad_x, weight.new_empty((2, d)), weight.new_empty((2, d)), grad_c0


_library.impl("recurrence", _forward, "CompositeExplicitAutograd")
_library.impl("recurrence_backward", _backward, "CompositeExplicitAutograd")


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    u, x, weight, bias, c0, tanh, scale, dropout_mask, padding_mask, resets, reverse = inputs
    ctx.save_for_backward(u, x, weight, bias, c0, output[2], dropout_mask, padding_mask, resets)
    ctx.options = tanh, scale, reverse


def _gradient_of_forward(
    ctx: Any, grad_h: Tensor, grad_c: Tensor, _: Tensor, backward: Callable[..., Any] = _backward_op
) -> tuple[Tensor | None, ...]:
    u, x, weight, bias, c0, saved, dropout_mask, padding_mask, resets = ctx.saved_tensors
    tanh, scale, reverse = ctx.options
    grad_u, grad_x, grad_weight, grad_bias, grad_c0 = backward(
        grad_h, grad_c, u, x, weight, bias, c0, saved, tanh, scale, dropout_mask, padding_mask, resets, reverse
    )
    return (
        grad_u, None if x is None else grad_x, grad_weight, grad_bias, None if c0 is None else grad_c0,
        None, None, None, None, None, None,
    )  # fmt: skip


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_h, grad_c, u, x, weight, bias, c0, _, tanh, scale, dropout_mask, padding_mask, resets, reverse = inputs
    ctx.save_for_backward(grad_h, grad_c, u, x, weight, bias, c0, dropout_mask, padding_mask, resets)
    ctx.options = tanh, scale, reverse


def _gradient_of_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The second derivative: the gradients' own formulas, in plain torch, differentiated by torch."""
    grad_h, grad_c, u, x, weight, bias, c0, dropout_mask, padding_mask, resets = ctx.saved_tensors
    inputs: list[Any] = [grad_h, grad_c, u, x, weight, bias, c0]
    tanh, scale, reverse = ctx.options
    with torch.enable_grad():
        # Views of their own: the search for gradients must end here, not run on into the graph that made these tensors
        # (u is often made from x, and would be counted twice).
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        outputs = reference.gradients(*(*inputs, tanh, scale, dropout_mask, padding_mask, resets, reverse))
    wanted = [i for i, tensor in enumerate(inputs) if tensor is not None and tensor.requires_grad]
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out is not None and out.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        [inputs[i] for i in wanted],
        [grad for _, grad in pairs],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    results: list[Tensor | None] = [None] * 14  # one for each argument of the operator
    for i, grad in zip(wanted, found, strict=True):
        results[i] = grad
    return tuple(results)


torch.library.register_autograd("undertow::recurrence", _gradient_of_forward, setup_context=_save_forward, lib=_library)
torch.library.register_autograd(
    "undertow::recurrence_backward", _gradient_of_backward, setup_context=_save_backward, lib=_library
)


# ---- the short way ------------------------------------------------------------------------------------------------


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward(*inputs)
        ctx.mark_non_differentiable(output[2])
        _save_forward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # With create_graph the gradients must themselves be recorded: the operator knows how.
        direct = not torch.is_grad_enabled() and plain(*grads)
        grad_h, grad_c, _ = grads
        return _gradient_of_forward(ctx, grad_h, grad_c, _, _backward if direct else _backward_op)


# ---- what it counts ------------------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.undertow.recurrence)
def _forward_flops(
    u: Any, x: Any, weight: Any, bias: Any, c0: Any, tanh: bool, scale: float, dropout_mask: Any, *_: Any, **__: Any
) -> int:
    B, T, k, d = u
    skip = x is not None or k == 4
    # Two gates (3 for the sum, 3 for the sigmoid), the mean of state and candidate, the mean with the highway.
    each = 2 * (3 + 3) + 3 + (3 if skip else 1) + bool(tanh) + (dropout_mask is not None) + (skip and scale != 1)
    return B * T * d * each


@register_flop_formula(torch.ops.undertow.recurrence_backward)
def _backward_flops(
    grad_h: Any, grad_c: Any, u: Any, x: Any, weight: Any, bias: Any, c0: Any, saved: Any, tanh: bool, scale: float,
    dropout_mask: Any, *_: Any, **__: Any,
) -> int:  # fmt: skip
    B, T, k, d = u
    skip = x is not None or k == 4
    # Gates and state anew (15); then 9 for the gradients of u, 5 for the state's, 6 for the parameters'.
    each = 15 + 9 + 5 + 6 + 2 * skip + 4 * bool(tanh) + (dropout_mask is not None) + 2 * (skip and scale != 1)
    return B * T * d * each
