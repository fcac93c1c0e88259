"""The C++ kernels against the definition: outputs, final state, every gradient; and the laws they keep bit for bit."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.cases import INSTRUCTION_SETS, OPTIONS, Case, compiled, make, run, scalar
from undertow import ops
from undertow.ops import cpu

pytestmark = pytest.mark.skipif(not compiled, reason="undertow was installed without its compiled part")

PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) != {"k4", "noskip"}]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that nobody has written yet is NaN, so that what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def agree(case: Case) -> None:
    """The kernels against the definition in float64, by the error that the definition makes in float32.

    Stored in bfloat16, a number may also be off by its rounding, half a unit of the last of 8 binary places.
    """
    with ops.backend("cpu"):
        found = run(case)
    with ops.backend("reference"):
        exact = run(case.to(torch.float64))
        single = run(case.to(torch.float32))
    for name, a in found.items():
        stored = case.inputs[name.removeprefix("grad ")].dtype if name.startswith("grad ") else None
        assert a.dtype is (stored or (case.inputs["u"].dtype if name == "h" else torch.float32)), name
        assert a.shape == exact[name].shape, name
        error = (a.double() - exact[name]).abs()
        if not a.numel():
            continue
        allowed = 4 * (single[name].double() - exact[name]).abs().max() + 2e-6 * (1 + exact[name].abs().max())
        if a.dtype is torch.bfloat16:
            allowed = allowed + 2**-8 * exact[name].abs()
        assert (error <= allowed).all(), f"{name}: off by {error.max():.3g} where {allowed.max():.3g} is allowed"


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_of_options(pair, isa):
    with cpu.instruction_set(isa):
        for dtype in DTYPES:
            agree(make(2, 35, 19, *pair, dtype=dtype))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_all_options_at_once(isa):
    with cpu.instruction_set(isa):
        for dtype in DTYPES:
            agree(make(3, 50, 33, "tanh", "scale", "dropout", "padding", "resets", "reverse", dtype=dtype))
            agree(make(3, 50, 33, "k4", "dropout", "padding", "resets", dtype=dtype))


SIZES = [(B, T, d) for B in (1, 7) for T in (1, 2, 63) for d in (1, 3, 17, 500)] + [
    (1, 1024, 1), (7, 1024, 3), (1, 1024, 17), (7, 2, 3072), (1, 63, 3072), (1, 33, 4500),
    (0, 5, 3), (2, 0, 3), (2, 16, 8), (2, 17, 8), (1, 15, 64), (1, 32, 64),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "B{}-T{}-d{}".format(*size))
def test_sizes(size):
    B, T, d = size
    agree(make(B, T, d))
    # Each size in bfloat16 with options that differ from size to size.
    some = [option for i, option in enumerate(OPTIONS[2:]) if (B + T + d) >> i % 4 & 1]
    agree(make(B, T, d, *some, dtype=torch.bfloat16))


def test_the_largest_of_the_grid():
    """d 3072, T 1024: against the definition once, since that takes seconds."""
    agree(make(1, 1024, 3072))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_extreme_inputs_saturate_as_they_should(isa, activation):
    case = make(1, 40, 37, activation, seed=4)
    case.inputs["u"] *= 200
    with cpu.instruction_set(isa):
        found = run(case)
    exact = run(case.to(torch.float64))
    # A gate's sum of large numbers carries their rounding (and a quarter of it goes through the sigmoid), and the gate
    # mixes numbers as large.
    rounding = 2**-26 * case.inputs["u"].abs().max().item() ** 2
    for name in ("h", "c"):
        torch.testing.assert_close(found[name].double(), exact[name], rtol=1e-5, atol=rounding)
    assert all(a.isfinite().all() for a in found.values())


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_visible_and_in_its_unit(isa, dtype):
    case = make(1, 40, 37, dtype=dtype)
    case.inputs["u"][0, 7, 1, 5] = float("nan")
    with cpu.instruction_set(isa):
        h, c = case.call()
    assert h[0, 7:, 5].isnan().all()
    assert c[0, 5].isnan()
    assert not h[0, :7].isnan().any()
    others = [j for j in range(37) if j != 5]
    assert not h[0, :, others].isnan().any()


def test_a_gradient_of_one_output_alone():
    for wanted in (0, 1):
        case = make(2, 20, 9)
        found = {}
        for name in ("cpu", "reference"):
            leaves = case.leaves()
            with ops.backend(name):
                case.call(leaves)[wanted].sum().backward()  # expanded: strides of zero
            found[name] = {name: a.grad for name, a in leaves.items()}
        for name in case.inputs:
            if found["reference"][name] is not None:
                torch.testing.assert_close(found["cpu"][name], found["reference"][name], rtol=1e-4, atol=1e-5)


def test_only_what_needs_a_gradient_gets_one():
    case = make(2, 20, 9)
    u = case.inputs["u"].requires_grad_()
    h, c = case.call()
    (h.sum() + c.sum()).backward()
    assert u.grad is not None
    assert all(a.grad is None for name, a in case.inputs.items() if name != "u")
    with torch.no_grad():
        assert not case.call()[0].requires_grad


def layouts(a: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers, laid out otherwise."""
    wide = a.new_full((*a.shape[:-1], 2 * a.shape[-1]), float("nan"))
    wide[..., ::2] = a
    padded = a.new_full((*a.shape[:-1], a.shape[-1] + 3), float("nan"))
    padded[..., 1:-2] = a
    return {
        "time first": a.transpose(0, 1).contiguous().transpose(0, 1),
        "every other unit": wide[..., ::2],
        "inside another tensor": padded[..., 1:-2],
    }


