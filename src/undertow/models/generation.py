"""What `generate` needs to know of a model that carries a state of its own kind."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin


class StatefulGeneration(GenerationMixin):
    """transformers' `generate` for models whose `cache` is a state: constant memory, and texts that go on from one."""

    def new_cache(self) -> Any:
        """The state of a text that begins."""
        raise NotImplementedError

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *,
        next_sequence_length: int | None = None,
        cache: Any = None,
        resets: Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers, but what follows a given state may be passed alone, without the text that it has read.

        (transformers wants the whole text, or an attention mask as long as it, and else drops as many tokens as were
        read.) Document starts belong to the prompt.
        """
        mask = kwargs.get("attention_mask")
        if is_first_iteration and mask is not None and mask.dim() == 2 and not bool(mask[:, -1].all()):
            raise ValueError("a prompt is padded on its right, where the new tokens are to follow: pad on the left")
        if is_first_iteration and cache is not None and cache.seen_tokens and not cache.starts(input_ids):
            next_sequence_length = None
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if resets is not None and is_first_iteration:
            inputs["resets"] = resets[:, resets.shape[1] - inputs["input_ids"].shape[1] :]
        return inputs

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} does not apply: "
                f"{type(self).__name__} has a state of its own kind; leave it out"
            )
        if generation_config.use_cache is False:
            return
        if model_kwargs.get("cache") is None:
            model_kwargs["cache"] = self.new_cache()
        elif not isinstance(model_kwargs["cache"], type(self.new_cache())):
            wanted, got = type(self.new_cache()).__name__, type(model_kwargs["cache"]).__name__
            raise TypeError(f"cache must be a {wanted} (or None to start a text), got {got}")
        else:
            model_kwargs["cache"]._is_user_defined = True
