"""Read a long text once, in constant memory, and keep what the model remembers of it.

undertow read book.txt --model runs/first --save book.state
undertow read sequel.txt --model runs/first --state book.state --save both.state
undertow generate runs/first "And so" --state both.state
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from undertow.data import Document

POSITIONAL = ("book",)

PIECE = 512
"""Tokens read at a time."""

_META = "undertow_reading"
_BATCH = 1 << 14  # characters tokenised at a time


@dataclass
class Config:
    """What to read, with which model, and where to keep what it remembers."""

    book: str | None = None
    """The text: a file, a folder, a glob or "-" for standard input. Several files are read as one text."""
    model: str | None = None
    """A saved model's or adapter's folder, a run's folder (its best model), or hub:owner/name."""
    base: str | None = None
    """The base of an adapter, where it is not found by the name that the adapter has for it."""
    state: str | None = None
    """Go on from this state, which a reading before has saved."""
    save: str | None = None
    """The file to write the state to; generate goes on from it, and read with another text."""
    overwrite: bool = False
    """Replace the file that save names."""
    score: bool = True
    """Tell what the text cost the model, too; without, reading is a little faster."""
    window: int = PIECE
    """Tokens read at once; does not change the result."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: matrix products under autocast."""
    tokenizer: str | None = None
    """The tokenizer; by default the one saved with the model."""
    device: str | None = None
    """cpu, cuda, …; by default a GPU where there is one."""
    json: str | None = None
    """Write the figures to this file too."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window should be at least 1, not {self.window}")


@dataclass
class Bookmark:
    """What is kept beside a state: which model it belongs to, and where it stands.

    The state is that after all tokens but the last one, which is kept by itself: so that whoever goes on, with more
    text or without, has a token to give to the model.
    """

    model: str
    """Fingerprint of the model's weights."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    tokens: int
    """Read so far, from the text's beginning."""
    last: int
    """The last token, which the state has not seen."""
    digest: str = ""
    """Of the rest of the file, written when it is saved; empty: nothing is known of it."""

    def __post_init__(self) -> None:
        for name, kind in (("model", str), ("tokenizer", str), ("tokens", int), ("last", int), ("digest", str)):
            value: Any = getattr(self, name)
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise ValueError(f"{name} cannot be {value!r:.40}")


def run(config: Config) -> int:
    """Read, save, and print what it came to; 0, or 130 after Ctrl-C."""
    from undertow.allocator import return_large_blocks
    from undertow.cli.checks import check_json, check_not_text, matching_tokenizer, write_json
    from undertow.cli.train import choose_device, load_model, saved_model
    from undertow.data import cache_folder, read_documents, separator_id

    if config.book is None:
        raise ValueError("which text? undertow read BOOK --model MODEL_FOLDER --save FILE")
    if config.model is None:
        raise ValueError("which model? undertow read BOOK --model MODEL_FOLDER --save FILE")
    save = None if config.save is None else Path(config.save).expanduser()
    if save is not None:
        check_save(save, config.overwrite)
    check_json(config.json, {"the state --save": config.save, "the state --state": config.state})
    mark = None if config.state is None else open_bookmark(config.state)
    place = saved_model(config.model)
    device = choose_device(config.device)
    return_large_blocks()
    documents = read_documents([config.book], spool=cache_folder(None) / "spool")
    for option, path in (("--save", config.save), ("--json", config.json)):
        check_not_text(path, option, documents)
    text = _Text(config.book, documents, matching_tokenizer(config.tokenizer, place))
    model: Any = load_model(place, device, base=config.base).eval()
    check_carries_state(model, place)
    if mark is None:
        state, first, seen = None, separator_id(text.tokenizer), 0
    else:
        assert config.state is not None
        check_bookmark(mark, config.state, model, place, text.fingerprint)
        state, first, seen = load(model, config.state), mark.last, mark.tokens
    check_vocabulary(text.highest, model, place)
    with _progress(text.count) as show:
        result = read_text(
            model, text.ids(), state=state, first=first, window=config.window, score=config.score,
            precision=config.precision, progress=show,
        )  # fmt: skip
    seen += result.tokens
    if save is not None:
        assert result.last is not None  # a text has a token
        digest = model_fingerprint(model) if mark is None else mark.model
        save_state(save, result.state, Bookmark(digest, text.fingerprint, seen, result.last))
    facts = _facts(config, place, text, result, seen)
    _show(facts)
    if config.json is not None:
        write_json(config.json, facts)
    return 0


