"""The SRU++ language model: law 1, padding, documents, generation, saving."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from undertow.models import SRUppCache, SRUppConfig, SRUppForCausalLM

V = 50


def make(seed=0, dtype=torch.float64, **overrides):
    """A small model with attention that counts: alpha away from the zero it starts at."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": V,
        "hidden_size": 24,
        "projection_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "attention_window": 5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    model = SRUppForCausalLM(SRUppConfig(**(options | overrides))).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("alpha"):
            parameter.data.fill_(1.5)
    return model


MODELS = {
    "attention everywhere": {},
    "every second layer": {"attention_every": 2},
    "last layer": {"attention_last": 1},
    "no attention": {"attention_last": 0},
    "window 0": {"attention_window": 0},
    "window 1": {"attention_window": 1},
    "long window": {"attention_window": 100},
    "norm before": {"layer_norm": "before"},
    "norm after, tanh": {"layer_norm": "after", "activation": "tanh"},
    "narrow embeddings": {"embedding_size": 10},
    "tied": {"tie_word_embeddings": True},
}


def tokens(B, T, seed=1):
    return torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(seed))


def read(model, input_ids, cuts, *, attention_mask=None, resets=None, cache=None):
    """Logits of a text read in the pieces between `cuts`, and the state after it."""
    edges = [0, *sorted(cuts), input_ids.shape[1]]
    logits = []
    for start, stop in itertools.pairwise(edges):
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
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


def states_equal(a, b):
    for one, other in zip(a.layers, b.layers, strict=True):
        torch.testing.assert_close(one.recurrent_states[0], other.recurrent_states[0])
    if a.past or b.past:
        assert a.past == b.past
        ones = torch.ones(a.batch_size, a.past, dtype=torch.bool)
        valid = ones if a.valid is None else a.valid
        assert torch.equal(valid, ones if b.valid is None else b.valid)
        for one, other in zip(a.layers, b.layers, strict=True):
            if getattr(one, "keys", None) is not None:
                seen = valid[:, None, :, None]
                torch.testing.assert_close(one.keys * seen, other.keys * seen)
                torch.testing.assert_close(one.values * seen, other.values * seen)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
@given(data=st.data())
def test_cut_anywhere_same_logits(options, data):
    model = make(**options)
    T = data.draw(st.integers(1, 24))
    cuts = data.draw(st.lists(st.integers(0, T), max_size=6))
    resets = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=2, max_size=2)))
    resets = resets if data.draw(st.booleans()) else None
    x = tokens(2, T, data.draw(st.integers(0, 99)))
    whole, state = read(model, x, [], resets=resets)
    pieces, other = read(model, x, cuts, resets=resets)
    torch.testing.assert_close(pieces, whole)
    states_equal(state, other)
    by_token, _ = read(model, x, range(T), resets=resets)
    torch.testing.assert_close(by_token, whole)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
@given(data=st.data())
def test_padding_takes_no_place(options, data):
    """A row read with padding anywhere in it, in any pieces, has the logits and the state of the row without it."""
    model = make(**options)
    T = data.draw(st.integers(1, 20))
    real = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=2, max_size=2)))
    padded = tokens(2, T, data.draw(st.integers(0, 99)))
    cuts = data.draw(st.lists(st.integers(0, T), max_size=4))
    starts = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=2, max_size=2)))
    logits, state = read(model, padded, cuts, attention_mask=real.long(), resets=starts)
    for b in range(2):
        if not real[b].any():
            continue
        alone, alone_state = read(model, padded[b : b + 1, real[b]], [], resets=starts[b : b + 1, real[b]])
        torch.testing.assert_close(logits[b, real[b]], alone[0])
        # What follows is the same too.
        more = tokens(1, 4, 7)
        row = state.clone()
        row.batch_select_indices(torch.tensor([b]))
        torch.testing.assert_close(read(model, more, [2], cache=row)[0], read(model, more, [2], cache=alone_state)[0])


