"""Layers: SRU and SRU++, used like `torch.nn.LSTM`."""

from undertow.nn.attention import WindowMask, attend
from undertow.nn.convert import from_sru
from undertow.nn.memory import SRUppState
from undertow.nn.sru import SRU, SRUCell
from undertow.nn.srupp import SRUpp, SRUppCell

__all__ = ["SRU", "SRUCell", "SRUpp", "SRUppCell", "SRUppState", "WindowMask", "attend", "from_sru"]
