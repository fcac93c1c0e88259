"""What a base is made of, found by running it once on a few tokens, not by the names of its parts."""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .attention import Layer, unrotated

_PROBE = "undertow_probe"
_TOKENS = 3
_TABLE = 7  # numbers in the probe's table of rotations: not the number of tokens, so that the two cannot be confused


class UnsuitableBase(ValueError):
    """A model that cannot be given a recurrence, with the reason."""


@dataclass
class Anatomy:
    """The parts of a base that a recurrence touches."""

    architecture: str
    layers: list[Layer]
    """Attention layers in the order in which they run."""
    blocks: list[nn.Module]
    """The block around each of them, whose output are hidden states."""
    configs: list[Any]
    """Configurations that say which attention function is called."""
    relative: bool
    """Positions are rotary in every layer that has any: keys can be renumbered."""
    limit: int | None
    """Positions the base knows."""
    natural: int | None
    """Positions up to which its rotation is one and the same: long and dynamic ones change beyond."""
    hidden_size: int
    vocab_size: int
    """Token ids it has embeddings for."""
    keeps_logits: bool
    """Whether its forward takes `logits_to_keep` as indices."""


def text_config(model: nn.Module) -> Any:
    """The configuration of a model's language part."""
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def check_base(model: Any) -> None:
    """Whether a model is a causal language model of transformers.

    Raises:
        TypeError: no transformers model at all.
        UnsuitableBase: an encoder, an encoder-decoder, a model without a language head, one with a state of its own.
    """
    plain = plain_base(model)
    kind = type(plain).__name__
    if not isinstance(plain, PreTrainedModel):
        raise TypeError(f"a recurrence is added to a transformers model, not to a {kind}")
    if getattr(plain.config, "is_encoder_decoder", False):
        raise UnsuitableBase(f"{kind} is an encoder-decoder: a recurrence needs a causal language model")
    if "resets" in inspect.signature(plain.forward).parameters:
        raise UnsuitableBase(f"{kind} carries a state of its own already")
    if plain.get_output_embeddings() is None:
        raise UnsuitableBase(f"{kind} has no language head: load it with AutoModelForCausalLM")


def plain_base(model: Any) -> Any:
    """The transformers model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def embedding_weight(model: Any) -> Tensor:
    """(vocabulary, width), the base's embeddings of tokens."""
    weight: Tensor = plain_base(model).get_input_embeddings().weight
    return weight


