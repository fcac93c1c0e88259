"""From a configuration to stores: parts that do not overlap, a cache that is right or not used."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.data import DataConfig, Document, TokenStore, byte_tokenizer, cache_folder, cached_store, prepare
from undertow.data import split_documents as split
from undertow.data.splits import _by_tail

TEXT = b"".join(b"line %d of the text\n" % i for i in range(1000))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def books(tmp_path):
    (tmp_path / "books").mkdir()
    for i in range(40):
        (tmp_path / "books" / f"{i}.txt").write_bytes(b"book %d\n" % i * 50)
    return tmp_path / "books"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_bytes(TEXT)
    return str(tmp_path / "text.txt")


def names(documents):
    return {document.name for document in documents}


def test_one_text_is_split_at_its_tail_between_lines(text):
    splits = prepare(DataConfig(data=[text]))
    parts = [bytes(store[0]) for store in (splits.train, splits.valid, splits.test)]
    assert b"".join(parts) == TEXT
    assert all(part.endswith(b"\n") and part.startswith(b"line") for part in parts)
    for part in parts[1:]:
        assert abs(len(part) / len(TEXT) - 0.05) < 0.003
    assert splits.valid.names == ["text.txt [17010:17900]"] or splits.valid.names[0].startswith("text.txt [")


def test_many_documents_are_split_by_document(books):
    splits = split(DataConfig(data=[str(books)]))
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (36, 2, 2)
    assert len(names(splits.train) | names(splits.valid) | names(splits.test)) == 40
    other = split(DataConfig(data=[str(books)], seed=1))
    assert names(other.test) != names(splits.test)


def test_the_split_does_not_depend_on_where_files_lie(books, tmp_path):
    before = names(split(DataConfig(data=[str(books)])).test)
    books.rename(tmp_path / "moved")
    assert names(split(DataConfig(data=[str(tmp_path / "moved")])).test) == before
    assert names(split(DataConfig(data=[str(tmp_path / "moved" / "*.txt")])).test) == before


def test_few_documents_are_split_at_the_tail_of_all(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(TEXT)
    config = DataConfig(data=[f"{tmp_path}/*.txt"])
    splits = split(config)
    whole = [b"".join(d.data for d in part) for part in (splits.train, splits.valid, splits.test)]
    assert b"".join(whole) == TEXT * 3
    assert [d.name for d in splits.train][:2] == ["0.txt", "1.txt"]
    config.split = "document"
    assert [len(part) for part in (split(config).train, split(config).valid, split(config).test)] == [1, 1, 1]


def test_texts_named_for_valid_and_test(books, text):
    config = DataConfig(data=[str(books)], valid=[str(books / "3.txt")], test=[str(books / "4.txt"), text])
    splits = split(config)
    assert names(splits.valid) == {"3.txt"}
    assert names(splits.test) == {"4.txt", "text.txt"}
    assert len(splits.train) == 38, "what is held out is not trained on"
    assert not names(splits.train) & {"3.txt", "4.txt"}
    only_valid = split(DataConfig(data=[str(books)], valid=[text]))
    assert (len(only_valid.train), only_valid.test) == (40, [])
    only_test = split(DataConfig(data=[str(books)], test=[text]))
    assert (len(only_test.train), len(only_test.valid)) == (38, 2)


def test_no_part_held_out(text):
    splits = prepare(DataConfig(data=[text], valid_fraction=0, test_fraction=0))
    assert splits.valid is splits.test is None
    assert bytes(splits.train[0]) == TEXT


LINES = st.lists(st.text(alphabet="ab é東\n", min_size=1, max_size=12), min_size=1, max_size=40)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(LINES, st.floats(0, 0.45), st.floats(0, 0.45))
def test_the_tail_is_cut_without_loss_and_never_inside_a_character(texts, valid_fraction, test_fraction):
    documents = [Document(str(i), text.encode()) for i, text in enumerate(texts)]
    try:
        parts = _by_tail(documents, valid_fraction, test_fraction)
    except ValueError as error:
        assert "too short" in str(error)  # noqa: PT017
        return
    joined = [b"".join(d.data for d in part) for part in parts]
    assert b"".join(joined) == "".join(texts).encode()
    for part in joined:
        part.decode()  # no character is cut in two
    for fraction, part in zip((valid_fraction, test_fraction), joined[1:], strict=True):
        assert bool(fraction) or not part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": []}, "no text was given"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "leave nothing to train on"),
        ({"valid_fraction": -0.1}, "valid_fraction must be at least 0 and below 1, got -0.1"),
        ({"test_fraction": 1.5}, "test_fraction must be at least 0 and below 1"),
        ({"split": "document"}, "1 documents are too few"),
        ({"split": "words"}, "split must be auto, document or tail, got 'words'"),
    ],
)
def test_what_does_not_fit_is_named(text, change, message):
    with pytest.raises(ValueError, match=message):
        split(DataConfig(**({"data": [text]} | change)))


def test_contradictions_are_named(text, books):
    with pytest.raises(ValueError, match=r"valid_fraction 0\.1 cannot be taken: valid is given as text"):
        split(DataConfig(data=[text], valid=[str(books)], valid_fraction=0.1))
    with pytest.raises(ValueError, match="nothing is left to train on"):
        split(DataConfig(data=[text], valid=[text]))


def test_text_too_short_to_hold_out_a_part(tmp_path):
    (tmp_path / "t").write_bytes(b"abc")
    with pytest.raises(ValueError, match="too short to share out: 3 bytes leave nothing for valid"):
        split(DataConfig(data=[str(tmp_path / "t")]))


def test_every_field_is_documented():
    """The command line shows these."""
    source = Path(sys.modules[DataConfig.__module__].__file__).read_text()
    body = source.split("class DataConfig:")[1].split("@dataclass")[0]
    for field in fields(DataConfig):
        after = body.split(f"\n    {field.name}: ", 1)[1].split("\n", 1)[1]
        assert after.lstrip().startswith('"""'), field.name


