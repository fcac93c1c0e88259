"""Streams of windows: pieces of (batch, window) tokens in which each row continues the same row of the piece before."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undertow.data.store import TokenStore

IGNORED = -100
"""The target that is not scored, as in ``torch.nn.functional.cross_entropy``."""


@dataclass(frozen=True)
class Piece:
    """A window of each row.

    Attributes:
        input_ids: (B, T) int64, what is read.
        targets: (B, T) int64, the token that follows each input in its row; -100: not scored. They are shifted already.
        resets: (B, T) bool, True where a document begins: whatever is carried is forgotten *before* that input.
        attention_mask: (B, T) int64, 0 where a row has ended and is padded; None: no padding in this piece.
        documents: (B, T) int64, the store's index of the document of each target, -1 on padding; None in training.
        positions: (B, T) int64, how many inputs of its document stand before each, 0 on padding; None in training.
    """

    input_ids: Tensor
    targets: Tensor
    resets: Tensor
    attention_mask: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None

    @property
    def scored(self) -> int:
        """Number of targets that are scored."""
        return int((self.targets != IGNORED).sum())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Piece:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in given.items() if value is not None})

    def select_rows(self, rows: slice | Tensor | list[int]) -> Piece:
        """The piece of some rows only, for gradient accumulation over parts of the batch."""
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> Piece:
        """The piece on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))


class Stream:
    """Endless pieces for training with a carried state.

    An epoch is all documents, each as ``[bos] + tokens``, in an order drawn anew for each epoch, laid end to end and
    cut into ``batch_size`` rows of equal length (the first ones hold one token more where it does not come out even).
    Row b reads its part of epoch 0, then its part of epoch 1, and so on, ``window`` tokens a piece. So

    - the pieces' row b, joined, is the row's own stream, whatever the window;
    - each token is read once an epoch, by one row;
    - a target is the next token of the same row. After a document's last token that is the next document's ``bos``:
      it is trained on, since a model that writes must learn to end (evaluation never scores it). Where a row's part
      begins inside a document, ``resets`` is True as well, for what it continues was read by another row.

    Where it stands is one number, so that it resumes exactly, also with another window or number of processes.

    Args:
        store: the tokens.
        batch_size: rows of the whole batch, all processes together.
        window: tokens a row a piece.
        seed: of the order of documents; epoch e is drawn from (seed, e).
        shuffle: False: documents stay in the store's order in every epoch.
        rank, world_size: this process reads rows ``rank * batch_size / world_size`` and on, as many as its share; the
            processes' pieces one below the other are the piece of one process alone.

    Attributes:
        position: tokens each row has read so far.

    Raises:
        ValueError: a row would be shorter than a window, or the rows cannot be shared evenly.

    Example:
        >>> stream = Stream(store, batch_size=8, window=256)          # doctest: +SKIP
        >>> piece = next(stream)                                      # doctest: +SKIP
        >>> out = model(piece.input_ids, shift_labels=piece.targets)  # doctest: +SKIP
    """

    def __init__(
        self,
        store: TokenStore,
        batch_size: int,
        window: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check(batch_size=batch_size, window=window, world_size=world_size)
        if batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} cannot be shared evenly by {world_size} processes")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be at least 0 and below world_size {world_size}, got {rank}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.store, self.batch_size, self.window, self.seed, self.shuffle = store, batch_size, window, seed, shuffle
        self.position = 0
        self._separator = store.bos_token_id is not None
        self._starts = np.ascontiguousarray(store.documents["start"], dtype=np.int64)
        self._sizes = np.ascontiguousarray(store.documents["tokens"], dtype=np.int64) + self._separator
        self.tokens_per_epoch = int(self._sizes.sum())
        share, rest = divmod(self.tokens_per_epoch, batch_size)
        if share < window:
            raise ValueError(
                f"the text is too short: {self.tokens_per_epoch:,} tokens in {batch_size} rows leave {share:,} a row, "
                f"less than one window of {window:,}; " + _remedy(self.tokens_per_epoch, batch_size, window)
            )
        every = np.arange(batch_size, dtype=np.int64)
        mine = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self._lengths = (share + (every < rest))[mine, None]  # (rows, 1)
        self._begins = (every * share + np.minimum(every, rest))[mine, None]
        self._orders: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def epoch(self) -> float:
        """Epochs read so far."""
        return self.position * self.batch_size / self.tokens_per_epoch

    @property
    def pieces_per_epoch(self) -> float:
        """Pieces in an epoch; seldom a whole number, for rows run on into the next epoch without a gap."""
        return self.tokens_per_epoch / (self.batch_size * self.window)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        ids, starts = self._read(self.position, self.window + 1)
        self.position += self.window
        return Piece(
            torch.from_numpy(ids[:, :-1].copy()),
            torch.from_numpy(ids[:, 1:].copy()),
            torch.from_numpy(starts[:, :-1].copy()),
        )

    def _read(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens ``position`` to ``position + count`` of each row, and where documents begin; both (rows, count)."""
        epoch, offset = np.divmod(np.arange(position, position + count), self._lengths)
        place = self._begins + offset  # in the epoch's documents laid end to end
        document = np.empty_like(place)
        within = np.empty_like(place)
        for e in np.unique(epoch):
            order, ends = self._order(int(e))
            here = epoch == e
            nth = np.searchsorted(ends, place[here], side="right")
            document[here] = order[nth]
            within[here] = place[here] - ends[nth] + self._sizes[order[nth]]
        first = within == 0
        source = self._starts[document] + within - self._separator
        if self._separator:
            source[first] = 0
        ids = self.store.tokens[source].astype(np.int64)
        if self._separator:
            ids[first] = self.store.bos_token_id
        return ids, first | (offset == 0)

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's order of documents, and where each ends when they are laid end to end."""
        if epoch not in self._orders:
            if self.shuffle:
                order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self._sizes))
            else:
                order = np.arange(len(self._sizes))
            self._orders = {e: o for e, o in self._orders.items() if epoch - 2 <= e}  # rows stand in two at most
            self._orders[epoch] = order, np.cumsum(self._sizes[order])
        return self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and of which data; a few plain values."""
        return {
            "position": self.position,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "content": self.store.content,
            "bos_token_id": self.store.bos_token_id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stream stood; the next piece is exactly the one that it would have given.

        Raises:
            ValueError: the state is of other data or of other settings, which are named; nothing is changed.
        """
        own = self.state_dict()
        if missing := own.keys() - state.keys():
            raise ValueError(f"this is not the state of a stream: {', '.join(sorted(missing))} missing")
        other = [key for key in own if key != "position" and own[key] != state[key]]
        if "content" in other:
            raise ValueError("the stream's state belongs to another text or tokenizer: its tokens differ from these")
        if other:
            values = ", ".join(f"{key} {state[key]} (here {own[key]})" for key in other)
            raise ValueError(f"the stream's state was saved with {values}; use the same to continue exactly")
        self.position = int(state["position"])


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")


