"""Tokenizers: bytes as tokens, any ``tokenizer.json``, vocabularies trained on a text, and text out of token streams.

Everything here is an ordinary ``transformers`` tokenizer, so that a model's folder loads anywhere.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCAB_SIZE = 257
HUB_PREFIX = "hub:"

# Names that published tokenizers give their end of text, for a bare tokenizer.json that does not say which it is.
_END_NAMES = (END_OF_TEXT, "<eos>", "</s>", "<|end_of_text|>", "<|endofprompt|>", "[SEP]")


@lru_cache(maxsize=1)
def _byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table).

    A byte that prints in Latin-1 stands for itself; the others take the characters from U+0100 on, in order.
    """
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in prints else next(stand_ins)) for byte in range(256))


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Bytes as tokens: ids 0 to 255 are the byte values, 256 is ``<|endoftext|>`` (beginning, end and padding).

    A byte-level BPE without merges whose vocabulary maps each byte to its value. It saves and loads like any Hugging
    Face tokenizer, with no code of this library; any UTF-8 text comes back exactly, also one in which
    ``<|endoftext|>`` is written out (that is 13 bytes, never the special token).

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("né").input_ids
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169])
        'né'
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(vocab={c: byte for byte, c in enumerate(_byte_characters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return _wrap(backend, END_OF_TEXT)


def _wrap(backend: Tokenizer, end: str | None, **more: Any) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    names = {} if end is None else {"bos_token": end, "eos_token": end, "pad_token": end}
    # Clean-up would drop spaces before punctuation; a text that holds a special token's name is still only text.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
        **names,
        **more,
    )


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ids 0 to 255 are the byte values and any text becomes its UTF-8 bytes; judged by the content alone.

    True for :func:`byte_tokenizer` also after it was saved and loaded, by whatever class. Such text goes to ids by
    copying, so that bytes that are not UTF-8 are kept too.
    """
    backend = _backend(tokenizer, required=False)
    if backend is None or backend.get_vocab_size() > 4096:  # a quick no: writing out a large vocabulary takes a while
        return False
    content = json.loads(backend.to_str())
    model = content["model"]
    before = content["pre_tokenizer"] or {}
    return (
        model.get("type") == "BPE"
        and not model.get("merges")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and model.get("vocab") == {c: byte for byte, c in enumerate(_byte_characters())}
        and content["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space")
        and not before.get("use_regex")
    )


def _backend(tokenizer: PreTrainedTokenizerBase, required: bool = True) -> Tokenizer | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None and required:
        raise ValueError(
            f"{type(tokenizer).__name__} is written in Python and has no tokenizer.json; "
            "a tokenizer of the tokenizers library is needed (PreTrainedTokenizerFast)"
        )
    return backend


def text_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A private copy of the tokenizer's inner part, set up to read plain text.

    Whatever is in the text is text: the name of a special token there is not turned into the token. Nothing is cut or
    padded.
    """
    from tokenizers import Tokenizer

    backend = _backend(tokenizer)
    assert backend is not None
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True
    return copy


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hexadecimal digest of what decides how a text becomes ids; the same after saving and loading.

    Left out is what plain text never meets: truncation, padding and the template of special tokens.
    """
    backend = _backend(tokenizer)
    assert backend is not None
    content = json.loads(backend.to_str())
    for key in ("truncation", "padding", "post_processor"):
        content.pop(key, None)
    content["separator"] = separator_id(tokenizer)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that stands before each document: the beginning-of-text token, else the end-of-text token, else None."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None else tokenizer.eos_token_id


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """A tokenizer by name.

    Args:
        name: ``"bytes"``; the path of a ``tokenizer.json``; a folder that holds one (a saved model or tokenizer); or
            ``"hub:owner/name"`` for the Hugging Face hub (nothing is downloaded unless asked for in this way).
            A ``tokenizer.json`` beside a ``tokenizer_config.json`` is loaded with it; a bare one takes as end of text
            the first of its special tokens that has a usual name for it (``<|endoftext|>``, ``<eos>``, ``</s>`` …).

    Raises:
        FileNotFoundError: no such file or folder, or a folder without a tokenizer.
        ValueError: a file that is not a tokenizer, or a tokenizer without a ``tokenizer.json`` form.
    """
    text = os.fspath(name)
    if text == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if text.startswith(HUB_PREFIX):
        return AutoTokenizer.from_pretrained(text.removeprefix(HUB_PREFIX))
    path = Path(text).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"there is no tokenizer {text!r}: give bytes, the path of a tokenizer.json, a folder that holds one, "
            f"or {HUB_PREFIX}owner/name to fetch one from the Hugging Face hub"
        )
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file() and not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"{folder}: there is no tokenizer.json in this folder")
    if file.is_file():
        bare = _read_tokenizer_file(file)
    if (path.is_dir() or file.name == "tokenizer.json") and (folder / "tokenizer_config.json").is_file():
        try:
            kind = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
            # These say all by themselves; for others transformers also looks at the model's configuration beside them.
            general = file.is_file() and kind in ("TokenizersBackend", "PreTrainedTokenizerFast")
            if not file.is_file() and kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
                raise FileNotFoundError(f"{folder}: there is no tokenizer.json in this folder")
            if general:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            else:
                tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except OSError:
            raise
        except Exception as error:  # transformers lets KeyError, JSONDecodeError and others of a bad file through
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"{folder}: the tokenizer cannot be loaded ({first_line})") from error
        _backend(tokenizer)
        return tokenizer
    special = {token.content for token in bare.get_added_tokens_decoder().values() if token.special}
    return _wrap(bare, next((end for end in _END_NAMES if end in special), None))


def _read_tokenizer_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is not a tokenizer.json (not UTF-8)") from error
    except OSError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{path}: this is not a tokenizer.json, or it was cut short ({error})") from error


def train_tokenizer(
    texts: Iterable[str],
    kind: Literal["bpe", "word"] = "bpe",
    vocab_size: int | None = None,
    *,
    min_frequency: int | None = None,
) -> PreTrainedTokenizerBase:
    """Train a vocabulary on texts.

    - ``"bpe"``: byte-level byte pair encoding with GPT-2's way of cutting text into words. No text is out of its
      vocabulary, and any text comes back exactly. ``<|endoftext|>`` is id 0, then the 256 bytes, then the merges.
    - ``"word"``: one id a word, words cut at white space, each line's end a word of its own, ``<eos>``: what published
      word-level corpora (WikiText-103) count. Ids: ``<unk>`` 0, ``<eos>`` 1, then words by falling frequency. The
      white space of a text does not come back.

    Args:
        texts: pieces of text, cut where no word is cut in two; read once.
        kind: see above.
        vocab_size: ids in all, special ones included. Default: up to 8,000 for bpe, every word that occurs for word.
        min_frequency: a pair or word that occurs less often is left out. Default: 2 for bpe, 1 for word.

    Raises:
        ValueError: a size that this text or this kind cannot reach (what can be reached is named), or no text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind not in ("bpe", "word"):
        raise ValueError(f"kind must be bpe or word, got {kind!r}")
    least = BYTE_VOCAB_SIZE if kind == "bpe" else 3
    if vocab_size is not None and vocab_size < least:
        what = "256 bytes and <|endoftext|>" if kind == "bpe" else "<unk>, <eos> and a word"
        raise ValueError(f"vocab_size {vocab_size} is too small for {kind}: at least {least} ({what})")
    seen = False

    def watched() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen = seen or bool(text)
            yield text

    if kind == "bpe":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        bpe = trainers.BpeTrainer(
            vocab_size=8000 if vocab_size is None else vocab_size,
            min_frequency=2 if min_frequency is None else min_frequency,
            show_progress=False,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(_byte_characters()),
        )
        backend.train_from_iterator(watched(), bpe)
        end, more = END_OF_TEXT, {}
    else:
        # The trainer only counts: it gives special tokens that also occur in the text (<unk> in WikiText) two ids each.
        counter = Tokenizer(models.WordLevel())
        counter.normalizer = normalizers.Replace("\n", " <eos> ")
        counter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        counter.train_from_iterator(
            watched(),
            trainers.WordLevelTrainer(
                vocab_size=2**31 if vocab_size is None else vocab_size,
                min_frequency=1 if min_frequency is None else min_frequency,
                show_progress=False,
            ),
        )
        by_rank = sorted(counter.get_vocab().items(), key=lambda item: item[1])
        words = ["<unk>", "<eos>", *(word for word, _ in by_rank if word not in ("<unk>", "<eos>"))][:vocab_size]
        backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
        backend.normalizer = normalizers.Replace("\n", " <eos> ")
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in ("<unk>", "<eos>")])
        end, more = "<eos>", {"unk_token": "<unk>"}
    if not seen:
        raise ValueError("there is no text to train a vocabulary on")
    if vocab_size is not None and backend.get_vocab_size() < vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size} cannot be reached: this text gives {backend.get_vocab_size()} "
            f"({'merges of pairs' if kind == 'bpe' else 'words'} that occur often enough run out); "
            "ask for at most that, or give more text"
        )
    return _wrap(backend, end, **more)


