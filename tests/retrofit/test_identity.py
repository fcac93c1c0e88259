"""A fresh retrofit is its base under a window policy: for every architecture, against a plain reference."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import zoo
from .reference import Sliding, plain, windows, with_slots
from .test_laws import few, settings, shared
from .zoo import close, tokens


def sliding(wrapper, **changes):
    """The policy of a wrapper, as the reference takes it."""
    s = wrapper.settings
    policy = {name: getattr(s, name) for name in ("window", "stride", "sinks", "reach", "selected")}
    policy |= {"decay": s.selected_decay ** (s.stride / 128), "distance": s.selected_distance}
    return Sliding(**(policy | changes))


# -- the reference itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.ALL)
def test_the_reference_over_one_window_is_the_base(name):
    base, ids = zoo.base(name, torch.float64), tokens(1, 23)
    want = base(ids, use_cache=False).logits[0]
    close(plain(base, ids[0], Sliding.everything(23))[0], want)
    assert torch.equal(base(ids, use_cache=False).logits[0], want)  # and it leaves no trace
    for policy in ("disjoint", "overlap"):
        close(windows(base, ids[0], 46, policy), want)


@pytest.mark.parametrize("name", zoo.ROTARY)
def test_the_reference_does_not_depend_on_how_positions_are_numbered(name):
    """Where positions are relative and no key is kept, any numbering within the base's limit is the same."""
    base, ids = zoo.base(name, torch.float64), tokens(1, 30)[0]
    want = plain(base, ids, Sliding(window=9, stride=30, sinks=0, reach=30))[0]
    for stride, reach in ((1, 9), (4, 12), (9, 17), (5, 25)):
        close(plain(base, ids, Sliding(window=9, stride=stride, sinks=0, reach=reach))[0], want)


# -- fresh retrofits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("name", zoo.ALL)
@torch.no_grad()
def test_a_fresh_retrofit_is_the_base_window_by_window(name, slots):
    base, ids = zoo.base(name), tokens(2, 45)
    for policy in ("disjoint", "overlap"):
        want = torch.stack([windows(base, row, 10, policy) for row in ids])
        wrapper = zoo.wrap(base, opened=False, policy=policy, window=10, slots=slots, read="queries")
        close(wrapper(ids).logits, want)


@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("name", zoo.ROTARY)
@torch.no_grad()
def test_a_fresh_retrofit_slides_as_the_reference_does(name, slots):
    base, ids = zoo.base(name), tokens(2, 45)
    for stride in (1, 4):
        wrapper = zoo.wrap(base, opened=False, policy="sliding", window=9, stride=stride, sinks=2, slots=slots)
        want = torch.stack([plain(base, row, sliding(wrapper))[0] for row in ids])
        close(wrapper(ids).logits, want)


@pytest.mark.parametrize("name", zoo.ALL)
@torch.no_grad()
def test_a_text_shorter_than_the_window_is_read_as_the_base_reads_it(name):
    base, ids = zoo.base(name), tokens(2, 13)
    want = base(ids, use_cache=False).logits
    for policy in ("disjoint", "overlap", *(["sliding"] if name in zoo.ROTARY else [])):
        for options in ({"slots": 0}, {"slots": 2, "read_layers": [2], "write_layers": [0, 1, 3]}):
            close(zoo.wrap(base, opened=False, policy=policy, window=14, **options)(ids).logits, want)


def test_the_policy_follows_from_the_positions():
    for name in zoo.ALL:
        wrapper = zoo.wrap(zoo.base(name), window=8, slots=0)
        assert wrapper.settings.policy == ("sliding" if name in zoo.ROTARY else "disjoint"), name


