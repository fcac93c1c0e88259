"""Checkpoints that are whole or not there.

A checkpoint is a folder ``step-00000200`` with some files and a ``manifest.json`` that gives each file's size and
SHA-256 and the facts of the run. It is written under a name that no reader looks at, every file is synced, then the
folder is renamed and its parent synced: a kill at any moment leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from undertow.data.files import atomic_folder, sha256

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)$")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names it, says what is wrong and offers another one."""


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first, good or not."""
    if not folder.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(found)]


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.match(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not named like a checkpoint (step-00000200)")
    return int(match.group(1))


def save(
    folder: Path, step: int, writers: Mapping[str, Callable[[Path], object]], facts: Mapping[str, Any], keep: int
) -> Path:
    """Write checkpoint ``step`` into ``folder`` and remove all but the ``keep`` newest.

    Args:
        folder: where the checkpoints are.
        step: its step.
        writers: file name → function that writes that file at the path it is given.
        facts: what goes into the manifest beside sizes and hashes (JSON).
        keep: how many of the newest checkpoints, this one among them, stay.

    Raises:
        OSError: it could not be written (disk full, …); the unfinished folder is gone and nothing else was touched.
    """
    with atomic_folder(folder / f"step-{step:08d}") as unfinished:
        for name, write in writers.items():
            write(unfinished / name)
        files = {
            path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in sorted(unfinished.iterdir())
        }
        manifest = {"format": FORMAT, "step": step, "files": files, **facts}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for old in steps_in(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder / f"step-{step:08d}"


def check(path: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest and make sure that every file is there, of its size and content.

    Raises:
        CheckpointError: what is wrong with it. Nothing is changed on disk.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files, step, form = manifest["files"], manifest["step"], manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} has no {MANIFEST}: it is cut short or not a checkpoint") from None
    except (ValueError, KeyError, TypeError, NotADirectoryError) as error:
        raise CheckpointError(f"checkpoint {path}: its {MANIFEST} is damaged ({error})") from None
    if form != FORMAT:
        raise CheckpointError(f"checkpoint {path} is of format {form}, and this version reads format {FORMAT}")
    if step != step_of(path):
        raise CheckpointError(f"checkpoint {path} was renamed: its manifest says step {step}")
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is cut short: {name} is missing")
        if file.stat().st_size != facts["size"]:
            raise CheckpointError(
                f"checkpoint {path} is cut short: {name} has {file.stat().st_size} bytes of {facts['size']}"
            )
        if sha256(file) != facts["sha256"]:
            raise CheckpointError(f"checkpoint {path} is damaged: the content of {name} has changed")
    return dict(manifest)


def newest_good(folder: Path, before: int | None = None) -> Path | None:
    """The newest checkpoint in ``folder`` that passes :func:`check`, of a step below ``before``."""
    for path in reversed(steps_in(folder)):
        if before is None or step_of(path) < before:
            try:
                check(path)
            except CheckpointError:
                continue
            return path
    return None


def choose(folder: Path, which: str | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to continue from and its manifest: ``which`` by name or path, or the newest.

    Raises:
        CheckpointError: there is none, or the one chosen is bad; the good one before it is named.
    """
    if which is None:
        found = steps_in(folder)
        if not found:
            raise CheckpointError(f"there is no checkpoint in {folder} to resume from")
        path = found[-1]
    else:
        path = Path(which) if Path(which).is_dir() else folder / which
        if not path.is_dir():
            there = ", ".join(p.name for p in steps_in(folder)) or "none"
            raise CheckpointError(f"there is no checkpoint {which} in {folder} (there: {there})")
    try:
        return path, check(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n{offer(folder, path)}") from None


def offer(folder: Path, bad: Path) -> str:
    """The line that offers the good checkpoint before a bad one."""
    before = newest_good(folder, step_of(bad))
    if before is None:
        return "it was left as it is; there is no good checkpoint before it"
    return f"it was left as it is; the one before it is good: --resume {before.name}"
