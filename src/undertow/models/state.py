"""What the states of all models here can do: all that passes from one piece of text to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from typing_extensions import Self


class State(Cache):
    """A `transformers.Cache` whose tensors, the first dimension of each the batch, are replaced, never written into.

    So graphs and clones stay good. A kind of state says what its tensors are by `map_`.

    Attributes:
        seen_tokens: positions given so far, padding included: what `get_seq_length` answers.
    """

    seen_tokens = 0

    def map_(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Replace every tensor by `function` of it."""
        raise NotImplementedError

    def detach_(self) -> Self:
        """Cut the graph: back-propagation stops here (truncated back-propagation through time)."""
        return self.map_(Tensor.detach)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device. Arguments as for `torch.Tensor.to`, without a dtype."""
        return self.map_(lambda t: t.to(*args, **kwargs))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row b be what row beam_idx[b] was (beam search)."""
        self.map_(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.map_(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` only."""
        self.map_(lambda t: t[indices.to(t.device)])

    def check_rows(self, rows: Tensor, batch: int) -> None:
        """Whether `rows` marks rows of a state of `batch` rows.

        Raises:
            ValueError: another shape than (B,), or another dtype than bool.
        """
        if rows.shape != (batch,) or rows.dtype != torch.bool:
            raise ValueError(
                f"reset_rows wants a bool tensor of shape ({batch},), got {rows.dtype} of {tuple(rows.shape)}"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions given so far, padding included."""
        return self.seen_tokens


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hexadecimal digest of names, dtypes, shapes and contents."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # Cloned: a single element may be "contiguous" with any stride, and then has no view as bytes.
        flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
