"""Used like `torch.nn.LSTM`: the same arguments, shapes, states and packed sequences; plain errors; initial values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.testing import assert_close

from undertow.nn import SRU, SRUCell, SRUpp, SRUppCell, SRUppState, WindowMask


def sru(d_in: int, d: int, **options: Any) -> SRU:
    return SRU(d_in, d, **options)


def srupp(d_in: int, d: int, **options: Any) -> SRUpp:
    return SRUpp(d_in, d, 4, **options)


both = pytest.mark.parametrize("make", [sru, srupp])
Make = Callable[..., Any]


def carried(state: Any) -> Tensor:
    return state.c if isinstance(state, SRUppState) else state


@pytest.mark.parametrize("layer", [SRU, SRUpp])
def test_the_arguments_of_lstm_come_in_its_order(layer: type) -> None:
    names = ["num_layers", "bias", "batch_first", "dropout", "bidirectional"]
    parameters = inspect.signature(layer).parameters
    assert [name for name in parameters if name in names] == names
    lstm = nn.LSTM(2, 3)
    for name in names:
        assert parameters[name].default == getattr(lstm, name), name


@both
@pytest.mark.parametrize("form", ["batch", "single", "packed", "packed sorted"])
@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_shapes_are_those_of_an_rnn(
    make: Make, form: str, given_state: bool, bias: bool, bidirectional: bool, batch_first: bool, num_layers: int
) -> None:
    torch.manual_seed(0)
    options = {"num_layers": num_layers, "bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    gru, layer = nn.GRU(3, 5, **options), make(3, 5, **options)
    lengths = [4, 3, 1] if form == "packed sorted" else [3, 4, 1]
    inputs = {
        "batch": torch.randn(3, 4, 3),
        "single": torch.randn(4, 3),
        "packed": pack_sequence([torch.randn(n, 3) for n in lengths], enforce_sorted=False),
        "packed sorted": pack_sequence([torch.randn(n, 3) for n in lengths]) if form == "packed sorted" else None,
    }
    x = inputs[form]
    state = None
    if given_state:
        rows = () if form == "single" else (4 if form == "batch" and not batch_first else 3,)
        state = torch.randn(num_layers * (2 if bidirectional else 1), *rows, 5)
    expected, expected_state = gru(x, state)
    got, got_state = layer(x, state)
    assert type(got) is type(expected)
    assert carried(got_state).shape == expected_state.shape
    if isinstance(x, Tensor):
        assert got.shape == expected.shape
    else:
        assert got.data.shape == expected.data.shape
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            ours, theirs = getattr(got, name), getattr(expected, name)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), name


@both
def test_the_order_of_layers_and_directions_in_the_state(make: Make) -> None:
    """Where h = c, the state's last two entries are the output's last step forward and its first one in reverse."""
    torch.manual_seed(0)
    layer = make(6, 3, num_layers=2, bidirectional=True, skip=False)
    with torch.no_grad():
        for cell in layer.layers:
            cell.bias[1] = 1e4  # r = 1, so h = c
    out, state = layer(torch.randn(5, 2, 6))
    c = carried(state)
    assert_close(out[-1, :, :3], c[2])
    assert_close(out[0, :, 3:], c[3])


@both
def test_a_state_given_in_reaches_its_own_row_of_a_packed_batch(make: Make) -> None:
    torch.manual_seed(0)
    layer = make(3, 5, num_layers=2, bidirectional=True)
    rows = [torch.randn(n, 3) for n in (2, 4, 3)]
    state = torch.randn(4, 3, 5)
    _, end = layer(pack_sequence(rows, enforce_sorted=False), state)
    for i, row in enumerate(rows):
        assert_close(carried(end)[:, i], carried(layer(row, state[:, i])[1]))


def test_the_state_of_a_single_text_can_be_given_back() -> None:
    layer = SRUpp(3, 5, 4, num_layers=2, attention_window=2)
    _, state = layer(torch.randn(4, 3))
    assert layer(torch.randn(4, 3), state)[0].shape == (4, 5)


def test_the_state_does_not_change_when_the_caller_reuses_his_buffer() -> None:
    torch.manual_seed(0)
    layer = SRUpp(4, 4, 4, alpha_init=1.0).eval()
    buffer, later = torch.randn(3, 1, 4), torch.randn(2, 1, 4)
    with torch.no_grad():
        _, state = layer(buffer)
        expected, _ = layer(later, state)
        buffer.fill_(7.0)
        assert_close(layer(later, state)[0], expected)


def test_attention_every_or_last() -> None:
    def layers(**options: Any) -> list[bool]:
        return [cell.attention for cell in SRUpp(4, 4, 4, num_layers=5, **options).layers]

    assert layers() == [True] * 5
    assert layers(attention_every=2) == [False, True, False, True, False]
    assert layers(attention_last=2) == [False, False, False, True, True]
    assert layers(attention_last=0) == [False] * 5
    layer = SRUpp(4, 4, 4, num_layers=5, attention_every=2)
    _, state = layer(torch.randn(3, 1, 4))
    assert [m is not None for m in state.memory] == [False, True, False, True, False]
    assert SRUpp(4, 4, 4, attention_last=0)(torch.randn(3, 1, 4))[1].memory is None


def test_a_state_cut_off_from_the_graph() -> None:
    layer = SRUpp(4, 4, 4, num_layers=2, attention_every=2)
    state = layer(torch.randn(3, 1, 4))[1].detach()
    assert not state.c.requires_grad
    assert not any(m.requires_grad for m in state.memory if m is not None)
    layer(torch.randn(3, 1, 4), state)[0].sum().backward()  # through the second piece only


def test_the_parameters_by_name() -> None:
    shapes = {name: tuple(p.shape) for name, p in SRUppCell(5, 6, 4, layer_norm="before").named_parameters()}
    assert shapes == {
        "weight_c": (2, 6),
        "bias": (2, 6),
        "alpha": (1,),
        "down_proj.weight": (4, 5),
        "kv_proj.weight": (8, 4),
        "up_proj.weight": (24, 4),
        "norm.weight": (4,),
        "norm.bias": (4,),
        "layer_norm.weight": (5,),
        "layer_norm.bias": (5,),
    }
    assert not {"kv_proj.weight", "alpha"} & set(SRUppCell(5, 6, 4, attention=False).state_dict())
    assert set(SRUCell(5, 6, projection_size=2).state_dict()) == {
        "weight_c",
        "bias",
        "down_proj.weight",
        "up_proj.weight",
    }


def test_initial_values() -> None:
    torch.manual_seed(0)
    d, p = 64, 48
    cell = SRUppCell(d, d, p, dropout=0.36)

    def is_uniform(tensor: Tensor, bound: float) -> None:
        assert tensor.abs().max() <= bound
        assert_close(tensor.std().item(), bound / math.sqrt(3), rtol=0.08, atol=0)

    is_uniform(cell.weight_c, 1.0)
    is_uniform(cell.down_proj.weight, math.sqrt(6 / (d + p)))
    is_uniform(cell.kv_proj.weight, math.sqrt(6 / (p + 2 * p)))
    is_uniform(cell.up_proj.weight, math.sqrt(6 / (p + 3 * d)) * 0.8)  # sqrt(1 - 0.36)
    assert_close(cell.bias, torch.tensor([[0.0], [-2.0]]).expand(2, d))
    assert cell.alpha.item() == 0
    assert SRU(4, 4).layers[0].bias.abs().max() == 0
    is_uniform(SRUCell(d, d, weight_c_init=0.5).weight_c, 0.5)
    is_uniform(SRUpp(d, 2 * d, p, project_input_first=True).input_proj.weight, math.sqrt(6 / (3 * d)))
    assert SRUCell(4, 4, rescale=True, highway_bias=-1.0).scale == math.sqrt(1 + 2 * math.exp(-1))
    assert SRUCell(3, 4, rescale=True).scale == 1  # the fourth part of u needs none


def test_without_biases_the_gates_keep_their_first_ones() -> None:
    layer = SRUpp(4, 4, 4, bias=False)
    assert "layers.0.bias" not in dict(layer.named_parameters())
    assert_close(layer.layers[0].bias, torch.tensor([[0.0], [-2.0]]).expand(2, 4))
    fresh = SRUpp(4, 4, 4, bias=False, highway_bias=3.0)
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(3, 1, 4)
    assert_close(fresh(x)[0], layer(x)[0])


def test_dropout_is_one_mask_a_row_on_what_the_highway_adds() -> None:
    torch.manual_seed(0)
    layer = SRU(64, 64, num_layers=2, dropout=0.5)
    x = torch.randn(9, 3, 64)
    seen = []
    layer.layers[0].register_forward_hook(lambda _, __, out: seen.append(out[0]))
    layer(x)
    layer.eval()(x)
    (dropped, plain), x = seen, x.transpose(0, 1)
    kept = (dropped != x).any(1)  # (B, 64)
    assert_close(dropped, torch.where(kept[:, None], x + 2 * (plain - x), x))
    assert 0.3 < kept.float().mean() < 0.7
    assert not torch.equal(kept[0], kept[1])
    assert layer.layers[1].highway_dropout == 0  # none in the last layer


def test_variational_dropout_is_one_mask_a_row_on_the_input() -> None:
    torch.manual_seed(0)
    cell = SRUCell(64, 4, variational_dropout=0.5)
    x = torch.randn(3, 9, 64)
    seen: list[Tensor] = []
    cell.up_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    cell(x)
    ratio = seen[0] / x
    assert_close(ratio, ratio[:, :1].expand_as(ratio))
    assert set(ratio.unique().round().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("place", ["dropout", "attention_dropout"])
def test_ordinary_dropout_in_training_only(place: str) -> None:
    torch.manual_seed(0)
    layer = SRUpp(8, 8, 4, alpha_init=1.0, **{place: 0.5})
    x = torch.randn(5, 2, 8)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


POST_NORM: dict[str, Any] = {"layer_norm": "after", "rescale": True, "highway_bias": 0.0, "batch_first": True}
"""The setting with which sru's users met NaN after hours of training."""


