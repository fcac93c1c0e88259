"""Text as tokens: documents, tokenizers, token stores on disk, and streams of windows. Depends on no other room.

    documents = read_documents(["books/*.txt"])                       # bytes with names, read when needed
    tokenizer = load_tokenizer("bytes")                               # a Hugging Face tokenizer
    store = TokenStore.build(documents, tokenizer, "books.tokens")    # memory-mapped
    piece = next(Stream(store, batch_size=8, window=256))             # (8, 256), row b goes on in the next piece

:func:`prepare` does it all from a :class:`DataConfig`, with a cache.
"""

from undertow.data.cache import cache_folder
from undertow.data.documents import Document, read_documents
from undertow.data.splits import DataConfig, DocumentSplits, Splits, cached_store, prepare, split_documents
from undertow.data.stdlib import stdlib_documents, stdlib_split
from undertow.data.store import TokenStore
from undertow.data.stream import IGNORED, Piece, Stream, evaluation_pieces, window_pieces
from undertow.data.tokenizer import (
    TextDecoder,
    byte_tokenizer,
    is_byte_tokenizer,
    load_tokenizer,
    separator_id,
    tokenizer_fingerprint,
    train_tokenizer,
)

__all__ = [
    "IGNORED",
    "DataConfig",
    "Document",
    "DocumentSplits",
    "Piece",
    "Splits",
    "Stream",
    "TextDecoder",
    "TokenStore",
    "byte_tokenizer",
    "cache_folder",
    "cached_store",
    "evaluation_pieces",
    "is_byte_tokenizer",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "separator_id",
    "split_documents",
    "stdlib_documents",
    "stdlib_split",
    "tokenizer_fingerprint",
    "train_tokenizer",
    "window_pieces",
]
