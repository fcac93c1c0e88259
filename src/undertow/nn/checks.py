"""Arguments that do not fit are named, with what was expected, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_sizes(**sizes: int) -> None:
    """Each of the named sizes is a whole number of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")


def check_probabilities(**probabilities: float) -> None:
    """Each of the named dropout probabilities lies in [0, 1)."""
    for name, p in probabilities.items():
        if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p < 1:
            raise ValueError(f"{name} must be a probability of at least 0 and below 1, got {p!r}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """The value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_shape(name: str, tensor: Tensor, **expected: int | None) -> None:
    """The shape is as expected: one named size a dimension, None where any size will do."""
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(e not in (None, s) for s, e in zip(shape, expected.values(), strict=True)):
        wanted = ", ".join(axis if size is None else f"{axis}={size}" for axis, size in expected.items())
        raise ValueError(f"{name} must have shape ({wanted}), got {shape}")


def check_mask(name: str, mask: Tensor, like: Tensor, **expected: int | None) -> None:
    """The mask is boolean, of the expected shape, and where `like` is."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"{name} must be a boolean tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
    check_shape(name, mask, **expected)
    check_device(name, mask, like)


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    """The tensor lies on the same device as the weights."""
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, but the layer's weights are on {like.device}")


def check_input(name: str, x: Tensor, weight: Tensor) -> None:
    """The tensor has the dtype (autocast apart) and the device of the weights."""
    check_device(name, x, weight)
    if x.dtype != weight.dtype and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        raise TypeError(f"{name} must have dtype {weight.dtype} like the layer's weights, got {x.dtype}")
