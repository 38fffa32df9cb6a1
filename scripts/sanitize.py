"""Run every kernel once on small shapes under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python scripts/sanitize.py                    all tools, one line each; exit status 1 on any finding
    python scripts/sanitize.py --tool memcheck    one of them
    python scripts/sanitize.py --worker mla       a part of the calls alone, as the tools run them
    python scripts/sanitize.py --worker sample --default-dtype bfloat16      with another default dtype of torch

The worker compares its results with the oracle as well, so "no errors" cannot come from kernels that did not run.

initcheck does not see what TMA writes, and reports kernels that read it. The calls that it checks copy such tensors to
the host and back at once: the copy to the host is reported and listed in `KNOWN`, the copy back makes the memory known,
so a report of any kernel is a finding. `--show tma-stores` runs calls that show the listed report to be false.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench.sanitizing.tools import PARTS, SHOWS, TOOLS, kinds, run_tools, show  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    names = (*(part.name for part in PARTS), *SHOWS)
    parser.add_argument("--worker", choices=names, help="make a part of the calls in this process, without a tool")
    parser.add_argument("--default-dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    parser.add_argument("--show", choices=SHOWS, help="the calls of a known false report, under the tool that makes it")
    options = parser.parse_args(arguments)
    if options.worker:
        from bench.sanitizing import calls  # imports torch and compiles, which the tools do not need

        calls.worker(options.worker, options.default_dtype)
        return 0
    if options.show:
        return show(options.show)
    findings = run_tools(options.tool or TOOLS)
    for finding in findings:
        known = f", known to be false: {dict(finding.known)}" if finding.known else ""
        print(f"{finding.tool}: {finding.reason if finding.errors is None else f'{finding.errors} errors'}{known}")
        if finding.errors != 0:
            print(finding.output)
            print("\n".join(kinds(finding.output)))
    return int(any(finding.errors != 0 for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
