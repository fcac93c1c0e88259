"""What people do to a module: compile, export, checkpoint, autocast, copy, save, differentiate."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from undertow.nn import SRU, SRUCell, SRUpp, SRUppCell


def shaken(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


LAYERS = {
    "SRUCell": lambda **o: SRUCell(6, 6, **o),
    "SRUppCell": lambda **o: SRUppCell(6, 6, 4, num_heads=2, **o),
    "SRU": lambda **o: SRU(6, 6, 2, batch_first=True, **o),
    "SRUpp": lambda **o: SRUpp(6, 6, 4, 2, batch_first=True, **o),
    "windowed SRUpp": lambda **o: SRUpp(6, 6, 4, 2, batch_first=True, attention_window=3, **o),
}
every = pytest.mark.parametrize("name", LAYERS)


def tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


@every
def test_compiles_into_one_graph(name: str) -> None:
    layer = shaken(LAYERS[name]())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 6, requires_grad=True)
    got, expected = tensors(compiled(x)), tensors(layer(x))
    assert_close(got, expected)
    wanted = [x, *layer.parameters()]
    assert_close(torch.autograd.grad(got[0].sum(), wanted), torch.autograd.grad(expected[0].sum(), wanted))


@every
def test_compiles_with_padding_and_resets(name: str) -> None:
    layer = shaken(LAYERS[name]())
    call = {"padding_mask": torch.rand(2, 5) < 0.3, "resets": torch.rand(2, 5) < 0.3}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 6)
    assert_close(tensors(compiled(x, **call)), tensors(layer(x, **call)))


@every
def test_exports(name: str) -> None:
    layer = shaken(LAYERS[name]()).eval()
    x = torch.randn(2, 5, 6)
    exported = torch.export.export(layer, (x,))
    assert_close(tensors(exported.module()(x)), tensors(layer(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_cell_has_the_same_gradients(reentrant: bool) -> None:
    """The past comes in, new keys and values go out; nothing stays on the module."""
    cell = shaken(SRUppCell(6, 6, 4, dropout=0.2, highway_dropout=0.2))
    x = torch.randn(2, 5, 6, requires_grad=True)
    _, c, kv = cell(torch.randn(2, 3, 6))
    past, c = tuple(t.detach().requires_grad_() for t in kv), c.detach().requires_grad_()
    wanted = [x, c, *past, *cell.parameters()]
    before = set(vars(cell))

    def run(x: Tensor, c: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, c, (k, v) = cell(x, c, past=(k, v))
        return h, c, k, v

    results = []
    for again in (False, True):
        torch.manual_seed(1)
        out = checkpoint(run, x, c, *past, use_reentrant=reentrant) if again else run(x, c, *past)
        for leaf in wanted:
            leaf.grad = None
        sum(t.square().sum() for t in out).backward()
        results.append([leaf.grad for leaf in wanted])
    assert_close(*results)
    assert set(vars(cell)) == before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True},
        {"layer_norm": "before", "activation": "tanh"},
        {"layer_norm": "after", "rescale": True, "highway_bias": -1.0},
        {"skip": False, "projection_layer_norm": False},
        {"attention": False},
    ],
)
def test_gradcheck(options: dict[str, Any]) -> None:
    width = 2 * (2 if options.get("bidirectional") else 1)
    cell = shaken(SRUppCell(width, 2, 2, **options)).double()
    padding, resets = torch.tensor([[0, 0, 1], [0, 1, 0]]) > 0, torch.tensor([[0, 1, 0], [0, 0, 0]]) > 0
    names, parameters = zip(*((n, p.detach().requires_grad_()) for n, p in cell.named_parameters()), strict=True)
    memory = torch.randn(2, 2, width, dtype=torch.float64, requires_grad=True) if cell.attention else None

    def run(x: Tensor, c0: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        call = {"padding_mask": padding, "resets": resets}
        if memory is not None:
            call["memory"], rest = rest[0], rest[1:]
        h, c, _ = torch.func.functional_call(cell, dict(zip(names, rest, strict=True)), (x, c0), call)
        return h, c

    x = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    c0 = torch.randn(2, width, dtype=torch.float64, requires_grad=True)
    inputs = (x, c0, *([memory] if memory is not None else []), *parameters)
    assert torch.autograd.gradcheck(run, inputs)


@every
def test_autocast(name: str) -> None:
    """bfloat16 products under float32 weights, a float32 state, gradients for every weight."""
    layer = shaken(LAYERS[name]())
    x = torch.randn(2, 5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tensors(layer(x))
        got = [*got, *tensors(layer(x, got[1]))]
    assert got[0].dtype == torch.bfloat16
    assert got[1].dtype == torch.float32
    assert_close(got[0].float(), tensors(layer(x))[0], rtol=0.1, atol=0.1)
    got[0].float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    layer = shaken(LAYERS[name](**{"highway_dropout" if name.endswith("Cell") else "dropout": 0.2}))
    layer.to(dtype)
    results = tensors(layer(torch.randn(2, 5, 6, dtype=dtype)))
    assert results[0].dtype == dtype
    assert results[1].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    results[0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@every
def test_copied_pickled_saved_and_called_functionally(name: str) -> None:
    layer = shaken(LAYERS[name](layer_norm="after", bias=False)).eval()
    x = torch.randn(2, 5, 6)
    expected = layer(x)[0]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = LAYERS[name](layer_norm="after", bias=False).eval()
    loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert_close(same(x)[0], expected)
    state = dict(layer.named_parameters()) | dict(layer.named_buffers())
    fresh = LAYERS[name](layer_norm="after", bias=False).eval()
    assert_close(torch.func.functional_call(fresh, state, (x,))[0], expected)
    zeroed = {key: torch.zeros_like(value) for key, value in state.items()}
    assert not torch.equal(torch.func.functional_call(layer, zeroed, (x,))[0], expected)


@every
def test_made_on_the_meta_device_and_filled_later(name: str) -> None:
    with torch.device("meta"):
        layer = LAYERS[name]()
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    reference = LAYERS[name]()
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    reference.reset_parameters()
    assert_close(dict(layer.state_dict()), dict(reference.state_dict()))


def test_device_and_dtype_as_in_lstm() -> None:
    layer = SRUpp(6, 6, 4, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


def test_low_rank_adapters_on_the_projections_are_not_bypassed() -> None:
    """Each matrix is applied by calling its module, so that what wraps the module takes part."""
    cell = SRUppCell(6, 6, 4, bidirectional=True)
    called = []
    for name in ("down_proj", "kv_proj", "up_proj"):
        module: nn.Module = getattr(cell, name)
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    cell(torch.randn(2, 5, 6))
    assert sorted(called) == ["down_proj", "kv_proj", "up_proj"]


def test_second_derivatives() -> None:
    """As far as torch goes: its fused attention kernels have none, its plain one has."""
    layer = shaken(SRUpp(4, 4, 4, bidirectional=True, dtype=torch.float64))
    x = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x)
