"""Linear layers that are as fast as memory allows where few rows are read at a time, and their int8 form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from undertow.ops import decode


class Linear(nn.Linear):
    """`torch.nn.Linear`; on a CPU, up to 8 rows that need no gradient are multiplied in one pass over the weights."""

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, (..., in_features) -> (..., out_features)."""
        x, weight = _as_autocast(input), self.weight
        alike = input.dtype == weight.dtype or torch.is_autocast_enabled(input.device.type)
        if not (_few(input, self.in_features) and alike and weight.is_contiguous() and decode.serves(input, weight)):
            return super().forward(input)
        out = decode.product(x, weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits: W[o] = scale[o] * int8, scale[o] = max |W[o]| / 127. For inference.

    Attributes:
        weight: (out_features, in_features) int8.
        scale: (out_features,) float32.
        bias: (out_features,) or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8).contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, input: Tensor) -> Tensor:
        """As the layer that it was made from, (..., in_features) -> (..., out_features)."""
        input = _as_autocast(input)
        if _few(input, self.in_features) and self.in_features <= decode.INT8_IN and decode.serves(input):
            out = decode.product(input, self.weight, self.scale.float())
        else:
            out = F.linear(input, self.weight.to(input.dtype)) * self.scale.to(input.dtype)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def to_int8(model: nn.Module) -> nn.Module:
    """Replace every linear layer of a model by its int8 form, in place; embeddings and gates stay as they are.

    For inference: a quarter of float32's bytes then have to be read for each token, which is what decoding waits for.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


def _few(x: Tensor, width: int) -> bool:
    return 0 < x.numel() <= decode.ROWS * width


def _as_autocast(x: Tensor) -> Tensor:
    """In the dtype that autocast asks of a product."""
    kind: Any = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