@few
@given(data=st.data())
@torch.no_grad()
def test_sliding_with_any_window_stride_sinks_reach_and_selection(data):
    """Against the reference; NeoX computes all in float64, so that selection cannot tie by rounding."""
    base = shared("neox")
    W, sinks = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 4))
    C, extra = data.draw(st.integers(1, W)), data.draw(st.integers(0, 20))
    chosen = {"selected": data.draw(st.integers(0, 4)), "selected_distance": data.draw(st.integers(0, W - C))}
    chosen["selected_decay"] = data.draw(st.sampled_from([0.0, 1e-3, 0.9, 1.0]))
    ids = tokens(2, data.draw(st.integers(1, 40)), data.draw(st.integers(0, 99)))
    reach = sinks + W - 1 + C + extra
    wrapper = zoo.wrap(base, policy="sliding", window=W, stride=C, sinks=sinks, slots=0, reach=reach, **chosen)
    for b, row in enumerate(ids):
        close(wrapper(ids).logits[b], plain(base, row, sliding(wrapper))[0])


@pytest.mark.parametrize("name", zoo.ROTARY)
@torch.no_grad()
def test_selected_keys_and_values_for_every_architecture(name):
    base, ids = zoo.base(name, torch.float64), tokens(2, 60)
    for stride, sinks in ((3, 2), (8, 0)):
        options = {"window": 8, "stride": stride, "sinks": sinks, "slots": 0, "selected": 4}
        wrapper = zoo.wrap(base, policy="sliding", **options)
        without = plain(base, ids[0], sliding(wrapper, selected=0))[0]
        for b, row in enumerate(ids):
            want, _ = plain(base, row, sliding(wrapper))
            close(wrapper(ids).logits[b], want)
        if name != "mistral":  # the selection counts, but where every layer is local
            assert (wrapper(ids).logits[0] - without).abs().max() > 1e-3


def test_equal_attention_is_settled_by_position():
    """With attention the same everywhere (keys zero) masses differ by how long a key was seen, and ties are many."""
    base, ids = zoo.base("neox", torch.float64), tokens(1, 40)
    with torch.no_grad():
        for layer in base.gpt_neox.layers:
            for part in (layer.attention.query_key_value.weight, layer.attention.query_key_value.bias):
                part.unflatten(0, (4, 3, 16))[:, 1] = 0
        for distance in (0, 2, 4):
            options = {"window": 8, "stride": 4, "sinks": 1, "slots": 0, "selected": 3, "selected_distance": distance}
            wrapper = zoo.wrap(base, policy="sliding", **options)
            want = plain(base, ids[0], sliding(wrapper))[0]
            close(wrapper(ids).logits[0], want)
            close(zoo.read(wrapper, ids, range(40))[0][0], want)


# -- the base comes back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.ALL)
@torch.no_grad()
def test_the_base_inside_is_as_it_was(name):
    base, ids = zoo.base(name), tokens(2, 30)
    want, config, weights = (
        base(ids).logits,
        base.config.to_dict(),
        {k: v.clone() for k, v in base.state_dict().items()},
    )
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    padded = base(ids, attention_mask=mask).logits
    generated = base.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    wrapper = zoo.wrap(base, window=6, slots=2, **zoo.selected(name))
    for _ in range(2):
        changed = wrapper(tokens(3, 20, 5)).logits
        assert torch.equal(wrapper.base(ids).logits, want)  # used by itself, between calls
    assert torch.equal(wrapper(tokens(3, 20, 5)).logits, changed)
    assert wrapper.base is base
    assert torch.equal(base.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None), generated)
    del wrapper
    gc.collect()
    assert torch.equal(base(ids).logits, want)
    assert torch.equal(base(ids, attention_mask=mask).logits, padded)
    assert base.config.to_dict() == config
    assert base.state_dict().keys() == weights.keys()
    assert all(torch.equal(v, weights[k]) for k, v in base.state_dict().items())


def test_the_base_can_be_saved_and_loaded_without_this_library(tmp_path):
    from transformers import AutoModelForCausalLM

    base, ids = zoo.base("llama"), tokens(1, 9)
    want = base(ids).logits
    wrapper = zoo.wrap(base, window=6, slots=2)
    wrapper(tokens(1, 20))
    wrapper.base.save_pretrained(tmp_path)
    assert "undertow" not in (tmp_path / "config.json").read_text()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, want)


