"""From what a person names to what a run reads: documents shared out to train, valid and test, and their stores."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from undertow.data.cache import cache_folder, lock, sweep, usable_folder
from undertow.data.documents import Document, read_documents
from undertow.data.progress import byte_progress
from undertow.data.stdlib import stdlib_split
from undertow.data.store import VERSION, TokenStore
from undertow.data.tokenizer import load_tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_FRACTION = 0.05
_BY_CONTENT = 64 << 20  # corpora of up to so many bytes on disk are known by their contents, others by size and time


@dataclass
class DataConfig:
    """The text of a run, how it is shared out, and how it becomes tokens."""

    data: list[str] = field(default_factory=list)
    """Text to train on: files, folders, globs, "-" for standard input, or "stdlib" for the source of Python's standard
    library. gzip, xz, bzip2 and zip are read through."""

    valid: list[str] = field(default_factory=list)
    """Text to validate on; what is named here is left out of data. Default: a fraction of data."""

    test: list[str] = field(default_factory=list)
    """Text to test on; what is named here is left out of data. Default: a fraction of data."""

    tokenizer: str = "bytes"
    """Name "bytes", a tokenizer.json, a folder with one (a saved model, say), or "hub:owner/name" for the Hugging Face
    hub."""

    valid_fraction: float | None = None
    """Part of data held out for validation. Default: 0.05, and 0 where valid is given as text."""

    test_fraction: float | None = None
    """Part of data held out for testing. Default: 0.05, and 0 where valid or test is given as text."""

    split: Literal["auto", "document", "tail"] = "auto"
    """How fractions are taken: "document" holds out whole documents, chosen by a hash of seed and name; "tail" the end
    of the text. "auto" is document where each fraction comes to a document or more, else tail. The modules of "stdlib"
    always go by a hash of their names."""

    seed: int = 0
    """Chooses the documents that are held out."""

    cache_dir: str | None = None
    """Where token stores are kept. Default: $UNDERTOW_CACHE, $XDG_CACHE_HOME/undertow or ~/.cache/undertow."""


@dataclass(frozen=True)
class DocumentSplits:
    """The documents of each part; a part without any is empty."""

    train: list[Document]
    valid: list[Document]
    test: list[Document]


@dataclass(frozen=True)
class Splits:
    """The token stores of each part, their tokenizer, and the documents they were made from."""

    train: TokenStore
    valid: TokenStore | None
    test: TokenStore | None
    tokenizer: PreTrainedTokenizerBase
    documents: DocumentSplits


def prepare(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    documents: DocumentSplits | None = None,
    progress: bool | None = None,
) -> Splits:
    """The train, valid and test stores of a configuration, from the cache where they are there already.

    Args:
        config: what to read.
        tokenizer: used in place of ``config.tokenizer`` (that of the model which is trained further, say).
        documents: what ``split_documents(config)`` gave, where that was asked before.
        progress: show progress while a store is built; default: where standard error is a terminal.

    Raises:
        FileNotFoundError, PermissionError, ValueError: what is wrong with which file; see :func:`read_documents`,
            :func:`split_documents` and :meth:`TokenStore.build`.

    Example:
        >>> splits = prepare(DataConfig(data=["my.txt"]))            # doctest: +SKIP
        >>> stream = Stream(splits.train, batch_size=8, window=256)  # doctest: +SKIP
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(config.tokenizer)
    if documents is None:
        documents = split_documents(config)

    def store(part: str, of: list[Document]) -> TokenStore | None:
        if not of:
            return None
        return cached_store(of, tokenizer, config.cache_dir, label=part, progress=progress)

    train = store("train", documents.train)
    assert train is not None  # split_documents sees to it
    return Splits(train, store("valid", documents.valid), store("test", documents.test), tokenizer, documents)


