"""GGUF bases: a checked, dequantised copy of a GGUF file in the cache folder, made once, an ordinary saved model.

transformers reads GGUF by writing every weight out in full. What it leaves to be done is done here: the memory is told
first, the file and the result are checked, what it reads wrongly or not at all is mended or refused, and the marks
that forbid saving are taken off.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.data.cache import cache_folder, lock, sweep, usable_folder
from undertow.data.files import sha256, sync
from undertow.retrofit.loading import check_causal, check_complete, first_line, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MANIFEST = "undertow_base.json"
FORMAT = 1  # of the copies: raised when the same file would be copied differently

# GGUF: what the file says


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says before its weights.

    Attributes:
        metadata: every key, arrays as lists.
        shapes: of every tensor, in torch's order.
    """

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata["general.architecture"])

    @property
    def values(self) -> int:
        """Weights in the file."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata of the architecture itself: ``get("context_length")`` for ``llama.context_length``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf_header(path: str | os.PathLike[str], name: str | None = None) -> GGUFHeader:
    """Read what stands before a GGUF file's weights and make sure that the weights are all there.

    Every length in the file is checked against its size, so that a damaged one costs no time and no memory.

    Raises:
        ValueError: not GGUF, a version that is not read here, damaged, or cut short.
        ImportError: the ``gguf`` package is not installed (it knows the sizes of the blocks).
    """
    sizes, name = _block_sizes(), name or os.fspath(path)
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{name} is not a GGUF file: it does not begin with GGUF")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(data, sizes).header()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as error:
            raise ValueError(f"{name}: the GGUF file is damaged or cut short ({first_line(error)})") from error
        except _GGUFError as error:
            raise ValueError(f"{name}: {error}") from error


def _block_sizes() -> dict[int, tuple[int, int]]:
    """Of every ggml type: values in a block, bytes of a block."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise ImportError(
            "reading a GGUF file needs the gguf package: pip install 'undertow[retrofit]', or pip install gguf"
        ) from error
    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}


class _GGUFError(Exception):
    """What is wrong with the file, without its name."""


