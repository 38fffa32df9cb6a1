"""Put the tables of the records in results/ into pages, between markers.

    python scripts/results_table.py            rewrite what lies between the markers
    python scripts/results_table.py --check    change nothing; exit status 1 when a page is out of date

`bench/report/pages.py` has the parts that a pair of markers can name. Pages mark the cases of machine code that is no
longer built; `python -m bench.kernels_run` says in a record which these are.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench.report import pages  # noqa: E402


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    options = parser.parse_args(arguments)
    found, stale = pages.read(root), []
    for page in pages.pages(root):
        name, old = page.relative_to(root), page.read_text(encoding="utf-8")
        try:
            new = pages.fill(old, found)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if new != old:
            stale.append(name)
            if not options.check:
                page.write_text(new, encoding="utf-8")
    if options.check:
        for name in stale:
            print(f"{name} is out of date: run python scripts/results_table.py", file=sys.stderr)
        return int(bool(stale))
    print(f"rewritten: {', '.join(map(str, stale)) or 'nothing, all up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
