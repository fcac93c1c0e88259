"""Suite `train`: forward pass and training step of SRU++ layers against those of the peers that are installed."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from undertow.bench.machine import Product, products_seconds, training_products
from undertow.bench.pairs import Row, together
from undertow.nn import SRUpp


@dataclass(frozen=True)
class Case:
    """Sizes of a stack of layers and of what it reads."""

    T: int
    B: int
    d: int
    p: int
    layers: int

    @property
    def name(self) -> str:
        """Such as T256-B8-d512-p128-l4."""
        return f"T{self.T}-B{self.B}-d{self.d}-p{self.p}-l{self.layers}"

    @staticmethod
    def parse(name: str) -> Case:
        """The case of that name.

        Raises:
            ValueError: not of the form T256-B8-d512-p128-l4.
        """
        try:
            parts = name.split("-")
            if [part[0] for part in parts] != ["T", "B", "d", "p", "l"]:
                raise ValueError(name)
            sizes = [int(part[1:]) for part in parts]
            if min(sizes) < 1:
                raise ValueError(name)
            return Case(*sizes)
        except (ValueError, IndexError) as error:
            raise ValueError(f"a case is named like T256-B8-d512-p128-l4, not {name!r}") from error

    def products(self) -> list[Product]:
        """The matrix products of a forward pass; causal attention needs half of the square score matrix."""
        N = self.T * self.B
        layer = [(N, self.d, self.p), (N, self.p, 2 * self.p), (N, self.p, 3 * self.d)]
        scores = [(self.T, self.p, (self.T + 1) // 2), (self.T, (self.T + 1) // 2, self.p)] * self.B
        return (layer + scores) * self.layers


DEFAULT_CASES = ("T256-B8-d512-p128-l4",)


@dataclass
class Peer:
    """A module that reads (T, B, d) and what it is called."""

    name: str
    module: nn.Module
    read: Callable[[Tensor], Tensor]


def _ours(case: Case) -> Peer:
    layers = SRUpp(case.d, case.d, case.p, num_layers=case.layers)
    return Peer("undertow", layers, lambda x: layers(x)[0])


def _sru(case: Case) -> Peer:
    """The authors' implementation: time first, an additive causal mask."""
    import sru

    layers: Any = sru.SRUpp(case.d, case.d, case.p, num_layers=case.layers)
    mask = torch.full((case.T, case.T), -torch.inf).triu(1)
    return Peer("sru dev6 SRUpp", layers, lambda x: layers(x, attn_mask=mask)[0])


def _lstm(case: Case) -> Peer:
    layers = nn.LSTM(case.d, case.d, case.layers)
    return Peer("torch LSTM", layers, lambda x: layers(x)[0])


PEERS: dict[str, Callable[[Case], Peer]] = {"sru": _sru, "lstm": _lstm}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """sru warns about CUDA and prints while it compiles."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def run(
    cases: tuple[str, ...] = DEFAULT_CASES,
    peers: tuple[str, ...] = tuple(PEERS),
    repeats: int = 7,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure; float32.

    Args:
        cases: names like T256-B8-d512-p128-l4.
        peers: of `PEERS`; those not installed are left out by name.
        repeats: turns; the figures are medians.
        say: told what is being done and what is left out.

    Raises:
        ValueError: an unknown peer, or a case that cannot be read.
    """
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"there is no peer {peer!r} in this suite; there are {', '.join(PEERS)}")
    rows = []
    for case in map(Case.parse, cases):
        torch.manual_seed(0)
        contestants = [_ours(case)]
        for peer in peers:
            try:
                with _silent():
                    contestants.append(PEERS[peer](case))
            except Exception as error:  # a peer that cannot be imported or compiled must not stop the others
                say(f"without {peer}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        say(f"{case.name}: {', '.join(c.name for c in contestants)}")
        x = torch.randn(case.T, case.B, case.d)
        with _silent():
            forward = [_forward(c, x) for c in contestants]
            training = [_training(c, x) for c in contestants]
            limits = {
                "forward_tokens_per_second": (forward, products_seconds(case.products())),
                "train_tokens_per_second": (training, products_seconds(training_products(case.products()))),
            }
            for metric, (works, limit) in limits.items():
                pairs = together(works, repeats)
                tokens = case.T * case.B
                fraction = limit / pairs[0].ours
                ours = tokens / pairs[0].ours
                for contestant, pair in list(zip(contestants, pairs, strict=True))[1:]:
                    rows.append(
                        Row(
                            "train",
                            case.name,
                            contestant.name,
                            metric,
                            "float32",
                            ours,
                            tokens / pair.theirs,
                            pair.ratio,
                            fraction,
                        )
                    )
                if len(contestants) == 1:
                    rows.append(Row("train", case.name, None, metric, "float32", ours, limit_fraction=fraction))
    return rows


def _forward(peer: Peer, x: Tensor) -> Callable[[], object]:
    def work() -> None:
        peer.module.eval()
        with torch.inference_mode():
            peer.read(x)

    return work


def _training(peer: Peer, x: Tensor) -> Callable[[], object]:
    """Forward, backward (the input's gradient too, as for every layer above another) and optimiser step."""
    optimizer = torch.optim.AdamW(peer.module.parameters(), lr=1e-5, fused=True)
    x = x.clone().requires_grad_()

    def work() -> None:
        peer.module.train()
        optimizer.zero_grad()
        x.grad = None
        peer.read(x).square().mean().backward()
        optimizer.step()

    return work
