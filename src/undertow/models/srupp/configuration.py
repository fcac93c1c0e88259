"""The configuration of an SRU++ language model."""

from __future__ import annotations

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class SRUppConfig(PreTrainedConfig):
    """Configuration of `SRUppForCausalLM` (Lei 2021, arXiv 2102.12459). The defaults make a small model.

    Args:
        vocab_size: number of tokens. The default is the byte tokenizer's: 256 byte values and one document separator.
        hidden_size: d, width of the recurrence and of the residual highway.
        projection_size: d', width of attention and bottleneck; the paper takes d/4 (base) or d/8 (large).
        num_hidden_layers: number of SRU++ layers.
        num_attention_heads: heads of attention; `projection_size` must be divisible by it. The paper needs one.
        attention_every: layers k, 2k, 3k ... have attention, the others only the bottleneck. The paper: k = 5 of 10
            layers costs almost nothing in quality.
        attention_last: instead of `attention_every`: only the last n layers have attention.
        attention_window: W, how many previous positions a position attends to beside itself. Bounds the state, so that
            reading and writing take constant memory. May be changed after training (evaluation with longer windows).
        hidden_dropout: p before W3, and of the mask shared over time on what the highway adds (none in the last layer).
        attention_dropout: p on the attention map.
        embedding_dropout: p on the embeddings.
        embedding_size: width of the token embeddings where it differs from `hidden_size`; the first layer then has a
            fourth projection for its highway.
        highway_bias: initial bias of the highway gate: -2 lets a deep stack start close to the identity.
        layer_norm: "none" (the paper's commands), "before" W1, or "after" h.
        activation: "identity" (the paper) or "tanh" on c.
        alpha_init: initial weight of attention in z + alpha * attention. At 0 (the paper: ReZero), keys and values get
            no gradient at the very first step.
        tie_word_embeddings: output weights = embeddings. Needs `embedding_size` = `hidden_size`.
        use_cache: return the state by default outside of training.

    Raises:
        ValueError: sizes that do not fit together.
    """

    model_type = "srupp"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012 (a list: transformers adds to it)

    vocab_size: int = 257
    hidden_size: int = 512
    projection_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 1
    attention_every: int = 1
    attention_last: int | None = None
    attention_window: int = 256
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    embedding_size: int | None = None
    highway_bias: float = -2.0
    layer_norm: Literal["none", "before", "after"] = "none"
    activation: Literal["identity", "tanh"] = "identity"
    alpha_init: float = 0.0
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = 256
    eos_token_id: int | list[int] | None = 256
    pad_token_id: int | None = 256

    def __post_init__(self, **kwargs: Any) -> None:
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        # Written to config.json: where transformers finds the classes in a process that never imported undertow.
        self.auto_map = {
            "AutoConfig": "modeling_undertow.SRUppConfig",
            "AutoModel": "modeling_undertow.SRUppModel",
            "AutoModelForCausalLM": "modeling_undertow.SRUppForCausalLM",
        }
        super().__post_init__(**kwargs)
        for name in ("vocab_size", "hidden_size", "projection_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.projection_size % self.num_attention_heads:
            raise ValueError(
                f"projection_size {self.projection_size} is not divisible by "
                f"num_attention_heads {self.num_attention_heads}"
            )
        for name in ("hidden_dropout", "attention_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.attention_window < 0:
            raise ValueError(f"attention_window must be 0 or more previous positions, got {self.attention_window}")
        if self.attention_every < 1:
            raise ValueError(f"attention_every must be at least 1, got {self.attention_every}")
        if self.attention_last is not None and not 0 <= self.attention_last <= self.num_hidden_layers:
            raise ValueError(
                f"attention_last must lie between 0 and num_hidden_layers {self.num_hidden_layers}, "
                f"got {self.attention_last}"
            )
        if self.attention_last is not None and self.attention_every != 1:
            raise ValueError("give attention_every or attention_last, not both")
        for name, choices in (("layer_norm", ("none", "before", "after")), ("activation", ("identity", "tanh"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.tie_word_embeddings and self.embedding_size != self.hidden_size:
            raise ValueError(
                f"tie_word_embeddings needs embedding_size = hidden_size, "
                f"got {self.embedding_size} and {self.hidden_size}"
            )

    def has_attention(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` (counted from 0) attends."""
        if self.attention_last is not None:
            return self.num_hidden_layers - layer_idx <= self.attention_last
        return (layer_idx + 1) % self.attention_every == 0
