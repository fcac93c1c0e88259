"""SRU++ as a Hugging Face causal language model: embeddings, layers, output."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ...nn import SRUppCell
from ...nn.attention import WindowMask
from ...nn.linear import Linear
from ...nn.step import Step, step_for
from ...ops import decode
from ..generation import StatefulGeneration
from .cache import SRUppCache
from .configuration import SRUppConfig

_BRIDGE = '''"""Lets transformers find this model in a process that has not imported undertow."""

try:
    from undertow.models import SRUppConfig, SRUppForCausalLM, SRUppModel
except ImportError as error:
    raise ImportError("this model is an SRU++ of the package undertow, which is not installed here") from error
'''


class SRUppPreTrainedModel(PreTrainedModel):
    """What the bare model and the language model share: initial values, and how they are saved."""

    config_class = SRUppConfig
    config: SRUppConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SRUppCell"]  # noqa: RUF012 (transformers' own convention)
    _supports_sdpa = True
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The paper's: embeddings and softmax U(+-sqrt(3/d)); a cell knows its own."""
        if isinstance(module, SRUppCell):
            # Called for weights that a checkpoint lacks, too: those it had must stay.
            loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            if len(loaded) < len(list(module.parameters())):
                values = [p.clone() for p in loaded]
                module.reset_parameters()
                for parameter, value in zip(loaded, values, strict=True):
                    parameter.copy_(value)
        elif isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            bound = math.sqrt(3 / module.weight.shape[1])
            init.uniform_(module.weight, -bound, bound)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save weights (safetensors) and configuration, with a small file that lets transformers find this class."""
        super().save_pretrained(save_directory, *args, **kwargs)
        Path(save_directory, "modeling_undertow.py").write_text(_BRIDGE)


class SRUppModel(SRUppPreTrainedModel):
    """Embeddings and SRU++ layers, without the output layer."""

    def __init__(self, config: SRUppConfig) -> None:
        super().__init__(config)
        assert config.embedding_size is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        last = config.num_hidden_layers - 1
        self.layers: Any = nn.ModuleList(
            SRUppCell(
                config.hidden_size if i else config.embedding_size,
                config.hidden_size,
                config.projection_size,
                num_heads=config.num_attention_heads,
                attention=config.has_attention(i),
                dropout=config.hidden_dropout,
                highway_dropout=config.hidden_dropout if i < last else 0.0,
                attention_dropout=config.attention_dropout,
                layer_norm=config.layer_norm,
                highway_bias=config.highway_bias,
                activation=config.activation,
                alpha_init=config.alpha_init,
            )
            for i in range(config.num_hidden_layers)
        )
        self.gradient_checkpointing = False
        self._last_step: Step | None = None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: SRUppCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        resets: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read a piece of text; arguments as for `SRUppForCausalLM.forward`.

        Returns:
            `last_hidden_state` (B, T, d), `cache`, and `hidden_states`, the input of each layer and the output of the
            last, where asked for.
        """
        x = self._embed(input_ids, inputs_embeds)  # (B, T, e)
        B, T, _ = x.shape
        cache = self._state(kwargs.get("past_key_values") if cache is None else cache, use_cache, B)
        padding_mask = _padding_mask(attention_mask, B, T)
        resets = _resets(resets, B, T, padding_mask)
        if T == 1 and cache is not None and padding_mask is None and resets is None and not output_hidden_states:
            h = self._step(x[:, 0], cache, input_ids)
            if h is not None:
                return BaseModelOutputWithPast(last_hidden_state=h[:, None], cache=cache)
        mask = None
        if any(layer.attention for layer in self.layers):
            mask = WindowMask.build(
                self.config.attention_window,
                T,
                cache.past if cache is not None else 0,
                past_valid=cache.valid if cache is not None else None,
                padding_mask=padding_mask,
                resets=resets,
                device=x.device,
            )
        checkpointed = self.gradient_checkpointing and self.training
        hidden_states: list[Tensor] = []
        c: list[Tensor] = []
        keys_values: list[tuple[Tensor, Tensor] | None] = []
        for i, layer in enumerate(self.layers):
            hidden_states.append(x)
            c0 = cache.recurrent(i) if cache is not None else None
            past = cache.keys_values(i) if cache is not None else None
            arguments = (layer, x, c0, past, mask if layer.attention else None, padding_mask, resets)
            # The state is read before and written after, so that recomputation in backward sees it as it was.
            x, c_i, new = self._gradient_checkpointing_func(_read, *arguments) if checkpointed else _read(*arguments)
            c.append(c_i)
            keys_values.append(new)
        hidden_states.append(x)
        if cache is not None:
            cache.advance(c, keys_values, T, padding_mask, resets, input_ids)
        return BaseModelOutputWithPast(
            last_hidden_state=x, cache=cache, hidden_states=tuple(hidden_states) if output_hidden_states else None
        )

    def _step(self, x: Tensor, cache: SRUppCache, input_ids: Tensor | None) -> Tensor | None:
        """One position x (B, e) through all layers at once, (B, d); None where they have to be called one by one."""
        if x.shape[0] > decode.ROWS or not decode.serves(x):
            return None
        self._last_step = step_for(self.layers, self._last_step)
        remembered = cache.steps() if self._last_step is not None else None
        if self._last_step is None or remembered is None:
            return None
        h, c = self._last_step(x, remembered)
        cache.stepped(c, input_ids)
        return h

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            assert input_ids is not None
            if input_ids.dim() != 2 or input_ids.is_floating_point():
                raise ValueError(
                    f"input_ids must be integers of shape (B, T), got {input_ids.dtype} of {tuple(input_ids.shape)}"
                )
            try:
                inputs_embeds = self.embed_tokens(input_ids)
            except IndexError as error:
                bad = input_ids[(input_ids < 0) | (input_ids >= self.config.vocab_size)]
                raise ValueError(
                    f"token id {int(bad[0])} is outside the vocabulary of {self.config.vocab_size} tokens: "
                    "was the text encoded with another tokenizer?"
                ) from error
        return self.embedding_dropout(inputs_embeds)

    def _state(self, cache: Any, use_cache: bool | None, batch: int) -> SRUppCache | None:
        if cache is None:
            wanted = use_cache if use_cache is not None else self.config.use_cache and not self.training
            return SRUppCache(self.config) if wanted else None
        if not isinstance(cache, SRUppCache):
            raise TypeError(f"cache must be an SRUppCache (or None to start a text), got {type(cache).__name__}")
        if cache.batch_size not in (-1, batch):
            raise ValueError(f"the state holds {cache.batch_size} rows, the input has {batch}")
        if cache.config is not self.config:
            cache.check_fits(self.config)
        return cache


