"""Where every token of a piece stands: its position in its row's text, its stride, what it may see, its number.

Everything here is whole numbers. A row's *text position* counts the real tokens of its document; a *stride* is C of
them, and what happens at a boundary happens where one ends, wherever a piece was cut. The tokens that a call adds to
one stride are a *step*. Steps are read in *grids*: n steps of L columns side by side, as if they were rows of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Settings


@dataclass
class Piece:
    """Tokens of a call (B, T), each with its place."""

    real: Tensor
    """(B, T) bool, false at padding."""
    position: Tensor
    """(B, T) text position."""
    rank: Tensor
    """(B, T) which real token of its row it is."""
    step: Tensor
    """(B, T) which step of its row it is read in, from 0."""
    column: Tensor
    """(B, T) which of the step's tokens it is."""
    lengths: list[int]
    """Tokens of each step, in the row that has most."""
    whole: bool
    """Whether the first step of every row that has one begins a stride."""

    @classmethod
    def build(cls, start: Tensor, real: Tensor, resets: Tensor | None, stride: int) -> Piece:
        """Count.

        Args:
            start: (B,) text position of each row's next token.
            real: (B, T) bool, false at padding.
            resets: (B, T) bool, true where a document starts; None: nowhere.
            stride: C.
        """
        rank = real.cumsum(1) - 1
        position = start[:, None] + rank
        if resets is not None:
            began = torch.where(resets & real, rank, -1).cummax(1).values
            position = torch.where(began >= 0, rank - began, position)
        first = real & ((position % stride == 0) | (rank == 0))
        step = first.cumsum(1) - 1
        column = rank - torch.where(first, rank, 0).cummax(1).values
        count = int(step.max()) + 1 if step.numel() else 0
        lengths = [int((column[real & (step == i)]).max()) + 1 for i in range(count)]
        whole = bool((position % stride == 0)[real & (rank == 0)].all())
        return cls(real, position, rank, step, column, lengths, whole)

    def groups(self, most: int, back: int) -> list[tuple[int, int]]:
        """Which steps (first, how many) are read side by side: strides that each begin afresh.

        Args:
            most: at most so many.
            back: a group ends at every multiple of so many steps, where gradients stop.
        """
        count, first = len(self.lengths), 0
        groups = []
        while first < count:
            size = min(most, back - first % back, count - first)
            if first == 0 and not self.whole:
                size = 1
            groups.append((first, size))
            first += size
        return groups


@dataclass
class Grid:
    """n steps of a piece, L columns each: the first `context` columns read the stride before again (overlap)."""

    source: Tensor
    """(B, n, L) which token of the piece; of context, which of the tokens [the state's last C, the piece's real]."""
    real: Tensor
    """(B, n, L) bool."""
    position: Tensor
    """(B, n, L) text position."""
    begin: Tensor
    """(B, n) text position of the step's first new token; where a row has none, that of its next token."""
    end: Tensor
    """(B, n) text position after the step."""
    busy: Tensor
    """(B, n) bool, whether the row has tokens in the step."""
    context: int
    past: Tensor | None
    """(B, n, P) which of [the memory's M positions, the grid's n L columns] each step sees as its past; None: the
    memory as it is (n = 1)."""
    past_real: Tensor
    """(B, n, P) bool, which of them are there."""
    past_position: Tensor
    """(B, n, P)"""
    kept: Tensor | None
    """(B, M') which of [memory, columns] is the memory after the grid; None: all of them."""
    kept_real: Tensor
    """(B, M') bool."""
    kept_position: Tensor
    """(B, M')"""
    source_real: Tensor
    """(B, M + n L) bool: memory and columns, in the order of the text."""
    source_position: Tensor
    """(B, M + n L)"""
    source_document: Tensor
    """(B, M + n L) which of the row's documents in the grid they belong to; the memory's is 0."""
    document: Tensor
    """(B, n) the same of each step."""

    @property
    def size(self) -> tuple[int, int, int]:
        """B, n, L."""
        B, n, L = self.real.shape
        return B, n, L

    @property
    def fresh(self) -> Tensor:
        """(B, n) bool: a document starts with the step."""
        return self.busy & (self.begin == 0)

    def ends(self, stride: int) -> Tensor:
        """(B, n) bool: the step completes a stride."""
        return self.busy & (self.end % stride == 0)

    def document_sources(self, i: int) -> Tensor:
        """(B, M + n L) bool, what there was of the document that step i belongs to, at its end."""
        before = self.source_position < self.end[:, i, None]
        return self.source_real & (self.source_document == self.document[:, i, None]) & before

    @property
    def key_position(self) -> Tensor:
        """(B, n, P + L) text positions of the keys of each step: past, then own."""
        return torch.cat([self.past_position, self.position], -1)

    @property
    def key_real(self) -> Tensor:
        """(B, n, P + L) bool."""
        return torch.cat([self.past_real, self.real], -1)


def number(position: Tensor, begin: Tensor, config: Settings) -> Tensor:
    """The position numbers that the base is given, below its limit however long the text.

    Args:
        position: (B, n, K) text positions.
        begin: (B, n) where each step begins.
        config: resolved.
    """
    stride = begin // config.stride
    if config.policy == "sliding":
        shift = (stride * config.stride + config.stride - config.reach).clamp(min=0)[:, :, None]
        numbers = (position - shift).clamp(min=config.sinks)
        # Sinks stand before the window and room for the selected keys, as if nothing else had been between them.
        between = config.selected + config.window - 1
        gap = (stride * config.stride - between - config.sinks)[:, :, None] - shift
        numbers = torch.where(position < config.sinks, position + gap.clamp(min=0), numbers)
    else:
        first = stride if config.policy == "disjoint" else (stride - 1).clamp(min=0)
        numbers = position - first[:, :, None] * config.stride
    return numbers.clamp(0, config.reach - 1)  # the clamp is for columns that hold no token


