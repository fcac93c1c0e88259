"""``undertow train`` and ``undertow eval`` as a person types them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.cli.conftest import mistake
from undertow.cli.main import main
from undertow.data import byte_tokenizer

SMALL = shlex.split(
    "--steps 6 --batch_size 2 --window 16 --eval_every 3 --eval_tokens 100 --checkpoint_every 3 --log_every 1 "
    "--device cpu --model.hidden_size 16 --model.projection_size 8 --model.num_hidden_layers 2 "
    "--model.attention_window 8"
)


def test_train_then_eval(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "my text.txt", *SMALL]) == 0
    err = capsys.readouterr().err
    assert "step 6" in err
    assert "bits/byte" in err
    run = folder / "runs" / "my-text-1"
    assert {path.name for path in run.iterdir()} >= {
        "config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "best", "tensorboard",
    }  # fmt: skip
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["hidden_size"] == 16

    assert main(["eval", "runs/my-text-1", "--json", "results/own.json"]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    own = json.loads((folder / "results" / "own.json").read_text())
    assert own["targets"] == own["bytes"] < 200
    assert main(["eval", "--model", "runs/my-text-1/best", "--data", "my text.txt", "--json", "all.json"]) == 0
    assert json.loads((folder / "all.json").read_text())["bytes"] == os.path.getsize("my text.txt")
    assert main(["eval", "runs/my-text-1", "--attention-window", "2", "--json", "narrow.json"]) == 0
    narrow = json.loads((folder / "narrow.json").read_text())
    assert narrow["attention_window"] == 2
    assert main(["eval", "runs/my-text-1", "--split", "valid", "--max_tokens", "20"]) == 0
    assert "A document was scored in part" in capsys.readouterr().out

    for weights in ("int8", "bfloat16"):
        assert main(["eval", "runs/my-text-1", "--weights", weights, "--json", "few.json"]) == 0
        assert f"{weights} weights: " in capsys.readouterr().out
        few = json.loads((folder / "few.json").read_text())
        assert few["saved"]["nll"] == own["nll"] != few["nll"]
        assert abs(few["bits_per_byte"] - own["bits_per_byte"]) < 0.05
        assert main(["generate", "runs/my-text-1", "line", "--weights", weights, "--max_new_tokens", "5"]) == 0

    assert main(["train", "--data", "my text.txt", *SMALL]) == 0
    assert (folder / "runs" / "my-text-2").is_dir()


def test_the_run_can_be_repeated_from_its_config(folder: Path) -> None:
    assert main(["train", "--data", "my text.txt", "--out", "a", *SMALL]) == 0
    assert main(["train", "--config", "a/config.yaml", "--out", "b"]) == 0
    losses = [
        [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in "ab"
    ]
    assert losses[0] == losses[1]


def test_seed_changes_the_course_and_not_the_held_out_text(folder: Path) -> None:
    for seed in "01":
        assert main(["train", "--data", "my text.txt", "--out", f"run{seed}", "--seed", seed, *SMALL]) == 0
        assert main(["eval", f"run{seed}", "--json", f"{seed}.json"]) == 0
    results = [json.loads(Path(f"{seed}.json").read_text()) for seed in "01"]
    assert results[0]["nll"] != results[1]["nll"]
    assert results[0]["bytes"] == results[1]["bytes"]


def test_a_saved_model_is_trained_further(folder: Path) -> None:
    assert main(["train", "--data", "my text.txt", "--out", "first", *SMALL]) == 0
    words = ["--steps", "1", "--learning_rate", "1e-12", "--weight_decay", "0", "--batch_size", "2", "--window", "16"]
    assert main(["train", "--init-from", "first", "--data", "my text.txt", "--out", "second", *words]) == 0
    one, two = (AutoModelForCausalLM.from_pretrained(Path(run, "best")) for run in ("first", "second"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_plain_transformer_is_trained_and_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("llama")
    byte_tokenizer().save_pretrained("llama")
    words = ["--steps", "3", "--batch_size", "2", "--window", "16", "--device", "cpu"]
    assert main(["train", "--init-from", "llama", "--data", "my text.txt", "--out", "run", *words]) == 0
    assert main(["eval", "run"]) == 0
    assert "read one by one" in capsys.readouterr().out


def test_mistakes_before_anything_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty.txt").write_text("")
    text = ["--data", "my text.txt"]
    assert "nowhere.txt" in mistake(["train", "--data", "nowhere.txt"], capsys)
    assert "empty" in mistake(["train", "--data", "empty.txt"], capsys)
    assert "no text was given" in mistake(["train"], capsys)
    assert "did you mean --learning_rate?" in mistake(["train", *text, "--learning_rat", "1"], capsys)
    assert "did you mean --model.hidden_size?" in mistake(["train", *text, "--hidden_size", "64"], capsys)
    assert "too short" in mistake(["train", *text, "--window", "100000"], capsys)
    assert "steps should be at least 1" in mistake(["train", *text, "--steps", "0"], capsys)
    heads = ["--model.projection_size", "10", "--model.num_attention_heads", "3"]
    assert "not divisible by" in mistake(["train", *text, *heads], capsys)
    assert "holds no saved model" in mistake(["train", *text, "--init-from", str(folder)], capsys)
    assert "no folder nothing" in mistake(["train", *text, "--init-from", "nothing"], capsys)
    assert "--out FOLDER" in mistake(["train", *text, "--resume"], capsys)
    assert "no checkpoint" in mistake(["train", *text, "--out", "fresh", "--resume"], capsys)
    assert "device should be" in mistake(["train", *text, "--device", "abacus"], capsys)
    if not torch.cuda.is_available():
        assert "no CUDA device" in mistake(["train", *text, "--device", "cuda"], capsys)
    assert sorted(path.name for path in folder.iterdir() if path.name not in ("cache", "runs")) == [
        "empty.txt", "my text.txt",
    ]  # fmt: skip
    assert "which model?" in mistake(["eval"], capsys)
    assert "no folder nothing" in mistake(["eval", "nothing", *text], capsys)


def test_mistakes_with_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--data", "my text.txt", "--out", "run", *SMALL]
    assert main(words) == 0
    assert "not empty" in mistake(words, capsys)
    assert "hidden_size 16 there, 32 here" in mistake([*words, "--resume", "--model.hidden_size", "32"], capsys)
    newest = folder / "run" / "checkpoints" / "step-00000006" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    said = mistake([*words, "--resume"], capsys)
    assert "step-00000006 is cut short" in said
    assert "--resume step-00000003" in said
    assert main([*words, "--resume", "step-00000003"]) == 0
    weights = folder / "run" / "best" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert "weights are damaged" in mistake(["eval", "run"], capsys)
    weights.write_bytes(content)
    other = ["--data", "other.bin", "--tokenizer", "words.json"]
    (folder / "other.bin").write_bytes(b"caf\xe9 \xff\xfe")
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save("words.json")
    assert "does not match" in mistake(["eval", "run", *other], capsys)
    (folder / "run" / "best" / "tokenizer.json").unlink()
    assert "UTF-8" in mistake(["eval", "run", *other], capsys)
    (folder / "big.txt").write_text("a b c")
    big = {f"w{i}": i for i in range(300)} | {"<unk>": 300}
    Tokenizer(models.WordLevel(big, unk_token="<unk>")).save("big.json")
    assert "outside the vocabulary" in mistake(["eval", "run", "--data", "big.txt", "--tokenizer", "big.json"], capsys)


def test_as_a_process(folder: Path) -> None:
    """``python -m undertow``: messages on stderr, results on stdout, statuses as promised."""
    done = subprocess.run(
        [sys.executable, "-m", "undertow", "train", "--data", "nowhere"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("undertow: error: ")
    assert done.stderr.count("\n") <= 2
