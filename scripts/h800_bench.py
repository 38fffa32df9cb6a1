"""Measure a Hopper card's ceilings, predict what the kernels should reach on it, run them, and compare.

    bash scripts/run_h800_bench.sh                    all of it
    bash scripts/run_h800_bench.sh --quick            few cases
    bash scripts/run_h800_bench.sh --only 'sparse'    cases whose name matches
    bash scripts/run_h800_bench.sh --trace            a CTA's timeline by warp role as well

Ten lines come first: the card, its ceilings, its clock under load, and the standard case of each operator with what it
reaches and what binds it. Details follow, first the budget of each unit. Progress goes to standard error.

Writes bench.jsonl, and with --trace trace.svg, into results/bench_<card>/; a run that leaves something out into
build/bench_<card>/, unless --out says where. Without an SM90 GPU it prints the predictions. The name does not choose a
card: everything printed and written names the one that it ran on.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import torch  # noqa: E402

from bench import budget, card  # noqa: E402
from cute_kernels.runtime.arch import is_sm90  # noqa: E402

NO_GPU = "No SM90 GPU was found (Hopper, compute capability 9.0): nothing was measured, these are predictions."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--trace", action="store_true", help="draw a CTA's timeline by warp role")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where to write")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or not is_sm90(torch.device("cuda")):
        budget.print_predictions()
        print(NO_GPU)
        return 0
    return card.measure(options)


if __name__ == "__main__":
    sys.exit(main())
