"""Language models. Importing this makes transformers' Auto classes know them."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .srupp import SRUppCache, SRUppConfig, SRUppForCausalLM, SRUppModel

AutoConfig.register("srupp", SRUppConfig)
AutoModel.register(SRUppConfig, SRUppModel)
AutoModelForCausalLM.register(SRUppConfig, SRUppForCausalLM)

__all__ = ["SRUppCache", "SRUppConfig", "SRUppForCausalLM", "SRUppModel"]
