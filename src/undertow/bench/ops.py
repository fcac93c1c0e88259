"""Suite `ops`: the elementwise recurrence alone, against a plain copy of the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow import ops
from undertow.bench.pairs import Row, together


@dataclass(frozen=True)
class Case:
    """Sizes of the recurrence."""

    T: int
    B: int
    d: int

    @property
    def name(self) -> str:
        """Such as T256-B8-d512."""
        return f"T{self.T}-B{self.B}-d{self.d}"

    @staticmethod
    def parse(name: str) -> Case:
        """The case of that name.

        Raises:
            ValueError: not of the form T256-B8-d512.
        """
        try:
            parts = name.split("-")
            sizes = [int(part[1:]) for part in parts]
            if [part[0] for part in parts] != ["T", "B", "d"] or min(sizes) < 1:
                raise ValueError(name)
            return Case(*sizes)
        except (ValueError, IndexError, TypeError) as error:
            raise ValueError(f"a case is named like T256-B8-d512, not {name!r}") from error


DEFAULT_CASES = ("T256-B8-d512", "T256-B8-d3072", "T1024-B16-d1024")

PEERS = ("copy",)

# (B, T, d) blocks that have to be read and written, k = 3: forward u, x -> h; backward u, x, dh -> du, dx.
FORWARD_BLOCKS = 3 + 1 + 1
BACKWARD_BLOCKS = (3 + 1 + 1) + (3 + 1)


def run(
    cases: tuple[str, ...] = DEFAULT_CASES,
    peers: tuple[str, ...] = PEERS,
    repeats: int = 7,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure forward and forward + backward in bytes a second, float32 and bfloat16.

    `ours` are the bytes that must be moved over our time, `theirs` is the same for a plain copy that reads and writes
    as many bytes; `limit_fraction` is their quotient, since no recurrence can be faster than that on large inputs.
    What else the implementation moves (c kept for the backward pass, say) counts against it.

    Args:
        cases: names like T256-B8-d512.
        peers: only "copy".
        repeats: turns; the figures are medians.
        say: told what is being done.
    """
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"there is no peer {peer!r} in this suite; there is {', '.join(PEERS)}")
    rows = []
    for case in map(Case.parse, cases):
        say(f"{case.name}: {ops.backend_info()}")
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            u = torch.randn(case.B, case.T, 3, case.d, dtype=dtype)
            x = torch.randn(case.B, case.T, case.d, dtype=dtype)
            weight, bias = torch.rand(2, case.d), torch.zeros(2, case.d)
            block = x.numel() * x.element_size()
            for metric, blocks, work in (
                ("forward_bytes_per_second", FORWARD_BLOCKS, _forward(u, x, weight, bias)),
                ("forward_backward_bytes_per_second", FORWARD_BLOCKS + BACKWARD_BLOCKS, _both(u, x, weight, bias)),
            ):
                pair = together([work, _copy(blocks * block)], repeats)[1]
                rows.append(
                    Row(
                        "ops",
                        case.name,
                        "copy",
                        metric,
                        str(dtype).removeprefix("torch."),
                        blocks * block / pair.ours,
                        blocks * block / pair.theirs,
                        pair.ratio,
                        pair.ratio,
                    )
                )
    return rows


def _forward(u: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
    def work() -> None:
        with torch.inference_mode():
            ops.recurrence(u, x, weight, bias)

    return work


def _both(u: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], object]:
    leaves = [t.clone().requires_grad_() for t in (u, x, weight, bias)]
    grad_h = torch.randn_like(x)

    def work() -> None:
        h, _ = ops.recurrence(leaves[0], leaves[1], leaves[2], leaves[3])
        torch.autograd.grad(h, leaves, grad_h)

    return work


def _copy(nbytes: int) -> Callable[[], object]:
    """Reads half of the bytes and writes the other half."""
    source = torch.ones(nbytes // 8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
