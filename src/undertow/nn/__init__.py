"""Layers: SRU and SRU++, used like `torch.nn.LSTM`."""

from undertow.nn.srupp import SRUppCell

__all__ = ["SRUppCell"]
