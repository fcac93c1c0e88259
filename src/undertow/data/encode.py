"""From the bytes of documents to token ids, in constant memory."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from undertow.data.documents import Document
from undertow.data.tokenizer import is_byte_tokenizer, text_backend

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 15
"""Characters of a document that are tokenised in one go."""
OVERLAP = 1 << 10
"""Characters that neighbouring pieces share; their tokenisations are joined where both agree."""
BATCH = 1 << 20
"""Characters given to the tokenizer's threads at a time."""
_AGREE = 8  # tokens on either side of a joint that must be equal in both pieces

_SPACE = np.zeros(256, dtype=bool)
_SPACE[list(b" \t\n\r\x0b\x0c")] = True


@dataclass
class Counts:
    """What a document holds, counted as its bytes pass by.

    ``size`` is in bytes, ``words`` are runs of bytes between ASCII white space (what ``wc -w`` counts), ``lines`` are
    line feeds, ``characters`` is -1 where the bytes are not UTF-8.
    """

    size: int = 0
    characters: int = 0
    words: int = 0
    lines: int = 0
    progress: Callable[[int], object] | None = None
    _in_word: bool = False

    def add(self, block: bytes) -> None:
        """Count bytes, words and lines of the next block (characters are counted where they are decoded)."""
        space = _SPACE[np.frombuffer(block, dtype=np.uint8)]
        self.size += len(block)
        self.words += int(np.count_nonzero(space[:-1] & ~space[1:])) + int(not space[0] and not self._in_word)
        self.lines += block.count(b"\n")
        self._in_word = not space[-1]
        if self.progress is not None:
            self.progress(len(block))


Encoded = tuple[NDArray[np.integer], Document, Counts | None]
"""Some ids of a document, the document, and its counts once it is complete (None before)."""


def encode_documents(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    piece: int = PIECE,
    overlap: int = OVERLAP,
    batch: int = BATCH,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Encoded]:
    """The ids of each document, some at a time, without separators; memory does not grow with a document's length.

    For a byte tokenizer ids are the bytes. For others a long document is tokenised in pieces that overlap, and two
    pieces are joined in the middle of a stretch where their tokens agree. The result is that of tokenising the whole
    text, whatever the size of pieces, for every tokenizer in which a token depends on no more than ``overlap / 4``
    characters around it: all that cut text into words first, as long as words are shorter than that. A longer run
    without a place to agree on (megabytes of base64, say) is cut at a token's end; it decodes to the same text.

    Args:
        documents: the texts.
        tokenizer: see above.
        piece, overlap: in characters.
        batch: characters given to the tokenizer's threads at a time: fewer take less memory.
        progress: called with the number of bytes just read.

    Raises:
        ValueError: bytes that are not UTF-8 where the tokenizer needs text; the document and the offset are named.
    """
    if is_byte_tokenizer(tokenizer):
        return _encode_bytes(documents, progress)
    return _encode_text(documents, text_backend(tokenizer), piece, overlap, batch, progress)


def _encode_bytes(documents: Iterable[Document], progress: Callable[[int], object] | None) -> Iterator[Encoded]:
    for document in documents:
        counts = Counts(progress=progress)
        utf8 = codecs.getincrementaldecoder("utf-8")()
        for block in document.blocks():
            counts.add(block)
            if counts.characters >= 0:
                try:
                    counts.characters += len(utf8.decode(block))
                except UnicodeDecodeError:
                    counts.characters = -1
            yield np.frombuffer(block, dtype=np.uint8), document, None
        if counts.characters >= 0 and utf8.getstate()[0]:  # it ends inside a character
            counts.characters = -1
        yield np.empty(0, dtype=np.uint8), document, counts


