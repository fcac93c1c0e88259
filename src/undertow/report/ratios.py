"""The ratios of a benchmark, in a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BLUE, _ORANGE, _GREY, _LINE = "#1f6fb4", "#d9660f", "#5f6670", "#e3e6ea"


def ratios(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str | None = None) -> Path:
    """Draw how many times better ours is than each peer, and how near to the machine's limit.

    A dot is the median of the turns, the line through it reaches from the first to the third quartile; blue where ours
    is at least as good (to within 2%), orange where it is not, a grey diamond for the share of the limit.

    Args:
        rows: those of a benchmark's JSON (docs/performance.md); only ``suite``, ``case``, ``peer``, ``metric``,
            ``dtype``, ``ratio``, ``ratio_low``, ``ratio_high`` and ``limit_fraction`` are looked at.
        path: the picture; the suffix gives the format.
        title: above it.

    Returns:
        The path of the picture.

    Raises:
        ValueError: no row has a ratio or a limit.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    groups = _groups(rows)
    if not groups:
        raise ValueError("there is nothing to draw: no row has a ratio or a limit")
    lines = sum(1 + len(entries) for entries in groups.values())
    figure = Figure(figsize=(8.6, 0.9 + 0.23 * lines), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    at, places, names = 0, [], []
    for heading, entries in groups.items():
        axes.annotate(
            heading, (0.0, at), xycoords=axes.get_yaxis_transform(), textcoords="offset points", xytext=(4, 0),
            va="center", fontsize=8.5, fontweight="bold",
        )  # fmt: skip
        at += 1
        for name, low, middle, high, limit in entries:
            colour = _GREY if limit else _BLUE if middle >= 0.98 else _ORANGE
            axes.plot([low, high], [at, at], color=colour, linewidth=2.2, alpha=0.45, solid_capstyle="round")
            axes.plot([middle], [at], color=colour, marker="D" if limit else "o", markersize=4.5 if limit else 5.5)
            label = f"{100 * middle:.0f}%" if limit else f"{middle:.3g}x"
            axes.annotate(
                label, (high, at), textcoords="offset points", xytext=(7, 0), va="center", color=colour, fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
            places.append(at)
            names.append(name)
            at += 1
    axes.axvline(1, color=_GREY, linewidth=1, zorder=0)
    values = [value for entries in groups.values() for _, low, _, high, _ in entries for value in (low, high)]
    axes.set_xlim(min(0.5, min(values) / 1.4), max(2.0, max(values) * 2.2))
    axes.set_ylim(at - 0.3, -0.7)
    axes.set_yticks(places, names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("how many times better than the peer (grey: share of the machine's limit)", fontsize=9)
    axes.set_title(title or "", loc="left", fontsize=11)
    axes.grid(axis="x", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


_Entry = tuple[str, float, float, float, bool]


def _groups(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[_Entry]]:
    """By suite and case: name, first quartile, median, third quartile, whether it is the share of a limit."""
    groups: dict[str, list[_Entry]] = {}
    for row in rows:
        entries = groups.setdefault(f"{row['suite']}  {row['case']}", [])
        what = row["metric"]
        for ending in ("_per_second", "_tokens", "_bytes", "_flop", "_seconds"):
            what = what.removesuffix(ending)
        what = ", ".join(word for word in (what.replace("_", " "), row["dtype"]) if word)
        limit = row["limit_fraction"]
        name = f"{what}: of the limit"
        if limit is not None and row["peer"] != "copy" and not any(entry[0] == name for entry in entries):
            entries.append((name, limit, limit, limit, True))
        if row["ratio"] is not None and row["ratio"] > 0:
            low, high = row["ratio_low"], row["ratio_high"]
            entries.append((f"{what}: {row['peer']}", low, row["ratio"], high, False))
    return {heading: entries for heading, entries in groups.items() if entries}
