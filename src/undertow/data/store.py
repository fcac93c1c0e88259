"""Token stores: the token ids of documents in a folder on disk, memory-mapped, so that 10 GB of text cost no memory."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from undertow.data.documents import Document
from undertow.data.encode import Counts, encode_documents
from undertow.data.files import sha256, sync
from undertow.data.tokenizer import is_byte_tokenizer, separator_id, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "undertow-tokens"
VERSION = 1

DOCUMENT = np.dtype(
    [("start", "<i8"), ("tokens", "<i8"), ("bytes", "<i8"), ("characters", "<i8"), ("words", "<i8"), ("lines", "<i8")]
)
"""One record a document: where its tokens begin and how many they are; what it holds as text (-1: not known)."""


class TokenStore:
    """The tokens of documents, one document after the other, in a folder.

    ========================= =======================================================================================
    ``tokens.bin``            the ids, little-endian, in the smallest of uint8, uint16, uint32 that holds them
    ``documents.bin``         one record a document, see :data:`DOCUMENT`
    ``names.jsonl``           one name a line
    ``meta.json``             format, vocabulary, fingerprints, sizes; written last
    ========================= =======================================================================================

    Separators are not stored. A document read as tokens is ``[bos] + tokens``, and where documents begin is known from
    the records; :class:`~undertow.data.Stream` and :func:`~undertow.data.evaluation_pieces` put ``bos`` in. So text in
    bytes takes one byte a token although its vocabulary has 257 ids.

    Make one with :meth:`build` or :meth:`from_ids`, open one with :meth:`open`.

    Attributes:
        path: the folder.
        tokens: (N,) all ids, memory-mapped, read-only.
        documents: (number of documents,) records with the fields ``start``, ``tokens``, ``bytes``, ``characters``,
            ``words``, ``lines``.
        bos_token_id: the separator that stands before each document, or None.
        vocab_size: ids of the tokenizer.
        content: SHA-256 of ``tokens.bin`` and ``documents.bin``: two stores with the same one hold the same data.

    Example:
        >>> import tempfile
        >>> from undertow.data import Document, byte_tokenizer
        >>> folder = tempfile.mkdtemp() + "/store"
        >>> store = TokenStore.build([Document("a", b"to be")], byte_tokenizer(), folder)
        >>> len(store), bytes(store[0]), store.tokens.dtype
        (5, b'to be', dtype('uint8'))
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.tokens: NDArray[np.integer] = _map(path / "tokens.bin", np.dtype(meta["dtype"]))
        self.documents: NDArray[np.void] = _map(path / "documents.bin", DOCUMENT)
        self.bos_token_id: int | None = meta["bos_token_id"]
        self.vocab_size: int = meta["vocab_size"]
        self.content: str = meta["content"]
        self._names: list[str] | None = None

    @classmethod
    def build(
        cls,
        documents: Iterable[Document],
        tokenizer: PreTrainedTokenizerBase,
        path: str | os.PathLike[str],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> TokenStore:
        """Tokenise documents into a new store; memory stays the same however long they are.

        The folder appears under its name only when it is complete and on the disk (written beside it, synced, renamed).

        Args:
            documents: texts, read once, in blocks.
            tokenizer: a byte tokenizer takes any bytes; any other takes UTF-8 only. The names of special tokens in a
                text are text.
            path: the folder to make; it must not exist.
            progress: called with the number of bytes just read.

        Raises:
            FileExistsError: the folder exists.
            ValueError: no text; bytes that are not UTF-8 (document and offset named); an id outside the vocabulary.
            OSError: the disk is full, or the like; nothing is left behind.
        """
        vocab_size = len(tokenizer)
        highest = 255 if is_byte_tokenizer(tokenizer) else vocab_size - 1
        with _Writer(Path(path), _dtype(highest), vocab_size, separator_id(tokenizer)) as writer:
            for ids, document, counts in encode_documents(documents, tokenizer, progress=progress):
                writer.add(ids, document.where)
                if counts is not None:
                    writer.end(document.name, counts)
            writer.finish(tokenizer=tokenizer_fingerprint(tokenizer))
        return cls.open(path)

    @classmethod
    def from_ids(
        cls,
        documents: Iterable[Sequence[int] | NDArray[np.integer]],
        vocab_size: int,
        path: str | os.PathLike[str],
        *,
        bos_token_id: int | None = None,
        names: Sequence[str] | None = None,
    ) -> TokenStore:
        """A new store of documents that are token ids already.

        Args:
            documents: each document's ids, without separators.
            vocab_size: every id must lie below it.
            path: the folder to make; it must not exist.
            bos_token_id: the separator put before each document when it is read; None: nothing.
            names: a name a document; default: ``document 0``, ``document 1`` …

        Raises:
            ValueError: an id outside the vocabulary; the id, the document and its place there are named.
        """
        if vocab_size < 1 or (bos_token_id is not None and not 0 <= bos_token_id < vocab_size):
            raise ValueError(f"bos_token_id {bos_token_id} does not fit a vocabulary of {vocab_size} ids")
        with _Writer(Path(path), _dtype(vocab_size - 1), vocab_size, bos_token_id) as writer:
            for number, ids in enumerate(documents):
                name = names[number] if names is not None else f"document {number}"
                array = np.asarray(ids)
                if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                    raise ValueError(f"{name}: ids must be one row of integers, got {array.dtype} {array.shape}")
                writer.add(array, name)
                writer.end(name, Counts(-1, -1, -1, -1))
            writer.finish(tokenizer=None)
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None) -> TokenStore:
        """Open a store; nothing is read but its description.

        Args:
            path: the folder.
            tokenizer: where given, the store must have been made with this one.

        Raises:
            FileNotFoundError: there is no store.
            ValueError: a store that was cut short or is damaged (the file is named), or made with another tokenizer.
        """
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] != FORMAT or meta["version"] != VERSION:
                raise ValueError(f"{path}: a token store of another version ({meta['version']}, not {VERSION})")
            sizes = dict(meta["sizes"])
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: there is no token store in this folder") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path / 'meta.json'}: the token store is damaged; delete the folder") from error
        for name, size in sizes.items():
            file = path / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"was cut short: {found:,} bytes instead of {size:,}"
                if found is not None and found > size:
                    state = f"has {found:,} bytes instead of {size:,}"
                raise ValueError(f"{file}: the token store is damaged, this file {state}; delete the folder")
        if tokenizer is not None and meta["tokenizer"] not in (None, tokenizer_fingerprint(tokenizer)):
            raise ValueError(f"{path}: this token store was made with another tokenizer; build it anew with this one")
        return cls(path, meta)

    def verify(self) -> None:
        """Read everything and compare it with the checksum.

        Raises:
            ValueError: the contents have changed since the store was made.
        """
        if _content(self.path) != self.content:
            raise ValueError(f"{self.path}: the token store is damaged (its checksum differs); delete the folder")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Every id, the separator included, must lie below ``vocab_size`` (a model's, say); costs nothing when so.

        Raises:
            ValueError: the first id that does not, with its document and place.
        """
        if self.bos_token_id is not None and self.bos_token_id >= vocab_size:
            raise ValueError(f"the separator, id {self.bos_token_id}, is outside the vocabulary of {vocab_size} ids")
        if self.meta["highest"] < vocab_size:
            return
        for document in range(len(self.documents)):
            _check_ids(self[document], vocab_size, self.names[document], 0)

    def __len__(self) -> int:
        """Number of tokens, separators not counted."""
        return len(self.tokens)

    def __getitem__(self, document: int) -> NDArray[np.integer]:
        """The ids of a document, memory-mapped, without a separator."""
        record = self.documents[document]
        return self.tokens[int(record["start"]) : int(record["start"] + record["tokens"])]

    @property
    def names(self) -> list[str]:
        """The name of each document."""
        if self._names is None:
            with open(self.path / "names.jsonl", encoding="utf-8", newline="\n") as file:
                self._names = [json.loads(line) for line in file]
        return self._names

    @property
    def bytes(self) -> int | None:
        """Bytes of all documents as text; None where they came as ids."""
        return self._total("bytes")

    @property
    def characters(self) -> int | None:
        """Characters of all documents; None where one is not UTF-8."""
        return self._total("characters")

    @property
    def words(self) -> int | None:
        """Words of all documents, cut at ASCII white space."""
        return self._total("words")

    @property
    def lines(self) -> int | None:
        """Line feeds in all documents. Word-level corpora count ``words + lines`` (one ``<eos>`` a line)."""
        return self._total("lines")

    def _total(self, field: str) -> int | None:
        column = self.documents[field]
        return None if (column < 0).any() else int(column.sum())

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}: {len(self):,} tokens in {len(self.documents):,} documents)"


def _dtype(highest: int) -> np.dtype[Any]:
    """The smallest type that holds ids up to ``highest``."""
    return np.dtype("u1" if highest < 1 << 8 else "<u2" if highest < 1 << 16 else "<u4")


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _check_ids(ids: NDArray[np.integer], vocab_size: int, where: str, offset: int) -> None:
    if ids.size and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        at = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        raise ValueError(
            f"{where}: token id {int(ids[at])} at position {offset + at} is outside the vocabulary of {vocab_size} ids"
        )


class _Writer:
    """Writes a store under a temporary name; it takes its own name only when complete."""

    def __init__(self, path: Path, dtype: np.dtype[Any], vocab_size: int, bos_token_id: int | None) -> None:
        self.path, self.dtype, self.vocab_size, self.bos_token_id = path, dtype, vocab_size, bos_token_id
        self.tokens = self.start = self.documents = 0
        self.highest = -1
        self.records: list[tuple[int, ...]] = []
        self.names: list[str] = []

    def __enter__(self) -> _Writer:
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists already")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.folder = self.path.parent / f".tmp-{self.path.name}-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder.mkdir()
        self.files: dict[str, IO[bytes]] = {
            name: (self.folder / name).open("wb") for name in ("tokens.bin", "documents.bin", "names.jsonl")
        }
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for file in self.files.values():
            try:
                file.close()
            except OSError:  # closing flushes, and fails again on a full disk
                continue
        shutil.rmtree(self.folder, ignore_errors=True)  # gone already where all went well
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise type(error)(error.errno, f"{error.strerror}, while the token store was written", str(self.path))

    def add(self, ids: NDArray[np.integer], where: str) -> None:
        if not ids.size:
            return
        _check_ids(ids, self.vocab_size, where, self.tokens - self.start)
        self.highest = max(self.highest, int(ids.max()))
        self.files["tokens.bin"].write(ids.astype(self.dtype, copy=False).tobytes())
        self.tokens += ids.size

    def end(self, name: str, counts: Counts) -> None:
        record = (self.start, self.tokens - self.start, counts.size, counts.characters, counts.words, counts.lines)
        self.records.append(record)
        self.names.append(name)
        self.start = self.tokens
        self.documents += 1
        if len(self.records) >= 1 << 12:
            self._flush()

    def _flush(self) -> None:
        self.files["documents.bin"].write(np.array(self.records, dtype=DOCUMENT).tobytes())
        self.files["names.jsonl"].write("".join(json.dumps(name) + "\n" for name in self.names).encode())
        self.records, self.names = [], []

    def finish(self, tokenizer: str | None) -> None:
        if not self.tokens:
            raise ValueError(f"there is no text: {self.documents} documents give no token")
        self._flush()
        sizes = {}
        for name, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.str,
            "tokens": self.tokens,
            "documents": self.documents,
            "vocab_size": self.vocab_size,
            "bos_token_id": self.bos_token_id,
            "highest": self.highest,
            "tokenizer": tokenizer,
            "content": _content(self.folder),
            "sizes": sizes,
        }
        with open(self.folder / "meta.json", "w", encoding="utf-8") as text:
            json.dump(meta, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        try:
            os.rename(self.folder, self.path)
        except OSError as error:
            if not self.path.exists():
                raise
            raise FileExistsError(f"{self.path} exists already") from error
        sync(self.path.parent)


def _content(folder: Path) -> str:
    return sha256(folder / "tokens.bin", folder / "documents.bin")


def iterate_texts(documents: Iterable[Document], progress: Callable[[int], object] | None = None) -> Iterator[str]:
    """The text of documents in pieces, cut at white space where there is some, for training a vocabulary.

    Raises:
        ValueError: bytes that are not UTF-8; the document and the offset are named.
    """
    from undertow.data.encode import decode_blocks

    for document in documents:
        held = ""
        for block in decode_blocks(document, Counts(progress=progress)):
            text = held + block
            # Before the last run of white space: merges and words begin with a space, they do not end with one.
            cut = len(text.rstrip()) if text[-1:].isspace() else max(text.rfind(" "), text.rfind("\n"))
            cut = cut if cut > 0 else len(text)
            held = text[cut:]
            if cut:
                yield text[:cut]
        if held:
            yield held
