"""The learning curve of a run, from its metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal


def read_metrics(path: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """The lines of a metrics.jsonl by kind: ``{"train": [...], "valid": [...]}``.

    A last line that a kill cut short is left out.

    Args:
        path: the file, or the run's folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a line that is no JSON object (with its number).
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    kinds: dict[str, list[dict[str, Any]]] = {"train": [], "valid": []}
    lines = path.read_text(encoding="utf-8").splitlines()
    for index, text in enumerate(lines):
        try:
            line = json.loads(text)
            kinds.setdefault(line["kind"], []).append(line)
        except (ValueError, KeyError, TypeError):
            if index < len(lines) - 1:
                raise ValueError(f"{path}, line {index + 1} is not a metrics line: {text[:60]!r}") from None
    return kinds


def smooth(values: Sequence[float], share: float = 1 / 20) -> list[float]:
    """Mean over a window around each value, as wide as ``share`` of all and narrower at the start.

    Centred: a running mean of the past would lag behind a falling loss and draw it too high.
    """
    count = len(values)
    half = round(count * share / 2)
    out = []
    for index in range(count):
        before = min(half, index)
        part = values[index - before : index + min(before, count - 1 - index) + 1]
        out.append(sum(part) / len(part))
    return out


def learning_curve(
    run: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    x: Literal["seconds", "step", "tokens"] = "seconds",
    lines: Mapping[str, float] | None = None,
    title: str | None = None,
) -> Path:
    """Draw training and validation loss over time.

    Bits per byte where the records have them, else bits per token.

    Args:
        run: a run's folder or its metrics.jsonl.
        path: the picture; by default ``curve.png`` in the run's folder. The suffix gives the format.
        x: what runs along the bottom.
        lines: values to compare with, by name, drawn across: ``{"xz -9": 1.55}``.
        title: above the picture.

    Returns:
        The path of the picture.

    Raises:
        FileNotFoundError, ValueError: no records, or none to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    metrics = read_metrics(run)
    train, valid = metrics["train"], metrics["valid"]
    if not train and not valid:
        raise ValueError(f"{run} has no training or validation records yet")
    unit = "byte" if all(line.get("bits_per_byte") is not None for line in train + valid) else "token"
    key = f"bits_per_{unit}"

    # Minutes are read more easily than thousands of seconds.
    minutes = x == "seconds" and max(line[x] for line in train + valid) > 300
    time = "minutes of training" if minutes else "seconds of training"
    along = {"seconds": time, "step": "steps", "tokens": "tokens"}

    def places(records: list[dict[str, Any]]) -> list[float]:
        return [line[x] / 60 if minutes else line[x] for line in records]

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    blue, orange, grey = "#1f6fb4", "#d9660f", "#5f6670"
    if train:
        raw = [line[key] for line in train]
        axes.plot(places(train), raw, color=blue, alpha=0.25, linewidth=1)
        axes.plot(places(train), smooth(raw), color=blue, linewidth=2, label="training")
    if valid:
        at, values = places(valid), [line[key] for line in valid]
        axes.plot(at, values, color=orange, linewidth=1.2, marker="o", markersize=4.5, label="validation")
        best = min(range(len(values)), key=values.__getitem__)
        axes.annotate(
            f"{values[best]:.3f}", (at[best], values[best]), textcoords="offset points", xytext=(2, 7),
            ha="center", color=orange, fontsize=9, fontweight="bold",
        )  # fmt: skip

    # The first steps stand far above all that follows; cutting them off leaves room for what one wants to see.
    peers = dict(lines or {})
    settled = [line[key] for line in train[len(train) // 20 :] + valid] + list(peers.values())
    low, high = min(settled), max(settled)
    room = max(0.06 * (high - low), 0.02)
    axes.set_ylim(low - room, high + room)

    # Their names stand at the left, where the curves are still high above them.
    below = False
    for index, (name, value) in enumerate(sorted(peers.items(), key=lambda pair: -pair[1])):
        axes.axhline(value, color=grey, linewidth=1, linestyle=(0, (4, 3)) if index % 2 == 0 else (0, (1, 2)), zorder=0)
        axes.annotate(
            f"{name}  {value:.3f}", (0.0, value), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
            xytext=(4, -3 if below else 3), ha="left", va="top" if below else "bottom", color=grey, fontsize=9,
        )  # fmt: skip
        below = not below and any(0 < value - other < room for other in peers.values())
    if x == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _short(n)))
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.set_xlabel(along[x])
    axes.set_ylabel(f"bits per {unit}")
    axes.set_title(title or "", loc="left", fontsize=11)
    axes.set_xlim(left=0)
    axes.grid(color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    if path is None:
        folder = Path(run) if Path(run).is_dir() else Path(run).parent
        path = folder / "curve.png"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _short(number: float) -> str:
    if number == 0:
        return "0"
    power = min(3, int(math.log10(abs(number)) // 3))
    return f"{number / 1000**power:g}{['', 'k', 'M', 'G'][power]}"
