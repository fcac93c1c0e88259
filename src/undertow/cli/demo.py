"""Train a small SRU++ on the source of Python's standard library, measure it on modules it has not seen, let it write.

Two minutes of training on two cores, about three in all, no download. undertow demo --minutes 10 goes further.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.data import Document

PROMPT = "def "

# Chosen by trying, at two minutes on two cores: docs/log.md.
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "projection_size": 128,
    "num_hidden_layers": 4,
    "attention_every": 4,
    "attention_window": 128,
}
TRAINING: dict[str, Any] = {
    "batch_size": 32,
    "window": 64,
    "optimizer": "adamw",
    "beta2": 0.99,
    "learning_rate": 6e-3,
    "precision": "bfloat16",
    "eval_every": 200,
    "eval_tokens": 50_000,
    "checkpoint_every": 0,
    "tensorboard": False,
}


@dataclass
class Config:
    """How long, and where to."""

    minutes: float = 2.0
    """Minutes of training; reading the library and the evaluation at the end take another minute or so."""
    out: str = "runs/demo"
    """The run's folder; a demo that is in it already is replaced."""
    seed: int = 0
    """Of initial values, order of documents, and the sample."""
    eval_tokens: int | None = None
    """Evaluate only so many bytes of the held-out modules at the end; by default all."""
    sample_tokens: int = 1000
    """Bytes to write."""

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise ValueError(f"minutes should be above 0, not {self.minutes}")
        if self.sample_tokens < 1:
            raise ValueError(f"sample_tokens should be at least 1, not {self.sample_tokens}")


def run(config: Config) -> int:
    """Train, evaluate, write, draw; 0, or 128 + the number of the signal that stopped it."""
    import torch

    from undertow.allocator import keep_freed_memory
    from undertow.cli.train import load_model
    from undertow.data import DataConfig, prepare
    from undertow.evaluate import evaluate
    from undertow.models import SRUppConfig, SRUppForCausalLM
    from undertow.report import learning_curve
    from undertow.train import TrainConfig, train

    begun = time.perf_counter()
    out = Path(config.out)
    data = prepare(DataConfig(data=["stdlib"]))
    assert data.test is not None
    print(
        f"The source of Python's standard library: {data.train.bytes:,} bytes to train on, "
        f"{data.test.bytes:,} bytes of other modules to measure with."
    )
    keep_freed_memory()
    torch.manual_seed(config.seed)
    model = SRUppForCausalLM(SRUppConfig(**MODEL))
    settings = TrainConfig(minutes=config.minutes, seed=config.seed, **TRAINING)
    result = train(
        model,
        data.train,
        settings,
        out,
        valid_store=data.valid,
        tokenizer=data.tokenizer,
        overwrite=out.exists() and any(out.iterdir()),
        record={"data": ["stdlib"], "tokenizer": "bytes", **asdict(settings), "model": MODEL},
    )
    if result.interrupted is not None:
        return 128 + result.interrupted

    best: Any = load_model(str(out / "best")).eval()
    print("Measuring on the held-out modules: half a minute or so ...", flush=True)
    held_out = evaluate(
        best, data.test, batch_size=16, window=256, max_tokens=config.eval_tokens, precision=settings.precision
    )
    gzip_bits, xz_bits = compressors(data.documents.test)

    sample = out / "sample.py.txt"
    sample.write_text(_sample(best, data.tokenizer, config), encoding="utf-8")
    curve = learning_curve(
        out,
        lines={"gzip -9": gzip_bits, "xz -9": xz_bits},
        title=f"SRU++, {result.parameters / 1e6:.1f}M parameters, Python's standard library",
    )
    summary = {
        "bits_per_byte": held_out.bits_per_byte,
        "gzip_bits_per_byte": gzip_bits,
        "xz_bits_per_byte": xz_bits,
        "tokens_per_second": result.tokens / result.seconds,
        "parameters": result.parameters,
        "bytes_seen": result.tokens,
        "training_seconds": result.seconds,
        "held_out_bytes": held_out.bytes,
        "total_seconds": time.perf_counter() - begun,
        "evaluation": held_out.as_dict(),
        "machine": _machine(),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _show(summary, out, sample, curve)
    return 0


def compressors(documents: list[Document]) -> tuple[float, float]:
    """Bits per byte that gzip -9 and xz -9 make of the documents in one piece."""
    text = b"".join(document.data for document in documents)
    packed = len(gzip.compress(text, 9)), len(lzma.compress(text, preset=9))
    return 8 * packed[0] / len(text), 8 * packed[1] / len(text)


def _sample(model: Any, tokenizer: Any, config: Config) -> str:
    import torch

    from undertow.cli.generate import sampling, write
    from undertow.data import TextDecoder

    decoder, text = TextDecoder(tokenizer), io.StringIO(PROMPT)
    text.seek(0, io.SEEK_END)
    torch.manual_seed(config.seed)
    ids = torch.tensor([[tokenizer.bos_token_id, *PROMPT.encode()]])
    # A byte at a time, slightly sharpened: more of what it knows, less of what it guesses.
    write(model, ids, lambda token: text.write(decoder.push(token)), max_new_tokens=config.sample_tokens, stop=False,
          **sampling(0.7, top_p=0.95))  # fmt: skip
    return text.getvalue() + decoder.flush() + "\n"


def _machine() -> dict[str, Any]:
    from undertow.bench import describe_machine

    return describe_machine()


def _show(summary: dict[str, Any], out: Path, sample: Path, curve: Path) -> None:
    from undertow.report import table

    text = sample.read_text(encoding="utf-8")
    print(f"\nWhat it writes after {PROMPT!r}:\n")
    print("\n".join("    " + line[:100] for line in text.splitlines()[:24]).rstrip())
    print()
    table(
        [
            ("parameters", summary["parameters"]),
            ("bytes seen in training", summary["bytes_seen"]),
            ("training, bytes a second", summary["tokens_per_second"]),
            ("bits per byte, held-out modules", summary["bits_per_byte"]),
            ("  the same text, gzip -9", summary["gzip_bits_per_byte"]),
            ("  the same text, xz -9", summary["xz_bits_per_byte"]),
        ]
    )
    print()
    table(
        [
            ("model", str(out / "best")),
            ("learning curve", str(curve)),
            ("sample", str(sample)),
            ("these figures", str(out / "summary.json")),
            ("loss, step by step", str(out / "metrics.jsonl")),
        ]
    )
    # As it has to be typed here: `make` does not put the environment on the path.
    called = "python -m undertow" if sys.argv[0].endswith("__main__.py") else os.path.relpath(sys.argv[0])
    undertow = "undertow" if shutil.which("undertow") else called
    commands = {
        "let it write on": f'generate {out} "class "',
        "longer memory": f"eval {out} --attention_window 1024",
        "train longer": "demo --minutes 10",
        "your own text": "train --data your.txt",
    }
    print("\nNext:")
    for what, command in commands.items():
        print(f"  {what:<16} {undertow} {command}")
