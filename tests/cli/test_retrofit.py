"""``undertow retrofit`` as a person types it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from tests.cli.conftest import mistake
from undertow.cli.main import main
from undertow.cli.train import load_model
from undertow.data import train_tokenizer

SMALL = shlex.split(
    "--steps 4 --batch_size 2 --window 48 --eval_every 2 --eval_tokens 100 --checkpoint_every 2 --log_every 1 "
    "--keep 9 --device cpu --tensorboard false --precision float32 --recurrence.window 16 --recurrence.slots 3"
)


def start(bases: Path, *words: str, base: str = "llama") -> list[str]:
    return ["retrofit", "--base", str(bases / base), "--data", "my text.txt", *SMALL, *words]


def losses(run: str) -> list[Any]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"], line.get("grad_norm")) for line in lines]


def test_retrofit_then_everything_that_takes_a_model(
    folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(start(bases)) == 0
    run = Path("runs", "my-text-1")
    said = capsys.readouterr().out
    adapter = load_file(run / "best" / "model.safetensors")
    trained = sum(tensor.numel() for tensor in adapter.values())
    assert f"{trained:,}" in said
    assert all(name.startswith("recurrence.") or ".lora_" in name for name in adapter)
    # A checkpoint holds what trains and its moments, never the base.
    weights = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")
    assert {name.replace(".base_model.model", "", 1) for name in weights} == adapter.keys()
    assert json.loads((run / "summary.json").read_text())["trainable_parameters"] == trained
    assert yaml.safe_load((run / "config.yaml").read_text())["recurrence"]["window"] == 16

    assert main(["eval", str(run), "--json", "own.json", "--device", "cpu"]) == 0
    words = ["--temperature", "0", "--max_new_tokens", "5", "--device", "cpu"]
    assert main(["generate", str(run), "line", *words]) == 0
    further = ["--init-from", str(run), "--data", "my text.txt", "--out", "more", "--steps", "1", "--window", "32"]
    assert main(["train", *further, "--batch_size", "1", "--device", "cpu", "--tensorboard", "false"]) == 0
    assert load_file("more/best/model.safetensors").keys() == adapter.keys()


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--lora.rank 0 --recurrence.update sru",
        "--train_base full --optimizer radam",
        "--recurrence.policy disjoint --precision bfloat16 --micro_batch_size 1",
        "--recurrence.selected 4 --lora.dropout 0.1",
        "--gradient_checkpointing",
        "--recurrence.read_layers 2 --recurrence.write_layers 0 1",
    ],
)
def test_resume_is_exact(folder: Path, bases: Path, words: str) -> None:
    torch.set_num_threads(1)
    assert main(start(bases, "--out", "whole", *shlex.split(words))) == 0
    shutil.copytree("whole", "part")
    shutil.rmtree("part/checkpoints/step-00000004")
    torch.manual_seed(99)
    assert main(["retrofit", "--config", "whole/config.yaml", "--out", "part", "--resume"]) == 0
    assert losses("part") == losses("whole")
    last = "checkpoints/step-00000004/model.safetensors"
    assert Path("part", last).read_bytes() == Path("whole", last).read_bytes()
    assert Path("part/best/model.safetensors").read_bytes() == Path("whole/best/model.safetensors").read_bytes()


def test_a_run_that_goes_on_knows_its_own_settings(
    folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(start(bases, "--out", "run", "--lora.rank", "2")) == 0
    whole = losses("run")
    shutil.rmtree("run/checkpoints/step-00000004")
    shutil.move("run", "moved")
    assert main(["retrofit", "--resume", "--out", "moved"]) == 0
    assert losses("moved") == whole
    assert not Path("run").exists()
    said = mistake(["retrofit", "--out", "moved", "--resume", "--lora.rank", "4"], capsys)
    assert "another configuration" in said, "what is typed counts"
    assert "nowhere/config.yaml is not there" in mistake(["retrofit", "--out", "nowhere", "--resume"], capsys)
    assert "which base?" in mistake(["retrofit", "--out", "moved"], capsys)


def test_recomputing_strides_changes_nothing_but_memory(folder: Path, bases: Path) -> None:
    for out, words in (("a", []), ("b", ["--gradient_checkpointing"])):
        assert main(start(bases, "--out", out, *words)) == 0
    for (*a, x, u), (*b, y, v) in zip(losses("a"), losses("b"), strict=True):
        assert a == b
        assert x == pytest.approx(y, rel=1e-5)
        assert u == v == None if u is None else u == pytest.approx(v, rel=1e-4)  # noqa: E711


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        ("--lora.rank 0", {"recurrence"}),
        ("--train_base frozen", {"recurrence"}),
        ("--recurrence.slots 0", {"lora"}),
        ("--recurrence.slots 0 --train_base full", {"base"}),
        ("--lora.targets all-linear", {"recurrence", "lora"}),
        ("--lora.targets gate_proj --lora.alpha 3", {"recurrence", "lora"}),
    ],
)
def test_what_is_trained(folder: Path, bases: Path, words: str, trains: set[str]) -> None:
    assert main(start(bases, "--out", "run", "--steps", "1", *shlex.split(words))) == 0
    names = load_file("run/best/model.safetensors").keys()
    kinds = {"recurrence" if n.startswith("recurrence.") else "lora" if ".lora_" in n else "base" for n in names}
    assert kinds == trains
    lora = json.loads(Path("run/best/config.json").read_text()).get("lora")
    if "all-linear" in words:
        assert {name.split(".")[-4] for name in names if ".lora_" in name} == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
    elif "gate_proj" in words:
        assert (lora["target_modules"], lora["lora_alpha"]) == (["gate_proj"], 3)
    elif lora is not None:
        assert {name.split(".")[-4] for name in names if ".lora_" in name} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    load_model("run")


def test_fused_projections_get_lora_as_well(folder: Path, bases: Path) -> None:
    assert main(start(bases, "--out", "run", "--steps", "2", base="gpt2")) == 0
    tensors = load_file("run/checkpoints/step-00000002/model.safetensors")
    names = [name for name in tensors if ".lora_B." in name]
    assert {".".join(name.split(".")[-5:-3]) for name in names} == {"attn.c_attn", "attn.c_proj"}
    assert all(bool(tensors[name].any()) for name in names)  # they start at zero, and have moved


def test_the_module_and_the_base_learn_at_rates_of_their_own(folder: Path, bases: Path) -> None:
    for out, rate in (("a", "1e-3"), ("b", "1e-30")):
        assert main(start(bases, "--out", out, "--base_learning_rate", rate, "--weight_decay", "0")) == 0
    a, b = (load_file(f"{out}/checkpoints/step-00000004/model.safetensors") for out in "ab")
    lora = [name for name in a if ".lora_B." in name]
    assert all(bool(a[name].any()) for name in lora)
    assert all(float(b[name].abs().max()) < 1e-20 for name in lora)
    assert any(not torch.equal(b[n], load_file("b/checkpoints/step-00000002/model.safetensors")[n]) for n in b)


def test_explain_tells_and_does_nothing(folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["retrofit", "--base", str(bases / "llama"), "--explain", "--recurrence.window", "16"]
    before = sorted(folder.rglob("*"))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "layer 1 is read, and 2 is the lowest written: only the update is sequential" in out
    assert "adapter" in out
    assert main([*words, "--recurrence.read_layers", "2", "--recurrence.write_layers", "1"]) == 0
    assert "one stride after the other: layer 2 is read" in capsys.readouterr().out
    assert [path for path in sorted(folder.rglob("*")) if "cache" not in path.parts] == before


def test_what_needs_no_training_is_saved_at_once(folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lora.rank", "0", "--recurrence.slots", "0", "--recurrence.selected", "4"]
    assert main(start(bases, "--out", "run", *words)) == 0
    assert "nothing to train" in capsys.readouterr().out
    assert main(["eval", "run", "--device", "cpu"]) == 0
    assert "not empty" in mistake(start(bases, "--out", "run", *words), capsys)
    assert main(start(bases, "--out", "run", "--overwrite", *words)) == 0


def test_a_base_that_moved_is_found_by_another_name(
    folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bases / "llama", "mine")
    assert main(["retrofit", "--base", "mine", "--data", "my text.txt", *SMALL, "--out", "run"]) == 0
    shutil.move("mine", "moved")
    said = mistake(["generate", "run", "x"], capsys)
    assert "the base of run/best is not there" in said
    assert "--base" in said
    assert main(["generate", "run", "x", "--base", "moved", "--max_new_tokens", "2", "--device", "cpu"]) == 0
    assert "made for another base" in mistake(["generate", "run", "x", "--base", str(bases / "gpt2")], capsys)
    assert "no adapter" in mistake(["generate", "moved", "x", "--base", "moved"], capsys)
    shutil.rmtree("run/checkpoints/step-00000004")
    assert main(["retrofit", "--config", "run/config.yaml", "--base", "moved", "--resume"]) == 0
    weights = load_file("moved/model.safetensors")
    weights["model.norm.weight"] += 0.5
    from safetensors.torch import save_file

    save_file(weights, "moved/model.safetensors", {"format": "pt"})
    shutil.rmtree("run/checkpoints/step-00000004")
    resume = ["retrofit", "--config", "run/config.yaml", "--base", "moved", "--resume"]
    assert "weights that are not trained are others" in mistake(resume, capsys)
    assert "made for another base" in mistake(["eval", "run", "--base", "moved"], capsys)


def test_a_damaged_adapter_is_named(folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(start(bases, "--out", "run", "--steps", "1")) == 0
    weights, config = Path("run/best/model.safetensors"), Path("run/best/config.json")
    good = weights.read_bytes(), config.read_text()
    weights.write_bytes(good[0][:-9])
    assert "damaged" in mistake(["generate", "run", "x"], capsys)
    weights.unlink()
    assert "no model.safetensors" in mistake(["generate", "run", "x"], capsys)
    weights.write_bytes(good[0])
    tree = json.loads(good[1])
    tree["recurrence"]["slots"] = 5
    config.write_text(json.dumps(tree))
    assert "has shape" in mistake(["generate", "run", "x"], capsys)
    config.write_text(json.dumps(json.loads(good[1]) | {"recurrence": {"windows": 3}}))
    assert "windows" in mistake(["generate", "run", "x"], capsys)


def test_mistakes_before_anything_is_made(folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, base: str | Path = "llama") -> str:
        return mistake(start(bases, "--out", "run", *words, base=str(base)), capsys)

    assert "which base?" in mistake(["retrofit", "--data", "my text.txt"], capsys)
    assert "no folder nowhere" in mistake(["retrofit", "--base", "nowhere", "--data", "my text.txt"], capsys)
    assert "no text was given" in mistake(
        ["retrofit", "--base", str(bases / "llama"), "--recurrence.window", "16"], capsys
    )
    assert "missing.txt" in said("--data", "missing.txt")
    assert "window should be" in said("--recurrence.window", "0")
    assert "128" in said("--recurrence.window", "512")
    assert "64" in said("--recurrence.window", "128", base="gpt2")
    assert "absolute" in said("--recurrence.policy", "sliding", base="gpt2")
    assert "read_layers: 3 is no layer" in said("--recurrence.read_layers", "3")
    assert "write_layers: 9 is no layer" in said("--recurrence.write_layers", "9")
    assert "did you mean --recurrence.window" in said("--recurrence.windw", "3")
    assert "--train_base lora needs" in said("--train_base", "lora", "--lora.rank", "0")
    assert "lora.rank" in said("--lora.rank", "-1")
    assert "nothing_proj" in said("--lora.targets", "nothing_proj")
    assert "too short" in said("--window", "100000")

    t5 = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=257)
    T5ForConditionalGeneration(t5).save_pretrained("t5")
    assert "encoder-decoder" in said(base=folder / "t5")
    bert = BertConfig(vocab_size=257, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(bert).save_pretrained("bert")
    assert "cannot be a base" in said(base=folder / "bert")

    other = train_tokenizer(["some words and some more words"], "bpe", 260)
    other.save_pretrained("other")
    assert "does not match" in said("--tokenizer", "other")
    shutil.copytree(bases / "llama", "strange")
    other.save_pretrained("strange")
    assert "does not match" in said(base=folder / "strange")
    shutil.copytree(bases / "llama", "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("bare", name).unlink()
    assert "without a tokenizer" in said(base=folder / "bare")
    assert not Path("run").exists()
    assert not Path("runs").exists()
    assert main(start(bases, "--out", "run", "--tokenizer", "bytes", "--steps", "1", base=str(folder / "bare"))) == 0


def test_a_run_that_is_there_is_left_alone(folder: Path, bases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(start(bases, "--out", "run")) == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert "not empty" in mistake(start(bases, "--out", "run"), capsys)
    resume = start(bases, "--out", "run", "--resume")
    assert "another configuration" in mistake([*resume, "--lora.rank", "4"], capsys)
    assert "model.recurrence.slots 3 there, 4 here" in mistake([*resume, "--recurrence.slots", "4"], capsys)
    assert "another configuration" in mistake([*resume, "--train_base", "frozen"], capsys)
    assert {path: path.read_bytes() for path in before} == before
