"""Put what random calls have found, added up over several runs with seeds of their own, into a record.

    python scripts/add_reliability.py results/h200.json build/fuzz_a.json build/fuzz_b.json

Refused, and the record left as it is, where two files hold the same seed, or where one ran other machine code than
another or the record.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import records  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("files", type=pathlib.Path, nargs="+", help="as scripts/fuzz.py writes them")
    parser.add_argument("--more", action="store_true", help="in addition to what the record has, not in its place")
    options = parser.parse_args(arguments)
    try:
        record = records.read(options.record)
        entry = records.read_reliability(options.files)
        if options.more and "reliability" in record:
            entry = records.add_reliability(records.reliability_of(record), entry)
        records.write(records.with_reliability(record, entry), options.record)
    except records.RecordError as error:
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{entry[key]} {key}" for key in records.RELIABILITY_COUNTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
