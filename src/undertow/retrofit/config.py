"""What a recurrence is to be: which window the base sees, what it remembers beyond, how that is read and written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Policy = Literal["disjoint", "overlap", "sliding"]
Read = Literal["mean", "last", "queries"]
Update = Literal["feedforward", "tanh", "gru", "sru", "held"]
Projection = Literal["base", "own"]
SelectedBy = Literal["attention", "learned", "chance"]


@dataclass
class RecurrenceConfig:
    """How a pretrained causal language model reads text of any length, and what it carries from window to window.

    With ``slots=0`` and ``selected=0`` nothing is carried: this is the base itself under a window policy, the rival
    of every recurrence. ``None`` leaves a choice to the library, which makes it when it sees the base.
    """

    window: int = 256
    """W: positions that a token sees at most, itself included, beside the sinks."""
    policy: Policy | None = None
    """disjoint: windows of W, each afresh. overlap: windows of W that begin with the last half of the one before, read
    again. sliding: always the last W and the text's first `sinks` positions. None: sliding where positions are rotary,
    else disjoint."""
    stride: int | None = None
    """C: positions from one boundary to the next, where memory changes. disjoint: W; overlap: W / 2; sliding: at most
    W, by default W / 4, or W / 2 with selected keys."""
    sinks: int = 4
    """First positions of a document that a sliding window never drops (Xiao et al. 2023, arXiv 2309.17453)."""
    reach: int | None = None
    """Sliding: position numbers that are used, at least sinks + W + C - 1. That many (the default) number positions
    inside the cache: sinks, room for the selected keys, window; those keys keep their distance, up to this one (by
    default 32 times the positions remembered, or as many as the base knows)."""
    slots: int = 32
    """S: trained vectors carried from boundary to boundary; 0: none."""
    selected: int = 0
    """Keys and values that each layer and head keeps of what leaves its sliding window."""
    selected_by: SelectedBy = "attention"
    """attention: those stay that received the most; needs no training. learned: a trained term joins in, which also
    weighs kept keys in attention, and starts at zero. chance: any (the control that shows what choosing is worth)."""
    selected_rank: int = 0
    """Kept keys and values are read through trained maps, x + x A B, of this rank, of each key head: what is recalled
    may be something else than what is close by. They start as identities; 0: none."""
    selected_decay: float = 0.9
    """What attention received counts after another 128 positions, beside newly received attention."""
    selected_distance: int | None = None
    """Only attention from at least so far away counts, since close by everything receives some; by default 32, or half
    of what a key sees of its window before it has to compete, (W - C) / 2."""
    read: Read = "queries"
    """How the hidden states of a stride become S vectors: the means of S equal parts, the last S positions, or S
    learned queries attending over it."""
    read_layers: list[int] | None = None
    """Layers whose output is read, from 0; by default the middle one."""
    slot_size: int | None = None
    """Width of a slot; by default the base's hidden size, which the base's own projections need."""
    update: Update = "feedforward"
    """How slots s and what was read x become the new slots: feedforward: a s + (1 - a) x + FFN([s; x]), normed, with a
    trained share a of each channel; tanh: tanh(A s + B x); gru; sru: one step of this library's SRU; held: not at all,
    the slots stay at their learned start (a prefix: the control that shows what is memory and what is mere training).
    """
    write_layers: list[int] | None = None
    """Layers to which the slots are extra keys and values; by default all above those read."""
    projection: Projection = "base"
    """Keys and values from slots: by the layer's own pretrained projections, or by small ones of the module."""
    bptt: int = 8
    """Windows (of W tokens) that gradients reach back at most within a call; so many go through the base at once, where
    they can."""
    recompute: bool = False
    """Training: recompute each window in backward, so that activations of one window at a time are held."""

    def __post_init__(self) -> None:
        for name, choices in (("policy", Policy), ("read", Read), ("update", Update), ("projection", Projection),
                              ("selected_by", SelectedBy)):  # fmt: skip
            value = getattr(self, name)
            if value is None and name == "policy":
                continue
            if value not in get_args(choices):
                raise ValueError(f"{name} should be one of {', '.join(get_args(choices))}, not {value!r}")
        least = {"sinks": 0, "slots": 0, "selected": 0, "selected_rank": 0, "selected_distance": 0}
        for name in ("window", "stride", "reach", "slot_size", "bptt", *least):
            value = getattr(self, name)
            optional = name in ("stride", "reach", "slot_size", "selected_distance")
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least.get(name, 1):
                raise ValueError(f"{name} should be a whole number, at least {least.get(name, 1)}, not {value!r}")
        if not isinstance(self.recompute, bool):
            raise ValueError(f"recompute should be true or false, not {self.recompute!r}")
        if not isinstance(self.selected_decay, int | float) or not 0 <= self.selected_decay <= 1:
            raise ValueError(f"selected_decay should be between 0 and 1, not {self.selected_decay}")
        for name in ("read_layers", "write_layers"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, list | tuple) or any(not isinstance(i, int) or isinstance(i, bool) for i in value)
            ):
                raise ValueError(f"{name} should be a list of whole numbers, not {value!r}")
            if value is not None and not value:
                raise ValueError(f"{name} is empty: name a layer, or leave it out")

    @property
    def remembered(self) -> int:
        """Positions remembered: window, slots and selected; the sinks come on top."""
        return self.window + self.slots + self.selected

    @property
    def carries(self) -> bool:
        """Whether anything is carried beyond the window."""
        return self.slots > 0 or self.selected > 0

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> RecurrenceConfig:
        """From what ``dataclasses.asdict`` gave.

        Raises:
            ValueError: an unknown setting, or one out of bounds.
        """
        if unknown := sorted(settings.keys() - {field.name for field in fields(cls)}):
            raise ValueError(f"unknown settings of a recurrence: {', '.join(unknown)}")
        return cls(**settings)

    def resolved(
        self,
        *,
        layers: int,
        hidden_size: int,
        relative: bool,
        limit: int | None,
        architecture: str,
        natural: int | None = None,
    ) -> Settings:
        """With every choice made, for a base.

        Args:
            layers: how many layers the base has.
            hidden_size: width of its hidden states.
            relative: whether its positions are rotary, so that keys can be renumbered.
            limit: positions that it knows; None: any number.
            architecture: its name, for messages.
            natural: positions up to which its rotation is one and the same; None: as `limit`.

        Raises:
            ValueError: settings that this base, or no base, can have.
        """
        W = self.window
        policy = self.policy or ("sliding" if relative else "disjoint")
        if policy == "sliding" and not relative:
            raise ValueError(
                f"policy sliding needs rotary positions, and {architecture} has absolute ones: take disjoint or overlap"
            )
        if policy == "overlap" and W % 2:
            raise ValueError(f"policy overlap halves the window, so it should be even, not {W}")
        fixed = {"disjoint": W, "overlap": W // 2}.get(policy)
        if fixed is not None and self.stride not in (None, fixed):
            raise ValueError(f"the stride of policy {policy} is {fixed} for a window of {W}; leave it out")
        stride = fixed or self.stride or max(1, W // (2 if self.selected else 4))
        if stride > W:
            raise ValueError(f"stride {stride} is above the window {W}: positions would be dropped unseen")
        sinks = self.sinks if policy == "sliding" else 0
        selected = self.selected
        if selected and policy != "sliding":
            raise ValueError(f"selected keys need policy sliding: under {policy} no key leaves a window that goes on")
        least = W if policy != "sliding" else sinks + W - 1 + stride
        if limit is not None and least > limit:
            raise ValueError(
                f"window {W} needs {least} positions ({policy}), and {architecture} knows {limit}: take a smaller one"
            )
        reach = least if policy != "sliding" or self.reach is None else self.reach
        if selected and self.reach is None:
            reach = max(least, min(natural or limit or 32 * self.remembered, 32 * self.remembered))
        if reach < least or (limit is not None and reach > limit):
            upper = "" if limit is None else f" and at most the {limit} positions that {architecture} knows"
            raise ValueError(f"reach should be at least {least} (sinks + window - 1 + stride){upper}, not {reach}")
        distance = self.selected_distance
        if distance is None:
            distance = min(32, (W - stride) // 2)
        elif selected and distance > W - stride:
            raise ValueError(
                f"selected_distance {distance} is above window - stride = {W - stride}: keys would compete before "
                "any attention counts"
            )
        made = asdict(self) | {
            "policy": policy, "stride": stride, "sinks": sinks, "reach": reach, "selected_distance": distance,
        }  # fmt: skip
        if not self.slots:
            return Settings(**made | {"read_layers": None, "write_layers": None, "slot_size": None})
        read = sorted(set(self.read_layers if self.read_layers is not None else [(layers - 1) // 2]))
        write = self.write_layers
        if write is None:
            write = list(range(max(read) + 1, layers)) or list(range(layers))
        write = sorted(set(write))
        for name, chosen in (("read_layers", read), ("write_layers", write)):
            if bad := [i for i in chosen if not 0 <= i < layers]:
                raise ValueError(f"{name}: {bad[0]} is no layer of {architecture}, which has 0 to {layers - 1}")
        slot_size = self.slot_size or hidden_size
        if self.projection == "base" and slot_size != hidden_size:
            raise ValueError(
                f"the base's own projections want slots of its hidden size {hidden_size}, not {slot_size}: "
                "leave slot_size out, or take projection own"
            )
        if self.read in ("mean", "last") and self.slots > stride:
            raise ValueError(
                f"read {self.read} makes at most one slot a position: {self.slots} slots of a stride of {stride}"
            )
        return Settings(**made | {"read_layers": read, "write_layers": write, "slot_size": slot_size})


class Settings(RecurrenceConfig):
    """A `RecurrenceConfig` in which every choice is made; layers and slot size are None where there are no slots."""

    policy: Policy
    stride: int
    reach: int
    selected_distance: int
    read_layers: list[int]
    write_layers: list[int]
    slot_size: int

    @property
    def trains(self) -> bool:
        """Whether there is a module to train."""
        return self.slots > 0 or (self.selected > 0 and (self.selected_by == "learned" or self.selected_rank > 0))

    @property
    def reach_back(self) -> int:
        """Strides that gradients reach back at most."""
        return self.bptt * self.window_strides

    @property
    def window_strides(self) -> int:
        """Strides in a window's worth of tokens."""
        return max(1, self.window // self.stride)
