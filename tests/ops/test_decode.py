"""Products with few rows and one query's attention against plain torch, on every instruction set there is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.cases import INSTRUCTION_SETS, compiled
from undertow.evaluate import flop_counter
from undertow.nn import attention
from undertow.nn.linear import Int8Linear, Linear, to_int8
from undertow.ops import cpu, decode

pytestmark = pytest.mark.skipif(not compiled, reason="undertow was installed without its compiled part")
sets = st.sampled_from(INSTRUCTION_SETS or ["portable"])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_products(data):
    rows, k, o = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 200)), data.draw(st.integers(1, 70))
    kind = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    x_dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    x, scale = normal(rows, k).to(x_dtype), normal(o, seed=2) if kind == torch.int8 else None
    weight = (normal(o, k, seed=1) * (40 if kind == torch.int8 else 1)).to(kind)
    with cpu.instruction_set(data.draw(sets)):
        got = decode.product(x, weight, scale)
    want = x.double() @ weight.double().T * (1 if scale is None else scale.double())
    assert got.dtype == x_dtype
    allowed = want.abs().max().clamp(min=1) * (1e-5 if x_dtype == torch.float32 else 2**-8)
    if scale is not None:  # x is rounded to 14 bits
        step = x.double().abs().amax(1, keepdim=True) / 8191
        allowed = allowed + step / 2 * (weight.double().abs().sum(1) * scale.double().abs())
    assert ((got.double() - want).abs() <= allowed).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_querys_attention(data):
    B, H, S = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 90))
    e, dtype = data.draw(st.integers(1, 150)), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q, kv = normal(B, H, 1, e).to(dtype), (3 * normal(B, S, 2, H, e, seed=1)).to(dtype)
    k, v = kv.permute(2, 0, 3, 1, 4)
    with cpu.instruction_set(data.draw(sets)):
        got = decode.attend(q, k, v)
    want = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_numbers_that_are_none_stay_none(name):
    k, v = normal(1, 1, 40, 40), normal(1, 1, 40, 40, seed=1)
    k[0, 0, 7, 3] = torch.nan
    with cpu.instruction_set(name):
        assert decode.attend(normal(1, 1, 1, 40), k, v).isnan().all()
        assert decode.product(normal(1, 40), k[0, 0]).isnan().sum() == 1
        huge = decode.attend(1e20 * normal(1, 1, 1, 40), v, v)
    assert huge.isfinite().all()


def test_a_result_does_not_depend_on_threads_or_on_what_is_computed_beside():
    x, weight = normal(7, 513), normal(2000, 513, seed=1)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(decode.product(x[:1], weight))
            results.append(decode.product(x[:1], weight[:900].clone()))
    finally:
        torch.set_num_threads(threads)
    for r in results[2:]:
        assert torch.equal(r, results[0][:, : r.shape[1]])


def test_layers_take_the_short_way_only_where_nothing_is_lost(monkeypatch):
    called = []
    monkeypatch.setattr(decode, "product", lambda *a, f=decode.product: called.append(1) or f(*a))
    layer = Linear(12, 5)
    x = normal(2, 4, 12)
    assert layer(x).requires_grad
    assert not called  # a gradient is wanted
    with torch.no_grad():
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        assert called == [1]
        layer(normal(9, 12))  # too many rows
        layer.double()(x.double())
        layer.float()
        assert called == [1]
        with flop_counter() as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 8 * 12 * 5
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16


def test_int8_layers_are_as_near_as_8_bits_allow():
    model = torch.nn.Sequential(Linear(300, 40, bias=False), torch.nn.Sequential(torch.nn.Linear(40, 3)))
    x = normal(64, 300)
    with torch.no_grad():
        want = model(x)
        first = model[0].weight.clone()
        assert to_int8(model) is model
        assert all(isinstance(m, Int8Linear) for m in (model[0], model[1][0]))
        many, few = model(x), torch.cat([model(row[None]) for row in x])
        back = model[0].weight * model[0].scale[:, None]
    assert ((back - first).abs() <= model[0].scale[:, None] / 2 + 1e-7).all()
    torch.testing.assert_close(many, few, rtol=0, atol=1e-3)
    assert (many - want).std() < 0.02 * want.std()


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_largest_sums_of_int8_fit(name):
    x, weight = torch.ones(1, decode.INT8_IN), torch.full((2, decode.INT8_IN), 127, dtype=torch.int8)
    with cpu.instruction_set(name):
        got = decode.product(x, weight, torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(got, torch.tensor([[1.0, -1.0]]) * 127 * decode.INT8_IN)


def test_what_lies_otherwise_in_memory_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(decode, "product", lambda *a: pytest.fail("taken"))
    layer, x = Linear(6, 6, bias=False), normal(2, 6)
    layer.weight.data = normal(6, 6, seed=3).T
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ layer.weight.T)
        with pytest.raises(RuntimeError, match="dtype"):  # as in torch's own layer
            layer(x.bfloat16())


def test_attention_to_keys_that_lie_otherwise():
    q = normal(1, 1, 1, 8)
    k, v = (normal(1, 1, 8, 5, seed=s).mT for s in (1, 2))  # the last dimension is not contiguous
    with torch.no_grad():
        torch.testing.assert_close(attention.attend(q, k, v), scaled_dot_product_attention(q, k, v))
        with pytest.raises(RuntimeError, match="dtype"):
            attention.attend(q, k.contiguous(), v.contiguous().bfloat16())
