"""Streams: rows that continue, every token once an epoch, exact resumption; evaluation that scores each token once."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.data import IGNORED, Stream, TokenStore, evaluation_pieces, window_pieces

BOS = 99
SETTINGS = settings(deadline=None, derandomize=True, max_examples=80)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Makes stores; documents hold numbers that occur once, so that each token can be told from all others."""
    cache = {}

    def make(sizes, bos=True):
        key = tuple(sizes), bos
        if key not in cache:
            numbers = iter(range(100, 100_000))
            documents = [[next(numbers) for _ in range(size)] for size in sizes]
            folder = tmp_path_factory.mktemp("store") / "store"
            cache[key] = TokenStore.from_ids(documents, 100_000, folder, bos_token_id=BOS if bos else None)
        return cache[key]

    return make


def token_form(store):
    first = [] if store.bos_token_id is None else [store.bos_token_id]
    return [first + store[i].tolist() for i in range(len(store.documents))]


document_sizes = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= 4)


def rows_of(stream, pieces):
    """The rows' inputs, the token that follows, and resets, of some pieces joined."""
    taken = [next(stream) for _ in range(pieces)]
    for piece in taken:
        assert piece.input_ids.shape == piece.targets.shape == piece.resets.shape
        assert piece.input_ids.dtype == piece.targets.dtype == torch.int64
        assert piece.resets.dtype == torch.bool
        assert piece.attention_mask is None
    return (torch.cat([getattr(piece, name) for piece in taken], 1) for name in ("input_ids", "targets", "resets"))


