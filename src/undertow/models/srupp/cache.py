"""The state of an SRU++ language model: all that passes from one piece of text to the next.

A layer remembers its recurrent vector c and, where it attends, the keys and values of the last W real positions. What
is common to all layers (which of those positions are real) is kept once. The size does not depend on the text's length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndSlidingWindowAttentionLayer, LinearAttentionLayer

from ...nn.attention import remembered
from ...nn.step import Remembered
from ..state import State
from .configuration import SRUppConfig

# Sizes of a model that a state has to fit, and nothing else of its configuration.
_TAIL = 8  # token ids remembered to recognise a text by

_FITS = (
    "num_hidden_layers",
    "hidden_size",
    "projection_size",
    "num_attention_heads",
    "attention_every",
    "attention_last",
)


class SRUppRecurrentLayer(LinearAttentionLayer):
    """State of a layer without attention: c (B, d), which is `recurrent_states[0]`."""

    keys: Tensor | None = None
    values: Tensor | None = None
    cumulative_length = 0

    @property
    def steps(self) -> bool:
        """Whether everything that a step reads is there, in the dtypes that it reads."""
        c = self.recurrent_states[0]
        return c is not None and c.dtype == torch.float32 and c.device.type == "cpu"

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Assign rather than copy in place, so that gradients flow through any number of updates."""
        self.device, self.dtype = recurrent_states.device, recurrent_states.dtype  # type: ignore[assignment]
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        return recurrent_states

    def reset(self) -> None:
        """Forget everything, without touching tensors that a graph may still need."""
        LinearAttentionLayer.__init__(self, self.number_of_states)

    def map_(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of this layer (its first dimension is the batch) by `function` of it."""
        for name, tensor in self.tensors().items():
            self.put(name, function(tensor))

    def tensors(self) -> dict[str, Tensor]:
        """What is remembered, by name."""
        c = self.recurrent_states[0]
        return {} if c is None else {"c": c}

    def put(self, name: str, tensor: Tensor) -> None:
        """Set one of `tensors()`."""
        self.update_recurrent_state(tensor)


class SRUppAttentionLayer(  # type: ignore[misc, override]
    LinearAttentionAndSlidingWindowAttentionLayer, SRUppRecurrentLayer
):
    """State of a layer with attention: c (B, d), and `keys`, `values` (B, H, M, d'/H) of the last M <= W positions."""

    update_recurrent_state = SRUppRecurrentLayer.update_recurrent_state

    def __init__(self, window: int) -> None:
        # transformers keeps one position fewer than its `sliding_window`, which counts the present one.
        super().__init__(sliding_window=window + 1)
        self._rooms: dict[str, _Room] = {}

    def reset(self) -> None:
        """Forget everything, without touching tensors that a graph may still need."""
        SRUppAttentionLayer.__init__(self, self.sliding_window - 1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row b be what row beam_idx[b] was."""
        self.map_(lambda t: t.index_select(0, beam_idx.to(t.device)))

    @property
    def steps(self) -> bool:
        """Whether everything that a step reads is there, in the dtypes that it reads."""
        floats = (torch.float32, torch.bfloat16)
        both = [self.keys, self.values]
        return super().steps and all(x is not None and x.dtype in floats and x.device.type == "cpu" for x in both)

    def remember(self, name: str, new: Tensor, size: int, order: Tensor | None) -> None:
        """Of what is remembered and `new` (B, H, T, e) keep `size` positions: the last ones, or those in `order`."""
        old = self.tensors().get(name)
        if old is None or order is not None or new.shape[2] >= size or torch.is_grad_enabled():
            self.put(name, _last(old, new, size, order))
            return
        length = new.shape[2]
        room = self._rooms.get(name)
        if room is None or not room.takes(old, length):
            self._rooms[name] = room = _Room(old, length)
        whole = room.extend(length, size)
        whole[:, :, size - length :] = new
        self.put(name, whole)

    def extend(self, size: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, size, e), of which the caller is to write the last position at once."""
        for name in ("keys", "values"):
            old = self.tensors()[name]
            room = self._rooms.get(name)
            if room is None or not room.takes(old, 1):
                self._rooms[name] = room = _Room(old, 1)
            self.put(name, room.extend(1, size))
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def shorten(self, size: int) -> None:
        """Keep the last `size` positions at most of what `extend` gave."""
        for name, room in self._rooms.items():
            room.given = room.given[:, :, max(0, room.given.shape[2] - size) :]
            self.put(name, room.given)

    def tensors(self) -> dict[str, Tensor]:
        """What is remembered, by name."""
        if self.keys is None or self.values is None:
            return super().tensors()
        return super().tensors() | {"keys": self.keys, "values": self.values}

    def put(self, name: str, tensor: Tensor) -> None:
        """Set one of `tensors()`."""
        if name == "c":
            self.update_recurrent_state(tensor)
        else:
            room = self._rooms.get(name)
            if room is not None and room.given is not tensor:
                del self._rooms[name]  # of something else: it holds memory for nothing
            setattr(self, name, tensor)
            self.is_initialized = True


class _Room:
    """Memory with space behind what is remembered, where the next positions go: a token then costs no copy of all.

    What was given out before is a view of what lies in front and stays as it was.
    """

    def __init__(self, old: Tensor, length: int) -> None:
        """Copy `old` (B, H, M, e), with space for `length` positions more, and some that make the copy worth it."""
        B, H, M, e = old.shape
        self.buffer = old.new_empty(B, H, M + length + M // 2, e)
        self.buffer[:, :, :M] = old
        self.end, self.given = M, old

    def takes(self, old: Tensor, length: int) -> bool:
        """Whether `length` positions can be put behind `old`: that is what was given out last, and there is space."""
        usable = torch.is_inference_mode_enabled() or not self.buffer.is_inference()
        return old is self.given and self.end + length <= self.buffer.shape[2] and usable

    def extend(self, length: int, size: int) -> Tensor:
        """The last `size` positions, of which `length` are new and to be written."""
        self.end += length
        self.given = self.buffer[:, :, self.end - size : self.end]
        return self.given


class SRUppCache(State):
    """The state of `SRUppForCausalLM`, a `transformers.Cache`.

    It can be detached, moved, cloned, reordered by row, reset by row, weighed, saved and loaded. `model(...)` changes
    it in place and returns it as `.cache`; its tensors are never written into, so that graphs and clones stay good.

    Attributes:
        layers: one a layer of the model.
        valid: (B, M) bool, false where a remembered position is none (short texts, padding, a document that has
            ended); None while all of them are real.
        tail: (B, up to 8), the token ids last read, by which `generate` tells a text that starts with what was read
            from one that goes on after it; None where embeddings were read.
        seen_tokens: positions given so far, padding included: what `get_seq_length` answers.
    """

    layers: list[SRUppRecurrentLayer]  # type: ignore[assignment]

    def __init__(self, config: SRUppConfig) -> None:
        layers: list[Any] = [
            SRUppAttentionLayer(config.attention_window) if config.has_attention(i) else SRUppRecurrentLayer()
            for i in range(config.num_hidden_layers)
        ]
        super().__init__(layers=layers)
        self.config = config
        self.valid: Tensor | None = None
        self.tail: Tensor | None = None
        self.seen_tokens = 0

    # -- what the model does with it -----------------------------------------------------------------------------

    @property
    def past(self) -> int:
        """M, the number of remembered positions; 0 without attention."""
        return next((layer.keys.shape[2] for layer in self.layers if layer.keys is not None), 0)

    def recurrent(self, layer_idx: int) -> Tensor | None:
        """The recurrent state c (B, d) of a layer, None at the start of a text."""
        return self.layers[layer_idx].recurrent_states[0]

    def keys_values(self, layer_idx: int) -> tuple[Tensor, Tensor] | None:
        """Remembered keys and values (B, H, M, d'/H) of a layer, None at the start of a text and without attention."""
        layer = self.layers[layer_idx]
        return None if layer.keys is None or layer.values is None else (layer.keys, layer.values)

    def advance(
        self,
        c: list[Tensor],
        keys_values: list[tuple[Tensor, Tensor] | None],
        length: int,
        padding_mask: Tensor | None = None,
        resets: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> None:
        """Move on by a piece of T positions, of which every layer has computed c and its new keys and values.

        Args:
            c: the final c (B, d) of each layer.
            keys_values: each layer's keys and values of the piece, (B, H, T, d'/H).
            length: T.
            padding_mask: (B, T) bool, true at padding: not remembered.
            resets: (B, T) bool, true where a document starts: nothing before the last one is remembered.
            input_ids: (B, T), the tokens of the piece.
        """
        past = self.past
        attends = any(new is not None for new in keys_values)
        size = min(past + length, self.config.attention_window) if attends else 0
        valid, order = remembered(size, length, past, past_valid=self.valid, padding_mask=padding_mask, resets=resets)
        for layer, c_i, new in zip(self.layers, c, keys_values, strict=True):
            layer.update_recurrent_state(c_i)
            if new is not None:
                assert isinstance(layer, SRUppAttentionLayer)
                layer.remember("keys", new[0], size, order)
                layer.remember("values", new[1], size, order)
                layer.cumulative_length += length
        self.valid = None if valid is None or bool(valid.all()) else valid
        self._count(length, input_ids)

    def steps(self) -> list[Remembered] | None:
        """What each layer remembers, with room for one position, which is to be written; None: not all is there."""
        if self.valid is not None or not all(layer.steps for layer in self.layers):
            return None
        size = self.past + 1
        steps: list[Remembered] = []
        for layer in self.layers:
            keys_values = layer.extend(size) if isinstance(layer, SRUppAttentionLayer) else (None, None)
            c = layer.recurrent_states[0]
            assert c is not None
            steps.append((c.contiguous(), *keys_values))
        return steps

    def stepped(self, c: list[Tensor], input_ids: Tensor | None) -> None:
        """Take note that every layer has written the position that `steps` made room for, and has computed c (B, d)."""
        window = self.config.attention_window
        for layer, c_i in zip(self.layers, c, strict=True):
            layer.update_recurrent_state(c_i)
            if isinstance(layer, SRUppAttentionLayer):
                layer.shorten(window)
                layer.cumulative_length += 1
        self._count(1, input_ids)

    def _count(self, length: int, input_ids: Tensor | None) -> None:
        if input_ids is None or (self.tail is None and self.seen_tokens):
            self.tail = None
        else:
            self.tail = torch.cat([input_ids[:, :0] if self.tail is None else self.tail, input_ids], 1)[:, -_TAIL:]
        self.seen_tokens += length

    def starts(self, input_ids: Tensor) -> bool:
        """Whether `input_ids` (B, T) is a whole text, of which this state has read the beginning, but not all."""
        n = self.seen_tokens
        if self.tail is None or input_ids.shape[1] <= n or input_ids.shape[0] != self.tail.shape[0]:
            return self.tail is None and input_ids.shape[1] > n
        return torch.equal(input_ids[:, n - self.tail.shape[1] : n], self.tail.to(input_ids.device))

    # -- what its owner does with it -----------------------------------------------------------------------------

    def map_(self, function: Callable[[Tensor], Tensor]) -> SRUppCache:
        """Replace every tensor, the first dimension of which is the batch, by `function` of it."""
        for layer in self.layers:
            layer.map_(function)
        for name in ("valid", "tail"):
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))
        return self

    def clone(self) -> SRUppCache:
        """A copy that goes its own way; the graph, if any, is shared."""
        other = SRUppCache(self.config)
        for mine, its in zip(self.layers, other.layers, strict=True):
            for name, tensor in mine.tensors().items():
                its.put(name, tensor.clone())
            its.cumulative_length = mine.cumulative_length
        other.valid = None if self.valid is None else self.valid.clone()
        other.tail = None if self.tail is None else self.tail.clone()
        other.seen_tokens = self.seen_tokens
        return other

    def reset_rows(self, rows: Tensor) -> SRUppCache:
        """Let the rows marked in `rows` (B,) bool start afresh, as if they had read nothing."""
        batch = self.batch_size
        if batch < 0:
            return self
        self.check_rows(rows, batch)
        for layer in self.layers:
            c = layer.tensors()["c"]
            layer.put("c", c.masked_fill(rows[:, None].to(c.device), 0.0))
        if self.past:
            valid = rows.new_ones(batch, self.past) if self.valid is None else self.valid
            valid = valid & ~rows[:, None].to(valid.device)
            self.valid = None if bool(valid.all()) else valid
        return self

    def reset(self) -> None:
        """Forget everything: the next piece starts a text."""
        for layer in self.layers:
            layer.reset()
        self.valid = self.tail = None
        self.seen_tokens = 0

    @property
    def batch_size(self) -> int:
        """B, or -1 at the start of a text."""
        c = self.layers[0].recurrent_states[0]
        return -1 if c is None else c.shape[0]

    def nbytes(self) -> int:
        """Bytes that the tensors of the state take."""
        tensors = [t for layer in self.layers for t in layer.tensors().values()]
        tensors += [t for t in (self.valid, self.tail) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file."""
        tensors = {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.tensors().items()}
        tensors |= {name: t for name in ("valid", "tail") if (t := getattr(self, name)) is not None}
        meta = {name: getattr(self.config, name) for name in _FITS} | {"seen_tokens": self.seen_tokens}
        save_file({k: t.detach().contiguous() for k, t in tensors.items()}, path, {"srupp_state": json.dumps(meta)})

    @classmethod
    def load(cls, path: str | Path, model: Any, device: torch.device | str = "cpu") -> SRUppCache:
        """Read a state that `save` wrote, for a model (or for any with its configuration).

        Raises:
            ValueError: the file is damaged, no state, or the state of a model of other sizes.
        """
        config = model if isinstance(model, SRUppConfig) else model.config
        state = cls(config)
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                meta = json.loads((file.metadata() or {}).get("srupp_state", "null"))
                if meta is None:
                    raise ValueError(f"{path} holds no SRU++ state")
                _check_fits(str(path), meta, config)
                for key in file.keys():  # noqa: SIM118 (no mapping)
                    index, _, name = key.partition(".")
                    if key in ("valid", "tail"):
                        setattr(state, key, file.get_tensor(key))
                    else:
                        state.layers[int(index)].put(name, file.get_tensor(key))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
        state.seen_tokens = meta["seen_tokens"]
        state._shorten()
        return state

    def check_fits(self, config: SRUppConfig) -> None:
        """Whether this can be the state of a model with `config`.

        Raises:
            ValueError: a size differs; the attention window may.
        """
        _check_fits("cache", {name: getattr(self.config, name) for name in _FITS}, config)

    def _shorten(self) -> None:
        """Keep no more positions than the window asks for (it may have been longer when they were written)."""
        window = self.config.attention_window
        for layer in self.layers:
            for name in layer.tensors().keys() - {"c"}:
                whole = layer.tensors()[name]
                layer.put(name, whole[:, :, max(0, whole.shape[2] - window) :])
                layer.cumulative_length = self.seen_tokens
        if self.valid is not None:
            self.valid = self.valid[:, max(0, self.valid.shape[1] - window) :]


def _check_fits(what: str, sizes: dict[str, Any], config: SRUppConfig) -> None:
    for name in _FITS:
        if sizes[name] != getattr(config, name):
            raise ValueError(
                f"{what} is the state of a model with {name} {sizes[name]}, this model has {getattr(config, name)}"
            )


def _last(old: Tensor | None, new: Tensor, size: int, order: Tensor | None) -> Tensor:
    """The `size` positions to keep of `old` (B, H, M, e) and `new` (B, H, T, e): the last ones, or those in `order`."""
    if order is None and new.shape[2] >= size:
        return new[:, :, new.shape[2] - size :].contiguous()
    if old is None:
        whole = new
    elif order is None:
        whole = torch.cat([old[:, :, old.shape[2] + new.shape[2] - size :], new], dim=2)
    else:
        whole = torch.cat([old, new], dim=2)
    if order is None:
        return whole
    return whole.gather(2, order[:, None, :, None].expand(-1, whole.shape[1], -1, whole.shape[3]))
