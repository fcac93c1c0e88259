"""What is asked of a recurrent model that it cannot do, or that goes wrong half way: told, and nothing left behind."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import undertow
from tests.retrofit import zoo
from undertow import RecurrenceConfig, RecurrentCache


@pytest.fixture
def model():
    return undertow.add_recurrence(zoo.base("llama"), RecurrenceConfig(window=8, slots=2)).eval()


@pytest.fixture
def text() -> Tensor:
    return torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(0))


def test_drafts_that_could_not_be_taken_back_are_refused(model, text):
    with pytest.raises(ValueError, match="assisted generation"):
        model.generate(text[:1], max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=3)


def test_prompts_padded_on_the_right_are_refused(model, text):
    mask = torch.ones_like(text)
    mask[1, -3:] = 0
    with pytest.raises(ValueError, match="pad on the left"):
        model.generate(text, attention_mask=mask, max_new_tokens=2)


def test_a_cache_of_another_kind_is_refused_in_generate(model, text):
    from transformers import DynamicCache

    with pytest.raises(TypeError, match="RecurrentCache"):
        model.generate(text, cache=DynamicCache(), max_new_tokens=2)


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids", "inputs_embeds", "output_hidden_states"])
def test_what_windows_cannot_honour_is_refused(model, text, name):
    with pytest.raises(ValueError, match=name if name != "inputs_embeds" else "input_ids"):
        model(text, **{name: True if name.startswith("output") else torch.zeros_like(text)})


def test_logits_to_keep_may_repeat_and_mix(model, text):
    whole = model(text).logits
    kept = torch.tensor([-1, 3, 3])
    torch.testing.assert_close(model(text, logits_to_keep=kept).logits, whole[:, kept])
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(text, logits_to_keep=-1)


def test_two_threads_take_turns_on_one_base(text):
    base = zoo.base("llama")
    wrappers = [undertow.add_recurrence(base, RecurrenceConfig(window=w, slots=0)).eval() for w in (4, 8)]
    wanted = [w(text).logits for w in wrappers]
    wrong: list[str] = []

    def read(index: int) -> None:
        try:
            for _ in range(10):
                with torch.no_grad():
                    torch.testing.assert_close(wrappers[index](text).logits, wanted[index])
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=read, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert base.config._attn_implementation != "undertow"


def test_states_of_other_settings_are_refused(text, tmp_path):
    base = zoo.base("llama")
    one, other = (undertow.add_recurrence(base, RecurrenceConfig(window=8, slots=2, read=read)).eval()
                  for read in ("mean", "last"))  # fmt: skip
    state = one(text).cache
    with pytest.raises(ValueError, match="read"):
        other(text, cache=state)
    state.save(tmp_path / "state")
    with pytest.raises(ValueError, match="read"):
        RecurrentCache.load(tmp_path / "state", other)


@pytest.mark.parametrize("damage", ["tensor", "value", "metadata", "fits", "no json"])
def test_damaged_states_are_told(model, text, tmp_path, damage):
    path = tmp_path / "state"
    model(text).cache.save(path)
    tensors = load_file(path)
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    (name, meta), *_ = header["__metadata__"].items()
    if damage == "tensor":
        tensors.pop("slots")
    elif damage == "value":
        tensors["slots"][0, 0, 0] += 1
    elif damage == "no json":
        meta = "{"
    else:
        facts = json.loads(meta)
        facts.pop("seen_tokens" if damage == "metadata" else "fits")
        meta = json.dumps(facts)
    save_file(tensors, path, {name: meta})
    with pytest.raises(ValueError, match="state"):
        RecurrentCache.load(path, model)


def test_a_base_that_recomputes_by_itself_is_told(model, text):
    model.base.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        model(text, labels=text)


def test_a_failed_load_leaves_the_base_as_it_was(tmp_path):
    peft = pytest.importorskip("peft")
    base = zoo.base("llama")
    lora = peft.get_peft_model(zoo.base("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    undertow.add_recurrence(lora, RecurrenceConfig(window=8, slots=2)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("recurrence.initial")
    save_file(weights, tmp_path / "model.safetensors")
    names = [name for name, _ in base.named_parameters()]
    with pytest.raises(ValueError, match=r"recurrence\.initial"):
        undertow.load_recurrent(tmp_path, base)
    assert [name for name, _ in base.named_parameters()] == names


def test_an_adapter_stays_whole_when_another_cannot_be_written_over_it(model, text, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path)
    wanted = model(text).logits
    other = undertow.add_recurrence(model.base, RecurrenceConfig(window=4, slots=2))

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("undertow.retrofit.storage.save_file", full)
    with pytest.raises(OSError, match="No space"):
        other.save_pretrained(tmp_path)
    torch.testing.assert_close(undertow.load_recurrent(tmp_path, model.base)(text).logits, wanted)


def test_modes_and_gradients_of_a_base_are_left_alone():
    base = zoo.base("gpt2").train()
    base.transformer.drop.eval()
    with pytest.raises(ValueError, match="layer"):
        undertow.add_recurrence(base, RecurrenceConfig(window=8, slots=2, read_layers=[99]))
    assert all(p.requires_grad for p in base.parameters())
    undertow.add_recurrence(base, RecurrenceConfig(window=8, slots=2))
    assert base.training
    assert not base.transformer.drop.training


@pytest.mark.parametrize("settings", [
    {"window": True}, {"window": None}, {"bptt": None}, {"slots": "4"}, {"read_layers": 2}, {"read_layers": "12"},
    {"write_layers": [1.0]}, {"selected_decay": "x"}, {"recompute": "no"},
])  # fmt: skip
def test_settings_of_the_wrong_type_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RecurrenceConfig(**settings)


@pytest.mark.parametrize("change", [{"recurrence": [1]}, {"base": "x"}, {"lora": 3}, {"recurrence": {"window": None}}])
def test_damaged_adapters_are_told(model, tmp_path, change):
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"config\.json"):
        undertow.load_recurrent(tmp_path, model.base)


@pytest.mark.parametrize("bad", [
    {"input_ids": [[1, 2, 3]]}, {"input_ids": None}, {"attention_mask": [[1] * 20] * 2},
])  # fmt: skip
def test_what_is_no_tensor_is_named(model, text, bad):
    with pytest.raises(TypeError, match=next(iter(bad))):
        model(**{"input_ids": text[:, :20], **bad})


@pytest.mark.parametrize("value", [-1e9, 0.5])
def test_masks_to_be_added_to_scores_are_refused(model, text, value):
    mask = torch.zeros(len(text), text.shape[1])
    mask[:, 0] = value
    with pytest.raises(ValueError, match="attention_mask must be 1 at tokens"):
        model(text, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_token_ids_may_be_integers_of_any_width(model, text, dtype):
    assert torch.equal(model(text.to(dtype)).logits, model(text).logits)


def test_a_base_that_is_not_finite_is_told():
    base = zoo.base("llama")
    with torch.no_grad():
        base.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        undertow.add_recurrence(base, undertow.RecurrenceConfig(window=8))


@pytest.mark.parametrize("update", ["feedforward", "tanh", "gru", "sru"])
@pytest.mark.parametrize("projection", ["base", "own"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_module_may_be_wider_than_its_base(text, name, projection, update):
    """A frozen base in bfloat16 under a module that trains in float32."""
    selected = {"selected": 4, "selected_rank": 2} if name == "llama" else {}
    config = undertow.RecurrenceConfig(window=8, slots=4, projection=projection, update=update, **selected)
    model = undertow.add_recurrence(zoo.base(name), config)
    for p in model.recurrence.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.ndim > 1 else torch.nn.init.constant_(p, 0.1)
    expected = model(text, labels=text)
    model.base.to(torch.bfloat16)
    got = model(text, labels=text)
    got.loss.backward()
    assert torch.isclose(got.loss, expected.loss, rtol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.recurrence.parameters())
