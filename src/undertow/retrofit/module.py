"""The recurrence itself: read a stride's hidden states into slots, update the slots, write them into layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .anatomy import Anatomy
from .attention import Layer, Reading, keys_and_values
from .config import Settings


class Read(nn.Module):
    """What a stride leaves behind: hidden states (N, C, r d) of the layers read -> x (N, S, slot size)."""

    def __init__(self, config: Settings, width: int) -> None:
        super().__init__()
        size = config.slot_size
        self.kind, self.slots = config.read, config.slots
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.inputs = nn.Linear(width, size, bias=False)
        nn.init.eye_(self.inputs.weight) if width == size else nn.init.xavier_uniform_(self.inputs.weight)
        if config.read == "queries":
            # Scores of deviation 2 or so: queries that look at everything alike would all read the same, the mean.
            self.queries = nn.Parameter(2 * torch.randn(config.slots, size))
            self.keys = nn.Linear(size, size, bias=False)
            nn.init.xavier_uniform_(self.keys.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pool."""
        x = self.inputs(self.norm(hidden_states.to(self.norm.weight.dtype)))  # (N, C, slot size)
        if self.kind == "mean":  # the paper's idea, in S equal parts
            return F.adaptive_avg_pool1d(x.transpose(1, 2), self.slots).transpose(1, 2)
        if self.kind == "last":
            return x[:, -self.slots :]
        q = self.queries.to(x.dtype).expand(x.shape[0], -1, -1)
        return F.scaled_dot_product_attention(q, self.keys(x), x)


class Update(nn.Module):
    """New slots from those before s (N, S, state size) and what was read x (N, S, slot size).

    All but the SRU start as averages of s and x, so that what the base's own projections are first given is what they
    know, hidden states.
    """

    def __init__(self, config: Settings) -> None:
        super().__init__()
        size, self.kind = config.slot_size, config.update
        self.state_size = 2 * size if self.kind == "sru" else size  # SRU's is [h; c], of which h is the slots
        if self.kind == "feedforward":
            self.keep = nn.Parameter(torch.zeros(size))
            self.inner = nn.Linear(2 * size, 2 * size)
            self.outer = nn.Linear(2 * size, size)
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)
        elif self.kind == "tanh":
            self.A = nn.Linear(size, size, bias=False)
            self.B = nn.Linear(size, size)
            for weight in (self.A.weight, self.B.weight):
                weight.data.copy_(torch.eye(size) / 2)
        elif self.kind == "gru":
            self.cell = nn.GRUCell(size, size)
            nn.init.eye_(self.cell.weight_ih[2 * size :])  # of the candidate
        elif self.kind == "sru":
            from undertow.nn import SRUCell

            self.sru = SRUCell(size, size)

    def slots(self, state: Tensor) -> Tensor:
        """What is written of a state."""
        return state.chunk(2, -1)[0] if self.kind == "sru" else state

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        """One step."""
        if self.kind == "held":
            return s
        if self.kind == "feedforward":
            a = torch.sigmoid(self.keep)
            s = a * s + (1 - a) * x + self.outer(F.gelu(self.inner(torch.cat([s, x], -1))))
            return F.rms_norm(s, s.shape[-1:], eps=1e-6)  # however long the text, slots stay as large as they are
        if self.kind == "tanh":
            return torch.tanh(self.A(s) + self.B(x))
        N, S, size = x.shape
        x = x.reshape(N * S, size)
        if self.kind == "gru":
            return self.cell(x, s.reshape(N * S, size).to(x.dtype)).view(N, S, size)
        c = s.chunk(2, -1)[1]
        h, c = self.sru(x[:, None], c.reshape(N * S, size))  # each slot is a text, of which this is one position
        return torch.cat([h.view(N, S, size), c.view(N, S, size).to(h.dtype)], -1)


class Write(nn.Module):
    """Slots as keys and values of a layer, with a softmax of their own behind a gate that starts closed.

    A share of the common softmax would change the base's output even with values of zero; so what the slots add is
    tanh(16 gate) * softmax(q k / sqrt(e)) v, one gate a head, zero at the start. One key more, with its value zero, is
    for queries that none of the slots answers. The base's own projections are given slots as they are given hidden
    states, normed by the layer's own norm where it has one.
    """

    def __init__(self, config: Settings, layer: Layer) -> None:
        super().__init__()
        size, self.own = config.slot_size, config.projection == "own"
        if self.own or layer.norm is None:
            self.norm = nn.RMSNorm(size, eps=1e-6)
        self.gate = nn.Parameter(torch.zeros(layer.heads))
        if self.own:
            self.keys = nn.Linear(size, layer.key_heads * layer.head_dim, bias=False)
            self.values = nn.Linear(size, layer.key_heads * layer.head_dim, bias=False)

    def forward(self, reading: Reading, layer: Layer, query: Tensor, slots: Tensor, scale: float) -> Tensor:
        """What the slots (N, S, slot size) add to attention, given un-rotated queries (N, H, L, head_dim)."""
        norm = self.norm if self.own or layer.norm is None else layer.norm
        x = norm(slots.to(next(norm.parameters()).dtype))
        if self.own:
            k, v = (p(x).view(*x.shape[:2], layer.key_heads, -1).transpose(1, 2) for p in (self.keys, self.values))
        else:
            k, v = keys_and_values(reading, layer, x.to(query.dtype))
        k, v = (F.pad(layer.repeat(t).to(query.dtype), (0, 0, 0, 1)) for t in (k, v))
        out = F.scaled_dot_product_attention(query, k, v, scale=scale)
        return self.opening().to(out.dtype)[:, None, None] * out

    def opening(self) -> Tensor:
        """(H,), how far each head's gate is open, from -1 to 1.

        An optimiser like Adam moves a parameter by its learning rate a step, whatever it is: by 0.06 in 60 steps at
        0.001. A gate has to open in such a time.
        """
        return torch.tanh(16 * self.gate)


