"""Whom we are compared with: what pip calls them, why one may be absent, models of theirs with as many parameters."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What has to be installed, by peer: the package that is imported, and what pip is to be told.
PACKAGES = {
    "sru": ("sru", "sru==3.0.0.dev6 ninja setuptools"),
    "mambapy": ("mambapy", "mambapy"),
    "xlstm": ("xlstm", "xlstm"),
    # What it asks for besides are CUDA libraries for a class that is not used here.
    "block-recurrent": (
        "block_recurrent_transformer_pytorch", "--no-deps block-recurrent-transformer-pytorch beartype einops",
    ),
    "fla": ("fla", "'flash-linear-attention[cuda]'"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
}  # fmt: skip


def absent(peer: str, device: str = "cpu") -> str | None:
    """Why a peer cannot take part here; None: it can."""
    if peer == "fla" and device != "cuda":
        return "its kernels want a GPU: --device cuda"
    package, install = PACKAGES.get(peer, (None, None))
    if package is not None and importlib.util.find_spec(package) is None:
        return f"not installed: pip install {install}"
    return None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What peers warn of and print (sru while it compiles, say) is none of the table."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


# ---- as many parameters ----------------------------------------------------------------------------------------------


def parameters(module: nn.Module) -> int:
    """How many numbers are trained; shared ones count once."""
    return sum(p.numel() for p in module.parameters())


def count(build: Callable[[], nn.Module]) -> int:
    """How many parameters a model would have, without making room for them."""
    with torch.device("meta"), silent():
        return parameters(build())


def nearest_size(counted: Callable[[int], int], target: int, step: int = 1) -> int:
    """The size, a multiple of `step`, at which a count is nearest to a target; of two that are, the smaller.

    Args:
        counted: the count at a size; it does not fall as the size grows.
        target: what it should be.
        step: sizes are step, 2 step, 3 step, ...

    Example:
        >>> nearest_size(lambda width: 12 * width**2, 3_000_000, step=64)
        512
    """
    below, above = 0, 1  # the target lies between them
    while counted(above * step) < target:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        if counted(middle * step) < target:
            below = middle
        else:
            above = middle
    if below and target - counted(below * step) <= counted(above * step) - target:
        return below * step
    return above * step


def llama_config(target: int, layers: int, vocab_size: int = 1, positions: int = 8192) -> Any:
    """A Llama of so many layers and, as nearly as its widths allow, so many parameters, its output layer included.

    Its width is what the usual proportions (a feed-forward of 8/3 widths) give, in whole heads; the feed-forward's own
    width then makes up the rest.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    width, heads = _width_and_heads(target, layers)

    def config(inner: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=vocab_size, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, max_position_embeddings=positions, bos_token_id=None, eos_token_id=None,
            pad_token_id=None,
        )  # fmt: skip

    return config(nearest_size(lambda inner: count(lambda: LlamaForCausalLM(config(inner))), target))


def _width_and_heads(target: int, layers: int) -> tuple[int, int]:
    """Of a transformer: 12 squares of the width a layer; heads of 64, or fewer where that would leave less than 4."""
    width = math.sqrt(target / (12 * layers))
    head = next((size for size in (64, 32, 16) if width >= 4 * size), 8)
    heads = max(1, round(width / head))
    return heads * head, heads


# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What layers read, and how many parameters they should have."""

    T: int
    B: int
    d: int
    layers: int
    parameters: int
    projection_size: int | None
    """Of SRU++; None: SRU."""
    device: str = "cpu"


@dataclass
class Layers:
    """Layers, what they read, and how."""

    name: str
    module: nn.Module
    input: Tensor
    read: Callable[[Tensor], Tensor]


def _sru(shape: Shape) -> Layers:
    """The authors' implementation, same sizes: time first, an additive causal mask."""
    import sru

    x = torch.randn(shape.T, shape.B, shape.d)
    if shape.projection_size is None:
        layers: Any = sru.SRU(shape.d, shape.d, num_layers=shape.layers)
        return Layers("sru dev6 SRU", layers, x, lambda x: layers(x)[0])
    layers = sru.SRUpp(shape.d, shape.d, shape.projection_size, num_layers=shape.layers)
    mask = torch.full((shape.T, shape.T), -torch.inf, device=shape.device).triu(1)
    return Layers("sru dev6 SRUpp", layers, x, lambda x: layers(x, attn_mask=mask)[0])


