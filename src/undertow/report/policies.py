"""Ways of reading one text side by side: a table of quality and cost, and the loss by position in the window.

Takes records as ``PolicyResult.as_dict`` gives them, and as ``undertow eval --json`` writes them under ``policies``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from undertow.report.curve import smooth
from undertow.report.tables import table

Record = Mapping[str, Any]

_COLORS = {
    "carry": "#d9660f",
    "disjoint": "#8a9099",
    "overlap": "#2e8b57",
    "sliding": "#1f6fb4",
    "select": "#8a4fbf",
    "everything": "#20242a",
}


# What was done, what is lost by it, and what to say where nothing is.
_CONTROLS = {
    "states swapped": (
        "each text read with what was remembered of another",
        "memory of the text itself",
        "memory of the text itself helped nothing",
    ),
    "by chance": ("keys kept at random", "the choice", "the choice helped nothing"),
}


def name(record: Record) -> str:
    """The policy, and what was done to its memory."""
    return record["policy"] + (f", {record['control']}" if record.get("control") else "")


def policy_table(records: Sequence[Record], console: Console | None = None) -> None:
    """Print one row a way of reading, under its model's name where there are several models; then what they mean.

    Args:
        records: of one text; see above.
        console: where to; stdout by default.
    """
    console = console or Console(highlight=False)
    models = list(dict.fromkeys(record["model"] for record in records))
    headers = [
        "policy", "remem-\nbered", "ppl\n/token", "ppl\n/word", "bits\n/byte", "MFLOP\n/token", "tokens\n/s",
        "peak\nMiB", "state\nKiB",
    ]  # fmt: skip
    rows: list[list[object]] = []
    for model in models:
        if len(models) > 1:
            rows.append([_shortened(model)])
        for record in records:
            if record["model"] == model:
                indent = "  " * ((len(models) > 1) + bool(record.get("control")))
                rows.append([indent + (record.get("control") or record["policy"]), *_cells(record)])
    table(rows, headers, title=models[0] if len(models) == 1 else None, console=console)
    for line in explanations(records):
        console.print(line, soft_wrap=True)


def _cells(record: Record) -> list[object]:
    flops, peak, state = (record[key] for key in ("flops_per_token", "peak_memory_bytes", "state_bytes"))
    return [
        record["memory"]["remembered"],
        _large(record["perplexity"]),
        _large(record["perplexity_per_word"]),
        record["bits_per_byte"],
        _short(flops / 1e6),
        f"{record['tokens_per_second']:,.0f}",
        None if peak is None else round(peak / 2**20),
        None if state is None else _short(state / 2**10),
    ]


def _shortened(model: str) -> str:
    """A name that does not widen the column of policies: the end of a long path."""
    parts = Path(model).parts
    return model if len(model) <= 24 or len(parts) < 3 else str(Path("…", *parts[-2:]))


def _large(value: float | None) -> float | str | None:
    """A perplexity that no person would read digit by digit."""
    return f"{value:.1e}" if value is not None and value >= 1e6 else value


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def explanations(records: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know, a line each."""
    first = records[0]
    lines = []
    several = len({record["model"] for record in records}) > 1
    told = set()
    for record in records:
        label = f"{record['policy']}: {record['note']}"
        if not record.get("control") and (key := (record["model"] if record["policy"] == "carry" else "", label)):
            if key in told:
                continue
            told.add(key)
            sinks = record["memory"]["sinks"]
            beside = f", and the first {sinks} of the text" if sinks else ""
            whose = f" ({record['model']})" if several and record["policy"] == "carry" else ""
            lines.append(f"{label}{beside}{whose}.")
    for record in records:
        if record.get("control"):
            own = next(r for r in records if not r.get("control") and _same(r, record))
            lost = record["perplexity"] / own["perplexity"] - 1
            what, worth, nothing = _CONTROLS[record["control"]]
            lines.append(
                f"{name(record)}: {what}; perplexity is {abs(lost):.2%} "
                + (f"higher: so much is {worth}." if lost > 0 else f"lower: {nothing}.")
            )
    if any(
        r["policy"] == "carry" and r["documents"] == 1 and r["memory"]["slots"] + r["memory"]["selected"]
        for r in records
    ):  # fmt: skip
        lines.append("One document alone has no other whose memory it could be read with: no states were swapped.")
    separators = list(dict.fromkeys(record["bos_token_id"] for record in records))
    start = (
        "Nothing stands before a document, so its first token is not scored"
        if separators == [None]
        else f"Each document begins with its separator (id {', '.join(map(str, separators))}), never scored"
    )
    lines.append(f"{start}; windows inside a document get nothing put before them. The same for all.")
    part = []
    if first["skip_tokens"]:
        part.append(f"the first {first['skip_tokens']:,} tokens of each document were read and not scored")
    if first["per_document_tokens"]:
        part.append(f"each was read up to its token {first['per_document_tokens']:,}")
    scored = f"{first['targets']:,} tokens of {_count(first['documents'], 'document')} scored, each once"
    lines.append("; ".join([scored, *part]) + ".")
    if len({record["targets"] for record in records}) > 1:
        lines.append("The models cut the text into other tokens: compare them by word and by byte, not by token.")
    if first["cut"]:
        lines.append("Documents were scored in part: their bytes and words are in proportion to the tokens scored.")
    lines.append("ppl: perplexity; /s: a second; MFLOP: in the middle of a long text, two for a product and its sum.")
    measures = {record["peak_memory_of"] for record in records}
    lines.append(f"Peak: {' / '.join(sorted(measures))}, program and model included.")
    return lines


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _same(one: Record, other: Record) -> bool:
    return all(one[key] == other[key] for key in ("model", "policy"))


