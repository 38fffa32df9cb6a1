"""Put the tables of the records in results/ between the markers in README.md and docs/, and draw the first's speeds.

    python scripts/results_table.py            rewrite what lies between the markers, and the plots in docs/img/
    python scripts/results_table.py --check    change nothing; exit status 1 when a page is out of date
    python scripts/results_table.py --compare  first look which recorded machine code is still built; may compile

Each card has a record; an H200's comes first. Rows of machine code that is no longer built are marked. `--compare`
writes which that is to results/<card>.older. A record from before 2026-11-24 names no machine code, so no row of it is
marked.

A pair of markers, `<!-- results:mla:begin -->` and `<!-- results:mla:end -->`, names the part that it holds:

    headlines     one case an operation, for the README
    run           the card, the versions, tests and ceilings
    mla           FP8 MLA decoding, its append, the merge
    mla-sustained the cases whose power under load is measured
    mla-scores    its cases with exact and with fp8 scores forced
    mla-formats   its cases over other formats than that of 656 bytes, with one cache and with two
    mla-accuracy  errors of both, of bf16 keys and of FlashMLA
    accumulator   what the FP8 tensor core keeps of a sum
    crossover     its cases with each exchange forced
    gqa           every case of GQA decoding and of its append
    gqa-summary   those cases of GQA decoding that have to reach a number
    sink          every case of sink attention
    sink-summary  those that have to reach a number
    sink-routing  few queries, decoded and prefilled
    budget-...    predictions and their errors, see scripts/budget_table.py
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import kernels_run, records  # noqa: E402
from bench.report import pages, plots  # noqa: E402
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


FIRST = "h200.json"


def record_files(root: pathlib.Path) -> list[pathlib.Path]:
    """The records of a checkout, in the order in which pages show them."""
    return sorted((root / "results").glob("*.json"), key=lambda path: (path.name != FIRST, path.name))


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    ways.add_argument("--compare", action="store_true", help="first look which machine code is still built")
    parser.add_argument("--results", type=pathlib.Path, nargs="+", help="default: all of results/*.json")
    options = parser.parse_args(arguments)
    found = []
    for path in record_files(root) if options.results is None else options.results:
        record = records.read(path)
        if options.compare:
            compare(record, path, kernels_run.machine_code())
        found.append(kernels_run.marked(record, kernels_run.read_older(path)))
    stale = []
    for page in pages.pages(root):
        name, old = page.relative_to(root), page.read_text(encoding="utf-8")
        try:
            new = pages.fill(old, found)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if new == old:
            continue
        stale.append(name)
        if not options.check:
            page.write_text(new, encoding="utf-8")
    if options.check:
        for name in stale:
            print(f"{name} is out of date: run python scripts/results_table.py", file=sys.stderr)
        return int(bool(stale))
    print(f"rewritten: {', '.join(map(str, stale)) or 'nothing, all up to date'}")
    if found:
        drawn = plots.draw(found[0], root / "docs" / "img")
        print(f"drawn: {', '.join(drawn) or 'nothing, for matplotlib is not installed or no decode case has a speed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
