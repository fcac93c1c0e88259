"""Suite `retrofit`: what a recurrence costs its base, at the same window: reading, training, writing.

================= ====================================================================================================
select-W256-T2048 half of W positions as window and half as selected keys, over a text of T tokens
slots-W256-T2048  an eighth of W as slots and the rest as window
================= ====================================================================================================

Peers: `base` is the pretrained model itself, which reads windows of W tokens on their own, all at once, as a batch;
`sliding` is the retrofit that carries nothing, the base under a sliding window of W.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from undertow.bench.decode import writing
from undertow.bench.pairs import OURS, Work, in_turns
from undertow.bench.peers import parameters, silent
from undertow.bench.record import Record
from undertow.bench.suites import Cases, Options, sizes
from undertow.retrofit import RecurrenceConfig, add_recurrence

PEERS = ("base", "sliding")

CASES: Cases = dict.fromkeys(("select-W256-T2048", "slots-W256-T2048"), PEERS)
SMOKE: Cases = dict.fromkeys(("select-W16-T32", "slots-W16-T32"), PEERS)


def check(case: str) -> dict[str, int]:
    """W and T of a name such as select-W256-T2048.

    Raises:
        ValueError: not of that form, W no multiple of 8, T no multiple of W.
    """
    form = "slots-W256-T2048" if case.startswith("slots") else "select-W256-T2048"
    found = sizes(case, form)
    if found["W"] % 8 or found["T"] % found["W"]:
        raise ValueError(f"{case}: W should be a multiple of 8, and T of W")
    return found


def run(cases: Cases, options: Options, record: Record) -> None:
    """Measure tokens a second, float32, batch 1.

    A training step updates the base's weights and the module's, for everyone: forward, backward, AdamW.
    """
    base = _base(options, record)
    for case, peers in cases.items():
        W, T = check(case).values()
        torch.manual_seed(0)
        ours = {
            "select": RecurrenceConfig(window=W // 2, selected=W // 2, selected_rank=8, slots=0),
            "slots": RecurrenceConfig(window=W - W // 8, slots=W // 8),
        }[case.partition("-")[0]]
        models: dict[str, Any] = {OURS: add_recurrence(copy.deepcopy(base), ours, freeze_base=False)}
        if "base" in peers:
            models["base"] = copy.deepcopy(base)
        if "sliding" in peers:
            sliding = RecurrenceConfig(window=W, slots=0)
            models["sliding"] = add_recurrence(copy.deepcopy(base), sliding, freeze_base=False)
        numbers = {name: parameters(model) for name, model in models.items()}
        text = torch.randint(0, base.get_input_embeddings().num_embeddings, (1, T))
        # A row a window: the base knows nothing of the one before.
        texts = {name: text.view(-1, W) if name == "base" else text for name in models}
        tokens = 2 if options.smoke else 16
        works: dict[str, tuple[dict[str, Work], int]] = {
            "forward": ({name: _reading(model, texts[name]) for name, model in models.items()}, T),
            "decode": ({name: writing(model.eval(), text[:, : W if name == "base" else T], tokens)
                        for name, model in models.items()}, tokens),
            "train": ({name: _training(model, texts[name]) for name, model in models.items()}, T),
        }  # fmt: skip
        for what, (turns, amount) in works.items():
            record.say(f"retrofit, {case}: {what}, {', '.join(turns)}")
            with silent():
                times = in_turns(turns, options.repeats, options.warmup, partial(record.failed, "retrofit", case))
            record.compare("retrofit", case, f"{what}_tokens_per_second", "float32", times, amount, parameters=numbers)


def _base(options: Options, record: Record) -> Any:
    """The base asked for, or a Llama with random weights."""
    if options.base is not None:
        from undertow.retrofit.base import load_base

        record.say(f"retrofit: base {options.base}")
        return load_base(options.base, say=record.say)[0]
    return small_llama(smoke=options.smoke)


def small_llama(smoke: bool) -> Any:
    """A Llama on bytes with random weights: 5 million parameters, or next to none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads = (32, 2, 2) if smoke else (256, 6, 4)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=heads, max_position_embeddings=8192, bos_token_id=256, eos_token_id=256,
        )
    ).eval()  # fmt: skip


def _reading(model: Any, text: torch.Tensor) -> Work:
    def work() -> None:
        model.eval()
        with torch.no_grad():
            model(input_ids=text, use_cache=False)

    return work


def _training(model: Any, text: torch.Tensor) -> Work:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def work() -> None:
        model.train()
        optimizer.zero_grad()
        model(input_ids=text, labels=text, use_cache=False).loss.backward()
        optimizer.step()

    return work
