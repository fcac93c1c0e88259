"""The base's attention, window by window: registered with transformers, so that no model code is touched.

While a recurrent model reads, its base's attention is called ``undertow``. The mask function registered under that name
hands every layer a `View` in place of a mask: the layer's own rule (causal, local) applied to where the tokens stand in
the text. The attention function finds there what is remembered. Keys arrive *un-rotated*, since the layer is given a
rotation by nothing; they are remembered so, and rotated here by the numbers that the window policy gives them.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .config import Settings
from .selection import attend, softmax, weigh
from .windows import Grid, in_window, number

NAME = "undertow"


def unrotated(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines of 1 and sines of 0, for a layer that was to be given `table`, cos and sin of (1, R, r)."""
    cos, sin = (t[:, :1] for t in table)
    return torch.ones_like(cos), torch.zeros_like(sin)


@dataclass
class Layer:
    """What is known of one attention layer of the base."""

    index: int
    module: nn.Module
    rotates: bool
    heads: int
    key_heads: int
    head_dim: int
    local: bool
    """Its own window hides what is far away, so keeping keys for it is of no use."""
    norm: nn.Module | None = None
    """What the hidden states go through before they reach the layer; None: they come as they are."""

    def rotate(self, x: Tensor, table: tuple[Tensor, Tensor], numbers: Tensor) -> Tensor:
        """Queries or keys x (N, H, K, head_dim) turned to position numbers (N, K), by the model's own function."""
        if not self.rotates:
            return x
        cos, sin = (t[0][numbers] for t in table)  # (N, K, r)
        r = cos.shape[-1]
        apply = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        turned, _ = apply(x[..., :r], x[:, :0, :, :r], cos, sin)
        return turned if r == x.shape[-1] else torch.cat([turned, x[..., r:]], -1)

    def repeat(self, x: Tensor) -> Tensor:
        """Keys or values (N, key heads, K, head_dim), one a query head."""
        times = self.heads // self.key_heads
        return x if times == 1 else x.repeat_interleave(times, 1)