@pytest.mark.parametrize("which", ["time first", "every other unit", "inside another tensor"])
def test_any_strides(which):
    case = make(3, 20, 21)
    odd = Case({**case.inputs, **{name: layouts(case.inputs[name])[which] for name in ("u", "x", "weight", "c0")}})
    expected = run(case)
    leaves = {name: a.requires_grad_() for name, a in odd.inputs.items()}
    h, c = odd.call(leaves)
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(a.shape, generator=g).bfloat16().float() for a in (h, c)]
    torch.autograd.backward([h, c], [layouts(grads[0])[which], grads[1]])
    assert torch.equal(h, expected["h"])
    assert torch.equal(c, expected["c"])
    for name, leaf in leaves.items():
        if leaf.is_leaf:
            assert torch.equal(leaf.grad, expected[f"grad {name}"]), name


def test_an_expanded_input():
    case = make(4, 20, 21)
    for name in ("u", "x", "c0"):
        case.inputs[name] = case.inputs[name][:1].expand(4, *case.inputs[name].shape[1:])
    copied = Case({name: a.contiguous() for name, a in case.inputs.items()})
    assert all(torch.equal(a, b) for a, b in zip(case.call(), copied.call(), strict=True))


# ---- laws, bit for bit ---------------------------------------------------------------------------------------------

some_options = st.sets(st.sampled_from(OPTIONS[1:])).filter(lambda s: not {"k4", "noskip"} <= s)


@given(
    B=st.integers(1, 3),
    T=st.integers(1, 70),
    d=st.sampled_from([1, 5, 16, 40, 129]),
    wanted=some_options,
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(INSTRUCTION_SETS or ["portable"]),
    cuts=st.lists(st.integers(0, 70), max_size=5),
)
def test_cut_anywhere_the_numbers_stay_the_same(B, T, d, wanted, dtype, isa, cuts):
    case = make(B, T, d, *wanted, dtype=dtype)
    with cpu.instruction_set(isa):
        h, c = case.call()
        edges = sorted({0, T, *(cut for cut in cuts if cut < T)})
        pieces = list(itertools.pairwise(edges))
        if "reverse" in wanted:
            pieces.reverse()
        state = case.inputs.get("c0")
        for start, end in pieces:
            part = Case(dict(case.inputs), dict(case.options))
            for name in ("u", "x"):
                if name in part.inputs:
                    part.inputs[name] = part.inputs[name][:, start:end]
            for name in ("padding_mask", "resets"):
                if name in part.options:
                    part.options[name] = part.options[name][:, start:end]
            if state is not None:
                part.inputs["c0"] = state
            h_part, state = part.call()
            assert torch.equal(h_part, h[:, start:end])
        assert torch.equal(state, c)


