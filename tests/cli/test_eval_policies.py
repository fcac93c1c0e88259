"""``undertow eval --policy …`` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

import undertow
from undertow.cli.main import main
from undertow.data import byte_tokenizer
from undertow.models import SRUppConfig, SRUppForCausalLM
from undertow.retrofit import RecurrenceConfig

from .conftest import mistake

TEXT = ["--data", "my text.txt", "other.txt", "--device", "cpu"]


@pytest.fixture
def place(folder: Path) -> Path:
    """The folder with a second, shorter text."""
    (folder / "other.txt").write_text("".join(f"another text counts {i}, and so on\n" for i in range(20)))
    (folder / "my text.txt").write_text("".join(f"line {i} of a text about nothing\n" for i in range(20)))
    return folder


@pytest.fixture(scope="module")
def models(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bases, an SRU++, and an adapter with open gates, by name."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = SRUppConfig(hidden_size=12, projection_size=6, num_hidden_layers=2, attention_window=15, alpha_init=0.3)
    SRUppForCausalLM(config).save_pretrained(folder / "srupp")
    base = AutoModelForCausalLM.from_pretrained(bases / "llama")
    model: Any = undertow.add_recurrence(
        base, RecurrenceConfig(window=24, slots=8, update="tanh"), base_name=str(bases / "llama")
    )
    with torch.no_grad():
        for name, parameter in model.recurrence.named_parameters():
            parameter.fill_(1.0) if "gate" in name else parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    for name in ("srupp", "adapter"):
        byte_tokenizer().save_pretrained(folder / name)
    return {name: str((folder if name in ("srupp", "adapter") else bases) / name) for name in
            ("llama", "gpt2", "srupp", "adapter")}  # fmt: skip


def test_policies_side_by_side(place: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", models["llama"], *TEXT, "--policy", "disjoint", "overlap", "sliding", "everything"]
    assert main([*words, "--remembered", "32", "--json", "r/a.json", "--plot", "r/a.png", "--documents"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads((place / "r" / "a.json").read_text())
    found = {record["policy"]: record for record in facts["policies"]}
    assert list(found) == ["disjoint", "overlap", "sliding", "everything"]
    for policy, record in found.items():
        assert f"\n{policy} " in out
        assert f"{policy}: " in err, "a line when it is done, where nobody watches a bar"
        assert record["targets"] == record["bytes"] == sum(Path(n).stat().st_size for n in ("my text.txt", "other.txt"))
        assert record["model"] == models["llama"]
        assert record["bos_token_id"] == 256
        assert {d["name"] for d in record["by_document"]} == {"my text.txt", "other.txt"}
        assert record["flops_per_token"] > 0
        assert record["tokens_per_second"] > 0
        assert record["peak_memory_bytes"] > 1 << 20
        assert record["state_bytes"] > 0
        assert sum(record["targets_by_position"]) == record["targets"]
    assert {found[p]["memory"]["remembered"] for p in ("disjoint", "overlap", "sliding")} == {32}
    assert found["overlap"]["flops_per_token"] > 1.5 * found["disjoint"]["flops_per_token"]
    assert "Perplexity a token, by document" in out
    assert Image.open(place / "r" / "a.png").width > 800
    # What stood at the top without a policy stands there still: the first result.
    for key in ("model", "data", "nll", "loss", "bits_per_byte", "perplexity", "state_carried", "documents", "window"):
        assert key in facts
    assert facts["nll"] == found["disjoint"]["nll"]


def test_a_line_tells_the_time_of_its_own_policy(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from undertow.cli import eval as evaluating

    clock = iter([10.0, 13.0, 20.0, 25.0])
    monkeypatch.setattr(evaluating.time, "perf_counter", lambda: next(clock))
    with evaluating.telling() as tell:
        for way in ("sliding", "disjoint"):
            for done in (0, 4, 8):
                tell(way, done, 8)
    lines = [line for line in capsys.readouterr().err.splitlines() if "scored" in line]
    assert lines == ["sliding: 8 tokens scored, 3 s", "disjoint: 8 tokens scored, 5 s"]


def test_an_adapter_shows_its_control_unasked(
    place: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", models["adapter"], *TEXT, "--json", "a.json"]) == 0
    carry, swapped = json.loads(Path("a.json").read_text())["policies"]
    assert (carry["control"], swapped["control"]) == (None, "states swapped")
    assert carry["nll"] != swapped["nll"]
    assert "states swapped: each text read with what was remembered of another" in capsys.readouterr().out
    assert main(["eval", models["adapter"], *TEXT, "--json", "a.json", "--controls", "false"]) == 0
    assert len(json.loads(Path("a.json").read_text())["policies"]) == 1


def test_base_and_retrofit_in_one_table(
    place: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both at what the adapter remembers; what the base cannot do is said."""
    words = ["eval", models["llama"], models["adapter"], *TEXT, "--policy", "carry,sliding", "--json", "two.json"]
    assert main(words) == 0
    out = capsys.readouterr().out
    records = json.loads(Path("two.json").read_text())["policies"]
    found = [(Path(r["model"]).name, r["policy"], r["control"]) for r in records]
    assert found == [
        ("llama", "sliding", None),
        ("adapter", "carry", None),
        ("adapter", "carry", "states swapped"),
        ("adapter", "sliding", None),
    ]
    assert {r["memory"]["remembered"] for r in records} == {32}
    assert records[0]["nll"] == pytest.approx(records[3]["nll"]), "it is the same base"
    assert "left out for" in out
    assert "LlamaForCausalLM carries no state" in out


