"""Pages show everything that was recorded, except cases whose check failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.report import pages, speeds
from scripts import results_table


@pytest.fixture(scope="module")
def recorded(root: Path) -> pages.Recorded:
    return pages.read(root)


def test_the_pages_of_the_checkout_are_up_to_date(root: Path) -> None:
    assert results_table.main(["--check"], root=root) == 0


def test_every_part_has_a_page(root: Path) -> None:
    """If a page lost its markers, it would lose a table that nothing else shows."""
    text = "".join(path.read_text(encoding="utf-8") for path in pages.pages(root))
    assert not [part for part in pages.PARTS if f"<!-- results:{part}:begin -->" not in text]


def shown(record: dict[str, Any], case: dict[str, Any]) -> list[str]:
    alone = pages.Recorded([{**record, "cases": [case]}], [], [], [])
    parts = ("mla", "mla-formats", "gqa", "sink", "sink-routing", "append-merge")
    return ["\n".join(lines) for part in parts if (lines := pages.PARTS[part](alone))]


def test_every_recorded_case_is_in_a_table(recorded: pages.Recorded) -> None:
    """A benchmark that belongs to no part would be recorded but appear on no page."""
    for record in recorded.cards:
        for case in record["cases"]:
            assert len(shown(record, case)) == 1, case


def test_a_failed_check_has_no_figure_and_an_older_case_has_a_mark(recorded: pages.Recorded) -> None:
    record = recorded.cards[0]
    for case in record["cases"][::20]:
        key = {name: value for name, value in case.items() if name not in ("us", "peers", "TFLOPs", "GBps")}
        (text,) = shown(record, {**key, "failed": "an element is off"})
        assert "check failed" in text.splitlines()[2]
        (text,) = shown(record, {**case, "older": True})
        assert "†" in text.splitlines()[2]


def test_every_named_case_of_the_tables_of_speeds_is_recorded(recorded: pages.Recorded) -> None:
    record = recorded.cards[0]
    missing = [key for keys in speeds.SPEEDS.values() for key in keys if speeds.find(record, key) is None]
    assert not missing
