"""The operator as torch's tools see it, and what it refuses."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.cases import compiled, make, run
from undertow import ops

BACKENDS = ["reference", *(["cpu"] if compiled else [])]
EVERY_OPTION = ("tanh", "scale", "dropout", "padding", "resets", "reverse")


@pytest.fixture(params=BACKENDS, autouse=True)
def _backend(request):
    with ops.backend(request.param):
        yield


def positional(case):
    """The operator's arguments for a call."""
    i, o = case.inputs, case.options
    return (
        i["u"], i.get("x"), i["weight"], i["bias"], i.get("c0"), o.get("activation") == "tanh", o.get("scale", 1.0),
        o.get("dropout_mask"), o.get("padding_mask"), o.get("resets"), o.get("reverse", False),
    )  # fmt: skip


@pytest.mark.parametrize("wanted", [(), ("k4", "no c0"), ("noskip",), EVERY_OPTION], ids="+".join)
@pytest.mark.parametrize("T", [0, 1, 37])
def test_opcheck(wanted, T):
    case = make(2, T, 5, *wanted)
    arguments = positional(case)
    operator = torch.ops.undertow.recurrence.default
    h, c, saved = operator(*arguments)
    torch.library.opcheck(
        torch.ops.undertow.recurrence_backward.default,
        (torch.randn_like(h), torch.randn_like(c), *arguments[:5], saved, *arguments[5:]),
    )
    for a in case.inputs.values():
        a.requires_grad_()
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("wanted", [(), ("k4", "no c0"), EVERY_OPTION], ids="+".join)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole_forward_and_backward(wanted, dynamic):
    case = make(2, 37, 5, *wanted)
    expected = run(case)
    torch.compiler.reset()
    f = torch.compile(
        lambda inputs: ops.recurrence(**{"x": None, **inputs}, **case.options),
        fullgraph=True, dynamic=dynamic, backend="aot_eager",
    )  # fmt: skip
    case.call = f  # type: ignore[method-assign]
    found = run(case)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler needs g++")
