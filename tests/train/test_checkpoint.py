"""Folders that are whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from undertow.data import files
from undertow.train import CheckpointError, checkpoint


def fill(folder: Path, step: int, content: bytes = b"weights", keep: int = 10) -> Path:
    """A checkpoint with one file."""
    return checkpoint.save(folder, step, {"w.bin": lambda path: path.write_bytes(content)}, {"run": {}}, keep)


def test_written_read_and_pruned(tmp_path: Path) -> None:
    for step in (5, 90, 100, 20):
        fill(tmp_path, step)
    assert [checkpoint.step_of(path) for path in checkpoint.steps_in(tmp_path)] == [5, 20, 90, 100]
    path, manifest = checkpoint.choose(tmp_path, None)
    assert (path.name, manifest["step"]) == ("step-00000100", 100)
    assert checkpoint.choose(tmp_path, "step-00000020")[1]["step"] == 20
    assert checkpoint.choose(tmp_path, str(tmp_path / "step-00000005"))[1]["step"] == 5
    fill(tmp_path, 110, keep=2)
    assert [checkpoint.step_of(path) for path in checkpoint.steps_in(tmp_path)] == [100, 110]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path, 1, b"first")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"could not write .*step-00000001: No space left on device"):
        checkpoint.save(tmp_path, 1, {"w.bin": fail}, {}, 3)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(tmp_path, 2, {"w.bin": fail}, {}, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert (tmp_path / "step-00000001" / "w.bin").read_bytes() == b"first"

    def stumble() -> None:
        with files.atomic_folder(tmp_path / "best") as folder:
            (folder / "x").write_text("")
            raise KeyError("not about files")

    with pytest.raises(KeyError):
        stumble()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("moment", ["first rename", "second rename", "removal"])
def test_a_kill_while_a_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Old or new, whole, whenever the kill comes."""

    class Kill(BaseException):
        pass

    def write(content: str) -> None:
        with files.atomic_folder(tmp_path / "best") as folder:
            (folder / "x").write_text(content)

    write("old")
    rename, calls = Path.rename, 0

    def dying(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == {"first rename": 1, "second rename": 2}.get(moment):
            raise Kill
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    if moment == "removal":
        monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(Kill()))
    with pytest.raises(Kill):
        write("new")
    monkeypatch.undo()
    files.recover(tmp_path)
    assert (tmp_path / "best" / "x").read_text() == ("new" if moment == "removal" else "old")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_unfinished_folders_are_not_checkpoints(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / ".unfinished-step-00000002").mkdir()
    (tmp_path / ".unfinished-step-00000002" / "w.bin").write_bytes(b"half")
    assert checkpoint.choose(tmp_path, None)[1]["step"] == 1
    fill(tmp_path, 2)
    assert checkpoint.choose(tmp_path, None)[1]["step"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.choose(tmp_path, None)
    path = fill(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint step-7 in .* \(there: step-00000001\)"):
        checkpoint.choose(tmp_path, "step-7")
    (path / "w.bin").write_bytes(b"weigh")
    with pytest.raises(CheckpointError, match=r"w.bin has 5 bytes of 7\n.*no good checkpoint before it"):
        checkpoint.choose(tmp_path, None)
    (path / "w.bin").write_bytes(b"weighty")
    with pytest.raises(CheckpointError, match=r"content of w\.bin has changed"):
        checkpoint.choose(tmp_path, None)
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        checkpoint.choose(tmp_path, None)
    fill(tmp_path, 2).rename(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match="was renamed"):
        checkpoint.choose(tmp_path, None)
