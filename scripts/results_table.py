"""Put the tables of the records in results/ into pages, between markers, and draw their plots.

    python scripts/results_table.py            rewrite what lies between the markers, and the plots in docs/img/
    python scripts/results_table.py --check    change nothing; exit status 1 when a page is out of date

`bench/report/pages.py` has the parts that a pair of markers can name. Pages mark the cases of machine code that is no
longer built; `python -m bench.kernels_run` says in a record which these are.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import svg  # noqa: E402
from bench.report import pages, plots, vllm  # noqa: E402


def draw(found: pages.Recorded, folder: pathlib.Path) -> list[str]:
    """Draws the plots whose results exist, and returns their names."""
    drawn = plots.draw(found.cards[0], folder) if found.cards else []
    for file, (part, plot) in vllm.PLOTS.items():
        first = next((run for run in found.vllm if part in run), None)
        drawn += svg.write({file: functools.partial(plot, first)}, folder) if first is not None else []
    return drawn


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
    drawn = draw(found, root / "docs" / "img")
    print(f"drawn: {', '.join(drawn) or 'nothing, for matplotlib is not installed or no case has a speed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
