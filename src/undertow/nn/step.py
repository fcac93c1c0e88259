"""One position through a stack of SRU++ layers in a single call of the compiled part: what writing a text consists of.

A step multiplies every matrix with a few vectors, and waits for memory; layer by layer in Python it would wait as long
again for Python. The layers' own forward pass is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undertow.nn.linear import Int8Linear, Linear
from undertow.nn.srupp import SRUppCell
from undertow.ops.backends import extension, serving
from undertow.ops.decode import STORED
from undertow.ops.eager import plain

_FLOATS = (torch.float32, torch.bfloat16)

Remembered = tuple[Tensor, Tensor | None, Tensor | None]
"""Of a layer: c (B, d) float32; keys and values (B, H, S, p/H) float32 or bfloat16, positions one after the other, of
which the last is to be written."""


class Step:
    """The layers' parameters as the compiled part reads them. Where they change, a new one is made: see `step_for`."""

    def __init__(self, layers: Sequence[SRUppCell], key: tuple[Any, ...]) -> None:
        assert extension is not None
        self.key = key
        self.widths = [layer.output_size for layer in layers]
        self.dtype = layers[0].weight_c.dtype
        self.layers = extension.Layers()
        self.held: list[Any] = []  # what the addresses belong to
        for layer in layers:
            attention = layer.kv_proj is not None and layer.alpha is not None
            place = layer.layer_norm_place
            self.layers.add(
                layer.input_size, layer.projection_size, layer.output_size, layer.num_heads, layer.num_parts,
                layer.skip, layer.activation == "tanh", layer.scale,
                float(layer.alpha) if attention else 0.0,  # type: ignore[arg-type]
                self._matrix(layer.down_proj), self._matrix(layer.kv_proj), self._matrix(layer.up_proj),
                self._floats(layer.weight_c), self._floats(layer.bias),
                self._norm(layer.layer_norm if place == "before" else None), self._norm(layer.norm),
                self._norm(layer.layer_norm if place == "after" else None),
            )  # fmt: skip

    def __reduce__(self) -> Any:
        """Copied and saved as None: a copy of the layers makes its own."""
        return type(None), ()

    def _floats(self, tensor: Tensor) -> int:
        wide = tensor.detach().float().contiguous()
        self.held.append(wide)
        return wide.data_ptr()

    def _matrix(self, linear: Any) -> tuple[int, int, int]:
        if linear is None:
            return 0, 0, 0
        self.held.append(linear.weight)
        scale = self._floats(linear.scale) if isinstance(linear, Int8Linear) else 0
        return STORED[linear.weight.dtype], linear.weight.data_ptr(), scale

    def _norm(self, norm: nn.Module | None) -> tuple[int, int, float]:
        if not isinstance(norm, nn.LayerNorm):
            return 0, 0, 0.0
        return self._floats(norm.weight), self._floats(norm.bias), norm.eps

    def __call__(self, x: Tensor, remembered: Sequence[Remembered]) -> tuple[Tensor, list[Tensor]]:
        """Read one position.

        Args:
            x: (B, d_in), B at most `undertow.ops.decode.ROWS`.
            remembered: of each layer.

        Returns:
            h (B, d) of the last layer, in the dtype of the parameters; the new c of each layer.
        """
        B = x.shape[0]
        wide = x.float().contiguous()
        out = torch.empty((B, self.widths[-1]))
        new: list[Tensor] = []
        addresses: list[int] = []
        for (c, keys, values), width in zip(remembered, self.widths, strict=True):
            new.append(torch.empty((B, width)))
            addresses += (c.data_ptr(), new[-1].data_ptr())
            if keys is None or values is None:
                addresses += (0,) * 8
            else:
                addresses += (
                    keys.data_ptr(), values.data_ptr(), STORED[keys.dtype], *keys.stride()[:2], *values.stride()[:2],
                    keys.shape[2],
                )  # fmt: skip
        self.layers.step(torch.get_num_threads(), B, wide.data_ptr(), out.data_ptr(), addresses)
        return (out if self.dtype == torch.float32 else out.to(self.dtype)), new


def step_for(layers: Sequence[SRUppCell], last: Step | None) -> Step | None:
    """What can take a step through these layers: the last one if nothing has changed; None where they have to do it."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or any(layer.training for layer in layers):
        return None
    first = layers[0].weight_c
    if (
        extension is None
        or not plain(first)
        or first.dtype not in _FLOATS
        or serving(first.device, first.dtype) is None
    ):
        return None
    try:
        key = tuple(_key(layers))
    except RuntimeError:  # tensors made in inference mode do not tell when they change
        return None
    if last is not None and last.key == key:
        return last
    return Step(layers, key) if all(map(_known, layers)) else None


def _key(layers: Sequence[SRUppCell]) -> Iterator[Any]:
    """Everything that a step depends on, so that a change is noticed."""
    for layer in layers:
        for module in (layer, *layer._modules.values()):
            if module is not None:
                yield id(module)
                yield len(module._forward_hooks) + len(module._forward_pre_hooks)
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        yield tensor.data_ptr()
                        yield tensor._version


def _known(layer: SRUppCell) -> bool:
    """Whether the compiled part knows all that the layer does."""
    modules = [module for module in layer._modules.values() if module is not None]
    kinds = (Linear, Int8Linear, nn.LayerNorm, nn.Identity)
    if type(layer) is not SRUppCell or layer.bidirectional or any(type(module) not in kinds for module in modules):
        return False
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in (layer, *modules)):
        return False
    return all(
        type(t) in (Tensor, nn.Parameter) and t.is_contiguous() and t.device.type == "cpu" and t.dtype in STORED
        for module in (layer, *modules)
        for t in (*module._parameters.values(), *module._buffers.values())
        if t is not None
    )
