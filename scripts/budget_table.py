"""Tables of the cycle budget, for scripts/results_table.py; the constants of the built kernel.

python scripts/budget_table.py                print the tables
python scripts/budget_table.py --calibrate    what results/h200.json says of LATENCY_CYCLES and CTA_CYCLES
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import gqa as bench_gqa  # noqa: E402
from bench import mla as bench_mla  # noqa: E402
from bench import records  # noqa: E402
from bench.kernels_run import mark  # noqa: E402
from bench.report import markdown as report_markdown  # noqa: E402
from cute_kernels.budget import model, variants  # noqa: E402
from cute_kernels.budget.rates import H200, PUBLISHED_H800, Rates  # noqa: E402
from cute_kernels.budget.variants import GQA_VARIANTS, MLA_VARIANTS, Unit  # noqa: E402

HEADS = 128
READERS = HEADS // bench_mla.WIDE
PUBLISHED = (
    ("published estimate, no cluster", variants.OVERLAPPED),
    ("published estimate, crossover", variants.CROSSOVER_ASYNC),
)
# The two cases that the constants of the built kernel are made from.
LONG = bench_mla.DecodeBench("sparse", 128, 128, 2, 2048)
SHORT = bench_mla.DecodeBench("sparse", 128, 128, 4, 512)

Table = list[list[str]]
"""Rows of cells, the header first."""


def mla_table(rates: Rates = H200) -> Table:
    """Cycles per token and CTA of each unit, for each variant with 128 heads, below the published estimate."""
    rows = [["variant", "state", *map(str, Unit), "cycles", "binds"]]
    for name, variant in PUBLISHED:
        rows.append([name, "estimate", *_budget_cells(model.budget(variant, PUBLISHED_H800, READERS), published=True)])
    for variant in MLA_VARIANTS:
        state = "built" if variant.built else "prediction"
        rows.append([variant.name, state, *_budget_cells(model.budget(variant, rates, READERS))])
    return rows


def gqa_table(rates: Rates = H200) -> Table:
    """Cycles per token and KV head of each unit, for each kind of cache with heads of 128."""
    units = [unit for chain in GQA_VARIANTS[0].chains for unit in chain]
    rows = [["cache", "bytes", *map(str, units), "cycles", "binds"]]
    for variant in GQA_VARIANTS:
        found = model.budget(variant, rates)
        cells = [_short(found.demands[unit]) for unit in units]
        rows.append([variant.name, f"{variant.bytes_per_token:.0f}", *cells, _short(found.cycles), str(found.binds)])
    return rows


def speed_table(rates: Rates = H200) -> Table:
    """What each variant should take in three cases: microseconds and TFLOP/s."""
    benches = [LONG, bench_mla.DecodeBench("sparse", 128, 128, 2, 32768), bench_mla.DecodeBench("sparse", 1, 128, 1)]
    rows = [["variant", "state", *(f"{_size(bench)}, topk {bench.keys}" for bench in benches)]]
    for variant in MLA_VARIANTS:
        cells = []
        for bench in benches:
            us = bench_mla.predict(bench, variant, rates).us
            cells.append(f"{_short(us)} us, {bench.flops / us / 1e6:.0f} TFLOP/s")
        rows.append([variant.name, "built" if variant.built else "prediction", *cells])
    return rows


def rates_of(record: dict[str, Any]) -> Rates:
    """The rates of a record's card: of another one than an H200 with the ceilings that were measured on it.

    The constants of the kernels are those of the H200's record, so errors on another card are of a forecast.
    """
    if H200.card in record["card"]:
        return H200
    ceilings = record["ceilings"]
    names = {"read_gbps": "read_GBps", "copy_gbps": "copy_GBps", "gemm_tflops": "bf16_gemm_TFLOPs"}
    return H200.measured({"card": record["card"], **{rate: ceilings[name] for rate, name in names.items()}})


def mla_errors(record: dict[str, Any]) -> Table:
    """Every MLA case of a record with its prediction."""
    rates = rates_of(record)
    rows = [["`mla_fp8_decode`", "keys", "us", "p10 .. p90", "back to back", "predicted, us", "error", "binds"]]
    for bench in bench_mla.PREDICTED_CASES:
        case = find_case(record, bench.key)
        if case is None or "us" not in case:
            continue
        found = bench_mla.predict(bench, rates=rates)
        fitted = rates is H200 and any(is_case_of(bench.key, one.key) for one in (LONG, SHORT))
        note = " (calibrated on it)" if fitted else ""
        spread = f"{_short(case['us_p10'])} .. {_short(case['us_p90'])}"
        name = f"{bench.mode} {_size(bench)}{mark(case)}"
        rows.append([name, str(bench.keys), _short(case["us"]), spread, _short(measured(case)), _short(found.us)])
        rows[-1] += [f"{found.us / measured(case) - 1:+.1%}{note}", str(found.binds)]
    return rows


def gqa_errors(record: dict[str, Any]) -> Table:
    """The GQA cases of a record with their predictions: how many, and how far off."""
    errors, rates = dict[str, list[float]](), rates_of(record)
    for bench in bench_gqa.DECODE_CASES:
        case = find_case(record, bench.key)
        if case is not None and "us" in case:
            group = f"{bench.kv_dtype}, {'from 32' if bench.batch >= 32 else 'below 32'} sequences{mark(case)}"
            errors.setdefault(group, []).append(bench_gqa.predict(bench, rates).us / measured(case) - 1)
    rows = [["`gqa_decode`", "cases", "error: lowest", "median", "highest"]]
    for group, found in errors.items():
        ordered = sorted(found)
        figures = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
        rows.append([group, str(len(ordered)), *(f"{error:+.1%}" for error in figures)])
    return rows


def measured(case: dict[str, Any]) -> float:
    """Microseconds that the budget predicts: of calls back to back, which older records have as "us"."""
    return case.get("us_back_to_back", case["us"])


OPTIONAL = ("page_size", "window", "ragged", "cache_format")
"""Keys that a case has only where it is unlike most."""


def find_case(record: dict[str, Any], key: dict[str, Any]) -> dict[str, Any] | None:
    """The case that has this key, and no page size, window, ragged lengths or format where the key has none.

    Scores that are not named are exact.
    """
    return next((case for case in record["cases"] if is_case_of(case, key)), None)


def is_case_of(case: dict[str, Any], key: dict[str, Any]) -> bool:
    """Whether a case has this key; see `find_case`."""
    if case.get("scores", "exact") != key.get("scores", "exact"):
        return False
    named = {name: value for name, value in key.items() if name != "scores"}
    return named.items() <= case.items() and {name for name in OPTIONAL if name in case} <= set(key)


def calibrated(record: dict[str, Any]) -> tuple[float, float]:
    """(LATENCY_CYCLES, CTA_CYCLES) from the two named cases of a record.

    Raises:
        ValueError: the record lacks one of them.
    """
    points = []
    for bench in (LONG, SHORT):
        case = find_case(record, bench.key)
        if case is None or "us" not in case:
            raise ValueError(f"record: has no time of {bench.name}")
        points.append((bench_mla.launch(bench, H200.sms), measured(case)))
    return model.calibrate(points[0], points[1])


def markdown(rows: Table) -> list[str]:
    """A table for a page."""
    return report_markdown.table(rows[0], rows[1:])


def plain(rows: Table) -> list[str]:
    """A table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


