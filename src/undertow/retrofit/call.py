"""What one call of a recurrent model is given and asked for, shared out over the grids in which it is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import Grid


@dataclass
class Share:
    """A grid's part of a call: n steps of L columns, side by side."""

    input_ids: Tensor
    """(B, n L)"""
    targets: Tensor | None
    """(B, n L), -100 where nothing is to be scored."""
    columns: Tensor
    """Which of the n L columns' logits are needed by any row, for the loss or to be returned."""
    wanted: Tensor
    """(B, columns) bool, logits that are to be returned."""
    place: Tensor
    """(B, columns) where among those returned."""


class Call:
    """The tokens, what is to be scored, and which logits are to be returned.

    Args:
        input_ids: (B, T).
        real: (B, T) bool, false at padding.
        targets: (B, T), -100 where nothing is to be scored; None: no loss is asked for.
        kept: (T',) positions whose logits are returned; None: none.
        before: (B, C) the last tokens of the state, which windows that overlap read again; None: they do not.
    """

    def __init__(
        self, input_ids: Tensor, real: Tensor, targets: Tensor | None, kept: Tensor | None, before: Tensor | None
    ) -> None:
        self.input_ids, self.real, self.targets, self.kept = input_ids, real, targets, kept
        T, device = input_ids.shape[1], input_ids.device
        self.place = torch.full((T,), -1, dtype=torch.long, device=device)  # of each position's logits; -1: unwanted
        if kept is not None:
            self.place[kept] = torch.arange(len(kept), device=device)
        self.overlapped: Tensor | None = None  # the state's last tokens, then the real ones of the call
        if before is not None:
            order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
            self.overlapped = torch.cat([before, input_ids.gather(1, order)], 1)

    def share(self, grid: Grid) -> Share:
        """The part of a grid."""
        B, n, _ = grid.size
        again, own = grid.source.split([grid.context, grid.source.shape[2] - grid.context], 2)
        columns = own.flatten(1)
        ids = self.input_ids.gather(1, columns).view(own.shape)
        place = self.place[columns].view(own.shape)
        targets = None if self.targets is None else self.targets.gather(1, columns).view(own.shape)
        first = grid.real[:, :, grid.context :]  # read for the first time
        if grid.context:  # what is read again is neither scored nor returned
            assert self.overlapped is not None
            ids = torch.cat([self.overlapped.gather(1, again.flatten(1)).view(B, n, -1), ids], 2)
            place, first = F.pad(place, (grid.context, 0), value=-1), F.pad(first, (grid.context, 0))
            targets = None if targets is None else F.pad(targets, (grid.context, 0), value=-100)
        wanted, place = (first & (place >= 0)).flatten(1), place.flatten(1)
        needed = wanted
        if targets is not None:
            targets = targets.masked_fill(~first, -100).flatten(1)
            needed = needed | (targets != -100)
        some = needed.any(0).nonzero()[:, 0]
        return Share(ids.flatten(1), targets, some, wanted[:, some], place[:, some])

    def last(self, C: int) -> dict[str, Tensor]:
        """What windows that overlap leave for the next call: the last C tokens, by the name the state has for them."""
        if self.overlapped is None:
            return {}
        index = self.real.sum(1, keepdim=True) + torch.arange(C, device=self.real.device)
        return {"tokens": self.overlapped.gather(1, index)}


class Collected:
    """Logits of grids, put where the tokens of the piece stand."""

    def __init__(self, kept: Tensor | None) -> None:
        self.size = 0 if kept is None else len(kept)
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor, real: Tensor, place: Tensor) -> None:
        """Logits (B, c, V), of which those at `real` (B, c) belong at positions `place` (B, c)."""
        self.parts.append((logits, real, place))

    def logits(self, B: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(B, T', V); zeros at padding."""
        if self.parts:
            place = torch.cat([p for _, _, p in self.parts], 1)
            real = torch.cat([r for _, r, _ in self.parts], 1)
            order = torch.arange(self.size, device=device)
            if place.shape[1] == self.size and bool(real.all()) and bool((place == order).all()):
                return torch.cat([part for part, _, _ in self.parts], 1) if len(self.parts) > 1 else self.parts[0][0]
            first = self.parts[0][0]
            vocabulary, dtype = first.shape[2], first.dtype
        whole = torch.zeros(B, self.size, vocabulary, dtype=dtype, device=device)
        for logits, real, place in self.parts:
            row, column = real.nonzero(as_tuple=True)
            whole = whole.index_put((row, place[row, column]), logits[row, column])
        return whole
