"""`from_sru` names what does not fit; that the numbers agree is shown in test_sru_parity.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from undertow.nn import SRU, SRUpp, from_sru


def weights(width: int = 6, layers: int = 2, attention: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """A state dict as sru 3.0.0.dev6 names and shapes it: of an SRU, or of an SRUpp with attention in some layers."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        d_in = 5 if i == 0 else width
        rows = width * (3 if d_in == width else 4)
        key = f"rnn_lst.{i}"
        shapes |= {f"{key}.weight_c": (2 * width,), f"{key}.bias": (2 * width,), f"{key}.scale_x": (1,)}
        key += ".transform_module"
        if attention is None:
            shapes[f"{key}.weight"] = (rows, d_in)
            continue
        shapes |= {f"{key}.linear1.weight": (4, d_in), f"{key}.layer_norm.weight": (4,), f"{key}.layer_norm.bias": (4,)}
        if i in attention:
            shapes |= {f"{key}.linear2.weight": (8, 4), f"{key}.linear3.weight": (rows, 4), f"{key}.alpha": (1,)}
        else:
            shapes[f"{key}.linear2.weight"] = (rows, 4)
    return {k: torch.ones(shape) if k.endswith("scale_x") else torch.randn(shape) for k, shape in shapes.items()}


def test_what_the_weights_tell() -> None:
    layer = from_sru(weights())
    assert isinstance(layer, SRU)
    assert (layer.input_size, layer.hidden_size, layer.num_layers) == (5, 6, 2)
    assert [cell.num_parts for cell in layer.layers] == [4, 3]
    assert from_sru(weights(), bidirectional=True).hidden_size == 3
    plus = from_sru(weights(attention=(1, 3), layers=4), num_heads=2, batch_first=True)
    assert isinstance(plus, SRUpp)
    assert [cell.attention for cell in plus.layers] == [False, True, False, True]
    assert plus.batch_first
    assert [cell.attention for cell in from_sru(weights(attention=(2,), layers=3)).layers] == [False, False, True]


def test_rows_of_u_are_put_in_our_order() -> None:
    theirs = weights(layers=1)
    matrix = theirs["rnn_lst.0.transform_module.weight"]  # row unit * 4 + part
    ours = from_sru(theirs).layers[0].up_proj.weight  # row part * 6 + unit
    assert_close(ours[2 * 6 + 5], matrix[5 * 4 + 2])
    both_ways = from_sru(theirs, bidirectional=True).layers[0].up_proj.weight  # row (direction * 4 + part) * 3 + unit
    assert_close(both_ways[(1 * 4 + 2) * 3 + 1], matrix[(1 * 3 + 1) * 4 + 2])


def test_rescaling_is_read_from_its_constant() -> None:
    theirs = weights()
    for key in theirs:
        if key.endswith("scale_x"):
            theirs[key] = torch.tensor([1.5])
    assert from_sru(theirs).layers[1].scale == pytest.approx(1.5)


def test_dtype_is_kept() -> None:
    layer = from_sru({k: v.double() for k, v in weights().items()})
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rnn_lst.0.weight_c": None}, "no key 'rnn_lst.0.weight_c'"),
        ({"rnn_lst.1.bias": None}, "no key 'rnn_lst.1.bias'"),
        ({"rnn_lst.1.bias": torch.zeros(7)}, r"'rnn_lst.1.bias' .* must have shape \(12,\), got \(7,\)"),
        ({"rnn_lst.1.transform_module.weight": torch.zeros(18, 5)}, r"must have shape \(18, 6\), got \(18, 5\)"),
        (
            {"rnn_lst.0.extra": torch.zeros(1), "head": torch.zeros(1)},
            "nothing reads these keys .* head, rnn_lst.0.extra",
        ),
        ({"rnn_lst.0.transform_module.weight": None}, "none of sru's own: expected one of .* got"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    theirs = {k: v for k, v in (weights() | change).items() if v is not None}
    with pytest.raises(ValueError, match=says):
        from_sru(theirs)


def test_attention_in_a_pattern_that_is_not_ours() -> None:
    with pytest.raises(ValueError, match=r"attention in layers \[0, 3\] is neither"):
        from_sru(weights(attention=(0, 3), layers=4))
