"""An adapter is saved alone, with its base named, and comes back the same; or says what does not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import AutoModelForCausalLM

import undertow
from undertow.retrofit import RecurrentForCausalLM

from . import zoo
from .zoo import close, tokens

SETTINGS = {
    "llama": {"window": 8, "slots": 2, "update": "sru", "read_layers": [3], "write_layers": [0, 1]},
    "gpt2": {"policy": "overlap", "window": 8, "slots": 2, "update": "tanh", "read": "mean"},
    "neox": {"window": 8, "slots": 0, "selected": 3, "selected_distance": 2},
    "gemma3": {"window": 8, "slots": 2, "projection": "own", "slot_size": 12, "selected": 2, "stride": 2},
}


@pytest.fixture
def folder(tmp_path):
    """The folder of a saved tiny Llama."""
    zoo.base("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("name", SETTINGS)
def test_save_and_load(name, tmp_path):
    zoo.base(name).save_pretrained(tmp_path / "base")
    wrapper = zoo.wrap(load(tmp_path / "base"), **SETTINGS[name])
    x = tokens(2, 40)
    want = wrapper(x).logits
    wrapper.save_pretrained(tmp_path / "adapter")
    by_name = undertow.load_recurrent(tmp_path / "adapter").eval()
    held = load(tmp_path / "base")
    onto = undertow.load_recurrent(tmp_path / "adapter", base=held).eval()
    assert onto.base is held
    for loaded in (by_name, onto, undertow.load_recurrent(str(tmp_path / "adapter")).eval()):
        assert isinstance(loaded, RecurrentForCausalLM)
        assert loaded.settings == wrapper.settings
        close(loaded(x).logits, want, 1e-6)
    # It can be saved again from there, and trained on.
    by_name.save_pretrained(tmp_path / "again")
    close(undertow.load_recurrent(tmp_path / "again").eval()(x).logits, want, 1e-6)
    by_name.train()
    if name != "neox":
        by_name(x, labels=x).loss.backward()
        assert all(p.grad is not None for p in by_name.recurrence.parameters())
        assert all(p.grad is None for p in by_name.base.parameters())


def test_an_adapter_holds_the_module_alone(folder, tmp_path):
    from safetensors import safe_open

    wrapper = zoo.wrap(load(folder), window=8, slots=2)
    wrapper.save_pretrained(tmp_path / "adapter")
    with safe_open(tmp_path / "adapter" / "model.safetensors", "pt") as file:
        size = sum(file.get_tensor(k).numel() for k in file.keys())  # noqa: SIM118 (no mapping)
    assert size == sum(p.numel() for p in wrapper.recurrence.parameters())
    config = json.loads((tmp_path / "adapter" / "config.json").read_text())
    assert config["model_type"] == "undertow_recurrent"
    assert str(folder) in json.dumps(config)  # its base, named
    explained = wrapper.explain()
    assert f"{size:,}" in explained or str(size) in explained


def test_a_base_that_was_trained_is_saved_with_it(folder, tmp_path):
    wrapper = zoo.wrap(load(folder), window=8, slots=2, freeze_base=False)
    x = tokens(2, 30)
    wrapper.train()(x, labels=x).loss.backward()
    torch.optim.SGD(wrapper.parameters(), 0.05).step()
    want = wrapper.eval()(x).logits
    wrapper.save_pretrained(tmp_path / "adapter")
    close(undertow.load_recurrent(tmp_path / "adapter").eval()(x).logits, want, 1e-6)


@pytest.mark.parametrize("way", ["before", "after", "injected"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lora_is_saved_with_it(name, way, tmp_path):
    zoo.base(name).save_pretrained(tmp_path / "base")
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "gpt2")
    base = load(tmp_path / "base")
    wrapper = zoo.wrap(get_peft_model(base, config) if way == "before" else base, window=8, slots=2)
    if way == "after":
        get_peft_model(wrapper.base, config)
    if way == "injected":
        inject_adapter_in_model(config, wrapper.base)
    wrapper.eval()
    x = tokens(2, 30)
    want = wrapper(x).logits
    wrapper.save_pretrained(tmp_path / "adapter")
    loaded = undertow.load_recurrent(tmp_path / "adapter").eval()
    close(loaded(x).logits, want, 1e-6)
    onto = undertow.load_recurrent(tmp_path / "adapter", base=load(tmp_path / "base")).eval()
    close(onto(x).logits, want, 1e-6)


def test_weights_can_be_loaded_into_a_model_already_held(folder, tmp_path):
    x = tokens(2, 30)
    wrapper = zoo.wrap(load(folder), window=8, slots=2)
    want = wrapper(x).logits
    wrapper.save_pretrained(tmp_path / "adapter")
    other = zoo.wrap(load(folder), window=8, slots=2, opened=False)
    assert (other(x).logits - want).abs().max() > 1e-3
    other.load_state(tmp_path / "adapter")
    close(other(x).logits, want, 1e-6)


def test_a_damaged_or_foreign_adapter_is_refused_by_name(folder, tmp_path):
    x = tokens(2, 20)
    wrapper = zoo.wrap(load(folder), window=8, slots=2)
    wrapper.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "model.safetensors"
    whole = weights.read_bytes()
    other = zoo.wrap(load(folder), window=8, slots=2, opened=False)
    before = other(x).logits
    for damaged in (whole[:-100], whole[:50], b"", b"\0" * 200):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors.*(damaged|cut short)"):
            undertow.load_recurrent(tmp_path / "adapter")
        with pytest.raises(ValueError, match=r"model\.safetensors.*(damaged|cut short)"):
            other.load_state(tmp_path / "adapter")
        assert torch.equal(other(x).logits, before)
    weights.unlink()
    with pytest.raises((OSError, ValueError), match=r"model\.safetensors"):
        undertow.load_recurrent(tmp_path / "adapter")
    weights.write_bytes(whole)
    undertow.load_recurrent(tmp_path / "adapter")
    config = tmp_path / "adapter" / "config.json"
    text = config.read_text()
    config.write_text(text[: len(text) // 2])
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        undertow.load_recurrent(tmp_path / "adapter")
    with pytest.raises((OSError, ValueError), match="nowhere"):
        undertow.load_recurrent(tmp_path / "nowhere")
    # A folder that is no adapter: the base's own.
    with pytest.raises(ValueError, match=r"(?i)adapter|recurren|retrofit"):
        undertow.load_recurrent(folder)


def test_weights_of_other_sizes_are_refused_and_nothing_is_loaded_by_half(folder, tmp_path):
    x = tokens(2, 20)
    zoo.wrap(load(folder), window=8, slots=3).save_pretrained(tmp_path / "three")
    zoo.wrap(load(folder), window=8, slots=2, update="tanh").save_pretrained(tmp_path / "tanh")
    wrapper = zoo.wrap(load(folder), window=8, slots=2)
    before = wrapper(x).logits
    for other in ("three", "tanh"):
        with pytest.raises(ValueError, match=r"(?i)slots|shape|update|weights"):
            wrapper.load_state(tmp_path / other)
        assert torch.equal(wrapper(x).logits, before)


def test_another_base_is_refused_by_name(folder, tmp_path):
    zoo.wrap(load(folder), window=8, slots=2).save_pretrained(tmp_path / "adapter")
    others = {
        "the same sizes, other weights": (zoo.base("llama", seed=3), "weights|fingerprint"),
        "one layer trained further": (load(folder), "weights|fingerprint"),
        "another architecture": (zoo.base("mistral"), "Mistral"),
        "another size": (zoo.base("llama", hidden_size=64, head_dim=16), "hidden_size|fingerprint"),
        "another rotary": (zoo.base("llama yarn"), "rope|config|fingerprint"),
        "another vocabulary": (zoo.base("llama", vocab_size=50), "vocab_size|fingerprint"),
    }
    with torch.no_grad():
        others["one layer trained further"][0].model.layers[2].mlp.up_proj.weight.add_(0.01)
    for base, message in others.values():
        ids = tokens(1, 9) % 50
        want, keys = base(ids).logits, base.state_dict().keys()
        with pytest.raises(ValueError, match=message):
            undertow.load_recurrent(tmp_path / "adapter", base=base)
        assert torch.equal(base(ids).logits, want)
        assert base.state_dict().keys() == keys
    # The same base in another precision or from another folder is the same base.
    shutil.copytree(folder, tmp_path / "moved")
    undertow.load_recurrent(tmp_path / "adapter", base=load(tmp_path / "moved"))


def test_a_base_that_changed_since_is_refused(folder, tmp_path):
    zoo.wrap(load(folder), window=8, slots=2).save_pretrained(tmp_path / "adapter")
    zoo.base("llama", seed=9).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"weights|fingerprint"):
        undertow.load_recurrent(tmp_path / "adapter")
    shutil.rmtree(folder)
    with pytest.raises((OSError, ValueError), match="base"):
        undertow.load_recurrent(tmp_path / "adapter")


def test_the_auto_classes_and_from_pretrained_know_it(folder, tmp_path):
    wrapper = zoo.wrap(load(folder), window=8, slots=2)
    wrapper.save_pretrained(tmp_path / "adapter")
    x = tokens(2, 20)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert isinstance(loaded, RecurrentForCausalLM)
    close(loaded(x).logits, wrapper(x).logits, 1e-6)


def test_explain_says_the_order_and_why(folder):
    parallel = zoo.wrap(load(folder), window=8, slots=2, read_layers=[1], write_layers=[2, 3]).explain()
    above = zoo.wrap(load(folder), window=8, slots=2, read_layers=[3], write_layers=[0]).explain()
    chosen = zoo.wrap(load(folder), window=8, slots=0, selected=2).explain()
    assert len({parallel, above, chosen}) == 3
    for text in (parallel, above, chosen):
        assert "parameters" in text
        assert "order" in text.lower()