def test_compiled_by_inductor():
    if ops.backend_info().name == "reference":
        pytest.skip("once is enough: the operator is the same")
    case = make(2, 37, 16)
    torch.compiler.reset()

    @torch.compile(fullgraph=True)
    def f(inputs):
        h, c = ops.recurrence(inputs["u"] * 2, inputs["x"].sin(), inputs["weight"], inputs["bias"])
        return h.relu() + 1, c

    leaves, others = case.leaves(), case.leaves()
    h, c = f(leaves)
    (h.sum() + c.sum()).backward()
    expected_h, expected_c = ops.recurrence(2 * others["u"], others["x"].sin(), others["weight"], others["bias"])
    (expected_h.relu().sum() + expected_c.sum()).backward()
    torch.testing.assert_close(h, expected_h.relu() + 1)
    for name in ("u", "x", "weight", "bias"):
        torch.testing.assert_close(leaves[name].grad, others[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_batch_and_length_left_open(strict):
    class Model(torch.nn.Module):
        def forward(self, u, x, weight, bias, c0):
            return ops.recurrence(u, x, weight, bias, c0, activation="tanh")

    case = make(3, 20, 5)
    B, T = torch.export.Dim("B"), torch.export.Dim("T")
    program = torch.export.export(
        Model(), tuple(case.inputs.values()), dynamic_shapes=({0: B, 1: T}, {0: B, 1: T}, None, None, {0: B}),
        strict=strict,
    )  # fmt: skip
    assert any(node.target is torch.ops.undertow.recurrence.default for node in program.graph.nodes)
    for B, T in ((3, 20), (5, 70), (2, 3)):
        other = make(B, T, 5, "tanh", seed=2)
        h, c = program.module()(*other.inputs.values())
        expected_h, expected_c = other.call()
        assert torch.equal(h, expected_h)
        assert torch.equal(c, expected_c)


def test_autocast_casts_what_flows_and_leaves_parameters_and_state():
    case = make(2, 20, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = case.leaves()
        h, c = case.call(leaves)
    assert (h.dtype, c.dtype) == (torch.bfloat16, torch.float32)
    (h.float().sum() + c.sum()).backward()
    assert all(a.grad.dtype is torch.float32 for a in leaves.values())
    case.inputs["u"], case.inputs["x"] = case.inputs["u"].bfloat16(), case.inputs["x"].bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(case.call(), (h, c), strict=True))
    # One of the two cast already (a linear layer's output, say) and the other not: fits too.
    mixed = make(2, 20, 8)
    mixed.inputs["u"] = mixed.inputs["u"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixed.call()[0], h)


def test_autocast_inside_a_compiled_function():
    case = make(2, 20, 8)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.recurrence(**inputs)

    h, c = f(case.inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = case.call()
    assert torch.equal(h, expected[0])
    assert torch.equal(c, expected[1])


# By hand, for 2 * 3 * 5 = 30 steps of units. Forward: a gate's sum is * + + (3) and its sigmoid exp + / (3), twice;
# c = u0 + f (c - u0) is 3, h = x + r (g - x) is 3, or r g, 1, without the highway. Backward: gates and c anew are 15;
# then dh r, dc +, 1 - f, dc (1 - f), (c - u0) f, its product with du0, dh r (g - x), 1 - r, their product: 9;
# dc f + du1 v + du2 v: 5; two weights' products and sums and two biases' sums: 6; g - x and dh - dh r: 2.
@pytest.mark.parametrize(
    ("wanted", "forward", "backward"),
    [
        ((), 18, 37),
        (("k4",), 18, 37),
        (("noskip",), 16, 35),
        (("tanh",), 19, 41),
        (("dropout",), 19, 38),
        (("scale",), 19, 39),
        (("padding", "resets", "reverse"), 18, 37),
        (("tanh", "dropout", "scale"), 21, 44),
    ],
)
def test_flops_are_those_counted_by_hand(wanted, forward, backward):
    case = make(2, 3, 5, *wanted)
    leaves = case.leaves()
    with FlopCounterMode(display=False) as counter:
        h, _ = case.call(leaves)
        assert counter.get_total_flops() == 30 * forward
        h.sum().backward()
        assert counter.get_total_flops() == 30 * (forward + backward)


def test_meta_tensors_give_shapes():
    case = make(2, 20, 8, dtype=torch.bfloat16)
    h, c = ops.recurrence(**{name: a.to("meta") for name, a in case.inputs.items()})
    assert (h.shape, h.dtype, h.device.type) == ((2, 20, 8), torch.bfloat16, "meta")
    assert (c.shape, c.dtype) == ((2, 8), torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"u": torch.zeros(2, 20, 8)}, ValueError, "u: expected shape (B, T, 3 or 4, d), got (2, 20, 8)"),
        ({"u": torch.zeros(2, 20, 5, 8)}, ValueError, "u: expected shape (B, T, 3 or 4, d), got (2, 20, 5, 8)"),
        ({"u": torch.zeros(2, 20, 3, 8, dtype=torch.int64)}, TypeError, "u: expected float32"),
        ({"x": torch.zeros(2, 21, 8)}, ValueError, "x: expected shape (2, 20, 8) beside u of shape (2, 20, 3, 8), got"),
        ({"x": torch.zeros(2, 20, 8).bfloat16()}, TypeError, "x: expected torch.float32 beside u of torch.float32"),
        ({"x": None}, ValueError, "x: with k = 3 and skip=True the highway needs x of shape (B, T, d), got None"),
        ({"skip": False}, ValueError, "x: expected None with skip=False"),
        ({"u": torch.zeros(2, 20, 4, 8)}, ValueError, "with k = 4 the highway carries u's fourth part"),
        ({"weight": torch.zeros(8, 2)}, ValueError, "weight: expected shape (2, 8)"),
        ({"bias": torch.zeros(2, 8).double()}, TypeError, "bias: expected torch.float32 beside u"),
        ({"c0": torch.zeros(1, 8)}, ValueError, "c0: expected shape (2, 8)"),
        ({"c0": torch.zeros(2, 8, device="meta")}, ValueError, "c0: expected on cpu, where u is, got meta"),
        ({"padding_mask": torch.zeros(2, 20)}, TypeError, "padding_mask: expected torch.bool"),
        ({"resets": torch.zeros(20, 2).bool()}, ValueError, "resets: expected shape (2, 20)"),
        ({"dropout_mask": torch.zeros(2, 1, 8)}, ValueError, "dropout_mask: expected shape (2, 8)"),
        ({"dropout_mask": torch.zeros(2, 8, requires_grad=True)}, ValueError, "needs no gradient"),
        ({"activation": "relu"}, ValueError, "activation: expected one of 'identity', 'tanh', got 'relu'"),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_expected(change, error, message):
    inputs = {**make(2, 20, 8).inputs, **change}
    with pytest.raises(error, match=re.escape(message)):
        ops.recurrence(**inputs)
