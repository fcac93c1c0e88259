"""What cannot work is refused by name, before anything is changed."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import undertow
from undertow import RecurrenceConfig

from . import zoo
from .reference import windows
from .zoo import close, tokens


def add(model, **settings):
    return undertow.add_recurrence(model, RecurrenceConfig(**({"window": 8, "slots": 2} | settings)))


def tiny(kind, **options):
    config = AutoConfig.for_model(kind, **(zoo._COMMON | options))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


# -- bases ---------------------------------------------------------------------------------------------------------


def test_an_encoder_decoder():
    options = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **options))
    with pytest.raises(ValueError, match=r"T5.*encoder-decoder"):
        add(model)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_that_has_a_language_head(kind):
    """transformers lists it among causal models; it sees what comes after unless told that it is a decoder."""
    with pytest.raises(ValueError, match=re.compile("bert.*(causal|encoder|later)", re.I)):
        add(tiny(kind))


SKIP = {
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon": {"head_dim": None},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mamba": {},
    "rwkv": {"attention_hidden_size": 32},
}


@pytest.mark.parametrize("kind", SKIP)
def test_attention_that_skips_the_registry(kind):
    options = {k: v for k, v in (zoo._COMMON | SKIP[kind]).items() if v is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()
    ids = tokens(1, 9)
    want = model(ids).logits
    with pytest.raises(ValueError, match=re.compile(f"{type(model).__name__}.*registry", re.S)):
        add(model, policy="disjoint")
    assert torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_layers_with_a_state_of_their_own(kind):
    options = {"layer_types": ["conv", "full_attention"] * 2} if kind == "lfm2" else {}
    model = tiny(kind, **options)
    with pytest.raises(ValueError, match=re.compile(f"{type(model).__name__}.*(layers|state)", re.S)):
        add(model)


def test_what_is_no_language_model():
    with pytest.raises((TypeError, ValueError), match="Linear"):
        add(torch.nn.Linear(3, 3))
    with pytest.raises((TypeError, ValueError), match="LlamaModel"):
        add(zoo.base("llama").model)


def test_a_retrofit_is_not_retrofitted_again():
    with pytest.raises((TypeError, ValueError), match="RecurrentForCausalLM"):
        add(add(zoo.base("llama")))
    from undertow.models import SRUppConfig, SRUppForCausalLM

    own = SRUppForCausalLM(SRUppConfig(vocab_size=20, hidden_size=8, projection_size=4, num_hidden_layers=1))
    with pytest.raises((TypeError, ValueError), match="SRUpp"):
        add(own)


# Not asked for, but within reach: these must be right or refused, and never silently wrong.
MIXED, DEFAULT = ["sliding_attention", "full_attention"] * 2, {"rope_type": "default", "rope_theta": 1e4}
OTHERS = {
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "cohere": {},
    "cohere2": {"sliding_window": 5, "layer_types": MIXED},
    "exaone4": {"sliding_window": 5, "layer_types": MIXED},
    "olmo": {},
    "olmo3": {"sliding_window": 5, "layer_types": MIXED},
    "qwen2": {},
    "gemma": {},
    "granite": {"attention_multiplier": 0.5},
    "glm": {},
    "glm4": {},
    "stablelm": {},
    "starcoder2": {},
    "persimmon": {},
    "nemotron": {},
    "helium": {},
    "ernie4_5": {},
    "bitnet": {},
    "arcee": {},
    "gptj": {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "head_dim": None},
    "codegen": {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "head_dim": None},
    "hunyuan_v1_dense": {},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2, "layer_types": MIXED,
                "rope_parameters": DEFAULT},
    "doge": {},
    "llama4_text": {"num_local_experts": 1, "attention_chunk_size": 16, "intermediate_size_mlp": 48},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "biogpt": {},
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "bart": {"d_model": 32, "decoder_layers": 4, "decoder_attention_heads": 4, "is_decoder": True},
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "vaultgemma": {"sliding_window": 5},
    "gemma4_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "sliding_window": 5,
                    "layer_types": MIXED},
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
@torch.no_grad()
def test_other_architectures_are_right_or_refused(kind):
    options = {k: v for k, v in (zoo._COMMON | OTHERS[kind]).items() if v is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    ids, name = tokens(2, 30), type(model).__name__
    renumbered = {"window": 8, "stride": 4, "sinks": 0, "slots": 0, "policy": "sliding"}
    want = model(ids, use_cache=False).logits
    disjoint, reason = zoo.attempt(model, window=8, slots=2, policy="disjoint")
    if disjoint is None:
        assert name in reason
        assert torch.equal(model(ids, use_cache=False).logits, want)
        return
    close(disjoint(ids).logits, torch.stack([windows(model, row, 8, "disjoint") for row in ids]), 2e-5)
    sliding, reason = zoo.attempt(model, window=40, slots=2, policy="sliding")
    if sliding is None:
        assert name in reason
        return
    close(sliding(ids).logits, want, 2e-5)
    # Renumbered: without sinks numbers do not matter where positions are relative, only which keys are seen.
    few, many = (
        undertow.add_recurrence(model, RecurrenceConfig(**renumbered, reach=reach)).eval()(ids).logits
        for reach in (11, 40)
    )
    close(few, many, 2e-5)


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"window": 0}, "window"),
        ("llama", {"window": -3}, "window"),
        ("llama", {"window": 65}, "64"),
        ("llama", {"window": 62, "policy": "sliding"}, "64"),
        ("gpt2", {"window": 65}, "64"),
        ("gpt2", {"window": 65, "policy": "overlap"}, "window|64"),
        ("opt", {"window": 65}, "64"),
        ("gpt2", {"policy": "sliding"}, "(?s)sliding.*(GPT2|absolute)"),
        ("opt", {"policy": "sliding"}, "(?s)sliding.*(OPT|absolute)"),
        ("gpt2", {"policy": "disjoint", "selected": 3}, "sliding"),
        ("llama", {"policy": "disjoint", "selected": 3}, "sliding"),
        ("llama", {"policy": "everything"}, "disjoint, overlap, sliding"),
        ("llama", {"policy": "overlap", "window": 7}, "even"),
        ("llama", {"policy": "disjoint", "stride": 3}, "stride"),
        ("llama", {"policy": "sliding", "stride": 9}, "stride"),
        ("llama", {"stride": 0}, "stride"),
        ("llama", {"sinks": -1}, "sinks"),
        ("llama", {"slots": -1}, "slots"),
        ("llama", {"selected": -1}, "selected"),
        ("llama", {"reach": 8}, "reach"),
        ("llama", {"reach": 65}, "64"),
        ("llama", {"read": "all"}, "mean, last, queries"),
        ("llama", {"update": "lstm"}, "feedforward, tanh, gru, sru, held"),
        ("llama", {"projection": "none"}, "base, own"),
        ("llama", {"read_layers": [4]}, "(?s)read_layers.*4"),
        ("llama", {"read_layers": [-1]}, "(?s)read_layers.*-1"),
        ("llama", {"write_layers": [7]}, "(?s)write_layers.*7"),
        ("llama", {"read_layers": []}, "read_layers"),
        ("llama", {"write_layers": []}, "write_layers"),
        ("llama", {"slot_size": 12}, "slot"),
        ("llama", {"slots": 9, "read": "mean", "policy": "disjoint"}, "slots"),
        ("llama", {"bptt": 0}, "bptt"),
        ("llama", {"window": 8.5}, "window"),
    ],
)
def test_settings_that_do_not_fit(name, settings, message):
    base, ids = zoo.base(name), tokens(1, 9)
    want, keys = base(ids).logits, base.state_dict().keys()
    trained = [p.requires_grad for p in base.parameters()]
    with pytest.raises(ValueError, match=message):
        add(base, **settings)
    assert torch.equal(base(ids).logits, want)
    assert base.state_dict().keys() == keys
    assert [p.requires_grad for p in base.parameters()] == trained


def test_settings_at_the_very_limit_work():
    for name, settings in (
        ("llama", {"window": 64, "policy": "disjoint"}),
        ("gpt2", {"window": 64, "policy": "overlap"}),
        ("llama", {"window": 50, "stride": 11, "sinks": 4, "policy": "sliding"}),
        ("llama", {"window": 1, "sinks": 0, "policy": "sliding"}),
        ("gpt2", {"window": 1, "slots": 1}),
    ):
        wrapper = add(zoo.base(name), **settings).eval()
        x = tokens(1, 140)
        whole = zoo.read(wrapper, x)[0]
        assert whole.isfinite().all()
        close(zoo.read(wrapper, x, range(0, 140, 9))[0], whole)
