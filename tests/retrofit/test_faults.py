"""Mistakes that other implementations of states and windows shipped, each tried here by name."""

from __future__ import annotations

import pytest
import torch

from . import zoo
from .test_laws import LAYERS, shared
from .zoo import close, read, tokens

KINDS = {
    "sliding": ("llama", {"policy": "sliding", "window": 8, "slots": 2, "selected": 3, "selected_distance": 2}),
    "local layers": ("gemma3", {"policy": "sliding", "window": 8, "slots": 2, "selected": 3, "selected_distance": 2}),
    "disjoint": ("gpt2", {"policy": "disjoint", "window": 6, "slots": 2}),
    "overlap": ("neox", {"policy": "overlap", "window": 6, "slots": 2, **LAYERS[2]}),
}
each = pytest.mark.parametrize("kind", KINDS)


def make(kind):
    name, settings = KINDS[kind]
    return zoo.wrap(shared(name), **settings)


@each
def test_heads_rows_and_slots_are_not_counted_as_tokens(kind):
    wrapper = make(kind)
    for B, T in ((1, 4), (2, 7), (4, 4), (3, 30)):
        _, state = read(wrapper, tokens(B, T))
        assert state.get_seq_length() == T
        assert all(state.get_seq_length(layer) == T for layer in range(4))
        _, state = read(wrapper, tokens(B, 5), cache=state)
        assert state.get_seq_length() == T + 5


