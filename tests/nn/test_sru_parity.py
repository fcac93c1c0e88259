"""Outputs, final states and every gradient equal those of the package `sru` with the same weights.

Rows with nothing to attend to apart: sru gives NaN there. In float64, so that nothing hides behind a tolerance.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from undertow.nn import SRU, SRUpp, from_sru

T, B, M = 7, 3, 4


@pytest.fixture(scope="module")
def sru() -> Any:
    """The reference package: importing it compiles C++ (about half a minute, once)."""
    # ninja stands beside the interpreter; whether the environment was activated should not matter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import sru
    except Exception as error:  # whatever its compilation dies of
        pytest.skip(f"the package sru cannot be imported here: {type(error).__name__}: {str(error).splitlines()[0]}")
    return sru


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Running SRU on CPU|rnn_dropout > 0|use_tanh = True")
        yield


def shaken(module: torch.nn.Module) -> Any:
    """In float64, with no parameter at a value (zero, one) that would hide a mistake."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    module.double()
    for cell in module.rnn_lst:
        if cell.rescale:  # sru holds this constant in float32
            cell.scale_x.fill_(math.sqrt(1 + 2 * math.exp(cell.highway_bias)))
    return module


def padding(lengths: list[int], total: int) -> torch.Tensor:
    """(total, B), true beyond each row's length."""
    return torch.arange(total)[:, None] >= torch.tensor(lengths)


def lstm_order(c: torch.Tensor, directions: int) -> torch.Tensor:
    """sru's (layers, B, D*d) as (layers * D, B, d)."""
    return c.unflatten(2, (directions, -1)).transpose(1, 2).flatten(0, 1)


def compare(
    theirs: Any, ours: SRU | SRUpp, d_in: int, *, padded: bool = False, memory: Any = None, **call: Any
) -> None:
    """Run both on the same input, forward and backward; `memory` widths, one a layer, turn memory on."""
    D = 2 if ours.bidirectional else 1
    torch.manual_seed(2)
    x = torch.randn(T, B, d_in, dtype=torch.float64, requires_grad=True)
    c0 = torch.randn(ours.num_layers, B, ours.output_size, dtype=torch.float64, requires_grad=True)
    mask_pad = padding([7, 5, 1], T) if padded else None
    real = torch.ones(T, B) if mask_pad is None else ~mask_pad
    their_call, our_call, leaves = {}, {}, [x, c0]
    if "mask" in call:
        mask = call["mask"]
        zeros = torch.zeros(mask.shape, dtype=torch.float64)
        their_call["attn_mask"] = mask if mask.is_floating_point() else zeros.masked_fill(~mask, -torch.inf)
        our_call["mask"] = mask
    if memory is not None:
        remembered = [torch.randn(M, B, width, dtype=torch.float64, requires_grad=True) for width in memory]
        leaves += remembered
        their_call["memory"] = remembered
        our_call["memory"] = [m.transpose(0, 1) for m in remembered]
        if padded:
            memory_pad = padding([4, 2, 3], M)
            their_call["memory_mask_pad"] = memory_pad
            our_call["memory_padding_mask"] = memory_pad.T

    h, c = theirs(x, c0, mask_pad=mask_pad, **their_call)[:2]
    c = lstm_order(c, D)
    w, v = torch.randn_like(h) * real[..., None], torch.randn_like(c)
    ((h * w).sum() + (c * v).sum()).backward()
    expected_grads = [leaf.grad for leaf in leaves]

    our_h, state = ours(x, lstm_order(c0, D), padding_mask=mask_pad, **our_call)
    our_c = state if isinstance(state, torch.Tensor) else state.c
    names, parameters = zip(*ours.named_parameters(), strict=True)
    grads = torch.autograd.grad((our_h * w).sum() + (our_c * v).sum(), [*leaves, *parameters], allow_unused=True)

    tight = {"rtol": 1e-9, "atol": 1e-10}
    assert_close(our_h * real[..., None], h * real[..., None], **tight)
    assert_close(our_c, c, **tight)
    for got, want in zip(grads, expected_grads, strict=False):
        assert_close(torch.zeros(()) if got is None else got, torch.zeros(()) if want is None else want, **tight)
    # sru's gradients, read as if they were weights, stand where ours have to be.
    their_grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in theirs.named_parameters()}
    options = {"bidirectional": ours.bidirectional, "skip": ours.layers[0].skip}
    options |= {"layer_norm": ours.layers[0].layer_norm_place, "num_heads": getattr(ours.layers[0], "num_heads", 1)}
    if isinstance(ours, SRU):
        del options["num_heads"]
    if options["layer_norm"] == "none":
        del options["layer_norm"]
    want = dict(from_sru(their_grads, **options).named_parameters())
    for name, grad in zip(names, grads[len(leaves) :], strict=True):
        got = torch.zeros_like(want[name]) if grad is None else grad
        assert_close(got, want[name], **tight, msg=lambda m, n=name: f"gradient of {n}: {m}")


