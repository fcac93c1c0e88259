"""undertow bench, as a person calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from undertow.bench import SCHEMA, SUITES, Options, Record, Row, decode, ops, peers, suite, train
from undertow.bench.suites import sizes
from undertow.cli.main import main

TINY = "T8-B2-d16-p4-l1"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """All suites in smoke size: the facts, what was printed, the picture."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", "new/bench.json", "--picture", "new/bench.png"]
    run = subprocess.run(
        [sys.executable, "-m", "undertow", "bench", "all", "--smoke", "--repeats", "1", *files],
        cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "new/bench.json").read_text()), run.stdout, folder / "new/bench.png"


def test_every_suite_runs_and_writes_what_the_documentation_says(everything: Any) -> None:
    facts, _, _ = everything
    assert list(facts) == ["schema", "undertow", "options", "machine", "limits", "skipped", "rows"]
    assert facts["schema"] == SCHEMA
    assert facts["machine"]["cores"] >= 1
    assert facts["options"]["suites"] == ["all"]
    for name in SUITES:
        rows = [row for row in facts["rows"] if row["suite"] == name]
        skipped = {each["case"] for each in facts["skipped"] if each["suite"] == name}
        assert {row["case"] for row in rows} | skipped == set(suite(name).SMOKE)
        assert rows, f"{name} measured nothing: {facts['skipped']}"
    for row in facts["rows"]:
        assert set(row) == {field.name for field in fields(Row)}
        if row["peer"] is not None:
            assert row["ours"] > 0
            assert row["theirs"] > 0
            assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["limit_fraction"] is None or row["limit_fraction"] > 0
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    for key in [*facts, *(field.name for field in fields(Row))]:
        assert f"`{key}`" in page, f"docs/performance.md does not explain {key}"


def test_what_is_printed(everything: Any) -> None:
    facts, printed, _ = everything
    for row in facts["rows"]:
        assert f"{row['suite']} {row['case']}" in printed
        assert (row["peer"] or "") in printed
    for each in facts["skipped"]:
        assert each["what"] in printed


def test_the_picture(everything: Any) -> None:
    image = Image.open(everything[2]).convert("L")
    assert image.width > 800
    assert image.getextrema() == (0, 255)