@SETTINGS
@given(document_sizes, st.booleans(), st.integers(1, 4), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_pieces_joined_are_the_rows_streams(stores, sizes, bos, batch_size, window, seed, shuffle):
    store = stores(sizes, bos)
    total = len(store) + bos * len(sizes)
    if total // batch_size < window:
        return
    stream = Stream(store, batch_size, window, seed=seed, shuffle=shuffle)
    assert stream.tokens_per_epoch == total
    pieces = math.ceil(3 * (total // batch_size + 1) / window)  # three epochs
    inputs, targets, resets = rows_of(stream, pieces)
    # The next token of the same row, also across pieces.
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    # Another window cuts the same rows.
    other = Stream(store, batch_size, 1, seed=seed, shuffle=shuffle)
    same, _, same_resets = rows_of(other, inputs.shape[1])
    assert torch.equal(inputs, same)
    assert torch.equal(resets, same_resets)
    # Each epoch: the rows' parts, one after the other, are the documents in some order, each token once.
    share, rest = divmod(total, batch_size)
    documents = token_form(store)
    orders = []
    for epoch in range(3):
        read, flags = [], []
        for b in range(batch_size):
            length = share + (b < rest)
            part = slice(epoch * length, (epoch + 1) * length)
            read += inputs[b, part].tolist()
            flags += resets[b, part].tolist()
            assert flags[-length], "what a row begins is not continued from what it read before"
        order, at, begins = [], 0, set()
        while at < len(read):
            # Documents without a token do not show; one of bos alone begins as all others do, so the longest is meant.
            fits = [i for i, d in enumerate(documents) if d and read[at : at + len(d)] == d and i not in order]
            found = max(fits, key=lambda i: len(documents[i]))
            order.append(found)
            begins.add(at)
            at += len(documents[found])
        assert sorted(order) == [i for i, d in enumerate(documents) if d]
        row_begins = {b * share + min(b, rest) for b in range(batch_size)}
        assert {i for i, flag in enumerate(flags) if flag} == begins | row_begins
        orders.append(order)
    if not shuffle and 0 not in sizes:
        assert all(order == sorted(order) for order in orders)


def test_order_is_drawn_anew_for_each_epoch_and_seed(stores):
    store = stores([5] * 30)

    def order(seed, epoch):
        stream = Stream(store, 1, 180, seed=seed)
        for _ in range(epoch):
            next(stream)
        return next(stream).input_ids.tolist()

    drawn = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len(set(map(str, drawn))) == 9
    assert order(1, 1) == drawn[4], "and is the same when drawn again"


def test_the_end_of_a_document_is_trained_on(stores):
    piece = next(Stream(stores([3, 2]), 1, 7, shuffle=False))
    assert piece.input_ids.tolist() == [[BOS, 100, 101, 102, BOS, 103, 104]]
    assert piece.targets.tolist() == [[100, 101, 102, BOS, 103, 104, BOS]]
    assert piece.resets.tolist() == [[True, False, False, False, True, False, False]]


@SETTINGS
@given(document_sizes, st.sampled_from([4, 8]), st.integers(1, 5), st.integers(0, 20), st.integers(0, 2), st.booleans())
def test_ranks_share_the_rows_and_resume_is_exact(stores, sizes, batch_size, window, steps, seed, bos):
    store = stores([size + 10 for size in sizes], bos)
    if sum(size + 10 + bos for size in sizes) // batch_size < window:
        return
    alone = Stream(store, batch_size, window, seed=seed)
    for _ in range(steps):
        next(alone)
    state = alone.state_dict()
    expected = [next(alone) for _ in range(5)]
    for world_size in (1, 2, 4):
        streams = [
            Stream(store, batch_size, window, seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        for stream in streams:
            stream.load_state_dict(state)
        for piece in expected:
            parts = [next(stream) for stream in streams]
            for name in ("input_ids", "targets", "resets"):
                assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(piece, name))
        assert all(stream.state_dict() == alone.state_dict() for stream in streams)


def test_state_is_small_plain_and_survives_another_window(stores):
    import json

    store = stores([50, 60])
    stream = Stream(store, 2, 10, seed=3)
    for _ in range(4):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    assert len(json.dumps(state)) < 300
    other = Stream(store, 2, 5, seed=3)
    other.load_state_dict(state)
    assert torch.equal(next(stream).input_ids, torch.cat([next(other).input_ids, next(other).input_ids], 1))


def test_resume_long_after(stores):
    """Rows whose parts differ in length drift apart over many epochs; resuming needs no replay."""
    store = stores([5, 6, 8], bos=False)
    stream = Stream(store, 3, 6)
    stream.load_state_dict(stream.state_dict() | {"position": 6_000_000})
    inputs, targets, _ = rows_of(stream, 20)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert set(inputs.flatten().tolist()) == set(store.tokens.tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, r"batch_size 4 \(here 2\)"),
        ({"seed": 7}, r"seed 7 \(here 0\)"),
        ({"content": "other"}, "another text or tokenizer"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(stores, change, message):
    stream = Stream(stores([50]), 2, 5)
    next(stream)
    before = stream.state_dict()
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict(before | {"position": 20} | change)
    with pytest.raises(ValueError, match="position missing"):
        stream.load_state_dict({k: v for k, v in before.items() if k != "position"})
    assert stream.state_dict() == before


def test_state_knows_the_data_not_the_path(stores, tmp_path):
    store = stores([20, 20])
    copy = TokenStore.from_ids([store[0], store[1]], 100_000, tmp_path / "copy", bos_token_id=BOS)
    other = TokenStore.from_ids([store[1], store[0]], 100_000, tmp_path / "other", bos_token_id=BOS)
    cut = TokenStore.from_ids([store[0][:10], np.concatenate([store[0][10:], store[1]])], 100_000, tmp_path / "cut")
    state = Stream(store, 1, 5).state_dict()
    Stream(copy, 1, 5).load_state_dict(state)
    for wrong in (other, cut):
        with pytest.raises(ValueError, match="another text"):
            Stream(wrong, 1, 5).load_state_dict(state)


def test_progress(stores):
    stream = Stream(stores([19, 19]), 2, 5)
    assert stream.epoch == 0
    assert stream.pieces_per_epoch == 4
    for _ in range(6):
        next(stream)
    assert stream.epoch == 1.5


@pytest.mark.parametrize(
    ("batch_size", "window", "remedy"),
    [
        (1, 12, "take window 11 or less"),
        (4, 4, "take batch_size 2 or less, or window 2 or less"),
        (12, 1, "batch_size 11"),
    ],
)
def test_text_shorter_than_a_window_is_named_with_a_remedy(stores, batch_size, window, remedy):
    with pytest.raises(ValueError, match="the text is too short: 11 tokens") as caught:
        Stream(stores([10]), batch_size, window)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_remedy_helps(stores):
    assert next(Stream(stores([10]), 1, 11)).input_ids.shape == (1, 11)
    assert next(Stream(stores([10]), 2, 4)).input_ids.shape == (2, 4)
    assert next(Stream(stores([10]), 4, 2)).input_ids.shape == (4, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"window": 0},
        {"window": 2.5},
        {"batch_size": 3, "world_size": 2},
        {"world_size": 2, "rank": 2},
        {"rank": -1},
        {"seed": -1},
    ],
)
def test_arguments_that_do_not_fit(stores, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Stream(stores([50]), **({"batch_size": 2, "window": 4} | arguments))


def test_rows_and_devices(stores):
    piece = next(Stream(stores([50]), 4, 5))
    half = piece.select_rows(slice(2, 4))
    assert torch.equal(half.targets, piece.targets[2:])
    assert half.attention_mask is None
    scored = next(iter(evaluation_pieces(stores([5, 3]), 2, 5))).select_rows(torch.tensor([1]))
    assert scored.attention_mask.shape == scored.documents.shape == (1, 5)
    assert piece.to("meta").input_ids.device.type == "meta"
    assert piece.scored == 20


# Evaluation.


@SETTINGS
@given(document_sizes, st.booleans(), st.integers(1, 5), st.integers(1, 15))
def test_evaluation_scores_every_token_once_with_its_own_document_before_it(stores, sizes, bos, batch_size, window):
    store = stores(sizes, bos)
    if not bos and max(sizes) < 2:
        return
    pieces = evaluation_pieces(store, batch_size, window)
    taken = list(pieces)
    assert len(taken) == len(pieces)
    names = ("input_ids", "targets", "resets", "attention_mask", "documents")
    assert all((p.attention_mask is None) == bool((p.documents >= 0).all()) for p in taken)
    whole = [replace(p, attention_mask=torch.ones_like(p.targets)) if p.attention_mask is None else p for p in taken]
    inputs, targets, resets, mask, documents = (torch.cat([getattr(p, n) for p in whole], 1) for n in names)
    assert all(piece.input_ids.shape == (pieces.batch_size, window) for piece in taken[:-1])
    found: dict[int, list[int]] = {}
    for b in range(pieces.batch_size):
        end = int(mask[b].sum())
        assert end > 0, "no row without work"
        assert mask[b, :end].all(), "padding is on the right"
        assert (targets[b, end:] == IGNORED).all()
        assert (documents[b, end:] == -1).all()
        assert not resets[b, end:].any()
        assert (targets[b, :end] != IGNORED).all(), "nothing is computed for nothing"
        row = documents[b, :end].tolist()
        assert row == sorted(row)
        for t in range(end):
            d = row[t]
            first = t == 0 or row[t - 1] != d
            assert bool(resets[b, t]) == first
            if first:
                assert d not in found, "a document is read by one row, in one go"
                found[d] = token_form(store)[d][:1]
            assert int(inputs[b, t]) == found[d][-1], "each input is the target before it"
            found[d].append(int(targets[b, t]))
    wanted = {i: d for i, d in enumerate(token_form(store)) if len(d) > 1}
    assert found == wanted
    assert pieces.scored == int((targets != IGNORED).sum()) == sum(len(d) - 1 for d in wanted.values())
    if bos:
        assert pieces.scored == len(store)
        assert not (targets == BOS).any(), "the end of a document is never scored"


def test_sums_by_document_do_not_depend_on_batch_and_window(stores):
    store = stores([7, 1, 12, 0, 5])

    def cost(piece):  # any function of input and target
        return torch.where(piece.targets == IGNORED, 0, piece.input_ids * 3 + piece.targets).double()

    def sums(batch_size, window):
        total = torch.zeros(len(store.documents), dtype=torch.float64)
        for piece in evaluation_pieces(store, batch_size, window):
            valid = piece.documents >= 0
            total.index_add_(0, piece.documents[valid], cost(piece)[valid])
        return total

    assert sums(1, 1)[3] == 0
    for batch_size, window in [(1, 100), (2, 3), (5, 4), (9, 2)]:
        assert torch.equal(sums(batch_size, window), sums(1, 1))


def test_rows_share_the_work(stores):
    pieces = evaluation_pieces(stores([40, 10, 10, 10, 10]), 2, 10)
    assert len(pieces) == 4, "one row reads the long document, the other all short ones"
    assert evaluation_pieces(stores([40]), 8, 10).batch_size == 1


@SETTINGS
@given(document_sizes, st.booleans(), st.integers(1, 40), st.integers(1, 3))
def test_limit_scores_the_first_tokens_only(stores, sizes, bos, limit, batch_size):
    store = stores(sizes, bos)
    if not bos and max(sizes) < 2:
        return
    everything = [t for d in token_form(store) for t in d[1:]]
    pieces = evaluation_pieces(store, batch_size, 4, limit=limit)
    scored = [t for piece in pieces for t in piece.targets.flatten().tolist() if t != IGNORED]
    assert sorted(scored) == everything[:limit]
    assert pieces.scored == len(scored)


def in_parts(store, skip, per_document, limit):
    """(document, place) of every target that ought to be scored, in the store's order."""
    form = token_form(store)
    unseen = 0 if store.bos_token_id is not None else 1
    wanted = []
    for i, d in enumerate(form):
        for w in range(len(d) - 1):
            token = w + unseen  # which token of the document is the target
            if skip <= token and (per_document is None or token < per_document):
                wanted.append((i, w, d[w], d[w + 1]))
    return wanted if limit is None else wanted[:limit]


def scored_by(pieces):
    """(document, place, input, target) of all that the pieces score."""
    found = []
    for piece in pieces:
        scored = piece.targets != IGNORED
        columns = (piece.documents, piece.positions, piece.input_ids, piece.targets)
        found += list(zip(*(column[scored].tolist() for column in columns), strict=True))
    return found


parts = st.tuples(st.integers(0, 12), st.none() | st.integers(1, 15), st.none() | st.integers(1, 25))


@SETTINGS
@given(document_sizes, st.booleans(), st.integers(1, 3), st.integers(1, 9), parts)
def test_parts_of_documents(stores, sizes, bos, batch_size, window, part):
    """What is skipped is read all the same, and nothing is read that no target needs."""
    store = stores(sizes, bos)
    skip, per_document, limit = part
    wanted = in_parts(store, *part)
    if not wanted:
        with pytest.raises(ValueError, match="nothing to score"):
            evaluation_pieces(store, batch_size, window, skip=skip, per_document=per_document, limit=limit)
        return
    pieces = evaluation_pieces(store, batch_size, window, skip=skip, per_document=per_document, limit=limit)
    assert sorted(scored_by(pieces)) == wanted
    assert pieces.scored == len(wanted)
    last = {i: w for i, w, _, _ in wanted}
    assert sum(int((p.documents >= 0).sum()) for p in pieces) == pieces.tokens == sum(w + 1 for w in last.values())


@SETTINGS
@given(document_sizes, st.booleans(), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), parts)
def test_windows_score_every_token_once(stores, sizes, bos, batch_size, window, stride, part):
    """Whatever the stride: no target left out or scored twice where windows meet, the first and last included."""
    stride = min(stride, window)
    store = stores(sizes, bos)
    skip, per_document, limit = part
    wanted = in_parts(store, *part)
    if not wanted:
        return
    pieces = window_pieces(store, batch_size, window, stride, skip=skip, per_document=per_document, limit=limit)
    taken = list(pieces)
    assert len(taken) == len(pieces)
    assert sorted(scored_by(taken)) == wanted
    assert pieces.scored == len(wanted)
    form, new = token_form(store), 0
    for piece in taken:
        assert piece.input_ids.shape[0] <= pieces.batch_size
        for b in range(piece.input_ids.shape[0]):
            (document,) = set(piece.documents[b].tolist()) - {-1}
            real = piece.documents[b] >= 0
            places = piece.positions[b][real]
            assert len(places) <= window
            assert torch.equal(places, torch.arange(int(places[0]), int(places[0]) + len(places)))
            assert piece.input_ids[b][real].tolist() == form[document][int(places[0]) : int(places[-1]) + 1]
            scored = (piece.targets[b] != IGNORED).nonzero()[:, 0]
            assert len(scored), "no window is read for nothing"
            if int(places[0]):
                assert int(scored[0]) >= window - stride, "enough text before the first target"
            new += len(places) - (window - stride if int(places[0]) else 0)
    assert pieces.tokens == new


def test_a_stride_above_the_window_would_leave_tokens_out(stores):
    with pytest.raises(ValueError, match="stride 5 is longer than the window of 4"):
        window_pieces(stores([9]), 1, 4, 5)


def test_nothing_to_score(stores):
    with pytest.raises(ValueError, match="nothing to score"):
        evaluation_pieces(stores([1, 1, 1, 1], False), 1, 4)
    with pytest.raises(ValueError, match="window"):
        evaluation_pieces(stores([5]), 1, 0)
    with pytest.raises(ValueError, match="limit"):
        evaluation_pieces(stores([5]), 1, 4, limit=0)
