"""What INT8 costs in accuracy, by granularity of the scales: put the table between the markers of a page.

    python scripts/accuracy_gqa.py            compute, and rewrite what lies between the markers
    python scripts/accuracy_gqa.py --check    compute, change nothing; exit status 1 when a page is out of date

CPU, under a minute. The markers are `<!-- accuracy:begin -->` and `<!-- accuracy:end -->`; every page below docs/ that
has one is looked at.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import gqa_accuracy  # noqa: E402
from bench.report import markdown  # noqa: E402

BLOCK = "accuracy"
BEGIN, END = markdown.marks(BLOCK)


def pages(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The pages that have a marker."""
    found = ((page, page.read_text(encoding="utf-8")) for page in sorted((root / "docs").rglob("*.md")))
    return [page for page, text in found if BEGIN in text or END in text]


def split(text: str) -> tuple[str, str, str]:
    """`markdown.split` of the block that this script writes."""
    return markdown.split(text, BLOCK)


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args(arguments)
    found = pages(root)
    if not found:
        print(f"no page below docs/ has {BEGIN}", file=sys.stderr)
        return 1
    blocks = {}
    for page in found:
        try:
            blocks[page] = split(page.read_text(encoding="utf-8"))
        except ValueError as error:
            print(f"{page.relative_to(root)}: {error}", file=sys.stderr)
            return 1
    new = gqa_accuracy.table({name: gqa_accuracy.errors(gqa_accuracy.draw(name)) for name in gqa_accuracy.SETS})
    stale = False
    for page, (head, old, tail) in blocks.items():
        name = page.relative_to(root)
        if gqa_accuracy.same(old, new):
            print(f"{name} is up to date")
        elif options.check:
            print(f"{name} is out of date: run python scripts/accuracy_gqa.py", file=sys.stderr)
            stale = True
        else:
            page.write_text(f"{head}\n{new}\n{tail}", encoding="utf-8")
            print(f"rewritten: {name}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
