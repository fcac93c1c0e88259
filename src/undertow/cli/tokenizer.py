"""Train a vocabulary on text and save it as a Hugging Face tokenizer.

bpe: byte-level byte pair encoding, no text is out of vocabulary. word: words cut at white space, a line's end counts as
<eos>, what is not in the vocabulary is <unk>. bytes: nothing to train, each byte is a token.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from undertow.data import DataConfig, byte_tokenizer, split_documents, train_tokenizer
from undertow.data.documents import Document, read_documents
from undertow.data.progress import byte_progress
from undertow.data.store import iterate_texts


@dataclass
class Config:
    """Options of ``undertow tokenizer``."""

    out: str
    """Folder to write tokenizer.json and tokenizer_config.json to."""

    data: list[str] = field(default_factory=list)
    """Text: files, folders, globs, "-" for standard input, or "stdlib". Not needed for kind bytes."""

    kind: Literal["bpe", "word", "bytes"] = "bpe"
    """What a token is."""

    vocab_size: int | None = None
    """Ids in all, special ones included. Default: up to 8000 for bpe, every word that occurs for word."""

    min_frequency: int | None = None
    """Leave out what occurs less often. Default: 2 for bpe, 1 for word."""

    whole: bool = False
    """Train on all of the text. Otherwise what "undertow train" would hold out of the same data stays unseen."""

    overwrite: bool = False
    """Write into a folder that is not empty; files of the same names are replaced."""

    cache_dir: str | None = None
    """Where a copy of standard input is kept meanwhile. Default: as for "undertow train"."""


def run(config: Config) -> None:
    """Train, save, and say what was made.

    Raises:
        FileExistsError: the folder is not empty and ``overwrite`` was not asked for.
        ValueError: see :func:`undertow.data.train_tokenizer`.
    """
    out = Path(config.out).expanduser()
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; out must name a folder")
    if out.is_dir() and any(out.iterdir()) and not config.overwrite:
        raise FileExistsError(f"the folder {out} is not empty; choose another, or add --overwrite")
    if config.kind == "bytes":
        if config.vocab_size not in (None, 257):
            raise ValueError(
                f"vocab_size {config.vocab_size} cannot be had: bytes are always 257 ids, the values and an end"
            )
        tokenizer, read = byte_tokenizer(), 0
    else:
        documents = _documents(config)
        read = sum(document.length() for document in documents)
        with byte_progress("reading", read) as advance:
            texts = iterate_texts(documents, advance)
            tokenizer = train_tokenizer(texts, config.kind, config.vocab_size, min_frequency=config.min_frequency)
    # Beside the folder first, so that a full disk or Ctrl-C does not leave half of a tokenizer in it.
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=out.parent) as made:
        tokenizer.save_pretrained(made)
        for file in os.listdir(made):
            shutil.copyfile(os.path.join(made, file), out / f".tmp-{file}")
            os.replace(out / f".tmp-{file}", out / file)
    source = f", trained on {read:,} bytes" if read else ""
    print(f"{out}: {config.kind} tokenizer, {len(tokenizer):,} ids{source}")


def _documents(config: Config) -> list[Document]:
    if config.whole:
        return read_documents(config.data, spool=config.cache_dir)
    return split_documents(DataConfig(data=config.data, cache_dir=config.cache_dir)).train
