"""SRU, the Simple Recurrent Unit.

Tao Lei et al., "Simple Recurrent Units for Highly Parallelizable Recurrence", EMNLP 2018, arXiv 1709.02755.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from undertow.nn.cell import Activation, GatedCell, LayerNormPlace, clear
from undertow.nn.checks import check_sizes
from undertow.nn.linear import Linear
from undertow.nn.stack import Stack


class SRUCell(GatedCell):
    """One layer of SRU.

        u = W x
        f_t = sigmoid(u1_t + v1 ⊙ c_{t-1} + b1)
        r_t = sigmoid(u2_t + v2 ⊙ c_{t-1} + b2)
        c_t = f_t ⊙ c_{t-1} + (1 - f_t) ⊙ u0_t
        h_t = r_t ⊙ g(c_t) + (1 - r_t) ⊙ x_t

    (arXiv 1709.02755, section 2.) Where the input is not as wide as the output, a fourth part of u stands in for x_t.

    Parameters: `up_proj` W (D*k*d, d_in), or `down_proj` (n, d_in) and `up_proj` (D*k*d, n) with a projection;
    `weight_c` v (2, D*d), `bias` b (2, D*d), `layer_norm`; D is 2 for a bidirectional cell, else 1.

    Args:
        input_size: d_in, the width of x.
        hidden_size: d, the width of h and c in each direction.
        projection_size: n: W becomes the product of two matrices with n in between; 0: one matrix.
        bidirectional: a second recurrence runs from the end.
        bias: False: the gates' biases stay at their first values.
        layer_norm: a LayerNorm "before" W (the highway still takes the raw x) or "after" h.
        highway_bias: first value of b2.
        rescale: scales the highway's x by sqrt(1 + 2 exp(highway_bias)), so that a fresh deep stack keeps its variance.
        activation: g, "identity" or "tanh".
        skip: False: h = r ⊙ g(c).
        highway_dropout: one mask a row, shared over time, on what the highway adds to x.
        variational_dropout: one mask a row, shared over time, on x before W.
        weight_c_init: v ~ U(-weight_c_init, weight_c_init).

    Raises:
        ValueError: a size below 1, a probability outside [0, 1).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        projection_size: int = 0,
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
        super().__init__(
            input_size,
            hidden_size,
            bidirectional=bidirectional,
            bias=bias,
            layer_norm=layer_norm,
            highway_bias=highway_bias,
            rescale=rescale,
            activation=activation,
            skip=skip,
            highway_dropout=highway_dropout,
            variational_dropout=variational_dropout,
            weight_c_init=weight_c_init,
        )
        if projection_size:
            check_sizes(projection_size=projection_size)
        self.projection_size = projection_size
        self.down_proj = Linear(input_size, projection_size, bias=False) if projection_size else None
        self.up_proj = Linear(projection_size or input_size, self.num_parts * self.output_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W Xavier uniform; the gates as in `GatedCell`."""
        super().reset_parameters()
        if self.down_proj is not None:
            nn.init.xavier_uniform_(self.down_proj.weight)
        nn.init.xavier_uniform_(self.up_proj.weight)

    def forward(
        self,
        x: Tensor,
        c0: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read T positions.

        Args:
            x: (B, T, d_in), the dtype of the weights unless under autocast.
            c0: (B, D*d), the c of an earlier call; None: zeros.
            padding_mask: (B, T) bool, true at padding: c passes by, h = 0, what stands there does not matter.
            resets: (B, T) bool, true where a document starts: c restarts from zero.

        Returns:
            h (B, T, D*d), in the dtype of u; c (B, D*d) after the last position (after the first one for the reverse
            direction), float32 if h is shorter than that.

        Raises:
            ValueError: a shape or device that does not fit.
            TypeError: a dtype that does not fit.
        """
        self.check_call(x, c0, padding_mask, resets)
        x = clear(x, padding_mask)
        y = self.drop_input(self.normalise(x))
        u = self.up_proj(y if self.down_proj is None else self.down_proj(y))  # (B, T, D*k*d)
        return self.recur(u, x, c0, padding_mask, resets)

    def extra_repr(self) -> str:
        """The sizes and the options that differ from the plain cell."""
        return super().extra_repr() + (f", projection_size={self.projection_size}" if self.projection_size else "")


class SRU(Stack):
    """Layers of SRU, used like `torch.nn.GRU`: `output, state = sru(input, state)`.

    Args:
        input_size: d_in, the width of the input.
        hidden_size: d, the width of the output in each direction.
        num_layers: layers, each reading the output of the one before.
        bias: False: the gates' biases stay at their first values.
        batch_first: input and output are (B, T, ...), not (T, B, ...). As in `nn.LSTM`, states have the layer first
            either way.
        dropout: one mask a row, shared over time, on what the highway of each layer but the last adds to its input.
        bidirectional: a second recurrence a layer runs from the end of each row.
        projection_size: W of each layer becomes the product of two matrices with this width in between; 0: one matrix;
            or one size a layer.
        project_input_first: where the input is not as wide as the output, one matrix brings it there before the first
            layer, which then needs no fourth part of u.
        variational_dropout: one mask a row, shared over time, on the input of each layer's W.
        device: where the parameters are created.
        dtype: of the parameters.
        layer_norm, highway_bias, rescale, activation, skip, weight_c_init: see `SRUCell`.

    Raises:
        ValueError: a size below 1, a probability outside [0, 1).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        projection_size: int | Sequence[int] = 0,
        project_input_first: bool = False,
        layer_norm: LayerNormPlace = "none",
        highway_bias: float = 0.0,
        rescale: bool = False,
        activation: Activation = "identity",
        skip: bool = True,
        variational_dropout: float = 0.0,
        weight_c_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, project_input_first
        )
        sizes = [projection_size] * num_layers if isinstance(projection_size, int) else list(projection_size)
        if len(sizes) != num_layers:
            raise ValueError(f"projection_size must be one size or num_layers={num_layers} sizes, got {len(sizes)}")
        self.layers = nn.ModuleList(
            SRUCell(
                self.layer_input_size(i),
                hidden_size,
                projection_size=sizes[i],
                bidirectional=bidirectional,
                bias=bias,
                layer_norm=layer_norm,
                highway_bias=highway_bias,
                rescale=rescale,
                activation=activation,
                skip=skip,
                highway_dropout=self.layer_dropout(i),
                variational_dropout=variational_dropout,
                weight_c_init=weight_c_init,
            )
            for i in range(num_layers)
        )
        self.reset_parameters()
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        input: Tensor | PackedSequence,
        state: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Read a batch of texts, or go on reading them.

        Args:
            input: (T, B, d_in), (B, T, d_in) with `batch_first`, (T, d_in) for a single text, or a PackedSequence.
            state: (layers * D, B, d), as an earlier call returned it; (layers * D, d) for a single text; None: zeros.
            padding_mask: bool, the input's shape without its last dimension; true at padding.
            resets: bool, the input's shape without its last dimension; true where a document starts.

        Returns:
            output in the form of the input, D*d wide, zeros at padding; state, each row's own last one.

        Raises:
            ValueError: a shape or device that does not fit.
            TypeError: a dtype that does not fit.
        """
        batch, x = self.read(input, padding_mask, resets)
        cs = []
        for layer, c0 in zip(self.layers, self.split_state(state, batch), strict=True):
            x, c = layer(x, c0, padding_mask=batch.padding_mask, resets=batch.resets)
            cs.append(c)
        return batch.restore(x), self.join_state(cs, batch)
