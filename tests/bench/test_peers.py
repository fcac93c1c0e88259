"""Models of peers: as many parameters, and absences told by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undertow.bench import peers
from undertow.bench.decode import weight_bytes, writing
from undertow.bench.machine import copy, multiply, operations, read, training_products
from undertow.bench.peers import LAYERS, Shape, absent, count, llama_config, nearest_size, parameters
from undertow.evaluate.costs import flop_counter
from undertow.models import SRUppConfig, SRUppForCausalLM


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(0, 1500), st.integers(1, 8))
def test_nearest_size_is_the_nearest_of_all(growth: list[int], target: int, step: int) -> None:
    counts = list(itertools.accumulate(growth))

    def counted(size: int) -> int:
        assert size % step == 0
        index = size // step - 1
        return counts[index] if index < len(counts) else counts[-1] + 100 * (index - len(counts) + 1)

    size = nearest_size(counted, target, step)
    distance = min(abs(counted(step * index) - target) for index in range(1, 80))
    assert abs(counted(size) - target) == distance


@pytest.mark.parametrize(("target", "layers"), [(300_000, 2), (1_188_868, 4), (108_000_000, 10)])
def test_a_llama_of_equal_parameters(target: int, layers: int) -> None:
    from transformers import LlamaForCausalLM

    config = llama_config(target, layers, vocab_size=257)
    assert config.num_hidden_layers == layers
    assert config.hidden_size % config.num_attention_heads == 0
    assert count(lambda: LlamaForCausalLM(config)) == pytest.approx(target, rel=0.01)


@pytest.mark.parametrize("peer", [name for name in LAYERS if name not in ("sru", "lstm", "gru")])
def test_peers_of_equal_parameters_read_what_they_are_given(peer: str) -> None:
    if (why := absent(peer)) is not None:
        pytest.skip(f"{peer}: {why}")
    shape = Shape(T=64, B=2, d=64, layers=2, parameters=300_000, projection_size=16)
    layers = LAYERS[peer](shape)
    # Widths come in steps of 8 (256 here, at most): a step more or less is some percent.
    assert parameters(layers.module) == pytest.approx(300_000, rel=0.1)
    h = layers.read(layers.input)
    assert h.shape[:2] == layers.input.shape[:2] == (2, 64)
    h.square().mean().backward()


@pytest.mark.parametrize("peer", ["sru", "lstm", "gru"])
def test_layers_of_the_same_sizes(peer: str) -> None:
    if (why := absent(peer)) is not None:
        pytest.skip(f"{peer}: {why}")
    layers = LAYERS[peer](Shape(T=5, B=2, d=8, layers=2, parameters=1, projection_size=None))
    assert layers.read(layers.input).shape == (5, 2, 8)


def test_absent_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PACKAGES, "mambapy", ("no_such_package", "mambapy"))
    assert absent("mambapy") == "not installed: pip install mambapy"
    assert absent("lstm") is None
    assert "GPU" in (absent("fla") or "")


def test_operations_are_those_of_the_products() -> None:
    products = [(3, 4, 5), (7, 2, 6), (3, 4, 5)]
    with flop_counter() as counter:
        multiply(products, torch.float32)()
    assert counter.get_total_flops() == operations(products)


def test_training_products_are_those_of_a_linear_layer() -> None:
    M, K, N = 6, 5, 4
    x, layer = torch.randn(M, K, requires_grad=True), torch.nn.Linear(K, N, bias=False)
    with flop_counter() as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == operations(training_products([(M, K, N)]))


@pytest.mark.parametrize("nbytes", [1, 4000, 1 << 16])
def test_any_number_of_bytes_can_be_copied_and_read(nbytes: int) -> None:
    copy(nbytes)()
    read(nbytes)()


def test_a_token_reads_every_weight_but_the_embeddings() -> None:
    model = SRUppForCausalLM(SRUppConfig(hidden_size=16, projection_size=4, num_hidden_layers=2)).eval()
    assert weight_bytes(model) == 4 * (parameters(model) - 257 * 16)
    assert weight_bytes(model.bfloat16()) == 2 * (parameters(model) - 257 * 16)
    tied = SRUppForCausalLM(
        SRUppConfig(hidden_size=16, projection_size=4, num_hidden_layers=2, tie_word_embeddings=True)
    )
    assert weight_bytes(tied) == 4 * parameters(tied)


def test_writing_goes_on_turn_by_turn_as_generate_does() -> None:
    torch.manual_seed(0)
    model = SRUppForCausalLM(SRUppConfig(hidden_size=16, projection_size=4, num_hidden_layers=2, alpha_init=1.0)).eval()
    text = torch.randint(0, 256, (1, 30))
    expected = model.generate(text, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 30:]
    seen: list[int] = []
    work = writing(model, text, tokens=3)
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(int(kwargs["input_ids"])), with_kwargs=True)
    work()
    work()
    assert seen == expected.tolist()