def test_models_without_policies_are_each_read_in_their_own_way(place: Path, models: dict[str, str]) -> None:
    words = ["eval", models["srupp"], "--model", models["gpt2"], *TEXT, "--json", "two.json"]
    assert main(words) == 0
    records = json.loads(Path("two.json").read_text())["policies"]
    assert [(r["policy"], r["memory"]["remembered"]) for r in records] == [("carry", 16), ("disjoint", 16)]


def test_parts_of_documents(place: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    part = ["--skip_tokens", "100", "--per_document_tokens", "300"]
    assert main(["eval", models["srupp"], *TEXT, *part, "--json", "a.json"]) == 0
    assert main(["eval", models["srupp"], *TEXT, *part, "--policy", "carry", "--json", "b.json"]) == 0
    plain, carried = (json.loads(Path(f"{name}.json").read_text()) for name in "ab")
    assert plain["targets"] == 400
    assert carried["policies"][0]["nll"] == pytest.approx(plain["nll"], rel=1e-6)
    assert "scored in part" in capsys.readouterr().out


def test_mistakes(place: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    def said(model: str, *words: str) -> str:
        return mistake(["eval", models[model], *TEXT, *words], capsys)

    assert "no policy 'slidng' (did you mean sliding?)" in said("llama", "--policy", "slidng")
    assert "policy sliding needs rotary positions" in said("gpt2", "--policy", "sliding", "disjoint")
    assert "policy carry: LlamaForCausalLM carries no state" in said("llama", "--policy", "carry")
    assert "carries a state of its own" in said("srupp", "--policy", "carry", "sliding")
    assert "policy disjoint: window 65 needs 65 positions" in said("gpt2", "--policy", "disjoint", "--remembered", "65")
    assert "policy everything: window 200" in said("llama", "--policy", "everything", "--context", "200")
    assert "remembered should be at least 1, not 0" in said("llama", "--policy", "disjoint", "--remembered", "0")
    assert "window should be at least 1, not 0" in said("srupp", "--policy", "carry", "--window", "0")
    assert "remembers 32 positions, not 64" in said("adapter", "--policy", "carry", "--remembered", "64")
    assert "no document has a token after" in said("srupp", "--policy", "carry", "--skip_tokens", "100000")
    assert "a picture's name ends in" in said("srupp", "--policy", "carry", "--plot", "x.tiff2")
    assert "is no adapter, so it has no base" in said("srupp", "--policy", "carry", "--base", models["gpt2"])
    assert "no folder nowhere" in mistake(["eval", models["llama"], "nowhere", *TEXT], capsys)
    assert "no policy" in mistake(["eval", *TEXT, "--policy", "sliding", models["llama"], "--model", "x"], capsys)
    assert not Path("x.tiff2").exists()
