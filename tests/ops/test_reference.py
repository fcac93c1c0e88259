"""The definition itself: against single numbers, and differentiated by finite differences."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops.cases import OPTIONS, make, run, scalar
from undertow import ops
from undertow.ops import reference

PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) != {"k4", "noskip"}]


def plain(case, inputs=None):
    """Torch's own differentiation of the definition, without the operator."""
    return reference.recurrence(**{"x": None, **(inputs or case.inputs)}, **case.options)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_of_options_gives_the_equations_numbers(pair):
    case = make(2, 7, 3, *pair, dtype=torch.float64)
    h, c = plain(case)
    expected_h, expected_c = scalar(case)
    torch.testing.assert_close(h, torch.tensor(expected_h, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(c, torch.tensor(expected_c, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_the_gradients_written_out_are_those_that_torch_finds(pair):
    case = make(2, 19, 3, *pair, dtype=torch.float64)
    leaves = case.leaves()
    h, c = plain(case, leaves)
    g = torch.Generator().manual_seed(1)
    torch.autograd.backward([h, c], [torch.randn(a.shape, generator=g).bfloat16().double() for a in (h, c)])
    with ops.backend("reference"):
        found = run(case)
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[f"grad {name}"], leaf.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", [OPTIONS[:1], *((o,) for o in OPTIONS[1:]), ("tanh", "padding", "resets", "reverse"),
                                    ("scale", "dropout", "padding", "resets", "no c0")], ids="+".join)  # fmt: skip
@pytest.mark.parametrize("of", ["definition", "operator"])
def test_first_and_second_derivatives_by_finite_differences(wanted, of):
    case = make(2, 3, 2, *wanted, dtype=torch.float64)
    names = list(case.inputs)

    def f(*inputs):
        named = dict(zip(names, inputs, strict=True))
        return plain(case, named) if of == "definition" else case.call(named)

    leaves = tuple(case.leaves().values())
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


def test_a_second_derivative_does_not_count_what_u_was_made_from_twice():
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(2, 2, 3, dtype=torch.float64)

    def f(x, w):
        return ops.recurrence((x @ w).view(2, 5, 3, 3), x, weight, bias)

    assert torch.autograd.gradgradcheck(f, (x, w))


def test_half_precision_is_computed_in_float32():
    case = make(2, 9, 5, "no c0", dtype=torch.bfloat16)
    h, c = plain(case)
    wide_h, wide_c = plain(case.to(torch.float32))
    assert h.dtype is torch.bfloat16
    assert c.dtype is torch.float32
    assert torch.equal(h, wide_h.bfloat16())
    assert torch.equal(c, wide_c)
