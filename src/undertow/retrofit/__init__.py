"""A recurrence for any pretrained Hugging Face causal language model."""

from transformers import AutoConfig, AutoModelForCausalLM

from .anatomy import UnsuitableBase
from .cache import RecurrentCache
from .config import RecurrenceConfig
from .modeling import RecurrentConfig, RecurrentForCausalLM, add_recurrence
from .storage import load_recurrent

AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig)
AutoModelForCausalLM.register(RecurrentConfig, RecurrentForCausalLM)

__all__ = [
    "RecurrenceConfig",
    "RecurrentCache",
    "RecurrentConfig",
    "RecurrentForCausalLM",
    "UnsuitableBase",
    "add_recurrence",
    "load_recurrent",
]
