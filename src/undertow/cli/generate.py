"""Write text with a saved model, in constant memory, shown as it comes.

undertow generate runs/first "def main("
undertow generate runs/first --temperature 0.7 --seed 1 < beginning.txt
cat book.txt | undertow generate runs/first --max_new_tokens 0        goes on until Ctrl-C
undertow generate runs/first --state book.state     goes on from what undertow read has read
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

POSITIONAL = ("model", "prompt")

PIECE = 1024
"""Tokens of a prompt read at a time, and tokens written before the list of them is started anew."""


@dataclass
class Config:
    """What writes, after which beginning, how."""

    model: str | None = None
    """A saved model's or adapter's folder, a run's folder (its best model), hub:owner/name, or a base as in undertow
    retrofit (a .gguf file, package:NAME)."""
    prompt: str | None = None
    """The beginning of the text; by default what comes on standard input, if anything does; "-": standard input."""
    base: str | None = None
    """The base of an adapter, where it is not found by the name that the adapter has for it."""
    state: str | None = None
    """Go on from this state, which undertow read has saved; the prompt, if any, comes after what was read."""
    max_new_tokens: int = 500
    """Tokens to write; 0: until Ctrl-C (models that carry a state)."""
    temperature: float = 0.8
    """Below 1 likely tokens become likelier; 0: always the likeliest."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: no limit."""
    seed: int | None = None
    """Makes the draws repeatable."""
    stop: bool = True
    """Stop where the model ends the document."""
    echo: bool = True
    """Show the prompt before what follows it."""
    tokenizer: str | None = None
    """The tokenizer; by default the one saved with the model."""
    weights: Literal["saved", "bfloat16", "int8"] = "saved"
    """How the weights are held: as they were saved, or with fewer bits, which is faster. int8 are the linear layers
    alone; undertow eval --weights int8 shows what that costs in bits per byte."""
    device: str | None = None
    """cpu, cuda, ...; by default a GPU where there is one."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens should be 0 (no end) or more, not {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature should be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p should be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k should be 0 (no limit) or more, not {self.top_k}")


def run(config: Config) -> int:
    """Generate; 0, or 130 after Ctrl-C."""
    import torch

    from undertow.cli.checks import matching_tokenizer
    from undertow.cli.eval import locate
    from undertow.cli.read import check_bookmark, check_carries_state, check_vocabulary, load, open_bookmark
    from undertow.cli.train import choose_device, hold_weights, load_model
    from undertow.data import TextDecoder, separator_id, tokenizer_fingerprint

    if config.model is None:
        raise ValueError("which model? undertow generate MODEL_FOLDER PROMPT")
    mark = None if config.state is None else open_bookmark(config.state)
    place = locate(config.model)
    device = choose_device(config.device)
    prompt = _prompt(config)
    tokenizer = matching_tokenizer(config.tokenizer, place, config.model)
    ids = _encode(prompt, tokenizer, separator_id(tokenizer) if mark is None else mark.last)
    model: Any = load_model(place, device, base=config.base).eval()
    state = None
    if mark is not None:
        assert config.state is not None
        check_carries_state(model, place)
        check_bookmark(mark, config.state, model, place, tokenizer_fingerprint(tokenizer))
        state = load(model, config.state)
    hold_weights(model, config.weights)
    check_vocabulary(int(ids.max()), model, place)
    count = room(model, ids.shape[1], config.max_new_tokens)
    if count < config.max_new_tokens:
        print(f"this model knows {ids.shape[1] + count:,} positions: {count:,} new tokens at most", file=sys.stderr)
    if config.seed is not None:
        torch.manual_seed(config.seed)
    decoder = TextDecoder(tokenizer)

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    show(prompt.decode(errors="replace") if config.echo else "")
    settings = sampling(config.temperature, config.top_p, config.top_k)
    try:
        write(
            model,
            ids.to(device),
            lambda token: show(decoder.push(token)),
            state=state,
            max_new_tokens=count,
            stop=config.stop,
            **settings,
        )
    except KeyboardInterrupt:
        return 130
    finally:
        show(decoder.flush() + "\n")
    return 0


def _prompt(config: Config) -> bytes:
    if config.prompt is not None and config.prompt != "-":
        return config.prompt.encode("utf-8", "surrogateescape")
    if config.prompt is None and sys.stdin.isatty():
        return b""
    return sys.stdin.buffer.read()


def _encode(prompt: bytes, tokenizer: PreTrainedTokenizerBase, before: int | None) -> Tensor:
    """The prompt, after the token that begins a document or the last one of what was read, (1, T)."""
    import torch

    from undertow.data import Document
    from undertow.data.encode import encode_documents

    ids = [] if before is None else [before]
    for some, _, _ in encode_documents([Document("prompt", prompt)], tokenizer):
        ids += some.tolist()
    if not ids:
        raise ValueError("this model's tokenizer has no token that starts a text: give a prompt")
    return torch.tensor([ids])


def room(model: Any, prompt: int, wanted: int) -> int:
    """How many tokens can be written after a prompt; a model without a state knows only so many positions.

    Raises:
        ValueError: none.
    """
    from undertow.evaluate.protocol import carries_state

    known = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if carries_state(model) or not isinstance(known, int) or not wanted or prompt + wanted <= known:
        return wanted
    if prompt >= known:
        raise ValueError(
            f"the prompt has {prompt:,} tokens, and this model knows {known:,} positions: shorten it, or let undertow "
            "retrofit give the model a memory"
        )
    return known - prompt


def sampling(temperature: float, top_p: float = 1.0, top_k: int = 0) -> dict[str, Any]:
    """The settings as transformers' `generate` wants them."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def write(
    model: Any,
    input_ids: Tensor,
    emit: Callable[[int], object],
    *,
    state: Any = None,
    max_new_tokens: int,
    stop: bool = True,
    **settings: Any,
) -> None:
    """Let a model write after a prompt, and hand over every token as it comes.

    Args:
        model: a causal language model; with a state that it carries, memory does not grow with the text.
        input_ids: (1, T), the prompt, T at least 1.
        emit: called with each new id.
        state: what was read before the prompt, of a model that carries a state; it is moved on.
        max_new_tokens: 0: without end.
        stop: end at the model's end-of-text token (which is not handed over).
        settings: for transformers' `generate`.

    Raises:
        ValueError: no end asked of a model that carries no state.
    """
    import torch
    from transformers.generation.streamers import BaseStreamer

    from undertow.evaluate.protocol import carries_state

    stateful = carries_state(model)
    if max_new_tokens == 0 and not stateful:
        raise ValueError("this model carries no state, so it cannot write without end: give max_new_tokens")
    end = model.generation_config.eos_token_id if stop else None
    ends = end if isinstance(end, list) else [end]

    class Streamer(BaseStreamer):
        """Hands over what comes after the prompt."""

        prompt = True

        def put(self, value: Tensor) -> None:
            if not self.prompt and (token := int(value)) not in ends:
                emit(token)
            self.prompt = False

        def end(self) -> None:
            pass

    if stateful:
        with torch.inference_mode():
            for piece in input_ids[:, :-1].split(PIECE, dim=1):
                if piece.shape[1]:
                    state = model(piece, cache=state, use_cache=True, logits_to_keep=1).cache
        input_ids = input_ids[:, -1:]
    settings |= {"eos_token_id": end, "pad_token_id": ends[0], "use_cache": True, "return_dict_in_generate": True}
    done = 0
    while max_new_tokens == 0 or done < max_new_tokens:
        # `generate` keeps all that it has written; calling it anew now and then keeps the memory constant.
        left = max_new_tokens - done if max_new_tokens else PIECE
        n = min(PIECE, left) if stateful else left
        given = {} if state is None else {"cache": state}
        mask = torch.ones_like(input_ids)
        out = model.generate(input_ids, attention_mask=mask, max_new_tokens=n, streamer=Streamer(), **given, **settings)
        state, input_ids, done = out.cache, out.sequences[:, -1:], done + n
        if int(input_ids) in ends:
            return
