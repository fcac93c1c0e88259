"""Token stores: what was put in comes out, in constant memory, and nothing half made is ever trusted."""

import json
import os
import subprocess
import sys
import textwrap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.data import Document, TokenStore, byte_tokenizer, train_tokenizer
from undertow.data.store import iterate_texts

TEXTS = ["One. Naïve\n", "", "two two\n\n", "drei"]


@pytest.fixture
def store(tmp_path):
    documents = [Document(f"d{i}\n{i}", text.encode()) for i, text in enumerate(TEXTS)]
    return TokenStore.build(documents, byte_tokenizer(), tmp_path / "store")


def test_what_went_in_comes_out(store):
    assert len(store) == sum(len(text.encode()) for text in TEXTS)
    assert [bytes(store[i]).decode() for i in range(4)] == TEXTS
    assert store.names == ["d0\n0", "d1\n1", "d2\n2", "d3\n3"]
    assert store.documents["characters"].tolist() == [len(text) for text in TEXTS]
    assert store.documents["words"].tolist() == [2, 0, 2, 1]
    assert store.lines == 3
    assert store.words == 5
    assert store.bytes == store.characters + 1 == len(store)
    assert (store.vocab_size, store.bos_token_id) == (257, 256)


def test_text_in_bytes_takes_a_byte_a_token(store):
    assert store.tokens.dtype == np.uint8
    assert os.path.getsize(store.path / "tokens.bin") == len(store)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 70_000), max_size=9), min_size=1, max_size=6).filter(any), st.integers(1, 300))
def test_ids_of_any_size_come_back(tmp_path_factory, documents, modulus):
    for size in (modulus, 70_001):
        rows = [[i % size for i in row] for row in documents]
        store = TokenStore.from_ids(rows, size, tmp_path_factory.mktemp("s") / "store")
        assert [store[i].tolist() for i in range(len(rows))] == rows
        assert store.tokens.dtype == (np.uint8 if size <= 256 else np.uint16 if size <= 65536 else np.uint32)
        assert store.bytes is None
        assert store.words is None


def test_no_text_at_all(tmp_path):
    for documents in ([], [Document("a", b"")]):
        with pytest.raises(ValueError, match="there is no text"):
            TokenStore.build(documents, byte_tokenizer(), tmp_path / "store")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_word_tokens_of_a_text_without_words_are_none(tmp_path):
    tokenizer = train_tokenizer(["a b"], "word")
    with pytest.raises(ValueError, match="1 documents give no token"):
        TokenStore.build([Document("a", b"  ")], tokenizer, tmp_path / "store")


@pytest.mark.parametrize("bad", [257, 70_000, -1])
def test_ids_outside_the_vocabulary_are_named(tmp_path, bad):
    with pytest.raises(ValueError, match=f"poem: token id {bad} at position 2 is outside the vocabulary of 257 ids"):
        TokenStore.from_ids([[1, 2], [5, 256, bad]], 257, tmp_path / "s", names=["prose", "poem"])
    assert not list(tmp_path.iterdir())


def test_ids_must_be_integers_in_a_row(tmp_path):
    with pytest.raises(ValueError, match="document 0: ids must be one row of integers"):
        TokenStore.from_ids([np.array([0.5])], 10, tmp_path / "s")
    with pytest.raises(ValueError, match="document 0: ids must be one row of integers"):
        TokenStore.from_ids([np.array([[1]])], 10, tmp_path / "s")
    with pytest.raises(ValueError, match="bos_token_id 10 does not fit"):
        TokenStore.from_ids([[1]], 10, tmp_path / "s", bos_token_id=10)


def test_a_model_with_a_smaller_vocabulary_is_refused(tmp_path, store):
    store.check_vocabulary(257)
    with pytest.raises(ValueError, match="the separator, id 256, is outside the vocabulary of 256"):
        store.check_vocabulary(256)
    ids = TokenStore.from_ids([[1, 2], [3, 9, 4]], 10, tmp_path / "s")
    ids.check_vocabulary(10)
    with pytest.raises(ValueError, match="document 1: token id 9 at position 1 is outside the vocabulary of 9 ids"):
        ids.check_vocabulary(9)


