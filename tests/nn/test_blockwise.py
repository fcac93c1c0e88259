"""Attention by blocks of queries against torch's own: outputs, gradients, second derivatives, and who is served."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from undertow.nn import attention, blockwise
from undertow.nn.attention import WindowMask, attend

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def dense(window: int, T: int, S: int) -> torch.Tensor:
    behind = torch.arange(T)[:, None] + S - T - torch.arange(S)
    return (behind >= 0) & (behind <= window)


def inputs(B, H, T, S, e, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    # As a layer gives them: heads are views of (B, T, H e), keys and values halves of one tensor.
    q = torch.randn(B, T, H * e, generator=g).to(dtype)
    kv = torch.randn(B, S, 2 * H * e, generator=g).to(dtype)
    return q.requires_grad_(), kv.requires_grad_()


def heads(q, kv, H):
    k, v = kv.chunk(2, -1)
    return (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (q, k, v))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_are_torchs_attention(data):
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    B, H, e = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 5, 16]))
    T, M = data.draw(st.integers(2, 40)), data.draw(st.integers(0, 20))
    window = data.draw(st.one_of(st.none(), st.integers(0, 45)))
    q, kv = inputs(B, H, T, M + T, e, dtype)
    size = attention.QUERY_BLOCK
    try:
        attention.QUERY_BLOCK = data.draw(st.sampled_from([1, 7, 16, 128]))
        mask = None if window is None else WindowMask.build(window, T, M)
        got = attend(*heads(q, kv, H), mask, is_causal=window is None)
    finally:
        attention.QUERY_BLOCK = size
    wq, wkv = (x.detach().double().requires_grad_() for x in (q, kv))
    want = scaled_dot_product_attention(*heads(wq, wkv, H), dense(T + M if window is None else window, T, M + T))
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    got.backward(grad.to(dtype))
    want.backward(grad.to(dtype).double())
    assert got.dtype == dtype
    for mine, theirs in ((got, want), (q.grad, wq.grad), (kv.grad, wkv.grad)):
        torch.testing.assert_close(mine.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * T**0.5)


def test_the_blocks_are_what_runs(monkeypatch):
    called = []
    monkeypatch.setattr(attention, "blockwise", lambda *a: called.append(a) or blockwise.blockwise(*a))
    q, kv = inputs(2, 1, 9, 9, 4, torch.float32)
    attend(*heads(q, kv, 1), is_causal=True)
    attend(*heads(q, kv, 1), WindowMask.build(3, 9))
    assert len(called) == 2
    attend(*heads(q, kv, 1), is_causal=True, dropout_p=0.1)  # dropout on the map is torch's
    assert len(called) == 2


def test_second_derivatives():
    q, kv = inputs(1, 2, 7, 9, 3, torch.float64)
    mask = WindowMask.build(3, 7, 2)

    def f(q, kv):
        return attend(*heads(q, kv, 2), mask)

    assert torch.autograd.gradcheck(f, (q, kv))
    assert torch.autograd.gradgradcheck(f, (q, kv))


def test_rows_that_see_nothing_get_zeros_and_finite_gradients():
    q, kv = inputs(2, 2, 6, 8, 4, torch.float32)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, :3] = True
    mask = WindowMask.build(2, 6, 2, past_valid=torch.tensor([[False, False], [True, True]]), padding_mask=padding)
    out = attend(*heads(q, kv, 2), mask)
    out.sum().backward()
    assert out[0, :, :3].abs().max() == 0
    assert out.isfinite().all()
    assert q.grad.isfinite().all()
    assert kv.grad.isfinite().all()
    assert kv.grad[0, :5].abs().max() == 0  # nobody saw them


def test_autocast_multiplies_in_its_dtype_and_scores_in_float32():
    q, kv = inputs(1, 1, 300, 300, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = attend(*heads(q, kv, 1), is_causal=True)
    assert got.dtype == torch.bfloat16
    want = scaled_dot_product_attention(*(x.bfloat16().double() for x in heads(q, kv, 1)), is_causal=True)
    assert (got - want).abs().max() < 0.01


def test_compiled_it_is_torchs_own():
    q, kv = inputs(1, 1, 12, 12, 4, torch.float32)
    exported = torch.export.export(Causal(), tuple(x.detach() for x in heads(q, kv, 1)))
    assert "scaled_dot_product_attention" in str(exported.graph)


class Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v, is_causal=True)
