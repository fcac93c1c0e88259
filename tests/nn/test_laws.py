"""The laws of the layers: a cut changes nothing, padding never matters, rows do not mix."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.testing import assert_close

from undertow.nn import SRU, SRUCell, SRUpp, SRUppCell, SRUppState

few = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
TIGHT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def shaken(layer: Any) -> Any:
    """No parameter at zero or one, so that attention, norms and gates all matter."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer.eval()


@st.composite
def layers(draw: st.DrawFn, bidirectional: bool = False) -> SRU | SRUpp:
    """A small layer of any kind, in float64."""
    torch.manual_seed(draw(st.integers(0, 999)))
    common: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 3)),
        "batch_first": True,
        "layer_norm": draw(st.sampled_from(["none", "before", "after"])),
        "activation": draw(st.sampled_from(["identity", "tanh"])),
        "skip": draw(st.booleans()),
        "project_input_first": draw(st.booleans()),
        "bidirectional": bidirectional,
        "dtype": torch.float64,
    }
    d_in = draw(st.sampled_from([3, 4]))
    if draw(st.booleans()):
        return shaken(SRU(d_in, 4, projection_size=draw(st.sampled_from([0, 2])), **common))
    window = None if bidirectional else draw(st.sampled_from([None, 1, 2, 3, 5, 20]))
    every = draw(st.sampled_from([1, 2]))
    return shaken(SRUpp(d_in, 4, 4, num_heads=2, attention_window=window, attention_every=every, **common))


def chosen(draw: st.DrawFn, *shape: int, share: float = 0.25) -> Tensor | None:
    """A mask with about that share of true, or none at all."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return torch.rand(*shape, generator=generator) < share if draw(st.booleans()) else None


def cut(mask: Tensor | None, a: int, b: int) -> Tensor | None:
    return None if mask is None else mask[:, a:b]


def carried(state: SRUppState | Tensor) -> Tensor:
    return state if isinstance(state, Tensor) else state.c


@few
@given(layer=layers(), data=st.data())
def test_a_text_cut_anywhere_gives_the_same_numbers(layer: SRU | SRUpp, data: st.DataObject) -> None:
    T, B = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 3))
    x = torch.randn(B, T, layer.input_size, dtype=torch.float64)
    padding, resets = chosen(data.draw, B, T), chosen(data.draw, B, T)
    cuts = sorted({0, T, *data.draw(st.lists(st.integers(1, T - 1), max_size=T))})

    whole, end = layer(x, padding_mask=padding, resets=resets)
    pieces, state = [], None
    for a, b in pairwise(cuts):
        piece, state = layer(x[:, a:b], state, padding_mask=cut(padding, a, b), resets=cut(resets, a, b))
        pieces.append(piece)
    assert_close(torch.cat(pieces, dim=1), whole, **TIGHT)
    assert_close(carried(state), carried(end), **TIGHT)


@few
@given(layer=layers(), data=st.data())
def test_a_cut_leaves_the_gradients_alone_too(layer: SRU | SRUpp, data: st.DataObject) -> None:
    T = data.draw(st.integers(2, 8))
    x = torch.randn(2, T, layer.input_size, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, T, layer.output_size, dtype=torch.float64)
    resets = chosen(data.draw, 2, T)
    at = data.draw(st.integers(1, T - 1))
    wanted = [x, *layer.parameters()]
    whole, _ = layer(x, resets=resets)
    expected = torch.autograd.grad((whole * w).sum(), wanted, materialize_grads=True)
    first, state = layer(x[:, :at], resets=cut(resets, 0, at))
    second, _ = layer(x[:, at:], state, resets=cut(resets, at, T))
    got = torch.autograd.grad((torch.cat([first, second], dim=1) * w).sum(), wanted, materialize_grads=True)
    assert_close(got, expected, **TIGHT)


@few
@given(layer=layers(), data=st.data())
def test_the_state_of_a_window_stays_small(layer: SRU | SRUpp, data: st.DataObject) -> None:
    state = None
    padding, resets = chosen(data.draw, 2, 9), chosen(data.draw, 2, 9)
    for _ in range(3):
        _, state = layer(torch.randn(2, 9, layer.input_size).double(), state, padding_mask=padding, resets=resets)
    if isinstance(layer, SRUpp) and layer.attention_window is not None and state.memory is not None:
        assert all(m is None or m.shape[1] == min(27, layer.attention_window) for m in state.memory)


@few
@given(layer=st.booleans().flatmap(layers), data=st.data())
def test_padding_contents_never_matter(layer: SRU | SRUpp, data: st.DataObject) -> None:
    """Values, resets at padding, NaN: outputs, state and gradients are the same, and a second piece sees none of it."""
    T, B = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    padding = torch.rand(B, T) < data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    x, later = (torch.randn(B, T, layer.input_size, dtype=torch.float64) for _ in range(2))
    poison = data.draw(st.sampled_from([float("nan"), float("inf"), 1e200]))
    resets = chosen(data.draw, B, T)
    results = []
    for value, at_padding in ((0.0, False), (poison, True)):
        x_i = x.masked_fill(padding[..., None], value).requires_grad_()
        resets_i = None if resets is None else torch.where(padding, torch.tensor(at_padding), resets)
        h, state = layer(x_i, padding_mask=padding, resets=resets_i)
        h2, state2 = layer(later, state)
        grads = torch.autograd.grad(h.sum() + h2.square().sum(), [x_i, *layer.parameters()], materialize_grads=True)
        assert h.masked_select(padding[..., None]).eq(0).all()
        results.append((h, h2, carried(state), carried(state2), *grads))
    for clean, poisoned in zip(*results, strict=True):
        assert not poisoned.isnan().any()
        assert_close(poisoned, clean, **TIGHT)


@few
@given(layer=layers(), data=st.data())
def test_padding_takes_no_place(layer: SRU | SRUpp, data: st.DataObject) -> None:
    """However a row is padded, left, right or in between, over however many pieces, it reads as if it were not."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3))
    texts = [torch.randn(n, layer.input_size, dtype=torch.float64) for n in lengths]
    T = data.draw(st.integers(max(lengths), 10))
    x, padding = torch.full((len(texts), T, layer.input_size), float("nan")).double(), torch.ones(len(texts), T).bool()
    for row, text in enumerate(texts):
        places = sorted(data.draw(st.permutations(range(T)))[: len(text)])
        x[row, places], padding[row, places] = text, False
    at = data.draw(st.integers(1, T))
    out, state = layer(x[:, :at], padding_mask=padding[:, :at])
    if at < T:
        rest, state = layer(x[:, at:], state, padding_mask=padding[:, at:])
        out = torch.cat([out, rest], dim=1)
    for row, text in enumerate(texts):
        alone, end = layer(text)
        assert_close(out[row][~padding[row]], alone, **TIGHT)
        assert_close(carried(state)[:, row], carried(end), **TIGHT)