def test_threads_are_as_before_after_the_scaling_was_measured() -> None:
    threads = torch.get_num_threads()
    record = Record()
    try:
        torch.set_num_threads(2)
        train.run({f"threads-{TINY}": ()}, Options(repeats=1, smoke=True), record)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert {row.metric for row in record.rows} == {
        "forward_2_threads_tokens_per_second", "train_2_threads_tokens_per_second",
        "products_2_threads_flop_per_second", "copy_2_threads_bytes_per_second",
    }  # fmt: skip
    assert {row.peer for row in record.rows} == {"1 thread"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which suite"),
        (["speed"], "no suite 'speed'"),
        (["train", "--cases", "T1"], "named like T256-B8-d512-p128-l4"),
        (["train", "--cases", "T8-B2-d16-p4-l0"], "named like"),
        (["train", "--cases", "lengths-from256-to300-d512-p128-l4-w512"], "doubled"),
        (["ops", "train", "--cases", "T1"], "named like"),
        (["retrofit", "--cases", "slots-W12-T24"], "multiple of 8"),
        (["memory", "--cases", "sleep"], "write-n50000"),
        (["startup", "--cases", "later"], "import or forward"),
        (["ops", "--peers", "sru"], "no peer 'sru' in this suite; there is copy"),
        (["memory", "--peers", "sru"], "there are none"),
        (["ops", "--repeats", "0"], "repeats should be at least 1"),
        (["ops", "--device", "tpu"], "cpu or cuda"),
        (["decode", "--precisions", "float8"], "no precision 'float8'"),
        (["decode", "--gguf", "none.gguf"], "no file none.gguf"),
        (["retrofit", "--base", "no-such-folder"], "no folder no-such-folder"),
        (["memory", "--text", "no-such-text"], "no-such-text"),
        (["ops", "--json", "."], "is a folder"),
        (["ops", "--picture", "bench.txt"], "should end with .png"),
        (["ops", "--json", "x.png", "--picture", "x.png"], "would replace the picture"),
    ],
)
def test_mistakes_are_told_in_a_line_before_anything_is_measured(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in SUITES:
        monkeypatch.setattr(suite(name), "run", lambda *_: pytest.fail("it measured"))
    assert main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_was_measured_before_an_error_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(train, "run", fails)
    path = tmp_path / "bench.json"
    assert main(["bench", "ops", "train", "--smoke", "--repeats", "1", "--json", str(path)]) == 2
    said = capsys.readouterr()
    assert "the disk is full" in said.err
    assert "forward, float32" in said.out
    assert {row["suite"] for row in json.loads(path.read_text())["rows"]} == {"ops"}


def test_cases_go_to_the_suites_that_know_them(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ["--cases", TINY, "T8-B2-d16", "--peers", "lstm", "--repeats", "1", "--json", str(path)]
    assert main(["bench", "train", "ops", *words]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {(row["suite"], row["case"]) for row in rows} == {("train", TINY), ("ops", "T8-B2-d16")}
    of_others = {row["peer"] for row in rows} - {None, "undertow float32"}
    assert of_others == {"torch LSTM"}
    metrics = {row["metric"] for row in rows if row["suite"] == "train"}
    assert metrics == {"train_tokens_per_second", "forward_tokens_per_second"}


def test_a_peer_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PACKAGES, "sru", ("no_such_package", "sru==3.0.0.dev6"))
    said: list[str] = []
    record = Record(said.append)
    train.run({TINY: ("sru",)}, Options(repeats=1, smoke=True), record)
    assert [(each.what, each.reason) for each in record.skipped] == [
        ("sru", "not installed: pip install sru==3.0.0.dev6")
    ]
    assert f"train, {TINY}: without sru: not installed: pip install sru==3.0.0.dev6" in said
    assert {row.peer for row in record.rows if row.dtype == "float32"} == {None}


@pytest.mark.parametrize("where", ["making", "forward", "training"])
def test_a_peer_that_fails_is_left_out_with_the_reason(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            if where == "forward" or self.training:
                raise RuntimeError("cannot go on\nand more")
            return super().forward(x)

    def make(shape: peers.Shape) -> peers.Layers:
        if where == "making":
            raise OSError("cannot go on")
        module = Bad(4, 4)
        return peers.Layers("bad", module, torch.randn(2, 4), module)

    monkeypatch.setitem(peers.LAYERS, "mambapy", make)
    monkeypatch.setitem(peers.PACKAGES, "mambapy", ("torch", ""))
    record = Record()
    train.run({TINY: ("mambapy", "gru")}, Options(repeats=1, smoke=True), record)
    assert "it failed" in record.skipped[0].reason
    assert record.skipped[0].reason.endswith("Error: cannot go on")
    by_metric = {
        metric: {row.peer for row in record.rows if row.metric.startswith(metric) and row.dtype == "float32"}
        for metric in ("forward", "train")
    }
    assert by_metric["train"] == {"torch GRU"}
    assert by_metric["forward"] == ({"torch GRU", "bad"} if where == "training" else {"torch GRU"})


def test_weights_of_every_precision_are_read_as_fast_as_their_bytes_allow() -> None:
    record = Record()
    decode.run({"d16-p4-l1-n10": ()}, Options(repeats=1, smoke=True), record)
    assert [(row.dtype, row.peer) for row in record.rows] == [
        ("float32", None), ("bfloat16", "undertow float32"), ("int8", "undertow float32"),
    ]  # fmt: skip
    read = [int(limit.what.split()[1].replace(",", "")) for limit in record.limits]
    assert read[0] == 2 * read[1] > 2 * read[2]


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_name_tells_its_sizes(T: int, B: int, d: int) -> None:
    assert ops.check(f"T{T}-B{B}-d{d}") == {"T": T, "B": B, "d": d}


@given(st.text("TBdp-0123456789 ", max_size=12))
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="named like T256-B8-d512"):
        sizes(f"{name}x", "T256-B8-d512")


def test_all_documented_cases_are_named_as_their_suites_want() -> None:
    for name in SUITES:
        for case, wanted in {**suite(name).CASES, **suite(name).SMOKE}.items():
            suite(name).check(case)
            assert set(wanted) <= set(suite(name).PEERS)
