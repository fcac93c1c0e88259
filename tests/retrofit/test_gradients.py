"""Training: what gradients reach and where they stop, the two orders of work, recomputation, LoRA, the loss."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

from undertow.evaluate.protocol import token_nll
from undertow.retrofit.anatomy import plain_base

from . import zoo
from .test_laws import LAYERS
from .zoo import close, tokens

UPDATES = ["feedforward", "tanh", "gru", "sru"]


def make(name="llama", *, freeze_base=False, seed=0, **settings):
    model = zoo.base(name, torch.float64, seed)
    settings = {"policy": "disjoint", "window": 6, "slots": 2, "bptt": 99} | settings
    return zoo.wrap(model, freeze_base=freeze_base, **settings).train()


def gradients(wrapper, x, **kwargs):
    """The loss of a text and the gradient of every parameter by name, zero where there is none."""
    wrapper.zero_grad()
    out = wrapper(x, labels=x, **kwargs)
    out.loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in wrapper.named_parameters()}
    return out.loss.detach(), grads


def same(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance * 0.1, msg=name)


def reached(wrapper, stride, strides, cut=None):
    """(strides, strides) bool: whether the loss in stride s has a gradient at the tokens of stride r.

    Every position has a token of its own, so that a row of the embeddings stands for a position.
    """
    T = stride * strides
    x = torch.arange(T)[None]
    weight = wrapper.base.get_input_embeddings().weight
    if cut is None:
        logits = wrapper(x).logits
    else:
        first = wrapper(x[:, :cut], use_cache=True)
        logits = torch.cat([first.logits, wrapper(x[:, cut:], cache=first.cache.detach_()).logits], 1)
    rows = []
    for s in range(strides):
        loss = logits[0, s * stride : (s + 1) * stride].square().sum()
        (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
        rows.append(grad[:T].abs().unflatten(0, (strides, stride)).amax((1, 2)) > 0)
    return torch.stack(rows)


SETTINGS = {
    "disjoint": {"policy": "disjoint", "window": 4},
    "overlap": {"policy": "overlap", "window": 8},
    "sliding": {"policy": "sliding", "window": 8, "stride": 4, "sinks": 0},
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layers", [LAYERS[1], LAYERS[2]], ids=["read below", "read above"])
@pytest.mark.parametrize("policy", SETTINGS)
def test_gradients_reach_back_over_windows_and_no_further_than_asked(policy, layers, recompute):
    n, C = 5, 4  # strides of 4 tokens
    far = make(**SETTINGS[policy], **layers, recompute=recompute)
    assert torch.equal(reached(far, C, n), torch.ones(n, n).tril().bool())
    s, r = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    for bptt in (1, 2):
        wrapper = make(**SETTINGS[policy], **layers, recompute=recompute, bptt=bptt)
        got, most = reached(wrapper, C, n), bptt * wrapper.settings.window // C
        assert got.diagonal().all()
        assert not got[(r > s) | (s - r > most)].any(), got.int()
        # From a stride back without a gap, and somewhere as far as was asked for, or one less (where its own counts).
        assert all((row.nonzero().diff(dim=0) == 1).all() for row in got)
        assert int((s - r)[got].max()) >= most - 1, got.int()


@pytest.mark.parametrize("policy", SETTINGS)
def test_gradients_stop_at_a_state_that_is_detached(policy):
    got = reached(make(**SETTINGS[policy]), 4, 5, cut=10)
    assert got[2:, 3:].tril().any()
    assert not got[3:, :2].any()


@pytest.mark.parametrize("policy", SETTINGS)
def test_a_state_that_is_not_detached_carries_gradients(policy):
    x = tokens(2, 22)
    wrapper = make(**SETTINGS[policy])
    _, want = gradients(wrapper, x)
    wrapper.zero_grad()
    cache, logits = None, []
    for i, j in itertools.pairwise([0, 5, 12, 22]):
        out = wrapper(x[:, i:j], cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits)
    logits = torch.cat(logits, 1)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    got = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in wrapper.named_parameters()}
    same(got, want)


ODD = {"policy": "sliding", "window": 8, "stride": 3, "sinks": 1}


@pytest.mark.parametrize(
    ("policy", "name", "update"),
    [
        ("disjoint", "llama", "gru"),
        ("overlap", "gpt2", "tanh"),
        ("sliding", "gemma3", "sru"),
        ("odd", "neox", "feedforward"),
    ],
)
def test_both_orders_of_work_give_the_same_loss_and_gradients(policy, name, update):
    """All strides at once, where what is read lies below what is written, or one after another; recomputed or not."""
    options = SETTINGS.get(policy, ODD)
    x = tokens(2, 27)
    resets = torch.zeros(2, 27, dtype=torch.bool)
    resets[0, 10] = True
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    labels = x.masked_fill(mask == 0, -100)
    for bptt in (1, 99):
        results = []
        for recompute, parallel in ((False, True), (True, True), (False, False)):
            wrapper = make(name, **options, **LAYERS[1], update=update, bptt=bptt, recompute=recompute)
            assert wrapper.parallel
            with nullcontext() if parallel else mock.patch.object(type(wrapper), "parallel", False):
                results.append(_grads(wrapper, x, labels, attention_mask=mask, resets=resets))
                wrapper.eval()
                with torch.no_grad():
                    results[-1] += (wrapper(x).logits,)
        for loss, grads, logits in results[1:]:
            close(loss, results[0][0])
            close(logits, results[0][2])
            same(grads, results[0][1])


def _grads(wrapper, x, labels, **kwargs):
    wrapper.zero_grad()
    loss = wrapper(x, labels=labels, **kwargs).loss
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in wrapper.named_parameters()}


@pytest.mark.parametrize(
    ("read", "layers", "selected"),
    [("mean", 1, 0), ("last", 2, 0), ("queries", 3, 0), ("mean", 2, 3), ("last", 3, 3), ("queries", 1, 3)],
)
def test_recomputation_changes_nothing(read, layers, selected):
    """Nor does anything that is kept (slots, keys, attention received) get moved on a second time in backward."""
    if selected:
        options = {"policy": "sliding", "window": 8, "stride": 4, "selected": selected, "selected_distance": 2}
    else:
        options = {"policy": "disjoint", "window": 6}
    x = tokens(2, 26)
    plain, again = (make(**options, **LAYERS[layers], read=read, recompute=r) for r in (False, True))
    loss, grads = gradients(plain, x)
    for _ in range(2):
        other, other_grads = gradients(again, x)
        close(other, loss)
        same(other_grads, grads)
    first, second = (w(x[:, :13], labels=x[:, :13], use_cache=True).cache.detach_() for w in (plain, again))
    a, b = (w(x[:, 13:], labels=x[:, 13:], cache=c, use_cache=True) for w, c in ((plain, first), (again, second)))
    close(a.loss, b.loss)
    (a.loss + b.loss).backward()
    plain.eval(), again.eval()
    more = tokens(2, 9, 3)
    close(plain(more, cache=a.cache.detach_()).logits, again(more, cache=b.cache.detach_()).logits)


def test_recomputation_draws_the_same_dropout():
    """A base with dropout: backward sees the units that forward dropped."""
    results = []
    for recompute in (False, True):
        model = zoo.base("gpt2", torch.float64, resid_pdrop=0.3, embd_pdrop=0.2, attn_pdrop=0.1)
        wrapper = zoo.wrap(
            model, freeze_base=False, policy="disjoint", window=6, slots=2, **LAYERS[2], recompute=recompute
        )
        torch.manual_seed(3)
        results.append(gradients(wrapper.train(), tokens(2, 20)))
    close(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_transformers_own_gradient_checkpointing_changes_nothing(reentrant):
    for layers in (LAYERS[1], LAYERS[2]):
        wrapper = make(**layers)
        x = tokens(2, 20)
        want = gradients(wrapper, x)
        wrapper.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            wrapper.base.enable_input_require_grads()
        got = gradients(wrapper, x)
        close(got[0], want[0])
        same(got[1], want[1])


def test_training_pieces_in_turn_never_goes_back_through_a_graph_twice():
    for recompute, layers in itertools.product((False, True), (LAYERS[1], LAYERS[2])):
        wrapper = make(**layers, recompute=recompute, bptt=2)
        x, cache = tokens(2, 40), None
        optimiser = torch.optim.SGD(wrapper.parameters(), 1e-3)
        for i in range(0, 40, 9):
            out = wrapper(x[:, i : i + 9], labels=x[:, i : i + 9], cache=cache, use_cache=True)
            cache = out.cache.detach_()
            optimiser.zero_grad()
            out.loss.backward()
            optimiser.step()
        # and without a state, twice over the same text
        for _ in range(2):
            wrapper(x, labels=x).loss.backward()


@pytest.mark.parametrize("update", [*UPDATES, "held"])
@pytest.mark.parametrize("read", ["mean", "last", "queries"])
def test_every_weight_of_the_module_trains(read, update):
    ways = ("disjoint", LAYERS[1], {}), ("sliding", LAYERS[2], {"projection": "own", "slot_size": 12})
    for policy, layers, projection in ways:
        options = {**SETTINGS[policy], "read": read, "update": update, **projection, **layers}
        wrapper = make("llama", **options, freeze_base=True)
        _, grads = gradients(wrapper, tokens(2, 24))
        trained = {n for n, p in wrapper.named_parameters() if p.requires_grad}
        if update != "held":
            assert trained == {f"recurrence.{n}" for n, _ in wrapper.recurrence.named_parameters()}
        for name in trained:
            grad = grads[name]
            assert grad.abs().max() > 0, name
            assert grad.isfinite().all()
            assert name.endswith("bias") or (grad != 0).double().mean() > 0.2, name


def test_what_a_trained_selection_adds_trains():
    wrapper = make(
        "gemma3", policy="sliding", window=8, stride=4, selected=3, selected_by="learned", selected_rank=2, slots=0
    )
    _, grads = gradients(wrapper, tokens(2, 40))
    module = {n: g for n, g in grads.items() if n.startswith("recurrence.")}
    assert {name.split(".")[1] for name in module} == {"worth", "recall"}
    assert all(g.abs().max() > 0 for g in module.values())


@pytest.mark.parametrize("name", zoo.ALL)
def test_a_fresh_retrofit_can_open_its_gates(name):
    """With every gate closed they, and at first they alone, get a gradient."""
    wrapper = zoo.wrap(zoo.base(name), opened=False, window=6, slots=2).train()
    _, grads = gradients(wrapper, tokens(2, 13))
    gates = [g for n, g in grads.items() if n.startswith("recurrence.") and "gate" in n]
    assert gates
    assert all(g.abs().min() > 0 for g in gates)
    optimiser = torch.optim.AdamW([p for p in wrapper.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(5):
        loss, _ = gradients(wrapper, tokens(2, 13))
        optimiser.step()
        losses.append(loss)
    assert losses[-1] < losses[0]


def test_a_frozen_base_stays_as_it_is_and_one_that_is_not_trains():
    x = tokens(2, 20)
    for freeze in (True, False):
        wrapper = make(freeze_base=freeze)
        before = {n: p.clone() for n, p in wrapper.base.named_parameters()}
        gradients(wrapper, x)
        torch.optim.SGD([p for p in wrapper.parameters() if p.requires_grad], 0.1).step()
        moved = [n for n, p in wrapper.base.named_parameters() if not torch.equal(p, before[n])]
        assert bool(moved) is not freeze


# -- LoRA ----------------------------------------------------------------------------------------------------------

FUSED = {
    "gpt2": ["c_attn"],
    "neox": ["query_key_value"],
    "phi3": ["qkv_proj"],
    "llama": ["k_proj", "v_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj"],
    "opt": ["k_proj", "v_proj"],
}


def adapted(name, way, **settings):
    """A retrofit whose base carries LoRA that counts, put in after or before."""
    config = LoraConfig(r=4, target_modules=FUSED[name], fan_in_fan_out=name == "gpt2", init_lora_weights=False)
    model = zoo.base(name, torch.float64)
    settings = {"window": 6, "slots": 2, "projection": "base", "policy": "disjoint"} | settings
    torch.manual_seed(7)
    if way == "before":
        return zoo.wrap(get_peft_model(model, config).eval(), **settings)
    wrapper = zoo.wrap(model, **settings)
    inject_adapter_in_model(config, wrapper.base)
    return wrapper.to(torch.float64).eval()


@pytest.mark.parametrize("way", ["after", "before"])
@pytest.mark.parametrize("name", FUSED)
def test_slots_pass_through_lora_on_the_projections_they_use(name, way):
    """Merging LoRA into the weights changes nothing, so nothing went round it."""
    x = tokens(2, 24)
    with torch.no_grad():
        wrapper = adapted(name, way)
        got = wrapper(x).logits
        plain = zoo.wrap(zoo.base(name, torch.float64), window=6, slots=2, projection="base", policy="disjoint")
        assert (got - plain(x).logits).abs().max() > 1e-3
        for module in wrapper.base.modules():
            if hasattr(module, "merge") and hasattr(module, "lora_A"):
                module.merge()
        close(wrapper(x).logits, got)
        # The weights as they now stand, in a base that never heard of LoRA.
        bare = zoo.base(name, torch.float64)
        merged = plain_base(wrapper.base).state_dict()
        state = {k.replace(".base_layer", ""): v for k, v in merged.items() if "lora_" not in k}
        bare.load_state_dict(state)
        other = zoo.wrap(bare, window=6, slots=2, projection="base", policy="disjoint")
        close(other(x).logits, got)


@pytest.mark.parametrize("name", ["gpt2", "neox", "phi3"])
def test_lora_trains_through_the_slots(name):
    """The loss of the second window alone, of which the first is only read: LoRA has a gradient, the base has none."""
    wrapper = adapted(name, "after", read_layers=[3], write_layers=[2]).train()
    x = tokens(2, 12)
    out = wrapper(x)
    loss = torch.nn.functional.cross_entropy(out.logits[:, 6:-1].flatten(0, 1), x[:, 7:].flatten())
    loss.backward()
    lora = {n: p for n, p in wrapper.base.named_parameters() if "lora_" in n}
    assert lora
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in lora.values())
    assert all(p.grad is None for n, p in wrapper.base.named_parameters() if "lora_" not in n)


# -- the loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_target_is_scored_once(name, recompute):
    wrapper = make(name, recompute=recompute).eval()
    x = tokens(2, 27)
    logits = wrapper(x).logits
    targets = torch.cat([x[:, 1:], torch.full((2, 1), -100)], 1)
    targets[0, 3:9] = -100
    nll = token_nll(logits, targets)
    want = nll.sum() / (targets != -100).sum()
    labels = torch.cat([x[:, :1], targets[:, :-1]], 1)
    for mode in (True, False):
        wrapper.train(mode)
        close(wrapper(x, labels=labels).loss.float(), want)
        close(wrapper(x, shift_labels=targets).loss.float(), want)
        close(wrapper(x, labels=labels, num_items_in_batch=11).loss.float(), nll.sum() / 11)
    # In pieces each target counts in the piece where the token before it stands.
    total, cache = 0.0, None
    for i, j in itertools.pairwise([0, 5, 6, 13, 27]):
        out = wrapper(x[:, i:j], shift_labels=targets[:, i:j], cache=cache, use_cache=True, num_items_in_batch=1)
        total, cache = total + out.loss.detach(), out.cache.detach_()
    close(total.float(), nll.sum())


def test_labels_stay_in_line_where_rows_are_out_of_step():
    """Padding and document starts shift the strides of a row, not its labels."""
    wrapper = make().eval()
    x = tokens(3, 25)
    mask = torch.ones_like(x)
    mask[0, :7] = mask[1, 20:] = mask[2, 4:9] = 0
    resets = torch.zeros(3, 25, dtype=torch.bool)
    resets[0, 11] = resets[2, 3] = True
    labels = x.masked_fill(mask == 0, -100)
    logits = wrapper(x, attention_mask=mask, resets=resets).logits
    targets = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1).masked_fill(mask == 0, -100)
    nll = token_nll(logits, targets)
    for recompute in (False, True):
        for mode in (True, False):
            wrapper = make(recompute=recompute).train(mode)
            out = wrapper(x, attention_mask=mask, resets=resets, labels=labels)
            close(out.loss.float(), nll.sum() / (targets != -100).sum())


def test_logits_to_keep():
    wrapper = make().eval()
    x = tokens(2, 27)
    logits = wrapper(x).logits
    close(wrapper(x, logits_to_keep=1).logits, logits[:, -1:])
    close(wrapper(x, logits_to_keep=9).logits, logits[:, -9:])
    places = torch.tensor([0, 5, 6, 26])
    close(wrapper(x, logits_to_keep=places).logits, logits[:, places])


def test_autocast_trains():
    for recompute in (False, True):
        wrapper = zoo.wrap(zoo.base("llama"), window=8, slots=2, recompute=recompute).train()
        x = tokens(2, 24)
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapper(x, labels=x).loss
        loss.backward()
        for name, parameter in wrapper.recurrence.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