class _Walk:
    """Reads a GGUF header field by field; ``struct.error`` where the file ends too early."""

    def __init__(self, data: mmap.mmap, sizes: dict[int, tuple[int, int]]) -> None:
        self.data, self.sizes, self.at = data, sizes, 4

    def header(self) -> GGUFHeader:
        (version,) = self.take("I")
        if version not in (2, 3):
            raise _GGUFError(f"this is GGUF version {version}, and versions 2 and 3 are read")
        tensors, keys = self.take("QQ")
        metadata = {}
        for _ in range(keys):
            key = self.string()
            (kind,) = self.take("I")
            metadata[key] = self.value(kind)
        if not isinstance(metadata.get("general.architecture"), str):
            raise _GGUFError("the GGUF file does not say what model it holds (general.architecture)")
        entries = [self.entry() for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment", 32)) or 32
        start = -(-self.at // alignment) * alignment
        shapes = {}
        for tensor, shape, kind, offset in entries:
            if kind not in self.sizes:
                raise _GGUFError(f"the tensor {tensor} is of ggml type {kind}, which the gguf package does not know")
            block, size = self.sizes[kind]
            end = start + offset + math.prod(shape) // block * size
            if end > len(self.data):
                raise _GGUFError(
                    f"the GGUF file is cut short: {tensor} should end at byte {end:,}, the file at {len(self.data):,}"
                )
            shapes[tensor] = shape
        return GGUFHeader(metadata, shapes)

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        if length > len(self.data) - self.at:
            raise struct.error(f"a text of {length:,} bytes at byte {self.at:,}")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        inner, count = self.take("IQ")
        if inner in _SCALARS:
            return list(self.take(f"{count}{_SCALARS[inner]}"))
        if count > len(self.data) - self.at:  # a value takes a byte at least
            raise struct.error(f"{count:,} values at byte {self.at:,}")
        return [self.value(inner) for _ in range(count)]

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, ggml type and offset of a tensor."""
        name = self.string()
        (dimensions,) = self.take("I")
        if dimensions > 4:
            raise struct.error(f"a tensor of {dimensions:,} dimensions at byte {self.at:,}")
        shape = self.take(f"{dimensions}Q")
        kind, offset = self.take("IQ")
        return name, tuple(reversed(shape)), kind, offset


# GGUF: the copy in the cache


def dequantised(path: Path, name: str, cache_dir: str | os.PathLike[str] | None, say: Callable[[str], object]) -> Path:
    """The folder with the dequantised copy of a GGUF file, made unless the cache has it.

    Several processes may ask at once: one makes it, the others wait.
    """
    import transformers

    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{name} is not a GGUF file: it does not begin with GGUF")
    size, digest = path.stat().st_size, sha256(path)
    key = hashlib.sha256(json.dumps([FORMAT, size, digest, transformers.__version__]).encode()).hexdigest()[:16]
    folder = usable_folder(cache_folder(cache_dir) / "bases")
    final = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', path.stem)[:80]}-{key}"
    with lock(folder / f".lock-{key}"):
        if final.exists() and not _is_whole(final):
            say(f"{final} is damaged: it is made anew")
            shutil.rmtree(final)
        if not final.exists():
            sweep(folder)
            _make_copy(path, name, {"size": size, "sha256": digest}, final, say)
        else:
            values = json.loads((final / MANIFEST).read_text(encoding="utf-8"))["parameters"]
            say(
                f"{name}: {_bytes(size)} on disk, {values:,} parameters, {_bytes(4 * values)} of memory in float32; "
                f"dequantised before, into {final}"
            )
    return final


def _make_copy(path: Path, name: str, source: dict[str, Any], final: Path, say: Callable[[str], object]) -> None:
    """Write the copy under a name of its own, sync it, and give it its final name when it is complete."""
    import transformers

    header = read_gguf_header(path, name)
    parts = header.metadata.get("split.count", 0)
    if parts > 1:
        raise ValueError(f"{name} is one of {parts} parts; join them first (llama.cpp: llama-gguf-split --merge)")
    needed = 4 * header.values
    say(
        f"{name}: {_bytes(source['size'])} on disk, {header.values:,} parameters, {_bytes(needed)} of memory once "
        f"dequantised to float32, up to {_bytes(2 * needed)} while that is done"
    )
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise OSError(
            f"the dequantised copy of {name} takes {_bytes(needed)}, and {final.parent} has {_bytes(free)} free; "
            "choose another folder with cache_dir or the environment variable UNDERTOW_CACHE"
        )
    say(f"dequantising it, this once, into {final}")
    unfinished = final.parent / f".tmp-{final.name}-{os.getpid()}-{secrets.token_hex(4)}"
    unfinished.mkdir()
    try:
        values = _convert(path, name, header, unfinished, say)
        files = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
        manifest = {
            "format": FORMAT,
            "source": {"file": path.name, **source},
            "transformers": transformers.__version__,
            "parameters": values,
            "files": files,
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for file in unfinished.iterdir():
            sync(file)
        sync(unfinished)
        try:
            unfinished.rename(final)
        except OSError:
            if not (final.exists() and _is_whole(final)):  # no locks on this file system, and another was quicker
                raise
        sync(final.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # gone already where all went well


def _is_whole(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest["format"] == FORMAT and all(
            (folder / file).stat().st_size == size for file, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _bytes(count: int) -> str:
    """``98.8 MB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


# GGUF: the conversion


def _convert(path: Path, name: str, header: GGUFHeader, folder: Path, say: Callable[[str], object]) -> int:
    """Write model and tokenizer of a GGUF file into a folder; the number of parameters."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as alone, quiet():
        # Seen by itself: transformers would also read a config.json or tokenizer.json that lies beside it.
        place: dict[str, Any] = {"pretrained_model_name_or_path": alone, "gguf_file": "model.gguf"}
        try:
            os.symlink(path.resolve(), Path(alone, "model.gguf"))
        except OSError:  # a system without symbolic links
            place |= {"pretrained_model_name_or_path": str(path.resolve().parent), "gguf_file": path.name}
        place["local_files_only"] = True
        try:
            config = AutoConfig.from_pretrained(**place)
        except Exception as error:  # of many kinds: what is missing in the file, or unknown to transformers
            raise ValueError(
                f"{name}: transformers {transformers.__version__} does not read {header.architecture!r} from GGUF "
                f"({first_line(error)})"
            ) from error
        _mend_config(config, header, path, name)
        skeleton = check_causal(config, name)
        _check_nothing_left_out(header, skeleton, name)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **place, config=config, dtype=torch.float32, output_loading_info=True, **_written_out()
            )
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"{name}: transformers {transformers.__version__} does not load this GGUF file ({first_line(error)})"
            ) from error
        model, found = loaded
        check_complete(found, name)
        _check_values(model, name)
        drop_quantisation_marks(model)
        if "tokenizer.ggml.tokens" in header.metadata:
            _save_tokenizer(place, header, name, folder, say)
        else:
            say(f"{name}: there is no tokenizer in this file; give one beside it")
        model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _written_out() -> dict[str, Any]:
    """Where transformers can keep GGUF's blocks packed, ask it not to: such weights cannot be trained or saved."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def drop_quantisation_marks(model: PreTrainedModel) -> None:
    """Take from a dequantised model what makes transformers refuse to save, move or train it.

    Raises:
        ValueError: weights that are packed still.
    """
    if packed := [key for key, value in model.named_parameters() if not value.is_floating_point()]:
        raise ValueError(f"this model is quantised still: {packed[0]} holds packed blocks")
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(mark, None)
    for config in (model.config, model.config.get_text_config()):
        for mark in ("quantization_config", "_pre_quantization_dtype"):
            config.__dict__.pop(mark, None)


def _mend_config(config: PreTrainedConfig, header: GGUFHeader, path: Path, name: str) -> None:
    """Set what the file says and transformers does not take from it."""
    config.__dict__.pop("_model_name_or_path", None)
    if embedding := header.shapes.get("token_embd.weight"):
        config.vocab_size = embedding[0]
    if header.architecture == "gpt2":  # its length goes to n_ctx, which nothing reads, its inner width nowhere
        config.n_positions = header.get("context_length", config.n_positions)
        config.n_inner = header.get("feed_forward_length")
    if header.architecture != "gpt-oss":
        _mend_rotary(config, header, path, name)


def _mend_rotary(config: PreTrainedConfig, header: GGUFHeader, path: Path, name: str) -> None:
    """Rotary positions that are stretched: transformers leaves that out without a word.

    Llama 3.1's stretching stands in the file as one divisor a frequency, from which its rule is found again and
    checked; a common divisor is told in the metadata. Others are refused.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, factor = header.get("rope.scaling.type", "none"), header.get("rope.scaling.factor", 1.0)
    if "rope.scaling.type" not in header.metadata and header.get("rope.scale_linear"):
        kind, factor = "linear", header.get("rope.scale_linear")
    stretched = next((tensor for tensor in header.shapes if tensor.startswith("rope_factors_")), None)
    if kind not in ("none", "linear") or stretched:
        raise ValueError(
            f"{name}: its rotary positions are stretched ({stretched or kind}), which transformers does not read from "
            "GGUF; take this base from its original folder or the hub"
        )
    if kind == "linear" and factor != 1.0:
        config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": float(factor)}
    if "rope_freqs.weight" not in header.shapes:
        return
    from gguf import GGUFReader

    stored = next(tensor.data for tensor in GGUFReader(path).tensors if tensor.name == "rope_freqs.weight")
    divisors = torch.tensor(stored, dtype=torch.float32).flatten()
    plain = ROPE_INIT_FUNCTIONS["linear"](_with_rotary(config, rope_type="linear", factor=1.0), None)[0]
    mended = _with_rotary(
        config,
        rope_type="llama3",
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    found = ROPE_INIT_FUNCTIONS["llama3"](mended, None)[0]
    if found.shape != divisors.shape or not torch.allclose(found * divisors, plain, rtol=1e-3):
        raise ValueError(
            f"{name}: its rotary positions are stretched (rope_freqs.weight) by another rule than Llama 3's, which "
            "transformers does not read from GGUF; take this base from its original folder or the hub"
        )
    config.rope_parameters = mended.rope_parameters


def _with_rotary(config: PreTrainedConfig, **rotary: Any) -> PreTrainedConfig:
    changed = copy.deepcopy(config)
    changed.rope_parameters = {**changed.rope_parameters, **rotary}
    return changed


def _check_nothing_left_out(header: GGUFHeader, skeleton: PreTrainedModel, name: str) -> None:
    """Refuse a file that holds more than the model it is loaded into: transformers drops the rest without a word."""
    if header.get("nextn_predict_layers"):  # extra layers that guess ahead, which transformers has no use for
        return
    left_out = {"rope_freqs.weight"}  # became part of the configuration
    if skeleton.config.get_text_config().tie_word_embeddings:
        left_out.add("output.weight")  # the embedding once more
    inside = sum(math.prod(shape) for tensor, shape in header.shapes.items() if tensor not in left_out)
    wanted = sum(parameter.numel() for parameter in skeleton.parameters())
    if inside > wanted:
        raise ValueError(
            f"{name}: the file holds {inside:,} weights and a {type(skeleton).__name__} of its configuration has "
            f"{wanted:,}: transformers would leave the others out, and the model would not be the same"
        )


def _check_values(model: PreTrainedModel, name: str) -> None:
    """Refuse what cannot be a trained model's weights: a download that stopped leaves zeros behind."""
    for key, value in model.named_parameters():
        if not value.isfinite().all():
            raise ValueError(f"{name}: the GGUF file is damaged: {key} holds values that are not finite")
        if value.ndim > 1 and not value.any():
            raise ValueError(f"{name}: the GGUF file is damaged, or its download stopped: {key} holds only zeros")


# llama.cpp's names for ways to cut text into words before pairs are merged, of those that transformers does not tell
# apart from GPT-2's. The first cut every digit off beforehand.
_DIGITS_FIRST = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
_LIKE_GPT2 = {"a.x-4.0", "gigachat", "gpt-2", "granite-docling", "jais", "mellum", "mpt", "olmo", "phi-2", "trillion"}


def _save_tokenizer(
    place: dict[str, Any], header: GGUFHeader, name: str, folder: Path, say: Callable[[str], object]
) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except Exception as error:
        say(f"{name}: its tokenizer cannot be read from GGUF ({first_line(error)}); give one beside it")
        return
    _mend_tokenizer(tokenizer, header, name, say)
    tokenizer.save_pretrained(folder)


def _mend_tokenizer(tokenizer: Any, header: GGUFHeader, name: str, say: Callable[[str], object]) -> None:
    """Cut text into words as the model's vocabulary was trained to.

    transformers cuts like GPT-2 where it does not know the way that the file names, also where that gives other ids:
    SmolLM2 reads ``"  7"`` as two tokens, two spaces and a digit; cut like GPT-2's text they would be three.
    """
    from tokenizers import pre_tokenizers

    way = header.metadata.get("tokenizer.ggml.pre")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or way is None:
        return
    if way in _DIGITS_FIRST:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif way not in _LIKE_GPT2 and type(tokenizer.backend_tokenizer.pre_tokenizer).__name__ == "ByteLevel":
        say(
            f"{name}: its tokenizer cuts text in a way that is not known here ({way}), and is taken to cut like "
            "GPT-2's: token ids may differ from those that the model was trained on"
        )
