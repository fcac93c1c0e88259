"""Adapters on disk: what differs from the base, and which base that is."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .anatomy import check_base, plain_base, text_config
from .config import RecurrenceConfig

if TYPE_CHECKING:
    from .modeling import RecurrentForCausalLM

WEIGHTS = "model.safetensors"
_SAMPLES = 16
# Settings that say how a base was loaded or is used, not what it is.
_PASSING = frozenset((
    "_name_or_path", "architectures", "attn_implementation", "dtype", "torch_dtype", "transformers_version",
    "bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states", "return_dict",
    "quantization_config", "use_cache",
))  # fmt: skip


def describe(base: Any, name: str | None = None) -> dict[str, Any]:
    """Which base an adapter belongs to: its name, its kind, and fingerprints of configuration and weights."""
    known = name or getattr(base, "name_or_path", "") or getattr(base.config, "_name_or_path", "") or None
    if known is not None and ":" not in known:  # as transformers was given it: a folder, or a name of the hub
        known = str(Path(known).resolve()) if Path(known).exists() else f"hub:{known}"
    return {"name": known, "architecture": type(base).__name__, "fingerprint": fingerprint(base)}


def fingerprint(base: nn.Module) -> str:
    """Of a base's settings and weights, whatever their dtype; adapters (LoRA) on it do not count.

    Takes 16 values of each weight, in bfloat16: a base loaded in another precision is still the same, another model or
    a fine-tuned one is not; a change of a few single weights may go unseen.
    """
    settings = {k: v for k, v in text_config(base).to_diff_dict().items() if k not in _PASSING}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(_own_weights(base).items()):
        flat = tensor.detach().flatten()
        count = min(_SAMPLES, len(flat))
        index = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(1, count - 1)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(flat[index].to("cpu", torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _own_weights(base: nn.Module) -> dict[str, Tensor]:
    """The base's parameters by the names they had before PEFT."""
    return {
        name.replace(".base_layer", ""): p
        for name, p in base.named_parameters()
        if ".lora_" not in name
    }  # fmt: skip


def lora_settings(model: Any) -> dict[str, Any] | None:
    """Settings of the LoRA adapter that is on a model, ready for JSON.

    Raises:
        ValueError: several adapters, or one of another kind than LoRA.
    """
    if not hasattr(model, "peft_config"):
        return None
    configs = model.peft_config
    if len(configs) != 1:
        raise ValueError(f"a base with {len(configs)} PEFT adapters; a recurrence goes with one")
    (settings,) = (config.to_dict() for config in configs.values())
    if str(getattr(settings["peft_type"], "value", settings["peft_type"])) != "LORA":
        raise ValueError(f"PEFT adapters of kind {settings['peft_type']} are not supported, LoRA is")
    plain = json.dumps(settings, default=lambda x: sorted(x) if isinstance(x, set) else getattr(x, "value", str(x)))
    return dict(json.loads(plain))


def _parameters(model: RecurrentForCausalLM) -> dict[str, Tensor]:
    """All parameters, by names that do not depend on how LoRA was put on the base."""
    return {name.replace("base.base_model.model.", "base."): p for name, p in model.named_parameters()}


def trained_state(model: RecurrentForCausalLM) -> dict[str, Tensor]:
    """What differs from the base: the module, LoRA weights, and weights of the base that train."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, p in _parameters(model).items():
        if (name.startswith("recurrence.") or ".lora_" in name or p.requires_grad) and id(p) not in seen:
            tensors[name] = p
            seen.add(id(p))
    return tensors


def save(model: RecurrentForCausalLM, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write `config.json` and `model.safetensors` into a folder.

    Args:
        model: what to save.
        folder: made if missing.
        state_dict: where the weights are to be taken from, as distributed training gathers them.
    """
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file, and an adapter wants a folder")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = trained_state(model)
    if state_dict is not None:
        gathered = {name.replace("base.base_model.model.", "base."): p for name, p in state_dict.items()}
        wanted = {name: gathered.get(name, p) for name, p in wanted.items()}
    model.config.lora = lora_settings(model.base)
    if model.config.lora is None and any(".lora_" in name for name in wanted):
        raise ValueError("the base has LoRA weights but not their settings: put them on with peft.get_peft_model")
    tensors = {name: p.detach().to("cpu").contiguous() for name, p in wanted.items()}
    # Everything is written before anything is replaced, so that a full disk leaves an adapter that was there whole.
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            save_file(tensors, Path(unfinished) / WEIGHTS, {"format": "pt"})
            model.config.save_pretrained(unfinished)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(unfinished)
            for path in sorted(Path(unfinished).iterdir(), reverse=True):
                path.replace(folder / path.name)
    except SafetensorError as error:
        raise OSError(f"could not write {folder / WEIGHTS}: {error}") from error


