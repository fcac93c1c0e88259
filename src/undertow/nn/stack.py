"""What `SRU` and `SRUpp` share with `torch.nn.LSTM`: the forms that input and state may take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from undertow.nn.cell import GatedCell, clear
from undertow.nn.checks import check_device, check_input, check_mask, check_probabilities, check_shape, check_sizes
from undertow.nn.linear import Linear


@dataclass(frozen=True)
class Batch:
    """An input of any form, read batch first, and the way back to its form."""

    x: Tensor  # (B, T, d_in)
    padding_mask: Tensor | None  # (B, T), true at padding
    resets: Tensor | None  # (B, T), true where a document starts, never at padding
    packed: PackedSequence | None
    unbatched: bool
    batch_first: bool

    @staticmethod
    def of(
        input: Tensor | PackedSequence, padding_mask: Tensor | None, resets: Tensor | None, batch_first: bool
    ) -> Batch:
        """Read (T, B, d_in), (B, T, d_in) with `batch_first`, (T, d_in) or a PackedSequence."""
        packed = None
        if isinstance(input, PackedSequence):
            if padding_mask is not None:
                raise ValueError("a PackedSequence says itself where its rows end: padding_mask must be None")
            packed = input
            input, lengths = pad_packed_sequence(packed, batch_first)
            steps = torch.arange(int(lengths.max()), device=input.device)
            padding_mask = steps >= lengths.to(input.device)[:, None]
        elif input.dim() not in (2, 3):
            raise ValueError(f"input must have 3 dimensions, or 2 without a batch, got shape {tuple(input.shape)}")
        elif padding_mask is not None:
            padding_mask = _batch_first(padding_mask, "padding_mask", input, batch_first)
        if resets is not None:
            resets = _batch_first(resets, "resets", input, batch_first)
            if padding_mask is not None:
                resets = resets & ~padding_mask
        x = _batch_first(input, "input", input, batch_first)
        return Batch(x, padding_mask, resets, packed, input.dim() == 2, batch_first)

    def restore(self, h: Tensor) -> Tensor | PackedSequence:
        """(B, T, D*d) in the form of the input."""
        if self.packed is not None:
            # In the order of the input's rows, so that its own indices hold for the output too.
            assert self.padding_mask is not None
            lengths = (~self.padding_mask).sum(1)
            order = self.packed.sorted_indices
            if order is not None:
                h, lengths = h[order], lengths[order]
            data = pack_padded_sequence(h, lengths.cpu(), batch_first=True).data
            return PackedSequence(data, self.packed.batch_sizes, order, self.packed.unsorted_indices)
        if self.unbatched:
            return h.squeeze(0)
        return h if self.batch_first else h.transpose(0, 1)


def _batch_first(tensor: Tensor, name: str, input: Tensor, batch_first: bool) -> Tensor:
    leading = input.dim() - 1
    if tensor is not input and tuple(tensor.shape) != tuple(input.shape[:leading]):
        raise ValueError(f"{name} must have shape {tuple(input.shape[:leading])} like input, got {tuple(tensor.shape)}")
    if leading == 1:
        return tensor.unsqueeze(0)
    return tensor if batch_first else tensor.transpose(0, 1)


class Stack(nn.Module):
    """Layers one after the other, and the state that `nn.LSTM` would have: (layers * directions, B, d)."""

    layers: nn.ModuleList

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        project_input_first: bool,
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        check_probabilities(dropout=dropout)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.num_directions = 2 if bidirectional else 1
        self.output_size = self.num_directions * hidden_size
        self.input_proj: nn.Linear | None = None
        if project_input_first and input_size != self.output_size:
            self.input_proj = Linear(input_size, self.output_size, bias=False)

    def layer_input_size(self, index: int) -> int:
        """The width that layer `index` reads."""
        return self.input_size if index == 0 and self.input_proj is None else self.output_size

    def layer_dropout(self, index: int) -> float:
        """The dropout on what the highway of layer `index` adds: none in the last layer."""
        return self.dropout if index + 1 < self.num_layers else 0.0

    def reset_parameters(self) -> None:
        """Initialise every layer anew; the projection of the input is Xavier uniform."""
        if self.input_proj is not None:
            nn.init.xavier_uniform_(self.input_proj.weight)
        for layer in self.layers:
            assert isinstance(layer, GatedCell)
            layer.reset_parameters()

    def read(
        self, input: Tensor | PackedSequence, padding_mask: Tensor | None, resets: Tensor | None
    ) -> tuple[Batch, Tensor]:
        """The batch, and what the first layer reads of it: (B, T, d_in)."""
        batch = Batch.of(input, padding_mask, resets, self.batch_first)
        x = batch.x
        weight = next(self.parameters())
        check_shape("input", x, B=None, T=None, input_size=self.input_size)
        check_input("input", x, weight)
        for name, mask in (("padding_mask", batch.padding_mask), ("resets", batch.resets)):
            if mask is not None:
                check_mask(name, mask, weight, B=x.shape[0], T=x.shape[1])
        return batch, x if self.input_proj is None else self.input_proj(clear(x, batch.padding_mask))

    def split_state(self, c: Tensor | None, batch: Batch) -> list[Tensor | None]:
        """(layers * directions, B, d), or None, as one (B, D*d) a layer."""
        if c is None:
            return [None] * self.num_layers
        if not isinstance(c, Tensor):
            raise TypeError(f"state must be a tensor, got {type(c).__name__}")
        rows = {} if batch.unbatched else {"B": batch.x.shape[0]}
        check_shape(
            "state", c, layers_times_directions=self.num_layers * self.num_directions, **rows, d=self.hidden_size
        )
        check_device("state", c, next(self.parameters()))
        c = c.unsqueeze(1) if batch.unbatched else c
        return list(c.unflatten(0, (self.num_layers, self.num_directions)).transpose(1, 2).flatten(2).unbind(0))

    def join_state(self, cs: list[Tensor], batch: Batch) -> Tensor:
        """One (B, D*d) a layer as (layers * directions, B, d)."""
        c = torch.stack(cs).unflatten(2, (self.num_directions, -1)).transpose(1, 2).flatten(0, 1)
        return c.squeeze(1) if batch.unbatched else c

    def extra_repr(self) -> str:
        """The arguments shared with `nn.LSTM`."""
        options = {"num_layers": self.num_layers, "batch_first": self.batch_first, "bidirectional": self.bidirectional}
        return ", ".join([f"{self.input_size}, {self.hidden_size}"] + [f"{k}={v}" for k, v in options.items()])
