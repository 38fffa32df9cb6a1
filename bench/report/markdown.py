"""Markdown tables, the format of figures in them, and the block of a page that a script writes.

Every page that a script writes takes its tables from here.

`tabulate` pads each cell to the width of its column. These tables do not, so that one longer cell changes one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MISSING = "–"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns lines of a table: the first column to the left, all others to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines of a table for a terminal, the header first; a row shorter than the header sets no width."""
    widths = [max(len(row[column]) for row in rows if len(row) == len(rows[0])) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def paragraphs(*blocks: list[str]) -> list[str]:
    """Joins the blocks that have lines, with an empty line between them."""
    lines: list[str] = []
    for block in filter(None, blocks):
        lines += [*([""] if lines else []), *block]
    return lines


def split(text: str, name: str) -> tuple[str, str, str]:
    """Splits a page into the text up to the first mark of a block, the block, and the text from the second mark on.

    Raises:
        ValueError: a mark is missing, occurs twice, or they are in the wrong order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"needs {begin} and then {end}, once each: a page needs one pair of marks")
    head, rest = text.split(begin)
    body, tail = rest.split(end)
    return head + begin, body.strip("\n"), end + tail


def fill(text: str, name: str, block: str) -> str:
    """Returns the page with that text as its block; raises as `split`."""
    head, _, tail = split(text, name)
    return f"{head}\n{block}\n{tail}"


def short(value: float | None) -> str:
    """Formats three significant digits, and all digits of the integer part."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def scientific(value: float | None) -> str:
    """Formats two significant digits, for errors."""
    return MISSING if value is None else f"{value:.1e}"


def hundredths(value: float | None) -> str:
    """Formats two digits after the point, for fractions and ratios."""
    return MISSING if value is None else f"{value:.2f}"


def plain(value: object) -> str:
    """Formats a value as Python prints it."""
    return MISSING if value is None else str(value)