class Worth(nn.Module):
    """What a key and its value promise: a term that joins the scores of kept keys, and with which they compete.

    It is trained by its use in attention, where a key that helps is weighed up, and starts at zero.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layer.key_heads, 2 * layer.head_dim))
        self.bias = nn.Parameter(torch.zeros(layer.key_heads))

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys, un-rotated, and values (B, h, S, e) -> (B, h, S)."""
        x = torch.cat([F.rms_norm(t, t.shape[-1:]) for t in (keys, values)], -1).to(self.weight.dtype)
        return (x * self.weight[:, None]).sum(-1) + self.bias[:, None]


class Recall(nn.Module):
    """Maps x + x A B through which a layer reads its kept keys and values; identities at the start, where B is zero."""

    def __init__(self, layer: Layer, rank: int) -> None:
        super().__init__()
        size = 2, layer.key_heads, layer.head_dim, rank  # keys, values
        self.A = nn.Parameter(torch.randn(size) / math.sqrt(layer.head_dim))
        self.B = nn.Parameter(torch.zeros(size).mT.contiguous())

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, un-rotated, and values (B, h, S, e)."""
        both = zip((keys, values), self.A, self.B, strict=True)
        keys, values = (x + (x.to(a.dtype) @ a @ b).to(x.dtype) for x, a, b in both)
        return keys, values


class Recurrence(nn.Module):
    """Read, update, write; the slots that a document starts with; and what is trained of a selection."""

    def __init__(self, config: Settings, anatomy: Anatomy) -> None:
        super().__init__()
        learned = config.selected > 0 and config.selected_by == "learned"
        self.worth = nn.ModuleDict({str(x.index): Worth(x) for x in anatomy.layers if learned and not x.local})
        rank = config.selected_rank if config.selected else 0
        self.recall = nn.ModuleDict({str(x.index): Recall(x, rank) for x in anatomy.layers if rank and not x.local})
        self.write = nn.ModuleDict()
        if not config.slots:
            return
        if config.update != "held":
            self.read = Read(config, len(config.read_layers) * anatomy.hidden_size)
        self.update = Update(config)
        self.write.update({str(i): Write(config, anatomy.layers[i]) for i in config.write_layers})
        self.initial = nn.Parameter(torch.randn(config.slots, self.update.state_size))

    def start(self, batch: int) -> Tensor:
        """(B, S, state size), the state of a text that begins."""
        return self.initial.expand(batch, -1, -1)

    def add(self, reading: Reading, layer: Layer, query: Tensor, scale: float) -> Tensor | None:
        """What the slots add to a layer's attention; None in layers that are not written to."""
        name = str(layer.index)
        if name not in self.write:
            return None
        assert reading.slots is not None
        state = reading.slots.roll(1, 0) if reading.swap else reading.slots
        return self.write[name](reading, layer, query, self.update.slots(state).flatten(0, 1), scale)

    def term(self, layer: Layer, keys: Tensor, values: Tensor) -> Tensor | None:
        """What a trained selection adds to the scores of a layer's kept keys, (B, h, S)."""
        name = str(layer.index)
        return self.worth[name](keys, values) if name in self.worth else None

    def recalled(self, layer: Layer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's kept keys and values (B, h, S, e) as they are read."""
        name = str(layer.index)
        return self.recall[name](keys, values) if name in self.recall else (keys, values)

    def scan(
        self, pooled: Callable[[int], Tensor | None], slots: Tensor, fresh: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sequential part: carry the slots over n steps.

        Args:
            pooled: x (B, S, slot size) of step i; None where no row completes a stride with it.
            slots: (B, S, state size), before the first step.
            fresh: (B, n) bool, a document starts with the step.
            ends: (B, n) bool, the step completes a stride.

        Returns:
            The slots that each step reads, (B, n, S, state size), and those after the last.
        """
        read = []
        for i in range(fresh.shape[1]):
            slots = torch.where(fresh[:, i, None, None], self.start(len(slots)).to(slots.dtype), slots)
            read.append(slots)
            x = pooled(i)
            if x is not None:
                slots = torch.where(ends[:, i, None, None], self.update(x, slots).to(slots.dtype), slots)
        return torch.stack(read, 1), slots