# -- the text --------------------------------------------------------------------------------------------------------


class _Text:
    """The ids of some documents, read as one text, in constant memory; looked through once beforehand."""

    def __init__(self, book: str, documents: list[Document], tokenizer: Any) -> None:
        from undertow.data import tokenizer_fingerprint

        self.tokenizer = tokenizer
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.documents = documents
        self.count, self.bytes, self.words, self.highest = 0, 0, 0, -1
        for ids, _, counts in self._encoded():
            self.count += len(ids)
            if len(ids):
                self.highest = max(self.highest, int(ids.max()))
            if counts is not None:
                self.bytes, self.words = self.bytes + counts.size, self.words + counts.words
        if not self.count:
            raise ValueError(f"{book}: there is no token in this text")

    def _encoded(self) -> Iterator[Any]:
        from undertow.data.encode import encode_documents

        return encode_documents(self.documents, self.tokenizer, batch=_BATCH)

    def ids(self) -> Iterator[NDArray[Any]]:
        """Some at a time."""
        for ids, _, _ in self._encoded():
            yield ids


def check_vocabulary(highest: int, model: Any, place: str) -> None:
    """Whether the model has an embedding for every id of a text.

    Raises:
        ValueError: it has not: the tokenizer is another model's.
    """
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and highest >= size:
        raise ValueError(
            f"the tokenizer gives ids up to {highest}, and {place} has a vocabulary of {size}: it does not match"
        )


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass
class ReadResult:
    """What reading a text gave."""

    state: Any
    """After all tokens but the last one; None where there was no more than that one."""
    last: int | None
    """The last token; None: there was none."""
    tokens: int
    """Tokens of the text, those given beforehand not counted."""
    nll: float | None
    """Summed negative log-likelihood of ``scored`` tokens, in nats; None: not asked for."""
    scored: int
    seconds: float


def read_text(
    model: Any,
    ids: Iterable[NDArray[Any]],
    *,
    state: Any = None,
    first: int | None = None,
    window: int = PIECE,
    score: bool = True,
    precision: str = "float32",
    progress: Callable[[int], object] | None = None,
) -> ReadResult:
    """Read one text of any length, holding a window of it at a time.

    Args:
        model: a causal language model that carries a state, in evaluation mode.
        ids: the text's tokens, some at a time.
        state: to go on from; None: the text begins.
        first: a token that stands before them: that which begins a text, or the last one of what ``state`` has read.
        window: tokens read at once; the result does not depend on it.
        score: sum the tokens' negative log-likelihood.
        precision: "float32", or "bfloat16" for matrix products under autocast.
        progress: called with how many tokens have just been read.

    Raises:
        FloatingPointError: the likelihood is not a number.
    """
    import torch

    from undertow.allocator import give_back
    from undertow.evaluate.protocol import token_nll

    device = next(model.parameters()).device
    given = int(first is not None)
    nll, scored, count, last = 0.0, 0, -given, first
    begun = time.perf_counter()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    with torch.inference_mode(), autocast:
        # Each piece lacks the token that follows it, its last target; that begins the next piece.
        for piece in _pieces(ids, first, window):
            last = int(piece[-1])
            count += len(piece) - 1
            if len(piece) == 1:
                break
            tokens = torch.from_numpy(piece).to(device)[None]
            keep = {} if score else {"logits_to_keep": 1}
            out = model(input_ids=tokens[:, :-1], cache=state, use_cache=True, **keep)
            state = out.cache
            if score:
                nll += float(token_nll(out.logits, tokens[:, 1:]).double().sum())
                scored += len(piece) - 1
            del out
            give_back()
            if progress is not None:
                progress(len(piece) - 1)
    if last is not None:
        count += 1
    if not math.isfinite(nll):
        raise FloatingPointError(f"the loss is {nll}: the model's weights or the precision {precision} give no numbers")
    return ReadResult(state, last, count, nll if score else None, scored, time.perf_counter() - begun)


