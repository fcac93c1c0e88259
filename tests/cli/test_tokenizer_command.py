"""`undertow tokenizer`: trains, saves what loads anywhere, overwrites nothing unasked."""

import io
import sys

import pytest

from undertow.cli.tokenizer import Config, run
from undertow.data import is_byte_tokenizer, load_tokenizer

TEXT = "the cat sat on the mat; the cat's hat\nis what the cat had\n" * 40


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("kind", "size"), [("bpe", 275), ("bpe", None), ("word", 10), ("word", None), ("bytes", None), ("bytes", 257)]
)
def test_it_makes_a_tokenizer_that_loads(text, tmp_path, capsys, kind, size):
    run(Config(data=[text], kind=kind, vocab_size=size, out=str(tmp_path / "made" / "here")))
    tokenizer = load_tokenizer(tmp_path / "made" / "here")
    assert {p.name for p in (tmp_path / "made" / "here").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in (tmp_path / "made").iterdir()} == {"here"}
    assert is_byte_tokenizer(tokenizer) == (kind == "bytes")
    if kind != "word":
        assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    if size is not None:
        assert len(tokenizer) == size
    out = capsys.readouterr()
    assert f"{kind} tokenizer, {len(tokenizer):,} ids" in out.out
    assert not out.err, "quiet where it is no terminal"


def test_what_training_holds_out_stays_unseen(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "t").write_text("seen words here\n" * 200 + "unseen\n" * 5)
    vocabularies = []
    for whole in (False, True):
        run(Config(data=[str(tmp_path / "t")], kind="word", out=str(tmp_path / f"o{whole}"), whole=whole))
        vocabularies.append(load_tokenizer(tmp_path / f"o{whole}").get_vocab())
    assert "unseen" not in vocabularies[0]
    assert "unseen" in vocabularies[1]


def test_a_folder_that_is_not_empty_is_left_alone_unless_told(text, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    (out / "tokenizer.json").write_text("old")
    with pytest.raises(FileExistsError, match="out is not empty; choose another, or add --overwrite"):
        run(Config(data=[text], vocab_size=270, out=str(out)))
    assert (out / "tokenizer.json").read_text() == "old"
    run(Config(data=[text], vocab_size=270, out=str(out), overwrite=True))
    assert len(load_tokenizer(out)) == 270
    assert (out / "mine.txt").read_text() == "keep"
    with pytest.raises(FileExistsError, match="is a file"):
        run(Config(data=[text], out=text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, "vocab_size 100 is too small for bpe: at least 257"),
        ({"vocab_size": 9000}, "vocab_size 9000 cannot be reached: this text gives "),
        ({"kind": "word", "vocab_size": 999}, "vocab_size 999 cannot be reached"),
        ({"kind": "bytes", "vocab_size": 300}, "bytes are always 257"),
        ({"data": []}, "no text was given"),
    ],
)
def test_mistakes_write_nothing(text, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run(Config(**({"data": [text], "out": str(tmp_path / "out")} | change)))
    assert not (tmp_path / "out").exists()


def test_text_that_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait\n" * 50)
    with pytest.raises(ValueError, match=r"latin\.txt: byte 0xe9 at offset 3 is not UTF-8"):
        run(Config(data=[str(tmp_path / "latin.txt")], out=str(tmp_path / "out")))


def test_standard_input(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    run(Config(data=["-"], kind="word", out=str(tmp_path / "out")))
    assert "cat" in load_tokenizer(tmp_path / "out").get_vocab()


def test_progress_on_a_terminal(text, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(Config(data=[text], kind="word", out=str(tmp_path / "out")))
    assert "reading" in terminal.getvalue()


def test_from_the_command_line(text, tmp_path, capsys):
    main = pytest.importorskip("undertow.cli.main").main
    out = tmp_path / "out"
    words = ["tokenizer", "--data", text, "--kind", "bpe", "--vocab_size", "275", "--out", str(out)]
    assert main(words) == 0
    assert len(load_tokenizer(out)) == 275
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