def _torch(kind: type[nn.RNNBase]) -> Callable[[Shape], Layers]:
    """torch's own, same width and depth: what SRU is put in the place of."""

    def make(shape: Shape) -> Layers:
        layers = kind(shape.d, shape.d, shape.layers)  # type: ignore[arg-type]
        x = torch.randn(shape.T, shape.B, shape.d)
        return Layers(f"torch {kind.__name__}", layers, x, lambda x: layers(x)[0])

    return make


def _transformer(name: str, layers: Any, shape: Shape, width: int) -> Layers:
    """A transformers model that reads embeddings."""
    x = torch.randn(shape.B, shape.T, width)
    return Layers(name, layers, x, lambda x: layers(inputs_embeds=x, use_cache=False).last_hidden_state)


def _llama(shape: Shape) -> Layers:
    from transformers import LlamaModel

    config = llama_config(shape.parameters, shape.layers, positions=max(shape.T, 2048))
    return _transformer("transformers Llama", LlamaModel(config), shape, config.hidden_size)


def _gpt2(shape: Shape) -> Layers:
    from transformers import GPT2Config, GPT2Model

    width, heads = _width_and_heads(shape.parameters, shape.layers)

    def build(inner: int) -> GPT2Model:
        return GPT2Model(
            GPT2Config(
                vocab_size=1, n_positions=shape.T, n_embd=width, n_inner=inner, n_layer=shape.layers, n_head=heads,
                bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip

    inner = nearest_size(lambda inner: count(lambda: build(inner)), shape.parameters)
    return _transformer("transformers GPT-2", build(inner), shape, width)


def _mambapy(shape: Shape) -> Layers:
    from mambapy.mamba import Mamba, MambaConfig

    def build(width: int) -> nn.Module:
        return Mamba(MambaConfig(d_model=width, n_layers=shape.layers))

    width = nearest_size(lambda width: count(lambda: build(width)), shape.parameters, step=8)
    layers = build(width)
    return Layers("mambapy Mamba", layers, torch.randn(shape.B, shape.T, width), layers)


def _xlstm(shape: Shape) -> Layers:
    """Its native form, without Triton; chunks of 64, or what divides T."""
    from xlstm.xlstm_large.model import xLSTMLargeBlockStack, xLSTMLargeConfig

    def build(width: int) -> Any:
        return xLSTMLargeBlockStack(
            xLSTMLargeConfig(
                embedding_dim=width, num_heads=4, num_blocks=shape.layers, vocab_size=1, mode="train",
                chunkwise_kernel="chunkwise--native_autograd", sequence_kernel="native_sequence__native",
                step_kernel="native", chunk_size=math.gcd(shape.T, 64), return_last_states=True,
                ffn_round_up_to_multiple_of=8,
            )
        )  # fmt: skip

    width = nearest_size(lambda width: count(lambda: build(width)), shape.parameters, step=8)
    layers = build(width)
    return Layers("xlstm xLSTMLarge", layers, torch.randn(shape.B, shape.T, width), lambda x: layers(x)[0])


def _block_recurrent(shape: Shape) -> Layers:
    """It reads tokens; of two kinds, so that embedding and output cost next to nothing. Blocks of 128, or T."""
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    block = min(128, shape.T)
    length = math.ceil(shape.T / block) * block

    def build(width: int) -> Any:
        return BlockRecurrentTransformer(
            num_tokens=2, dim=width, depth=shape.layers, dim_head=max(1, width // 4), heads=4, max_seq_len=length,
            block_width=block, recurrent_layers=(max(1, shape.layers // 2),),
        )  # fmt: skip

    width = nearest_size(lambda width: count(lambda: build(width)), shape.parameters, step=8)
    layers = build(width)
    ids = torch.randint(0, 2, (shape.B, shape.T))
    return Layers("block-recurrent-transformer-pytorch", layers, ids, lambda ids: layers(ids)[0])


def _fla(shape: Shape) -> Layers:
    from fla.models import GLAConfig, GLAModel

    def build(width: int) -> Any:
        return GLAModel(GLAConfig(hidden_size=width, num_hidden_layers=shape.layers, num_heads=4, vocab_size=1))

    width = nearest_size(lambda width: count(lambda: build(width)), shape.parameters, step=64)
    return _transformer("flash-linear-attention GLA", build(width), shape, width)


LAYERS: dict[str, Callable[[Shape], Layers]] = {
    "sru": _sru,
    "lstm": _torch(nn.LSTM),
    "gru": _torch(nn.GRU),
    "llama": _llama,
    "gpt2": _gpt2,
    "mambapy": _mambapy,
    "xlstm": _xlstm,
    "block-recurrent": _block_recurrent,
    "fla": _fla,
}