@torch.no_grad()
def test_two_retrofits_of_one_base_do_not_meet():
    base, ids = zoo.base("llama"), tokens(2, 40)
    settings = {"window": 8, "slots": 2}, {"window": 6, "stride": 3, "selected": 3, "slots": 0}
    alone = [zoo.wrap(zoo.base("llama"), **s)(ids).logits for s in settings]
    both = [zoo.wrap(base, **s) for s in settings]
    states = [None, None]
    for i, j in ((0, 13), (13, 27), (27, 40)):
        for k, wrapper in enumerate(both):
            out = wrapper(ids[:, i:j], cache=states[k], use_cache=True)
            states[k] = out.cache
            close(out.logits, alone[k][:, i:j])


# -- far beyond what the base knows --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.ALL)
@torch.no_grad()
def test_far_beyond_the_position_limit(name):
    """A text of up to 1,000 for a model of 64 positions: numbers stay below that, on one branch of its rotary."""
    base, ids = zoo.base(name), tokens(1, 1000 if name in ("llama", "gpt2", "phi3 long") else 200)
    numbers, frequencies = [], []

    def seen(module, args, kwargs, output):
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and not x.is_floating_point()]
        numbers.extend(int(x.max()) for x in given)
        if hasattr(module, "inv_freq"):
            frequencies.append((module.inv_freq.clone(), module.attention_scaling))

    for module in base.modules():
        if any(word in type(module).__name__ for word in ("Rotary", "Positional")) or module is getattr(
            getattr(base, "transformer", None), "wpe", None
        ):
            module.register_forward_hook(seen, with_kwargs=True)
    policies = ["disjoint", "sliding"] if name in zoo.ROTARY else ["disjoint", "overlap"]
    for policy in policies:
        stride = 8 if policy == "sliding" else None
        wrapper = zoo.wrap(base, opened=False, policy=policy, window=16, stride=stride, slots=2)
        numbers.clear()
        got = wrapper(ids).logits[0]
        by_pieces = zoo.read(wrapper, ids, [1, 2, 40, 180])[0][0]
        assert max(numbers, default=0) < zoo.LIMIT
        assert all(torch.equal(f, frequencies[0][0]) and a == frequencies[0][1] for f, a in frequencies)
        want = plain(base, ids[0], sliding(wrapper))[0] if policy == "sliding" else windows(base, ids[0], 16, policy)
        assert got.isfinite().all()
        close(got, want, 2e-5)
        close(by_pieces, want, 2e-5)
    if name in zoo.ROTARY:
        wrapper = zoo.wrap(base, policy="sliding", window=16, slots=2, selected=8)
        numbers.clear()
        assert wrapper(ids).logits.isfinite().all()
        assert max(numbers, default=0) < zoo.LIMIT


# -- open retrofits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.ALL)
@torch.no_grad()
def test_slots_are_read_carried_and_written_as_the_reference_does(name):
    """For every architecture, through its own projections: grouped and fused heads, norms of keys, biases."""
    base, ids = zoo.base(name, torch.float64), tokens(2, 23)
    for policy in ("disjoint", "overlap", *(["sliding"] if name in zoo.ROTARY else [])):
        for layers in ({"read_layers": [0, 1], "write_layers": [2, 3]}, {"read_layers": [3], "write_layers": [0, 2]}):
            stride = 4 if policy == "sliding" else None
            wrapper = zoo.wrap(base, policy=policy, window=8, stride=stride, slots=3, **layers)
            got = wrapper(ids).logits
            for b, row in enumerate(ids):
                close(got[b], with_slots(wrapper, row))
        without = zoo.wrap(base, policy=policy, window=8, stride=stride, slots=0)
        assert (got - without(ids).logits).abs().max() > 1e-2


@few
@given(data=st.data())
@torch.no_grad()
def test_slots_with_any_settings(data):
    name = data.draw(st.sampled_from(["llama", "neox", "gpt2"]))
    wrapper = zoo.wrap(shared(name), **data.draw(settings(name, slots=2, selected=0)))
    ids = tokens(1, data.draw(st.integers(1, 20)), data.draw(st.integers(0, 99)))
    close(wrapper(ids).logits[0], with_slots(wrapper, ids[0]))