@pytest.mark.parametrize("bidirectional", [False, True])
def test_leading_zeros_do_not_blow_up_a_post_norm_stack(bidirectional: bool) -> None:
    """Left padding or silence: h = 0 in every unit, where the norm's slope is 1 / sqrt(eps), 316 a layer."""
    torch.manual_seed(0)
    layer = SRU(8, 4 if bidirectional else 8, num_layers=20, bidirectional=bidirectional, **POST_NORM)
    x = torch.randn(2, 12, 8)
    x[1, :6] = 0
    x.requires_grad_()
    w = torch.randn(2, 12, 8)
    grads = torch.autograd.grad((layer(x)[0] * w).sum(), [x, *layer.parameters()])
    assert max(g.abs().max() for g in grads) < 1e4


def test_a_post_norm_stack_stays_finite_at_the_extremes() -> None:
    """Huge and constant inputs, saturated gates, long texts."""
    torch.manual_seed(0)
    layer = SRU(6, 3, num_layers=4, bidirectional=True, **POST_NORM)
    x = torch.randn(4, 700, 6)
    x[0] = 0
    x[1, 100:] = 0
    x[2] *= 1e4
    x[3] = x[3, :1]
    x.requires_grad_()
    for grown in (1.0, 30.0):
        with torch.no_grad():
            for cell in layer.layers:
                cell.up_proj.weight *= grown
                cell.weight_c *= grown
        h, c = layer(x)
        grads = torch.autograd.grad(h.square().sum() + c.square().sum(), [x, *layer.parameters()])
        assert h.isfinite().all()
        assert c.isfinite().all()
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_equations_as_written(bidirectional: bool) -> None:
    """A cell of SRU++ against its docstring, position by position."""
    torch.manual_seed(0)
    B, T, d, p = 2, 5, 3, 4
    D = 2 if bidirectional else 1
    cell = SRUppCell(D * d, d, p, alpha_init=0.7, bidirectional=bidirectional).double()
    x = torch.randn(B, T, D * d, dtype=torch.float64)
    W1, W2, W3 = cell.down_proj.weight, cell.kv_proj.weight, cell.up_proj.weight
    h = torch.zeros(B, T, D * d, dtype=torch.float64)
    for b in range(B):
        z = [W1 @ x[b, t] for t in range(T)]
        k, v = zip(*((W2 @ z_t).chunk(2) for z_t in z), strict=True)
        u = []
        for t in range(T):
            seen = range(T) if bidirectional else range(t + 1)
            weights = torch.stack([z[t] @ k[s] / math.sqrt(p) for s in seen]).softmax(0)
            a = sum(weights[i] * v[s] for i, s in enumerate(seen))
            u.append(W3 @ nn.functional.layer_norm(z[t] + cell.alpha * a, (p,)))
        for i in range(D):
            mine = slice(i * d, (i + 1) * d)
            (vf, vr), (bf, br) = cell.weight_c[:, mine], cell.bias[:, mine]
            c = torch.zeros(d, dtype=torch.float64)
            for t in reversed(range(T)) if i else range(T):
                u0, u1, u2 = u[t][3 * i * d : 3 * (i + 1) * d].chunk(3)
                f, r = torch.sigmoid(u1 + vf * c + bf), torch.sigmoid(u2 + vr * c + br)
                c = f * c + (1 - f) * u0
                h[b, t, mine] = r * c + (1 - r) * x[b, t, mine]
    assert_close(cell(x)[0], h)


