"""Documents: bytes as they are, from wherever a person keeps them, and a clear word where they cannot be had."""

import bz2
import gzip
import io
import lzma
import os
import sys
import zipfile

import pytest

from undertow.data import Document, read_documents

TEXT = "\ufeffNaïve\r\ncafé\n\x1a\tend\r".encode()  # BOM, all kinds of line ends, Ctrl-Z: nothing may be touched


def named(documents):
    return {document.name: document.data for document in documents}


def test_bytes_are_kept_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (document,) = read_documents(tmp_path / "a.txt")
    assert document.data == TEXT
    assert document.name == "a.txt"
    assert document.length() == len(TEXT)


def test_bytes_that_are_no_text_are_kept_where_the_file_is_named(tmp_path):
    (tmp_path / "raw").write_bytes(bytes(range(256)) * 3)
    (document,) = read_documents(str(tmp_path / "raw"))
    assert document.data == bytes(range(256)) * 3


@pytest.mark.parametrize("size", [1, 2, 5, 1 << 20])
def test_blocks_are_the_data_and_can_be_read_again(tmp_path, size):
    (tmp_path / "a").write_bytes(TEXT)
    for document in [*read_documents(tmp_path / "a"), Document("b", TEXT)]:
        for _ in range(2):
            blocks = list(document.blocks(size))
            assert b"".join(blocks) == TEXT
            assert all(0 < len(block) <= size for block in blocks)


COMPRESS = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress}


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("name", ["text.gz", "text.txt"])
def test_compression_is_known_by_content_not_by_name(tmp_path, kind, name):
    (tmp_path / name).write_bytes(COMPRESS[kind](TEXT * 1000))
    (document,) = read_documents(tmp_path / name)
    assert document.data == TEXT * 1000
    assert document.length() == len(TEXT) * 1000
    assert document.part(3, 1003).data == (TEXT * 1000)[3:1003]


def test_plain_text_with_a_compressed_name_is_plain(tmp_path):
    (tmp_path / "text.gz").write_bytes(TEXT)
    assert read_documents(tmp_path / "text.gz")[0].data == TEXT


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_compressed_file_cut_short_is_named(tmp_path, kind):
    whole = COMPRESS[kind](os.urandom(50_000))
    (tmp_path / "t").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"t: the compressed file is damaged or cut short"):
        read_documents(tmp_path / "t")[0].data  # noqa: B018


def test_gzip_with_a_wrong_checksum_is_named(tmp_path):
    whole = bytearray(gzip.compress(TEXT * 100))
    whole[-8] ^= 1
    (tmp_path / "t.gz").write_bytes(whole)
    with pytest.raises(ValueError, match=r"t\.gz: the compressed file is damaged"):
        read_documents(tmp_path / "t.gz")[0].data  # noqa: B018


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_zip_gives_a_document_for_each_text(tmp_path):
    members = {"b/two.txt": b"2" * 5000, "a.txt": TEXT, "empty.txt": b"", ".hidden": b"x", "image": b"\x00\x01"}
    make_zip(tmp_path / "all.zip", members)
    documents = read_documents(tmp_path / "all.zip")
    assert named(documents) == {"all.zip/a.txt": TEXT, "all.zip/b/two.txt": b"2" * 5000}
    assert [document.length() for document in documents] == [len(TEXT), 5000]
    # Members are read independently of one another, also at the same time.
    first, second = (document.blocks(100) for document in documents)
    assert next(second) == b"2" * 100
    assert next(first) == TEXT[:100]
    assert next(second) == b"2" * 100
    assert documents[1].part(4990, 5000).data == b"2" * 10


def test_zip_without_text_damaged_or_encrypted(tmp_path):
    make_zip(tmp_path / "none.zip", {"image": b"\x00\x01"})
    with pytest.raises(ValueError, match="no text in this archive"):
        read_documents(tmp_path / "none.zip")
    make_zip(tmp_path / "some.zip", {"a.txt": TEXT})
    whole = (tmp_path / "some.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:-30])
    with pytest.raises(ValueError, match=r"cut\.zip: the zip archive is damaged"):
        read_documents(tmp_path / "cut.zip")
    locked = bytearray(whole)
    locked[whole.rindex(b"PK\x01\x02") + 8] |= 1  # the flag of encryption in the central directory
    (tmp_path / "locked.zip").write_bytes(locked)
    with pytest.raises(ValueError, match=r"locked\.zip: a\.txt is encrypted"):
        read_documents(tmp_path / "locked.zip")


def test_zstandard_is_refused_by_name(tmp_path):
    (tmp_path / "t.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(ValueError, match="zstandard compression is not read; decompress"):
        read_documents(tmp_path / "t.zst")


def test_folder_is_read_recursively_sorted_text_only(tmp_path):
    for name, data in {
        "b.txt": b"b",
        "a/z.md": b"z",
        "a/a.py": b"a",
        "a.txt": b"plain",
        "empty.txt": b"",
        "picture.png": b"\x89PNG\x00\x00",
        ".git/config": b"hidden",
        ".env": b"hidden",
        "latin.txt": b"caf\xe9",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "more.txt.gz").write_bytes(gzip.compress(b"more"))
    (tmp_path / "binary.gz").write_bytes(gzip.compress(b"\x00\x00"))
    make_zip(tmp_path / "zipped.zip", {"in.txt": b"in"})
    documents = read_documents(tmp_path)
    assert [document.name for document in documents] == [
        "a/a.py",
        "a/z.md",
        "a.txt",
        "b.txt",
        "latin.txt",
        "more.txt.gz",
        "zipped.zip/in.txt",
    ]
    assert named(documents)["more.txt.gz"] == b"more"


def test_folder_with_links_in_a_loop(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"a")
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "sub" / "self").symlink_to(tmp_path / "sub")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "again.txt").symlink_to(tmp_path / "sub" / "a.txt")
    (document,) = read_documents(tmp_path)
    assert document.data == b"a"


