"""SRU++ language models: `SRUppConfig`, `SRUppForCausalLM`, and their state `SRUppCache`."""

from .cache import SRUppCache
from .configuration import SRUppConfig
from .modeling import SRUppForCausalLM, SRUppModel, SRUppPreTrainedModel

__all__ = ["SRUppCache", "SRUppConfig", "SRUppForCausalLM", "SRUppModel", "SRUppPreTrainedModel"]