def decode_blocks(document: Document, counts: Counts | None = None) -> Iterator[str]:
    """The document's text, block by block, no character cut in two.

    Raises:
        ValueError: a byte that is not UTF-8, with document and offset.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")()
    seen = document.start  # offsets are those in the file, also for a part of it
    try:
        for block in document.blocks():
            held = len(utf8.getstate()[0])
            text = utf8.decode(block)
            seen += len(block)
            if counts is not None:
                counts.add(block)
                counts.characters += len(text)
            yield text
        held, block = len(utf8.getstate()[0]), b""
        utf8.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset, byte = seen - held + error.start, error.object[error.start]
        raise ValueError(
            f"{document.where}: byte 0x{byte:02x} at offset {offset} is not UTF-8 ({error.reason}); "
            "a text tokenizer needs UTF-8: convert the file, or take the tokenizer bytes"
        ) from error


@dataclass
class _Piece:
    document: Document
    text: str
    base: int  # position of its first character in the document
    counts: Counts | None  # of the whole document, with its last piece


def _cut(
    documents: Iterable[Document], piece: int, overlap: int, progress: Callable[[int], object] | None
) -> Iterator[_Piece]:
    for document in documents:
        counts = Counts(progress=progress)
        text, base = "", 0
        for more in decode_blocks(document, counts):
            text += more
            at = 0
            while len(text) - at > piece + overlap:
                yield _Piece(document, text[at : at + piece], base + at, None)
                at += piece - overlap
            text, base = text[at:], base + at
        yield _Piece(document, text, base, counts)


def _encode_text(
    documents: Iterable[Document],
    backend: Tokenizer,
    piece: int,
    overlap: int,
    most: int,
    progress: Callable[[int], object] | None,
) -> Iterator[Encoded]:
    if not 0 < 2 * overlap < piece:
        raise ValueError(f"overlap must lie between 0 and half of piece, got overlap {overlap}, piece {piece}")
    joiner = _Joiner(backend, overlap)
    batch: list[_Piece] = []
    size = 0
    for cut in _cut(documents, piece, overlap, progress):
        batch.append(cut)
        size += len(cut.text) + 64
        if size >= most:
            yield from _encode_batch(batch, backend, joiner)
            batch, size = [], 0
    yield from _encode_batch(batch, backend, joiner)


def _encode_batch(batch: list[_Piece], backend: Tokenizer, joiner: _Joiner) -> Iterator[Encoded]:
    encodings = backend.encode_batch([cut.text for cut in batch], add_special_tokens=False)
    for cut, encoding in zip(batch, encodings, strict=True):
        for ids in joiner.take(cut, encoding):
            yield ids, cut.document, None
        if cut.counts is not None:
            yield np.empty(0, dtype=np.int64), cut.document, cut.counts


class _Joiner:
    """Joins the tokenisations of overlapping pieces of a document."""

    def __init__(self, backend: Tokenizer, overlap: int) -> None:
        self.backend = backend
        self.overlap = overlap
        self.held: tuple[NDArray[np.int64], NDArray[np.int64], int] | None = None  # ids, spans, end of the last piece

    def take(self, cut: _Piece, encoding: Encoding) -> Iterator[NDArray[np.int64]]:
        """The ids that are certain once this piece has come."""
        ids = np.array(encoding.ids, dtype=np.int64)
        if self.held is None and cut.counts is not None:  # a document of one piece: no joints, no spans needed
            yield ids
            return
        spans = _spans(encoding, cut.base)
        if self.held is not None:
            held_ids, held_spans, held_end = self.held
            joint = self._joint(held_ids, held_spans, ids, spans, cut.base, held_end)
            if joint is None:
                keep, resume = self._forced(held_spans, cut.base, held_end)
                encoding = self.backend.encode(cut.text[resume - cut.base :], add_special_tokens=False)
                ids, spans = np.array(encoding.ids, dtype=np.int64), _spans(encoding, resume)
            else:
                keep, skip = joint
                ids, spans = ids[skip:], spans[skip:]
            yield held_ids[:keep]
        if cut.counts is not None:
            self.held = None
            yield ids
        else:
            self.held = ids, spans, cut.base + len(cut.text)

    def _joint(
        self,
        ids: NDArray[np.int64],
        spans: NDArray[np.int64],
        next_ids: NDArray[np.int64],
        next_spans: NDArray[np.int64],
        begin: int,
        end: int,
    ) -> tuple[int, int] | None:
        """How many tokens of the piece to keep and of the next to skip; None where they agree nowhere."""
        low, high = begin + self.overlap // 4, end - self.overlap // 4
        here, there = _clean(spans, low, high), _clean(next_spans, low, high)
        places, at, next_at = np.intersect1d(spans[here, 0], next_spans[there, 0], return_indices=True)
        for choice in np.argsort(np.abs(places - (begin + end) // 2), kind="stable"):
            i, k = int(here[at[choice]]), int(there[next_at[choice]])
            before, after = min(_AGREE, i, k), min(_AGREE, len(ids) - i, len(next_ids) - k)
            if np.array_equal(ids[i - before : i + after], next_ids[k - before : k + after]) and np.array_equal(
                spans[i - before : i + after, 0], next_spans[k - before : k + after, 0]
            ):
                return i, k
        return None

    def _forced(self, spans: NDArray[np.int64], begin: int, end: int) -> tuple[int, int]:
        """Where to cut when nothing agrees: a token's end in the middle of the overlap, else the end of the piece."""
        ends = _clean(spans, begin + 1, end)
        if not len(ends):
            return len(spans), end
        i = int(ends[np.argmin(np.abs(spans[ends, 0] - (begin + end) // 2))])
        return i, max(begin, int(spans[i - 1, 1]))


def _spans(encoding: Encoding, base: int) -> NDArray[np.int64]:
    """First and last character of each token, (n, 2), counted in the document."""
    return np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + base


def _clean(spans: NDArray[np.int64], low: int, high: int) -> NDArray[np.int64]:
    """Indices of tokens within [low, high] that begin where the one before has ended: good places to cut."""
    starts, ends = spans[1:, 0], spans[:-1, 1]
    good = (starts >= ends) & (starts > spans[:-1, 0]) & (spans[1:, 1] > starts) & (starts >= low) & (starts <= high)
    return np.flatnonzero(good) + 1
