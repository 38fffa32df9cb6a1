"""What INT8 costs in accuracy, by granularity of the scales: computes the table of docs/users/gqa_decode.md.

    python scripts/accuracy_gqa.py            compute, and rewrite what lies between the markers
    python scripts/accuracy_gqa.py --check    compute, change nothing; exit status 1 when the page is out of date

CPU, under a minute.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import gqa_accuracy  # noqa: E402
from bench.report import markdown  # noqa: E402

PAGE = ROOT / "docs" / "users" / "gqa_decode.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    fresh = gqa_accuracy.table({name: gqa_accuracy.errors(gqa_accuracy.draw(name)) for name in gqa_accuracy.SETS})
    if gqa_accuracy.same(markdown.split(text, gqa_accuracy.BLOCK)[1], fresh):
        return 0
    if options.check:
        print(f"{PAGE.name} is out of date: run python scripts/accuracy_gqa.py", file=sys.stderr)
        return 1
    PAGE.write_text(markdown.fill(text, gqa_accuracy.BLOCK, fresh), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
