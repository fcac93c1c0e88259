"""The built-in corpus: there on any Python, documents are modules, parts by name alone."""

import hashlib
import sys
from pathlib import Path

import pytest

from undertow.data import DataConfig, read_documents, split_documents, stdlib_documents, stdlib_split


@pytest.fixture(scope="module")
def documents():
    return stdlib_documents()


def test_it_is_the_running_pythons_library(documents):
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert len(names) == len(set(names)) > 400
    assert {"os", "asyncio", "asyncio.tasks", "json.decoder", "typing", "unittest.mock"} <= set(names)
    by_name = {document.name: document for document in documents}
    import asyncio
    import typing

    assert by_name["typing"].data == Path(typing.__file__).read_bytes()
    assert by_name["asyncio"].data == Path(asyncio.__file__).read_bytes()
    size = sum(document.length() for document in documents)
    assert 8e6 < size < 20e6
    assert size == sum(len(document.data) for document in documents)


def test_tests_packages_and_generated_files_are_left_out(documents):
    for document in documents:
        parts = document.name.split(".")
        assert not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(parts), document.name
        assert "site-packages" not in document.path
        assert not parts[0].startswith("_sysconfigdata")
    assert "pydoc_data.topics" not in {document.name for document in documents}


def test_a_modules_part_follows_from_its_name_alone():
    # Written down, so that no change of ours moves a module between parts unseen.
    assert {name: stdlib_split(name) for name in ("os", "asyncio", "typing", "enum", "doctest", "http.client")} == {
        "os": "train",
        "asyncio": "train",
        "typing": "test",
        "enum": "test",
        "doctest": "valid",
        "http.client": "valid",
    }
    u = int(hashlib.sha256(b"typing").hexdigest()[:16], 16) / 2**64
    assert stdlib_split("typing", 0.0, 1.0001 - u) == "test"
    assert stdlib_split("typing", 0.0, 0.9999 - u) == "train"
    assert stdlib_split("typing", 1.0, 0.9999 - u) == "valid"


def test_parts_are_about_90_5_5(documents):
    parts = [stdlib_split(document.name) for document in documents]
    assert 0.85 < parts.count("train") / len(parts) < 0.94
    assert 0.03 < parts.count("valid") / len(parts) < 0.08
    assert 0.03 < parts.count("test") / len(parts) < 0.08


def test_it_is_a_source_by_name(documents):
    assert [d.name for d in read_documents("stdlib")] == [d.name for d in documents]
    splits = split_documents(DataConfig(data=["stdlib"]))
    assert {d.name for d in splits.test} == {d.name for d in documents if stdlib_split(d.name) == "test"}
    assert len(splits.train) + len(splits.valid) + len(splits.test) == len(documents)
    assert not split_documents(DataConfig(data=["stdlib"], test_fraction=0)).test


def test_it_cannot_be_mixed(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"stdlib .* cannot be mixed"):
        split_documents(DataConfig(data=["stdlib", str(tmp_path / "a")]))


def test_rules_on_a_made_up_library(tmp_path):
    for name in (
        "os.py",
        "pkg/__init__.py",
        "pkg/sub/mod.py",
        "pkg/test/test_mod.py",
        "test/support.py",
        "site-packages/torch.py",
        "dist-packages/apt.py",
        "__pycache__/os.py",
        "_sysconfigdata__linux.py",
        "config-3.11-x86/python-config.py",
        "sitecustomize.py",
        "pydoc_data/topics.py",
        "data.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert [d.name for d in stdlib_documents(tmp_path)] == ["os", "pkg", "pkg.sub.mod"]


def test_a_python_without_source_is_told(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"standard library is not in .*; name a text of your own"):
        stdlib_documents(tmp_path / "lib")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": f"{tmp_path}/python{sys.version_info[1]}.zip"})
    with pytest.raises(FileNotFoundError, match="zip"):
        read_documents("stdlib")
