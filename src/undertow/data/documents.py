"""Documents: named streams of bytes from files, folders, globs, archives and standard input.

Text is bytes here, never opened in text mode: nothing translates newlines, drops a byte order mark or guesses an
encoding on the way. Contents are read in blocks when asked for, so that a document may be larger than memory.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import lzma
import os
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

BLOCK = 1 << 20
"""Bytes read at a time."""

_SNIFF = 8000  # bytes looked at to tell text from binary; the number is git's

# The first bytes of each format; names are not trusted, since `text.gz` may be plain and `dump` may be compressed.
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
)
_OPENERS: dict[str, Callable[..., Any]] = {  # all but the first read bytes unless told otherwise
    "plain": partial(open, mode="rb"),
    "gzip": gzip.open,
    "xz": lzma.open,
    "bzip2": bz2.open,
}
# What the decompressors raise on a file that is damaged or was cut short.
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile)


@dataclass(frozen=True)
class Document:
    r"""A named text: its bytes, or how to open them.

    Args:
        name: what reports and splits call it; for a file in a folder its path below that folder.
        source: the bytes themselves, or a function that opens a fresh binary stream of them.
        path: where it lies, for messages; default: the name.
        start, stop: the part of the content that this document is, in bytes; default: all.
        size: bytes of the whole content where they are known without reading, else None.
        stored: bytes it takes on disk (compressed, say); 0 for bytes in memory.
        identity: a string that changes when the file changes (path, size, time); empty: only the content tells.

    Example:
        >>> document = Document("greeting", b"hello\n")
        >>> b"".join(document.blocks())
        b'hello\n'
    """

    name: str
    source: bytes | Callable[[], BinaryIO]
    path: str = ""
    start: int = 0
    stop: int | None = None
    size: int | None = None
    stored: int = 0
    identity: str = ""

    @property
    def where(self) -> str:
        """The place to name in a message: the path, else the name."""
        return self.path or self.name

    @property
    def data(self) -> bytes:
        """All bytes at once."""
        return b"".join(self.blocks())

    def blocks(self, size: int = BLOCK) -> Iterator[bytes]:
        """The bytes, at most ``size`` at a time, never empty; each call starts anew.

        Raises:
            ValueError: a compressed file that is damaged or was cut short; it is named.
            OSError: the file cannot be read.
        """
        if isinstance(self.source, bytes):
            content = memoryview(self.source)[self.start : self.stop]
            for at in range(0, len(content), size):
                yield bytes(content[at : at + size])
            return
        left = sys.maxsize if self.stop is None else self.stop - self.start
        try:
            with self.source() as stream:
                if self.start:
                    stream.seek(self.start)
                while left > 0 and (block := stream.read(min(size, left))):
                    left -= len(block)
                    yield block
        except _DAMAGE as error:
            raise ValueError(f"{self.where}: the compressed file is damaged or cut short ({error})") from error
        except OSError as error:
            # bz2 reports damage as an OSError without a number; the system's own carry one, yet not always the name.
            if error.errno is None:
                raise ValueError(f"{self.where}: the compressed file is damaged or cut short ({error})") from error
            if error.filename is None:
                raise type(error)(error.errno, error.strerror, self.where) from error
            raise

    def length(self) -> int:
        """Bytes of this document; a compressed one is read through once to count them."""
        whole = len(self.source) if isinstance(self.source, bytes) else self.size
        if whole is None:
            return sum(map(len, self.blocks()))
        return max(0, (whole if self.stop is None else min(self.stop, whole)) - self.start)

    def part(self, start: int, stop: int) -> Document:
        """The bytes ``start`` to ``stop`` of this document, as a document of its own."""
        begin, end = self.start + start, self.start + stop
        return replace(self, name=f"{self.name} [{begin}:{end}]", start=begin, stop=end)

    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        sha = hashlib.sha256()
        for block in self.blocks():
            sha.update(block)
        return sha.hexdigest()

    def __repr__(self) -> str:
        return f"Document({self.where!r})"


def read_documents(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, spool: str | os.PathLike[str] | None = None
) -> list[Document]:
    """The documents of one or several sources, in the order given; contents are read only when used.

    A source is

    - a file: one document, whatever is in it; gzip, xz and bzip2 are recognised by content and read through;
    - a zip archive: one document for each text-like member, sorted by name;
    - a folder: one document for each text-like file below it, sorted; hidden files and folders are passed over, links
      are followed (loops too, once). Text-like: no NUL in the first 8,000 bytes (after decompression), not empty;
    - a glob such as ``"books/*.txt"`` or ``"src/**/*.py"``: what it matches, sorted, each as above;
    - ``"-"``: standard input. It (like any pipe) is copied to a file under ``spool`` first, since it is read more
      than once; the copy goes when the document is no longer used;
    - ``"stdlib"``: the source of the running Python's standard library, see :func:`undertow.data.stdlib_documents`
      (for a folder of that name write ``./stdlib``).

    A file that several sources name is read once.

    Args:
        sources: one source or several.
        spool: folder for the copy of standard input; default: the cache folder (``/tmp`` is memory on many machines).

    Raises:
        FileNotFoundError: a file or folder that is not there, a glob that matches nothing.
        PermissionError: a file or folder that may not be read.
        ValueError: a file that is empty, a folder or archive with no text in it, an archive that cannot be opened.
    """
    if isinstance(sources, str | os.PathLike):
        sources = [sources]
    found: list[Document] = []
    seen: set[str] = set()
    for source in sources:
        for document in _read_source(os.fspath(source), spool):
            if document.path and document.path != "-":
                # Overlapping globs, and links to one file, must not make it count twice.
                real = os.path.realpath(document.path)
                if real in seen:
                    continue
                seen.add(real)
            found.append(document)
    if not found:
        raise ValueError("no text was given: name a file, a folder, a glob, - for standard input, or stdlib")
    return found


def _read_source(source: str, spool: str | os.PathLike[str] | None) -> Iterator[Document]:
    if source == "-":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("standard input cannot be shared out to several processes; save the text to a file first")
        yield _spooled(sys.stdin.buffer, "-", spool)
        return
    if source == "stdlib":
        from undertow.data.stdlib import stdlib_documents

        yield from stdlib_documents()
        return
    path = os.path.expanduser(source)
    if not os.path.lexists(path) and glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True), key=_order)
        if not matches:
            raise FileNotFoundError(f"no file matches {source!r}")
        base = _fixed_part(path)
        files = [match for match in matches if not os.path.isdir(match)]
        # With `**` the files below a folder match themselves; a folder is entered only where nothing else matched.
        for match in files or matches:
            yield from _read_path(match, os.path.relpath(match, base), spool, skip_empty=len(matches) > 1)
        return
    yield from _read_path(path, os.path.basename(os.path.abspath(path)), spool)


def _fixed_part(pattern: str) -> str:
    """The folder above the first wildcard of a glob."""
    parts = Path(pattern).parts
    fixed = parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))]
    return os.path.join(*fixed) if fixed else "."


def _order(path: str) -> tuple[str, ...]:
    """Sort key: folder by folder, so that `a/x` and `a/y` stand together and before `a.txt`'s neighbours do."""
    return Path(path).parts


