"""The state of a retrofit: what its owner may do with it, files, other processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from transformers import Cache

from undertow.nn.linear import to_int8
from undertow.retrofit import RecurrentCache

from . import zoo
from .zoo import close, read, tokens

# A state of each make: slots behind and ahead of what is read, selected keys, nothing but the window.
SLIDING, DISJOINT, OVERLAP = ({"policy": p, "window": 8} for p in ("sliding", "disjoint", "overlap"))
SELECTED = {"selected": 3, "selected_distance": 2}
STATES = {
    "sliding, slots": ("llama", {**SLIDING, "slots": 2}),
    "sliding, selected": ("neox", {**SLIDING, **SELECTED, "slots": 0}),
    "sliding, both": ("gemma3", {**SLIDING, **SELECTED, "slots": 2, "selected_by": "learned", "selected_rank": 2}),
    "disjoint, read above": ("gpt2", {**DISJOINT, "slots": 2, "read_layers": [3], "write_layers": [0]}),
    "overlap, own projection": ("llama", {**OVERLAP, "slots": 2, "projection": "own", "slot_size": 12}),
    "overlap, no memory": ("gpt2", {**OVERLAP, "slots": 0}),
}
each = pytest.mark.parametrize("kind", STATES)


def make(kind, **more):
    name, settings = STATES[kind]
    return zoo.wrap(zoo.base(name), **(settings | more))


@each
def test_it_is_a_cache_of_the_text_read(kind):
    wrapper = make(kind)
    new = wrapper.new_cache()
    assert isinstance(new, RecurrentCache)
    assert isinstance(new, Cache)
    assert new.get_seq_length() == 0
    _, state = read(wrapper, tokens(2, 21), [4])
    assert state.seen_tokens == state.get_seq_length() == 21
    assert state.nbytes() > 0
    x = tokens(2, 21)
    close(read(wrapper, x, cache=new)[0], read(wrapper, x)[0], 0)


@each
def test_a_clone_goes_its_own_way_and_a_given_state_is_not_written_into(kind):
    wrapper = make(kind)
    x = tokens(2, 45)
    want = read(wrapper, x)[0][:, 20:]
    _, state = read(wrapper, x[:, :20])
    copies = [state.clone() for _ in range(3)]
    tensors = _tensors(state)
    before = [t.clone() for t in tensors]
    assert tensors
    close(read(wrapper, x[:, 20:], [3], cache=state)[0], want)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))  # replaced, never overwritten
    read(wrapper, tokens(2, 30, 9), cache=copies[0])
    for left in copies[1:]:
        assert left.get_seq_length() == 20
        close(read(wrapper, x[:, 20:], cache=left)[0], want)


def _tensors(thing, seen=None):
    """Every tensor that hangs on an object, whatever its attributes are called."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, (list, tuple, set)):
        return [t for item in thing for t in _tensors(item, seen)]
    if isinstance(thing, dict):
        return _tensors(list(thing.values()), seen)
    if isinstance(thing, torch.nn.Module) or not hasattr(thing, "__dict__"):
        return []
    return _tensors(vars(thing), seen)


@each
def test_reset_rows_starts_them_afresh(kind):
    wrapper = make(kind)
    x, more = tokens(3, 21), tokens(3, 19, 4)
    _, state = read(wrapper, x)
    state.reset_rows(torch.tensor([False, True, False]))
    got, _ = read(wrapper, more, [2], cache=state)
    close(got[1], read(wrapper, more[1:2])[0][0])
    whole = read(wrapper, torch.cat([x, more], 1))[0][:, 21:]
    close(got[[0, 2]], whole[[0, 2]])
    with pytest.raises(ValueError, match=r"\(3,\)"):
        state.reset_rows(torch.tensor([True]))


