"""The tables and the plot of docs/users/vllm.md, from results/vllm/*.json, which scripts/vllm_check.py writes.

python scripts/vllm_table.py            rewrite what lies between the marks, and docs/img/vllm_speed.svg
python scripts/vllm_table.py --check    change nothing; exit status 1 when the page is out of date

The records of a GPU run are copied there by hand: cp build/vllm_check.json results/vllm/h200.json
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import svg  # noqa: E402
from bench.report import markdown, vllm  # noqa: E402

BLOCK = "vllm"
MARKS = markdown.marks(BLOCK)
PLOT = "vllm_speed.svg"


def records(root: pathlib.Path) -> list[dict[str, Any]]:
    """What was found on each card, by name of its file."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "results" / "vllm").glob("*.json"))]


def filled(page: str, found: Sequence[dict[str, Any]], plot: bool) -> str:
    """The page with the tables between its marks; raises as `markdown.fill`."""
    blocks = vllm.page(list(found))
    if plot:
        blocks += ["", f"![Milliseconds a token of each backend](../img/{PLOT})"]
    return markdown.fill(page, BLOCK, "\n".join(blocks))


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args(arguments)
    found, page = records(root), root / "docs" / "users" / "vllm.md"
    image = root / "docs" / "img" / PLOT
    if found and not options.check:
        drawn = svg.write({PLOT: functools.partial(vllm.speed_plot, found[0])}, image.parent)
        print(f"drawn: {', '.join(drawn) or 'nothing, for matplotlib is not installed or no backend has a peer'}")
    old = page.read_text(encoding="utf-8")
    new = filled(old, found, plot=bool(found) and image.exists())
    if options.check:
        if new != old:
            print(f"{page.name} is out of date: run python scripts/vllm_table.py", file=sys.stderr)
        return int(new != old)
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