@pytest.mark.parametrize("update", ["feedforward", "tanh", "gru", "sru", "held"])
@torch.no_grad()
def test_an_update_by_hand(update):
    """What is new and what is old are different things: swapping them is an old mistake."""
    module = zoo.wrap(zoo.base("llama", torch.float64), window=8, slots=3, update=update).recurrence.update
    s, x = torch.randn(2, 3, module.state_size, dtype=torch.float64), torch.randn(2, 3, 32, dtype=torch.float64)
    got = module(x, s)
    if update == "held":
        want = s
    elif update == "feedforward":
        u = torch.cat([s, x], -1) @ module.inner.weight.T + module.inner.bias
        a = torch.sigmoid(module.keep)
        want = a * s + (1 - a) * x + torch.nn.functional.gelu(u) @ module.outer.weight.T + module.outer.bias
        want = want / want.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    elif update == "tanh":
        want = torch.tanh(s @ module.A.weight.T + x @ module.B.weight.T + module.B.bias)
    elif update == "gru":
        cell = module.cell
        i, h = x @ cell.weight_ih.T + cell.bias_ih, s @ cell.weight_hh.T + cell.bias_hh
        (ri, zi, ni), (rh, zh, nh) = i.chunk(3, -1), h.chunk(3, -1)
        z = torch.sigmoid(zi + zh)
        want = (1 - z) * torch.tanh(ni + torch.sigmoid(ri + rh) * nh) + z * s
    else:  # slots are h, and c is carried beside them
        cell, c = module.sru, s.chunk(2, -1)[1]
        h, c1 = cell(x.reshape(6, 1, 32), c.reshape(6, 32))
        want = torch.cat([h.view(2, 3, 32), c1.view(2, 3, 32)], -1)
        assert torch.equal(module.slots(s), s.chunk(2, -1)[0])
        assert (module(x, torch.cat([s[..., :32] + 1, s[..., 32:]], -1)) - got).abs().max() == 0
        assert (module(x, torch.cat([s[..., :32], s[..., 32:] + 1], -1)) - got).abs().max() > 0.1
    close(got, want, 1e-9)


@torch.no_grad()
def test_how_a_stride_is_pooled():
    base, h = zoo.base("llama", torch.float64), torch.randn(2, 8, 32, dtype=torch.float64)
    for kind in ("mean", "last", "queries"):
        read = zoo.wrap(base, policy="disjoint", window=8, slots=2, read=kind).recurrence.read
        x = read.inputs(read.norm(h))
        if kind == "mean":
            want = torch.stack([x[:, :4].mean(1), x[:, 4:].mean(1)], 1)
        elif kind == "last":
            want = x[:, 6:]
        else:
            scores = read.queries @ read.keys(x).mT / 32**0.5
            want = scores.softmax(-1) @ x
        close(read(h), want, 1e-9)


@torch.no_grad()
def test_kept_keys_are_read_through_a_map_that_starts_as_an_identity():
    base, ids = zoo.base("llama", torch.float64), tokens(2, 40)
    same = {"policy": "sliding", "window": 8, "stride": 4, "selected": 4, "slots": 0}
    plain, mapped = zoo.wrap(base, **same), zoo.wrap(base, opened=False, **same, selected_rank=2)
    assert torch.equal(mapped(ids).logits, plain(ids).logits)
    recall = mapped.recurrence.recall["1"]
    recall.B[0].normal_()  # of the keys
    k, v = torch.randn(2, 2, 3, 8, dtype=torch.float64), torch.randn(2, 2, 3, 8, dtype=torch.float64)
    keys, values = recall(k, v)
    close(keys, torch.stack([k[:, h] + k[:, h] @ recall.A[0, h] @ recall.B[0, h] for h in range(2)], 1), 1e-12)
    assert torch.equal(values, v)
    got, before = mapped(ids).logits, plain(ids).logits
    first = 8 + 4  # while nothing has left the window, nothing is recalled
    assert torch.equal(got[:, :8], before[:, :8])
    assert (got[:, first:] - before[:, first:]).abs().max() > 1e-6