@each
def test_a_mask_as_long_as_all_that_was_read_fits_a_state_that_forgets(kind):
    """As `generate` gives it: the mask of the whole text, though the state holds a window of it."""
    wrapper = make(kind)
    x = tokens(2, 40)
    mask = torch.ones_like(x)
    mask[1, :13] = 0
    whole = read(wrapper, x, attention_mask=mask)[0]
    cache, logits = None, []
    for i in range(0, 40, 7):
        with torch.no_grad():
            out = wrapper(x[:, i : i + 7], attention_mask=mask[:, : i + 7], cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
    got = torch.cat(logits, 1)
    close(got[0], whole[0])
    close(got[1, 13:], whole[1, 13:])


@each
def test_a_row_of_padding_alone_gives_no_nan_and_leaves_its_state(kind):
    wrapper = make(kind)
    x, more = tokens(3, 20), tokens(3, 15, 2)
    _, state = read(wrapper, x)
    want = read(wrapper, more, cache=state.clone())[0]
    mask = torch.ones(3, 25, dtype=torch.long)
    mask[1] = 0
    logits, state = read(wrapper, tokens(3, 25, 3), [4], attention_mask=mask, cache=state)
    assert logits.isfinite().all()
    got = read(wrapper, more, cache=state)[0]
    close(got[1], want[1])
    assert (got - want)[[0, 2]].abs().amax((1, 2)).min() > 1e-6
    # From the very start, too; and a whole batch of it.
    logits, state = read(wrapper, tokens(2, 9), attention_mask=torch.zeros(2, 9, dtype=torch.long))
    assert logits.isfinite().all()
    close(read(wrapper, more[:2], cache=state)[0], read(wrapper, more[:2])[0])


@each
def test_padding_neither_pollutes_nor_fades_what_is_remembered(kind):
    """Padding of any length between two pieces of a text, when slots have been updated and keys been weighed."""
    wrapper = make(kind)
    x = tokens(1, 40)
    want = wrapper(x).logits[0].detach()
    for n in (1, 8, 100):
        gap = torch.full((1, n), 2)
        padded = torch.cat([x[:, :27], gap, x[:, 27:]], 1)
        mask = torch.ones_like(padded)
        mask[:, 27 : 27 + n] = 0
        got = read(wrapper, padded, [30], attention_mask=mask)[0][0]
        close(torch.cat([got[:27], got[27 + n :]]), want)


@each
def test_a_call_with_a_state_reads_all_of_its_tokens(kind):
    wrapper = make(kind)
    x = tokens(2, 30)
    whole = read(wrapper, x)[0]
    for first, n in ((3, 5), (8, 2), (7, 20)):
        _, state = read(wrapper, x[:, :first])
        logits, state = read(wrapper, x[:, first : first + n], cache=state)
        assert logits.shape[1] == n
        close(logits, whole[:, first : first + n])
        close(read(wrapper, x[:, first + n :], cache=state)[0], whole[:, first + n :])


@each
def test_nothing_is_kept_on_the_model_between_calls(kind):
    """A second text starts afresh; a call that fails half-way leaves nothing behind; nor does training."""
    wrapper = make(kind)
    x, y = tokens(2, 25), tokens(3, 14, 5)
    want, other = wrapper(x).logits.detach(), wrapper(y).logits.detach()
    for _ in range(2):
        close(wrapper(x).logits, want, 0)
        close(wrapper(y).logits, other, 0)
    hook = wrapper.base.get_output_embeddings().register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        wrapper(x)
    hook.remove()
    close(wrapper(x).logits, want, 0)
    layer = wrapper.base.get_output_embeddings()
    assert not layer._forward_hooks
    wrapper.train()
    wrapper(x, labels=x).loss.backward()
    wrapper.zero_grad()
    wrapper.eval()
    close(wrapper(x).logits, want, 0)
    assert not any(p.grad_fn for p in wrapper.buffers())


def _fail(*args):
    raise RuntimeError("on purpose")


@each
def test_a_failure_in_the_middle_leaves_the_base_and_a_given_state_as_they_were(kind):
    name, settings = KINDS[kind]
    base = zoo.base(name, torch.float64)
    ids, x = tokens(2, 20), tokens(2, 30)
    plain = base(ids).logits.detach()
    wrapper = zoo.wrap(base, **settings)
    _, state = read(wrapper, x[:, :11])
    want = read(wrapper, x[:, 11:], cache=state.clone())[0]
    calls = []

    def fail_later(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("on purpose")

    blocks = next(m for m in base.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)
    hook = blocks[2].register_forward_hook(fail_later)
    calls.extend([1, 1])  # the first call of that layer
    kept = state.clone()
    with pytest.raises(RuntimeError, match="on purpose"):
        wrapper(x[:, 11:], cache=state)
    hook.remove()
    assert torch.equal(base(ids).logits, plain)
    close(read(wrapper, x[:, 11:], cache=kept)[0], want, 0)


@each
def test_the_state_is_not_tied_to_tensors_of_the_input(kind):
    """Writing into the tokens after the call changes nothing."""
    wrapper = make(kind)
    x = tokens(2, 25)
    want = read(wrapper, x)[0][:, 13:]
    piece = x[:, :13].clone()
    _, state = read(wrapper, piece)
    piece.fill_(5)
    close(read(wrapper, x[:, 13:], cache=state)[0], want)


@each
def test_strides_that_do_not_divide_the_text(kind):
    """Texts of every length around the boundaries: no tail unprocessed, none processed twice."""
    wrapper = make(kind)
    x = tokens(1, 40)
    whole = read(wrapper, x)[0]
    for T in range(1, 40):
        close(read(wrapper, x[:, :T])[0], whole[:, :T])


@each
def test_one_token_after_another_from_every_place(kind):
    wrapper = make(kind)
    x = tokens(1, 26)
    whole = read(wrapper, x)[0]
    for T in range(1, 26):
        _, state = read(wrapper, x[:, :T], [T // 2])
        close(read(wrapper, x[:, T : T + 1], cache=state)[0], whole[:, T : T + 1])


def test_an_empty_piece_is_no_piece():
    wrapper = make("sliding")
    x = tokens(2, 20)
    _, state = read(wrapper, x[:, :11])
    want = read(wrapper, x[:, 11:], cache=state.clone())[0]
    try:
        out = wrapper(x[:, :0], cache=state, use_cache=True)
    except ValueError:
        return
    assert out.logits.shape[:2] == (2, 0)
    close(read(wrapper, x[:, 11:], cache=out.cache)[0], want)


def test_inference_mode_and_training_may_follow_one_another():
    wrapper = make("sliding")
    x = tokens(2, 20)
    with torch.inference_mode():
        want = wrapper(x).logits.clone()
    wrapper.train()
    wrapper(x, labels=x).loss.backward()
    wrapper.eval()
    close(wrapper(x).logits.detach(), want, 0)