def _read_path(
    path: str, name: str, spool: str | os.PathLike[str] | None, *, skip_empty: bool = False
) -> Iterator[Document]:
    name = Path(name).as_posix()
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file or folder {path!r}") from None
    except OSError as error:  # a link that points at itself, a component that is no folder, no permission
        raise type(error)(error.errno, error.strerror, path) from None
    if stat.S_ISDIR(status.st_mode):
        yield from _read_folder(path)
    elif not stat.S_ISREG(status.st_mode):
        with open(path, "rb") as pipe:
            yield _spooled(pipe, path, spool)
    elif status.st_size == 0:
        if not skip_empty:
            raise ValueError(f"{path}: the file is empty")
    else:
        yield from _read_file(path, name, status)


def _read_folder(folder: str) -> Iterator[Document]:
    looked_at = 0
    found = False
    for path in _walk(folder):
        looked_at += 1
        status = os.stat(path)
        if status.st_size == 0 or not stat.S_ISREG(status.st_mode):
            continue
        for document in _read_file(path, Path(os.path.relpath(path, folder)).as_posix(), status, only_text=True):
            found = True
            yield document
    if not found:
        raise ValueError(f"{folder}: no text in this folder ({looked_at} files looked at)")


def _walk(folder: str) -> list[str]:
    """Every file below a folder, sorted; each real folder is entered once, so a link to a parent does no harm."""
    entered: set[tuple[int, int]] = set()
    files: list[str] = []

    def fail(error: OSError) -> None:
        raise error

    for at, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        status = os.stat(at)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        # A link whose target is gone is passed over.
        paths = (os.path.join(at, name) for name in names if not name.startswith("."))
        files += (path for path in paths if os.path.exists(path))
    return sorted(files, key=_order)


