"""The built-in corpus: the source of the running Python's standard library, on every machine without a download."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from undertow.data.documents import Document

_LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_LEFT_OUT_MODULES = {"pydoc_data.topics", "sitecustomize", "usercustomize"}


def stdlib_documents(folder: str | os.PathLike[str] | None = None) -> list[Document]:
    """The modules of the running Python's standard library as documents, sorted by name; 10 to 12 MB in 600 to 730.

    A document is a module's ``.py`` file as bytes; its name is the module's, dotted, a package's that of its folder
    (``asyncio`` for ``asyncio/__init__.py``). Left out:

    - folders ``test``, ``tests`` and ``idle_test`` (the library's own tests), ``site-packages`` and
      ``dist-packages`` (not the standard library), ``config-*``, ``_sysconfigdata*``, ``sitecustomize`` and
      ``usercustomize`` (written for one machine);
    - ``pydoc_data.topics``: generated, 0.8 MB of documentation in one string literal, 7% of the whole;
    - empty files.

    What a distribution packs apart (Debian: ``tkinter``, ``idlelib``) is there where it is installed.

    Args:
        folder: where the library lies; default: that of the running Python (of a virtual environment's base).

    Raises:
        FileNotFoundError: this Python carries no source of its library, or keeps it in a zip archive.
    """
    root = Path(folder if folder is not None else sysconfig.get_paths()["stdlib"])
    if not (root / "os.py").is_file():
        raise FileNotFoundError(
            f"the source of Python's standard library is not in {root} (this Python ships none, or keeps it in a zip "
            "archive); name a text of your own instead of stdlib"
        )
    documents: list[Document] = []
    for at, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _LEFT_OUT_FOLDERS and not f.startswith((".", "config-"))]
        for file in files:
            path = Path(at, file)
            if path.suffix != ".py" or file.startswith(("_sysconfigdata", ".")) or not path.is_file():
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            status = path.stat()
            if not name or name in _LEFT_OUT_MODULES or not status.st_size:
                continue
            documents.append(
                Document(
                    name,
                    _opener(path),
                    path=str(path),
                    size=status.st_size,
                    stored=status.st_size,
                    identity=f"{path}|{status.st_size}|{status.st_mtime_ns}",
                )
            )
    return sorted(documents, key=lambda document: document.name)


def _opener(path: Path) -> Callable[[], BinaryIO]:
    return lambda: path.open("rb")


def stdlib_split(name: str, valid_fraction: float = 0.05, test_fraction: float = 0.05) -> str:
    """Which part a module belongs to: ``"train"``, ``"valid"`` or ``"test"``, from its name alone.

    The first eight bytes of the name's SHA-256, as a fraction u of 1, decide: test where u >= 1 - test_fraction, valid
    in the valid_fraction below, else train. So a module stays in its part whatever the Python version and whatever
    other modules there are.

    Example:
        >>> stdlib_split("asyncio"), stdlib_split("typing")
        ('train', 'test')
    """
    u = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    if u >= 1 - test_fraction:
        return "test"
    return "valid" if u >= 1 - test_fraction - valid_fraction else "train"