@both
def test_every_weight_learns(make: Make) -> None:
    """α starts at zero, so keys and values wait for it; then nothing stands still."""
    torch.manual_seed(0)
    options = {"alpha_init": 0.1} if make is srupp else {}
    layer = make(5, 6, num_layers=2, layer_norm="before", project_input_first=True, **options)
    out, state = layer(torch.randn(7, 2, 5))
    (out.square().sum() + carried(state).sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_what_is_passed_in_stays_as_it_was() -> None:
    torch.manual_seed(0)
    layer = SRUpp(6, 6, 4, 2, attention_window=3, batch_first=True)
    padding, resets = torch.rand(2, 5) < 0.3, torch.rand(2, 5) < 0.3
    _, state = layer(torch.randn(2, 4, 6), resets=torch.rand(2, 4) < 0.3)
    given = [state.c, *state.memory, state.memory_padding_mask, padding, resets, torch.randn(2, 5, 6)]
    before = [tensor.clone() for tensor in given]
    layer(given[-1], state, padding_mask=padding, resets=resets)
    assert_close(given, before)


def test_a_mask_of_four_dimensions_is_one_a_row_and_head() -> None:
    torch.manual_seed(0)
    layer = SRUpp(6, 6, 4, num_heads=2, alpha_init=1.0, batch_first=True)
    x, mask = torch.randn(3, 5, 6), torch.rand(3, 2, 5, 5) < 0.5
    together, _ = layer(x, mask=mask)
    for b in range(3):
        assert_close(together[b : b + 1], layer(x[b : b + 1], mask=mask[b : b + 1])[0])
    swapped, _ = layer(x, mask=mask.flip(1))
    assert not torch.allclose(together, swapped)


X = torch.randn(4, 2, 6)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: SRUpp(6, 6, 5, num_heads=2),
            ValueError,
            "projection_size must be divisible by num_heads, got 5 and 2",
        ),
        (lambda: SRU(0, 6), ValueError, "input_size must be a whole number of at least 1, got 0"),
        (lambda: SRU(6, 6, num_layers=0), ValueError, "num_layers .* got 0"),
        (lambda: SRU(6, 6, dropout=1.5), ValueError, "dropout must be a probability .* got 1.5"),
        (
            lambda: SRU(6, 6, layer_norm="pre"),
            ValueError,
            "layer_norm must be one of 'none', 'before', 'after', got 'pre'",
        ),
        (lambda: SRU(6, 6, activation="relu"), ValueError, "activation must be one of .* got 'relu'"),
        (lambda: SRU(6, 6, 2, projection_size=[1]), ValueError, "projection_size .* num_layers=2 sizes, got 1"),
        (lambda: SRUpp(6, 6, 4, attention_every=2, attention_last=1), ValueError, "exclude each other"),
        (
            lambda: SRUpp(6, 6, 4, attention_last=2),
            ValueError,
            "attention_last must be between 0 and num_layers=1, got 2",
        ),
        (lambda: SRUpp(6, 6, 4, attention_window=0), ValueError, "attention_window .* got 0"),
        (
            lambda: SRUpp(6, 6, 4, attention_window=3, bidirectional=True),
            ValueError,
            "attention_window looks back only",
        ),
        (lambda: SRU(5, 6)(X), ValueError, r"input must have shape \(B, T, input_size=5\), got \(2, 4, 6\)"),
        (lambda: SRU(6, 6)(X[0, 0]), ValueError, "input must have 3 dimensions, or 2"),
        (lambda: SRU(6, 6)(X.double()), TypeError, "input must have dtype torch.float32 .* got torch.float64"),
        (lambda: SRU(6, 6)(X.long()), TypeError, "got torch.int64"),
        (lambda: SRU(6, 6)(X.to("meta")), ValueError, "input is on meta, but the layer's weights are on cpu"),
        (lambda: SRU(6, 6)(X[:0]), ValueError, "at least one position"),
        (
            lambda: SRU(6, 6)(X, torch.zeros(1, 3, 6)),
            ValueError,
            r"state must have shape \(.*1, B=2, .*6\), got \(1, 3, 6\)",
        ),
        (lambda: SRU(6, 6)(X, (torch.zeros(1, 2, 6),) * 2), TypeError, "state must be a tensor, got tuple"),
        (
            lambda: SRU(6, 6)(X, padding_mask=torch.zeros(2, 4) > 0),
            ValueError,
            r"padding_mask must have shape \(4, 2\)",
        ),
        (
            lambda: SRU(6, 6)(X, resets=torch.zeros(4, 2)),
            TypeError,
            "resets must be a boolean tensor, got torch.float32",
        ),
        (
            lambda: SRU(6, 6)(pack_sequence([X[0]]), padding_mask=torch.zeros(1, 2) > 0),
            ValueError,
            "a PackedSequence says itself",
        ),
        (lambda: SRUpp(6, 6, 4)(X, mask=torch.ones(4, 5) > 0), ValueError, r"mask must have shape \(T=4, M\+T=4\)"),
        (lambda: SRUpp(6, 6, 4)(X, mask=torch.ones(4, 4).long()), TypeError, "mask must be bool .* got torch.int64"),
        (lambda: SRUpp(6, 6, 4)(X, memory=[]), ValueError, "memory must hold one entry a layer, 1 of them, got 0"),
        (lambda: SRUpp(6, 6, 4)(X, memory=[X]), ValueError, r"memory must have shape \(B=2, M, input_size=6\), got"),
        (lambda: SRUpp(6, 6, 4)(X, memory_padding_mask=torch.ones(2, 4) > 0), ValueError, "it needs memory"),
        (lambda: SRUppCell(6, 6, 4, attention=False)(X, memory=X), ValueError, "this cell has no attention"),
        (lambda: SRUppCell(6, 6, 4)(X, past=(X, X), memory=X), ValueError, "two forms of the same positions"),
        (
            lambda: SRUppCell(6, 6, 4)(X, mask=WindowMask.build(3, 2, 5)),
            ValueError,
            "built for 5 remembered and 2 new positions, got 0 and 2",
        ),
        (lambda: SRUppCell(6, 6, 4)(X, past=(X, X)), ValueError, r"past keys must have shape \(B=4, H=1, M"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