NORMS = {"none": {}, "before": {"layer_norm": True}, "after": {"layer_norm": True, "normalize_after": True}}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("d_in", "options"),
    [
        (6, {}),  # k = 3
        (5, {}),  # k = 4 in the first layer
        (5, {"proj_input_to_hidden_first": True}),
        (6, {"rescale": True, "highway_bias": -1.5}),
        (5, {"rescale": True, "highway_bias": -1.5, "use_tanh": True}),
        (5, {"has_skip_term": False}),
        (6, {"projection_size": 2}),
        (5, {"projection_size": [2, 0], "use_tanh": True}),
    ],
)
def test_sru(sru: Any, d_in: int, options: dict, norm: str, bidirectional: bool, padded: bool) -> None:
    d = 3 if bidirectional else 6
    theirs = shaken(sru.SRU(d_in, d, num_layers=2, bidirectional=bidirectional, **NORMS[norm], **options))
    compare(theirs, from_sru(theirs), d_in, padded=padded)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mask", ["all", "causal", "random additive"])
@pytest.mark.parametrize("remember", [False, True])
def test_srupp(sru: Any, mask: str, remember: bool, norm: str, bidirectional: bool, padded: bool) -> None:
    d_in, d = (5, 3) if bidirectional else (6, 6)  # k = 4 and k = 3 in the first layer
    theirs = shaken(sru.SRUpp(d_in, d, 4, num_layers=2, num_heads=2, bidirectional=bidirectional, **NORMS[norm]))
    S = T + M if remember else T
    masks = {
        "all": torch.ones(T, S, dtype=torch.bool),
        "causal": torch.ones(T, S, dtype=torch.bool).tril(S - T),
        "random additive": torch.randn(T, S, dtype=torch.float64),
    }
    compare(theirs, from_sru(theirs), d_in, padded=padded, memory=[d_in, 6] if remember else None, mask=masks[mask])


@pytest.mark.parametrize(
    ("d_in", "options"),
    [
        (6, {"attention_every_n_layers": 2}),
        (6, {"attention_last_n_layers": 1}),
        (6, {"attention_last_n_layers": 0}),
        (6, {"attn_layer_norm": False}),
        (6, {"rescale": True, "highway_bias": -1.0}),
        (5, {"rescale": True}),
        (5, {"proj_input_to_hidden_first": True, "layer_norm": True}),
    ],
)
def test_srupp_options(sru: Any, d_in: int, options: dict) -> None:
    theirs = shaken(sru.SRUpp(d_in, 6, 4, num_layers=3, **options))
    first = 6 if "proj_input_to_hidden_first" in options else d_in
    ones = torch.ones(T, T + M, dtype=torch.bool)
    compare(theirs, from_sru(theirs), d_in, padded=True, memory=[first, 6, 6], mask=ones.tril(M))


def test_the_fast_path_in_float32(sru: Any) -> None:
    """The other tests run in float64, where the plain reference serves; this is the backend that people run."""
    theirs = shaken(sru.SRUpp(16, 16, 4, num_layers=3, bidirectional=False, rescale=True)).float()
    ours = from_sru(theirs)
    x = torch.randn(37, 3, 16, requires_grad=True)
    mask_pad = padding([37, 20, 33], 37)
    mask = torch.ones(37, 37, dtype=torch.bool).tril()
    h, c, _ = theirs(x, mask_pad=mask_pad, attn_mask=torch.zeros(37, 37).masked_fill(~mask, -torch.inf))
    our_h, state = ours(x, padding_mask=mask_pad, mask=mask)
    w, v = torch.randn_like(h), torch.randn_like(c)
    assert_close((our_h, state.c), (h, c), rtol=1e-4, atol=1e-5)
    (expected,) = torch.autograd.grad((h * w).sum() + (c * v).sum(), x)
    (got,) = torch.autograd.grad((our_h * w).sum() + (state.c * v).sum(), x)
    assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_state_dict_alone_is_enough(sru: Any) -> None:
    theirs = shaken(sru.SRUpp(5, 6, 4, num_layers=4, attention_every_n_layers=2, rescale=True, layer_norm=True))
    ours = from_sru(theirs.state_dict())
    x = torch.randn(T, B, 5, dtype=torch.float64)
    mask = torch.ones(T, T, dtype=torch.bool)
    assert_close(ours(x, mask=mask)[0], theirs(x)[0])


def test_packed_sequences(sru: Any) -> None:
    theirs = shaken(sru.SRU(5, 6, num_layers=2, bidirectional=True, nn_rnn_compatible_return=True))
    rows = [torch.randn(n, 5, dtype=torch.float64) for n in (3, 7, 1)]
    packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
    h, c = theirs(packed)
    our_h, our_c = from_sru(theirs)(packed)
    assert_close(our_h.data, h.data)
    assert_close(our_c, c)
