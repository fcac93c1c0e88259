"""Learning rates and optimisers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.train.conftest import small_model
from undertow.train import TrainConfig
from undertow.train.optim import FusedRAdam, learning_rate, make_optimizer


def test_warmup_and_cosine() -> None:
    config = TrainConfig(steps=100, learning_rate=1.0, warmup=10, min_learning_rate=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 89 / 90)))
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_warmup_as_a_share_of_the_budget() -> None:
    steps = TrainConfig(steps=200, learning_rate=1.0, warmup=0.1)
    same = TrainConfig(steps=200, learning_rate=1.0, warmup=20)
    assert [learning_rate(steps, s) for s in range(200)] == pytest.approx([learning_rate(same, s) for s in range(200)])


def test_constant() -> None:
    config = TrainConfig(steps=10, learning_rate=0.5, warmup=2, schedule="constant")
    assert [learning_rate(config, step) for step in range(10)] == [0.25] + [0.5] * 9


def test_minutes_drive_the_schedule() -> None:
    config = TrainConfig(minutes=2, learning_rate=1.0, warmup=0.1)
    assert 0 < learning_rate(config, 0, 0.0) < 0.01
    assert learning_rate(config, 50, 6.0) == pytest.approx(0.5)
    assert learning_rate(config, 50, 12.0) == pytest.approx(1.0)
    assert learning_rate(config, 500, 66.0) == pytest.approx(0.5)
    assert learning_rate(config, 900, 120.0) == pytest.approx(0.0, abs=1e-9)
    both = TrainConfig(minutes=2, steps=100, learning_rate=1.0, warmup=0.1)
    assert learning_rate(both, 55, 10.0) == pytest.approx(0.5)


@given(
    steps=st.integers(1, 300),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(0, 400).map(float)),
    minutes=st.one_of(st.none(), st.floats(0.1, 10)),
    floor=st.floats(0, 1),
    data=st.data(),
)
def test_rates_stay_between_zero_and_the_top(
    steps: int, warmup: float, minutes: float | None, floor: float, data: st.DataObject
) -> None:
    config = TrainConfig(steps=steps, minutes=minutes, learning_rate=1.0, warmup=warmup, min_learning_rate=floor)
    step = data.draw(st.integers(0, steps - 1))
    seconds = data.draw(st.floats(0, 700))
    assert 0 <= learning_rate(config, step, seconds) <= 1.0 + 1e-12


def test_which_parameters_decay() -> None:
    model = small_model()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(model, TrainConfig(weight_decay=0.1)).param_groups
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    free = {names[id(p)] for group in groups if not group["weight_decay"] for p in group["params"]}
    assert decayed | free == set(names.values())
    assert "lm_head.weight" in decayed
    assert any(name.endswith("down_proj") or "down_proj" in name for name in decayed)
    vectors = ("bias", "weight_c", "alpha")
    assert {name for name in names.values() if name.rpartition(".")[2] in vectors} <= free
    assert all(p.ndim >= 2 for name, p in model.named_parameters() if name in decayed)
    everything = make_optimizer(model, TrainConfig(weight_decay=0.1, decay="all")).param_groups
    assert sum(len(group["params"]) for group in everything if group["weight_decay"]) == len(names)


@pytest.mark.parametrize("optimizer", ["radam", "adamw"])
def test_decay_is_decoupled(optimizer: str) -> None:
    """Without a gradient the weights shrink by 1 - lr * decay; L2 regularisation would do something else."""
    model = nn.Linear(3, 2, bias=False)
    config = TrainConfig(optimizer=optimizer, learning_rate=0.1, weight_decay=0.5)  # type: ignore[arg-type]
    made = make_optimizer(model, config)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(model.weight)
    made.step()
    assert torch.allclose(model.weight, before * (1 - 0.1 * 0.5))


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    made = make_optimizer(model, TrainConfig())
    assert sum(len(group["params"]) for group in made.param_groups) == 2
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_optimizer(model, TrainConfig())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta2", [0.999, 0.9])
def test_fused_radam_is_torchs(dtype: torch.dtype, beta2: float) -> None:
    """Also with a parameter that has no gradient at times, a changing rate, and a state that changes hands."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((5, 3), (7,), (2, 2))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 1e-2, "betas": (0.9, beta2), "weight_decay": 0.3, "eps": 1e-4, "decoupled_weight_decay": True}
    fused = FusedRAdam(ours, **settings)
    plain = torch.optim.RAdam(theirs, **settings)
    for step in range(30):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 20:
            ours[2].grad = theirs[2].grad = None
        if step == 25:
            state = fused.state_dict()
            fused.load_state_dict(plain.state_dict())
            plain.load_state_dict(state)
        for optimizer in (fused, plain):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_a_base_inside_the_model_has_a_pace_of_its_own() -> None:
    """The recurrence at 1e-2, what it was added to at 1e-3, each with and without decay."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = small_model()
            self.own = nn.Linear(3, 3)
            self.base.model.embed_tokens.weight.requires_grad_(False)

    model = Added()
    config = TrainConfig(learning_rate=1e-2, base_learning_rate=1e-3)
    groups = make_optimizer(model, config).param_groups
    assert [(g["lr"], g["pace"], g["weight_decay"]) for g in groups] == [
        (1e-2, 1.0, 0.1), (1e-2, 1.0, 0.0), (1e-3, 0.1, 0.1), (1e-3, 0.1, 0.0),
    ]  # fmt: skip
    assert groups[0]["params"] == [model.own.weight]
    assert groups[1]["params"] == [model.own.bias]
    grouped = {id(p) for group in groups for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}
    assert {g["lr"] for g in make_optimizer(model, TrainConfig(learning_rate=1e-2)).param_groups} == {1e-2}
    with pytest.raises(ValueError, match="base_learning_rate should be above 0"):
        TrainConfig(base_learning_rate=0.0)