def _read(
    layer: SRUppCell,
    x: Tensor,
    c0: Tensor | None,
    past: tuple[Tensor, Tensor] | None,
    mask: WindowMask | None,
    padding_mask: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """One layer with everything by position, as checkpointing wants it."""
    return layer(x, c0, past=past, mask=mask, padding_mask=padding_mask, resets=resets)


def _padding_mask(attention_mask: Tensor | None, B: int, T: int) -> Tensor | None:
    """(B, T) bool, true at padding, from a mask over the piece or over all that was read; None: no padding."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask must have shape ({B}, {T}), or longer to the left, got {tuple(attention_mask.shape)}"
        )
    padding = attention_mask[:, attention_mask.shape[1] - T :] == 0
    return padding if bool(padding.any()) else None


def _resets(resets: Tensor | None, B: int, T: int, padding_mask: Tensor | None) -> Tensor | None:
    """(B, T) bool, true where a document starts, which padding cannot; None: nowhere."""
    if resets is None:
        return None
    if resets.shape != (B, T) or resets.dtype != torch.bool:
        raise ValueError(f"resets must be bool of shape ({B}, {T}), got {resets.dtype} of {tuple(resets.shape)}")
    if padding_mask is not None:
        resets = resets & ~padding_mask
    return resets if bool(resets.any()) else None


class SRUppForCausalLM(SRUppPreTrainedModel, StatefulGeneration, GenerationMixin):
    """An SRU++ language model (Lei 2021, arXiv 2102.12459).

    Reads text of any length in pieces: what `cache` holds is all that passes from one to the next, and cutting the text
    elsewhere gives the same logits.
    """

    # Drafts of assisted generation that are rejected cannot be taken out of a state again: transformers then refuses.
    _is_stateful = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' own convention)

    def __init__(self, config: SRUppConfig) -> None:
        super().__init__(config)
        self.model = SRUppModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: SRUppCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        resets: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Read a piece of text.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), or (B, more than T) with the piece at its right end; 0 at padding, which leaves the
                state as it is and takes no place in the attention window.
            cache: the state to go on from; None starts a text. `past_key_values` is accepted in its place.
            inputs_embeds: (B, T, embedding_size) in place of `input_ids`.
            labels: (B, T), the token ids themselves; shifted here, as everywhere in transformers; -100 is not scored.
            use_cache: return the state; by default only outside of training.
            resets: (B, T) bool, true where a new document starts: nothing before counts from there on.
            logits_to_keep: only the last n positions' logits (0: all), or those at the given positions.
            kwargs: `num_items_in_batch` as in transformers' losses; `output_hidden_states`; `shift_labels` (B, T),
                labels already shifted: that of position t is the token at t + 1. With them the last position of a piece
                counts too. (Not in the signature: transformers' Trainer asks for a batch with everything there that is
                called labels.)

        Returns:
            `loss` (mean over scored targets, in nats), `logits` (B, T, vocab_size), `cache`.

        Raises:
            ValueError: token ids outside the vocabulary; shapes that do not fit.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=kwargs.pop("past_key_values", None) if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            resets=resets,
            output_hidden_states=kwargs.pop("output_hidden_states", None),
        )
        x = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits = self.lm_head(x[:, kept if isinstance(logits_to_keep, int) else logits_to_keep])
        loss = None
        if shift_labels is not None:
            labels = shift_labels = shift_labels.contiguous()
        if labels is not None:
            if labels.shape != x.shape[:2]:
                raise ValueError(
                    f"labels must have shape {tuple(x.shape[:2])}, as input_ids, got {tuple(labels.shape)}"
                )
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                shift_labels=shift_labels,
                vocab_size=self.config.vocab_size,
                **kwargs,
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )

    def new_cache(self) -> SRUppCache:
        """The state of a text of which nothing has been read."""
        return SRUppCache(self.config)
