"""Weights of the Python package `sru` (3.0.0.dev6), in our layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undertow.nn.cell import GatedCell
from undertow.nn.sru import SRU, SRUCell
from undertow.nn.srupp import SRUpp, SRUppCell


def from_sru(source: nn.Module | Mapping[str, Tensor], **options: Any) -> SRU | SRUpp:
    """Our `SRU` or `SRUpp` with the weights, and so the numbers, of one of sru's.

    The weights tell the sizes, the number of layers, where there are projections and attention, and the rescaling. The
    rest is read from `source` if that is a module. Beside a state dict it has to be given where it is not our default:
    `bidirectional`, `num_heads`, `activation`, `skip` and `layer_norm` (where equal widths leave them open), dropouts.

    Two things are as in sru unless asked otherwise: `layer_norm` is "before" where it may be either, and
    `normalize_memory` is False, so that remembered inputs are projected without that norm.

    Args:
        source: an `sru.SRU` or `sru.SRUpp`, or its `state_dict()`.
        options: arguments of our layer, such as `batch_first` or `attention_window`; they win over what was read.

    Raises:
        ValueError: a key that is missing, keys that nothing reads, or a shape that does not fit, each named.
    """
    theirs = dict(source.state_dict() if isinstance(source, nn.Module) else source)
    if "rnn_lst.0.weight_c" not in theirs:
        raise ValueError("this is no state dict of an sru.SRU or sru.SRUpp: it has no key 'rnn_lst.0.weight_c'")
    given = {**(_module_options(source) if isinstance(source, nn.Module) else {}), **options}
    ours = _build(theirs, given)
    weight = theirs["rnn_lst.0.weight_c"]
    ours.to(device=weight.device, dtype=weight.dtype)

    for target, key, cell in _pairs(ours):
        if key not in theirs:
            raise ValueError(f"sru's state dict has no key {key!r}")
        value = theirs.pop(key)
        if value.shape != target.shape:
            expected = tuple(target.shape)
            raise ValueError(f"{key!r} of sru's state dict must have shape {expected}, got {tuple(value.shape)}")
        with torch.no_grad():
            target.copy_(value if cell is None else _part_by_part(value, cell))
    unread = sorted(key for key in theirs if not key.endswith(".scale_x"))
    if unread:
        raise ValueError(f"nothing reads these keys of sru's state dict: {', '.join(unread)}")
    return ours


def _pairs(ours: SRU | SRUpp) -> Iterator[tuple[Tensor, str, GatedCell | None]]:
    """Each of our tensors in sru's shape, sru's key for it, and the cell where the rows are those of u."""
    if ours.input_proj is not None:
        yield ours.input_proj.weight, "input_to_hidden.weight", None
    for i, cell in enumerate(ours.layers):
        assert isinstance(cell, SRUCell | SRUppCell)
        key, matrix = f"rnn_lst.{i}", f"rnn_lst.{i}.transform_module"
        yield cell.weight_c.view(-1), f"{key}.weight_c", None
        yield cell.bias.view(-1), f"{key}.bias", None
        if cell.layer_norm is not None:
            yield cell.layer_norm.weight, f"{key}.layer_norm.weight", None
            yield cell.layer_norm.bias, f"{key}.layer_norm.bias", None
        if isinstance(cell, SRUCell):
            if cell.down_proj is not None:
                yield cell.down_proj.weight, f"{matrix}.0.weight", None
            yield cell.up_proj.weight, f"{matrix}.weight" if cell.down_proj is None else f"{matrix}.1.weight", cell
            continue
        yield cell.down_proj.weight, f"{matrix}.linear1.weight", None
        if cell.kv_proj is not None and cell.alpha is not None:
            yield cell.kv_proj.weight, f"{matrix}.linear2.weight", None
            yield cell.alpha, f"{matrix}.alpha", None
        if isinstance(cell.norm, nn.LayerNorm):
            yield cell.norm.weight, f"{matrix}.layer_norm.weight", None
            yield cell.norm.bias, f"{matrix}.layer_norm.bias", None
        yield cell.up_proj.weight, f"{matrix}.linear3.weight" if cell.attention else f"{matrix}.linear2.weight", cell


def _part_by_part(weight: Tensor, cell: GatedCell) -> Tensor:
    """The rows of u's matrix: sru has unit by unit and u's parts within, we have part by part and units within."""
    rows = (cell.num_directions, cell.hidden_size, cell.num_parts)
    return weight.unflatten(0, rows).transpose(1, 2).flatten(0, 2)


def _build(theirs: Mapping[str, Tensor], given: dict[str, Any]) -> SRU | SRUpp:
    """Our layer of the kind and the sizes that sru's weights tell."""
    num_layers = 0
    while f"rnn_lst.{num_layers}.weight_c" in theirs:
        num_layers += 1
    output_size = theirs["rnn_lst.0.weight_c"].numel() // 2
    matrices = [
        {k.removeprefix(prefix): v for k, v in theirs.items() if k.startswith(prefix)}
        for prefix in (f"rnn_lst.{i}.transform_module." for i in range(num_layers))
    ]
    srupp = "linear1.weight" in matrices[0]
    up = ("linear3.weight", "linear2.weight") if srupp else ("weight", "1.weight")
    down = ("linear1.weight",) if srupp else ("weight", "0.weight")
    first, last = (next((matrices[0][k] for k in keys if k in matrices[0]), None) for keys in (down, up))
    if first is None or last is None:
        raise ValueError(
            "the first layer's transform_module is none of sru's own: "
            f"expected one of {down} and one of {up}, got {sorted(matrices[0])}"
        )
    width = first.shape[1]
    to_hidden = theirs.get("input_to_hidden.weight")

    told: dict[str, Any] = {
        "input_size": width if to_hidden is None else to_hidden.shape[1],
        "hidden_size": output_size // (2 if given.get("bidirectional") else 1),
        "num_layers": num_layers,
        "project_input_first": to_hidden is not None,
    }
    if width != output_size:
        told["skip"] = last.shape[0] == 4 * output_size
    norm = theirs.get("rnn_lst.0.layer_norm.weight")
    if norm is not None:
        told["layer_norm"] = "after" if norm.numel() == output_size != width else "before"
    scale = max((float(v) for k, v in theirs.items() if k.endswith(".scale_x")), default=1.0)
    if scale > 1:
        told |= {"rescale": True, "highway_bias": math.log((scale**2 - 1) / 2)}
    if not srupp:
        told["projection_size"] = [m["0.weight"].shape[0] if "0.weight" in m else 0 for m in matrices]
        return SRU(**{**told, **given})
    told |= {
        "projection_size": first.shape[0],
        "projection_layer_norm": "layer_norm.weight" in matrices[0],
        "normalize_memory": False,
        **_attention_layers(["linear3.weight" in m for m in matrices]),
    }
    return SRUpp(**{**told, **given})