@each
def test_reorder_repeat_select_and_reset(kind):
    wrapper = make(kind)
    x, more = tokens(3, 21), tokens(3, 12, 4)
    mask = torch.ones_like(x)
    mask[1, :9] = 0
    whole = read(wrapper, torch.cat([x, more], 1), attention_mask=torch.cat([mask, torch.ones_like(more)], 1))[0][
        :, 21:
    ]
    _, state = read(wrapper, x, [5], attention_mask=mask)
    _, want = read(wrapper, x, attention_mask=mask)
    state.reorder_cache(torch.tensor([2, 0, 1]))
    close(read(wrapper, more[[2, 0, 1]], [1], cache=state.clone())[0], whole[[2, 0, 1]])
    want.batch_repeat_interleave(2)
    assert want.batch_size == 6
    close(read(wrapper, more.repeat_interleave(2, 0), [1], cache=want)[0], whole.repeat_interleave(2, 0))
    state.batch_select_indices(torch.tensor([0, 2]))
    close(read(wrapper, more[[2, 1]], cache=state.clone())[0], whole[[2, 1]])
    state.reset()
    assert state.get_seq_length() == 0
    close(read(wrapper, more, cache=state)[0], read(wrapper, more)[0])


@each
def test_it_can_be_detached_moved_and_copied(kind):
    wrapper = make(kind)
    x, more = tokens(2, 21), tokens(2, 9, 4)
    out = wrapper.train()(x, use_cache=True)
    wrapper.eval()
    want = read(wrapper, torch.cat([x, more], 1))[0][:, 21:]
    state = out.cache
    assert state.detach_() is state
    assert not any(t.requires_grad for t in _tensors(state))
    moved = state.to("cpu")
    assert moved is state
    close(read(wrapper, more, cache=copy.deepcopy(state))[0], want)
    close(read(wrapper, more, cache=state)[0], want)


@each
def test_its_size_does_not_depend_on_the_text(kind):
    """Nor on how the text was cut, once a few windows have been read; and no hidden storage is held."""
    wrapper = make(kind)
    sizes, held = set(), set()
    for T, cuts in ((64, ()), (128, ()), (400, (3, 77, 200)), (400, range(0, 400, 16))):
        _, state = read(wrapper, tokens(2, T), cuts)
        sizes.add(state.nbytes())
        held.add(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(state)}.values()))
    assert len(sizes) == 1
    assert max(held) <= 2 * max(sizes) + 4096


@each
def test_it_survives_a_file(kind, tmp_path):
    wrapper = make(kind)
    x, more = tokens(2, 21), tokens(2, 12, 4)
    mask = torch.ones_like(x)
    mask[1, :3] = 0
    _, state = read(wrapper, x, [4], attention_mask=mask)
    state.save(tmp_path / "state.safetensors")
    loaded = RecurrentCache.load(tmp_path / "state.safetensors", wrapper)
    assert loaded.get_seq_length() == 21
    close(read(wrapper, more, cache=loaded)[0], read(wrapper, more, cache=state)[0], 0)


CONTINUE = """
import sys, torch, undertow
from undertow.nn.linear import to_int8
from undertow.retrofit import RecurrentCache
model = undertow.load_recurrent(sys.argv[1]).eval()
state = RecurrentCache.load(sys.argv[2], model)
x = torch.load(sys.argv[3])
torch.save(model(x, cache=state).logits, sys.argv[4])
"""


