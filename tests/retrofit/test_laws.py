"""Law 1 for retrofits: cut the text anywhere, pad it anywhere, and the numbers stay the same."""

from __future__ import annotations

import functools

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import zoo
from .zoo import close, read, tokens

few = hypothesis.settings(max_examples=8)


@functools.cache
def shared(name):
    """A base that many retrofits share: none of them changes it. Double, that rounding decides no selection."""
    return zoo.base(name, torch.float64)


LAYERS = [
    {},  # the library's choice: read below what is written
    {"read_layers": [0, 1], "write_layers": [2, 3]},
    {"read_layers": [3], "write_layers": [0]},  # the paper's way: read above
    {"read_layers": [1, 3], "write_layers": [0, 2, 3]},
]


@st.composite
def settings(draw, name, slots=None, selected=None):
    """Any settings that a base of this name can have."""
    policy = draw(
        st.sampled_from(["disjoint", "overlap", "sliding"] if name in zoo.ROTARY else ["disjoint", "overlap"])
    )
    window = 2 * draw(st.integers(1, 4)) if policy == "overlap" else draw(st.integers(1, 9))
    chosen = {"policy": policy, "window": window, "slots": draw(st.integers(0, 2)) if slots is None else slots}
    stride = {"disjoint": window, "overlap": window // 2}.get(policy)
    if policy == "sliding":
        stride = chosen["stride"] = draw(st.integers(1, window))
        chosen["sinks"] = draw(st.integers(0, 3))
        chosen["selected"] = draw(st.integers(0, 3)) if selected is None else selected
        chosen["selected_distance"] = draw(st.none() | st.integers(0, window - stride))
        chosen["selected_by"] = draw(st.sampled_from(["attention", "attention", "learned", "chance"]))
        chosen["selected_rank"] = draw(st.sampled_from([0, 0, 2]))
    if chosen["slots"]:
        reads = ["queries"] if chosen["slots"] > stride else ["queries", "mean", "last"]
        chosen |= {"read": draw(st.sampled_from(reads)), **draw(st.sampled_from(LAYERS))}
        chosen["update"] = draw(st.sampled_from(["feedforward", "tanh", "gru", "sru", "held"]))
        chosen["projection"] = draw(st.sampled_from(["base", "own"]))
        if chosen["projection"] == "own":
            chosen["slot_size"] = 12
        chosen["bptt"] = draw(st.integers(1, 4))
    return chosen


def flags(B, T):
    return st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=B, max_size=B).map(torch.tensor)


def rare(B, T):
    """Few true ones."""
    return st.lists(st.tuples(st.integers(0, B - 1), st.integers(0, T - 1)), max_size=4).map(
        lambda places: torch.tensor([[(b, t) in places for t in range(T)] for b in range(B)])
    )


@pytest.mark.parametrize("name", zoo.FEW)
@few
@given(data=st.data())
def test_cut_anywhere_same_logits(name, data):
    wrapper = zoo.wrap(shared(name), **data.draw(settings(name)))
    T = data.draw(st.integers(1, 26))
    x = tokens(2, T, data.draw(st.integers(0, 99)))
    resets = data.draw(st.none() | rare(2, T))
    cuts = data.draw(st.lists(st.integers(0, T), max_size=5))
    whole, state = read(wrapper, x, [], resets=resets)
    pieces, other = read(wrapper, x, cuts, resets=resets)
    close(pieces, whole)
    close(read(wrapper, x, range(T), resets=resets)[0], whole)
    more = tokens(2, 7, 5)
    close(read(wrapper, more, [3], cache=other)[0], read(wrapper, more, [], cache=state)[0])