def test_a_linked_folder_elsewhere_is_read(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_bytes(b"a")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    assert named(read_documents(tmp_path / "here")) == {"link/a.txt": b"a"}


def test_globs(tmp_path):
    for name in ("one.txt", "two.txt", "three.md", "sub/four.txt", "sub/deep/five.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "empty.txt").write_bytes(b"")
    names = [d.name for d in read_documents([f"{tmp_path}/*.txt", f"{tmp_path}/*.md"])]
    assert names == ["one.txt", "two.txt", "three.md"]
    names = [d.name for d in read_documents(f"{tmp_path}/**/*.txt")]
    assert names == ["one.txt", "sub/deep/five.txt", "sub/four.txt", "two.txt"]
    # What several sources name is read once.
    assert len(read_documents([f"{tmp_path}/*.txt", f"{tmp_path}/one.txt", tmp_path])) == 5
    # A glob that matches folders reads those.
    assert [d.data for d in read_documents(f"{tmp_path}/s*")] == [b"sub/deep/five.txt", b"sub/four.txt"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "a[1].txt").write_bytes(b"x")
    assert read_documents(tmp_path / "a[1].txt")[0].data == b"x"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"x")
    assert read_documents("~/a.txt")[0].data == b"x"


def test_standard_input(tmp_path, monkeypatch):
    for data in (TEXT, gzip.compress(TEXT)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        (document,) = read_documents("-", spool=tmp_path / "spool")
        assert document.data == TEXT
        assert document.data == TEXT, "it can be read again"
        assert document.name == "-"
        assert len(list((tmp_path / "spool").iterdir())) == 1
        del document
        assert not list((tmp_path / "spool").iterdir()), "the copy goes with the document"


def test_standard_input_that_is_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ValueError, match="standard input: there was nothing to read"):
        read_documents("-", spool=tmp_path)


def test_standard_input_is_not_shared_by_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="standard input cannot be shared"):
        read_documents("-")


def test_a_pipe_by_name(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, TEXT)
    os.close(writing)
    (document,) = read_documents(f"/dev/fd/{reading}", spool=tmp_path)
    os.close(reading)
    assert document.data == TEXT == document.data


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("missing.txt", FileNotFoundError, "there is no file or folder '.*missing.txt'"),
        ("missing/*.txt", FileNotFoundError, "no file matches '.*missing/\\*.txt'"),
        ("empty.txt", ValueError, "empty.txt: the file is empty"),
        ("folder", ValueError, "folder: no text in this folder \\(2 files looked at\\)"),
        ("empty.txt/x", NotADirectoryError, "empty.txt/x"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, source, error, message):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.txt").write_bytes(b"")
    (tmp_path / "folder" / "picture").write_bytes(b"\x00")
    with pytest.raises(error, match=message) as caught:
        read_documents(str(tmp_path / source))
    assert "\n" not in str(caught.value)


def test_no_source_at_all():
    with pytest.raises(ValueError, match="no text was given"):
        read_documents([])


def test_a_link_to_itself(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="loop"):
        read_documents(tmp_path / "loop")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(tmp_path):
    (tmp_path / "secret.txt").write_bytes(b"x")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(PermissionError, match=r"secret\.txt"):
        read_documents(tmp_path / "secret.txt")
    with pytest.raises(PermissionError, match=r"secret\.txt"):
        read_documents(tmp_path)


def test_unreadable_is_not_passed_over(tmp_path, monkeypatch):
    """The same where tests run as root: the system's refusal is played."""
    (tmp_path / "a.txt").write_bytes(b"x")
    (tmp_path / "secret.txt").write_bytes(b"x")
    real = open

    def refuse(path, *args, **kwargs):
        if str(path).endswith("secret.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError, match=r"secret\.txt"):
        read_documents(tmp_path)


def test_a_read_that_fails_halfway_names_the_file():
    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match=r"Input/output error: '/mnt/disk/a'"):
        Document("a", Broken, path="/mnt/disk/a").data  # noqa: B018