def read_config(folder: str | Path) -> Any:
    """The configuration of an adapter.

    Raises:
        FileNotFoundError: no adapter there.
        ValueError: a configuration of something else, or damaged.
    """
    from .modeling import RecurrentConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no adapter: there is no config.json")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(settings, dict) or settings.get("model_type") != RecurrentConfig.model_type:
        raise ValueError(f"{folder} holds no recurrent model: its config.json does not say so")
    for name, kinds in (("recurrence", dict), ("base", dict), ("lora", dict | None)):
        if not isinstance(settings.get(name), kinds):
            raise ValueError(f"{path} is damaged: its {name} is {settings.get(name)!r}")
    try:
        RecurrenceConfig.from_dict(settings["recurrence"])
        return RecurrentConfig.from_dict(settings)
    except Exception as error:  # transformers has errors of its own kinds
        raise ValueError(f"{path} is damaged: {error}") from error


def load_recurrent(
    folder: str | Path, base: Any = None, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> RecurrentForCausalLM:
    """Load an adapter that `save_pretrained` wrote.

    Args:
        folder: the adapter.
        base: the model it belongs to, or where that is; None: the recorded name. A model is used as it is, not copied.
        device: where to put it.
        dtype: of a base that is loaded here; by default float32.

    Raises:
        FileNotFoundError: no adapter, or no base there.
        ValueError: damaged files; another base than the adapter was made for, with what differs.
    """
    from .modeling import add_recurrence

    folder = Path(folder)
    config = read_config(folder)
    weights = _weights(folder / WEIGHTS)
    settings = RecurrenceConfig.from_dict(config.recurrence)
    name = os.fspath(base) if isinstance(base, str | os.PathLike) else config.base.get("name")
    if base is None or isinstance(base, str | os.PathLike):
        if not name:
            raise ValueError(f"{folder}: its base has no name to load it by; give the base")
        from .base import load_base

        base = load_base(name, dtype=dtype or torch.float32)
        base = base[0] if isinstance(base, tuple) else base
    check_base(base)
    check_base_of(folder, config, base)
    lora = config.lora is not None and not hasattr(base, "peft_config")
    if lora:
        base = add_lora(base, config.lora)
    try:
        model = add_recurrence(base, settings, base_name=config.base.get("name"))
        load_weights(model, weights, str(folder))
    except BaseException:
        if lora:
            base.unload()  # the base as it was given
        raise
    model.eval()
    if device is not None:
        torch.nn.Module.to(model, device)
    return model


def add_lora(base: Any, settings: dict[str, Any]) -> Any:
    """Put a LoRA adapter on a base, by the settings that `lora_settings` gave.

    Raises:
        ModuleNotFoundError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a LoRA adapter needs peft: pip install 'undertow[retrofit]'") from error
    with warnings.catch_warnings():  # peft asks transformers for something by its old name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        # Its base may have moved since, of which peft would warn; whether it is the same is checked by its weights.
        return get_peft_model(base, LoraConfig.from_peft_type(**settings | {"base_model_name_or_path": None}))


def check_base_of(folder: Path, config: Any, base: Any) -> None:
    """Whether a base is the one that an adapter was made for.

    Raises:
        ValueError: what differs.
    """
    mine = describe(plain_base(base))
    for what in ("architecture", "fingerprint"):
        if mine[what] != config.base.get(what):
            raise ValueError(
                f"{folder} was made for another base ({config.base.get('name')}): its {what} is "
                f"{config.base.get(what)}, this one's {mine[what]}"
            )


def load_state(model: RecurrentForCausalLM, folder: Path) -> None:
    """Set the weights of a model from an adapter of the same base and settings. Errors: see `load_recurrent`."""
    config = read_config(folder)
    weights = _weights(folder / WEIGHTS)
    check_base_of(folder, config, model.base)
    for name, value in config.recurrence.items():
        if (mine := model.config.recurrence.get(name)) != value and name not in ("bptt", "recompute"):
            raise ValueError(f"{folder} has another recurrence: its {name} is {value}, this one's {mine}")
    load_weights(model, weights, str(folder))


def _weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no adapter: there is no {path.name}")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error


def load_weights(model: RecurrentForCausalLM, weights: dict[str, Tensor], what: str) -> None:
    """Set the weights that `trained_state` names.

    Raises:
        ValueError: names or shapes that do not fit.
    """
    own = _parameters(model)
    needed = {name for name in own if name.startswith("recurrence.") or ".lora_" in name}
    if missing := sorted(needed - weights.keys()):
        raise ValueError(f"{what}: weights are missing: {', '.join(missing[:3])}")
    if unknown := sorted(weights.keys() - own.keys()):
        raise ValueError(f"{what}: unknown weights: {', '.join(unknown[:3])}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{what}: {name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
