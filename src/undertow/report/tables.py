"""Small tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def number(value: object) -> str:
    """A value as a person wants to read it: thousands grouped, about four significant digits, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return str(value)


def table(
    rows: Iterable[Sequence[object]],
    headers: Sequence[str] | None = None,
    title: str | None = None,
    console: Console | None = None,
) -> None:
    """Print rows; the first column is text to the left, the others stand to the right.

    Args:
        rows: cells; numbers are formatted by :func:`number`.
        headers: names of the columns, or None.
        title: above the table.
        console: where to; stdout by default.
    """
    rows = [list(row) for row in rows]
    columns = len(headers) if headers else max((len(row) for row in rows), default=0)
    # A record is read with its name beside its value, not across a wide gap.
    drawn = Table(title=title, title_justify="left", show_header=headers is not None, box=None, pad_edge=False)
    for index in range(columns):
        drawn.add_column(headers[index] if headers else "", justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(number(cell) for cell in row))
    (console or Console(highlight=False)).print(drawn)
