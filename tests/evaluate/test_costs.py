"""Operations against counts by hand, memory against tensors of known size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import undertow
from undertow.evaluate import costs
from undertow.evaluate.costs import flop_counter, peak_memory, reading_costs
from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.retrofit import RecurrenceConfig

D, FF, LAYERS, HEADS, KV, V = 16, 40, 3, 4, 2, 50
IDS = torch.arange(40) % V


def count(function: Any, *args: Any, **kwargs: Any) -> int:
    with flop_counter() as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=FF, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def linear_flops(tokens: int, head_tokens: int | None = None) -> int:
    """Of a Llama's matrix products with weights: q and o (D x D), k and v, three of the feed-forward, the output."""
    kv = D * KV // HEADS
    layer = 2 * D * D + 2 * D * kv + 3 * D * FF
    return 2 * tokens * LAYERS * layer + 2 * (tokens if head_tokens is None else head_tokens) * D * V


def attention_flops(queries: int, keys: int) -> int:
    """Queries times keys and weights times values, in all heads of all layers."""
    return LAYERS * 2 * 2 * queries * keys * D


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_llama_by_hand(implementation: str) -> None:
    model = llama()
    model.set_attn_implementation(implementation)
    ids = IDS[None, :20]
    # (Eager attention goes through batched products, which torch's counter has always known.)
    assert count(model, ids) == linear_flops(20) + attention_flops(20, 20)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_a_cpu(grad: bool, masked: bool) -> None:
    """Grouped heads, queries fewer than keys; backward costs two and a half times as much."""
    q, k = torch.randn(2, 4, 5, 8, requires_grad=grad), torch.randn(2, 2, 7, 8, requires_grad=grad)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2) if masked else None
    forward = 2 * 2 * 4 * (2 * 5 * 7 * 8)
    sdpa = nn.functional.scaled_dot_product_attention
    assert count(sdpa, q, k, k, mask, enable_gqa=True) == forward
    if grad and not masked:
        k = torch.randn(2, 4, 7, 8, requires_grad=True)
        out = sdpa(q, k, k).sum()
        assert count(out.backward) == 5 * forward // 2


@pytest.mark.parametrize("time", [1, 7])
@pytest.mark.parametrize("grad", [False, True])
def test_lstm(time: int, grad: bool) -> None:
    lstm = nn.LSTM(6, 10, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, time, 6, requires_grad=grad)
    forward = 2 * 3 * time * 2 * (40 * (6 + 10) + 40 * (20 + 10))
    with torch.set_grad_enabled(grad):
        assert count(lstm, x) == forward
        if grad:
            out = lstm(x)[0].sum()
            assert count(out.backward) == 2 * forward


def test_packed_lstm_counts_real_steps_and_a_cell_counts_one() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 5, 6), torch.tensor([5, 3, 2]), batch_first=True)
    assert count(nn.LSTM(6, 10, batch_first=True), packed) == 2 * 10 * 40 * (6 + 10)
    assert count(nn.LSTMCell(6, 10), torch.randn(3, 6)) == 2 * 3 * 40 * (6 + 10)


def test_matrix_times_vector() -> None:
    assert count(torch.mv, torch.ones(4, 5), torch.ones(5)) == 2 * 4 * 5
    assert count(torch.addmv, torch.ones(4), torch.ones(4, 5), torch.ones(5)) == 2 * 4 * 5


def test_formulas_fit_the_operators_that_are_there() -> None:
    """None of them can be missed by a change of name in torch on this machine's kind of device."""
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer", "_cudnn_rnn", "mv", "addmv"):
        assert hasattr(torch.ops.aten, name)


