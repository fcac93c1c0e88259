"""Softmax attention of SRU++: whole, masked, or in a sliding window that is never built as one T x S mask.

This file decides who sees whom; `torch.nn.functional.scaled_dot_product_attention` does the rest, or
`undertow.nn.blockwise` on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from undertow.nn.blockwise import Block, blockwise, serves
from undertow.ops import decode

QUERY_BLOCK = 128
"""Queries handled at once: enough to keep the matrix products busy, few enough that a text of any length costs
O(T * (W + block)) instead of O(T * T), and that little of what a block computes is hidden."""

_ON_A_GPU = 4
"""So many times as many where each block is kernels to be launched."""


@dataclass(frozen=True)
class WindowMask:
    """A sliding window: each position sees itself and the `window` real positions before it in its own document.

    Keys are the `past` remembered positions followed by the T new ones. *Real* positions are counted a row at a time,
    so padding takes no place in a window, wherever it stands: a row's numbers do not depend on how it was padded.
    Build it once for a piece of text with `WindowMask.build`, use it in every layer.
    """

    window: int
    past: int
    length: int
    blocks: tuple[Block, ...] = field(repr=False)

    @staticmethod
    def build(
        window: int,
        length: int,
        past: int = 0,
        *,
        past_valid: Tensor | None = None,
        padding_mask: Tensor | None = None,
        resets: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> WindowMask:
        """Work out which keys each query sees.

        Args:
            window: W, how many previous positions a position sees beside itself; 0 or more.
            length: T, the number of new positions.
            past: M, the number of remembered positions, directly before the new ones.
            past_valid: (B, M) bool, false where nothing is remembered; real ones stand at the right. None: all real.
            padding_mask: (B, T) bool, true at padding.
            resets: (B, T) bool, true where a new document starts: nothing before is seen from there on.
            device: where the masks are built; by default that of the first mask given, else the CPU.
        """
        if window < 0:
            raise ValueError(f"attention window must be 0 or more previous positions, got {window}")
        if resets is not None and padding_mask is not None:
            resets = resets & ~padding_mask  # padding starts no document, as in the recurrence
        given = [mask for mask in (past_valid, padding_mask, resets) if mask is not None]
        device = given[0].device if device is None and given else device
        if given:
            blocks = _row_blocks(window, length, past, past_valid, padding_mask, resets, given[0].shape[0], device)
        else:
            blocks = _band_blocks(window, length, past, device)
        return WindowMask(window, past, length, tuple(blocks))


def _query_slices(length: int, device: torch.device | str | None) -> list[slice]:
    on_cpu = device is None or torch.device(device).type == "cpu"
    block = QUERY_BLOCK if on_cpu else _ON_A_GPU * QUERY_BLOCK
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _band_blocks(window: int, length: int, past: int, device: torch.device | str | None) -> list[Block]:
    """All rows alike: query t sees keys past + t - window .. past + t, a band that repeats from block to block."""
    blocks: list[Block] = []
    bands: dict[tuple[int, int, int], Tensor] = {}
    for queries in _query_slices(length, device):
        keys = slice(max(0, past + queries.start - window), past + queries.stop)
        t, s = queries.stop - queries.start, keys.stop - keys.start
        if t == 1:
            blocks.append(Block(queries, keys, None))
            continue
        offset = past + queries.start - keys.start  # the key that stands at the first query
        n = (
            s if offset + t - 1 > window else t
        )  # as long as the window reaches the first key, only those ahead are hidden
        if (t, n, offset - s + n) not in bands:
            behind = torch.arange(t, device=device)[:, None] + offset - torch.arange(s - n, s, device=device)  # (t, n)
            bands[t, n, offset - s + n] = (behind >= 0) & (behind <= window)
        blocks.append(Block(queries, keys, bands[t, n, offset - s + n]))
    return blocks


def _row_blocks(
    window: int,
    length: int,
    past: int,
    past_valid: Tensor | None,
    padding_mask: Tensor | None,
    resets: Tensor | None,
    batch: int,
    device: torch.device | str | None,
) -> list[Block]:
    """Rows differ: positions and documents are counted for each."""
    if past_valid is None:
        past_valid = torch.ones(batch, past, dtype=torch.bool, device=device)
    real = torch.ones(batch, length, dtype=torch.bool, device=device) if padding_mask is None else ~padding_mask
    valid = torch.cat([past_valid, real], dim=1)  # (B, S)
    position = valid.cumsum(1)  # (B, S), counts real positions: equal on padding and on the real one before it
    document = torch.zeros_like(position)
    if resets is not None:
        document[:, past:] = resets.cumsum(1)

    blocks = []
    for queries in _query_slices(length, device):
        q = slice(past + queries.start, past + queries.stop)
        # The furthest key that any row's first query still sees; everything before it is out of every window.
        oldest = position[:, q.start : q.start + 1] - window
        # (A compiled graph cannot depend on such a number; the mask alone is exact, only more work.)
        compiling = torch.compiler.is_compiling()
        first = 0 if compiling else int(torch.searchsorted(position.contiguous(), oldest.contiguous()).min())
        keys = slice(min(first, q.start), q.stop)
        behind = position[:, q, None] - position[:, None, keys]  # (B, t, s)
        index = torch.arange(q.stop, device=device)
        allowed = (index[q, None] >= index[keys]) & (behind <= window) & valid[:, None, keys]
        allowed &= document[:, q, None] == document[:, None, keys]
        blocks.append(Block(queries, keys, allowed[:, None]))
    return blocks


def remembered(
    size: int,
    length: int,
    past: int,
    *,
    past_valid: Tensor | None = None,
    padding_mask: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Which positions are remembered after a piece of text: the last `size` that the next piece may attend to.

    Args:
        size: n, at most M + T.
        length, past, past_valid, padding_mask, resets: as for `WindowMask.build`.

    Returns:
        (B, n) bool, true where what is remembered counts (real, and of the document that goes on); and (B, n), which
        of the M + T positions to keep. Without padding the second is None: the last n. With neither padding, resets nor
        `past_valid` the first is None, too: all count.
    """
    given = [mask for mask in (past_valid, padding_mask, resets) if mask is not None]
    if not given:
        return None, None
    none = torch.zeros(given[0].shape[0], past + length, dtype=torch.bool, device=given[0].device)
    before, present = none[:, :past], none[:, past:]
    valid = torch.cat(
        [~before if past_valid is None else past_valid, ~present if padding_mask is None else ~padding_mask], dim=1
    )  # (B, M + T)
    if resets is not None:
        # Nothing will look back into a document that has ended.
        document = torch.cat([before, resets], dim=1).cumsum(1)
        valid = valid & (document == document[:, -1:])
    first = past + length - size
    if padding_mask is None:
        return valid[:, first:], None
    # Real positions move to the right, in order, so that padding takes nobody's place in the window.
    order = valid.to(torch.uint8).argsort(dim=1, stable=True)[:, first:]
    return valid.gather(1, order), order


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | WindowMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """softmax(q k^T / sqrt(e)) v over the keys that the mask leaves; a query with no key left gets zeros.

    Args:
        q: (B, H, T, e) queries.
        k: (B, H, S, e) keys: S - T remembered ones, then those of the T new positions.
        v: (B, H, S, e) values.
        mask: bool (true: may attend) or float (added to the scores), broadcastable to (B, H, T, S), or a `WindowMask`.
        dropout_p: dropout on the attention map.
        is_causal: with no mask: query t sees keys up to S - T + t.

    Returns:
        (B, H, T, e).
    """
    T, S = q.shape[2], k.shape[2]
    if T == 1 and dropout_p == 0 and (seen := _seen(mask)) is not None and _readable(q, k, v):
        return decode.attend(q, k[:, :, seen], v[:, :, seen])
    ours = dropout_p == 0 and T > 1 and serves(q, k, v)
    if ours and mask is None and is_causal:
        return blockwise(q, k, v, _band_blocks(S, T, S - T, q.device))
    if isinstance(mask, WindowMask):
        if ours:
            return blockwise(q, k, v, mask.blocks)
        parts = [
            scaled_dot_product_attention(q[:, :, b.queries], k[:, :, b.keys], v[:, :, b.keys], b.mask(), dropout_p)
            for b in mask.blocks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    if mask is None and is_causal and T > 1:
        if T == S:
            return scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return scaled_dot_product_attention(q, k, v, mask, dropout_p)


def _seen(mask: Tensor | WindowMask | None) -> slice | None:
    """The keys that the one query there is sees; None where a mask says more than that."""
    if mask is None:
        return slice(None)
    if not isinstance(mask, WindowMask):
        return None
    (block,) = mask.blocks
    return block.keys if block.allowed is None else None


def _readable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiled part can read these as they lie."""
    alike = q.dtype == k.dtype == v.dtype and 0 not in k.shape
    return alike and k.stride(-1) == v.stride(-1) == 1 and decode.serves(q, k, v)
