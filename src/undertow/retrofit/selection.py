"""Keys and values that a layer keeps of what leaves its window: those that receive the most attention from afar.

The idea of heavy hitters (Zhang et al. 2023, arXiv 2306.14048). Choices are made where strides end, so they do not
depend on how the text is cut; and what a layer keeps depends on this layer's attention alone, so a call goes through
the base layer by layer and only the attention of a layer walks its strides one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .windows import Grid, compact, number

if TYPE_CHECKING:
    from .attention import Layer, Reading
    from .config import Settings


_LEAST = 1e-5  # mean attention below which keys are all alike
_MOST = 20.0  # of a trained term, when keys are chosen


@dataclass
class Kept:
    """What a layer has kept, in the order of the text; h is the number of its key heads."""

    keys: Tensor
    """(B, h, S, e), un-rotated."""
    values: Tensor
    """(B, h, S, e)"""
    position: Tensor
    """(B, h, S) text positions."""
    received: Tensor
    """(B, h, S) attention received, see `score`."""
    real: Tensor
    """(B, h, S) bool, which places are taken."""

    @classmethod
    def of(cls, memory: dict[str, Tensor], name: str, like: Tensor, size: int) -> Kept:
        """From a state's tensors `NAME.kept_…`, or nothing yet, for keys `like` (B, h, …, e)."""
        if f"{name}kept_keys" in memory:
            return cls(*(memory[f"{name}kept_{part}"] for part in cls.__annotations__))
        (B, h, _, e), wide = like.shape, torch.promote_types(like.dtype, torch.float32)
        none = like.new_zeros(B, h, size, e)
        position = torch.zeros(B, h, size, dtype=torch.long, device=like.device)
        return cls(none, none, position, position.to(wide), position.bool())

    def tensors(self, name: str) -> dict[str, Tensor]:
        """As a state holds them."""
        return {f"{name}kept_{part}": getattr(self, part) for part in self.__annotations__}


def score(received: Tensor, position: Tensor, end: Tensor, settings: Settings) -> Tensor:
    """Mean attention that keys received from queries at least D = selected_distance positions away.

    Received attention and the number of such queries both decay, by g at each stride's end; the number follows from the
    position alone: with e strides done, stride u counts g^(e-1-u) times its queries t >= position + D.

    Args:
        received: (B, h, S) decayed sum.
        position: (B, h, S) text positions.
        end: (B, h, S) text position where the last stride ended, a multiple of the stride.
        settings: of the recurrence.
    """
    if settings.selected_by == "chance":  # the same number for a position at any time, so that any is as good
        heads = torch.arange(position.shape[-2], device=position.device)[:, None]
        return (torch.sin(position * 12.9898 + heads * 78.233).double() * 43758.5453).frac().abs().to(received.dtype)
    C, g = settings.stride, _decay(settings)
    first = position + settings.selected_distance  # the first query that counts
    partial = C - first % C  # of its stride
    after = end // C - 1 - first // C  # whole strides after that one
    whole = after.clamp(min=0).to(received.dtype)
    count = partial * g**whole + C * (whole if g == 1 else (1 - g**whole) / (1 - g))
    return torch.where(after >= 0, received / count, 0)


def _decay(settings: Settings) -> float:
    return float(settings.selected_decay ** (settings.stride / 128))


