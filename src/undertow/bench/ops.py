"""Suite `ops`: the elementwise recurrence alone, against a plain copy of the bytes that it must move."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow import ops
from undertow.bench.machine import copy
from undertow.bench.pairs import OURS, Work, in_turns
from undertow.bench.record import LIMIT, Record
from undertow.bench.suites import Cases, Options, sizes

PEERS = ("copy",)

CASES = dict.fromkeys(("T256-B8-d512", "T256-B8-d3072", "T1024-B16-d1024"), PEERS)
SMOKE = {"T8-B2-d16": PEERS}

# (B, T, d) blocks that have to be read and written, k = 3: forward u, x -> h; backward u, x, dh -> du, dx.
FORWARD_BLOCKS = 3 + 1 + 1
BACKWARD_BLOCKS = (3 + 1 + 1) + (3 + 1)


def check(case: str) -> dict[str, int]:
    """T, B and d of a name such as T256-B8-d512.

    Raises:
        ValueError: not of that form.
    """
    return sizes(case, "T256-B8-d512")


def run(cases: Cases, options: Options, record: Record) -> None:
    """Measure forward and forward + backward in bytes a second, float32 and bfloat16.

    `ours` are the bytes that must be moved over our time; the limit is a plain copy that reads and writes as many
    bytes, since no recurrence can be faster than that on large inputs. What else the implementation moves (c kept for
    the backward pass, say) counts against it. The copy stands there as the peer, too.
    """
    for case, peers in cases.items():
        T, B, d = check(case).values()
        record.say(f"ops, {case}: {ops.backend_info()}")
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            u = torch.randn(B, T, 3, d, dtype=dtype)
            x = torch.randn(B, T, d, dtype=dtype)
            weight, bias = torch.rand(2, d), torch.zeros(2, d)
            block = x.numel() * x.element_size()
            precision = str(dtype).removeprefix("torch.")
            for what, blocks, work in (
                ("forward", FORWARD_BLOCKS, _forward(u, x, weight, bias)),
                ("forward_backward", FORWARD_BLOCKS + BACKWARD_BLOCKS, _both(u, x, weight, bias)),
            ):
                moved = blocks * block
                times = in_turns({OURS: work, LIMIT: copy(moved)}, options.repeats, options.warmup)
                record.limit("ops", case, f"copy of {moved:,} bytes", "bytes_per_second", precision,
                             moved / times[LIMIT].median)  # fmt: skip
                times |= dict.fromkeys(peers, times[LIMIT])
                record.compare("ops", case, f"{what}_bytes_per_second", precision, times, moved)


def _forward(u: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Work:
    def work() -> None:
        with torch.inference_mode():
            ops.recurrence(u, x, weight, bias)

    return work


def _both(u: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Work:
    leaves = [t.clone().requires_grad_() for t in (u, x, weight, bias)]
    grad_h = torch.randn_like(x)

    def work() -> None:
        h, _ = ops.recurrence(leaves[0], leaves[1], leaves[2], leaves[3])
        torch.autograd.grad(h, leaves, grad_h)

    return work
