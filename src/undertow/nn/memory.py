"""What `SRUpp` carries from one piece of text to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from undertow.nn.attention import WindowMask
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
        if self.forgotten is None and batch.padding_mask is None and batch.resets is None:
            return Memory(tuple(x if x is None or window is None else x[:, -window:] for x in layers), None)

        B, T, _ = batch.x.shape
        none = torch.zeros(B, self.length + T, dtype=torch.bool, device=batch.x.device)
        before, present = none[:, : self.length], none[:, self.length :]
        forgotten = torch.cat(
            [
                before if self.forgotten is None else self.forgotten,
                present if batch.padding_mask is None else batch.padding_mask,
            ],
            dim=1,
        )  # (B, M+T)
        if batch.resets is not None:
            # Nothing will look back into a document that has ended.
            document = torch.cat([before, batch.resets], dim=1).cumsum(1)
            forgotten = forgotten | (document < document[:, -1:])
        if window is None:
            return Memory(tuple(layers), forgotten)
        # Real positions move to the right, in order, so that padding takes none of the window's places.
        last = (~forgotten).to(torch.uint8).argsort(dim=1, stable=True)[:, -window:]
        layers = [None if x is None else x.take_along_dim(last.unsqueeze(-1), dim=1) for x in layers]
        return Memory(tuple(layers), forgotten.gather(1, last))
