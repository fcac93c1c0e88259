"""What the cells of SRU and SRU++ share: the gates' parameters, the highway, the norm, one recurrence a direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from undertow.nn.checks import (
    check_choice,
    check_device,
    check_input,
    check_mask,
    check_probabilities,
    check_shape,
    check_sizes,
)
from undertow.ops import recurrence

LayerNormPlace = Literal["none", "before", "after"]
Activation = Literal["identity", "tanh"]


class GatedCell(nn.Module):
    """One layer without its matrix products: subclasses compute `u` from `x` and hand it to `recur`.

    Parameters: `weight_c` (2, D*d) and `bias` (2, D*d), rows forget and highway gate, with D directions side by side;
    `layer_norm` over the input ("before") or the output ("after").
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bidirectional: bool = False,
        bias: bool = True,
        layer_norm: LayerNormPlace = "none",
        highway_bias: float = 0.0,
        rescale: bool = False,
        activation: Activation = "identity",
        skip: bool = True,
        highway_dropout: float = 0.0,
        variational_dropout: float = 0.0,
        weight_c_init: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size)
        check_choice("layer_norm", layer_norm, ("none", "before", "after"))
        check_choice("activation", activation, ("identity", "tanh"))
        check_probabilities(highway_dropout=highway_dropout, variational_dropout=variational_dropout)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bidirectional = bidirectional
        self.num_directions = 2 if bidirectional else 1
        self.output_size = self.num_directions * hidden_size
        self.layer_norm_place = layer_norm
        self.highway_bias = float(highway_bias)
        self.activation = activation
        self.skip = skip
        self.highway_dropout = highway_dropout
        self.variational_dropout = variational_dropout
        self.weight_c_init = weight_c_init
        # A fourth part of u stands in for x in the highway where x does not fit there.
        self.num_parts = 4 if skip and input_size != self.output_size else 3
        # Keeps the variance of a deep stack's output where the highway gates start as sigmoid(bias).
        self.scale = math.sqrt(1 + 2 * math.exp(highway_bias)) if rescale and skip and self.num_parts == 3 else 1.0

        self.weight_c = nn.Parameter(torch.empty(2, self.output_size))
        if bias:
            self.bias = nn.Parameter(torch.empty(2, self.output_size))
        else:
            self.register_buffer("bias", torch.empty(2, self.output_size))
        self.layer_norm: nn.LayerNorm | None = None
        if layer_norm != "none":
            self.layer_norm = nn.LayerNorm(input_size if layer_norm == "before" else self.output_size)

    def reset_parameters(self) -> None:
        """v ~ U(-weight_c_init, weight_c_init); forget bias 0; highway bias as given."""
        nn.init.uniform_(self.weight_c, -self.weight_c_init, self.weight_c_init)
        with torch.no_grad():
            self.bias[0] = 0.0
            self.bias[1] = self.highway_bias
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    def normalise(self, x: Tensor) -> Tensor:
        """The layer norm before the matrix products, where there is one; the highway still takes the raw x."""
        return self.layer_norm(x) if self.layer_norm is not None and self.layer_norm_place == "before" else x

    def drop_input(self, x: Tensor) -> Tensor:
        """x (B, T, d_in) times one dropout mask a row, shared over time."""
        if not self.training or self.variational_dropout == 0:
            return x
        mask = self._ones(x.shape[0], 1, x.shape[2])
        return x * F.dropout(mask, self.variational_dropout).to(x.dtype)

    def recur(
        self, u: Tensor, x: Tensor, c0: Tensor | None, padding_mask: Tensor | None, resets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The recurrence of every direction, and the layer norm after it.

        Args:
            u: (B, T, D*k*d), direction by direction, part by part.
            x: (B, T, d_in), the highway's input.
            c0: (B, D*d) or None for zeros.
            padding_mask: (B, T) bool, true at padding.
            resets: (B, T) bool, true where c restarts from zero.

        Returns:
            h (B, T, D*d) and the last c (B, D*d).
        """
        d, D = self.hidden_size, self.num_directions
        # Directions are told apart by views: the gradient of an index would be a full tensor of zeros to write into.
        us = u.unflatten(-1, (D, self.num_parts, d)).unbind(2) if D > 1 else [u.unflatten(-1, (self.num_parts, d))]
        highway = x if self.skip and self.num_parts == 3 else None
        dropout_mask = None
        if self.training and self.highway_dropout > 0:
            dropout_mask = F.dropout(self._ones(x.shape[0], self.output_size), self.highway_dropout)

        def split(tensor: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * D if tensor is None else tensor.chunk(D, dim=-1)

        xs, c0s, dropout_masks = split(highway), split(c0), split(dropout_mask)
        weights, biases = self.weight_c.chunk(D, dim=-1), self.bias.chunk(D, dim=-1)
        directions = [
            recurrence(
                us[i],
                xs[i],
                weights[i],
                biases[i],
                c0s[i],
                activation=self.activation,
                skip=self.skip,
                scale=self.scale,
                dropout_mask=dropout_masks[i],
                padding_mask=padding_mask,
                resets=resets,
                reverse=i == 1,
            )
            for i in range(D)
        ]
        h, c = directions[0] if D == 1 else (torch.cat(both, dim=-1) for both in zip(*directions, strict=True))
        if self.layer_norm is not None and self.layer_norm_place == "after":
            # Where only zeros have been read (left padding, silence) h is zero in every unit, and there the slope of
            # the norm is 1 / sqrt(eps) = 316 a layer: through 4 layers the gradient grows to 1e8, through 16 to NaN.
            # Filling zeros with zeros changes no number and passes no gradient.
            h = clear(h, (h == 0).all(dim=-1))
            h = clear(self.layer_norm(h), padding_mask)
        return h, c

    def check_call(self, x: Tensor, c0: Tensor | None, padding_mask: Tensor | None, resets: Tensor | None) -> None:
        """Shapes, dtypes and devices fit."""
        check_shape("x", x, B=None, T=None, input_size=self.input_size)
        check_input("x", x, self.weight_c)
        B, T, _ = x.shape
        if T == 0:
            raise ValueError(f"x must hold at least one position, got shape {tuple(x.shape)}")
        if c0 is not None:
            check_shape("c0", c0, B=B, hidden_size=self.output_size)
            check_device("c0", c0, self.weight_c)
        for name, mask in (("padding_mask", padding_mask), ("resets", resets)):
            if mask is not None:
                check_mask(name, mask, self.weight_c, B=B, T=T)

    def _ones(self, *shape: int) -> Tensor:
        # In the weights' dtype: 1 / (1 - p) would be off by up to half a percent in bfloat16.
        return self.weight_c.new_ones(shape)

    def extra_repr(self) -> str:
        """The options that differ from the plain cell."""
        options = {
            "bidirectional": self.bidirectional,
            "layer_norm": self.layer_norm_place if self.layer_norm is not None else False,
            "highway_bias": self.highway_bias,
            "scale": self.scale if self.scale != 1 else False,
            "activation": self.activation if self.activation != "identity" else False,
            "skip": None if self.skip else "False",
            "highway_dropout": self.highway_dropout,
            "variational_dropout": self.variational_dropout,
        }
        return ", ".join([f"{self.input_size}, {self.hidden_size}"] + [f"{k}={v}" for k, v in options.items() if v])


def clear(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """x (B, T, d) with zeros at padding, whatever stood there: NaN times zero would still be NaN."""
    return x if padding_mask is None else x.masked_fill(padding_mask.unsqueeze(-1), 0)
