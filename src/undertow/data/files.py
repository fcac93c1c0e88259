"""Files that are whole or not there, whenever the writer is killed; and what a file's digest is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Make the folder ``final`` all at once, replacing one that is there.

    Gives a folder beside it to write into. When the block ends well, its files are synced and it takes the final
    name; when it raises, it is removed and ``final`` is as it was. Replacing takes two renames: after a kill between
    them the old folder is found under ``.replaced-NAME``, and :func:`recover` puts it back.

    Raises:
        OSError: with the path and reason; libraries that write files report a full disk in errors of their own
            kinds, which are turned into this one.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    recover(final.parent)
    unfinished = final.parent / f"{_UNFINISHED}{final.name}"
    unfinished.mkdir()
    try:
        yield unfinished
        for path in sorted(unfinished.rglob("*")):
            sync(path)
        sync(unfinished)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        _raise_as_write_error(error, final)
        raise
    if final.exists():
        replaced = final.parent / f"{_REPLACED}{final.name}"
        final.rename(replaced)
        unfinished.rename(final)
        sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        unfinished.rename(final)
        sync(final.parent)


@contextlib.contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """Make the file ``final`` all at once, replacing one that is there.

    Gives the path of a file beside it to write. When the block ends well, it is synced and takes the final name; when
    it raises, it is removed and ``final`` is as it was.

    Raises:
        OSError: with the path and reason, whatever the library that writes makes of a full disk.
    """
    unfinished = final.parent / f"{_UNFINISHED}{final.name}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        sync(unfinished)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        _raise_as_write_error(error, final)
        raise
    unfinished.replace(final)
    sync(final.parent)


def recover(folder: Path) -> None:
    """Clear away what a killed writer left in ``folder``; nothing that was ever whole is lost."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.name.startswith(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(_REPLACED):
            final = folder / path.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)


def sync(path: Path) -> None:
    """Make what is in a file, or a rename in a folder, last through a power cut. Some systems cannot sync folders."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def sha256(*paths: Path) -> str:
    """Of a file, or of several as if they were one."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def _raise_as_write_error(error: BaseException, final: Path) -> None:
    if isinstance(error, OSError) or _is_write_error(error):
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise OSError(f"could not write {final}: {reason}") from error


def _is_write_error(error: BaseException) -> bool:
    """Whether a library's own error stands for one of the operating system."""
    text = f"{type(error).__name__} {error}"
    return isinstance(error, Exception) and any(
        sign in text for sign in ("SafetensorError", "PytorchStreamWriter", "No space left", "os error", "I/O error")
    )
