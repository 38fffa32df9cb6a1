"""Pages, and which part of the records belongs between which pair of markers.

A pair, `<!-- results:mla:begin -->` and `<!-- results:mla:end -->`, names a part of `PARTS`. results/README.md has all
tables; README.md and pages below docs/ keep one each. A table moves to another page with its markers, and nothing here
changes.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from bench import budget, kernels_run, records
from bench.report import perplexity, speeds, tables, vllm
from bench.report.cases import Record
from bench.report.markdown import paragraphs
from scripts import context_parallel_table

MARKER = re.compile(r"<!-- results:([a-z-]+):(begin|end) -->")
NO_RESULTS = "No results are recorded yet: `make gpu-check` on an SM90 GPU writes them."
NO_CASES = "The recorded runs have no such cases."
FIRST = "h200"


class Recorded(NamedTuple):
    """Everything that was recorded: a record for each card, and the results of single checks."""

    cards: list[Record]
    vllm: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    accuracy: list[dict[str, Any]]


def record_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the records of a checkout, in the order of pages: an H200's first."""
    return sorted((root / "results").glob("*.jsonl"), key=lambda path: (path.stem != FIRST, path.name))


def read(root: pathlib.Path) -> Recorded:
    """Reads all records of a checkout."""
    cards = [records.read(path) for path in record_files(root)]
    others = (
        [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "results" / folder).glob("*.json"))]
        for folder in Recorded._fields[1:]
    )
    return Recorded(cards, *others)


def _of_each_card(table: Callable[[Record], list[str]]) -> Callable[[Recorded], list[str]]:
    """Makes the table of every card that has such cases, below its name if there are several cards."""

    def render(found: Recorded) -> list[str]:
        made = [(record["card"], lines) for record in found.cards if (lines := table(record))]
        titled = len(found.cards) > 1 and table is not tables.run
        return paragraphs(*(block for card, lines in made for block in ([f"{card}:"] if titled else [], lines)))

    return render


def _side_by_side(table: Callable[[Record], tables.Columns]) -> Callable[[Recorded], list[str]]:
    """Makes one table of all cards, by their short names."""
    return lambda found: tables.side_by_side(
        {records.card_slug(record["card"]).upper(): table(record) for record in found.cards}
    )


def _speeds(part: str) -> Callable[[Recorded], list[str]]:
    return lambda found: speeds.speeds(part, found.cards)


PARTS: dict[str, Callable[[Recorded], list[str]]] = {
    **{part: _speeds(part) for part in speeds.SPEEDS},
    "run": _of_each_card(tables.run),
    "mla": _of_each_card(tables.mla),
    "mla-formats": _of_each_card(tables.mla_formats),
    "mla-power": _of_each_card(tables.power),
    "mla-accuracy": _side_by_side(tables.accuracy),
    "crossover": _side_by_side(tables.crossover),
    "gqa": _of_each_card(tables.gqa),
    "sink": _of_each_card(tables.sink),
    "sink-routing": _side_by_side(tables.routing),
    "append-merge": _of_each_card(tables.append_merge),
    "values": _side_by_side(tables.values),
    **{part: functools.partial(lambda table, found: table(), table) for part, table in budget.PARTS.items()},
    "budget-errors": _of_each_card(budget.errors),
    "vllm": lambda found: vllm.page(found.vllm),
    "vllm-speed": lambda found: vllm.speeds(found.vllm),
    "vllm-mla": lambda found: vllm.mla(found.vllm),
    "ranks": lambda found: paragraphs(*map(context_parallel_table.measured, found.ranks)),
    "ranks-speed": lambda found: context_parallel_table.speeds(found.ranks),
    "ranks-on-paper": lambda found: context_parallel_table.on_paper(),
    "perplexity": lambda found: paragraphs(*map(perplexity.whole, found.accuracy)),
    "perplexity-brief": lambda found: paragraphs(*map(perplexity.brief, found.accuracy)),
}
"""The text between the markers, by their name."""


def render(found: Recorded, part: str) -> str:
    """Returns the Markdown that belongs between the markers of that name."""
    lines = PARTS[part](found)
    if not lines:
        return NO_CASES if any(found) else NO_RESULTS
    return "\n".join([*lines, "", kernels_run.FOOTNOTE] if any(kernels_run.MARK in line for line in lines) else lines)


def fill(text: str, found: Recorded) -> str:
    """Returns cycles per token and CTA of each unit, for variants with 128 heads and the published estimate.

    Raises:
        ValueError: the page has no pair, a marker is alone, pairs are nested, or no part has that name.
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
        pieces += [text[end_of_last : begin.end()], "\n", render(found, part), "\n"]
        end_of_last = end.start()
    return "".join([*pieces, text[end_of_last:]])


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns README.md, results/README.md and every page below docs/ that has a marker."""
    others = [*(root / "results").glob("README.md"), *sorted((root / "docs").rglob("*.md"))]
    return [root / "README.md", *(path for path in others if MARKER.search(path.read_text(encoding="utf-8")))]