def _pieces(ids: Iterable[NDArray[Any]], first: int | None, window: int) -> Iterator[NDArray[Any]]:
    """Stretches of ``window + 1`` ids (the last one shorter), each beginning with the last id of the one before."""
    import numpy as np

    held = np.array([] if first is None else [first], dtype=np.int64)
    for some in ids:
        held = np.concatenate([held, some.astype(np.int64)])
        at = 0
        while len(held) - at > window + 1:
            yield held[at : at + window + 1]
            at += window
        held = held[at:].copy()
    if len(held):
        yield held


# -- states in files -------------------------------------------------------------------------------------------------


def model_fingerprint(model: Any) -> str:
    """Of all weights."""
    from undertow.evaluate.protocol import unwrap
    from undertow.models.state import fingerprint

    return fingerprint(dict(unwrap(model).named_parameters()))


def check_carries_state(model: Any, place: str) -> None:
    """Whether the model has a state that could be kept.

    Raises:
        ValueError: it has none.
    """
    from undertow.evaluate.protocol import carries_state

    if not carries_state(model):
        raise ValueError(f"{place} is a model that carries no state; undertow retrofit gives it one")


def check_save(path: Path, overwrite: bool) -> None:
    """Whether a state may be written there; changes nothing.

    Raises:
        IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError: why not.
    """
    from undertow.cli.checks import check_file

    check_file(path, "a state")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} is there already: --overwrite replaces it, another --save leaves it alone")


