"""Resident size while a model writes: after 2,000 and after 50,000 tokens.

    python benchmarks/memory.py [--tokens 50000]

Prints a line each, and their quotient. The model is the demo's size, with random weights.
"""

from __future__ import annotations

import argparse

import psutil
import torch

from undertow.cli.demo import MODEL
from undertow.cli.generate import sampling, write
from undertow.models import SRUppConfig, SRUppForCausalLM


def main() -> None:
    """Write and weigh."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=50_000)
    last = parser.parse_args().tokens
    first = min(2_000, last)
    torch.manual_seed(0)
    model = SRUppForCausalLM(SRUppConfig(**MODEL)).eval()
    process, resident, count = psutil.Process(), {}, 0

    def weigh(_: int) -> None:
        nonlocal count
        count += 1
        if count in (first, last):
            resident[count] = process.memory_info().rss
            print(f"after {count:,} tokens: {resident[count] / 2**20:.1f} MiB", flush=True)

    write(model, torch.tensor([[256]]), weigh, max_new_tokens=last, stop=False, **sampling(1.0))
    print(f"quotient: {resident[last] / resident[first]:.4f}")


if __name__ == "__main__":
    main()
