"""Pictures and tables from records alone."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from undertow.report import learning_curve, ratios, read_metrics, table
from undertow.report.curve import smooth
from undertow.report.tables import number


def write(folder: Path, count: int, per_byte: bool = True, valid: bool = True) -> Path:
    """A run's records."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for i in range(1, count + 1):
        bits = 1.5 + 5 / i
        line = {"kind": "train", "step": 10 * i, "tokens": 1000 * i, "seconds": 3.0 * i, "bits_per_token": bits}
        lines.append(line | {"bits_per_byte": bits if per_byte else None})
        if valid and i % 5 == 0:
            lines.append(lines[-1] | {"kind": "valid"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("x", ["seconds", "step", "tokens"])
@pytest.mark.parametrize(("count", "per_byte", "valid"), [(1, True, False), (40, True, True), (300, False, True)])
def test_curve_is_drawn(tmp_path: Path, x: Any, count: int, per_byte: bool, valid: bool) -> None:
    run = write(tmp_path / "run", count, per_byte, valid)
    path = learning_curve(run, x=x, lines={"gzip -9": 1.9, "xz -9": 1.55}, title="A run")
    assert path == run / "curve.png"
    image = Image.open(path).convert("L")
    assert image.width > 800
    assert image.getextrema() == (0, 255)
    low = sum(image.histogram()[:128])
    assert low < 0.1 * image.width * image.height, "light ground, dark lines"


def test_curve_from_the_file_to_another_place(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 10)
    path = learning_curve(run / "metrics.jsonl", tmp_path / "pictures" / "c.svg")
    assert path.read_text().startswith("<?xml")


def test_records_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        learning_curve(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no training or validation records yet"):
        learning_curve(tmp_path)


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 3, valid=False)
    path = run / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "tra')
    assert len(read_metrics(run)["train"]) == 3
    path.write_text("nonsense\n" + whole)
    with pytest.raises(ValueError, match="line 1 is not a metrics line"):
        read_metrics(run)


def test_smoothing_keeps_lines_and_does_not_lag() -> None:
    line = [10.0 - 0.1 * i for i in range(100)]
    assert smooth(line)[:90] == pytest.approx(line[:90])
    assert smooth([3.0]) == [3.0]
    assert smooth([]) == []
    noise = [float(i % 2) for i in range(100)]
    assert all(0.3 < value < 0.7 for value in smooth(noise)[10:])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1441793, "1,441,793"),
        (1.623456, "1.6235"),
        (13823.4, "13,823"),
        (252.7, "252.70"),
        (None, "–"),
        (True, "yes"),
        ("a", "a"),
    ],
)
def test_numbers(value: object, text: str) -> None:
    assert number(value) == text


def test_table_holds_every_cell() -> None:
    file = io.StringIO()
    table(
        [["ours", 1, 2.0], ["theirs", 3, None]],
        headers=["case", "n", "bits"],
        title="Comparison",
        console=Console(file=file, width=80),
    )
    words = file.getvalue().split()
    assert words == ["Comparison", "case", "n", "bits", "ours", "1", "2.0000", "theirs", "3", "–"]


def ratio_row(**more: Any) -> dict[str, Any]:
    """A row of a benchmark."""
    row = {"suite": "train", "case": "T8", "peer": "them", "metric": "train_tokens_per_second", "dtype": "float32"}
    return row | {"ratio": 2.0, "ratio_low": 1.5, "ratio_high": 2.5, "limit_fraction": 0.5} | more


def test_ratios_are_drawn_each_once(tmp_path: Path) -> None:
    rows = [ratio_row(), ratio_row(peer="others", ratio=0.01, ratio_low=0.009, ratio_high=0.02)]
    rows += [ratio_row(case="alone", peer=None, ratio=None), ratio_row(case="nothing", ratio=None, limit_fraction=None)]
    text = ratios(rows, tmp_path / "new" / "ratios.svg").read_text()
    labels = re.findall("<!-- (.*?) -->", text)
    drawn = [label for label in labels if label.startswith(("train, float32", "train  "))]
    assert sorted(drawn) == sorted([
        "train  T8", "train, float32: of the limit", "train, float32: them", "train, float32: others",
        "train  alone", "train, float32: of the limit",
    ])  # fmt: skip
    assert {"2x", "0.01x", "50%"} <= set(labels)


def test_no_ratio_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        ratios([ratio_row(ratio=None, limit_fraction=None)], tmp_path / "ratios.png")
    assert not list(tmp_path.iterdir())
