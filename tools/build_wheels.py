"""Build the source distribution, and from it a wheel for each kind of Python found: what `make wheels` runs.

    python tools/build_wheels.py [--to dist] [PYTHON ...]

The Python that runs this needs what the extra `wheels` names (pyproject.toml); for others an environment with the same
versions is made under build/.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Where pyenv and uv keep Pythons that they do not put on the PATH.
KEPT = ["~/.pyenv/versions/*/bin/python3", "~/.local/share/uv/python/*/bin/python3"]
BUILD_TOOLS = ["scikit-build-core", "nanobind", "cmake", "ninja"]
LOOK = (
    "import os, sys, sysconfig; print(*sys.version_info[:2], sys.implementation.name,"
    " os.path.exists(sysconfig.get_path('include') + '/Python.h'), sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python that a wheel can be built with."""

    command: str
    version: tuple[int, int]

    @property
    def tag(self) -> str:
        """The wheel's: 3.12 and newer share one."""
        return "cp312-abi3" if self.version >= (3, 12) else f"cp3{self.version[1]}"


def look(name: str) -> Interpreter | str:
    """The interpreter of that name, or why it cannot be used."""
    command = shutil.which(name)
    if command is None:
        return "not found"
    shown = subprocess.run([command, "-c", LOOK], capture_output=True, text=True)
    if shown.returncode:
        return "does not run"
    major, minor, kind, headers, free_threaded = shown.stdout.split()
    version = int(major), int(minor)
    if kind != "cpython" or free_threaded != "0" or version < (3, 10):
        return "not a CPython 3.10 or newer with its lock (GIL)"
    if version == sys.version_info[:2]:
        command = sys.executable  # has the tools already
    return Interpreter(command, version) if headers == "True" else "has no headers (Debian: python3-dev)"


def choose(names: list[str]) -> dict[str, Interpreter]:
    """The first of these interpreters for each wheel; without names, of those on this machine."""
    asked = bool(names)
    if not asked:
        names = ["python3", *(f"python3.{minor}" for minor in range(10, 20))]
        names += sorted(path for pattern in KEPT for path in glob.glob(os.path.expanduser(pattern)))
    chosen: dict[str, Interpreter] = {}
    for name in names:
        found = look(name)
        if isinstance(found, Interpreter):
            chosen.setdefault(found.tag, found)
        elif asked:
            sys.exit(f"{name}: {found}")
    return chosen


def run(*command: str | Path, **env: str) -> None:
    """Run it with what was installed beside this Python in reach; show its output only if it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    shown = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "PATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if shown.returncode:
        sys.exit(f"{shown.stdout}\n{' '.join(map(str, command))}\nfailed: see above")


def with_tools(python: Interpreter) -> str:
    """The interpreter, or one in an environment made for it, that has the build tools."""
    if python.command == sys.executable:
        return python.command
    home = ROOT / "build" / f"python{python.version[0]}.{python.version[1]}"
    there = str(home / ("Scripts" if os.name == "nt" else "bin") / "python")
    run(python.command, "-m", "venv", "--clear", home)
    run(there, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", *BUILD_TOOLS)
    return there


def build_sdist(to: Path) -> Path:
    """The source distribution."""
    with tempfile.TemporaryDirectory() as made:
        run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", made, ".")
        return moved(Path(made), to)


def build_wheel(python: str, sdist: Path, to: Path) -> Path:
    """A wheel of `sdist` for that Python, repaired: checked, and named after the oldest systems that it runs on."""
    with tempfile.TemporaryDirectory() as made:
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", made]
        run(python, "-m", "pip", "wheel", *options, sdist, UNDERTOW_REQUIRE_COMPILED="1")
        if sys.platform != "linux":
            return moved(Path(made), to)
        repaired = Path(made, "repaired")
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", repaired, *Path(made).glob("*.whl"))
        return moved(repaired, to)


def moved(folder: Path, to: Path) -> Path:
    """The one file in `folder`, now in `to`."""
    (file,) = (path for path in folder.iterdir() if path.is_file())
    to.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(file, to / file.name))


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description="Build undertow's source distribution and wheels.")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder for what is built (default: dist)")
    parser.add_argument(
        "pythons", nargs="*", metavar="PYTHON", help="names or paths (default: those on the PATH, and of pyenv and uv)"
    )
    arguments = parser.parse_args()
    chosen = choose(arguments.pythons)
    if not chosen:
        sys.exit("no CPython 3.10 or newer with its headers was found, so no wheel can be built")
    sdist = build_sdist(arguments.to)
    print(sdist.name)
    for python in chosen.values():
        print(build_wheel(with_tools(python), sdist, arguments.to).name, flush=True)
    for tag, version in {"cp310": "3.10", "cp311": "3.11", "cp312-abi3": "3.12 or newer"}.items():
        if tag not in chosen:
            print(f"no {tag} wheel: Python {version} was not found, with its headers")


if __name__ == "__main__":
    main()