def save_state(path: Path, state: Any, mark: Bookmark) -> None:
    """Write a state and its bookmark to one safetensors file, all at once.

    Raises:
        OSError: it could not be written; a file that was there is as it was.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    from undertow.data.files import atomic_file

    with atomic_file(path) as unfinished:
        tensors: dict[str, Tensor] = {}
        meta: dict[str, str] = {}
        if state is not None:
            state.save(unfinished)
            with safe_open(unfinished, "pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        mark = replace(mark, digest=_digest(tensors, meta))
        save_file(tensors, unfinished, meta | {_META: json.dumps(asdict(mark))})


def _digest(tensors: dict[str, Tensor], meta: dict[str, str]) -> str:
    """Of a state as its file has it, without the bookmark."""
    import hashlib

    from undertow.models.state import fingerprint

    others = sorted(item for item in meta.items() if item[0] != _META)
    return hashlib.blake2b(f"{fingerprint(tensors)} {others}".encode(), digest_size=16).hexdigest()


def open_bookmark(path: str) -> Bookmark:
    """The bookmark of a state in a file.

    Raises:
        FileNotFoundError, IsADirectoryError: no such file.
        ValueError: the file is damaged, or no state that ``undertow read`` saved.
    """
    from safetensors import SafetensorError, safe_open

    where = Path(path).expanduser()
    if not where.exists():
        raise FileNotFoundError(f"there is no state {path}; undertow read BOOK --model MODEL --save {path} makes one")
    if where.is_dir():
        raise IsADirectoryError(f"{path} is a folder, and a state is a file")
    try:
        with safe_open(where, "pt") as file:
            meta = file.metadata() or {}
            if _META not in meta:
                raise ValueError(f"{path} holds no state that undertow read has saved")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, cut short or no safetensors file ({error})") from error
    try:
        mark = Bookmark(**json.loads(meta[_META]))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: what it says about its state is damaged ({error})") from error
    if mark.digest and mark.digest != _digest(tensors, meta):
        raise ValueError(f"{path} is damaged: the state in it is not the one that was saved")
    return mark


def check_bookmark(mark: Bookmark, path: str, model: Any, place: str, tokenizer: str) -> None:
    """Whether a saved state is of this model and this tokenizer.

    Raises:
        ValueError: it is not.
    """
    if mark.model != model_fingerprint(model):
        raise ValueError(f"{path} is the state of another model: the weights of {place} are not those it was read with")
    if mark.tokenizer != tokenizer:
        raise ValueError(f"{path} is the state of a text that was read with another tokenizer than that of {place}")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and mark.last >= size:
        raise ValueError(
            f"{path}: what it says about its state is damaged (its last token is {mark.last}, the vocabulary {size})"
        )


def load(model: Any, path: str) -> Any:
    """The state in a file; None where only a text's first token had been read.

    Raises:
        ValueError: see :func:`undertow.evaluate.protocol.load_state`; the message names the file.
    """
    from safetensors import SafetensorError, safe_open

    from undertow.evaluate.protocol import load_state

    where = Path(path).expanduser()
    try:
        with safe_open(where, "pt") as file:
            if not file.keys():
                return None
        return load_state(model, where)
    except (SafetensorError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: the state in it is damaged, or none of this model ({said})") from error
    except ValueError as error:
        raise error if path in str(error) else ValueError(f"{path}: {error}") from error


# -- what it tells ---------------------------------------------------------------------------------------------------


class _progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.bar: Any = None

    def __enter__(self) -> Callable[[int], None] | None:
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from undertow.train.progress import rate

        columns = (TextColumn("reading"), BarColumn(bar_width=None), MofNCompleteColumn(),
                   TextColumn("{task.fields[pace]}"), TimeRemainingColumn())  # fmt: skip
        self.bar = bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task("reading", total=self.total, pace="")
        begun, done = time.perf_counter(), 0
        bar.start()

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            bar.update(task, advance=tokens, pace=rate(done / (time.perf_counter() - begun)))

        return advance

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _facts(config: Config, place: str, text: _Text, result: ReadResult, seen: int) -> dict[str, Any]:
    def exp(value: float) -> float:
        return math.exp(value) if value < 700 else math.inf

    scored = result.nll is not None and result.scored > 0
    nll = result.nll or 0.0
    return {
        "text": config.book,
        "documents": len(text.documents),
        "bytes": text.bytes,
        "model": place,
        "went_on_from": config.state,
        "tokens": result.tokens,
        "tokens_so_far": seen,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / max(result.seconds, 1e-9),
        "nll": nll if scored else None,
        "perplexity": exp(nll / result.scored) if scored else None,
        "perplexity_per_word": exp(nll / text.words) if scored and text.words else None,
        "bits_per_byte": nll / math.log(2) / text.bytes if scored else None,
        "state_bytes": 0 if result.state is None else result.state.nbytes(),
        "peak_resident_bytes": _peak(),
        "saved_to": config.save,
    }


def _peak() -> int | None:
    """The most memory that this process has held."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _show(facts: dict[str, Any]) -> None:
    from undertow.report import table

    peak = facts["peak_resident_bytes"]
    rows: list[tuple[str, object]] = [
        ("tokens read", facts["tokens"]),
        ("tokens so far", facts["tokens_so_far"]),
        ("tokens/s", facts["tokens_per_second"]),
        ("perplexity per token", facts["perplexity"]),
        ("perplexity per word", facts["perplexity_per_word"]),
        ("bits per byte", facts["bits_per_byte"]),
        ("state, bytes", facts["state_bytes"]),
        ("peak memory, MiB", None if peak is None else round(peak / 2**20)),
    ]
    several = "" if facts["documents"] == 1 else f" ({facts['documents']} documents, read as one text)"
    table(rows, title=f"{facts['text']}{several}")
    if facts["saved_to"] is not None:
        print(f"state saved: {facts['saved_to']}")
        model = facts["model"]
        print(f"go on with: undertow generate {model} --state {facts['saved_to']}")
