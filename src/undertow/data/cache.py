"""The folder where what can be made again is kept: token stores, copies of standard input."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STALE_AFTER = 24 * 3600.0


def cache_folder(chosen: str | os.PathLike[str] | None = None) -> Path:
    """The chosen folder, else ``$UNDERTOW_CACHE``, ``$XDG_CACHE_HOME/undertow`` or ``~/.cache/undertow``."""
    if chosen:
        return Path(chosen).expanduser()
    if own := os.environ.get("UNDERTOW_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "undertow"
    return Path("~/.cache/undertow").expanduser()


def usable_folder(folder: Path) -> Path:
    """Make the folder and check that it can be written.

    Raises:
        OSError: (``PermissionError``, ``NotADirectoryError`` …) it cannot; the message says how to choose another.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise type(error)(
            f"the cache folder {folder} cannot be written ({error.strerror}); "
            "choose another with cache_dir or the environment variable UNDERTOW_CACHE"
        ) from error
    return folder


def sweep(folder: Path) -> None:
    """Delete what builders that were killed left behind (``.tmp-*``, untouched for a day)."""
    for left in folder.glob(".tmp-*"):
        try:
            newest = max(path.stat().st_mtime for path in (left, *(left.iterdir() if left.is_dir() else ())))
            if time.time() - newest > _STALE_AFTER:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError:  # another process sweeps too, or it is not ours to delete
            continue


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for; the system frees it when its holder dies.

    It only spares work: where the file system has no locks, builders run side by side and the last rename decides.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
