"""What the machine is, and how fast it can be at best: the limits that everything else is measured against."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from undertow.bench.pairs import seconds

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


@lru_cache(maxsize=256)
def product_seconds(product: Product, dtype: torch.dtype = torch.float32) -> float:
    """The time of one matrix product, its output in place."""
    M, K, N = product
    a, b, out = torch.randn(M, K, dtype=dtype), torch.randn(K, N, dtype=dtype), torch.empty(M, N, dtype=dtype)
    return seconds(lambda: torch.mm(a, b, out=out), repeats=9)


def products_seconds(products: Sequence[Product], dtype: torch.dtype = torch.float32) -> float:
    """The time of these matrix products and nothing else: no model that needs them can be faster."""
    return sum(product_seconds(product, dtype) for product in products)


def training_products(products: Sequence[Product]) -> list[Product]:
    """A product and the two of its backward pass: for the input (M, N) @ (N, K), for the weight (N, M) @ (M, K)."""
    return [p for M, K, N in products for p in ((M, K, N), (M, N, K), (N, M, K))]
