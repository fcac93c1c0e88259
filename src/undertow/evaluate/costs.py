"""What reading costs: floating-point operations a token, peak memory, the size of the state."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from undertow.allocator import give_back
from undertow.evaluate.protocol import carries_state, read

# ---- operations ------------------------------------------------------------------------------------------------------


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad_out, query, key, value)


def _recurrent_layer(input: Any, w0: Any, w1: Any, *_: Any, **__: Any) -> int:
    """One layer in one direction: input and state times their weights, (gates, in) and (gates, hidden), each step."""
    return 2 * _steps(input) * (_product(w0) + _product(w1))


def _recurrent_layer_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent_layer(*args, **kwargs)


def _recurrent_stack(input: Any, weights: Any, *_: Any, **__: Any) -> int:
    """All layers and directions: ``weights`` holds their matrices, and biases, which count nothing."""
    return 2 * _steps(input) * sum(_product(shape) for shape in weights if len(shape) == 2)


def _recurrent_stack_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent_stack(*args, **kwargs)


def _matrix_vector(matrix: Any, *_: Any, **__: Any) -> int:
    return 2 * _product(matrix)


def _added_matrix_vector(_: Any, matrix: Any, *__: Any, **___: Any) -> int:
    return 2 * _product(matrix)


def _product(shape: Any) -> int:
    product = 1
    for size in shape:
        product *= int(size)
    return product


def _steps(shape: Any) -> int:
    return _product(shape[:-1])


# What torch's counter knows no formula for and so takes for free, by the operator's name.
_UNCOUNTED: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_attention_math_for_mps": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    "_cudnn_rnn": _recurrent_stack,
    "_cudnn_rnn_backward": _recurrent_stack_backward,
    "mv": _matrix_vector,
    "addmv": _added_matrix_vector,
}


def flop_counter() -> FlopCounterMode:
    """``torch.utils.flop_counter`` with the formulas that it lacks.

    On its own it counts attention on a CPU, ``nn.LSTM`` and matrix-vector products as nothing, which flatters whoever
    uses them. A multiplication and an addition are two operations; attention counts every product that is computed,
    also those that a mask then throws away; what is elementwise counts only in this library's own recurrence.

    Example:
        >>> with flop_counter() as counter:
        ...     _ = nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 4)] * 3)
        >>> counter.get_total_flops()  # 2 products x 2 heads x 8 queries x 8 keys x 4 x 2
        2048
    """
    formulas = {
        packet: formula
        for name, formula in _UNCOUNTED.items()
        if (packet := getattr(torch.ops.aten, name, None)) is not None and packet not in flop_registry
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


@dataclass(frozen=True)
class ReadingCosts:
    """What reading one more token takes, in the middle of a long text."""

    flops_per_token: float
    """Floating-point operations, on average over whole strides."""
    state_bytes: int | None
    """The state of one row at its largest; None where none is carried or it cannot be weighed."""


@torch.no_grad()
def reading_costs(
    model: nn.Module,
    input_ids: Tensor,
    *,
    warm: int = 0,
    window: int = 256,
    stride: int = 1,
    alone: bool = False,
    precision: str = "float32",
) -> ReadingCosts:
    """Count operations and weigh the state while reading on.

    Args:
        model: see :mod:`undertow.evaluate.protocol`.
        input_ids: any tokens of its vocabulary; they are repeated where more are needed.
        warm: tokens to read before counting, so that the memory is full. (A model that carries a state.)
        window: tokens to read at a time, whose operations are counted together.
        stride: tokens from one boundary of the model's own windows to the next; the state is weighed at a boundary and
            just before the next one. ``window`` should hold whole strides, so that what a boundary costs is shared out
            evenly. With ``alone``: tokens that each window scores.
        alone: windows are read on their own, as by ``evaluate(..., stride=...)``.
        precision: "float32", or "bfloat16" for matrix products under autocast.
    """
    place = next(model.parameters()).device
    training = model.training
    model.eval()
    takes_resets = carries_state(model)
    begin = 0

    def go_on(count: int, state: Any) -> Any:
        nonlocal begin
        ids = input_ids.flatten()[torch.arange(begin, begin + count) % input_ids.numel()][None].to(place)
        resets = torch.zeros_like(ids, dtype=torch.bool) if takes_resets else None
        if resets is not None and begin == 0:
            resets[:, 0] = True
        begin += count
        return read(model, ids, state=state, resets=resets).state

    try:
        with torch.autocast(place.type, torch.bfloat16, enabled=precision == "bfloat16"):
            if alone:
                with flop_counter() as counter:
                    go_on(window, None)
                return ReadingCosts(counter.get_total_flops() / stride, None)
            state = None
            while begin < warm:
                state = go_on(window, state)
            with flop_counter() as counter:
                state = go_on(window, state)
            weights = [state.nbytes()] if hasattr(state, "nbytes") else []
            if weights and stride > 1:
                weights.append(go_on(stride - 1, state).nbytes())
            return ReadingCosts(counter.get_total_flops() / window, max(weights, default=None))
    finally:
        model.train(training)


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """The most memory that was held at once, in bytes, and what was measured."""

    bytes: int | None = None
    measure: str = "not measured"


RESIDENT = "resident set"
RESIDENT_OF_RUN = "resident set since the process began"
ALLOCATED = "allocated on the GPU"


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """The peak of what happens inside the block, the model and the program themselves included.

    On a GPU what torch has allocated there. On Linux the process's resident set, whose high-water mark is set back at
    the start; where that is not permitted, and on other systems, the peak since the process began, and ``measure``
    says so. What earlier work has freed is first given back to the system, so that it does not count.

    Example:
        >>> with peak_memory("cpu") as peak:
        ...     _ = torch.ones(1 << 20)
        >>> peak.bytes > 4 << 20
        True
    """
    peak = Peak()
    place = torch.device(device)
    gc.collect()
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        yield peak
        peak.bytes, peak.measure = torch.cuda.max_memory_allocated(place), ALLOCATED
        return
    give_back()
    fresh = _reset_high_water_mark()
    yield peak
    peak.bytes = _high_water_mark() if fresh else None
    peak.measure = RESIDENT
    if peak.bytes is None:
        peak.bytes, peak.measure = _peak_of_run(), RESIDENT_OF_RUN
        if peak.bytes is None:
            peak.measure = "not measured"


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _peak_of_run() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