PARTS: dict[str, Callable[[], list[str]]] = {
    "budget-mla": lambda: markdown(mla_table()),
    "budget-gqa": lambda: markdown(gqa_table()),
    "budget-speed": lambda: markdown(speed_table()),
}
"""Tables that no record changes, by the markers of scripts/results_table.py."""


def errors(record: dict[str, Any]) -> list[str]:
    """Both tables of errors; no lines where the record has no such case."""
    tables = [markdown(table) for table in (mla_errors(record), gqa_errors(record)) if len(table) > 1]
    return report_markdown.paragraphs(*tables)


def print_predictions(rates: Rates = H200, say: Callable[[str], None] = print) -> None:
    """The tables that need no measurement."""
    say(f"Cycles per token and CTA of 64 heads, {HEADS} heads; rates of {rates.card}")
    _say(plain(mla_table(rates)), say)
    say("Time of a call")
    _say(plain(speed_table(rates)), say)
    say("GQA: cycles per token and KV head of 128")
    _say(plain(gqa_table(rates)), say)


def _say(lines: Iterable[str], say: Callable[[str], None]) -> None:
    for line in (*lines, ""):
        say(line)


def _budget_cells(found: model.Budget, published: bool = False) -> list[str]:
    # what the published estimate does not speak of has no number there
    silent = {Unit.POWER, Unit.SMEM, Unit.GATHER, Unit.DSM, Unit.HBM, Unit.LATENCY} if published else set()
    cells = ["–" if unit in silent else _short(found.demands[unit]) for unit in Unit]
    binds = Unit.TENSOR if published and found.binds is Unit.POWER else found.binds
    return [*cells, _short(found.cycles), str(binds)]


def _size(bench: bench_mla.DecodeBench) -> str:
    return f"{bench.batch} x {bench.h_q} x {bench.s_q}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true", help="only the two constants of the built kernel")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "results" / "h200.json")
    options = parser.parse_args(arguments)
    record = records.read(options.results)
    if options.calibrate:
        latency, cta = calibrated(record)
        print(f"LATENCY_CYCLES, CTA_CYCLES = {latency:.1f}, {cta:_.1f}  # in cute_kernels/budget/variants.py")
        print(f"now: {variants.LATENCY_CYCLES}, {variants.CTA_CYCLES:_}")
        return 0
    print_predictions()
    print(f"Against {record['card']}, {record['date']}")
    _say(plain(mla_errors(record)), print)
    _say(plain(gqa_errors(record)), print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
