"""The state of a recurrent model: all that passes from one piece of text to the next, of a size that does not grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..models.state import State, fingerprint

_TAIL = 8  # token ids remembered to recognise a text by
_META = "undertow_recurrent_state"


class RecurrentCache(State):
    """The state of `RecurrentForCausalLM`, a `transformers.Cache`.

    It can be detached, moved, cloned, reordered by row, reset by row, weighed, saved and loaded. `model(...)` changes
    it in place and returns it as `.cache`; its tensors are never written into, so that graphs and clones stay good.

    Attributes:
        tensors: by name, the first dimension of each the batch:
            `position` (B,): text position of the next token, 0 where a document is to start;
            `memory_real` (B, M) bool, `memory_position` (B, M): which remembered keys are there, and from where;
            `I.keys`, `I.values` (B, key heads, M, head_dim): those of layer I, un-rotated;
            `I.received`, `I.taken`, `I.kept_...`: selected keys, see `undertow.retrofit.selection`;
            `slots` (B, S, state size); `read` (B, R, r d): hidden states of the stride so far;
            `tokens` (B, C): ids of the last stride, which overlapping windows read again;
            `tail` (B, up to 8): the token ids last read, by which `generate` tells a whole text from its continuation.
        seen_tokens: positions given so far, padding included: what `get_seq_length` answers.
        fits: what a model has to agree with to go on from this state.
    """

    def __init__(self, fits: dict[str, Any]) -> None:
        super().__init__(layers=[])
        self.tensors: dict[str, Tensor] = {}
        self.seen_tokens = 0
        self.fits = fits

    def __repr__(self) -> str:
        rows = max(0, self.batch_size)
        return f"RecurrentCache({self.seen_tokens:,} tokens read in {rows} rows, {self.nbytes():,} bytes)"

    def starts(self, input_ids: Tensor) -> bool:
        """Whether `input_ids` (B, T) is a whole text, of which this state has read the beginning, but not all."""
        n, tail = self.seen_tokens, self.tensors.get("tail")
        if tail is None or input_ids.shape[1] <= n or input_ids.shape[0] != tail.shape[0]:
            return False
        return torch.equal(input_ids[:, n - tail.shape[1] : n], tail.to(input_ids.device))

    def read(self, input_ids: Tensor) -> None:
        """Note that (B, T) tokens were read."""
        before = self.tensors.get("tail", input_ids[:, :0])
        self.tensors["tail"] = torch.cat([before, input_ids], 1)[:, -_TAIL:]
        self.seen_tokens += input_ids.shape[1]

    def map_(self, function: Callable[[Tensor], Tensor]) -> RecurrentCache:
        """Replace every tensor, the first dimension of which is the batch, by `function` of it."""
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        return self

    def clone(self) -> RecurrentCache:
        """A copy that goes its own way; the graph, if any, is shared."""
        other = RecurrentCache(self.fits)
        other.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        other.seen_tokens = self.seen_tokens
        return other

    def reset_rows(self, rows: Tensor) -> RecurrentCache:
        """Let the rows marked in `rows` (B,) bool start afresh, as if they had read nothing."""
        batch = self.batch_size
        if batch < 0:
            return self
        self.check_rows(rows, batch)
        position = self.tensors["position"]
        self.tensors["position"] = position.masked_fill(rows.to(position.device), 0)
        return self

    def reset(self) -> None:
        """Forget everything: the next piece starts a text."""
        self.tensors, self.seen_tokens = {}, 0

    @property
    def batch_size(self) -> int:
        """B, or -1 at the start of a text."""
        return len(self.tensors["position"]) if self.tensors else -1

    @property
    def is_linear(self) -> list[bool]:
        """For `generate`: a text can be gone on with from here (transformers asks every layer, and we list none)."""
        return [False]

    @property
    def is_compileable(self) -> bool:
        """For `generate`: not of a shape that never changes."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return bool(self.tensors)

    def nbytes(self) -> int:
        """Bytes that the tensors of the state take."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file.

        Raises:
            OSError: it could not be written.
        """
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
        meta = {"fits": self.fits, "seen_tokens": self.seen_tokens, "digest": fingerprint(tensors)}
        try:
            save_file(tensors, path, {_META: json.dumps(meta)})
        except SafetensorError as error:
            raise OSError(f"could not write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path, model: Any, device: torch.device | str | None = None) -> RecurrentCache:
        """Read a state that `save` wrote, for a model (or the `fits` of one).

        Raises:
            ValueError: the file is damaged, no state, or the state of another model. (Of a model with the same base and
                settings but other trained weights it is taken: training goes on with its states.)
        """
        fits = model if isinstance(model, dict) else model.state_fits()
        place = device if device is not None else "cpu" if isinstance(model, dict) else model.device
        state = cls(fits)
        try:
            with safe_open(path, "pt") as file:
                meta = json.loads((file.metadata() or {}).get(_META, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
        if meta is None:
            raise ValueError(f"{path} holds no state of a recurrent model")
        if not (
            isinstance(meta, dict) and isinstance(meta.get("fits"), dict) and isinstance(meta.get("seen_tokens"), int)
        ):
            raise ValueError(f"{path} is damaged: what it says of itself is not of a state")
        _check_fits(str(path), meta["fits"], fits)
        if meta.get("digest") != fingerprint(tensors):
            raise ValueError(f"{path} is damaged: its content is not what was saved")
        state.tensors = {name: tensor.to(place) for name, tensor in tensors.items()}
        state.seen_tokens = meta["seen_tokens"]
        return state

    def check_fits(self, fits: dict[str, Any]) -> None:
        """Whether this can be the state of a model with `fits`.

        Raises:
            ValueError: what differs.
        """
        _check_fits("cache", self.fits, fits)


def _check_fits(what: str, its: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if its.get(name) != value:
            raise ValueError(f"{what}: the state of another model: its {name} is {its.get(name)}, this one's {value}")
