"""What `SRUpp` carries from one piece of text to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.nn.attention import WindowMask, remembered
from undertow.nn.stack import Batch


class SRUppState(NamedTuple):
    """The state of `SRUpp`: with it, a text cut anywhere gives the same numbers."""

    c: Tensor
    """(layers * D, B, d), as in `nn.LSTM`; (layers * D, d) for a single text."""

    memory: tuple[Tensor | None, ...] | None = None
    """For each layer with attention, its inputs at the M positions before, (B, M, width) whatever `batch_first` says
    (B is 1 for a single text); None for the other layers."""

    memory_padding_mask: Tensor | None = None
    """(B, M) bool, true at remembered positions that do not count: padding, or another document's. None: all count."""

    def detach(self) -> SRUppState:
        """The same state, cut off from the graph: what truncated back-propagation carries on."""
        memory = None if self.memory is None else tuple(None if m is None else m.detach() for m in self.memory)
        return SRUppState(self.c.detach(), memory, self.memory_padding_mask)


@dataclass(frozen=True)
class Memory:
    """The inputs of each layer (None: no attention, or nothing before) at the M positions before a piece of text."""

    layers: tuple[Tensor | None, ...]  # each (B, M, width)
    forgotten: Tensor | None  # (B, M) bool, true where a position does not count

    @property
    def length(self) -> int:
        """M."""
        return next((m.shape[1] for m in self.layers if m is not None), 0)

    def window_mask(self, window: int, batch: Batch) -> WindowMask:
        """Each position of the batch sees itself and the `window` real ones before it, remembered or not."""
        return WindowMask.build(
            window,
            batch.x.shape[1],
            self.length,
            past_valid=None if self.forgotten is None else ~self.forgotten,
            padding_mask=batch.padding_mask,
            resets=batch.resets,
            device=batch.x.device,
        )

    def append(self, inputs: Sequence[Tensor | None], batch: Batch, window: int | None) -> Memory:
        """The memory after the batch: its last `window` real positions, or all there are."""
        pairs = zip(self.layers, inputs, strict=True)
        layers = [x if m is None or x is None else torch.cat([m, x], dim=1) for m, x in pairs]
        total = self.length + batch.x.shape[1]
        size = total if window is None else min(window, total)
        valid, order = remembered(
            size,
            batch.x.shape[1],
            self.length,
            past_valid=None if self.forgotten is None else ~self.forgotten,
            padding_mask=batch.padding_mask,
            resets=batch.resets,
        )
        if order is None:
            kept = tuple(None if x is None else x[:, total - size :] for x in layers)
        else:
            kept = tuple(None if x is None else x.take_along_dim(order.unsqueeze(-1), dim=1) for x in layers)
        return Memory(kept, None if valid is None else ~valid)
