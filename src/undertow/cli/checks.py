"""What several commands make sure of before they begin."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.data import Document


def matching_tokenizer(given: str | None, place: str, name: str | None = None) -> Any:
    """The tokenizer to use with a model: the one saved with it, or the one given, where that gives the same ids.

    Args:
        given: what was asked for; None: the model's own.
        place: where the model loads from.
        name: what to call the model; by default its place.

    Raises:
        ValueError: the one given is not the model's.
        OSError: there is none.
    """
    from undertow.data import load_tokenizer, tokenizer_fingerprint

    if given is None:
        return load_tokenizer(place)
    tokenizer = load_tokenizer(given)
    try:
        own = load_tokenizer(place)
    except (OSError, ValueError):  # it comes without one, or with one in a form that cannot be read
        return tokenizer
    if tokenizer_fingerprint(own) != tokenizer_fingerprint(tokenizer):
        raise ValueError(
            f"the tokenizer {given} does not match {name or place}, which was trained with another: leave it out"
        )
    return tokenizer


def check_file(path: Path, what: str) -> None:
    """Whether a file may be written there; changes nothing.

    Args:
        path: where to.
        what: what the file is, for messages: "a state".

    Raises:
        IsADirectoryError, NotADirectoryError, PermissionError: why not.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, and {what} is a file")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {parent} is a file")
    if not os.access(path if path.exists() else parent, os.W_OK):
        where = "it" if path.exists() else f"the folder {parent}"
        raise PermissionError(f"{path} cannot be written: {where} may not be written to")


def check_json(path: str | None, taken: Mapping[str, str | None]) -> None:
    """Whether the figures may be written there; an earlier JSON file is replaced, nothing else is.

    Args:
        path: what ``--json`` names, if anything.
        taken: other files of the same command, by what they are for messages.

    Raises:
        IsADirectoryError, NotADirectoryError, PermissionError: see :func:`check_file`.
        ValueError: it is one of those taken.
        FileExistsError: something else is there.
    """
    if path is None:
        return
    where = Path(path).expanduser()
    check_file(where, "what --json writes")
    for what, other in taken.items():
        if other is not None and _same(where, Path(other).expanduser()):
            raise ValueError(f"--json {path} would replace {what}: give it another name")
    if where.is_file():
        with where.open("rb") as file:
            begins = file.read(4096).strip()
        if begins and not begins.startswith(b"{"):
            raise FileExistsError(f"--json {path}: that file is there already and holds no JSON: give it another name")


def write_json(path: str, facts: dict[str, Any]) -> None:
    """The figures, in a file; its folder is made."""
    where = Path(path).expanduser()
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def check_not_text(path: str | None, option: str, documents: Iterable[Document]) -> None:
    """Whether a file to write is none of the texts to read.

    Raises:
        ValueError: it is one.
    """
    if path is None or not Path(path).expanduser().exists():
        return
    real = os.path.realpath(Path(path).expanduser())
    for document in documents:
        # What is in an archive has the archive's path before its own.
        other = os.path.realpath(document.path)
        if other.startswith(real + os.sep) or _same(Path(real), Path(other)):
            raise ValueError(f"{option} {path} would replace the text {document.path}: give it another name")


def _same(a: Path, b: Path) -> bool:
    """Whether two paths name one file, there or not."""
    try:
        return a.samefile(b)
    except OSError:
        return os.path.realpath(a) == os.path.realpath(b)
