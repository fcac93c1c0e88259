"""Layers: SRU and SRU++, used like `torch.nn.LSTM`."""

from undertow.nn.attention import WindowMask, attend
from undertow.nn.sru import SRU, SRUCell
from undertow.nn.srupp import SRUpp, SRUppCell, SRUppState

__all__ = ["SRU", "SRUCell", "SRUpp", "SRUppCell", "SRUppState", "WindowMask", "attend"]
