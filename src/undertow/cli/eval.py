"""What a text costs a saved model: bits per byte and per character, perplexity per token and per word.

undertow eval runs/first                       on the run's own held-out text
undertow eval runs/first/best --data book.txt  on another text, all of it
undertow eval runs/first --attention_window 1024 --json result.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from undertow.evaluate import EvalResult

POSITIONAL = ("model",)


@dataclass
class Config:
    """What to evaluate, on what, how."""

    model: str | None = None
    """A saved model's folder, a run's folder (its best model), or hub:owner/name."""
    data: list[str] = field(default_factory=list)
    """The text, all of it; by default the held-out text that the run's config.yaml names."""
    split: Literal["valid", "test"] = "test"
    """Which held-out part, where data is not given."""
    tokenizer: str | None = None
    """The tokenizer; by default the one saved with the model."""
    batch_size: int = 8
    """Rows read at once; does not change the result of a model that carries a state."""
    window: int = 256
    """Tokens of a row read at once; does not change the result of a model that carries a state."""
    attention_window: int | None = None
    """Previous positions to attend to, instead of the model's own setting."""
    max_tokens: int | None = None
    """Score only so many tokens, the first ones."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: matrix products under autocast."""
    device: str | None = None
    """cpu, cuda, …; by default a GPU where there is one."""
    json: str | None = None
    """Write the result to this file too."""
    cache_dir: str | None = None
    """Where token stores are kept."""


def run(config: Config) -> None:
    """Evaluate and print a table."""
    from undertow.cli.train import choose_device, load_model, saved_model
    from undertow.evaluate import evaluate

    if config.model is None:
        raise ValueError("which model? undertow eval MODEL_FOLDER --data TEXT")
    place = saved_model(config.model)
    store = text_store(config, place)
    device = choose_device(config.device)
    result = evaluate(
        load_model(place, device),
        store,
        batch_size=config.batch_size,
        window=config.window,
        attention_window=config.attention_window,
        max_tokens=config.max_tokens,
        precision=config.precision,
    )
    show(result, place)
    if config.json is not None:
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        facts = {"model": place, "data": config.data or config.split, **result.as_dict()}
        Path(config.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def text_store(config: Config, place: str) -> Any:
    """The text as tokens of the model's vocabulary."""
    import yaml

    from undertow.cli.train import data_config
    from undertow.data import cache_folder, cached_store, load_tokenizer, prepare, read_documents

    tokenizer = load_tokenizer(config.tokenizer or place)
    if config.data:
        documents = read_documents(config.data, spool=cache_folder(config.cache_dir) / "spool")
        return cached_store(documents, tokenizer, config.cache_dir)
    record = Path(place).parent / "config.yaml"
    if not record.is_file():
        raise ValueError(f"which text? {place} is not of a run that knows its own: undertow eval {place} --data TEXT")
    tree = yaml.safe_load(record.read_text(encoding="utf-8"))
    settings = data_config(tree)
    settings.cache_dir = config.cache_dir or settings.cache_dir
    store = getattr(prepare(settings, tokenizer), config.split)
    if store is None:
        raise ValueError(f"the run has no {config.split} text; name one with --data")
    return store


def show(result: EvalResult, model: str) -> None:
    """The table."""
    from undertow.report import table

    rows: list[tuple[str, object]] = [
        ("bits per byte", result.bits_per_byte),
        ("bits per character", result.bits_per_character),
        ("perplexity per token", result.perplexity),
        ("perplexity per word", result.perplexity_per_word),
        ("tokens scored", result.targets),
        ("documents", result.documents),
        ("bytes", result.bytes),
        ("tokens/s", result.tokens_per_second),
        ("attention window", result.attention_window),
        ("state carried", result.state_carried),
    ]
    table(rows, title=model)
    if not result.state_carried:
        print(f"Windows of {result.window} tokens were read one by one, each without the text before it.")
    if result.cut:
        print("max_tokens cut a document: its bytes, characters and words are in proportion to its tokens.")
