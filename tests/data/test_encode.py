"""From documents to ids: pieces join without a seam, whatever their size, and what is not UTF-8 is named."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from undertow.data import Document, byte_tokenizer, train_tokenizer
from undertow.data.encode import encode_documents
from undertow.data.tokenizer import text_backend


def prose(seed: int, words: int) -> str:
    """Text with all that makes tokenizers look ahead: runs of spaces, line ends, contractions, marks, scripts."""
    draw = random.Random(seed)
    stems = [
        "the",
        "cat's",
        "naïve",
        "I'll",
        "1,234.5",
        "東京",
        "🙂",
        "...",
        "»",
        "-",
        "e\u0301",
        "don't",
        "x_y",
        "12345",
    ]
    gaps = [" ", " ", " ", "  ", "    ", "\n", "\n\n", "\r\n", " \n ", "\t", "", ",", ". ", ".\n\n", "\u00a0"]
    return "".join(draw.choice(stems) + draw.choice(gaps) for _ in range(words))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(backend, trainer, text):
    backend.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def families():
    """One tokenizer of each kind that is in use."""
    text = prose(0, 3000)
    bpe = {"vocab_size": 330, "show_progress": False}
    made = {"gpt2": train_tokenizer([text], "bpe", 330), "word": train_tokenizer([text], "word", 40)}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    made["llama3"] = trained(
        backend, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **bpe), text
    )
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    made["metaspace"] = trained(backend, trainers.BpeTrainer(special_tokens=["<unk>"], **bpe), text)
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made["unigram"] = trained(
        backend,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
        text,
    )
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made["bert"] = trained(
        backend, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False), text
    )
    # No words at all, spaces made visible and one put before: Llama 2. Merges of letters only, as its were learnt.
    letters = sorted(set(text.replace(" ", "")) | {"▁"})
    vocabulary = {c: i for i, c in enumerate(["<unk>", *letters, "th", "the", "ca", "cat", "▁the"])}
    merges = [("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t"), ("▁", "the")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made["llama2"] = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    return made


FAMILIES = families()


def whole(tokenizer, text):
    return text_backend(tokenizer).encode(text, add_special_tokens=False).ids


def in_pieces(tokenizer, *texts, **sizes):
    documents = [Document(f"d{i}", text.encode()) for i, text in enumerate(texts)]
    found: dict[str, list[int]] = {document.name: [] for document in documents}
    for ids, document, _ in encode_documents(documents, tokenizer, **sizes):
        found[document.name] += ids.tolist()
    return list(found.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("piece", "overlap"), [(1 << 15, 1 << 10), (1000, 300), (401, 200), (5000, 256)])
def test_pieces_join_without_a_seam(family, piece, overlap):
    tokenizer = FAMILIES[family]
    for seed in range(3):
        text = prose(seed, 4000)
        assert len(text) > 2 * piece or piece == 1 << 15
        assert in_pieces(tokenizer, text, piece=piece, overlap=overlap) == [whole(tokenizer, text)]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.sampled_from([*"ab é.,'!\n\t1", "  ", "\n\n", "the ", "东", "🙂"]), min_size=100, max_size=600),
    st.integers(260, 500),
)
def test_pieces_join_without_a_seam_in_any_text(family, parts, piece):
    """Words here may be longer than usual, yet far shorter than a quarter of the overlap."""
    text = " ".join("".join(parts[i : i + 9]) for i in range(0, len(parts), 9))
    assert in_pieces(FAMILIES[family], text, piece=piece, overlap=128) == [whole(FAMILIES[family], text)]


def test_several_documents_do_not_mix():
    tokenizer = FAMILIES["gpt2"]
    texts = [prose(1, 900), "", "short", prose(2, 1500), "the", "\n"]
    assert in_pieces(tokenizer, *texts, piece=500, overlap=200) == [whole(tokenizer, text) for text in texts]


@pytest.mark.parametrize("family", ["gpt2", "llama3", "llama2"])
@pytest.mark.parametrize("text", ["a" * 7000, "ab" * 5000 + " end", "QUJD" * 3000, " " * 5000 + "x", "é" * 5000])
def test_a_run_without_a_place_to_cut_still_decodes_to_the_same_text(family, text):
    tokenizer = FAMILIES[family]
    (ids,) = in_pieces(tokenizer, text, piece=700, overlap=300)
    names = tokenizer.convert_ids_to_tokens(ids)
    if family == "llama2":
        known = set(tokenizer.get_vocab())
        wanted = [c if c in known else "<unk>" for c in text.replace(" ", "▁")]
        assert sum(1 if n == "<unk>" else len(n) for n in names) >= len(wanted)
    else:
        decoded = decoders.ByteLevel().decode(names)
        assert decoded == text


def test_the_name_of_a_special_token_in_a_text_is_text():
    for tokenizer in (FAMILIES["gpt2"], byte_tokenizer()):
        (ids,) = in_pieces(tokenizer, "a<|endoftext|>b")
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_nothing_is_cut_or_added_by_the_tokenizers_own_settings():
    tokenizer = train_tokenizer([prose(0, 3000)], "bpe", 330)
    text = prose(4, 300)
    expected = whole(tokenizer, text)
    tokenizer([text], truncation=True, max_length=5, padding="max_length")  # leaves its mark on the inner tokenizer
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert in_pieces(tokenizer, text) == [expected]


def test_bytes_need_not_be_text():
    data = bytes(range(256)) * 5000
    (ids,) = [np.concatenate([i for i, _, _ in encode_documents([Document("raw", data)], byte_tokenizer())])]
    assert ids.astype(np.uint8).tobytes() == data


@pytest.mark.parametrize(
    ("before", "bad", "offset", "byte"),
    [
        (0, b"\xff rest", 0, "ff"),
        (10, b"\xc3(", 10, "c3"),
        ((1 << 20) - 1, b"\xe2\x82", (1 << 20) - 1, "e2"),  # across blocks, cut off by the end
        ((1 << 20) - 1, b"\xc3x", (1 << 20) - 1, "c3"),  # across blocks
        ((1 << 20) + 5, b"\x80", (1 << 20) + 5, "80"),
        (3, b"\xed\xa0\x80", 3, "ed"),  # a surrogate
    ],
)
def test_what_is_not_utf8_is_named_with_its_place(before, bad, offset, byte):
    document = Document("d", b"a" * before + bad, path="/texts/latin.txt")
    with pytest.raises(ValueError, match=f"latin.txt: byte 0x{byte} at offset {offset} is not UTF-8") as caught:
        list(encode_documents([document], FAMILIES["gpt2"]))
    assert "tokenizer bytes" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_place_in_a_part_is_that_in_the_file():
    document = Document("d", b"abc\xffdef").part(2, 7)
    with pytest.raises(ValueError, match="byte 0xff at offset 3 "):
        list(encode_documents([document], FAMILIES["gpt2"]))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.text(alphabet="ab é東\n\t\r \x0b\x0c", max_size=50), st.integers(1, 7))
def test_counts_do_not_depend_on_blocks(text, size):
    class InBlocks(Document):
        def blocks(self, _=0):
            return super().blocks(size)

    for tokenizer in (FAMILIES["gpt2"], byte_tokenizer()):
        *_, (_, _, counts) = encode_documents([InBlocks("d", text.encode())], tokenizer)
        assert counts.size == len(text.encode())
        assert counts.characters == len(text)
        assert counts.words == len(text.encode().split())
        assert counts.lines == text.count("\n")


@pytest.mark.parametrize("data", [b"\xff", b"abc\xe2\x82", b"\xc3" * 5])
def test_characters_are_unknown_where_bytes_are_no_text(data):
    *_, (_, _, counts) = encode_documents([Document("d", data)], byte_tokenizer())
    assert counts.characters == -1
    assert counts.size == len(data)


def test_progress_counts_every_byte():
    seen: list[int] = []
    documents = [Document("a", b"x" * 3_000_000), Document("b", b"y z")]
    for tokenizer in (byte_tokenizer(), FAMILIES["word"]):
        seen.clear()
        for _ in encode_documents(documents, tokenizer, progress=seen.append):
            pass
        assert sum(seen) == 3_000_003