@given(data=st.data())
def test_what_stands_in_padding_does_not_matter(data):
    model = make()
    T = data.draw(st.integers(1, 16))
    real = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=3, max_size=3)))
    x = tokens(3, T, 1)
    y = torch.where(real, x, tokens(3, T, 2))
    a, b = (read(model, z, [T // 2], attention_mask=real.long())[0] for z in (x, y))
    assert torch.equal(a[real], b[real])
    embeddings = model.model.embed_tokens(x)
    nan = embeddings.masked_fill(~real[..., None], float("nan"))
    c = model(inputs_embeds=nan, attention_mask=real.long()).logits
    d = model(inputs_embeds=embeddings, attention_mask=real.long()).logits
    assert torch.equal(c[real], d[real])


def test_rows_do_not_mix():
    model = make()
    x = tokens(4, 17)
    whole = read(model, x, [5, 9])[0]
    for b in range(4):
        torch.testing.assert_close(read(model, x[b : b + 1], [3])[0][0], whole[b])
    y = x.clone()
    y[1] = tokens(1, 17, 5)[0]
    other = read(model, y, [5, 9])[0]
    assert torch.equal(other[[0, 2, 3]], whole[[0, 2, 3]])


def test_a_document_does_not_see_the_one_before():
    model = make()
    x = tokens(2, 14)
    resets = torch.zeros(2, 14, dtype=torch.bool)
    resets[0, 6] = resets[1, 9] = True
    packed, _ = read(model, x, [3, 7], resets=resets)
    torch.testing.assert_close(packed[0, 6:], model(x[:1, 6:]).logits[0])
    torch.testing.assert_close(packed[1, 9:], model(x[1:, 9:]).logits[0])


def test_bfloat16_state_is_kept_in_float32():
    model = make(dtype=torch.bfloat16)
    _, state = read(model, tokens(2, 9), [4])
    assert all(layer.recurrent_states[0].dtype == torch.float32 for layer in state.layers)


def test_autocast_runs_and_is_close():
    model = make(dtype=torch.float32)
    x = tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x).logits.float()
    assert (low - model(x).logits).abs().max() < 0.1


def test_gradients_flow_through_a_state_that_is_not_detached_and_stop_at_one_that_is():
    model = make()
    x = tokens(2, 12)
    whole = make()
    loss = whole(x, labels=x, use_cache=False).loss
    loss.backward()
    out = model(x[:, :5], use_cache=True)
    second = model(x[:, 5:], cache=out.cache, use_cache=True)
    logits = torch.cat([out.logits, second.logits], 1)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    embeds = model.model.embed_tokens(x).detach().requires_grad_()
    state = model(inputs_embeds=embeds[:, :5], use_cache=True).cache
    model(inputs_embeds=embeds[:, 5:], cache=state.detach_(), use_cache=True).logits.sum().backward()
    assert embeds.grad[:, :5].abs().max() == 0
    assert embeds.grad[:, 5:].abs().min() > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    models = make(hidden_dropout=0.3, embedding_dropout=0.1), make(hidden_dropout=0.3, embedding_dropout=0.1)
    models[1].activation_checkpointing_enable({"use_reentrant": reentrant})
    x = tokens(2, 15)
    results = []
    for model in models:
        model.train()
        torch.manual_seed(3)
        first = model(x[:, :7], labels=x[:, :7], use_cache=True)
        state = first.cache.detach_() if reentrant else first.cache
        second = model(x[:, 7:], labels=x[:, 7:], cache=state, use_cache=True)
        (first.loss + second.loss).backward()
        results.append((second.cache, [p.grad for p in model.parameters()]))
    states_equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b)


def test_shift_labels_score_every_target_once_across_pieces():
    model = make()
    x = tokens(2, 13)
    want = torch.nn.functional.cross_entropy(model(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
    total, cache = 0.0, None
    for start in (0, 4, 8):
        piece = x[:, start : start + 4]
        out = model(piece, shift_labels=x[:, start + 1 : start + 5], cache=cache, use_cache=True, num_items_in_batch=1)
        total, cache = total + out.loss, out.cache
    torch.testing.assert_close(total, want.float())


# -- generation ----------------------------------------------------------------------------------------------------


def greedy(model, prompt, n):
    """What greedy decoding is: the whole text read anew for every token."""
    x = prompt
    for _ in range(n):
        x = torch.cat([x, model(x).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return x


@pytest.fixture
def quiet():
    return {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}


@given(data=st.data())
def test_generate_is_reading_anew_for_every_token(data):
    model = make(seed=data.draw(st.integers(0, 5)), pad_token_id=None)  # else transformers takes it for padding
    quiet = {"do_sample": False, "eos_token_id": None}
    prompt = tokens(2, data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)))
    n, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    want = greedy(model, prompt, n + m)
    assert torch.equal(model.generate(prompt, max_new_tokens=n + m, **quiet), want)
    # Law 1 across generate: go on from the state, given the whole text or only what it has not read.
    out = model.generate(prompt, max_new_tokens=n, return_dict_in_generate=True, **quiet)
    whole = model.generate(out.sequences, cache=out.cache.clone(), max_new_tokens=m, **quiet)
    assert torch.equal(whole, want)
    last = model.generate(out.sequences[:, -1:], cache=out.cache, max_new_tokens=m, **quiet)
    assert torch.equal(last[:, 1:], want[:, -m:])


def test_generate_from_a_text_read_before(quiet):
    model = make()
    x = tokens(1, 20)
    _, state = read(model, x[:, :19], [7])
    want = greedy(model, x, 6)[:, 20:]
    assert torch.equal(model.generate(x[:, 19:], cache=state.clone(), max_new_tokens=6, **quiet)[:, 1:], want)
    assert torch.equal(model.generate(x, cache=state, max_new_tokens=6, **quiet)[:, 20:], want)


def test_more_may_follow_a_state_than_it_has_read(quiet):
    model = make()
    x = tokens(2, 20)
    _, state = read(model, x[:, :3], [])
    out = model.generate(x[:, 3:], cache=state, max_new_tokens=6, **quiet)
    assert torch.equal(out[:, 17:], greedy(model, x, 6)[:, 20:])


def test_left_padding_does_not_matter(quiet):
    model = make()
    a, b = tokens(1, 8, 1), tokens(1, 3, 2)
    padded = torch.full((2, 8), 2)
    padded[0], padded[1, 5:] = a[0], b[0]
    mask = torch.ones_like(padded)
    mask[1, :5] = 0
    for beams in (1, 3):
        both = model.generate(padded, attention_mask=mask, max_new_tokens=7, num_beams=beams, **quiet)
        for row, prompt in ((0, a), (1, b)):
            alone = model.generate(prompt, max_new_tokens=7, num_beams=beams, **quiet)
            assert torch.equal(both[row, -7:], alone[0, -7:])


def test_beams_find_the_best_of_all_continuations(quiet):
    """With as many beams as there are continuations the search is exhaustive."""
    model = make(vocab_size=6, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    prompt = torch.tensor([[3, 5, 4]])
    out = model.generate(prompt, max_new_tokens=2, num_beams=6, **quiet)
    scores = {}
    first = model(prompt).logits[0, -1].log_softmax(-1)
    for i in range(6):
        second = model(torch.cat([prompt, torch.tensor([[i]])], 1)).logits[0, -1].log_softmax(-1)
        for j in range(6):
            scores[i, j] = (first[i] + second[j]).item()
    assert tuple(out[0, 3:].tolist()) == max(scores, key=scores.get)


def test_sampling_is_reproducible_and_works_without_a_state():
    model = make()
    prompt = tokens(2, 5)
    runs = []
    for use_cache in (True, True, False):
        torch.manual_seed(4)
        runs.append(
            model.generate(prompt, do_sample=True, top_p=0.9, max_new_tokens=8, use_cache=use_cache, eos_token_id=None)
        )
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_the_state_does_not_grow(quiet):
    model = make()
    sizes = {}
    for n in (10, 100):
        out = model.generate(tokens(2, 6), max_new_tokens=n, return_dict_in_generate=True, **quiet)
        sizes[n] = out.cache.nbytes()
    assert sizes[10] == sizes[100]
    held = out.cache.layers[0].keys.untyped_storage().nbytes()
    assert held <= 2 * 8 * out.cache.layers[0].keys.numel()


def test_documents_in_the_prompt(quiet):
    model = make()
    x = tokens(1, 9)
    resets = torch.zeros(1, 9, dtype=torch.bool)
    resets[0, 4] = True
    out = model.generate(x, resets=resets, max_new_tokens=5, **quiet)
    assert torch.equal(out[:, 9:], greedy(model, x[:, 4:], 5)[:, 5:])


# -- the state -----------------------------------------------------------------------------------------------------


def test_reset_rows_starts_them_afresh():
    model = make()
    x = tokens(3, 9)
    _, state = read(model, x, [])
    state.reset_rows(torch.tensor([False, True, False]))
    more = tokens(3, 6, 4)
    got, _ = read(model, more, [2], cache=state)
    torch.testing.assert_close(got[1], model(more[1:2]).logits[0])
    torch.testing.assert_close(got[0], model(torch.cat([x, more], 1)).logits[0, 9:])
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        state.reset_rows(torch.tensor([True]))


def test_reorder_repeat_and_reset():
    model = make()
    x, more = tokens(3, 9), tokens(3, 4, 4)
    _, state = read(model, x, [])
    state.reorder_cache(torch.tensor([2, 0, 0]))
    got = model(more, cache=state).logits
    torch.testing.assert_close(got, model(torch.cat([x[[2, 0, 0]], more], 1)).logits[:, 9:])
    state.batch_repeat_interleave(2)
    assert state.batch_size == 6
    state.reset()
    assert state.get_seq_length() == 0
    torch.testing.assert_close(model(more, cache=state).logits, model(more).logits)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_a_state_survives_a_file(options, tmp_path):
    model = make(**options)
    x, more = tokens(2, 9), tokens(2, 5, 4)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    _, state = read(model, x, [4], attention_mask=mask)
    state.save(tmp_path / "state.safetensors")
    loaded = SRUppCache.load(tmp_path / "state.safetensors", model.config)
    assert loaded.get_seq_length() == 9
    assert torch.equal(model(more, cache=loaded).logits, model(more, cache=state).logits)


def test_a_state_of_another_model_or_a_damaged_one_is_refused(tmp_path):
    model, other = make(), make(hidden_size=32)
    _, state = read(model, tokens(1, 5), [])
    path = tmp_path / "state.safetensors"
    state.save(path)
    with pytest.raises(ValueError, match="hidden_size 24, this model has 32"):
        SRUppCache.load(path, other.config)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="damaged"):
        SRUppCache.load(path, model.config)
    with pytest.raises(FileNotFoundError):
        SRUppCache.load(tmp_path / "none", model.config)


def test_a_longer_and_a_shorter_window_after_training():
    """Each is a model of its own and keeps law 1."""
    model = make()
    x = tokens(2, 30)
    seen = []
    for window in (2, 5, 20):
        model.config.attention_window = window
        whole = model(x).logits
        torch.testing.assert_close(read(model, x, [7, 8, 19])[0], whole)
        seen.append(whole)
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])


# -- saving, and the Auto classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_save_and_load(options, tmp_path):
    model = make(**options, hidden_dropout=0.2)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SRUppForCausalLM)
    x = tokens(2, 9)
    torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=1e-12, atol=1e-12)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()