def _attention_layers(attends: list[bool]) -> dict[str, int]:
    n = sum(attends)
    if attends == [False] * (len(attends) - n) + [True] * n:
        return {"attention_last": n}
    every = attends.index(True) + 1
    if attends != [(i + 1) % every == 0 for i in range(len(attends))]:
        layers = [i for i, attend in enumerate(attends) if attend]
        raise ValueError(f"attention in layers {layers} is neither in every k-th layer nor in the last n")
    return {"attention_every": every}


def _module_options(source: nn.Module) -> dict[str, Any]:
    """What sru's module says and its weights do not."""
    stack: Any = source
    layers: Any = stack.rnn_lst
    cell = layers[0]
    options = {
        "bidirectional": stack.bidirectional,
        "dropout": stack.dropout,
        "highway_bias": cell.highway_bias,
        "rescale": cell.rescale,
        "activation": "tanh" if cell.activation == "tanh" else "identity",
        "skip": cell.has_skip_term,
        "variational_dropout": cell.rnn_dropout,
        "weight_c_init": cell.weight_c_init,
    }
    if cell.layer_norm is not None:
        options["layer_norm"] = "after" if cell.normalize_after else "before"
    if hasattr(stack, "num_heads"):
        options["num_heads"] = stack.num_heads
        options["attention_dropout"] = max(
            getattr(layer.transform_module, "attn_dropout", 0.0) for layer in stack.rnn_lst
        )
    return options