def _remedy(tokens: int, batch_size: int, window: int) -> str:
    most = tokens // window
    if most >= 1:
        return f"take batch_size {most} or less, or window {tokens // batch_size:,} or less"
    return f"take window {tokens:,} or less (with batch_size 1), or more text"


class _Scored:
    """What is read of each document, and what of it is scored.

    A document ``[bos] + tokens`` is read up to its last token but one, and its targets are its tokens: ``bos`` is never
    a target, and neither is the end of a document, which training does ask for. Without a ``bos`` a document's first
    token has nothing before it and is not scored.

    Args:
        store: the tokens.
        limit: score only this many tokens, the first ones of the store that would be scored; None: all.
        skip: the first tokens of each document, which are read and not scored.
        per_document: read only so many tokens of each document, its first ones, those skipped included; None: all.

    Attributes:
        scored: number of targets that are scored in all.
        sizes: (documents,) inputs that are read, as many as there are targets up to the last one scored.
        first: (documents,) how many of those are not scored.

    Raises:
        ValueError: nothing can be scored.
    """

    def __init__(self, store: TokenStore, limit: int | None, skip: int, per_document: int | None) -> None:
        _check(**{
            name: value for name, value in (("limit", limit), ("per_document", per_document)) if value is not None
        })  # fmt: skip
        if skip < 0:
            raise ValueError(f"skip must not be negative, got {skip}")
        self.store = store
        self._separator = store.bos_token_id is not None
        unseen = int(not self._separator)  # tokens at a document's start that cannot be targets
        tokens = store.documents["tokens"].astype(np.int64)
        ends = tokens if per_document is None else np.minimum(tokens, per_document)
        sizes = np.maximum(ends - unseen, 0)
        first = np.minimum(max(skip - unseen, 0), sizes)
        scored = sizes - first
        if limit is not None:
            done = np.cumsum(scored) - scored
            scored = np.clip(limit - done, 0, scored)
        self.sizes = np.where(scored > 0, first + scored, 0)
        self.first = first
        self.scored = int(scored.sum())
        if not self.scored:
            if skip or per_document is not None:
                raise ValueError(
                    f"there is nothing to score: no document has a token after its first {skip:,}"
                    + ("" if per_document is None else f" and within its first {per_document:,}")
                )
            raise ValueError("there is nothing to score: the documents hold no token that has one before it")

    def _lay(self, rows: list[tuple[NDArray[np.int64], NDArray[np.int64], int]], width: int) -> Piece:
        """A piece from rows: of every input the document and the place in it, and from which place on it is scored."""
        shape = (len(rows), width)
        starts = self.store.documents["start"]
        padding = 0 if self.store.bos_token_id is None else self.store.bos_token_id
        ids = np.full(shape, padding, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        documents = np.full(shape, -1, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        resets = np.zeros(shape, dtype=bool)
        for b, (document, within, scored_from) in enumerate(rows):
            n = len(within)
            if not n:
                continue
            source = starts[document] + within
            if self._separator:
                ids[b, :n] = self.store.tokens[np.maximum(source - 1, 0)]
                ids[b, :n][within == 0] = padding  # bos
                wanted = self.store.tokens[source]
            else:
                ids[b, :n] = self.store.tokens[source]
                wanted = self.store.tokens[source + 1]
            scored = within >= np.maximum(self.first[document], scored_from)
            targets[b, :n] = np.where(scored, wanted.astype(np.int64), IGNORED)  # ids may be unsigned
            documents[b, :n] = document
            positions[b, :n] = within
            resets[b, :n] = within == 0
        return Piece(
            torch.from_numpy(ids),
            torch.from_numpy(targets),
            torch.from_numpy(resets),
            None if documents.min() >= 0 else torch.from_numpy((documents >= 0).astype(np.int64)),
            torch.from_numpy(documents),
            torch.from_numpy(positions),
        )


class evaluation_pieces(_Scored):
    """Pieces that score every token of every document exactly once, each with all of its document before it.

    Rows hold whole documents in the store's order, the longest ones dealt first so that rows come out about equal; a
    row that has ended is padded on the right (``attention_mask`` 0). A document ``[bos] + tokens`` is read up to its
    last token but one, and its targets are its tokens: ``bos`` is never a target, and neither is the end of a document,
    which training does ask for. Without a ``bos`` a document's first token has nothing before it and is not scored.
    What is scored does not depend on ``batch_size`` and ``window``; they only share out the work. Sum by document with
    ``piece.documents``.

    Args:
        store: the tokens.
        batch_size: rows; fewer where more could not be filled, since a document is read by one row.
        window: tokens a row a piece; the last piece may be narrower.
        limit: score only this many tokens, the first ones of the store; None: all.
        skip: the first tokens of each document, which are read and not scored.
        per_document: read only so many tokens of each document, those skipped included; None: all.

    Attributes:
        scored: number of targets that are scored in all pieces together.
        tokens: number of tokens that are read, padding not counted.
        batch_size: rows of each piece.

    Raises:
        ValueError: nothing can be scored.

    Example:
        >>> for piece in evaluation_pieces(store, batch_size=8, window=1024):  # doctest: +SKIP
        ...     nll = cross_entropy(logits(piece).transpose(1, 2), piece.targets, reduction="none")
        ...     sums.index_add_(0, piece.documents.flatten(), nll.flatten())  # where documents >= 0
    """

    def __init__(
        self,
        store: TokenStore,
        batch_size: int,
        window: int,
        *,
        limit: int | None = None,
        skip: int = 0,
        per_document: int | None = None,
    ) -> None:
        _check(batch_size=batch_size, window=window)
        super().__init__(store, limit, skip, per_document)
        self.window = window
        self.tokens = int(self.sizes.sum())
        # A document is read by one row, so the longest one sets the number of pieces: rows that it does not leave
        # enough for would only be padded.
        self.batch_size = min(batch_size, int(np.count_nonzero(self.sizes)), -(-self.tokens // int(self.sizes.max())))
        self._rows = [np.sort(row) for row in _deal(self.sizes, self.batch_size)]
        self._ends = [np.cumsum(self.sizes[row]) for row in self._rows]
        self._longest = max(int(ends[-1]) for ends in self._ends)

    def __len__(self) -> int:
        return -(-self._longest // self.window)

    def __iter__(self) -> Iterator[Piece]:
        for begin in range(0, self._longest, self.window):
            width = min(self.window, self._longest - begin)
            rows = []
            for row, ends in zip(self._rows, self._ends, strict=True):
                place = np.arange(begin, min(begin + width, int(ends[-1])))
                nth = np.searchsorted(ends, place, side="right")
                document = row[nth]
                rows.append((document, place - ends[nth] + self.sizes[document], 0))
            yield self._lay(rows, width)


class window_pieces(_Scored):
    """Windows that score every token of every document exactly once, each window to be read on its own.

    A row is one window of one document: its first window is the document's first ``window`` inputs, and each further
    one begins ``stride`` inputs later and scores the ``stride`` it has not shared with the one before. So with
    ``stride`` = ``window`` they are disjoint, with half of it each target but the first ones has at least half a window
    before it. The last window of a document may be shorter; it is padded on the right. Documents never share a window.

    Args:
        store, limit, skip, per_document: as for :class:`evaluation_pieces`. Windows in which nothing is scored are not
            read.
        batch_size: windows a piece; the last piece may have fewer.
        window: inputs a window.
        stride: inputs from a window's begin to the next one's; None: ``window``.

    Attributes:
        scored: number of targets that are scored in all pieces together.
        tokens: inputs that the windows do not share, those skipped included: what reading on by one costs is shared out
            over them.
        batch_size: rows of a piece.

    Raises:
        ValueError: nothing can be scored; a stride longer than the window, which would leave tokens out.
    """

    def __init__(
        self,
        store: TokenStore,
        batch_size: int,
        window: int,
        stride: int | None = None,
        *,
        limit: int | None = None,
        skip: int = 0,
        per_document: int | None = None,
    ) -> None:
        stride = window if stride is None else stride
        _check(batch_size=batch_size, window=window, stride=stride)
        if stride > window:
            raise ValueError(f"stride {stride} is longer than the window of {window}: it would leave tokens out")
        super().__init__(store, limit, skip, per_document)
        self.window, self.stride = window, stride
        # Of each document the windows from the first that scores anything to the last; window k ends at window + k C.
        wanted = self.sizes > 0
        self._first = np.where(wanted, np.maximum(-(-(self.first + 1 - window) // stride), 0), 0)
        self._last = np.where(wanted, np.maximum(-(-(self.sizes - window) // stride), 0), -1)
        self.windows = int((self._last - self._first + 1).sum())
        self.batch_size = min(batch_size, self.windows)
        fresh = np.where(self._first > 0, window + (self._first - 1) * stride, 0)
        self.tokens = int((self.sizes - fresh)[wanted].sum())

    def __len__(self) -> int:
        return -(-self.windows // self.batch_size)

    def __iter__(self) -> Iterator[Piece]:
        rows: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = []
        for document in np.flatnonzero(self.sizes):
            for k in range(int(self._first[document]), int(self._last[document]) + 1):
                begin = k * self.stride
                within = np.arange(begin, min(begin + self.window, int(self.sizes[document])))
                scored_from = begin + self.window - self.stride if k else 0
                rows.append((np.full(len(within), document), within, scored_from))
                if len(rows) == self.batch_size:
                    yield self._lay(rows, max(len(row[1]) for row in rows))
                    rows = []
        if rows:
            yield self._lay(rows, max(len(row[1]) for row in rows))


def _deal(sizes: NDArray[np.int64], rows: int) -> list[NDArray[np.int64]]:
    """Share documents among rows, the longest first, each to the row that has least; none goes without."""
    heap = [(0, row) for row in range(rows)]
    dealt: list[list[int]] = [[] for _ in range(rows)]
    for document in np.argsort(-sizes, kind="stable").tolist():
        if not sizes[document]:
            break
        length, row = heapq.heappop(heap)
        dealt[row].append(document)
        heapq.heappush(heap, (length + int(sizes[document]), row))
    return [np.array(row, dtype=np.int64) for row in dealt]
