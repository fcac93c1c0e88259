"""What the machine is, and how fast it can be at best: the limits that everything else is measured against."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undertow.bench.pairs import Work, in_turns

Product = tuple[int, int, int]
"""M, K, N of a matrix product (M, K) @ (K, N)."""


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads, memory and versions: what a figure has to be read with."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "memory GiB": _memory_gib(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def training_products(products: Sequence[Product]) -> list[Product]:
    """A product and the two of its backward pass: for the input (M, N) @ (N, K), for the weight (N, M) @ (M, K)."""
    return [p for M, K, N in products for p in ((M, K, N), (M, N, K), (N, M, K))]


def operations(products: Sequence[Product]) -> int:
    """Floating-point operations: a multiplication and an addition each."""
    return sum(2 * M * K * N for M, K, N in products)


def multiply(products: Sequence[Product], dtype: torch.dtype, device: str = "cpu") -> Work:
    """These matrix products and nothing else: no model that needs them can be faster.

    Equal sizes share operands, which may then still be in a cache: a limit that is rather too high than too low.
    """
    made: dict[Product, tuple[Tensor, Tensor, Tensor]] = {}
    for product in products:
        if product not in made:
            M, K, N = product
            a, b = torch.randn(M, K, dtype=dtype, device=device), torch.randn(K, N, dtype=dtype, device=device)
            made[product] = a, b, torch.empty(M, N, dtype=dtype, device=device)

    def work() -> None:
        for product in products:
            a, b, out = made[product]
            torch.mm(a, b, out=out)

    return work


def copy(nbytes: int) -> Work:
    """Read half of so many bytes, and write the other half."""
    source = torch.ones(max(1, nbytes // 8))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def read(nbytes: int) -> Work:
    """Read so many bytes once, in that of several ways which is fastest here."""
    numbers = torch.ones(max(1, nbytes // 4))
    rows = numbers[: numbers.numel() // 1024 * 1024].view(-1, 1024) if numbers.numel() >= 1024 else numbers.view(1, -1)
    ways: dict[str, Work] = {
        "sum": lambda: rows.sum(1),
        "dot": lambda: torch.dot(numbers, numbers),
        "amax": numbers.amax,
    }
    times = in_turns(ways, repeats=3, warmup=1)
    return ways[min(times, key=lambda name: times[name].median)]
