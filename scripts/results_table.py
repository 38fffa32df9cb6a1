"""Put the tables of the records in results/ into pages, between markers, and draw their plots.

    python scripts/results_table.py            rewrite what lies between the markers, and the plots in docs/img/
    python scripts/results_table.py --check    change nothing; exit status 1 when a page is out of date
    python scripts/results_table.py --compare  first look which recorded machine code is still built; may compile

`bench/report/pages.py` has the parts that a pair of markers can name. `--compare` writes which recorded machine code is
no longer built to results/<card>.older; pages mark its rows.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import kernels_run, records, svg  # noqa: E402
from bench.report import pages, plots, vllm  # noqa: E402
from bench.report.cases import Record  # noqa: E402


def compare(record: Record, path: pathlib.Path, code: Any) -> None:
    """Write down which machine code of a record's cases is no longer built, or print why that cannot be said."""
    if reason := kernels_run.not_comparable(record, code.toolchain()):
        print(f"{path.name}: not compared, {reason}")
        return
    kernels = kernels_run.of_cases(record)
    older = kernels_run.no_longer_built(kernels, code.digests_of_specs, kernels_run.shipped_specs)
    kernels_run.write_older(path, kernels, older)
    cases = sum("older" in case for case in kernels_run.marked(record, older)["cases"])
    print(f"{path.name}: {len(older)} of {len(kernels)} kernels are no longer built, which {cases} cases ran")


def draw(found: pages.Recorded, folder: pathlib.Path) -> list[str]:
    """Draw the plots that there is something for, and return their names."""
    drawn = plots.draw(found.cards[0], folder) if found.cards else []
    for file, (part, plot) in vllm.PLOTS.items():
        first = next((run for run in found.vllm if part in run), None)
        drawn += svg.write({file: functools.partial(plot, first)}, folder) if first is not None else []
    return drawn


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    ways.add_argument("--compare", action="store_true", help="first look which machine code is still built")
    options = parser.parse_args(arguments)
    if options.compare:
        for path in pages.record_files(root):
            compare(records.read(path), path, kernels_run.machine_code())
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
