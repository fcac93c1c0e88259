"""Tiny random models of many architectures, texts, and what the tests of the retrofit do with them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import undertow
from undertow.retrofit import RecurrentCache, RecurrentForCausalLM

V = 97  # vocabulary
LIMIT = 64  # positions that the tiny models know

_COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LIMIT,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}


def _rope(kind: str, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


# Those whose positions are rotary, by name: model type and what differs from _COMMON.
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "neox": ("gpt_neox", {"hidden_size": 64, "rotary_pct": 0.25}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "layer_types": _MIXED, "query_pre_attn_scalar": 8}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "phi3": ("phi3", {"sliding_window": None, **_rope("default", partial_rotary_factor=0.5)}),
    "phi3 long": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": {**_LONG, "original_max_position_embeddings": 32},
        },
    ),
    "llama dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "llama yarn": ("llama", _rope("yarn", factor=2.0, original_max_position_embeddings=32)),
    "llama llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "olmo2": ("olmo2", {}),
}
# Those that learn a vector for each position.
ABSOLUTE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
}
ALL = ROTARY | ABSOLUTE
# One of each kind of difficulty: what is slow runs on these alone.
FEW = ["llama", "neox", "gemma3", "mistral", "gpt2"]


def base(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny random model, in evaluation mode."""
    kind, options = ALL[name]
    config = AutoConfig.for_model(kind, **{**_COMMON, **options, **overrides})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at 0 and 1, where mistakes do not show
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def selected(name: str) -> dict[str, int]:
    """Settings that select keys, where a model of this name can."""
    return {"selected": 2, "selected_distance": 2} if name in ROTARY else {}


def wrap(model: PreTrainedModel, *, opened: bool = True, freeze_base: bool = True, **settings: Any) -> Any:
    """The retrofit of a model, in evaluation mode; `opened`: with gates that let through what was read."""
    torch.manual_seed(0)
    wrapper = undertow.add_recurrence(model, undertow.RecurrenceConfig(**settings), freeze_base=freeze_base).eval()
    assert isinstance(wrapper, RecurrentForCausalLM)
    if opened:
        open_gates(wrapper)
    return wrapper


def attempt(model: PreTrainedModel, **settings: Any) -> tuple[Any, str]:
    """The retrofit of a model, or None with the reason why there is none."""
    try:
        return undertow.add_recurrence(model, undertow.RecurrenceConfig(**settings)).eval(), ""
    except ValueError as error:
        return None, str(error)


def open_gates(wrapper: Any, seed: int = 0) -> None:
    """Let the slots count, and nothing of the module stand at a special value."""
    if wrapper.recurrence is None:
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapper.recurrence.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if "gate" in name:
                parameter.copy_((0.8 + 0.2 * noise) / 16)
            else:
                parameter.add_(0.2 * noise)


def tokens(B: int, T: int, seed: int = 1) -> Tensor:
    """(B, T) token ids, none of them special."""
    return torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(
    model: Any,
    input_ids: Tensor,
    cuts: Any = (),
    *,
    attention_mask: Tensor | None = None,
    resets: Tensor | None = None,
    cache: RecurrentCache | None = None,
) -> tuple[Tensor, RecurrentCache]:
    """Logits of a text read in the pieces between `cuts`, and the state after it."""
    logits = []
    for start, stop in itertools.pairwise([0, *sorted(cuts), input_ids.shape[1]]):
        if start == stop:
            continue
        piece = slice(start, stop)
        out = model(
            input_ids[:, piece],
            attention_mask=None if attention_mask is None else attention_mask[:, piece],
            resets=None if resets is None else resets[:, piece],
            cache=cache,
            use_cache=True,
        )
        cache = out.cache
        assert out.logits.shape[1] == stop - start
        logits.append(out.logits)
    assert cache is not None
    return torch.cat(logits, 1), cache


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance`, absolute and relative. Norms of many models compute in float32 whatever the dtype."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