def attend(
    reading: Reading,
    layer: Layer,
    query: Tensor,
    windows: tuple[Tensor, Tensor, Tensor],
    sources: tuple[Tensor, Tensor],
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Attention over kept keys and a layer's window, stride after stride; leaves the layer's part of the next state.

    Args:
        reading: the call.
        layer: the layer.
        query: (B n, H, L, e), rotated; its H = h g heads lie in groups of g, each with a key head.
        windows: keys (rotated) and values (B n, h, P + L, e) of each step's window, and which a query sees
            (B n, 1, L, P + L).
        sources: all there is, un-rotated keys and values (B, h, M + n L, e): the memory's and the call's.
        scale: of the scores.
        softcap: see `undertow.retrofit.attention`.
        dropout: on the attention map.

    Returns:
        (B n, H, L, e)
    """
    grid, settings, memory, name = reading.grid, reading.config, reading.memory, f"{layer.index}."
    (B, n, L), all_key = grid.size, sources[0]
    h, M = layer.key_heads, all_key.shape[2] - n * L
    q, K, V, allowed = (x.unflatten(0, (B, n)) for x in (query, *windows))
    q = q.unflatten(2, (h, -1))  # (B, n, h, g, L, e)
    kept = Kept.of(memory, name, all_key, settings.selected)
    received, taken = memory.get(name + "received"), memory.get(name + "taken")
    if received is None or taken is None:
        received, taken = kept.received.new_zeros(B, h, M), kept.real.new_zeros(B, h, M)
    received, taken = (F.pad(t, (0, n * L)) for t in (received, taken))  # (B, h, M + n L)
    every = torch.arange(M + n * L, device=query.device)
    fresh, ends = grid.fresh, grid.ends(settings.stride)
    ended = ends.any(0).tolist()
    out = []
    for i in range(n):
        kept.real = kept.real & ~fresh[:, i, None, None]
        past = every[:M].expand(B, M) if grid.past is None else grid.past[:, i]
        place = torch.cat([past, every[M + i * L : M + (i + 1) * L].expand(B, L)], 1)[:, None].expand(B, h, -1)
        keys, values, seen = _join(reading, layer, i, kept, K[:, i], V[:, i], allowed[:, i], taken.gather(2, place))
        term = reading.term(layer, kept.keys, kept.values)  # (B, h, S)
        weights = softmax(q[:, i], keys, seen, scale, softcap, term)  # (B, h, g, L, S + P + L)
        with torch.no_grad():
            got = _received(grid, i, kept, weights, reading)
            kept.received = torch.where(kept.real, kept.received, 0) + got[..., : settings.selected]
            received = received.scatter_add(2, place, got[..., settings.selected :])
        out.append(weigh(F.dropout(weights.to(values.dtype), dropout), values))
        if ended[i]:
            kept, received, taken = _choose(reading, layer, i, kept, sources, received, taken, ends[:, i])
    index = grid.kept
    assert index is not None  # a memory with selected keys is always sorted out
    index = index[:, None].expand(B, h, -1)
    reading.left |= kept.tensors(name)
    reading.left |= {name + "received": received.gather(2, index), name + "taken": taken.gather(2, index)}
    return torch.stack(out, 1).flatten(0, 1)


def _join(
    reading: Reading,
    layer: Layer,
    i: int,
    kept: Kept,
    K: Tensor,
    V: Tensor,
    allowed: Tensor,
    taken: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kept keys and values before those of the window, (B, h, S + P + L, e), and which a query sees, (B, h, L, …)."""
    B, h, S, e = kept.keys.shape
    keys, values = reading.recalled(layer, kept.keys, kept.values)
    real = kept.real
    table = reading.tables.get(layer.index)
    if table is not None:
        begin = reading.grid.begin[:, i, None, None].expand(B, h, 1).flatten(0, 1)
        numbers = number(kept.position.view(B * h, 1, S), begin, reading.config)[:, 0]
        keys = layer.rotate(keys.reshape(B * h, 1, S, e), table, numbers).view(B, h, S, e)
    if reading.swap:
        keys, values, real = (t.roll(1, 0) for t in (keys, values, real))
    keys, values = torch.cat([keys.to(K.dtype), K], 2), torch.cat([values.to(V.dtype), V], 2)
    filled = reading.grid.real[:, i, None, :, None]  # a column without a token sees itself alone
    seen = torch.cat([(real[:, :, None] & filled), allowed & ~taken[:, :, None]], 3)
    return keys, values, seen


def softmax(
    q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None, term: Tensor | None = None
) -> Tensor:
    """Attention weights, in float32 or wider.

    Args:
        q: (N, h, g, L, e), queries of g heads for each of the h key heads.
        k: (N, h, K, e)
        seen: (N, h or 1, L, K) bool.
        scale: of the scores.
        softcap: see `undertow.retrofit.attention`.
        term: (N, h, S), joins the scores of the first S keys.

    Returns:
        (N, h, g, L, K)
    """
    scores = (((q * scale).flatten(2, 3)) @ k.mT).unflatten(2, q.shape[2:4])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if term is not None:
        more = F.pad(term, (0, k.shape[2] - term.shape[2])).to(scores.dtype)
        scores = scores + more[:, :, None, None]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~seen[:, :, None], -math.inf).softmax(-1)


def weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Values (N, h, K, e) by attention weights (N, h, g, L, K): (N, h g, L, e)."""
    out = weights.flatten(2, 3) @ values  # (N, h, g L, e)
    return out.unflatten(2, weights.shape[2:4]).flatten(1, 2)


def _received(grid: Grid, i: int, kept: Kept, weights: Tensor, reading: Reading) -> Tensor:
    """(B, h, S + P + L): attention (B, h, g, L, S + P + L) that keys received from queries that are far enough."""
    B, h, S = kept.position.shape
    window = torch.cat([grid.past_position[:, i], grid.position[:, i]], 1)[:, None].expand(B, h, -1)
    positions = torch.cat([kept.position.roll(1, 0) if reading.swap else kept.position, window], 2)
    far = grid.position[:, i, None, :, None] - positions[:, :, None] >= reading.config.selected_distance
    far = far & grid.real[:, i, None, :, None]  # (B, h, L, S + P + L)
    got = (weights.sum(2) * far).sum(2).to(kept.received.dtype)
    return torch.cat([got[..., :S].roll(-1, 0), got[..., S:]], 2) if reading.swap else got


def _choose(
    reading: Reading,
    layer: Layer,
    i: int,
    kept: Kept,
    sources: tuple[Tensor, Tensor],
    received: Tensor,
    taken: Tensor,
    ended: Tensor,
) -> tuple[Kept, Tensor, Tensor]:
    """At a stride's end: what leaves the window by the end of the next one competes with what is kept."""
    grid, settings = reading.grid, reading.config
    (B, h, S, e), W, C = kept.keys.shape, settings.window, settings.stride
    end = grid.end[:, i, None]  # (B, 1)
    free = grid.document_sources(i) & (grid.source_position >= settings.sinks) & (grid.source_position >= end - W)
    free &= grid.source_position <= end + C - 1 - W
    place, real = compact(free & ended[:, None])  # (B, R), in the order of the text, and later than all that is kept
    R = place.shape[1]
    position = grid.source_position.gather(1, place)[:, None].expand(B, h, R)
    place = place[:, None].expand(B, h, R)
    deep = place[..., None].expand(B, h, R, e)
    keys, values = (
        torch.cat([mine.to(whole.dtype), whole.gather(2, deep)], 2)
        for mine, whole in zip((kept.keys, kept.values), sources, strict=True)
    )
    new = Kept(
        keys,
        values,
        torch.cat([kept.position, position], 2),
        torch.cat([kept.received, received.gather(2, place)], 2),
        torch.cat([kept.real, real[:, None].expand(B, h, R)], 2),
    )
    with torch.no_grad():
        worth = score(new.received, new.position, end[:, None].expand_as(new.position), settings)
        term = reading.term(layer, new.keys, new.values)
        if term is not None:
            worth = (worth + _LEAST).log() - math.log(_LEAST) + term.to(worth.dtype).clamp(-_MOST, _MOST) + _MOST
        worth = worth.masked_fill(~new.real, -1)
    # The heaviest, the later of equals first; then in the order of the text again.
    best = (S + R - 1 - worth.flip(2).argsort(dim=2, descending=True, stable=True)[..., :S]).sort(2).values
    chosen = torch.zeros_like(new.real).scatter(2, best, True)[..., S:]
    decay = _decay(settings)
    rows = ended[:, None, None]
    whole = best[..., None].expand(B, h, S, e)
    kept = Kept(
        torch.where(rows[..., None], new.keys.gather(2, whole), kept.keys.to(new.keys.dtype)),
        torch.where(rows[..., None], new.values.gather(2, whole), kept.values.to(new.values.dtype)),
        torch.where(rows, new.position.gather(2, best), kept.position),
        torch.where(rows, new.received.gather(2, best) * decay, kept.received),
        torch.where(rows, new.real.gather(2, best), kept.real),
    )
    taken = taken | torch.zeros_like(taken).scatter(2, place, chosen & real[:, None])
    return kept, torch.where(rows, received * decay, received), taken