@few
@given(layer=st.booleans().flatmap(layers), data=st.data())
def test_rows_do_not_mix(layer: SRU | SRUpp, data: st.DataObject) -> None:
    T, B = data.draw(st.integers(1, 8)), data.draw(st.integers(2, 4))
    x = torch.randn(B, T, layer.input_size, dtype=torch.float64)
    padding, resets = chosen(data.draw, B, T), chosen(data.draw, B, T)
    h, state = layer(x, padding_mask=padding, resets=resets)
    row = data.draw(st.integers(0, B - 1))
    alone = slice(row, row + 1)
    h1, state1 = layer(
        x[alone],
        padding_mask=None if padding is None else padding[alone],
        resets=None if resets is None else resets[alone],
    )
    assert_close(h1, h[alone], **TIGHT)
    assert_close(carried(state1), carried(state)[:, alone], **TIGHT)


@few
@given(layer=st.booleans().flatmap(layers), data=st.data())
def test_documents_do_not_see_each_other(layer: SRU | SRUpp, data: st.DataObject) -> None:
    """Packed documents, in either direction, read as each would alone."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    documents = [torch.randn(n, layer.input_size, dtype=torch.float64) for n in lengths]
    resets = torch.zeros(1, sum(lengths), dtype=torch.bool)
    resets[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    before = torch.randn(layer.num_layers * layer.num_directions, 1, layer.hidden_size, dtype=torch.float64)
    # Read forward, nothing of the state survives the first reset; read backward it belongs to the last document.
    state = before if not layer.bidirectional else None
    packed, _ = layer(torch.cat(documents)[None], state, resets=resets)
    assert_close(packed[0], torch.cat([layer(document)[0] for document in documents]), **TIGHT)


@few
@given(layer=st.booleans().flatmap(layers), data=st.data())
def test_packed_rows_read_as_each_would_alone(layer: SRU | SRUpp, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    rows = [torch.randn(n, layer.input_size, dtype=torch.float64) for n in lengths]
    out, state = layer(pack_sequence(rows, enforce_sorted=False))
    padded, out_lengths = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert out_lengths.tolist() == lengths
    for i, row in enumerate(rows):
        alone, end = layer(row)
        assert_close(padded[i, : len(row)], alone, **TIGHT)
        assert_close(carried(state)[:, i], carried(end), **TIGHT)


@pytest.mark.parametrize("form", ["memory", "past"])
def test_a_cell_goes_on_from_keys_and_values_or_from_inputs(form: str) -> None:
    torch.manual_seed(0)
    cell = shaken(SRUppCell(6, 6, 4, num_heads=2, layer_norm="before").double())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    whole, c, _ = cell(x)
    first, c1, kv = cell(x[:, :4])
    second, c2, _ = cell(x[:, 4:], c1, **({"memory": x[:, :4]} if form == "memory" else {"past": kv}))
    assert_close(torch.cat([first, second], dim=1), whole, **TIGHT)
    assert_close(c2, c, **TIGHT)


@pytest.mark.parametrize("make", [lambda: SRUCell(4, 4), lambda: SRUppCell(4, 4, 4)])
def test_a_cell_ignores_what_stands_at_padding(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    cell = shaken(make().double())
    x, padding = torch.randn(2, 6, 4, dtype=torch.float64), torch.tensor([[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]]) > 0
    resets = torch.tensor([[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]) > 0
    clean = cell(x, padding_mask=padding, resets=resets)[:2]
    poisoned = cell(x.masked_fill(padding[..., None], torch.nan), padding_mask=padding, resets=resets | padding)[:2]
    assert_close(poisoned, clean, **TIGHT)


def test_memory_without_its_norm_is_the_named_exception() -> None:
    torch.manual_seed(0)
    layer = shaken(SRUpp(4, 4, 4, layer_norm="before", normalize_memory=False, batch_first=True, dtype=torch.float64))
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    _, state = layer(x[:, :3])
    assert not torch.allclose(layer(x[:, 3:], state)[0], layer(x)[0][:, 3:])


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_query_with_nothing_to_see_gets_zeros(additive: bool, training: bool) -> None:
    torch.manual_seed(0)
    layer = shaken(SRUpp(4, 4, 4, batch_first=True, attention_dropout=0.1, dtype=torch.float64)).train(training)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[2] = False
    h, _ = layer(x, mask=torch.zeros(5, 5).double().masked_fill(~mask, -torch.inf) if additive else mask)
    h.sum().backward()
    assert not h.isnan().any()
    assert not any(p.grad.isnan().any() for p in [x, *layer.parameters()])
    if not training:
        with torch.no_grad():
            layer.layers[0].alpha.zero_()
            assert_close(layer(x, mask=mask)[0][:, 2], layer(x)[0][:, 2])  # as without attention


@pytest.mark.parametrize("kind", ["memory", "padding"])
def test_bfloat16_cut_or_whole(kind: str) -> None:
    """The recurrent state is float32, so that a cut rounds nothing away."""
    torch.manual_seed(0)
    layer = shaken(SRUpp(8, 8, 4, num_layers=2, attention_window=3, batch_first=True)).bfloat16()
    x = torch.randn(2, 12, 8).bfloat16()
    whole, end = layer(x)
    first, state = layer(x[:, :5])
    second, last = layer(x[:, 5:], state)
    assert end.c.dtype == torch.float32
    assert whole.dtype == torch.bfloat16
    assert_close(torch.cat([first, second], dim=1), whole, rtol=2e-2, atol=2e-2)
    assert_close(last.c, end.c, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_no_more_is_remembered_than_the_window(window: int, padded: bool) -> None:
    layers, state = SRUpp(4, 4, 2, attention_window=window), None
    for _ in range(3):
        padding = torch.rand(5, 2) < 0.4 if padded else None
        _, state = layers(torch.randn(5, 2, 4), state, padding_mask=padding)
    assert state is not None
    assert [m.shape[1] for m in state.memory if m is not None] == [window]