def test_weights_missing_from_a_file_get_initial_values_and_the_others_stay(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make(dtype=torch.float32, hidden_dropout=0.5)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.1.weight_c"
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = SRUppForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        if name == gone:
            assert 0 < parameter.abs().max() <= 1
        else:
            assert torch.equal(parameter, weights[name]), name


def test_a_process_that_never_imported_undertow_can_load_it(tmp_path):
    model = make(dtype=torch.float32)
    model.save_pretrained(tmp_path / "m")
    code = (
        "from transformers import AutoModelForCausalLM; import sys; assert 'undertow' not in sys.modules; "
        f"m = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'm')!r}, trust_remote_code=True); "
        "print(type(m).__name__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_env(HF_MODULES_CACHE=str(tmp_path / "c"))
    )
    assert run.stdout.strip() == "SRUppForCausalLM", run.stderr


def _env(**more):
    return {**os.environ, "HF_HUB_OFFLINE": "1", **more}


def test_initial_values_are_the_papers():
    model = SRUppForCausalLM(SRUppConfig(hidden_size=300, projection_size=60, hidden_dropout=0.19))
    cell = model.model.layers[0]
    bound = (3 / 300) ** 0.5
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        assert bound * 0.98 < weight.abs().max() <= bound
    xavier = (6 / (60 + 900)) ** 0.5 * 0.81**0.5
    assert xavier * 0.98 < cell.up_proj.weight.abs().max() <= xavier * 1.0001
    assert (cell.bias[0] == 0).all()
    assert (cell.bias[1] == -2).all()
    assert cell.alpha.item() == 0
    assert model.model.layers[-1].highway_dropout == 0 < cell.highway_dropout


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 3}, "projection_size 8 is not divisible by num_attention_heads 3"),
        ({"attention_window": -1}, "attention_window"),
        ({"attention_every": 0}, "attention_every"),
        ({"attention_last": 9}, "attention_last"),
        ({"attention_last": 1, "attention_every": 2}, "not both"),
        ({"layer_norm": "middle"}, "none, before, after"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"tie_word_embeddings": True, "embedding_size": 3}, "tie_word_embeddings"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_inputs_that_do_not_fit_are_named():
    model = make()
    with pytest.raises(ValueError, match="token id 77 is outside the vocabulary of 50"):
        model(torch.tensor([[3, 77]]))
    with pytest.raises(ValueError, match=r"input_ids must be integers of shape \(B, T\)"):
        model(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="resets must be bool"):
        model(tokens(2, 3), resets=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(tokens(2, 3), attention_mask=torch.ones(2, 2))
    with pytest.raises(TypeError, match="SRUppCache"):
        model(tokens(2, 3), cache=DynamicCache())
    _, state = read(model, tokens(2, 3), [])
    with pytest.raises(ValueError, match="the state holds 2 rows, the input has 3"):
        model(tokens(3, 3), cache=state)
    with pytest.raises(ValueError, match="num_hidden_layers 3, this model has 2"):
        make(num_hidden_layers=2)(tokens(2, 3), cache=state)
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 3\)"):
        model(tokens(2, 3), labels=tokens(2, 2))
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(tokens(1, 3), cache_implementation="static", max_new_tokens=2)


def test_past_key_values_is_an_alias():
    model = make()
    x = tokens(2, 9)
    state = model(x[:, :4], use_cache=True).cache
    torch.testing.assert_close(model(x[:, 4:], past_key_values=state).logits, model(x).logits[:, 4:])


def test_what_was_remembered_before_stays_as_it_was():
    """New positions are written behind the old ones, which somebody may still hold."""
    model = make()
    with torch.inference_mode():
        cache = model(tokens(1, 9), use_cache=True).cache
        held = []
        for t in range(12):
            model(tokens(1, 1, seed=t), cache=cache)
            held.append([(x, x.clone()) for layer in cache.layers for x in layer.tensors().values()])
            if t == 5:
                fork = cache.clone()
    for now, then in (pair for step in held for pair in step):
        assert torch.equal(now, then)
    # A copy goes its own way, inside and outside of inference mode.
    with torch.no_grad():
        one = model(tokens(1, 3, seed=70), cache=fork.clone()).logits
        for t in range(3):
            model(tokens(1, 1, seed=t + 80), cache=fork.clone())
        assert torch.equal(model(tokens(1, 3, seed=70), cache=fork).logits, one)