@pytest.mark.parametrize("name", zoo.FEW)
@few
@given(data=st.data())
def test_padding_takes_no_place(name, data):
    """A row padded anywhere, in any pieces, has the logits and the state of the row read alone without padding."""
    wrapper = zoo.wrap(shared(name), **data.draw(settings(name)))
    T = data.draw(st.integers(1, 22))
    real = data.draw(flags(3, T))
    x, starts = tokens(3, T, data.draw(st.integers(0, 99))), data.draw(rare(3, T))
    cuts = data.draw(st.lists(st.integers(0, T), max_size=4))
    logits, state = read(wrapper, x, cuts, attention_mask=real.long(), resets=starts)
    assert logits.isfinite().all()
    for b in range(3):
        if not real[b].any():
            continue
        alone, alone_state = read(wrapper, x[b : b + 1, real[b]], [], resets=starts[b : b + 1, real[b]])
        close(logits[b, real[b]], alone[0])
        row = state.clone()
        row.batch_select_indices(torch.tensor([b]))
        close(read(wrapper, more := tokens(1, 5, 7), [2], cache=row)[0], read(wrapper, more, [], cache=alone_state)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", zoo.ALL)
@torch.no_grad()
def test_rows_of_different_lengths_padded_left_or_right(name, side):
    wrapper = zoo.wrap(shared(name), window=6, slots=2, **zoo.selected(name))
    x, lengths, T = tokens(4, 23), (23, 5, 16, 1), 23
    real = torch.stack([torch.arange(T) < n for n in lengths])
    if side == "left":
        real = real.flip(1)
    logits = wrapper(x, attention_mask=real.long()).logits
    for b in range(4):
        close(logits[b, real[b]], wrapper(x[b : b + 1, real[b]]).logits[0])


@torch.no_grad()
def test_padding_of_a_single_row_counts_too():
    """Some implementations skip the mask at batch size 1."""
    wrapper = zoo.wrap(shared("llama"), window=6, slots=2)
    x = tokens(1, 20)
    mask = torch.ones_like(x)
    mask[:, :7] = 0
    for kind in (torch.long, torch.bool, torch.float32):
        close(wrapper(x, attention_mask=mask.to(kind)).logits[:, 7:], wrapper(x[:, 7:]).logits)


@given(data=st.data())
@few
def test_what_stands_in_padding_does_not_matter(data):
    name = data.draw(st.sampled_from(zoo.FEW))
    wrapper = zoo.wrap(shared(name), **data.draw(settings(name)))
    T = data.draw(st.integers(1, 16))
    real = data.draw(flags(3, T))
    x = tokens(3, T, 1)
    y = torch.where(real, x, tokens(3, T, 2))
    a, b = (read(wrapper, z, [T // 2], attention_mask=real.long())[0] for z in (x, y))
    close(a[real], b[real], 1e-6)


@pytest.mark.parametrize("name", zoo.ALL)
@torch.no_grad()
def test_a_document_does_not_see_the_one_before(name):
    """Resets inside a window, at other places in each row."""
    wrapper = zoo.wrap(shared(name), window=6, slots=2, **zoo.selected(name))
    x = tokens(2, 30)
    resets = torch.zeros(2, 30, dtype=torch.bool)
    starts = ([0, 8, 9, 25], [0, 3, 17, 30])
    for b in range(2):
        resets[b, [s for s in starts[b] if 0 < s < 30]] = True
    packed, _ = read(wrapper, x, [5, 11], resets=resets)
    for b in range(2):
        for i, j in zip(starts[b], [*starts[b][1:], 30], strict=True):
            if i < j:
                close(packed[b, i:j], wrapper(x[b : b + 1, i:j]).logits[0])


@torch.no_grad()
def test_a_reset_at_a_cut_and_in_the_middle_of_nothing():
    wrapper = zoo.wrap(shared("llama"), window=6, slots=2, selected=2, selected_distance=2)
    x = tokens(1, 20)
    want = wrapper(x[:, 8:]).logits
    resets = torch.zeros(1, 20, dtype=torch.bool)
    resets[0, 8] = True
    close(read(wrapper, x, [8], resets=resets)[0][:, 8:], want)
    _, state = read(wrapper, x[:, :8])
    close(read(wrapper, x[:, 8:], [1], resets=resets[:, 8:], cache=state)[0], want)
    # A reset of the first position of a text changes nothing.
    resets = torch.zeros(1, 20, dtype=torch.bool)
    resets[0, 0] = True
    close(wrapper(x, resets=resets).logits, wrapper(x).logits)
    # A document start that is padding is none: padding cannot start a document.
    mask = torch.ones_like(x)
    mask[0, 5] = 0
    resets = torch.zeros(1, 20, dtype=torch.bool)
    resets[0, 5] = True
    close(wrapper(x, attention_mask=mask, resets=resets).logits, wrapper(x, attention_mask=mask).logits)


@torch.no_grad()
def test_rows_do_not_mix():
    wrapper = zoo.wrap(shared("llama"), window=6, slots=2, selected=2, selected_distance=2)
    x = tokens(4, 29)
    whole = read(wrapper, x, [5, 9])[0]
    for b in range(4):
        close(read(wrapper, x[b : b + 1], [3])[0][0], whole[b])
    y = x.clone()
    y[1] = tokens(1, 29, 5)[0]
    close(read(wrapper, y, [5, 9])[0][[0, 2, 3]], whole[[0, 2, 3]], 1e-9)


@torch.no_grad()
def test_logits_do_not_see_the_future():
    for name in zoo.FEW:
        wrapper = zoo.wrap(shared(name), window=6, slots=2, **zoo.selected(name))
        x = tokens(1, 30)
        whole = wrapper(x).logits
        for t in (1, 5, 6, 7, 12, 20):
            y = x.clone()
            y[:, t:] = tokens(1, 30 - t, 9)
            close(wrapper(y).logits[:, :t], whole[:, :t], 1e-9)


@torch.no_grad()
def test_what_left_the_window_counts_by_the_slots_alone():
    """The first stride reaches the last one by slots, and not at all where they are held."""
    for name, layers in zip(zoo.FEW, LAYERS + LAYERS[:1], strict=True):
        for update in ("feedforward", "tanh", "gru", "sru", "held"):
            wrapper = zoo.wrap(shared(name), policy="disjoint", window=6, slots=2, update=update, **layers)
            x = tokens(1, 24)
            y = x.clone()
            y[:, :6] = tokens(1, 6, 9)
            moved = (wrapper(x).logits - wrapper(y).logits)[:, 6:].abs().amax((0, 2))
            if update == "held":
                assert moved.max() == 0
            else:
                assert moved.min() > 1e-9, (name, update, layers)


@pytest.mark.parametrize("settings", [{"policy": "disjoint", "window": 40}, {"policy": "sliding", "window": 28}])
def test_numbers_that_cross_into_another_branch_of_the_rotary(settings):
    """Phi-3's long rotary turns all rows otherwise once one number passes 32: refused, or law 1 holds all the same."""
    wrapper, reason = zoo.attempt(shared("phi3 long"), slots=0, **settings)
    if wrapper is None:
        assert "32" in reason
        return
    x = tokens(2, 90)
    mask = torch.ones_like(x)
    mask[1, :60] = 0
    whole = read(wrapper, x, [], attention_mask=mask)[0]
    close(read(wrapper, x, range(0, 90, 7), attention_mask=mask)[0][0], whole[0])
    close(read(wrapper, x[1:, 60:])[0][0], whole[1, 60:])


@torch.no_grad()
def test_bfloat16_weights_give_the_same_logits_however_cut():
    """Roughly, that is; but nothing that adds up over the text may be rounded at cuts."""
    wrapper = zoo.wrap(zoo.base("llama", torch.bfloat16), window=8, slots=2)
    x = tokens(2, 60)
    whole = read(wrapper, x)[0].float()
    assert whole.isfinite().all()
    assert (read(wrapper, x, range(60))[0].float() - whole).abs().mean() < 0.05


@torch.no_grad()
def test_autocast_runs_and_is_close():
    for name in zoo.FEW:
        for extra in ({}, {"selected": 2}) if name in zoo.ROTARY else ({},):
            wrapper = zoo.wrap(zoo.base(name), window=8, slots=2, **extra)
            x = tokens(2, 20)
            want = wrapper(x).logits
            with torch.autocast("cpu", torch.bfloat16):
                out = wrapper(x[:, :11], use_cache=True)
                low = torch.cat([out.logits, wrapper(x[:, 11:], cache=out.cache).logits], 1).float()
            assert (low - want).abs().mean() < 0.1, name