# The cache.


def test_built_once(text, cache):
    first = prepare(DataConfig(data=[text]))
    stamps = {p: p.stat().st_mtime_ns for p in cache.rglob("tokens.bin")}
    assert len(stamps) == 3
    second = prepare(DataConfig(data=[text]))
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("tokens.bin")} == stamps
    assert second.train.path == first.train.path


@pytest.mark.parametrize("large", [False, True])
def test_built_anew_when_the_text_changes(text, large, monkeypatch):
    if large:
        monkeypatch.setattr("undertow.data.splits._BY_CONTENT", 10)
    first = prepare(DataConfig(data=[text])).train.content
    changed = TEXT.replace(b"line 3 ", b"LINE 3 ")  # the same length
    Path(text).write_bytes(changed)
    os.utime(text, ns=(1, 1))
    second = prepare(DataConfig(data=[text])).train
    assert second.content != first
    assert bytes(second[0]) == changed[: len(second)]


def test_a_moved_text_is_known_again(text, tmp_path, cache):
    prepare(DataConfig(data=[text]))
    (tmp_path / "elsewhere").mkdir()
    os.rename(text, tmp_path / "elsewhere" / "text.txt")
    prepare(DataConfig(data=[str(tmp_path / "elsewhere" / "text.txt")]))
    assert len(list(cache.rglob("tokens.bin"))) == 3


def test_another_tokenizer_another_store(text, tmp_path):
    from undertow.data import train_tokenizer

    train_tokenizer([TEXT.decode()], "word").save_pretrained(tmp_path / "word")
    by_word = prepare(DataConfig(data=[text], tokenizer=str(tmp_path / "word")))
    by_byte = prepare(DataConfig(data=[text]))
    assert len(by_word.train) == by_word.train.words + by_word.train.lines
    assert by_word.train.bytes == len(by_byte.train)
    assert prepare(DataConfig(data=[text]), by_word.tokenizer).train.path == by_word.train.path


def test_a_damaged_store_in_the_cache_is_built_anew(text):
    store = prepare(DataConfig(data=[text])).train
    path = store.path
    os.truncate(path / "tokens.bin", 100)
    with pytest.warns(UserWarning, match=r"tokens\.bin: the token store is damaged.*built anew"):
        again = prepare(DataConfig(data=[text])).train
    assert again.path == path
    again.verify()
    (path / "meta.json").unlink()
    with pytest.warns(UserWarning, match="built anew"):
        prepare(DataConfig(data=[text])).train.verify()