def document_table(records: Sequence[Record], console: Console | None = None) -> None:
    """Print the perplexity a token of each document under each way of reading."""
    columns = {_column(record, records): {d["name"]: d for d in record["by_document"]} for record in records}
    names = list(dict.fromkeys(document["name"] for record in records for document in record["by_document"]))
    rows: list[list[object]] = []
    for document in names:
        found = [column.get(document) for column in columns.values()]
        targets = next(d["targets"] for d in found if d is not None)
        rows.append([document, targets, *(None if d is None else d["perplexity"] for d in found)])
    table(rows, ["document", "tokens", *columns], title="Perplexity a token, by document", console=console)


def _column(record: Record, records: Sequence[Record]) -> str:
    several = len({r["model"] for r in records}) > 1
    return f"{Path(record['model']).name or record['model']}\n{name(record)}" if several else name(record)


def position_plot(records: Sequence[Record], path: str | os.PathLike[str], title: str | None = None) -> Path:
    """Draw the mean loss at each position of the window, a line a way of reading.

    Disjoint windows forget at each of their starts, which shows as a slope at the left; what carries or slides is
    flat. Beside each name its mean. Positions that few targets fall on (the first window of each document, where
    windows overlap) are left out.

    Args:
        records: of one text; see above.
        path: the picture; its suffix gives the format.
        title: above the picture.

    Returns:
        The path of the picture.

    Raises:
        ValueError: nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not records:
        raise ValueError("there is no result to draw")
    models = list(dict.fromkeys(record["model"] for record in records))
    figure = Figure(figsize=(7.6, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: list[tuple[float, str, Any]] = []
    right = 0
    levels: list[float] = []
    for record in records:
        at, values, counts = _drawn(record)
        if not at:
            continue
        # Enough targets a point that the line shows the window and not the words: some hundreds.
        per_point = sum(counts) / len(counts)
        share = min(1 / 4, max(1 / 32, 400 / per_point / len(counts)))
        smoothed = smooth([v / math.log(2) for v in values], share)
        style = "-" if not record.get("control") else (0, (4, 2))
        width = [2.0, 1.4, 1.0][min(models.index(record["model"]), 2)]
        color = _COLORS.get(record["policy"], "#5f6670")
        (drawn,) = axes.plot(at, smoothed, color=color, linestyle=style, linewidth=width)
        mean = record["loss"] / math.log(2)
        label = _column(record, records).replace("\n", ": ")
        lines.append((mean, f"{label}  {mean:.3f}", drawn))
        levels += smoothed
        right = max(right, at[-1])
    if not levels:
        raise ValueError("there is no loss by position to draw")
    ordered = sorted(levels)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(0.995 * len(ordered)))]
    room = max(0.06 * (high - low), 0.01)
    axes.set_ylim(low - room, high + room)
    axes.set_xlim(0, right)
    _label(axes, lines)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("position in the window (in the stride, where windows slide)")
    axes.set_ylabel("bits per token")
    axes.set_title(title or "", loc="left", fontsize=11)
    axes.grid(color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _drawn(record: Record) -> tuple[list[int], list[float], list[int]]:
    """Positions on which at least half as many targets fall as on the fullest, with their losses."""
    losses, counts = record["loss_by_position"], record["targets_by_position"]
    most = max(counts, default=0)
    kept = [i for i, count in enumerate(counts) if count and 2 * count >= most]
    return kept, [losses[i] for i in kept], [counts[i] for i in kept]


def _label(axes: Any, lines: list[tuple[float, str, Any]]) -> None:
    """Names and means beside the picture, the highest loss on top."""
    for row, (_, text, drawn) in enumerate(sorted(lines, key=lambda line: -line[0])):
        axes.annotate(
            text, (1, 1), xytext=(12, -6 - 13 * row), xycoords="axes fraction", textcoords="offset points",
            color=drawn.get_color(), fontsize=8.5, va="top", ha="left", annotation_clip=False,
        )  # fmt: skip
