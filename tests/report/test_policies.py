"""The table and the picture of several ways to read, from records alone."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from undertow.report import document_table, policy_table, position_plot
from undertow.report.policies import explanations


def record(policy: str = "sliding", model: str = "runs/a", **changes: Any) -> dict[str, Any]:
    """As ``PolicyResult.as_dict`` gives it."""
    loss = 3.5
    made: dict[str, Any] = {
        "model": model,
        "policy": policy,
        "control": None,
        "note": f"how {policy} reads",
        "memory": {"window": 256, "slots": 0, "selected": 0, "sinks": 4, "stride": 64, "remembered": 256},
        "flops_per_token": 2.5e8,
        "peak_memory_bytes": 1 << 30,
        "peak_memory_of": "resident set",
        "state_bytes": 12345678,
        "loss": loss,
        "perplexity": math.exp(loss),
        "perplexity_per_word": 98.7654,
        "bits_per_byte": 1.2345,
        "tokens_per_second": 1234.5,
        "targets": 25_000,
        "documents": 2,
        "bos_token_id": 0,
        "skip_tokens": 0,
        "per_document_tokens": None,
        "cut": False,
        "loss_by_position": [loss + 3 / (i + 1) for i in range(256)],
        "targets_by_position": [100] * 256,
        "by_document": [
            {"name": "emma.txt", "targets": 20_000, "nll": 1.0, "perplexity": 31.25},
            {"name": "frankenstein.txt", "targets": 5_000, "nll": 1.0, "perplexity": 42.75},
        ],
    }
    return made | changes


def printed(records: list[dict[str, Any]], of: Any = policy_table, width: int = 80) -> str:
    file = io.StringIO()
    of(records, Console(file=file, width=width, highlight=False))
    return file.getvalue()


def test_every_figure_fits_a_terminal_of_80_columns() -> None:
    records = [record(p) for p in ("carry", "disjoint", "overlap", "sliding", "select", "everything")]
    records.insert(1, record("carry", control="states swapped", perplexity=math.exp(3.6)))
    text = printed(records)
    words = text.split()
    for cell in ("runs/a", "everything", "256", "33.12", "98.77", "1.2345", "250", "1,234", "1,024", "12,056"):
        assert cell in words, cell
    assert "states swapped" in text
    table = text[: text.index("carry: how")].splitlines()
    assert all(len(line.rstrip()) <= 80 for line in table)
    assert len(table) == 1 + 2 + 7, "title, names in two lines, one line a way of reading"


def test_models_stand_one_below_the_other() -> None:
    text = printed([record(model="runs/a"), record(model="runs/b"), record("carry", model="runs/b")])
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines.index("runs/a") < lines.index("runs/b")
    assert sum(line.startswith("  sliding") for line in lines) == 2
    assert sum(line.startswith("sliding: ") for line in lines) == 1, "the same is not explained twice"


def test_what_the_reader_is_told() -> None:
    own = record("carry", cut=True, skip_tokens=2048, per_document_tokens=8192)
    worse = record("carry", control="states swapped", perplexity=own["perplexity"] * 1.05)
    lines = "\n".join(explanations([own, worse]))
    assert "separator (id 0), never scored" in lines
    assert "25,000 tokens of 2 documents scored, each once" in lines
    assert "first 2,048 tokens of each document were read and not scored" in lines
    assert "up to its token 8,192" in lines
    assert "in proportion" in lines
    assert "perplexity is 5.00% higher: so much is memory of the text itself" in lines
    assert "and the first 4 of the text" in lines
    assert "Peak: resident set" in lines
    better = worse | {"perplexity": own["perplexity"] * 0.99}
    assert "1.00% lower: memory of the text itself helped nothing" in "\n".join(explanations([own, better]))
    select = record("select"), record("select", control="by chance", perplexity=40.0)
    assert "keys kept at random; perplexity is 20.79% higher: so much is the choice" in "\n".join(explanations(select))
    memory = record()["memory"] | {"slots": 8}
    alone = "\n".join(explanations([record("carry", documents=1, memory=memory)]))
    assert "no states were swapped" in alone
    bare = "\n".join(explanations([record(bos_token_id=None)]))
    assert "its first token is not scored" in bare


def test_models_with_tokens_of_their_own() -> None:
    lines = "\n".join(explanations([record(), record(model="runs/b", targets=30_000, bos_token_id=7)]))
    assert "compare them by word and by byte" in lines
    assert "separator (id 0, 7)" in lines
    text = printed([record(), record(model="/somewhere/far/away/runs/books-1/best")])
    assert "…/books-1/best" in text


def test_unknown_figures_are_dashes() -> None:
    text = printed([record(perplexity_per_word=None, bits_per_byte=None, state_bytes=None, peak_memory_bytes=None)])
    assert text.count("–") == 4
    assert "1.1e+08" in printed([record(perplexity_per_word=113289251.9)]).split()


def test_documents_side_by_side() -> None:
    text = printed([record(), record("disjoint"), record(model="runs/b")], document_table, 120)
    words = text.split()
    assert words.count("42.75") == 3
    assert "20,000" in words
    assert "frankenstein.txt" in words


def test_a_document_that_one_model_did_not_score() -> None:
    other = record("disjoint", by_document=record()["by_document"][:1])
    assert printed([record(), other], document_table).count("–") == 1


def test_picture(tmp_path: Path) -> None:
    records = [
        record("disjoint"),
        record("sliding", loss_by_position=[3.5] * 64, targets_by_position=[400] * 64),
        # An overlap: hardly anything falls on the first half.
        record("overlap", targets_by_position=[2] * 128 + [200] * 128),
        record("carry", control="states swapped", loss_by_position=[None] * 256, targets_by_position=[0] * 256),
    ]
    path = position_plot(records, tmp_path / "pictures" / "windows.png", title="A book")
    image = Image.open(path).convert("L")
    assert image.width > 800
    assert image.getextrema() == (0, 255)
    assert sum(image.histogram()[:128]) < 0.1 * image.width * image.height, "light ground, dark lines"
    with pytest.raises(ValueError, match="no loss by position"):
        position_plot(records[-1:], tmp_path / "x.png")
    with pytest.raises(ValueError, match="no result"):
        position_plot([], tmp_path / "x.png")