def test_another_process_goes_on_from_a_state(tmp_path):
    base = zoo.base("llama")
    base.save_pretrained(tmp_path / "base")
    from transformers import AutoModelForCausalLM

    wrapper = zoo.wrap(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), window=8, slots=2, selected=3)
    wrapper.save_pretrained(tmp_path / "adapter")
    x, more = tokens(2, 45), tokens(2, 20, 4)
    _, state = read(wrapper, x)
    state.save(tmp_path / "state.safetensors")
    torch.save(more, tmp_path / "more.pt")
    paths = [str(tmp_path / p) for p in ("adapter", "state.safetensors", "more.pt", "logits.pt")]
    run = subprocess.run(
        [sys.executable, "-c", CONTINUE, *paths],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    want = read(wrapper, torch.cat([x, more], 1))[0][:, 45:]
    close(torch.load(tmp_path / "logits.pt"), want)


def test_a_state_of_another_model_or_a_damaged_one_is_refused(tmp_path):
    wrapper = make("sliding, slots")
    _, state = read(wrapper, tokens(1, 20))
    path = tmp_path / "state.safetensors"
    state.save(path)
    others = {
        "another architecture": make("overlap, no memory"),
        "another base of the same shape": zoo.wrap(zoo.base("llama", seed=5), policy="sliding", window=8, slots=2),
        "another window": make("sliding, slots", window=12),
        "other slots": make("sliding, slots", slots=3),
        "another policy": make("sliding, slots", policy="disjoint"),
    }
    for what, other in others.items():
        with pytest.raises(ValueError, match="state"):
            RecurrentCache.load(path, other)
        if what != "another base of the same shape":
            with pytest.raises(ValueError, match=r"state|cache"):
                other(tokens(1, 3), cache=state.clone())
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="damaged"):
        RecurrentCache.load(path, wrapper)
    path.write_bytes(whole[:100])
    with pytest.raises(ValueError, match="damaged"):
        RecurrentCache.load(path, wrapper)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="state"):
        RecurrentCache.load(path, wrapper)
    with pytest.raises(FileNotFoundError):
        RecurrentCache.load(tmp_path / "none", wrapper)


def test_another_texts_slots_can_be_swapped_in():
    """The control that says what memory is worth: row b reads with what row b - 1 left, and with its own window."""
    wrapper = make("disjoint, read above")
    x = tokens(2, 24)
    own = read(wrapper, x)[0]
    wrapper.swap_states = True
    swapped = read(wrapper, x)[0]
    wrapper.swap_states = False
    close(read(wrapper, x)[0], own, 0)
    close(swapped[:, :8], own[:, :8])  # the first window reads the learned start, which is everyone's
    assert (swapped - own)[:, 8:].abs().amax((0, 2)).min() > 1e-6
    # With the same text in every row there is nothing to swap.
    same = x[:1].repeat(3, 1)
    wrapper.swap_states = True
    close(read(wrapper, same)[0], read(make("disjoint, read above"), same)[0])


def test_inputs_that_do_not_fit_are_named():
    from transformers import DynamicCache

    wrapper = make("sliding, slots")
    with pytest.raises((TypeError, ValueError), match="RecurrentCache"):
        wrapper(tokens(2, 3), cache=DynamicCache())
    _, state = read(wrapper, tokens(2, 3))
    with pytest.raises(ValueError, match="2 rows"):
        wrapper(tokens(3, 3), cache=state)
    with pytest.raises(ValueError, match="resets"):
        wrapper(tokens(2, 3), resets=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="attention_mask"):
        wrapper(tokens(2, 3), attention_mask=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 3\)"):
        wrapper(tokens(2, 3), labels=tokens(2, 2))
    with pytest.raises(ValueError, match=r"token id 200 .* 97"):
        wrapper(torch.tensor([[3, 200]]))


@pytest.mark.parametrize("projection", ["base", "own"])
def test_weights_of_8_bits(projection):
    """A base and its recurrence with int8 linear layers say nearly the same."""
    model = zoo.wrap(zoo.base("llama"), window=8, slots=2, projection=projection).eval()
    ids = zoo.tokens(2, 30)
    with torch.no_grad():
        want = model(ids).logits
        got = to_int8(model)(ids).logits
        cache, steps = None, []
        for t in range(30):
            out = model(ids[:, t : t + 1], cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits)
    assert 0 < (got - want).std() < 0.05 * want.std()
    # One row at a time is rounded to 14 bits before a product: far less than the weights are.
    assert (torch.cat(steps, 1) - got).std() < 0.1 * (got - want).std()
