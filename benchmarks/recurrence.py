"""The recurrence alone, forward and forward + backward, against a plain copy of as many bytes.

    python benchmarks/recurrence.py [--json FILE] [--threads N] [--seconds S]

The recurrence does little arithmetic to each number it reads, so what bounds it is memory: a copy that moves the same
bytes is the limit. Both are timed in turns in one run, and the medians compared. The copy's target is there already,
while the recurrence, as in real use, gets new memory for what it returns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from undertow import ops

SHAPES = ((256, 8, 512), (1024, 8, 512), (1024, 4, 3072))  # T, B, d
DTYPES = (torch.float32, torch.bfloat16)

# What is read and written of size (B, T, d): u three times and x; h. Backward again u, x, and the gradient of h; the
# gradients of u and x. States and parameters are next to nothing.
FORWARD, BACKWARD = 4 + 1, 5 + 4


def alternate(*what: Callable[[], Any], seconds: float = 2.0) -> list[float]:
    """Median seconds of each, taken in turns so that whatever else the machine does hits all alike."""
    times: list[list[float]] = [[] for _ in what]
    for f in what:
        f()
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for f, found in zip(what, times, strict=True):
            start = time.perf_counter()
            f()
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def rows(
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    seconds: float = 2.0,
) -> list[dict[str, Any]]:
    """One row a shape, dtype and pass: GB/s of the recurrence (ours) and of the copy (theirs).

    Args:
        shapes: (T, B, d) each.
        dtypes: of u, x and h.
        seconds: spent on each row.
    """
    found = []
    for dtype in dtypes:
        for T, B, d in shapes:
            u = torch.randn(B, T, 3, d).to(dtype).requires_grad_()
            x = torch.randn(B, T, d).to(dtype).requires_grad_()
            weight, bias = torch.randn(2, d, requires_grad=True), torch.randn(2, d, requires_grad=True)
            grad_h = torch.randn(B, T, d).to(dtype)

            def forward(u: Any = u, x: Any = x, weight: Any = weight, bias: Any = bias) -> None:
                with torch.no_grad():
                    ops.recurrence(u, x, weight, bias)

            def both(u: Any = u, x: Any = x, weight: Any = weight, bias: Any = bias, grad_h: Any = grad_h) -> None:
                h, _ = ops.recurrence(u, x, weight, bias)
                torch.autograd.grad(h, (u, x, weight, bias), grad_h)

            for name, f, parts in (("forward", forward, FORWARD), ("forward_backward", both, FORWARD + BACKWARD)):
                moved = parts * B * T * d * dtype.itemsize
                source, target = torch.ones(moved // 2, dtype=torch.uint8), torch.empty(moved // 2, dtype=torch.uint8)
                ours, copy = alternate(f, lambda source=source, target=target: target.copy_(source), seconds=seconds)
                found.append(
                    {
                        "suite": "recurrence",
                        "case": f"T{T}-B{B}-d{d}",
                        "peer": "copy",
                        "metric": f"{name}_gb_per_second",
                        "dtype": str(dtype).removeprefix("torch."),
                        "ours": moved / ours / 1e9,
                        "theirs": moved / copy / 1e9,
                        "ratio": copy / ours,
                        "limit_fraction": copy / ours,
                    }
                )
    return found


def main() -> None:
    """Print the rows, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each row (default: 2)")
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's own choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"backend: {ops.backend_info()}")
    print(f"{'case':18} {'dtype':9} {'pass':17} {'GB/s':>7} {'copy':>7} {'of the limit':>12}")
    found = rows(seconds=options.seconds)
    for row in found:
        name = row["metric"].removesuffix("_gb_per_second")
        print(
            f"{row['case']:18} {row['dtype']:9} {name:17} {row['ours']:7.1f} {row['theirs']:7.1f} {row['ratio']:12.0%}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