@torch.no_grad()
def test_srupp_counts_its_recurrence() -> None:
    config = SRUppConfig(
        vocab_size=V, hidden_size=12, projection_size=6, num_hidden_layers=2, attention_window=9, alpha_init=0.3
    )
    model = SRUppForCausalLM(config).eval()
    with flop_counter() as counter:
        model(IDS[None, :20], use_cache=False)
    found = counter.get_flop_counts()["Global"]
    assert found[torch.ops.undertow.recurrence] == 2 * 20 * 12 * (2 * 6 + 3 + 3)
    attention = found[torch.ops.aten.bmm]
    assert attention == 2 * 2 * 2 * 20 * 20 * 6, "one block of queries: all products are computed"
    # Down and up projections, query key value, output.
    assert found[torch.ops.aten.mm] + found.get(torch.ops.aten.addmm, 0) == 2 * 20 * (
        2 * (12 * 6 + 2 * 6 * 6 + 6 * 12 * 3) + 12 * V
    )


def under(model: nn.Module, **settings: Any) -> Any:
    return undertow.add_recurrence(model, RecurrenceConfig(slots=0, selected=0, **settings))


def test_costs_of_policies_by_hand() -> None:
    """Read on in whole strides, in the middle of the text."""
    model, W = llama(), 32
    found = reading_costs(under(model, window=W, policy="disjoint"), IDS, warm=W, window=W, stride=W)
    assert found.flops_per_token == pytest.approx((linear_flops(W) + attention_flops(W, W)) / W)
    # The middle of an overlapping window is read twice; only the output layer leaves the first time out.
    found = reading_costs(under(model, window=W, policy="overlap"), IDS, warm=W, window=W // 2, stride=W // 2)
    expected = (linear_flops(W, W // 2) + attention_flops(W, W)) / (W // 2)
    assert found.flops_per_token == pytest.approx(expected)
    # A stride of C queries sees its own C keys, the W - 1 before its first and the sinks.
    C = 8
    sliding = under(model, window=W, policy="sliding", stride=C)
    found = reading_costs(sliding, IDS, warm=3 * W, window=C, stride=C)
    least, most = (linear_flops(C) + attention_flops(C, W + 4 + more) for more in (C - 1, 2 * C))
    assert least / C <= found.flops_per_token <= most / C


def test_windows_on_their_own_by_hand() -> None:
    model = llama()
    found = reading_costs(model, IDS, window=32, stride=16, alone=True)
    assert found.flops_per_token == pytest.approx((linear_flops(32) + attention_flops(32, 32)) / 16)
    assert found.state_bytes is None


def test_the_state_is_weighed_at_its_largest() -> None:
    """Keys and values of a whole window but its last token, although nothing is left of it at the boundary."""
    wrapped = under(llama(), window=32, policy="disjoint")
    found = reading_costs(wrapped, IDS, warm=32, window=32, stride=32)
    keys_and_values = LAYERS * 2 * 31 * (D * KV // HEADS) * 4
    assert found.state_bytes is not None
    assert keys_and_values <= found.state_bytes <= keys_and_values + 1024
    srupp = SRUppForCausalLM(SRUppConfig(vocab_size=V, hidden_size=12, projection_size=6, attention_window=9))
    assert reading_costs(srupp, IDS, warm=64, window=32).state_bytes == state_of(srupp, 100)


@torch.no_grad()
def state_of(model: Any, tokens: int) -> int:
    return int(model.eval()(IDS.repeat(3)[None, :tokens], use_cache=True).cache.nbytes())


def test_mode_is_given_back_and_few_tokens_are_repeated() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=64)).train()
    assert reading_costs(model, torch.tensor([3]), window=8, stride=8, alone=True).flops_per_token > 0
    assert model.training


# ---- memory


def test_peak_is_that_of_the_block() -> None:
    with peak_memory("cpu") as much:
        tensor = torch.ones(48 << 20)
    del tensor
    with peak_memory("cpu") as little:
        torch.ones(1 << 20)
    assert much.bytes is not None
    assert little.bytes is not None
    assert {much.measure, little.measure} <= {costs.RESIDENT, costs.RESIDENT_OF_RUN}
    if little.measure == costs.RESIDENT:
        assert 150 << 20 < much.bytes - little.bytes < 230 << 20, "earlier work does not count"


def test_where_the_mark_cannot_be_set_back_the_whole_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    with peak_memory("cpu") as peak:
        pass
    assert peak.measure == costs.RESIDENT_OF_RUN
    assert peak.bytes is not None
    assert peak.bytes > 50 << 20
