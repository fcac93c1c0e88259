"""``undertow read`` and going on from what it saved, as a person does it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.cli.conftest import mistake
from undertow.cli import read as reading
from undertow.cli.main import main
from undertow.data import byte_tokenizer
from undertow.models import SRUppConfig, SRUppForCausalLM

RETROFITS = {
    "slots": "--recurrence.window 16 --recurrence.slots 3 --lora.rank 2",
    "disjoint": "--recurrence.window 16 --recurrence.slots 3 --recurrence.policy disjoint --lora.rank 0",
    "overlap": "--recurrence.window 16 --recurrence.slots 0 --recurrence.policy overlap --lora.rank 0",
    "selected": "--recurrence.window 16 --recurrence.slots 0 --recurrence.selected 4 --lora.rank 0",
}


@pytest.fixture(scope="module")
def models(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An SRU++ and retrofits of several kinds, all of them on bytes."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "projection_size": 8, "num_hidden_layers": 2, "attention_window": 8}
    for name in ("srupp", "other"):
        SRUppForCausalLM(SRUppConfig(**sizes, alpha_init=0.5)).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    (folder / "text.txt").write_text("a line of text\n" * 40)
    small = "--steps 1 --batch_size 1 --window 64 --eval_every 0 --device cpu --tensorboard false --learning_rate 0.1"
    for name, words in RETROFITS.items():
        data = ["--data", str(folder / "text.txt"), "--out", str(folder / name), "--quiet"]
        words = f"{words} {small}"
        assert main(["retrofit", "--base", str(bases / "llama"), *data, *shlex.split(words)]) == 0
    return {name: str(folder / name) for name in ("srupp", "other", *RETROFITS)}


def generated(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    options = ["--max_new_tokens", "12", "--stop", "false", "--echo", "false", "--device", "cpu"]
    assert main(["generate", *words, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["srupp", *RETROFITS])
@pytest.mark.parametrize("how", [["--temperature", "0"], ["--seed", "3"]], ids=["greedy", "sampled"])
def test_going_on_is_what_it_would_have_been(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str], kind: str, how: list[str]
) -> None:
    """Read in one go, in two, or given as a prompt: the same continuation."""
    model = models[kind]
    whole = Path("my text.txt").read_bytes()
    Path("first.txt").write_bytes(whole[:1000])
    Path("rest.txt").write_bytes(whole[1000:])
    straight = generated([model, whole.decode(), *how], capsys)
    read = ["--model", model, "--device", "cpu"]
    assert main(["read", "my text.txt", "--save", "whole.state", "--json", "whole.json", *read]) == 0
    assert generated([model, "--state", "whole.state", "--prompt", "", *how], capsys) == straight
    assert main(["read", "first.txt", "--save", "first.state", "--json", "first.json", *read]) == 0
    both = ["--state", "first.state", "--save", "both.state", "--json", "rest.json", "--window", "100"]
    assert main(["read", "rest.txt", *both, *read]) == 0
    assert generated([model, "--state", "both.state", "--prompt", "", *how], capsys) == straight
    # A prompt comes after what was read.
    assert generated([model, "--state", "first.state", "--prompt", whole[1000:].decode(), *how], capsys) == straight
    facts = {name: json.loads(Path(f"{name}.json").read_text()) for name in ("whole", "first", "rest")}
    assert facts["whole"]["tokens"] == facts["rest"]["tokens_so_far"] == len(whole)
    assert facts["first"]["nll"] + facts["rest"]["nll"] == pytest.approx(facts["whole"]["nll"], rel=1e-5)
    assert all(0 < fact["state_bytes"] < 20_000 for fact in facts.values())


def test_in_another_process(folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    model = models["slots"]
    words = ["--temperature", "0", "--max_new_tokens", "8", "--stop", "false", "--echo", "false", "--device", "cpu"]
    straight = generated([model, Path("my text.txt").read_text(), "--temperature", "0"], capsys)
    assert main(["read", "my text.txt", "--model", model, "--save", "s.state", "--device", "cpu"]) == 0
    command = [sys.executable, "-m", "undertow", "generate", model, "--state", "s.state", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stderr == b""
    assert straight.startswith(done.stdout.decode().removesuffix("\n"))


def test_what_it_tells_is_the_evaluators(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("srupp", "slots"):
        assert main(["read", "my text.txt", "--model", models[kind], "--json", "r.json", "--device", "cpu"]) == 0
        assert "perplexity per token" in capsys.readouterr().out
        assert main(["eval", models[kind], "--data", "my text.txt", "--json", "e.json", "--device", "cpu"]) == 0
        r, e = (json.loads(Path(name).read_text()) for name in ("r.json", "e.json"))
        for key in ("nll", "perplexity", "perplexity_per_word", "bits_per_byte"):
            assert r[key] == pytest.approx(e[key], rel=1e-4), key
        assert r["tokens"] == e["targets"]
    quick = ["--score", "false", "--json", "q.json", "--save", "q.state", "--device", "cpu"]
    assert main(["read", "my text.txt", "--model", models["srupp"], *quick]) == 0
    assert json.loads(Path("q.json").read_text())["perplexity"] is None
    assert main(["read", "my text.txt", "--model", models["srupp"], "--save", "r.state", "--device", "cpu"]) == 0
    with safe_open("q.state", "pt") as q, safe_open("r.state", "pt") as r:
        assert q.keys() == r.keys()
        assert all(torch.equal(q.get_tensor(name), r.get_tensor(name)) for name in q.keys())  # noqa: SIM118


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 100])
@pytest.mark.parametrize("blocks", [[7], [1, 1, 5], [0, 3, 4], [6, 0, 1]])
@pytest.mark.parametrize("first", [None, 9])
def test_pieces_overlap_by_a_token(window: int, blocks: list[int], first: int | None) -> None:
    ids = list(range(20, 20 + sum(blocks)))
    parts, at = [], 0
    for n in blocks:
        parts.append(np.array(ids[at : at + n]))
        at += n
    pieces = [piece.tolist() for piece in reading._pieces(parts, first, window)]
    joined = [pieces[0][0]] + [token for piece in pieces for token in piece[1:]]
    assert joined == ([] if first is None else [first]) + ids
    assert all(a[-1] == b[0] for a, b in pairwise(pieces))
    assert {len(piece) for piece in pieces[:-1]} <= {window + 1}
    assert 2 <= len(pieces[-1]) <= window + 1


def test_a_text_of_one_token(folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("a")
    how = ["--temperature", "0"]
    for kind in ("srupp", "slots"):
        straight = generated([models[kind], "a", *how], capsys)
        assert main(["read", "a.txt", "--model", models[kind], "--save", f"{kind}.state", "--device", "cpu"]) == 0
        assert generated([models[kind], "--state", f"{kind}.state", "--prompt", "", *how], capsys) == straight


def test_mistakes_before_any_work(
    folder: Path, models: dict[str, str], bases: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    book, srupp, slots = "my text.txt", models["srupp"], models["slots"]
    for name, model in (("srupp", srupp), ("slots", slots)):
        assert main(["read", book, "--model", model, "--save", f"{name}.state", "--device", "cpu"]) == 0

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it read all the same")

    monkeypatch.setattr(reading, "read_text", never)
    monkeypatch.setattr("undertow.cli.generate.write", never)
    assert "which text?" in mistake(["read", "--model", srupp], capsys)
    assert "which model?" in mistake(["read", book], capsys)
    assert "nowhere.txt" in mistake(["read", "nowhere.txt", "--model", srupp], capsys)
    assert "carries no state" in mistake(["read", book, "--model", str(bases / "llama")], capsys)
    assert "carries no state" in mistake(["generate", str(bases / "llama"), "x", "--state", "srupp.state"], capsys)
    assert "window should be" in mistake(["read", book, "--model", srupp, "--window", "0"], capsys)
    for command in (["read", book, "--model"], ["generate", "--prompt", "x", "--model"]):
        for mine, other in (
            ("srupp", models["other"]),
            ("srupp", slots),
            ("slots", srupp),
            ("slots", models["disjoint"]),
        ):
            assert "state of another model" in mistake([*command, other, "--state", f"{mine}.state"], capsys)
        assert "there is no state" in mistake([*command, srupp, "--state", "none.state"], capsys)
        assert "is a folder" in mistake([*command, srupp, "--state", "."], capsys)
        weights = str(Path(srupp, "model.safetensors"))
        assert "no state that undertow read" in mistake([*command, srupp, "--state", weights], capsys)
        Path("cut.state").write_bytes(Path("srupp.state").read_bytes()[:-5])
        assert "damaged" in mistake([*command, srupp, "--state", "cut.state"], capsys)
        assert "damaged" in mistake([*command, srupp, "--state", book], capsys)
    before = Path("srupp.state").read_bytes()
    assert "is there already" in mistake(["read", book, "--model", srupp, "--save", "srupp.state"], capsys)
    assert "is a folder" in mistake(["read", book, "--model", srupp, "--save", "."], capsys)
    assert "is a file" in mistake(["read", book, "--model", srupp, "--save", "srupp.state/x"], capsys)
    assert Path("srupp.state").read_bytes() == before
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizer_models

    big = {f"w{i}": i for i in range(300)} | {"<unk>": 300}
    Tokenizer(tokenizer_models.WordLevel(big, unk_token="<unk>")).save("big.json")
    assert "does not match" in mistake(["read", book, "--model", srupp, "--tokenizer", "big.json"], capsys)
    assert "does not match" in mistake(["generate", srupp, "x", "--tokenizer", "big.json"], capsys)
    # The state is of another model: that is the matter, not that the tokenizers are of different sizes.
    shutil.copytree(models["srupp"], "large")
    large = SRUppForCausalLM(SRUppConfig(vocab_size=301, hidden_size=16, projection_size=8, num_hidden_layers=1))
    large.save_pretrained("large")
    Tokenizer.from_file("big.json").save("large/tokenizer.json")
    mark = asdict(reading.open_bookmark("srupp.state")) | {"model": "x", "last": 300}
    rewrite("srupp.state", "large.state", undertow_reading=json.dumps(mark))
    assert "state of another model" in mistake(["generate", srupp, "x", "--state", "large.state"], capsys)
    assert "state of another model" in mistake(["read", book, "--model", "large", "--state", "srupp.state"], capsys)


def test_files_that_would_be_replaced(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    book, read = "my text.txt", ["--model", models["srupp"], "--device", "cpu"]
    assert main(["read", book, *read, "--save", "s.state", "--json", "new/r.json"]) == 0
    assert main(["read", book, *read, "--json", "new/r.json"]) == 0, "an earlier result may be replaced"
    Path("link.txt").symlink_to(book)
    Path("notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it read all the same")

    monkeypatch.setattr(reading, "read_text", never)
    monkeypatch.setattr("undertow.evaluate.evaluate", never)
    for command in (["read", book, *read], ["eval", models["srupp"], "--data", book]):
        assert "is a folder" in mistake([*command, "--json", "new"], capsys)
        assert "notes.txt is a file" in mistake([*command, "--json", "notes.txt/r.json"], capsys)
        assert "holds no JSON" in mistake([*command, "--json", "notes.txt"], capsys)
        for name in (book, "./link.txt"):
            assert "give it another name" in mistake([*command, "--json", name], capsys)
    assert "state --state" in mistake(["read", book, *read, "--state", "s.state", "--json", "./s.state"], capsys)
    assert "state --save" in mistake(["read", book, *read, "--save", "a", "--json", "./a"], capsys)
    said = mistake(["read", book, *read, "--save", "link.txt", "--overwrite"], capsys)
    assert "--save link.txt would replace the text my text.txt" in said
    assert "picture" in mistake(["eval", models["srupp"], "--data", book, "--plot", "a.png", "--json", "a.png"], capsys)
    # A text may be JSON, too.
    Path("d.json").write_text('{"a": 1}')
    assert "replace the text" in mistake(["eval", models["srupp"], "--data", "d.json", "--json", "d.json"], capsys)
    assert {path: path.read_bytes() for path in before} == before


def rewrite(source: str, target: str, **changed: str) -> None:
    """The state file ``source`` with other metadata."""
    with safe_open(source, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = file.metadata()
    save_file(tensors, target, meta | changed)


@pytest.mark.parametrize("kind", ["srupp", "slots"])
def test_damaged_states_are_named(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    model = models[kind]
    assert main(["read", "my text.txt", "--model", model, "--save", "s.state", "--device", "cpu"]) == 0
    mark = asdict(reading.open_bookmark("s.state"))
    with safe_open("s.state", "pt") as file:
        others = [name for name in file.metadata() if name != "undertow_reading"]
    bad: list[dict[str, str]] = [
        {"undertow_reading": text} for text in ("", "{", "[]", "3", "null", "[" * 100_000, '{"model": "x"}')
    ]
    for changed in ({"tokens": -1}, {"tokens": "9"}, {"tokens": 1.5}, {"last": None}, {"last": -3}, {"last": 10**6},
                    {"last": True}, {"model": 3}, {"tokenizer": None}, {"more": 1}):  # fmt: skip
        bad.append({"undertow_reading": json.dumps(mark | changed)})
    bad.append({"undertow_reading": json.dumps(mark | {"digest": "0"})})
    bad += [{name: text} for name in others for text in ("", "[]", "{}", "null", "{")]
    for changed in bad:
        rewrite("s.state", "bad.state", **changed)
        for command in (["read", "my text.txt", "--model"], ["generate", "--prompt", "x", "--model"]):
            assert "bad.state" in mistake([*command, model, "--state", "bad.state", "--device", "cpu"], capsys), changed


@pytest.mark.parametrize("kind", ["srupp", "slots"])
def test_a_single_number_that_changed_is_noticed(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    assert main(["read", "my text.txt", "--model", models[kind], "--save", "s.state", "--device", "cpu"]) == 0
    with safe_open("s.state", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = file.metadata()
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float32 and tensor.numel() > 1)
    changed = tensors[name].clone()
    changed.view(-1)[-1] += 1
    kept = {other: tensor for other, tensor in tensors.items() if other != name}
    for bad in (kept, kept | {name: changed}, kept | {name: tensors[name].to(torch.int32)}):
        save_file(bad, "bad.state", meta)
        for command in (["read", "my text.txt", "--model"], ["generate", "--prompt", "x", "--model"]):
            said = mistake([*command, models[kind], "--state", "bad.state", "--device", "cpu"], capsys)
            assert "bad.state is damaged" in said


@pytest.mark.parametrize("error", [KeyError("k"), TypeError("t"), AttributeError("a"), RuntimeError(), ValueError("v")])
def test_whatever_a_state_fails_with_the_file_is_named(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: Any, error: Exception
) -> None:
    def fail(*args: Any) -> Any:
        raise error

    assert main(["read", "my text.txt", "--model", models["srupp"], "--save", "s.state", "--device", "cpu"]) == 0
    monkeypatch.setattr("undertow.evaluate.protocol.load_state", fail)
    assert "s.state" in mistake(["generate", models["srupp"], "x", "--state", "s.state", "--device", "cpu"], capsys)


def test_a_state_that_cannot_be_written_leaves_the_old_one(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["read", "my text.txt", "--model", models["srupp"], "--save", "s.state", "--device", "cpu"]
    assert main(words) == 0
    before = Path("s.state").read_bytes()
    from undertow.data import files

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "sync", full)
    assert "No space left on device" in mistake([*words, "--overwrite"], capsys)
    assert Path("s.state").read_bytes() == before
    assert sorted(path.name for path in folder.glob(".*")) == []
    assert reading.open_bookmark("s.state").tokens == len(Path("my text.txt").read_bytes())