def _read_file(path: str, name: str, status: os.stat_result, *, only_text: bool = False) -> Iterator[Document]:
    with open(path, "rb") as stream:
        head = stream.read(_SNIFF)
    kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), "plain")
    identity = f"{os.path.realpath(path)}|{status.st_size}|{status.st_mtime_ns}"
    if kind == "zip":
        yield from _read_zip(path, name, identity, required=not only_text)
        return
    if kind == "zstandard":
        if only_text:
            return
        raise ValueError(f"{path}: zstandard compression is not read; decompress the file first (zstd -d)")
    opener = _OPENERS[kind]
    document = Document(
        name,
        lambda: opener(path),
        path=path,
        size=status.st_size if kind == "plain" else None,
        stored=status.st_size,
        identity=identity,
    )
    if only_text and b"\0" in (head if kind == "plain" else next(document.blocks(_SNIFF), b"\0")):
        return
    yield document


def _read_zip(path: str, name: str, identity: str, *, required: bool) -> Iterator[Document]:
    try:
        # Kept open by its documents: opening it anew for each of 100,000 members would take quadratic time.
        archive = zipfile.ZipFile(path)
        members = sorted((m for m in archive.infolist() if not m.is_dir()), key=lambda m: _order(m.filename))
    except (zipfile.BadZipFile, EOFError) as error:
        if not required:
            return
        raise ValueError(f"{path}: the zip archive is damaged or cut short ({error})") from error
    found = False
    for member in members:
        parts = Path(member.filename).parts
        if not member.file_size or any(part.startswith(".") or part == "__MACOSX" for part in parts):
            continue
        if member.flag_bits & 1:
            raise ValueError(f"{path}: {member.filename} is encrypted; unpack the archive first")
        document = Document(
            f"{name}/{Path(member.filename).as_posix()}",
            _member_opener(archive, member),
            path=f"{path}/{member.filename}",
            size=member.file_size,
            stored=member.compress_size,
            identity=f"{identity}|{member.filename}|{member.CRC}",
        )
        if b"\0" not in next(document.blocks(_SNIFF), b"\0"):
            found = True
            yield document
    if required and not found:
        raise ValueError(f"{path}: no text in this archive ({len(members)} members looked at)")


def _member_opener(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Callable[[], BinaryIO]:
    return lambda: cast(BinaryIO, archive.open(member))


def _spooled(stream: BinaryIO, name: str, spool: str | os.PathLike[str] | None) -> Document:
    """Copy a stream that can be read only once to a file that goes away with the document."""
    from undertow.data.cache import cache_folder, sweep, usable_folder

    folder = usable_folder(Path(spool) if spool is not None else cache_folder() / "spool")
    sweep(folder)
    copy = tempfile.NamedTemporaryFile(prefix=".tmp-", dir=folder)  # noqa: SIM115 - it lives as long as the document
    sha = hashlib.sha256()
    size = 0
    while block := stream.read(BLOCK):
        copy.write(block)
        sha.update(block)
        size += len(block)
    copy.flush()
    if not size:
        raise ValueError(f"{'standard input' if name == '-' else name}: there was nothing to read")
    document = next(_read_file(copy.name, name, os.stat(copy.name)))
    inner = cast(Callable[[], BinaryIO], document.source)

    def reopen() -> BinaryIO:
        assert copy  # holding the file object is what keeps the copy on disk
        return inner()

    return replace(document, source=reopen, path=name, identity=sha.hexdigest())
