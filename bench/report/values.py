"""The part "values": what families of values cost, of all operations."""

from __future__ import annotations

from bench.cases import case_name
from bench.kernels_run import mark
from bench.report import markdown
from bench.report.cases import Record
from bench.report.markdown import MISSING, hundredths, short
from tests.kit.values import SLOW


def families(record: Record) -> list[str]:
    """A row for each case that was timed with families of values."""
    header = ["case", "N(0,1), us", "worst values", "us", "x N(0,1)", f"{SLOW}, x N(0,1)"]
    header += ["FlashMLA / ours: N(0,1)", "with the worst values"]
    rows = []
    for entry in record.get("values", []):
        name = case_name(entry) + mark(entry)
        if "failed" in entry:
            rows.append([name, "failed", *[MISSING] * (len(header) - 2)])
            continue
        wrong = f"; not measured: {', '.join(entry['wrong'])}" if "wrong" in entry else ""
        ratios = [entry.get(key) for key in ("worst_ratio", "slow_ratio", "normal_ratio_peer", "worst_ratio_peer")]
        times = [short(entry["values"].get("normal")), entry["worst_family"] + wrong, short(entry["worst_us"])]
        rows.append([name, *times, *map(hundredths, ratios)])
    return markdown.table(header, rows) if rows else []