def in_window(query: Tensor, key: Tensor, config: Settings) -> Tensor:
    """Whether the policy lets a query see a key of its own window's memory; causality is the model's own rule."""
    if config.policy != "sliding":
        return torch.ones((), dtype=torch.bool, device=query.device)
    return (key > query - config.window) | (key < config.sinks)


def build_grid(
    piece: Piece, first: int, count: int, start: Tensor, memory_real: Tensor, memory_position: Tensor,
    config: Settings,
) -> Grid:  # fmt: skip
    """Lay `count` steps of a piece side by side.

    Args:
        piece: the tokens.
        first, count: which steps.
        start: (B,) text position of each row's next token.
        memory_real: (B, M) bool.
        memory_position: (B, M) text positions of remembered keys.
        config: resolved.
    """
    C, device = config.stride, start.device
    B = start.shape[0]
    length = max(piece.lengths[first : first + count])
    row, t = torch.nonzero(piece.real & (piece.step >= first) & (piece.step < first + count), as_tuple=True)
    place = (row, piece.step[row, t] - first, piece.column[row, t])
    source = torch.zeros(B, count, length, dtype=torch.long, device=device)
    source[place] = t
    real = torch.zeros(B, count, length, dtype=torch.bool, device=device)
    real[place] = True
    position = torch.zeros_like(source)
    position[place] = piece.position[row, t]
    busy = real[:, :, 0]
    # Where a row has no token (only ever after its last one), its next token's position stands.
    end = torch.where(busy, position[:, :, 0] + real.sum(-1), start[:, None])
    for i in range(1, count):
        end[:, i] = torch.where(busy[:, i], end[:, i], end[:, i - 1])
    begin = torch.where(busy, position[:, :, 0], end)

    context = 0
    if config.policy == "overlap":
        again = busy & (begin % C == 0) & (begin > 0)
        if bool(again.any()):
            context = C
            back = torch.arange(C, device=device)
            # The state's last C tokens stand before the piece's real ones, so token `rank` is number C + rank.
            before = piece.rank.gather(1, source[:, :, 0])[:, :, None] + back
            source = torch.cat([torch.where(again[:, :, None], before, 0), source], -1)
            real = torch.cat([again[:, :, None].expand(B, count, C), real], -1)
            position = torch.cat([torch.where(again[:, :, None], begin[:, :, None] - C + back, 0), position], -1)
    L = length + context

    # All that there is to see, in the order of the text: [memory, columns], (B, M + n L).
    M = memory_real.shape[1]
    all_real = torch.cat([memory_real, real.flatten(1)], 1)
    all_position = torch.cat([memory_position, position.flatten(1)], 1)
    all_step = torch.cat([all_real.new_full((M,), -1, dtype=torch.long),
                          torch.arange(count, device=device).repeat_interleave(L)])  # fmt: skip
    fresh = busy & (begin == 0)
    document = fresh.cumsum(1)  # (B, n), of the row's documents in the grid; the memory's is 0
    all_document = torch.cat([document.new_zeros(B, M), document.repeat_interleave(L, 1)], 1)

    past: Tensor | None = None
    if count == 1:
        past_real, past_position = memory_real & ~fresh, memory_position
        if config.policy != "sliding":  # a new window starts from nothing
            past_real = past_real & (begin % C != 0)
        past_real, past_position = past_real[:, None], past_position[:, None]
    elif config.policy == "sliding":
        here, at = all_position[:, None], begin[:, :, None]  # (B, 1, M + n L), (B, n, 1)
        seen = all_real[:, None] & (all_document[:, None] == document[:, :, None]) & (here < at) & busy[:, :, None]
        seen &= (all_step < torch.arange(count, device=device)[:, None])[None]
        seen &= (here > at - config.window) | (here < config.sinks)
        past, past_real = compact(seen)
        past_position = all_position[:, None].expand(B, count, -1).gather(2, past)
    else:  # every step begins a window
        past = torch.zeros(B, count, 0, dtype=torch.long, device=device)
        past_real, past_position = past.bool(), past

    last = end[:, -1:]  # (B, 1) the position of the next token
    keep = all_real & (all_document == document[:, -1:])
    if config.policy == "sliding":
        # Where keys are selected, the one that has just left may still be chosen.
        keep &= (all_position > last - (config.window + (config.selected > 0))) | (all_position < config.sinks)
    else:
        step = busy.sum(1, keepdim=True) - 1  # the row's last step; -1: it has none, and its memory stays
        keep &= (all_step == step) | ((all_step == -1) & (step <= 0) & ~(fresh.any(1, keepdim=True)))
        keep &= (last % C != 0) | (step < 0)
        if count == 1:  # memory of a window that this step does not go on with
            gone = busy & (begin % C == 0)
            keep &= ~(gone & (all_step == -1))
    kept: Tensor | None = None
    most = int(keep.sum(1).max()) if keep.numel() else 0
    # Sorting the memory out at every token would cost more than it saves: a stride's worth may wait.
    if config.policy != "sliding" or config.selected or count > 1 or keep.shape[1] >= most + C:
        order, kept_real = compact(keep)
        kept, kept_position = order, all_position.gather(1, order)
    else:
        kept_real, kept_position = keep, all_position
    return Grid(
        source, real, position, begin, end, busy, context, past, past_real, past_position, kept, kept_real,
        kept_position, all_real, all_position, all_document, document,
    )  # fmt: skip


def compact(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (…, K) of the true entries of the last dimension, in order, and which of those indices are true ones."""
    size = int(wanted.sum(-1).max()) if wanted.numel() else 0
    order = wanted.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :size]
    return order, wanted.gather(-1, order)
