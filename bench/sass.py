"""Prints the compiled code's properties of every spec that a module ships; needs no GPU.

python -m bench.sass cute_kernels.mla.spec
python -m bench.sass --digests > before.txt     a line for each shipped spec, to compare two checkouts
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from bench import kernels_run
from tests.kit.sass import digest, report


def main() -> int:
    """Runs from the command line; 1 if a spec misses its expectations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", nargs="?", help="a module with shipped_specs()")
    parser.add_argument("--digests", action="store_true", help="names of machine code alone")
    options = parser.parse_args()
    specs: list[Any] = (
        importlib.import_module(options.module).shipped_specs() if options.module else kernels_run.shipped_specs()
    )
    bad = False
    for spec in specs:
        if options.digests:
            print(digest(spec), spec)
            continue
        code = report(spec)
        problems = code.problems(spec.expected)
        bad |= bool(problems)
        print(f"{spec!r}\n{code}", *(f"PROBLEM {problem}" for problem in problems), sep="\n", end="\n\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