@torch.no_grad()
def dissect(model: Any) -> Anatomy:
    """Run the base on a few tokens and note which layers attend, how, and where.

    Raises:
        TypeError, UnsuitableBase: see `check_base`; also attention that does not go through transformers' registry,
            and layers whose place cannot be found.
    """
    check_base(model)
    plain = plain_base(model)
    kind = type(plain).__name__
    config = text_config(plain)
    modules = [m for m in plain.modules() if isinstance(getattr(m, "config", None), type(config))]
    configs: list[Any] = []
    for candidate in [plain.config, config, *(m.config for m in modules)]:
        if not any(candidate is known for known in configs):
            configs.append(candidate)
    seen: list[dict[str, Any]] = []
    queries: list[Tensor] = []
    rules: dict[int, tuple[Any, Any]] = {}  # of a mask, by its identity; the mask beside it keeps that its own

    def mask(mask_function: Any, **kwargs: Any) -> Any:
        made = AttentionMaskInterface()["eager"](mask_function=mask_function, **kwargs)
        rules[id(made)] = mask_function, made
        return made

    def look(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given_mask: Any = None, **kwargs: Any
    ) -> Any:
        if query.shape[2] != key.shape[2]:
            raise UnsuitableBase(f"{kind}: queries and keys differ in length, as in cross-attention")
        if kwargs.get("s_aux") is not None:
            raise UnsuitableBase(f"{kind} has learned sinks inside its softmax, which are not supported")
        rule, _ = rules.get(id(given_mask), (None, None))
        queries.append(query)
        seen.append({
            "module": module, "heads": query.shape[1], "key_heads": key.shape[1], "head_dim": query.shape[3],
            "local": rule is not None and _is_local(rule), "values": value.shape[3],
        })  # fmt: skip
        # Nothing is added, so that what a layer is given does not depend on the layers below having rotated or not.
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    made_by: dict[int, tuple[nn.Module, Tensor]] = {}  # which norm a tensor comes from, by its identity
    norms: dict[nn.Module, nn.Module] = {}

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            made_by[id(out)] = module, out

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if id(hidden) in made_by:
            norms[module] = made_by[id(hidden)][0]
        pair = kwargs.get("position_embeddings")
        if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) and t.dim() == 3 for t in pair):
            return args, kwargs | {"position_embeddings": unrotated(pair)}
        return None

    AttentionInterface.register(_PROBE, look)
    AttentionMaskInterface.register(_PROBE, mask)
    hooks: list[Any] = []
    names = [c._attn_implementation for c in configs]
    numbers = torch.arange(_TOKENS, device=plain.device)[None]
    ids = 1 + numbers  # not all of them padding, whose embedding may be zero
    given = {"attention_mask": torch.ones_like(ids)}
    numbered = "position_ids" in inspect.signature(plain.forward).parameters
    if numbered:
        given["position_ids"] = numbers
    try:
        for c in configs:
            c._attn_implementation = _PROBE
        with eval_mode(plain):
            plain(input_ids=ids, use_cache=False, **given)
            turned = queries.copy()
            seen.clear()
            queries.clear()
            hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in plain.modules()
                     if hasattr(m, "layer_idx")]  # fmt: skip
            hooks += [m.register_forward_hook(after) for m in plain.modules() if _is_norm(m, config.hidden_size)]
            plain(input_ids=ids, use_cache=False, **given)
    except UnsuitableBase:
        raise
    except Exception as error:
        raise UnsuitableBase(f"{kind} cannot be read with another attention function ({error})") from error
    finally:
        for hook in hooks:
            hook.remove()
        for c, name in zip(configs, names, strict=True):
            c._attn_implementation = name
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(_PROBE, None)
    if not seen:
        raise UnsuitableBase(
            f"{kind} does not call its attention through transformers' registry, so a recurrence cannot reach it"
        )
    if (layers := getattr(config, "num_hidden_layers", None)) is not None and len(seen) != layers:
        raise UnsuitableBase(
            f"{kind} calls the attention registry {len(seen)} times for its {layers} layers: layers without attention "
            "keep a state of their own, which windows would break"
        )
    if any(s["values"] != s["head_dim"] for s in seen):
        raise UnsuitableBase(f"{kind}: values of another width than keys are not supported")
    if not numbered:
        raise UnsuitableBase(f"{kind} takes no position_ids, so that its positions cannot start anew in every window")
    found = [
        Layer(
            index=index,
            module=layer["module"],
            rotates=not torch.equal(was, query),
            heads=layer["heads"],
            key_heads=layer["key_heads"],
            head_dim=layer["head_dim"],
            local=layer["local"],
            norm=norms.get(layer["module"]),
        )
        for index, (layer, was, query) in enumerate(zip(seen, turned, queries, strict=True))
    ]
    rotary = [layer for layer in found if layer.rotates]
    for layer in rotary:
        if not hasattr(sys.modules[type(layer.module).__module__], "apply_rotary_pos_emb"):
            raise UnsuitableBase(f"{kind} rotates its keys in a way of its own")
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return Anatomy(
        architecture=kind,
        layers=found,
        blocks=_blocks(plain, found, kind),
        configs=configs,
        relative=bool(rotary),
        limit=limit,
        natural=_natural(config, limit),
        hidden_size=config.hidden_size,
        vocab_size=len(embedding_weight(plain)),
        keeps_logits="logits_to_keep" in inspect.signature(plain.forward).parameters,
    )


def _natural(config: Any, limit: int | None) -> int | None:
    """Positions up to which the rotation does not depend on how many there are."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = (
        parameters.values() if parameters and all(isinstance(x, dict) for x in parameters.values()) else [parameters]
    )
    first = [
        one["original_max_position_embeddings"]
        for one in by_type
        if one.get("rope_type") in ("longrope", "dynamic") and one.get("original_max_position_embeddings")
    ]
    return min([*first, *([limit] if limit else [])], default=None)


def _is_norm(module: nn.Module, hidden_size: int) -> bool:
    """Whether a module is a norm of hidden states, of whatever class: its only weight is a vector of their size."""
    weights = dict(module.named_parameters())
    return "weight" in weights and weights.keys() <= {"weight", "bias"} and weights["weight"].shape == (hidden_size,)


def _is_local(rule: Any) -> bool:
    """Whether a layer's own mask hides what is far away."""
    query, key = torch.tensor(1 << 30), torch.tensor(0)
    return not bool(rule(key, key, query, key))


def _blocks(plain: nn.Module, layers: list[Layer], kind: str) -> list[nn.Module]:
    """The block around each attention layer: its nearest ancestor that is an item of a list of modules."""
    names = {module: name for name, module in plain.named_modules()}
    blocks = []
    for layer in layers:
        path = names[layer.module].split(".")
        for end in range(len(path), 0, -1):
            parent = plain.get_submodule(".".join(path[: end - 1]))
            if isinstance(parent, nn.ModuleList):
                blocks.append(plain.get_submodule(".".join(path[:end])))
                break
        else:
            raise UnsuitableBase(f"{kind}: the layer around {names[layer.module]} was not found")
    if len(set(blocks)) != len(blocks):
        raise UnsuitableBase(f"{kind}: several attention layers share a block")
    return blocks


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Any:
    """Inside, no dropout."""
    training = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, was in training.items():
            m.training = was
