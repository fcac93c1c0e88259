"""Suite `train`: forward pass and training step of layers, against those of peers and the products that they need.

=================================================== ================================================================
T256-B8-d512-p128-l4                                SRU++: T positions, batch B, width d, attention width p, l layers
sru-T256-B8-d512-l4                                 SRU
lengths-from256-to8192-d512-p128-l4-w512            SRU++ with attention window w, at every T from 256 to 8,192 (each
                                                    twice the one before), with as many tokens in all: B = to / T
threads-T256-B8-d512-p128-l4                        SRU++ with one thread and with all
=================================================== ================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from undertow.bench.machine import Product, copy, multiply, operations, training_products
from undertow.bench.pairs import OURS, Times, Work, in_turns
from undertow.bench.peers import LAYERS, Layers, Shape, absent, parameters, silent
from undertow.bench.record import LIMIT, Record
from undertow.bench.suites import Cases, Options, sizes
from undertow.nn import SRU, SRUpp

PEERS = tuple(LAYERS)

CASES: Cases = {
    "T256-B8-d512-p128-l4": PEERS,
    "T256-B8-d1024-p256-l4": (),
    "T256-B8-d3072-p768-l4": (),
    "sru-T256-B8-d512-l4": ("sru", "lstm", "gru"),
    "lengths-from256-to8192-d512-p128-l4-w512": (),
    "threads-T256-B8-d512-p128-l4": (),
}
SMOKE: Cases = {
    "T8-B2-d16-p4-l1": PEERS,
    "sru-T8-B2-d16-l1": ("lstm", "gru"),
    "lengths-from8-to16-d16-p4-l1-w8": (),
    "threads-T8-B2-d16-p4-l1": (),
}

_FORMS = {
    "sru": "sru-T256-B8-d512-l4",
    "lengths": "lengths-from256-to8192-d512-p128-l4-w512",
    "threads": "threads-T256-B8-d512-p128-l4",
}
_FORM = "T256-B8-d512-p128-l4"


def check(case: str) -> dict[str, int]:
    """The sizes that a name tells; the table above has its forms.

    Raises:
        ValueError: it has none of them.
    """
    found = sizes(case, _FORMS.get(case.partition("-")[0], _FORM))
    doublings, rest = divmod(found.get("to", 1), found.get("from", 1))
    if rest or doublings & (doublings - 1):
        raise ValueError(f"{case}: the last length should be the first one doubled, any number of times")
    return found


def run(cases: Cases, options: Options, record: Record) -> None:
    """Measure tokens a second; float32, and SRU++ also under bfloat16 autocast.

    The limit is the time of the layers' matrix products alone (for training those of the backward pass too), causal
    attention taking half of the square of scores.
    """
    for case, peers in cases.items():
        found = check(case)
        kind = case.partition("-")[0]
        torch.manual_seed(0)
        if kind == "lengths":
            _lengths(case, found, options, record)
        elif kind == "threads":
            _threads(case, found, options, record)
        else:
            _layers(case, found, peers, options, record)


def products(T: int, B: int, d: int, p: int | None, layers: int) -> list[Product]:
    """The matrix products of a forward pass of SRU++, or of SRU where p is None."""
    N = T * B
    if p is None:
        return [(N, d, 3 * d)] * layers
    layer = [(N, d, p), (N, p, 2 * p), (N, p, 3 * d)]
    scores = [(T, p, (T + 1) // 2), (T, (T + 1) // 2, p)] * B
    return (layer + scores) * layers


# ---- the kinds of cases ----------------------------------------------------------------------------------------------


def _layers(case: str, found: dict[str, int], peers: tuple[str, ...], options: Options, record: Record) -> None:
    T, B, d, p = found["T"], found["B"], found["d"], found.get("p")
    ours = _ours(T, B, d, p, found["l"])
    shape = Shape(T, B, d, found["l"], parameters(ours.module), p, options.device)
    contestants = {OURS: ours}
    of_sru = None
    for peer in peers:
        if (why := absent(peer, options.device)) is not None:
            record.skip("train", case, peer, why)
            continue
        record.say(f"train, {case}: {peer}")
        try:
            with silent():
                theirs = LAYERS[peer](shape)
        except Exception as error:  # another's program: it must not stop the rest
            record.failed("train", case, peer, error)
            continue
        contestants[theirs.name] = theirs
        of_sru = theirs.name if peer == "sru" else of_sru
    for layers in contestants.values():
        layers.module.to(options.device)
        layers.input = layers.input.to(options.device)
    numbers = {name: parameters(layers.module) for name, layers in contestants.items()}
    needed = products(T, B, d, p, found["l"])

    for metric, work, limits in (
        ("forward_tokens_per_second", forward, needed),
        ("train_tokens_per_second", training, training_products(needed)),
    ):
        record.say(f"train, {case}: {metric.partition('_')[0]}, {', '.join(contestants)}")
        works = {name: work(layers) for name, layers in contestants.items()}
        times = _measure(case, metric, "float32", works, limits, options, record)
        record.compare("train", case, metric, "float32", times, T * B, parameters=numbers)
        # Ours in bfloat16 beside float32: sru's, which knows no autocast on a CPU, and our own.
        if p is None:
            continue
        works = {OURS: work(ours, torch.bfloat16), f"{OURS} float32": work(ours)}
        if of_sru in times:
            works[f"{of_sru} float32"] = work(contestants[of_sru])
        times = _measure(case, metric, "bfloat16", works, limits, options, record)
        same = {f"{name} float32": number for name, number in numbers.items()} | {OURS: numbers[OURS]}
        record.compare("train", case, metric, "bfloat16", times, T * B, parameters=same)


def _measure(
    case: str, metric: str, dtype: str, works: dict[str, Work], limits: list[Product], options: Options, record: Record
) -> dict[str, Times]:
    works = works | {LIMIT: multiply(limits, getattr(torch, dtype), options.device)}
    if options.device == "cuda":
        works = {name: _waiting(work) for name, work in works.items()}
    with silent():
        times = in_turns(works, options.repeats, options.warmup, partial(record.failed, "train", case))
    speed = operations(limits) / times[LIMIT].median
    record.limit("train", case, f"products of {metric.partition('_')[0]}", "flop_per_second", dtype, speed)
    return times


def _waiting(work: Work) -> Work:
    """A turn ends when the GPU has done it."""

    def both() -> None:
        work()
        torch.cuda.synchronize()

    return both


def _lengths(case: str, found: dict[str, int], options: Options, record: Record) -> None:
    """The same layers over the same number of tokens, in ever fewer and longer rows."""
    first, last = found["from"], found["to"]
    layers = SRUpp(found["d"], found["d"], found["p"], found["l"], attention_window=found["w"]).to(options.device)
    lengths = [first << doublings for doublings in range((last // first).bit_length())]
    record.say(f"train, {case}: T {', '.join(map(str, lengths))}")
    works = {}
    for T in lengths:
        x = torch.randn(T, last // T, found["d"], device=options.device)
        works[f"T {T:,}, B {last // T}"] = training(Layers(OURS, layers, x, lambda x: layers(x)[0]))
    if options.device == "cuda":
        works = {name: _waiting(work) for name, work in works.items()}
    times = in_turns(works, options.repeats, options.warmup)
    (beginning, start), *longer = times.items()
    for T, taken in zip(lengths[1:], (t for _, t in longer), strict=True):
        record.compare(
            "train", case, f"train_T{T}_tokens_per_second", "float32", {OURS: taken, beginning: start},
            (last // T) * T, parameters={OURS: parameters(layers)},
        )  # fmt: skip


def _threads(case: str, found: dict[str, int], options: Options, record: Record) -> None:
    """What a second thread (all that torch is set to) brings us, a matrix product and a copy."""
    threads = torch.get_num_threads()
    if options.device != "cpu":
        return record.skip("train", case, "threads", "it is about the CPU's threads")
    if threads == 1:
        return record.skip("train", case, "threads", "torch is set to one thread (OMP_NUM_THREADS, or one core)")
    T, B, d, p = found["T"], found["B"], found["d"], found["p"]
    ours = _ours(T, B, d, p, found["l"])
    needed = training_products(products(T, B, d, p, found["l"]))
    moved = 2 * 4 * T * B * 4 * d
    record.say(f"train, {case}: 1 and {threads} threads")
    works: dict[str, tuple[Work, float, str]] = {
        "forward": (forward(ours), T * B, "tokens_per_second"),
        "train": (training(ours), T * B, "tokens_per_second"),
        "products": (multiply(needed, torch.float32), operations(needed), "flop_per_second"),
        "copy": (copy(moved), moved, "bytes_per_second"),
    }

    def on(count: int, work: Work) -> Work:
        def set_and_work() -> None:
            torch.set_num_threads(count)
            work()

        return set_and_work

    turns = {f"{name} {count}": on(count, work) for name, (work, _, _) in works.items() for count in (threads, 1)}
    try:
        times = in_turns(turns, options.repeats, options.warmup)
    finally:
        torch.set_num_threads(threads)
    for name, (_, amount, unit) in works.items():
        both = {OURS: times[f"{name} {threads}"], "1 thread": times[f"{name} 1"]}
        record.compare("train", case, f"{name}_{threads}_threads_{unit}", "float32", both, amount)


# ---- what is timed ---------------------------------------------------------------------------------------------------


def _ours(T: int, B: int, d: int, p: int | None, count: int) -> Layers:
    layers: nn.Module = SRU(d, d, count) if p is None else SRUpp(d, d, p, count)
    return Layers(OURS, layers, torch.randn(T, B, d), lambda x: layers(x)[0])


def forward(layers: Layers, dtype: torch.dtype = torch.float32) -> Work:
    """A forward pass without gradients. (Not in inference mode: a peer that keeps tensors of it could not train.)"""

    def work() -> None:
        layers.module.eval()
        with torch.no_grad(), _precision(layers.input, dtype):
            layers.read(layers.input)

    return work


def training(layers: Layers, dtype: torch.dtype = torch.float32) -> Work:
    """Forward, backward (the input's gradient too, as for every layer above another) and optimiser step."""
    optimizer = torch.optim.AdamW(layers.module.parameters(), lr=1e-5, fused=True)
    x = layers.input.clone()
    if x.is_floating_point():
        x.requires_grad_()

    def work() -> None:
        layers.module.train()
        optimizer.zero_grad()
        x.grad = None
        with _precision(x, dtype):
            h = layers.read(x)
        h.float().square().mean().backward()
        optimizer.step()

    return work


@contextlib.contextmanager
def _precision(x: Tensor, dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        yield
