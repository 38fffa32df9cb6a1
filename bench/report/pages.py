"""Pages: what stands between pairs of markers, and which part of a record that is.

A pair, `<!-- results:mla:begin -->` and `<!-- results:mla:end -->`, names a part of `PARTS`. Pages are found by their
markers, so a block moves to another page with its markers and nothing here changes.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Sequence

from bench import kernels_run
from bench.report import gqa, headlines, mla, run, sink, values
from bench.report.cases import Record
from scripts import budget_table

MARKER = re.compile(r"<!-- results:([a-z-]+):(begin|end) -->")
NO_RESULTS = "No results are recorded yet: `make gpu-check` on an SM90 GPU writes them."
NO_CASES = "The recorded run has no such cases."
PARTS: dict[str, Callable[[Record], list[str]]] = {
    "headlines": headlines.headlines,
    "run": run.run,
    "mla": mla.decode_append_merge,
    "mla-sustained": mla.sustained,
    "mla-scores": mla.scores,
    "mla-formats": mla.formats,
    "mla-accuracy": mla.accuracy,
    "accumulator": mla.accumulator,
    "gqa": gqa.decode_append,
    "gqa-summary": gqa.summary,
    "sink": sink.forward_backward,
    "sink-summary": sink.summary,
    "crossover": mla.crossover,
    "sink-routing": sink.routing,
    "values": values.families,
    **budget_table.PARTS,
}


OF_ALL: dict[str, Callable[..., list[str]]] = {"headlines": headlines.headlines}
"""Parts that show all cards at once."""
OF_NONE = ("budget-mla", "budget-gqa", "budget-speed")
"""Parts that say the same of every record."""
NAMED = ("run", "accumulator")
"""Parts that name the card themselves."""


def render(record: Record | None, part: str) -> str:
    """The Markdown that belongs between the markers of that name, for one card."""
    return render_all([] if record is None else [record], part)


def render_all(found: Sequence[Record], part: str) -> str:
    """The same for several cards: one after the other, where the part is not one of all."""
    if not found:
        return NO_RESULTS
    if part in OF_ALL or part in OF_NONE or len(found) == 1:
        return _with_footnote(OF_ALL[part](*found) if part in OF_ALL else PARTS[part](found[0]))
    blocks = []
    for record in found:
        title = "" if part in NAMED else f"{record['card']}:\n\n"
        blocks.append(title + _with_footnote(PARTS[part](record)))
    return "\n\n".join(blocks)


def _with_footnote(lines: list[str]) -> str:
    if any(kernels_run.MARK in line for line in lines):
        lines = [*lines, "", kernels_run.FOOTNOTE]
    return "\n".join(lines) or NO_CASES


def fill(text: str, found: Sequence[Record]) -> str:
    """The page with what belongs there between each of its pairs of markers.

    Raises:
        ValueError: there is no pair, a marker is alone, a pair lies in another, or there is no part of that name.
    """
    marks = list(MARKER.finditer(text))
    if not marks:
        raise ValueError("needs a pair of markers, <!-- results:NAME:begin --> and <!-- results:NAME:end -->")
    pieces, end_of_last = [], 0
    for begin, end in zip(marks[::2], [*marks[1::2], None], strict=False):
        part = begin[1]
        if begin[2] != "begin" or end is None or (end[1], end[2]) != (part, "end"):
            raise ValueError(
                f"{begin[0]} has no partner: a pair is begin and, as the next marker, end of the same name"
            )
        if part not in PARTS:
            raise ValueError(f"{begin[0]}: got {part!r}, needs one of {', '.join(PARTS)}")
        pieces += [text[end_of_last : begin.end()], "\n", render_all(found, part), "\n"]
        end_of_last = end.start()
    return "".join([*pieces, text[end_of_last:]])


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """README.md, and whatever below docs/ has a marker."""
    found = [path for path in sorted((root / "docs").rglob("*.md")) if MARKER.search(path.read_text(encoding="utf-8"))]
    return [root / "README.md", *found]
