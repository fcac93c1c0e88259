"""A pretrained causal language model with a recurrence: it walks the windows of a text of any length by itself."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..models.generation import StatefulGeneration
from .anatomy import Anatomy, UnsuitableBase, dissect, embedding_weight, eval_mode, plain_base, text_config
from .attention import Reading, reading_with
from .cache import RecurrentCache
from .call import Call, Collected
from .carry import Carry
from .config import RecurrenceConfig, Settings
from .module import Recurrence
from .windows import Grid, Piece, build_grid, number


class RecurrentConfig(PreTrainedConfig):
    """Configuration of a recurrent model: its recurrence, and which base it belongs to.

    Args:
        recurrence: settings, as ``dataclasses.asdict`` of a resolved `RecurrenceConfig` gives them.
        base: where the base comes from: `name`, `model_type`, `fingerprint`.
        lora: settings of the base's LoRA adapter, if it has one.
    """

    model_type = "undertow_recurrent"

    def __init__(
        self,
        recurrence: dict[str, Any] | None = None,
        base: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.recurrence, self.base, self.lora = recurrence or {}, base or {}, lora
        super().__init__(**kwargs)


@dataclass
class _Read:
    """What reading one grid gave."""

    logits: Tensor | None
    nll: Tensor | None
    tensors: dict[str, Tensor]


class RecurrentForCausalLM(PreTrainedModel, StatefulGeneration, GenerationMixin):
    """A causal language model that reads text of any length window by window, in constant memory.

    Made by `undertow.add_recurrence`. The base stays as it was: while this reads, its attention is replaced from
    outside (see `undertow.retrofit.attention`).

    Attributes:
        base: the pretrained model.
        recurrence: the trained module, None where nothing of the memory is trained.
        settings: every choice made.
        swap_states: evaluation only: row b reads with the slots and selected keys of row b - 1, a control that shows
            what memory is worth.
    """

    config_class = RecurrentConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # Drafts of assisted generation that are rejected cannot be taken out of a state again: transformers then refuses.
    _is_stateful = True
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: RecurrentConfig, base: Any, anatomy: Anatomy, settings: Settings) -> None:
        super().__init__(config)
        self.settings = settings
        self.anatomy = anatomy
        self.swap_states = False
        self.base = base
        self.recurrence = Recurrence(settings, anatomy) if settings.trains else None
        if self.recurrence is not None:
            weight = embedding_weight(base)
            self.recurrence.to(weight.device, weight.dtype)
        self._numbers = settings.reach
        # Worked out once: every call compares its state's with it.
        self._fits = {"base": config.base.get("fingerprint")} | {
            name: value for name, value in asdict(settings).items() if name not in ("bptt", "recompute")
        }
        self.post_init()
        if getattr(plain_base(base), "generation_config", None) is not None:
            self.generation_config = copy.deepcopy(plain_base(base).generation_config)
        self.register_load_state_dict_pre_hook(_name_as_here)
        self.register_load_state_dict_post_hook(_miss_nothing_frozen)

    def init_weights(self) -> None:
        """Leave all weights as they are: the base's are trained, the module's were made with it."""

    def get_input_embeddings(self) -> nn.Module:
        """Those of the base."""
        return plain_base(self.base).get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Those of the base."""
        return plain_base(self.base).get_output_embeddings()

    # -- the state ---------------------------------------------------------------------------------------------------

    def new_cache(self) -> RecurrentCache:
        """The state of a text that begins."""
        return RecurrentCache(self.state_fits())

    def state_fits(self) -> dict[str, Any]:
        """What a saved state has to agree with."""
        return self._fits

    # -- the order of work -------------------------------------------------------------------------------------------

    @property
    def parallel(self) -> bool:
        """Whether all strides of a call go through the base at once."""
        return self._order()[0]

    def _order(self) -> tuple[bool, str]:
        settings = self.settings
        if not settings.slots:
            return True, "a layer's keys depend on that layer alone"
        read, write = max(settings.read_layers), min(settings.write_layers)
        if settings.update == "held":
            return True, "the slots stay at their learned start"
        if read < write:
            return True, f"layer {read} is read, and {write} is the lowest written: only the update is sequential"
        return False, f"layer {read} is read, and layer {write}, not above it, is written: strides follow one another"

    @property
    def side_by_side(self) -> int:
        """Strides that go through the base at once, at most: gradients reach back no further, and where windows are
        recomputed, the activations of one of them are held.
        """
        if not self.parallel:
            return 1
        recompute = self.settings.recompute and self.training
        return self.settings.window_strides if recompute else self.settings.reach_back

    def explain(self) -> str:
        """The order of work and why, what is trained, and how much is remembered."""
        settings, (parallel, why) = self.settings, self._order()
        order = "one stride after the other"
        if parallel:
            order = f"strides side by side, {self.side_by_side} at most"
        sinks = f" + {settings.sinks} sinks" if settings.sinks else ""
        lines = [
            f"order      {order}: {why}",
            f"remembers  {settings.remembered} positions: window {settings.window}, {settings.slots} slots, "
            f"{settings.selected} selected{sinks}; policy {settings.policy}, stride {settings.stride}",
        ]
        if settings.slots:
            lines.append(
                f"slots      layers {_list(settings.read_layers)} read by {settings.read}, updated by "
                f"{settings.update}, written to layers {_list(settings.write_layers)} through projections of "
                f"{'the base' if settings.projection == 'base' else 'their own'}"
            )
        lines.append(f"parameters {', '.join(self._trained())}")
        return "\n".join(lines)

    def _trained(self) -> list[str]:
        """What is trained and what is not, with its number of parameters."""
        kinds = {"recurrence": [0, 0], "LoRA": [0, 0], "base": [0, 0]}
        for name, p in self.named_parameters():
            kind = "recurrence" if name.startswith("recurrence.") else "LoRA" if ".lora_" in name else "base"
            kinds[kind][not p.requires_grad] += p.numel()
        return [
            f"{kind} {number:,}{' (frozen)' if frozen else ''}"
            for kind, both in kinds.items()
            for frozen, number in enumerate(both)
            if number
        ]

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Recompute windows rather than layers: then nothing of a window but its state is held."""
        self.settings.recompute = enable

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether windows are recomputed in backward."""
        return self.settings.recompute

    is_gradient_checkpointing = is_activation_checkpointing  # its name in older transformers

    # -- reading -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: RecurrentCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        resets: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Read a piece of text of any length.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), or (B, more than T) with the piece at its right end; 0 at padding, which counts as
                no position and is not remembered.
            cache: the state to go on from; None starts a text. `past_key_values` is accepted in its place.
            labels: (B, T), the token ids themselves; shifted here, as everywhere in transformers; -100 is not scored.
            use_cache: return the state; by default only outside of training.
            resets: (B, T) bool, true where a new document starts: nothing before counts from there on.
            logits_to_keep: only the last n positions' logits (0: all), or those at the given positions.
            num_items_in_batch: what the summed loss is divided by; by default the number of targets.
            return_dict: False: a tuple.
            kwargs: `shift_labels` (B, T), labels already shifted: that of position t is the token at t + 1. With them
                the last position of a piece counts too. (Not in the signature: transformers' Trainer asks for a batch
                with everything there that is called labels.)

        Returns:
            `loss` (mean over scored targets, in nats), `logits` (B, T, vocab_size), `cache`. In training with
            `recompute` and labels, `logits` is None: they are not held.

        Raises:
            ValueError: token ids outside the vocabulary; shapes or a state that do not fit.
        """
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        if kwargs.get("inputs_embeds") is not None:
            raise ValueError("a recurrent model reads input_ids: windows may have to read tokens again")
        for name in ("position_ids", "token_type_ids"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name}: windows count their own positions; resets say where documents start")
        if self.training and _recomputes(plain_base(self.base)):
            raise ValueError(
                "the base recomputes its layers by itself, out of reach: base.gradient_checkpointing_disable(), and "
                "enable it on the recurrent model, which recomputes windows"
            )
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise ValueError(f"{name}: windows have none of the whole text; ask model.base for those of one window")
        input_ids = self._checked(input_ids)
        B, T = input_ids.shape
        state = self._state(cache, B)
        real = _real(attention_mask, B, T, input_ids.device)
        if resets is not None and (resets.shape != (B, T) or resets.dtype != torch.bool):
            raise ValueError(f"resets must be bool of shape ({B}, {T}), got {resets.dtype} of {tuple(resets.shape)}")
        targets = kwargs.pop("shift_labels", None)
        if targets is None and labels is not None:
            targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        if targets is not None:
            if targets.shape != (B, T):
                raise ValueError(f"labels must have shape ({B}, {T}), as input_ids, got {tuple(targets.shape)}")
            targets = targets.masked_fill(~real, -100)
        recompute = self.settings.recompute and self.training and torch.is_grad_enabled()
        kept, again = torch.unique(_kept(logits_to_keep, T, input_ids.device), return_inverse=True)
        held = not (recompute and targets is not None)

        logits, nll, tensors = self._walk(input_ids, real, resets, dict(state.tensors), kept if held else None, targets,
                                          recompute)  # fmt: skip
        if logits is not None and not torch.equal(again, torch.arange(len(kept), device=again.device)):
            logits = logits[:, again]
        loss = None
        if targets is not None:
            count = num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum()
            loss = nll / count
        out_cache = None
        if use_cache if use_cache is not None else not self.training:
            out_cache = state
        if out_cache is not None or cache is not None:
            state.tensors = tensors
            state.read(input_ids)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, cache=out_cache)
        wanted = return_dict if return_dict is not None else getattr(self.config, "return_dict", True)
        return out if wanted else out.to_tuple()  # type: ignore[return-value]

    def _walk(
        self,
        input_ids: Tensor,
        real: Tensor,
        resets: Tensor | None,
        tensors: dict[str, Tensor],
        kept: Tensor | None,
        targets: Tensor | None,
        recompute: bool,
    ) -> tuple[Tensor | None, Tensor, dict[str, Tensor]]:
        """All strides of a piece: logits (B, T', V) at the positions kept, summed loss, the next state's tensors."""
        settings, (B, _), device = self.settings, input_ids.shape, input_ids.device
        start = tensors.get("position", torch.zeros(B, dtype=torch.long, device=device))
        piece = Piece.build(start, real, resets, settings.stride)
        before = None
        if settings.policy == "overlap":
            before = tensors.get("tokens", torch.zeros(B, settings.stride, dtype=torch.long, device=device))
        call = Call(input_ids, real, targets, kept, before)
        collected, nll = Collected(kept), torch.zeros((), device=device)
        for first, count in piece.groups(self.side_by_side, settings.reach_back):
            M = _none(tensors.get("memory_real"), (B, 0), torch.bool, device)
            at = _none(tensors.get("memory_position"), (B, 0), torch.long, device)
            grid = build_grid(piece, first, count, start, M, at, settings)
            share = call.share(grid)
            arguments = (tensors, grid, share.input_ids, share.columns, share.targets, kept is not None)
            if recompute:
                got = checkpoint(self._read_grid, *arguments, use_reentrant=False)
            else:
                got = self._read_grid(*arguments)
            tensors, start = got.tensors, got.tensors["position"]
            if got.nll is not None:
                nll = nll + got.nll
            if got.logits is not None:
                collected.add(got.logits, share.wanted, share.place)
            if (first + count) % settings.reach_back == 0 and torch.is_grad_enabled():
                tensors = {name: t.detach() for name, t in tensors.items()}
        tensors = {"position": start} | tensors | call.last(settings.stride)
        logits = None if kept is None else collected.logits(B, self.config.vocab_size, self.dtype, device)
        return logits, nll, tensors

    def _read_grid(
        self,
        tensors: dict[str, Tensor],
        grid: Grid,
        input_ids: Tensor,
        columns: Tensor,
        targets: Tensor | None,
        held: bool,
    ) -> _Read:
        """One call of the base: a function of its arguments alone, so that backward may recompute it.

        Args:
            tensors: of the state.
            grid: n steps of L columns.
            input_ids: (B, n L).
            columns: which columns' logits are wanted.
            targets: (B, n L), or None.
            held: return the logits too.
        """
        settings, base = self.settings, self.base
        reading = Reading(grid, settings, tensors, swap=self.swap_states)
        carry = None
        if self.recurrence is not None:
            module = self.recurrence
            reading.write, reading.term, reading.recalled = module.add, module.term, module.recalled
            if settings.slots:
                carry = Carry(self.recurrence, reading, settings)
        given: dict[str, Any] = {"attention_mask": torch.ones_like(input_ids), "use_cache": False}
        if self.anatomy.relative:  # a table of rotations, of which attention picks those it wants
            given["position_ids"] = torch.arange(self._numbers, device=input_ids.device)[None]
        else:
            given["position_ids"] = number(grid.position, grid.begin, settings).flatten(1)
        if self.anatomy.keeps_logits:
            given["logits_to_keep"] = columns if len(columns) else columns.new_zeros(1)
        with reading_with(reading, self.anatomy.configs, self.anatomy.layers), self._listening(carry):
            logits = base(input_ids=input_ids, return_dict=True, **given).logits
        if not self.anatomy.keeps_logits:
            logits = logits[:, columns]
        elif not len(columns):
            logits = logits[:, :0]
        nll = None if targets is None else _nll(logits, targets[:, columns])
        new = {"position": grid.end[:, -1], "memory_real": grid.kept_real, "memory_position": grid.kept_position,
               **reading.left}  # fmt: skip
        if carry is not None:
            new |= carry.after()
        return _Read(logits if held else None, nll, new)

    @contextlib.contextmanager
    def _listening(self, carry: Carry | None) -> Iterator[None]:
        """Inside, hidden states of the layers read reach the recurrence as soon as they are there."""
        if carry is None or self.settings.update == "held":
            yield
            return
        hooks = [self.anatomy.blocks[i].register_forward_hook(carry.hear(i)) for i in self.settings.read_layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _checked(self, input_ids: Tensor | None) -> Tensor:
        """Token ids as the embeddings take them."""
        if not isinstance(input_ids, Tensor):
            raise TypeError(f"input_ids must be a tensor of integers of shape (B, T), got {type(input_ids).__name__}")
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            got = f"{input_ids.dtype} of {tuple(input_ids.shape)}"
            raise ValueError(f"input_ids must be integers of shape (B, T), got {got}")
        input_ids = input_ids.long()
        size = len(embedding_weight(self.base))
        if input_ids.numel() and (int(input_ids.min()) < 0 or int(input_ids.max()) >= size):
            bad = input_ids[(input_ids < 0) | (input_ids >= size)]
            raise ValueError(
                f"token id {int(bad[0])} is outside the vocabulary of {size} tokens: "
                "was the text encoded with another tokenizer?"
            )
        return input_ids

    def _state(self, cache: Any, batch: int) -> RecurrentCache:
        if cache is None:
            return self.new_cache()
        if not isinstance(cache, RecurrentCache):
            raise TypeError(f"cache must be a RecurrentCache (or None to start a text), got {type(cache).__name__}")
        if cache.batch_size not in (-1, batch):
            raise ValueError(f"the state holds {cache.batch_size} rows, the input has {batch}")
        if cache.fits is not self._fits:
            cache.check_fits(self._fits)
        return cache

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:  # type: ignore[override]
        """Write the adapter: `config.json`, and `model.safetensors` with what differs from the base."""
        from .storage import save

        save(self, Path(save_directory), state_dict=kwargs.get("state_dict"))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, base: Any = None, **kwargs: Any
    ) -> RecurrentForCausalLM:
        """As `undertow.load_recurrent`."""
        from .storage import load_recurrent

        model = load_recurrent(pretrained_model_name_or_path, base, dtype=kwargs.get("dtype"))
        if kwargs.get("output_loading_info"):
            return model, {f"{kind}_keys": set() for kind in ("missing", "unexpected", "mismatched")}  # type: ignore
        return model

    def load_state(self, folder: str | Path) -> RecurrentForCausalLM:
        """Take the weights of an adapter that was made for the same base with the same settings.

        Raises:
            FileNotFoundError: no adapter there.
            ValueError: damaged files, another base, other settings.
        """
        from .storage import load_state

        load_state(self, Path(folder))
        return self


def _name_as_here(model: RecurrentForCausalLM, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Let saved weights find those of a base that is wrapped by PEFT: adapters do not name the wrapper."""
    if plain_base(model.base) is model.base:
        return
    outer, inner = f"{prefix}base.", f"{prefix}base.base_model.model."
    for name in [name for name in state_dict if name.startswith(outer) and not name.startswith(inner)]:
        state_dict[inner + name.removeprefix(outer)] = state_dict.pop(name)


def _miss_nothing_frozen(model: RecurrentForCausalLM, keys: Any) -> None:
    """An adapter holds what is trained: the rest is with the base, and nothing to warn of (as Trainer would)."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in trained]


def _recomputes(base: Any) -> bool:
    """Whether a base recomputes its layers in backward, by the setting's name today or in older transformers."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return any(getattr(base, name) for name in [name for name in names if hasattr(type(base), name)][:1])


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood in nats, float32 (float64 for a float64 model), row by row."""
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    rows = [F.cross_entropy(row.to(wide), target, ignore_index=-100, reduction="sum")
            for row, target in zip(logits, targets, strict=True)]  # fmt: skip
    return torch.stack(rows).sum()


def _none(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if tensor is None else tensor


def _list(layers: list[int] | None) -> str:
    """Layers as a person would say them: 0-3, 7."""
    runs: list[list[int]] = []
    for i in layers or []:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _kept(logits_to_keep: int | Tensor, T: int, device: torch.device) -> Tensor:
    """Positions whose logits are asked for."""
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep should be 0 (all) or more, not {logits_to_keep}")
        return torch.arange(T - logits_to_keep if 0 < logits_to_keep <= T else 0, T, device=device)
    return torch.arange(T, device=device)[logits_to_keep.to(device)]


def _real(attention_mask: Tensor | None, B: int, T: int, device: torch.device) -> Tensor:
    """(B, T) bool, false at padding, from a mask over the piece or over all that was read."""
    if attention_mask is None:
        return torch.ones(B, T, dtype=torch.bool, device=device)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask must have shape ({B}, {T}), or longer to the left, got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - T :].to(device)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must be 1 at tokens and 0 at padding, not a term to be added to scores")
    return mask != 0


def add_recurrence(
    model: Any,
    config: RecurrenceConfig | None = None,
    *,
    freeze_base: bool = True,
    base_name: str | None = None,
) -> RecurrentForCausalLM:
    """Give a pretrained causal language model a recurrence.

    Args:
        model: a transformers causal language model, or one with a PEFT adapter (LoRA) on it.
        config: the recurrence; by default `RecurrenceConfig()`.
        freeze_base: train the module alone. A model with a PEFT adapter keeps what PEFT set: the adapter trains, too.
        base_name: where the base can be loaded from again; by default the name that it was loaded by.

    Returns:
        A wrapper. `.base` is the model, unchanged. Fresh, it gives the base's own logits under the same window policy.

    Raises:
        TypeError: no transformers model.
        UnsuitableBase (a ValueError): a base that cannot work, with the reason.
        ValueError: settings that do not fit the base.
    """
    from .storage import describe, lora_settings

    config = config or RecurrenceConfig()
    if not isinstance(config, RecurrenceConfig):
        raise TypeError(f"the second argument is a RecurrenceConfig, not a {type(config).__name__}")
    anatomy = dissect(model)
    settings = config.resolved(
        layers=len(anatomy.layers), hidden_size=anatomy.hidden_size, relative=anatomy.relative, limit=anatomy.limit,
        natural=anatomy.natural,
        architecture=anatomy.architecture,
    )  # fmt: skip
    plain = plain_base(model)
    text = text_config(plain)
    wrapped = RecurrentConfig(
        recurrence=asdict(settings),
        base=describe(plain, base_name),
        lora=lora_settings(model),
        vocab_size=anatomy.vocab_size,
        **{name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    recurrent = RecurrentForCausalLM(wrapped, model, anatomy, settings)
    _check_identity(recurrent)
    if freeze_base and plain is model:
        model.requires_grad_(False)
    recurrent.training = model.training  # the base's parts stay in the mode they are in
    if recurrent.recurrence is not None:
        recurrent.recurrence.train(model.training)
    return recurrent


@torch.no_grad()
def _check_identity(model: RecurrentForCausalLM) -> None:
    """Whether the base's own logits come out, on a few tokens, and do not depend on what follows.

    Raises:
        UnsuitableBase: they do not.
    """
    kind, base, numbers = model.anatomy.architecture, model.base, model._numbers
    T = min(12, model.settings.window)
    text = torch.arange(T, device=model.device) * 7919 % model.anatomy.vocab_size
    other = torch.cat([text[:-1], (text[-1:] + 1) % model.anatomy.vocab_size])
    late = T // 3  # the second row begins so much later, so that positions differ between rows
    rows = torch.stack([text, torch.cat([text[:1].expand(late), text[: T - late]])])
    mask = torch.ones_like(rows)
    mask[1, :late] = 0
    with eval_mode(model), torch.autocast(model.device.type, enabled=False):
        expected, changed = (
            base(input_ids=x[None], attention_mask=torch.ones_like(x[None]), use_cache=False).logits[0].double()
            for x in (text, other)
        )
        model._numbers = T if model.anatomy.relative else numbers  # the frequencies that so short a text gets
        try:
            got = model(rows, attention_mask=mask).logits
        except UnsuitableBase:
            raise
        except Exception as error:
            raise UnsuitableBase(f"{kind} cannot be read window by window: {error}") from error
        finally:
            model._numbers = numbers
    assert got is not None
    coarse = model.dtype in (torch.bfloat16, torch.float16)
    allowed = (3e-2 if coarse else 1e-4) * max(float(expected.abs().max()), 1)
    if not bool(expected.isfinite().all()):
        raise UnsuitableBase(
            f"{kind}: its own logits are not finite, so its weights are damaged, or its dtype too small"
        )
    if T > 1 and not float((changed - expected)[:-1].abs().max()) <= allowed:
        raise UnsuitableBase(f"{kind} is not causal: what it says of a token depends on the tokens after it")
    off = float(torch.cat([got[0] - expected, got[1, late:] - expected[: T - late]]).abs().max())
    if not off <= allowed:
        raise UnsuitableBase(
            f"{kind} does something in its attention that this library does not know: its logits are {off:.2g} apart"
        )


AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig)
AutoModelForCausalLM.register(RecurrentConfig, RecurrentForCausalLM)
