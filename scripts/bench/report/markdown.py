"""Markdown tables, and how figures are written in them. Every page that a script writes takes its tables from here.

`tabulate` pads each cell to the width of its column. These tables do not: one longer cell is a diff of one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MISSING = "–"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, all others to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def paragraphs(*blocks: list[str]) -> list[str]:
    """The blocks that have lines, an empty line between them."""
    lines: list[str] = []
    for block in filter(None, blocks):
        lines += [*([""] if lines else []), *block]
    return lines


def short(value: float | None) -> str:
    """Three significant digits, and all digits of the integer part."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def scientific(value: float | None) -> str:
    """Two significant digits, for errors."""
    return MISSING if value is None else f"{value:.1e}"


def hundredths(value: float | None) -> str:
    """Two digits after the point, for fractions and ratios."""
    return MISSING if value is None else f"{value:.2f}"


def plain(value: object) -> str:
    """As Python writes it."""
    return MISSING if value is None else str(value)