def split_documents(config: DataConfig) -> DocumentSplits:
    """Share the documents of a configuration out to train, valid and test.

    Texts named for valid and test are those; what is still asked for as a fraction is taken from ``data``:

    - ``document``: documents are ordered by the SHA-256 of seed and name; the first ``round(n * test_fraction)``, one
      at least, are test, the next ones valid. It does not depend on where the files lie.
    - ``tail``: of all text end to end the last ``test_fraction`` is test, what lies before it valid. Each cut is moved
      on to the next line's beginning (else white space, else character), so that no line is cut in two.
    - ``stdlib``: :func:`undertow.data.stdlib_split`.

    Raises:
        ValueError: fractions that leave nothing, a text too short to hold out a part of, nothing left to train on.
    """
    if not config.data:
        raise ValueError("no text was given: name a file, a folder, a glob, - for standard input, or stdlib as data")
    # Whoever names a text to validate or test on wants to train on all of data, but for what must be there: valid.
    valid_fraction = _fraction("valid", config.valid_fraction, bool(config.valid), DEFAULT_FRACTION)
    fallback = 0.0 if config.valid else DEFAULT_FRACTION
    test_fraction = _fraction("test", config.test_fraction, bool(config.test), fallback)
    if valid_fraction + test_fraction >= 1:
        raise ValueError(f"valid_fraction {valid_fraction} and test_fraction {test_fraction} leave nothing to train on")
    if list(config.data) != ["stdlib"] and "stdlib" in config.data:
        raise ValueError("stdlib is split by its modules' names and cannot be mixed with other text in data")
    spool = cache_folder(config.cache_dir) / "spool"
    valid = read_documents(config.valid, spool=spool) if config.valid else []
    test = read_documents(config.test, spool=spool) if config.test else []
    held_out = {os.path.realpath(document.where) for document in (*valid, *test)}
    data = [d for d in read_documents(config.data, spool=spool) if os.path.realpath(d.where) not in held_out]
    if not data:
        raise ValueError("nothing is left to train on: all text of data is named under valid or test too")
    if list(config.data) == ["stdlib"]:
        parts = {name: [] for name in ("train", "valid", "test")}  # type: dict[str, list[Document]]
        for document in data:
            parts[stdlib_split(document.name, valid_fraction, test_fraction)].append(document)
        taken = parts["train"], parts["valid"], parts["test"]
    elif not valid_fraction and not test_fraction:
        taken = data, [], []
    else:
        asked = [f for f in (valid_fraction, test_fraction) if f]
        how = config.split
        if how == "auto":
            how = "document" if len(data) * min(asked) >= 1 else "tail"
        if how == "document":
            taken = _by_document(data, valid_fraction, test_fraction, config.seed)
        elif how == "tail":
            taken = _by_tail(data, valid_fraction, test_fraction)
        else:
            raise ValueError(f"split must be auto, document or tail, got {config.split!r}")
    return DocumentSplits(taken[0], valid or taken[1], test or taken[2])


def _fraction(part: str, fraction: float | None, named: bool, fallback: float) -> float:
    if fraction is None:
        return 0.0 if named else fallback
    if named and fraction:
        raise ValueError(f"{part}_fraction {fraction} cannot be taken: {part} is given as text")
    if not 0 <= fraction < 1:
        raise ValueError(f"{part}_fraction must be at least 0 and below 1, got {fraction}")
    return fraction


def _by_document(
    data: list[Document], valid_fraction: float, test_fraction: float, seed: int
) -> tuple[list[Document], list[Document], list[Document]]:
    tests = max(1, round(len(data) * test_fraction)) if test_fraction else 0
    valids = max(1, round(len(data) * valid_fraction)) if valid_fraction else 0
    if tests + valids >= len(data):
        raise ValueError(
            f"{len(data)} documents are too few to hold out {valids} for valid and {tests} for test; "
            "take split tail, or name texts for valid and test"
        )
    hashed = sorted(range(len(data)), key=lambda i: hashlib.sha256(f"{seed}:{data[i].name}".encode()).digest())
    test, valid = set(hashed[:tests]), set(hashed[tests : tests + valids])
    numbered = list(enumerate(data))
    return (
        [d for i, d in numbered if i not in test and i not in valid],
        [d for i, d in numbered if i in valid],
        [d for i, d in numbered if i in test],
    )


