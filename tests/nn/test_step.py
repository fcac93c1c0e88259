"""A step in the compiled part against the layers' own forward pass, and when it is not taken."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.cases import compiled

from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.nn.linear import to_int8
from undertow.nn.step import Step

pytestmark = pytest.mark.skipif(not compiled, reason="undertow was installed without its compiled part")
V = 50


@pytest.fixture
def taken(monkeypatch):
    """How many steps were taken."""
    count = []
    monkeypatch.setattr(Step, "__call__", lambda self, *a, f=Step.__call__: count.append(1) or f(self, *a))
    return count


def make(**settings):
    torch.manual_seed(settings.pop("seed", 0))
    sizes = {"hidden_size": 24, "projection_size": 12, "num_hidden_layers": 3, "attention_window": 5, "alpha_init": 0.7}
    config = SRUppConfig(vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=0, **{**sizes, **settings})
    return SRUppForCausalLM(config).eval()


def ids(B, T, seed=1):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def by_token(model, x, cache=None):
    logits = []
    for t in range(x.shape[1]):
        out = model(x[:, t : t + 1], cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_steps_are_the_layers(data):
    B, dtype = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    model = make(
        hidden_size=data.draw(st.sampled_from([1, 24, 70, 200])),
        num_attention_heads=data.draw(st.sampled_from([1, 3])),
        embedding_size=data.draw(st.sampled_from([None, 9])),
        layer_norm=data.draw(st.sampled_from(["none", "before", "after"])),
        activation=data.draw(st.sampled_from(["identity", "tanh"])),
        attention_every=data.draw(st.sampled_from([1, 2])),
        attention_window=data.draw(st.sampled_from([1, 3, 40])),
        seed=data.draw(st.integers(0, 99)),
    ).to(dtype)
    with torch.inference_mode() if data.draw(st.booleans()) else torch.no_grad():
        x = ids(B, 20)
        stepped, state = by_token(model, x)
        whole = model(x, use_cache=True)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    scale = whole.logits.float().abs().max().clamp(min=1)
    assert ((stepped - whole.logits).float().abs().max()) < tolerance * scale
    for mine, its in zip(state.layers, whole.cache.layers, strict=True):
        for name, tensor in its.tensors().items():
            got = mine.tensors()[name]
            assert got.dtype == tensor.dtype
            assert got.shape == tensor.shape
            assert (got - tensor).float().abs().max() < tolerance * tensor.float().abs().max().clamp(min=1)


def test_a_step_is_taken_where_it_can_be_and_only_there(taken):
    model, x = make(), ids(2, 6)
    with torch.inference_mode():
        want, cache = by_token(model, x)
        assert len(taken) == 5  # the first token has no state to go on from
        model(x[:, :1], cache=cache.clone(), attention_mask=torch.ones(2, 7))
        assert len(taken) == 6
        # Padding, document starts, a row that remembers less, pieces, hidden states: the layers do these.
        for more in (
            {"attention_mask": torch.tensor([[1], [0]])},
            {"resets": torch.tensor([[True], [False]])},
            {"output_hidden_states": True},
        ):
            model(x[:, :1], cache=cache.clone(), **more)
        model(x[:, :1], cache=cache.clone().reset_rows(torch.tensor([True, False])))
        model(x[:, :2], cache=cache.clone())
        seen = []
        hook = model.model.layers[1].down_proj.register_forward_hook(lambda *a: seen.append(1))
        model(x[:, :1], cache=cache.clone())
        assert seen
        hook.remove()
        with torch.autocast("cpu", torch.bfloat16):
            model(x[:, :1], cache=cache.clone())
        assert len(taken) == 6
    model(x[:, :1], cache=cache.clone())  # a gradient may be asked for
    assert len(taken) == 6
    with torch.no_grad():
        by_token(copy.deepcopy(model), x)
        assert len(taken) == 11
    assert pickle.loads(pickle.dumps(model._modules["model"]._last_step)) is None
    assert want.isfinite().all()


@pytest.mark.parametrize("change", ["optimiser", "load", "int8", "cast"])
def test_changed_weights_are_noticed(taken, change):
    model, x = make(), ids(1, 8)
    with torch.no_grad():
        by_token(model, x)
    if change == "optimiser":
        model(x, labels=x).loss.backward()
        torch.optim.SGD(model.parameters(), lr=3.0).step()
    elif change == "load":
        model.load_state_dict(make(seed=5).state_dict())
    elif change == "int8":
        to_int8(model)
    else:
        model.to(torch.bfloat16)
    taken.clear()
    with torch.no_grad():
        got, _ = by_token(model, x)
        assert len(taken) == 7
        want = model(x).logits
    tolerance = 0.05 if change == "cast" else 1e-3 if change == "int8" else 1e-4
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.float().abs().max()))


def test_a_state_that_is_shared_out_goes_its_own_ways(taken):
    model = make()
    with torch.inference_mode():
        _, cache = by_token(model, ids(1, 9))
        ways = []
        for seed in (3, 4):
            fork = cache.clone()
            ways.append((seed, by_token(model, ids(1, 12, seed), fork)[0]))
        fork = cache.clone()
        fork.batch_repeat_interleave(2)
        both, _ = by_token(model, torch.cat([ids(1, 12, seed) for seed, _ in ways]), fork)
    assert taken
    for row, (_, alone) in zip(both, ways, strict=True):
        torch.testing.assert_close(row, alone[0], rtol=1e-4, atol=1e-4)


def test_a_layer_in_training_and_a_state_of_another_dtype_are_the_layers_own(taken):
    model, x = make(), ids(1, 3)
    with torch.no_grad():
        _, cache = by_token(model, x)
        taken.clear()
        model.model.layers[1].train()
        model(x[:, :1], cache=cache.clone())
        model.eval()
        wide = cache.clone()
        wide.layers[0].put("c", wide.layers[0].tensors()["c"].double())
        with pytest.raises(TypeError, match="c0"):
            model(x[:, :1], cache=wide)
    assert not taken


def test_room_is_given_up_with_what_it_was_for():
    model = make()
    with torch.no_grad():
        _, cache = by_token(model, ids(1, 5))
        assert cache.layers[0]._rooms
        cache.reorder_cache(torch.tensor([0]))
    assert not cache.layers[0]._rooms
