"""What a retrofit computes, written plainly: every query against every key of the text, one stride after another.

Works with any model that turns its queries and keys by `apply_rotary_pos_emb(q, k, cos, sin)`, or not at all, and calls
its attention through the registry. Nothing is carried, cut, cached or batched here: one row, read whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AttentionInterface


@dataclasses.dataclass
class Sliding:
    """Which keys a query sees and the numbers that positions get. One window: everything, numbered as it stands."""

    window: int
    stride: int
    sinks: int
    reach: int
    selected: int = 0
    decay: float = 0.9  # of attention received and of the queries counted, from one stride to the next
    distance: int = 0  # from which on a query counts

    @classmethod
    def everything(cls, length: int) -> Sliding:
        return cls(window=length, stride=length, sinks=0, reach=length)


# What a layer reads beside the text in stride s: keys and values (K, S, e), gates (H,); None: nothing.
Extra = Callable[[int, int], tuple[Tensor, Tensor, Tensor] | None]


@torch.no_grad()
def plain(base: Any, ids: Tensor, policy: Sliding, extra: Extra = lambda layer, s: None) -> tuple[Tensor, list[Tensor]]:
    """Logits (T, V) of one text (T,), and the output (T, d) of every decoder layer."""
    module, tables, hidden = sys.modules[type(base).__module__], [], []
    turn = getattr(module, "apply_rotary_pos_emb", None)

    def remember(q, k, cos, sin, *args, **kwargs):
        tables.append((cos, sin))  # by position number, (1, reach, e'); the queries and keys stay as they are
        return q, k

    def attention(layer, query, key, value, mask, scaling=None, softcap=None, sliding_window=None, **kwargs):
        table = tables.pop() if tables else None

        def at(x: Tensor, numbers: Tensor) -> Tensor:
            if table is None:
                return x
            cos, sin = (t.expand(1, -1, -1)[:, numbers] for t in table)
            n = cos.shape[-1]
            return torch.cat([turn(x[..., :n], x[..., :n], cos, sin)[0], x[..., n:]], -1)

        (_, H, T, e), K = query.shape, key.shape[1]
        scaling = e**-0.5 if scaling is None else scaling
        j, C, W = torch.arange(T), policy.stride, policy.window
        mass, kept = torch.zeros(K, T, dtype=query.dtype), torch.zeros(K, T, dtype=torch.bool)
        count = torch.zeros(T, dtype=query.dtype)  # of queries that have come at the distance or farther
        outputs = []
        for s in range(math.ceil(T / C)):
            t = torch.arange(s * C, min(s * C + C, T))
            if policy.selected and sliding_window is None:
                leaving = (j >= policy.sinks) & (j >= s * C - W) & (j <= s * C + C - 1 - W)
                for head in range(K):
                    rivals = torch.nonzero(kept[head] | leaving)[:, 0].tolist()
                    worth = torch.where(count > 0, mass[head] / count, 0).tolist()
                    rivals.sort(key=lambda i, worth=worth: (worth[i], i), reverse=True)
                    kept[head] = False
                    kept[head, rivals[: policy.selected]] = True
            shift = max(0, s * C + C - policy.reach)
            # Sinks stand before the window and room for the selected keys.
            gap = max(0, s * C - (W - 1) - policy.selected - policy.sinks - shift)
            numbers = torch.where(j < policy.sinks, j + gap, (j - shift).clamp(policy.sinks, policy.reach - 1))
            q, k = at(query[:, :, t], t - shift), at(key, numbers)
            scores = q.unflatten(1, (K, H // K)) @ k[:, :, None].mT * scaling  # (1, K, H/K, C, T)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            seen = ((t[:, None] - j < W) | (j < policy.sinks) | kept[:, None, None]) & (j <= t[:, None])
            if sliding_window is not None:
                seen = seen & (t[:, None] - j < sliding_window)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            far = t[:, None] - j >= policy.distance
            mass = policy.decay * mass + (weights * far).sum((0, 2, 3))
            count = policy.decay * count + far.sum(0)
            out = (weights @ value[:, :, None]).flatten(1, 2)
            if (read := extra(layer.layer_idx, s)) is not None:
                keys, values, gates = (r.to(query.dtype) for r in read)
                keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))  # for none of them
                scores = query[:, :, t].unflatten(1, (K, H // K)) @ keys[:, None].mT * scaling
                out = out + gates[:, None, None] * (scores.softmax(-1) @ values[:, None]).flatten(1, 2)
            outputs.append(out)
        return torch.cat(outputs, 2).transpose(1, 2), None

    with contextlib.ExitStack() as stack:
        AttentionInterface.register("reference", attention)  # and no mask of that name: ours are made here
        if turn is not None:
            stack.enter_context(mock.patch.object(module, "apply_rotary_pos_emb", remember))
        before = base.config._attn_implementation
        base.set_attn_implementation("reference")
        stack.callback(base.set_attn_implementation, before)
        for layer in layers_of(base):
            hook = layer.register_forward_hook(lambda layer, args, out: hidden.append(out[0]))
            stack.callback(hook.remove)
        numbers = torch.arange(len(ids) if turn is None else min(policy.reach, max(len(ids), 1)))
        logits = base(ids[None], position_ids=numbers[None], use_cache=False).logits[0]
    return logits, hidden


def layers_of(base: Any) -> Any:
    """The decoder layers of a model: its longest list of modules that hold attention."""
    lists = [
        m for m in base.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == base.config.num_hidden_layers
    ]
    return lists[0]


@torch.no_grad()
def windows(base: Any, ids: Tensor, window: int, policy: str) -> Tensor:
    """Logits (T, V) of one text (T,) by the base itself, called on each window alone. Right for any architecture."""
    C = window if policy == "disjoint" else window // 2
    logits = []
    for start in range(0, len(ids), C):
        first = start if policy == "disjoint" else max(0, start - C)
        out = base(ids[None, first : start + C], use_cache=False).logits[0]
        logits.append(out[start - first :])
    return torch.cat(logits)


@torch.no_grad()
def with_slots(wrapper: Any, ids: Tensor) -> Tensor:
    """Logits (T, V) of one text (T,) by a retrofit: one stride after another, each with all that it sees read anew.

    Pools and updates by the retrofit's own module; what slots are as keys and values is worked out here.
    """
    base, module, settings = wrapper.base, wrapper.recurrence, wrapper.settings
    C, states, logits = settings.stride, [module.start(1)], []

    def written(state: Tensor) -> Extra:
        x = module.update.slots(state)[0]  # (S, slot size)

        def extra(layer: int, s: int) -> tuple[Tensor, Tensor, Tensor] | None:
            if str(layer) not in module.write:
                return None
            write = module.write[str(layer)]
            if settings.projection == "base":
                norm = norm_of(layers_of(base)[layer])
                keys, values = projected(base, layer, (write.norm if norm is None else norm)(x))
            else:
                heads, y = key_heads(base), write.norm(x)
                keys, values = (p(y).unflatten(-1, (heads, -1)).transpose(0, 1) for p in (write.keys, write.values))
            return keys, values, torch.tanh(16 * write.gate)

        return extra

    for s in range(math.ceil(len(ids) / C)):
        stop = min(s * C + C, len(ids))
        if settings.policy == "sliding":
            policy = Sliding(settings.window, C, settings.sinks, settings.reach)
            extras = [written(state) for state in states]
            out, hidden = plain(base, ids[:stop], policy, lambda layer, s, extras=extras: extras[s](layer, s))
        else:
            first = s * C if settings.policy == "disjoint" else max(0, (s - 1) * C)
            out, hidden = plain(base, ids[first:stop], Sliding.everything(stop - first), written(states[-1]))
        n = stop - s * C
        logits.append(out[-n:])
        if settings.update == "held":
            states.append(states[-1])
        elif n == C:
            read = torch.cat([hidden[i][-n:] for i in settings.read_layers], -1)
            states.append(module.update(module.read(read[None]), states[-1]))
    return torch.cat(logits)


def projected(base: Any, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (K, S, e), not turned, that a layer's own projections make of x (S, d)."""
    config, attention = base.config, _attention(layers_of(base)[layer])
    heads = key_heads(base)
    if config.model_type == "gpt2":
        keys, values = attention.c_attn(x).chunk(3, -1)[1:]
    elif config.model_type == "gpt_neox":  # each head's query, key and value lie together
        keys, values = (
            p.flatten(-2) for p in attention.query_key_value(x).unflatten(-1, (heads, 3, -1)).unbind(-2)[1:]
        )
    elif config.model_type == "phi3":
        keys, values = attention.qkv_proj(x)[:, config.hidden_size :].chunk(2, -1)
    else:
        keys, values = attention.k_proj(x), attention.v_proj(x)
    if config.model_type == "olmo2":
        keys = attention.k_norm(keys)
    keys, values = (y.unflatten(-1, (heads, -1)).transpose(0, 1) for y in (keys, values))
    return (attention.k_norm(keys) if config.model_type in ("qwen3", "gemma3_text") else keys), values


def norm_of(layer: Any) -> Any:
    """What a decoder layer's hidden states go through before its attention."""
    names = "ln_1", "self_attn_layer_norm", "input_layernorm"
    return next((getattr(layer, name) for name in names if hasattr(layer, name)), None)


def key_heads(base: Any) -> int:
    """K, how many heads keys and values have."""
    config = base.config
    return (
        config.num_attention_heads if config.model_type in ("gpt2", "gpt_neox", "opt") else config.num_key_value_heads
    )


def _attention(layer: Any) -> Any:
    return next(m for m in layer.modules() if hasattr(m, "layer_idx") and m is not layer)
