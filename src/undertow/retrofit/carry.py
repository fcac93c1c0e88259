"""Between the base and the recurrence, while the base runs: hidden states of the layers read come in, slots go out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Reading
from .config import Settings
from .module import Recurrence


class Carry:
    """Hidden states in, slots out, during one call of the base."""

    def __init__(self, recurrence: Recurrence, reading: Reading, settings: Settings) -> None:
        self.recurrence, self.reading, self.settings = recurrence, reading, settings
        grid, tensors = reading.grid, reading.memory
        B, n, _ = grid.size
        state = tensors.get("slots")
        self.before = recurrence.start(B) if state is None else state
        self.heard: dict[int, Tensor] = {}
        self.done: tuple[Tensor, dict[str, Tensor]] | None = None
        if n == 1 or settings.update == "held":  # known before the base runs
            reading.slots, _ = recurrence.scan(lambda i: None, self.before, grid.fresh, grid.fresh)

    def hear(self, layer: int) -> Any:
        """The hook of a layer that is read."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.heard[layer] = output if isinstance(output, Tensor) else output[0]
            if len(self.heard) == len(self.settings.read_layers) and self.reading.grid.size[1] > 1:
                slots = self._update()
                self.reading.slots = self.reading.slots if self.settings.update == "held" else slots

        return hook

    def after(self) -> dict[str, Tensor]:
        """The recurrence's part of the next state."""
        if self.done is None:
            self._update()
        assert self.done is not None
        return {"slots": self.done[0], **self.done[1]}

    def _update(self) -> Tensor:
        """(B, n, S, state size), the slots that each step reads."""
        grid, C = self.reading.grid, self.settings.stride
        B, n, _ = grid.size
        ends = grid.ends(C)
        if self.settings.update == "held":
            slots, last = self.recurrence.scan(lambda i: None, self.before, grid.fresh, ends)
            self.done = last, {}
            return slots
        hidden = torch.cat([self.heard[i] for i in self.settings.read_layers], -1)
        hidden = hidden.view(B, n, -1, hidden.shape[-1])[:, :, grid.context :]  # (B, n, L', r d)
        buffer = self.reading.memory.get("read")
        if n == 1:
            hidden = self._go_on(hidden[:, 0], buffer)[:, None]
        done = ends.any(0).tolist()
        pooled: Tensor | None = None
        if any(done):
            pooled = self.recurrence.read(hidden[:, :, :C].flatten(0, 1))
            pooled = pooled.view(B, n, *pooled.shape[1:])
        slots, last = self.recurrence.scan(
            lambda i: pooled[:, i] if pooled is not None and done[i] else None, self.before, grid.fresh, ends
        )
        width = int((grid.end[:, -1] % C).max())
        left: dict[str, Tensor] = {}
        if width:
            step = (grid.busy.sum(1) - 1).clamp(min=0)
            own = hidden[torch.arange(B, device=hidden.device), step][:, :width]
            own = F.pad(own, (0, 0, 0, width - own.shape[1]))
            if n > 1 and buffer is not None:  # rows that had no more to read
                old = F.pad(buffer, (0, 0, 0, max(0, width - buffer.shape[1])))[:, :width]
                own = torch.where(grid.busy.any(1)[:, None, None], own, old.to(own.dtype))
            left["read"] = own
        self.done = last, left
        return slots

    def _go_on(self, own: Tensor, buffer: Tensor | None) -> Tensor:
        """Hidden states of the stride so far: those of earlier pieces, and own ones (B, L, r d) from there on."""
        grid, C = self.reading.grid, self.settings.stride
        offset, real = grid.begin % C, grid.real[:, 0, grid.context :]
        width = int((offset + real.sum(1, keepdim=True)).max())
        whole = own.new_zeros(own.shape[0], width + 1, own.shape[2])
        if buffer is not None:
            size = min(width, buffer.shape[1])
            whole = torch.cat([buffer[:, :size].to(own.dtype), whole[:, size:]], 1)
        place = torch.where(real, offset + torch.arange(own.shape[1], device=own.device), width)
        return whole.scatter(1, place[:, :, None].expand_as(own), own)[:, :width]
