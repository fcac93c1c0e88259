"""Generation: windows roll by themselves, for ever, in constant memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from . import zoo
from .test_laws import settings as any_settings
from .test_laws import shared
from .zoo import read, tokens

QUIET = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
KINDS = {
    "sliding, both": ("llama", {"policy": "sliding", "window": 8, "slots": 2, "selected": 3, "selected_distance": 2}),
    "sliding, local layers": ("gemma3", {"policy": "sliding", "window": 8, "slots": 2}),
    "disjoint": ("gpt2", {"policy": "disjoint", "window": 6, "slots": 2}),
    "overlap": ("gpt2", {"policy": "overlap", "window": 6, "slots": 2, "read_layers": [3], "write_layers": [0]}),
}
each = pytest.mark.parametrize("kind", KINDS)


def make(kind):
    name, settings = KINDS[kind]
    return zoo.wrap(shared(name), **settings)


@torch.no_grad()
def greedy(model, prompt, n):
    """What greedy decoding is: the whole text read anew for every token."""
    x = prompt
    for _ in range(n):
        x = torch.cat([x, model(x).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return x


@pytest.mark.parametrize("name", zoo.FEW)
@hypothesis_settings(max_examples=3)
@given(data=st.data())
def test_generate_is_reading_anew_for_every_token(name, data):
    model = zoo.wrap(shared(name), **data.draw(any_settings(name)))
    prompt = tokens(2, data.draw(st.integers(1, 14)), data.draw(st.integers(0, 99)))
    n, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    want = greedy(model, prompt, n + m)
    assert torch.equal(model.generate(prompt, max_new_tokens=n + m, **QUIET), want)
    out = model.generate(prompt, max_new_tokens=n, return_dict_in_generate=True, **QUIET)
    real = torch.ones_like(out.sequences)  # else transformers may take a token for padding
    whole = model.generate(out.sequences, attention_mask=real, cache=out.cache.clone(), max_new_tokens=m, **QUIET)
    assert torch.equal(whole, want)
    last, real = out.sequences[:, -1:], real[:, -1:]
    last = model.generate(last, attention_mask=real, cache=out.cache, max_new_tokens=m, **QUIET)
    assert torch.equal(last[:, 1:], want[:, -m:])


@each
def test_without_a_state_it_is_the_same(kind):
    model = make(kind)
    prompt = tokens(2, 9)
    assert torch.equal(model.generate(prompt, max_new_tokens=9, use_cache=False, **QUIET), greedy(model, prompt, 9))


@each
def test_go_on_from_a_text_read_before(kind):
    model = make(kind)
    x = tokens(1, 30)
    _, state = read(model, x[:, :29], [7])
    want = greedy(model, x, 8)[:, 30:]
    assert torch.equal(model.generate(x[:, 29:], cache=state.clone(), max_new_tokens=8, **QUIET)[:, 1:], want)
    assert torch.equal(model.generate(x, cache=state, max_new_tokens=8, **QUIET)[:, 30:], want)
    _, state = read(model, x[:, :4])
    assert torch.equal(model.generate(x[:, 4:], cache=state, max_new_tokens=8, **QUIET)[:, 26:], want)


@each
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padding_does_not_matter(kind, beams):
    model = make(kind)
    rows = [tokens(1, n, n) for n in (20, 3, 11)]
    padded, mask = torch.full((3, 20), 2), torch.zeros(3, 20, dtype=torch.long)
    for b, row in enumerate(rows):
        padded[b, 20 - row.shape[1] :] = row
        mask[b, 20 - row.shape[1] :] = 1
    out = model.generate(padded, attention_mask=mask, max_new_tokens=10, num_beams=beams, **QUIET)
    for b, row in enumerate(rows):
        alone = model.generate(row, max_new_tokens=10, num_beams=beams, **QUIET)
        assert torch.equal(out[b, -10:], alone[0, -10:])


@pytest.mark.parametrize("kind", ["sliding, both", "overlap"])
def test_beams_find_the_best_of_all_continuations(kind):
    """With as many beams as there are continuations the search is exhaustive, across a boundary of strides."""
    name, settings = KINDS[kind]
    model = zoo.wrap(zoo.base(name, torch.float64, vocab_size=7), **(settings | {"window": 4}))
    prompt = torch.tensor([[3, 5, 4, 6, 3]])
    out = model.generate(prompt, max_new_tokens=3, num_beams=49, **QUIET)
    scores = {}
    with torch.no_grad():
        texts = torch.tensor([[*prompt[0].tolist(), i, j] for i, j in itertools.product(range(7), repeat=2)])
        logs = model(texts).logits.log_softmax(-1)
    for (i, j), log in zip(itertools.product(range(7), repeat=2), logs, strict=True):
        for k in range(7):
            scores[i, j, k] = (log[4, i] + log[5, j] + log[6, k]).item()
    assert tuple(out[0, 5:].tolist()) == max(scores, key=scores.get)


@each
def test_two_thousand_tokens_in_constant_memory(kind):
    """Far beyond the base's limit of 64 positions; and what is written there is what reading it all gives."""
    long = kind == "disjoint"
    model = zoo.wrap(zoo.base(KINDS[kind][0], **({"num_hidden_layers": 2} if long else {})), **KINDS[kind][1])
    torch.manual_seed(0)
    n = 2000 if long else 100
    sizes = []
    forward = type(model).forward

    def watched(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        sizes.append(out.cache.nbytes())
        return out

    type(model).forward = watched
    try:
        x = model.generate(tokens(1, 30), max_new_tokens=n, do_sample=True, top_k=20, eos_token_id=None, pad_token_id=2)
    finally:
        type(model).forward = forward
    assert x.shape == (1, 30 + n)
    period = 24
    assert max(sizes[-period:]) == max(sizes[period : 2 * period])
    _, state = read(model, x[:, :-20], [100])
    whole = read(model, x)[0]
    zoo.close(read(model, x[:, -20:], range(20), cache=state)[0], whole[:, -20:], 1e-4)


@each
def test_sampling_is_reproducible(kind):
    model = make(kind)
    prompt = tokens(2, 9)
    runs = []
    for use_cache in (True, True, False):
        torch.manual_seed(4)
        more = {"do_sample": True, "top_p": 0.9, "eos_token_id": None, "pad_token_id": 2}
        runs.append(model.generate(prompt, max_new_tokens=12, use_cache=use_cache, **more))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_several_sequences_of_one_prompt():
    model = make("sliding, both")
    torch.manual_seed(1)
    out = model.generate(tokens(1, 9), do_sample=True, num_return_sequences=3, max_new_tokens=12, eos_token_id=None)
    assert out.shape == (3, 21)


def test_rows_that_end_early_are_filled_up():
    model = make("sliding, both")
    prompt = tokens(3, 9)
    want = greedy(model, prompt, 12)
    stop = int(want[1, 12])
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=stop, pad_token_id=2)
    for b in range(3):
        row = want[b, 9:].tolist()
        n = row.index(stop) + 1 if stop in row else len(row)
        assert out[b, 9 : 9 + n].tolist() == row[:n]
        assert (out[b, 9 + n :] == 2).all()


def test_documents_in_the_prompt():
    model = make("sliding, both")
    x = tokens(1, 21)
    resets = torch.zeros(1, 21, dtype=torch.bool)
    resets[0, 8] = True
    out = model.generate(x, resets=resets, max_new_tokens=9, **QUIET)
    assert torch.equal(out[:, 21:], greedy(model, x[:, 8:], 9)[:, 13:])


def test_the_bases_own_generation_settings_count():
    base = zoo.base("llama")
    base.generation_config.eos_token_id = 7
    base.generation_config.max_length = 40
    wrapper = zoo.wrap(base, window=8, slots=0)
    assert wrapper.generation_config.eos_token_id == 7
    wrapper.generation_config.eos_token_id = 5
    assert base.generation_config.eos_token_id == 7