@dataclass
class Reading:
    """One call of the base: a grid of steps, what is remembered, and what the layers leave to be remembered."""

    grid: Grid
    config: Settings
    memory: dict[str, Tensor]
    """Tensors of the state, by name."""
    slots: Tensor | None = None
    """(B, n, S, state size) the slots that each step reads; set before a layer that they are written to runs."""
    write: Callable[[Reading, Layer, Tensor, float], Tensor | None] = lambda reading, layer, query, scale: None
    """What the slots add to a layer's attention: given queries (B n, H, L, head_dim), the same shape or None."""
    term: Callable[[Layer, Tensor, Tensor], Tensor | None] = lambda layer, keys, values: None
    """What a trained selection thinks of kept keys and values (B, h, S, head_dim): (B, h, S) or None."""
    recalled: Callable[[Layer, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda layer, keys, values: (keys, values)
    """Kept keys, un-rotated, and values (B, h, S, head_dim) as they are read."""
    swap: bool = False
    """Read the selected keys of the row before (a control)."""
    left: dict[str, Tensor] = field(default_factory=dict)
    """The layers' part of the next state."""
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """Arguments that the layer now running was called with."""
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """cos and sin (1, reach, r) of each layer that is given any."""
    layers: dict[nn.Module, Layer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        grid = self.grid
        self.query_number = number(grid.position, grid.begin, self.config)  # (B, n, L)
        self.key_number = number(grid.key_position, grid.begin, self.config)  # (B, n, P + L)

    def view(self, rule: Callable[..., Any]) -> View:
        """The mask of layers with a rule (batch, head, query position, key position) -> bool."""
        grid = self.grid
        q, k = grid.position.flatten(0, 1)[:, None, :, None], grid.key_position.flatten(0, 1)[:, None, None, :]
        zero = torch.zeros((), dtype=torch.long, device=q.device)
        allowed = rule(zero, zero, q, k) & in_window(q, k, self.config)
        allowed = allowed & grid.key_real.flatten(0, 1)[:, None, None, :]
        own = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
        # A column without a token sees itself: a softmax over nothing would be NaN.
        alone = ~grid.real.flatten(0, 1)[:, None, :, None] & F.pad(own, (k.shape[3] - q.shape[2], 0))
        return View(self, allowed | alone)


@dataclass
class View:
    """Stands where a mask stands: (B n, 1, L, P + L) bool, which keys a query sees, and the reading it belongs to."""

    reading: Reading
    allowed: Tensor


@dataclass
class Capture:
    """Stands where a mask stands, when a layer is asked for its keys and values only."""

    keys: Tensor | None = None
    values: Tensor | None = None


_reading: contextvars.ContextVar[Reading] = contextvars.ContextVar("reading")


# A base is read by one thread at a time: what is put around it is put around it for all.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def mask(*, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
    """Registered as the mask function of ``undertow``."""
    reading = _reading.get(None)
    if reading is None:
        raise RuntimeError("this base is being read by a recurrent model in another thread: let it finish first")
    return reading.view(mask_function)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: View | Capture,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered as the attention function of ``undertow``.

    Args:
        module: the layer.
        query: (B, H, n L, head_dim), un-rotated; key, value: (B, key heads, n L, head_dim).
        attention_mask: what `mask` returned.
        scaling: of the scores; by default 1 / sqrt(head_dim).
        dropout: on the attention map.
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.

    Returns:
        (B, n L, H, head_dim) and None in place of the weights.
    """
    if isinstance(attention_mask, Capture):
        attention_mask.keys, attention_mask.values = key, value
        return query.transpose(1, 2), None
    reading = attention_mask.reading
    layer, grid, memory = reading.layers[module], reading.grid, reading.memory
    (B, n, L), name = grid.size, f"{layer.index}."
    past_key, past_value = memory.get(name + "keys"), memory.get(name + "values")
    if past_key is None or past_value is None:
        past_key, past_value = key[:, :, :0], value[:, :, :0]
    all_key, all_value = (torch.cat(pair, 2) for pair in ((past_key, key), (past_value, value)))
    if grid.past is None:
        K, V = all_key, all_value  # (B, key heads, M + L, head_dim)
    else:
        K, V = (_windows(a, grid.past, b, n) for a, b in ((all_key, key), (all_value, value)))  # (B n, …, P + L, …)
    q = query.view(B, layer.heads, n, L, -1).transpose(1, 2).flatten(0, 1)  # (B n, H, L, head_dim)
    raw, table = q, reading.tables.get(layer.index)
    if table is not None:
        q = layer.rotate(q, table, reading.query_number.flatten(0, 1))
        K = layer.rotate(K, table, reading.key_number.flatten(0, 1))
    scale = scaling if scaling is not None else 1 / math.sqrt(q.shape[-1])
    allowed = attention_mask.allowed
    if reading.config.selected and not layer.local:
        out = attend(reading, layer, q, (K, V, allowed), (all_key, all_value), scale, softcap, dropout)
    elif softcap is not None:
        weights = softmax(q.unflatten(1, (layer.key_heads, -1)), K, allowed, scale, softcap)
        out = weigh(F.dropout(weights.to(q.dtype), dropout), V)
    else:
        K, V = layer.repeat(K), layer.repeat(V)
        out = F.scaled_dot_product_attention(q, K, V, allowed, dropout_p=dropout, scale=scale)
    for what, whole in (("keys", all_key), ("values", all_value)):
        reading.left[name + what] = whole if grid.kept is None else _take(whole, grid.kept)
    added = reading.write(reading, layer, raw, scale)
    if added is not None:
        out = out + added
    return out.view(B, n, layer.heads, L, -1).transpose(2, 3).flatten(1, 2), None


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Positions index (B, M') of x (B, key heads, M, head_dim)."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _windows(whole: Tensor, past: Tensor, own: Tensor, n: int) -> Tensor:
    """Each step's keys (B n, h, P + L, e): its past (B, n, P) of whole (B, h, M + n L, e), then own (B, h, n L, e)."""
    B, h, _, e = own.shape
    before = _take(whole, past.flatten(1)).view(B, h, n, -1, e)
    return torch.cat([before, own.view(B, h, n, -1, e)], 3).transpose(1, 2).flatten(0, 1)


@contextlib.contextmanager
def reading_with(reading: Reading, configs: list[Any], layers: list[Layer]) -> Iterator[Reading]:
    """Inside, the base's attention is ours, and belongs to `reading`; after, the base is as it was."""
    reading.layers = {layer.module: layer for layer in layers}
    with _locks.setdefault(layers[0].module, threading.RLock()):
        yield from _around(reading, configs, layers)


def _around(reading: Reading, configs: list[Any], layers: list[Layer]) -> Iterator[Reading]:
    before = [config._attn_implementation for config in configs]
    hooks = [layer.module.register_forward_pre_hook(_before, with_kwargs=True) for layer in layers]
    token = _reading.set(reading)
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield reading
    finally:
        reading.calls.clear()  # they hold masks, which hold the reading: a circle that would keep all of it for a while
        _reading.reset(token)
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for hook in hooks:
            hook.remove()


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Give a layer no rotation, and note what it would have been given."""
    reading = _reading.get(None)
    if reading is None or module not in reading.layers:  # another thread's business
        return args, kwargs
    layer = reading.layers[module]
    if any(isinstance(x, Capture) for x in (*args, *kwargs.values())):
        return args, kwargs
    reading.calls.clear()
    reading.calls[layer.index] = (args, kwargs)
    table = kwargs.get("position_embeddings")
    if layer.rotates and table is not None:
        reading.tables[layer.index] = table
        kwargs = kwargs | {"position_embeddings": unrotated(table)}
    return args, kwargs


def keys_and_values(reading: Reading, layer: Layer, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (N, key heads, S, head_dim) that a layer makes of hidden states (N, S, d), un-rotated.

    The layer itself is called, so that fused projections, norms of keys and adapters (LoRA) all take part.
    """
    capture = Capture()
    args, kwargs = reading.calls[layer.index]
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def instead(x: Any) -> Any:
        return capture if isinstance(x, View) else hidden_states if x is hidden else x

    args, kwargs = tuple(map(instead, args)), {name: instead(x) for name, x in kwargs.items()}
    if layer.index in reading.tables:
        kwargs["position_embeddings"] = unrotated(reading.tables[layer.index])
    layer.module(*args, **kwargs)
    assert capture.keys is not None
    assert capture.values is not None
    return capture.keys, capture.values


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