@given(wanted=some_options, dtype=st.sampled_from(DTYPES), B=st.integers(2, 5), d=st.sampled_from([3, 64, 300]))
def test_the_number_of_threads_changes_nothing(wanted, dtype, B, d):
    case = make(B, 64, d, *wanted, dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(case))
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name
        assert torch.equal(results[0][name], results[2][name]), name


@given(wanted=some_options, dtype=st.sampled_from(DTYPES), junk=st.sampled_from([7.0, float("nan"), float("inf")]))
def test_what_lies_in_the_padding_never_matters(wanted, dtype, junk):
    case = make(3, 30, 21, *wanted, "padding", dtype=dtype)
    expected = run(case)
    padded = case.options["padding_mask"]
    for name in ("u", "x"):
        if name in case.inputs:
            case.inputs[name][padded] = junk
    if "resets" in case.options:
        case.options["resets"] = case.options["resets"] ^ padded
    found = run(case)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert (found["h"][padded] == 0).all()
    assert (found["grad u"][padded] == 0).all()


@given(wanted=some_options, dtype=st.sampled_from(DTYPES), row=st.integers(0, 2))
def test_rows_do_not_mix(wanted, dtype, row):
    case, other = make(3, 30, 21, *wanted, dtype=dtype), make(3, 30, 21, *wanted, dtype=dtype, seed=9)
    expected = run(case)
    for name in ("u", "x", "c0"):
        if name in case.inputs:
            case.inputs[name][row] = other.inputs[name][row]
    found = run(case)
    rest = [b for b in range(3) if b != row]
    assert not torch.equal(found["h"][row], expected["h"][row])
    for name in ("h", "c", "grad u", "grad x", "grad c0"):
        if name in expected:
            assert torch.equal(found[name][rest], expected[name][rest]), name


@given(wanted=some_options.filter(lambda s: "reverse" not in s), dtype=st.sampled_from(DTYPES))
def test_reverse_is_forward_of_the_text_turned_round(wanted, dtype):
    """A document's first step, flagged, becomes its last: turned round, the flag belongs to the step after it."""
    case = make(2, 40, 11, *wanted, dtype=dtype)
    turned = Case(dict(case.inputs), {**case.options, "reverse": True})
    for name in ("u", "x"):
        if name in turned.inputs:
            turned.inputs[name] = turned.inputs[name].flip(1)
    if "padding_mask" in turned.options:
        turned.options["padding_mask"] = turned.options["padding_mask"].flip(1)
    if "resets" in turned.options:
        # Without padding between: the flag on the step that comes just before in time.
        turned.options.pop("padding_mask", None)
        case.options.pop("padding_mask", None)
        case.options["resets"][:, 0] = False
        turned.options["resets"] = case.options["resets"].roll(-1, 1).flip(1)
    h, c = case.call()
    turned_h, turned_c = turned.call()
    assert torch.equal(turned_h.flip(1), h)
    assert torch.equal(turned_c, c)


@pytest.mark.parametrize("reverse", [False, True])
def test_documents_packed_in_a_row_are_as_if_alone(reverse):
    lengths = (9, 1, 25, 16)
    case = make(1, sum(lengths), 21, *(["reverse"] if reverse else []), "no c0")
    resets = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    resets[0, starts] = True
    case.options["resets"] = resets
    found = run(case)
    for start, length in zip(starts, lengths, strict=True):
        alone = Case(dict(case.inputs), {"reverse": reverse})
        for name in ("u", "x"):
            alone.inputs[name] = alone.inputs[name][:, start : start + length]
        h, _ = alone.call()
        assert torch.equal(h, found["h"][:, start : start + length])
    # No gradient crosses either: only a document's own steps feel a change of its output.
    leaves = case.leaves()
    case.call(leaves)[0][0, starts[2] : starts[3]].sum().backward()
    touched = leaves["u"].grad[0].abs().sum((1, 2)) > 0
    assert touched[starts[2] : starts[3]].all()
    assert touched.sum() == lengths[2]