def _by_tail(
    data: list[Document], valid_fraction: float, test_fraction: float
) -> tuple[list[Document], list[Document], list[Document]]:
    lengths = [document.length() for document in data]
    total = sum(lengths)
    cuts = [total]
    held_out = 0.0
    for fraction in (test_fraction, valid_fraction):  # from the end
        held_out += fraction
        at, limit = total - round(total * held_out), cuts[0]
        # The cut before moved on to a line's beginning: an empty part must not catch what that left.
        wanted = fraction > 0 and at < limit
        cuts.insert(0, _line_start(data, lengths, at, (at + limit) // 2) if wanted else limit)
    bounds = [0, *cuts]
    parts = [_between(data, lengths, begin, end) for begin, end in pairwise(bounds)]
    for name, fraction, part in zip(("train", "valid", "test"), (1, valid_fraction, test_fraction), parts, strict=True):
        if fraction and not part:
            raise ValueError(f"the text is too short to share out: {total:,} bytes leave nothing for {name}")
    return parts[0], parts[1], parts[2]


def _between(data: list[Document], lengths: list[int], begin: int, end: int) -> list[Document]:
    """The documents, and parts of documents, between two places of the text laid end to end."""
    found, start = [], 0
    for document, length in zip(data, lengths, strict=True):
        low, high = max(begin - start, 0), min(end - start, length)
        if low < high:
            found.append(document if high - low == length else document.part(low, high))
        start += length
    return found


def _line_start(data: list[Document], lengths: list[int], at: int, limit: int) -> int:
    """Where to cut, from ``at`` to ``limit``: at the first line's beginning, else a word's, else a character's."""
    starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    i = bisect.bisect_right(starts, at) - 1
    start = starts[i]
    if at == start:
        return at
    # Some bytes before it are needed too: it may be a beginning already, or stand within a character.
    before = min(at - start, 4)
    text = data[i].part(at - start - before, min(limit - start, at - start + (1 << 16), lengths[i])).data
    for mark in (b"\n", b" "):
        if (found := text.find(mark, before - 1)) >= 0:
            return at - before + found + 1
    following = data[i].part(at - start, at - start + 1).data
    if following and following[0] & 0xC0 == 0x80:  # it is no character's first byte: back to that
        for back in range(1, before + 1):
            if text[before - back] & 0xC0 != 0x80:
                return at - back
    return at


def cached_store(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    label: str = "text",
    progress: bool | None = None,
) -> TokenStore:
    """The token store of these documents with this tokenizer, built unless the cache has it.

    It is found again by the tokenizer and by the documents' names and contents; where there is more than 64 MiB of
    text, by path, size and time of change instead of reading it all. Several processes may ask at once: one builds,
    the others wait. A store in the cache that is damaged is built anew, with a warning.

    Args:
        documents: the texts, in order.
        tokenizer: see :meth:`TokenStore.build`.
        cache_dir: see :func:`cache_folder`.
        label: what progress calls it.
        progress: default: where standard error is a terminal.

    Raises:
        ValueError, OSError: see :meth:`TokenStore.build`; a text that changes while it is read.
    """
    folder = usable_folder(cache_folder(cache_dir) / "stores")
    key = _key(documents, tokenizer)
    path = folder / key
    if (store := _open_cached(path, tokenizer)) is not None:
        return store
    with lock(folder / f".lock-{key}"):
        if (store := _open_cached(path, tokenizer)) is not None:  # another process has built it meanwhile
            return store
        if path.exists():
            _clear_damaged(path, tokenizer)
        sweep(folder)
        total = sum(document.length() if document.size is not None else 0 for document in documents)
        with byte_progress(f"tokens of {label}", total, progress) as advance:
            try:
                store = TokenStore.build(documents, tokenizer, path, progress=advance)
            except FileExistsError:  # no locks on this file system, and another was quicker
                store = TokenStore.open(path, tokenizer)
    if _key(documents, tokenizer) != key:
        shutil.rmtree(path, ignore_errors=True)
        raise ValueError(f"the text changed while it was read ({label}); start again when it is complete")
    return store


def _open_cached(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenStore | None:
    try:
        return TokenStore.open(path, tokenizer)
    except (FileNotFoundError, ValueError):
        return None


def _clear_damaged(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say what is wrong with a store in the cache and take it away."""
    try:
        TokenStore.open(path, tokenizer)
    except (FileNotFoundError, ValueError) as error:
        warnings.warn(f"{error} - it is built anew", stacklevel=3)
    shutil.rmtree(path)


def _key(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> str:
    by_content = sum(document.stored for document in documents) <= _BY_CONTENT
    parts: list[object] = [VERSION, tokenizer_fingerprint(tokenizer)]
    for document in documents:
        if by_content or not document.identity:
            parts.append([document.name, document.digest()])
        else:
            # Stat anew, so that a change while the store is built shows.
            parts.append([document.name, _identity_now(document), document.start, document.stop])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _identity_now(document: Document) -> str:
    path = document.identity.partition("|")[0]
    if not os.path.isabs(path):
        return document.identity
    status = os.stat(path)
    rest = document.identity.split("|")[3:]
    return "|".join([path, str(status.st_size), str(status.st_mtime_ns), *rest])
