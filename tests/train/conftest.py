"""A tiny text, a tiny model, and how to train it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from undertow.data import Document, TokenStore, byte_tokenizer
from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.train import TrainConfig, TrainResult, train

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


def text(seed: int, words: int) -> bytes:
    """A line of known words, always the same for a seed."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words)).encode()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bit for bit means: with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStore]:
    """Documents of very different lengths, one of them shorter than a window."""
    folder = tmp_path_factory.mktemp("stores")
    lengths = {"train": (1, 30, 200, 7, 90, 55), "valid": (25, 2, 40)}
    return {
        part: TokenStore.build(
            [Document(f"{part} {i}", text(i + 10 * len(part), n)) for i, n in enumerate(counts)],
            byte_tokenizer(),
            folder / part,
        )
        for part, counts in lengths.items()
    }


def small_model(**changes: Any) -> SRUppForCausalLM:
    """An SRU++ of about 10,000 parameters, the same ones each time."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "projection_size": 8, "num_hidden_layers": 2, "attention_window": 20}
    return SRUppForCausalLM(SRUppConfig(**{**sizes, "alpha_init": 0.1, **changes}))


def small_config(**changes: Any) -> TrainConfig:
    """A run of a second or two that does everything often."""
    settings = {
        "steps": 12,
        "batch_size": 4,
        "window": 16,
        "learning_rate": 1e-2,
        "optimizer": "radam",
        "beta2": 0.999,
        "log_every": 1,
        "eval_every": 5,
        "eval_tokens": 200,
        "checkpoint_every": 3,
        "keep": 100,
        "tensorboard": False,
        "device": "cpu",
    }
    return TrainConfig(**{**settings, **changes})


@pytest.fixture
def go(stores: dict[str, TokenStore], tmp_path: Path) -> Callable[..., TrainResult]:
    """``go(out, model=…, resume=…, **changes of the configuration)`` trains into ``tmp_path / out``."""

    def call(out: str, *, model: Any = None, resume: bool | str = False, **changes: Any) -> TrainResult:
        overwrite = changes.pop("overwrite", False)
        valid = changes.pop("valid_store", stores["valid"])
        quiet = changes.pop("quiet", True)
        return train(
            model if model is not None else small_model(hidden_dropout=0.1),
            stores["train"],
            small_config(**changes),
            tmp_path / out,
            valid_store=valid,
            resume=resume,
            overwrite=overwrite,
            quiet=quiet,
        )

    return call


def close(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]], rel: float) -> bool:
    """Whether two lists of records agree up to a relative error in their numbers."""

    def same(a: Any, b: Any) -> bool:
        return a == pytest.approx(b, rel=rel) if isinstance(a, float) and isinstance(b, float) else a == b

    return len(ours) == len(theirs) and all(
        len(x) == len(y) and all(map(same, x, y)) for x, y in zip(ours, theirs, strict=True)
    )


def records(out: Path) -> list[tuple[Any, ...]]:
    """What has to be the same in two runs: everything but the times."""
    keys = ("kind", "step", "tokens", "loss", "bits_per_byte", "learning_rate", "grad_norm", "best")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in keys) for line in lines]