def test_an_existing_folder_is_left_alone(store):
    before = {p.name: p.read_bytes() for p in store.path.iterdir()}
    with pytest.raises(FileExistsError, match="exists already"):
        TokenStore.build([Document("a", b"other")], byte_tokenizer(), store.path)
    assert {p.name: p.read_bytes() for p in store.path.iterdir()} == before


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "names.jsonl", "meta.json"])
@pytest.mark.parametrize("cut", [1, 5, None])
def test_a_store_cut_short_is_named(store, name, cut):
    file = store.path / name
    if cut is None:
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - cut)
    error = FileNotFoundError if (name, cut) == ("meta.json", None) else ValueError
    with pytest.raises(error, match="there is no token store" if error is FileNotFoundError else f"{name}: the token"):
        TokenStore.open(store.path)


def test_a_store_that_grew_or_changed_is_named(store):
    with open(store.path / "tokens.bin", "r+b") as file:
        file.write(b"X")
    again = TokenStore.open(store.path)  # sizes are right; only reading all can tell
    with pytest.raises(ValueError, match="checksum"):
        again.verify()
    with open(store.path / "tokens.bin", "ab") as file:
        file.write(b"X")
    with pytest.raises(ValueError, match=r"tokens\.bin: the token store is damaged, this file has"):
        TokenStore.open(store.path)


def test_a_store_of_another_version_or_tokenizer(store):
    TokenStore.open(store.path, byte_tokenizer()).verify()
    with pytest.raises(ValueError, match="made with another tokenizer"):
        TokenStore.open(store.path, train_tokenizer(["a b"], "word"))
    meta = json.loads((store.path / "meta.json").read_text())
    (store.path / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(ValueError, match="another version"):
        TokenStore.open(store.path)


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def documents():
        yield Document("a", b"good")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TokenStore.build(documents(), byte_tokenizer(), tmp_path / "store")
    tokenizer = train_tokenizer(["a b"], "word")
    with pytest.raises(ValueError, match="not UTF-8"):
        TokenStore.build([Document("a", b"good"), Document("b", b"\xff")], tokenizer, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    """The limit on a file's size stands for a full disk: the same error from the same calls."""
    code = textwrap.dedent(
        f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        from undertow.data import Document, TokenStore, byte_tokenizer
        tokenizer = byte_tokenizer()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            TokenStore.build([Document("a", b"x" * 1_000_000)], tokenizer, {str(tmp_path / "store")!r})
        except OSError as error:
            print(error)
        """
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "while the token store was written" in out
    assert "store" in out
    assert not list(tmp_path.iterdir())


MEMORY = """
import resource, sys
from undertow.data import TokenStore, Stream, evaluation_pieces, load_tokenizer, read_documents
tokenizer = load_tokenizer(sys.argv[2])
small = read_documents(sys.argv[1] + "/small.txt")
TokenStore.build(small, tokenizer, sys.argv[1] + "/small")  # everything is imported and warm now
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = TokenStore.build(read_documents(sys.argv[1] + "/big.txt"), tokenizer, sys.argv[1] + "/big")
built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((built - before) / 1024, len(store))
"""


@pytest.mark.parametrize(("kind", "size", "allowed"), [("bytes", 192, 24), ("bpe", 8, 32)])
def test_memory_does_not_grow_with_the_text(tmp_path, kind, size, allowed):
    """``size`` MiB of text; ``allowed`` MiB more at the peak than a text of 2 MiB needs."""
    line = b"the quick brown fox jumps over the lazy dog, again and again; 0123456789\n"
    with open(tmp_path / "big.txt", "wb") as file:
        for _ in range(size):
            file.write(line * ((1 << 20) // len(line)))
    (tmp_path / "small.txt").write_bytes(line * (2 * (1 << 20) // len(line)))
    tokenizer = byte_tokenizer() if kind == "bytes" else train_tokenizer([line.decode() * 5], "bpe", 300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(tmp_path / "tokenizer")],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    grown, tokens = map(float, out.split())
    assert tokens > size * 100_000
    assert grown < allowed, f"{grown:.0f} MiB more for {size} MiB of text"


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.text(alphabet="ab é\n", max_size=40), st.integers(1, 5))
def test_texts_for_training_are_the_text_cut_at_white_space(text, size):
    class InBlocks(Document):
        def blocks(self, _=0):
            return super().blocks(size)

    pieces = list(iterate_texts([InBlocks("d", text.encode())]))
    assert "".join(pieces) == text
    for piece, following in pairwise(pieces):
        at_white_space = following[0].isspace() or piece[-1].isspace()
        assert at_white_space or not any(c in " \n" for c in piece[1:]), (
            "a word is cut only where there is no other way"
        )
