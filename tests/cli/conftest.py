"""Small bases, saved as a person would have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from undertow.data import byte_tokenizer


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bases ``llama`` (rotary, 128 positions) and ``gpt2`` (absolute, 64), random, on bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("bases")
    ids = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=128, initializer_range=0.2, **ids,
        )
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **ids))
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a text of 60 lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my text.txt").write_text("".join(f"line {i} of a text about nothing much\n" for i in range(60)))
    return tmp_path


def mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; it must be short and end with status 2."""
    from undertow.cli.main import main

    capsys.readouterr()
    assert main(words) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.strip()]
    assert lines[0].startswith("undertow: error: ")
    assert len(lines) <= 2
    assert "Traceback" not in err
    return err
