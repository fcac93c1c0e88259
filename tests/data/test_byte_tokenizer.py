"""Tokenizers: exact round trips, recognised by content, loaded without this library, text while it is made."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from undertow.data import (
    TextDecoder,
    byte_tokenizer,
    is_byte_tokenizer,
    load_tokenizer,
    separator_id,
    tokenizer_fingerprint,
    train_tokenizer,
)

SAMPLE = "the cat sat on the mat, the cat's hat\n" * 20 + "naïve café — «déjà vu» 東京 🙂\n" * 5
SETTINGS = settings(deadline=None, derandomize=True, max_examples=200)


@pytest.fixture(scope="module")
def bytes_():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer([SAMPLE], "bpe", 300)


@pytest.fixture(scope="module")
def metaspace():
    """A tokenizer with byte fallback and a prefix, in the manner of SentencePiece."""
    vocabulary = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    vocabulary |= {c: 257 + i for i, c in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@SETTINGS
@given(st.text())
def test_any_text_becomes_its_utf8_bytes_and_comes_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["<|endoftext|>", " a .  b , don 't", "\ufeff\r\n\r\x00", "  ", "\u2028e\u0301"])
def test_texts_that_tokenizers_are_tempted_to_change(bytes_, bpe, text):
    for tokenizer in (bytes_, bpe):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert 256 not in bytes_(text).input_ids, "the name of a special token in a text is text"


def test_special_tokens(bytes_):
    assert len(bytes_) == 257
    assert bytes_.bos_token_id == bytes_.eos_token_id == bytes_.pad_token_id == separator_id(bytes_) == 256
    assert bytes_.decode([104, 105, 256], skip_special_tokens=True) == "hi"
    batch = bytes_(["ab", "c"], padding=True, padding_side="left")
    assert batch.input_ids == [[97, 98], [256, 99]]
    assert batch.attention_mask == [[1, 1], [0, 1]]


def test_saved_it_loads_without_this_library(bytes_, tmp_path):
    bytes_.save_pretrained(tmp_path)
    text = "naïve <|endoftext|>\r\n"
    code = (
        "import sys; from transformers import AutoTokenizer\n"
        f"t = AutoTokenizer.from_pretrained({str(tmp_path)!r}); text = {text!r}\n"
        "ids = t(text).input_ids\n"
        "assert ids == list(text.encode()) and t.decode(ids) == text and len(t) == 257 and t.eos_token_id == 256\n"
        "assert not any(m.startswith('undertow') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("which", ["bytes", "bpe", "word"])
def test_loaded_again_it_is_the_same(which, tmp_path, bytes_, bpe):
    tokenizer = {"bytes": bytes_, "bpe": bpe}.get(which) or train_tokenizer([SAMPLE], "word")
    tokenizer.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(path)
        assert is_byte_tokenizer(again) == (which == "bytes")
        assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)
        assert again(SAMPLE).input_ids == tokenizer(SAMPLE).input_ids
        assert separator_id(again) == separator_id(tokenizer)
    (tmp_path / "tokenizer_config.json").unlink()  # a bare tokenizer.json knows its end of text by the usual names
    assert separator_id(load_tokenizer(tmp_path)) == separator_id(tokenizer)


def test_it_loads_beside_a_model_that_transformers_does_not_know(bytes_, tmp_path):
    bytes_.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    assert is_byte_tokenizer(load_tokenizer(tmp_path))


def test_a_damaged_tokenizer_config_is_named(bytes_, tmp_path):
    bytes_.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_fingerprints_differ_where_ids_would(bytes_, bpe):
    others = [bytes_, bpe, train_tokenizer([SAMPLE], "bpe", 299), train_tokenizer([SAMPLE], "word")]
    assert len({tokenizer_fingerprint(t) for t in others}) == 4


def test_fingerprint_does_not_change_with_use(bytes_):
    before = tokenizer_fingerprint(bytes_)
    bytes_(["abc", "d"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(bytes_) == before
    assert is_byte_tokenizer(bytes_)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["model"]["vocab"].update({"!": 0, "Ā": 33}),  # two bytes swapped
        lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
        lambda c: c.update(normalizer={"type": "NFC"}),
        lambda c: c["model"].update(merges=[["a", "b"]]) or c["model"]["vocab"].update(ab=257),
    ],
)
def test_what_only_resembles_a_byte_tokenizer_is_none(bytes_, change):
    content = json.loads(bytes_.backend_tokenizer.to_str())
    change(content)
    backend = Tokenizer.from_str(json.dumps(content))
    assert not is_byte_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_byte_tokenizer_with_more_special_tokens_is_still_one():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    assert is_byte_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: p / "nowhere", FileNotFoundError, "there is no tokenizer '.*nowhere': give bytes"),
        (lambda p: p, FileNotFoundError, "no tokenizer.json in this folder"),
        (lambda p: p / "text.json", ValueError, "text.json: this is not a tokenizer.json"),
        (lambda p: p / "cut.json", ValueError, "cut.json: this is not a tokenizer.json, or it was cut short"),
        (lambda p: p / "raw.json", ValueError, "raw.json: this is not a tokenizer.json"),
        (lambda p: "HuggingFaceTB/SmolLM2-135M", FileNotFoundError, "hub:owner/name"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path, bytes_, make, error, message):
    (tmp_path / "text.json").write_text("{}")
    (tmp_path / "cut.json").write_text(bytes_.backend_tokenizer.to_str()[:-100])
    (tmp_path / "raw.json").write_bytes(b"\xff\xfe")
    with pytest.raises(error, match=message) as caught:
        load_tokenizer(make(tmp_path))
    assert str(caught.value).count("\n") <= 1


def test_bpe_takes_any_text_and_reaches_its_size(bpe):
    assert len(bpe) == 300
    assert bpe.decode(bpe("漢字 \x00 any thing").input_ids) == "漢字 \x00 any thing"
    assert len(bpe("the cat").input_ids) < 7


def test_word_vocabulary_counts_as_published_corpora_do(tmp_path):
    text = " \n = Title = \n \n the <unk> sat on the @-@ mat \n"
    tokenizer = train_tokenizer([text], "word")
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.split()) + text.count("\n")
    assert ids.count(tokenizer.eos_token_id) == 4
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<unk>", "<eos>"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer))), "no id is given twice"
    assert tokenizer("unseen <unk>").input_ids == [0, 0]
    words = tokenizer.convert_ids_to_tokens(list(range(2, len(tokenizer))))
    assert set(words[:2]) == {"the", "="}, "the most frequent come first"
    small = train_tokenizer([text], "word", 5)
    assert len(small) == 5
    assert len(small(text).input_ids) == len(ids)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("bpe", 100, "vocab_size 100 is too small for bpe: at least 257"),
        ("bpe", 5000, r"vocab_size 5000 cannot be reached: this text gives \d+"),
        ("word", 2, "vocab_size 2 is too small for word"),
        ("word", 1000, r"vocab_size 1000 cannot be reached: this text gives \d+"),
        ("letters", 10, "kind must be bpe or word, got 'letters'"),
    ],
)
def test_sizes_that_cannot_be_reached_are_named(kind, size, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer([SAMPLE], kind, size)


def test_a_reachable_size_that_the_error_names_is_reachable():
    with pytest.raises(ValueError, match="this text gives") as caught:
        train_tokenizer([SAMPLE], "bpe", 5000)
    most = int(str(caught.value).split("this text gives ")[1].split()[0])
    assert len(train_tokenizer([SAMPLE], "bpe", most)) == most


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="no text"):
        train_tokenizer([""], "word")


# Text while it is generated.


@SETTINGS
@given(st.binary(max_size=40))
def test_bytes_decoded_as_they_come_are_what_decode_makes_of_all(data):
    tokenizer = byte_tokenizer()
    decoder = TextDecoder(tokenizer)
    pieces = [decoder.push(byte) for byte in data]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(list(data)) == data.decode(errors="replace")


def test_an_unfinished_character_waits_and_an_impossible_one_does_not(bytes_):
    decoder = TextDecoder(bytes_)
    assert [decoder.push(b) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert decoder.push(0xFF) == "\ufffd", "nothing can make this UTF-8: it shows at once"
    assert decoder.push(0xE2) == ""
    assert decoder.push(ord("a")) == "\ufffda"
    assert decoder.push([0xE2, 0x82]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ord("b")) == "b", "after flush it starts anew"


def test_special_tokens_in_the_stream(bytes_):
    assert TextDecoder(bytes_).push([104, 256, 105]) == "hi"
    assert TextDecoder(bytes_, skip_special_tokens=False).push([104, 256]) == "h<|endoftext|>"


def test_an_id_outside_the_vocabulary_is_named(bytes_):
    with pytest.raises(ValueError, match="token id 300 is outside the vocabulary of 257 ids"):
        TextDecoder(bytes_).push(300)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, 299), max_size=40))
def test_bpe_decoded_as_it_comes(bpe, ids):
    decoder = TextDecoder(bpe)
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.flush() == bpe.decode(ids, skip_special_tokens=True)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.text(alphabet="ab z é🙂東", max_size=60))
def test_other_decoders_as_they_come(metaspace, text):
    ids = metaspace(text).input_ids
    decoder = TextDecoder(metaspace)
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == metaspace.decode(ids)


def test_wordpiece_as_it_comes():
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator([SAMPLE], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    ids = tokenizer("the cat sat on the mat the hat the cat sat on that mat", add_special_tokens=False).input_ids
    decoder = TextDecoder(tokenizer)
    shown = "".join(decoder.push(i) for i in ids) + decoder.flush()
    assert shown == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_auto_tokenizer_is_what_load_gives(tmp_path, bytes_):
    bytes_.save_pretrained(tmp_path)
    assert type(load_tokenizer(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))