def test_standard_input_is_known_by_content(monkeypatch, cache):
    contents = set()
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT)))
        splits = prepare(DataConfig(data=["-"]))
        contents.add(splits.train.path)
        assert bytes(splits.train[0]) + bytes(splits.valid[0]) + bytes(splits.test[0]) == TEXT
    assert len(contents) == 1
    del splits
    assert not list((cache / "spool").iterdir())


def test_where_the_cache_lies(monkeypatch, tmp_path):
    assert cache_folder("~/x") == Path("~/x").expanduser()
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("UNDERTOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "undertow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "undertow"


def test_a_cache_that_cannot_be_written_is_named(text, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        OSError, match=r"the cache folder .*file/stores cannot be written .*cache_dir or .*UNDERTOW_CACHE"
    ):
        prepare(DataConfig(data=[text], cache_dir=str(tmp_path / "file")))


def test_a_text_that_changes_while_it_is_read_is_told(text, cache):
    def grow(_=0):
        with open(text, "ab") as file:
            file.write(b"more\n")
        return open(text, "rb")

    calm = Document("a", partial(open, text, "rb"), path=text)
    cached_store([calm], byte_tokenizer())
    with pytest.raises(ValueError, match="the text changed while it was read"):
        cached_store([Document("a", grow, path=text)], byte_tokenizer())
    assert len(list(cache.rglob("tokens.bin"))) == 1


BUILD = """
import sys, time
from undertow.data import Document, byte_tokenizer, cached_store
import io
class Slow(io.BytesIO):
    def read(self, size=-1):
        block = super().read(2000)
        time.sleep(float(sys.argv[2]))
        return block
data = open(sys.argv[1], "rb").read()
# Its identity is given, so that it need not be read to be known.
document = Document("text", lambda: Slow(data), identity="fixed", stored=1 << 40)
print("ready", flush=True)
store = cached_store([document], byte_tokenizer())
assert bytes(store[0]) == data
print(store.path.stat().st_ino)
"""


def start(text, delay):
    command = [sys.executable, "-c", BUILD, text, str(delay)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_several_processes_build_one_store(text, cache):
    running = [start(text, 0.02) for _ in range(3)]
    outs = [process.communicate(timeout=120)[0].split() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert len({out[1] for out in outs}) == 1, "all use the same store"
    assert len(list(cache.rglob("tokens.bin"))) == 1
    assert not list(cache.rglob(".tmp-*"))


def test_a_build_killed_halfway_is_never_trusted(text, cache):
    process = start(text, 0.2)
    assert process.stdout.readline() == "ready\n"
    deadline = time.time() + 60
    while not list(cache.rglob("tokens.bin")) and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    (half,) = cache.rglob("tokens.bin")
    assert half.parent.name.startswith(".tmp-")
    after = start(text, 0)
    assert after.communicate(timeout=120)[0]
    assert after.returncode == 0
    assert half.exists(), "it might be another builder's at work"
    for path in (half.parent, *half.parent.iterdir()):
        os.utime(path, (1, 1))
    cached_store([Document("other", b"x" * 10)], byte_tokenizer())
    assert not half.parent.exists(), "after a day it is swept away"


def test_builders_without_locks_do_no_harm(text, cache, monkeypatch):
    """On a file system without locks another builder may finish first: its store is taken, ours goes."""
    original = TokenStore.build.__func__

    def raced(cls, documents, tokenizer, path, **options):
        original(cls, documents, tokenizer, path)
        return original(cls, documents, tokenizer, path, **options)

    monkeypatch.setattr(TokenStore, "build", classmethod(raced))
    assert bytes(cached_store([Document("a", TEXT)], byte_tokenizer())[0]) == TEXT
    assert not list(cache.rglob(".tmp-*"))


@pytest.mark.skipif("UNDERTOW_DATA" not in os.environ, reason="UNDERTOW_DATA names no folder of texts")
def test_on_real_books():
    data = Path(os.environ["UNDERTOW_DATA"])
    splits = prepare(DataConfig(data=[f"{data}/books/train"], valid=[f"{data}/books/valid"]))
    assert len(splits.train.documents) == 32
    assert splits.train.bytes == len(splits.train) > 27_000_000
    assert splits.train.characters < splits.train.bytes
    wiki = data / "wiki" / "wiki.valid.tokens"
    store = cached_store([Document("wiki", wiki.read_bytes())], byte_tokenizer())
    assert store.words + store.lines == 217_646