def test_a_long_text():
    T = 70_000
    case = make(1, T, 3, "tanh", state_scale=0.5)
    h, c = case.call()
    expected_h, expected_c = scalar(case)
    torch.testing.assert_close(h, torch.tensor(expected_h), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(c, torch.tensor(expected_c), rtol=1e-5, atol=1e-5)
    # The gradients of the whole are those of its pieces joined by the state.
    whole = run(case)
    leaves = case.leaves()
    state, outputs = leaves["c0"], []
    for start in range(0, T, 10_007):
        part = {**leaves, "c0": state, **{n: leaves[n][:, start : start + 10_007] for n in ("u", "x")}}
        h, state = case.call(part)
        outputs.append(h)
    g = torch.Generator().manual_seed(1)
    h = torch.cat(outputs, 1)
    torch.autograd.backward([h, state], [torch.randn(a.shape, generator=g).bfloat16().float() for a in (h, state)])
    for name, leaf in leaves.items():
        torch.testing.assert_close(whole[f"grad {name}"], leaf.grad, rtol=1e-4, atol=1e-4)


def test_tensors_that_the_kernels_do_not_know_go_to_the_definition():
    case = make(2, 9, 5, dtype=torch.float64)
    with ops.backend("cpu"):
        assert case.call()[0].dtype is torch.float64
    half = make(2, 9, 5, dtype=torch.float16)
    h, c = half.call()
    with ops.backend("reference"):
        expected_h, expected_c = half.call()
    assert h.dtype is torch.float16
    torch.testing.assert_close(h, expected_h, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(c, expected_c)


def test_the_second_derivative_through_the_kernels():
    def second(name):
        case = make(2, 9, 5, "tanh", "dropout", state_scale=0.5)
        leaves = case.leaves()
        with ops.backend(name):
            h, c = case.call(leaves)
            first = torch.autograd.grad(h.square().sum() + c.sum(), list(leaves.values()), create_graph=True)
            return torch.autograd.grad(sum(a.square().sum() for a in first), list(leaves.values()))

    for a, b in zip(second("cpu"), second("reference"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_without_torchs_threads_the_kernels_bring_their_own():
    """In a process that has not loaded torch there is no OpenMP to borrow."""
    code = """
import sys
import numpy as np
from undertow import _C
assert "torch" not in sys.modules
B, T, d = 3, 64, 200
g = np.random.default_rng(0)
u, x, p, c0 = (g.standard_normal(s).astype("float32") for s in ((B, T, 3, d), (B, T, d), (4, d), (B, d)))
h, c = np.full((B, T, d), np.nan, "float32"), np.full((B, d), np.nan, "float32")
at = lambda a: a.ctypes.data
_C.forward(4, B, T, d, 0, 1, False, False, 1.0, at(u), T * 3 * d, 3 * d, d, at(x), T * d, d, at(p), at(p[2:]), at(c0),
           0, 0, 0, 0, at(h), at(c))
np.savez(sys.argv[1], u=u, x=x, p=p, c0=c0, h=h, c=c)
print(_C.pool())
"""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/call.npz"
        shown = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.strip() == "its own threads"
        a = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    h, c = ops.recurrence(a["u"], a["x"], a["p"][:2], a["p"][2:], a["c0"])
    assert torch.equal(h, a["h"])
    assert torch.equal(c, a["c"])


def test_in_this_process_they_are_torchs():
    assert ops.backend_info().pool == "torch's OpenMP threads"


def test_without_hidden_units_there_is_nothing_to_do() -> None:
    with ops.backend("cpu"):
        u = torch.zeros(2, 5, 3, 0, requires_grad=True)
        h, c = ops.recurrence(u, torch.zeros(2, 5, 0), torch.zeros(2, 0), torch.zeros(2, 0))
        assert (h.shape, c.shape) == ((2, 5, 0), (2, 0))
        h.sum().backward()
