"""The sliding window against its definition, written out position by position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.nn import attention
from undertow.nn.attention import WindowMask, attend


def visible(window, length, past, past_valid, padding, resets):
    """(B, T, M + T) from the definition: same document, not ahead, real, at most `window` real positions behind."""
    B = padding.shape[0]
    out = torch.zeros(B, length, past + length, dtype=torch.bool)
    for b in range(B):
        real = [bool(x) for x in past_valid[b]] + [not bool(x) for x in padding[b]]
        for t in range(length):
            start = max([past + r for r in range(t + 1) if resets[b, r]], default=0)
            for s in range(past + t, start - 1, -1):
                behind = sum(real[s + 1 : past + t + 1])  # real positions after the key, up to the query
                out[b, t, s] = real[s] and behind <= window
    return out


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_window_is_its_definition(data):
    window = data.draw(st.integers(0, 9))
    length = data.draw(st.integers(1, 13))
    past = data.draw(st.integers(0, window))
    B = 2
    bools = st.booleans()
    remembered = data.draw(st.lists(st.integers(0, past), min_size=B, max_size=B))
    past_valid = torch.arange(past) >= past - torch.tensor(remembered)[:, None]
    padding = torch.tensor([[data.draw(bools) for _ in range(length)] for _ in range(B)])
    resets = torch.tensor([[data.draw(st.integers(0, 4)) == 0 for _ in range(length)] for _ in range(B)])
    want = visible(window, length, past, past_valid, padding, resets & ~padding)
    torch.manual_seed(0)
    q = torch.randn(B, 2, length, 4, dtype=torch.float64)
    k, v = torch.randn(2, B, 2, past + length, 4, dtype=torch.float64)
    block = attention.QUERY_BLOCK
    try:
        attention.QUERY_BLOCK = data.draw(st.sampled_from([1, 3, 512]))
        mask = WindowMask.build(window, length, past, past_valid=past_valid, padding_mask=padding, resets=resets)
    finally:
        attention.QUERY_BLOCK = block
    got = attend(q, k, v, mask)
    expected = attend(q, k, v, want[:, None])
    real = ~padding[:, None, :, None]
    torch.testing.assert_close(got * real, expected * real)


@pytest.mark.parametrize("length", [1, 2, 7, 600, 1100])
@pytest.mark.parametrize(("window", "past"), [(0, 0), (1, 1), (5, 3), (5, 5), (300, 300)])
def test_band_is_the_same_for_all_rows(length, window, past):
    q = torch.randn(2, 1, length, 8)
    k, v = torch.randn(2, 2, 1, past + length, 8)
    plain = attend(q, k, v, WindowMask.build(window, length, past))
    rows = attend(q, k, v, WindowMask.build(window, length, past, resets=torch.zeros(2, length, dtype=torch.bool)))
    behind = torch.arange(length)[:, None] + past - torch.arange(past + length)
    dense = attend(q, k, v, (behind >= 0) & (behind <= window))
    torch.testing.assert_close(plain, dense)
    torch.testing.assert_close(rows, dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_a_query_with_nothing_to_see_gets_zeros_and_no_nan(dtype, dropout_p):
    q, k, v = (torch.randn(2, 1, n, 8, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
    allowed = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril(2)
    allowed[0, :, 2] = False
    allowed[1] = False
    out = attend(q, k, v, allowed, dropout_p)
    out.float().sum().backward()
    assert out[0, :, 2].abs().max() == 0
    assert out[1].abs().max() == 0
    for tensor in (out, q.grad, k.grad, v.grad):
        assert not tensor.isnan().any()


def test_a_negative_window_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        WindowMask.build(-1, 4)


def test_blocks_are_longer_where_each_has_to_be_launched():
    lengths = [len(WindowMask.build(64, 1024, device=device).blocks) for device in ("cpu", "meta")]
    assert lengths == [8, 2]