class TextDecoder:
    r"""Turns a stream of ids into text piece by piece, for showing text while it is generated.

    What has been given out never changes: a character of which only some bytes have come is held back until it is
    whole, and bytes that cannot become UTF-8 show as U+FFFD as soon as that is certain. The pieces joined, with
    :meth:`flush` at the end, are what ``tokenizer.decode`` makes of all ids (for tokenizers that are not byte-level:
    where the ids make valid UTF-8).

    Args:
        tokenizer: any Hugging Face tokenizer.
        skip_special_tokens: leave out special tokens such as ``<|endoftext|>``.

    Example:
        >>> decoder = TextDecoder(byte_tokenizer())
        >>> [decoder.push(i) for i in b"n\xc3\xa9"]
        ['n', '', 'é']
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        backend = _backend(tokenizer, required=False)
        self._bytes: dict[str, int] | None = None
        if backend is not None and type(backend.decoder).__name__ == "ByteLevel":
            self._bytes = {c: byte for byte, c in enumerate(_byte_characters())}
        self._special = set(tokenizer.all_special_ids)
        self._added = set(tokenizer.get_added_vocab().values())
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # For other decoders: the last ids, where among them the last whole character or word begins, and the text they
        # have given already.
        self._ids: list[int] = []
        self._unit = 0
        self._shown = ""

    def push(self, ids: int | Sequence[int]) -> str:
        """Take the next id or ids; return the text that has become certain."""
        return "".join(map(self._push, [ids] if isinstance(ids, int) else ids))

    def _push(self, token: int) -> str:
        if token in self._special and self.skip_special_tokens:
            return ""
        if self._bytes is not None:
            return self._push_bytes(token)
        name = self.tokenizer.convert_ids_to_tokens(token)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", name) if isinstance(name, str) else None  # SentencePiece's bytes
        held = bool(self._utf8.getstate()[0])
        if byte is None:
            self._utf8.reset()
        else:
            self._utf8.decode(bytes([int(byte[1], 16)]))
        if byte is None or not held:
            self._unit = len(self._ids)
        self._ids.append(token)
        if self._utf8.getstate()[0]:
            return ""
        text = self._decode(self._ids)
        # A trailing U+FFFD may be a character whose other bytes are still to come; four bytes settle it.
        if text.endswith("\ufffd") and not text[:-4].endswith("\ufffd"):
            return ""
        new = text[len(self._shown) :]
        if len(self._ids) > 16:  # some context is kept: decoders treat the first word of a text specially
            self._ids, self._unit = self._ids[self._unit :], 0
            text = self._decode(self._ids)
        self._shown = text
        return new

    def _push_bytes(self, token: int) -> str:
        assert self._bytes is not None
        name = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            raise ValueError(f"token id {token} is outside the vocabulary of {len(self.tokenizer)} ids")
        if token in self._added:
            return self._utf8.decode(name.encode())
        return self._utf8.decode(bytes(self._bytes[c] for c in name))

    def _decode(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def flush(self) -> str:
        """The rest: what was held back, an unfinished character as U+FFFD. The decoder then starts anew."""
        if self._bytes is not None:
            rest = self._utf8.decode(b"", final=True)
        else:
            rest = self._decode(self._ids)[len(self._shown) :] if self._ids else ""
        self._utf8.reset()
        self._ids, self._unit, self._shown = [], 0, ""
        return rest
