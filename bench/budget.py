"""The cycle budget's predictions of the cases, beside measurements; and the constants of the built kernel.

python -m bench.budget                print the tables
python -m bench.budget --calibrate    fit LATENCY_CYCLES and CTA_CYCLES to results/h200.jsonl
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench import gqa, mla, records
from bench.kernels_run import mark
from bench.mla import HEADS_OF_CTA, MlaCase
from bench.records import Record, find_case
from bench.report import markdown as report_markdown
from bench.report.markdown import aligned
from cute_kernels.budget import model, variants
from cute_kernels.budget.rates import H200, PUBLISHED_H800, Rates
from cute_kernels.budget.variants import (
    GQA_VARIANTS,
    MLA_BUILT,
    MLA_HALF,
    MLA_NARROW,
    MLA_VARIANTS,
    TURNS,
    MlaVariant,
    Unit,
)
from cute_kernels.mla.plan import DecodePlan, plan_decode

HEADS: Final = 128
READERS: Final = HEADS // HEADS_OF_CTA
FEW_HEADS: Final = 16
"""Most heads of a CTA for which the kernel has another design."""
PUBLISHED: Final = (
    ("published estimate, no cluster", variants.OVERLAPPED),
    ("published estimate, crossover", variants.CROSSOVER_ASYNC),
)
LONG, SHORT = MlaCase("sparse", 128, 128, 2), MlaCase("sparse", 128, 128, 4, 512)
"""The two cases from which the constants of the built kernel are fitted."""
PREDICTED: Final = tuple(case for case in mla.V32_CASES if not case.ragged)
"""Cases that the budget predicts: it supports neither ragged lengths nor other formats."""
CEILINGS: Final = {"read_gbps": "read_GBps", "copy_gbps": "copy_GBps", "gemm_tflops": "bf16_gemm_TFLOPs"}
"""Rates of a card, and the ceilings of a record that measure them."""
Table = list[list[str]]
"""Rows of cells, the header first."""


# ---- predictions


def plan(case: MlaCase, sms: int) -> DecodePlan:
    """Plans how a case is cut on a card with `sms` SMs."""
    sizes = {"batch": case.batch, "h_q": case.h_q, "s_q": case.s_q, "max_keys": case.keys}
    dense = case.mode == "dense"
    return plan_decode(sparse=not dense, num_sms=sms, ragged=case.ragged or dense, **sizes)


def launch(case: MlaCase, sms: int) -> model.MlaLaunch:
    """Returns the plan in the budget's form, which knows no lengths. The queries of a sequence share a dense cache.

    Raises:
        ValueError: the lengths are ragged.
    """
    if case.ragged:
        raise ValueError(f"case: got {case.name}, needs requests of one length")
    made, dense, rows = plan(case, sms), case.mode == "dense", case.batch * case.s_q * case.h_q
    readers = -(-case.h_q // HEADS_OF_CTA) * (case.s_q if dense else 1)
    return model.MlaLaunch(
        made.ctas, made.tiles_per_split, made.num_splits, rows, readers, made.spec.balanced, pages=dense
    )


def built(case: MlaCase, sms: int) -> MlaVariant:
    """Returns the variant of the kernel that the planner asks for."""
    heads = getattr(plan(case, sms).spec, "heads", None)
    if heads is None:  # the crossover has only one size
        return TURNS
    return MLA_BUILT if heads == HEADS_OF_CTA else MLA_NARROW if heads <= FEW_HEADS else MLA_HALF


def predict_mla(case: MlaCase, variant: MlaVariant | None = None, rates: Rates = H200) -> model.Prediction:
    """Predicts the time of a case without ragged lengths."""
    return model.predict_mla(launch(case, rates.sms), variant or built(case, rates.sms), rates)


def predicted_cycles(case: MlaCase, rates: Rates = H200) -> float:
    """Returns the prediction in the unit of "cycles_per_token"."""
    us = predict_mla(case, rates=rates).us
    return round(model.spread_cycles(us, rates.sm_mhz, case.tokens_spread, rates.sms), 1)


def predict_gqa(case: gqa.GqaDecodeCase, rates: Rates = H200) -> model.Prediction:
    """Predicts the time of a case, without the small kernel before the decode."""
    spec, *_ = case.specs(rates.sms)
    return model.predict_gqa(
        case.bytes_moved, spec.cluster > 1, rates, token_scales=gqa.has_token_scales(case.scales)
    )  # fmt: skip


# ---- tables


def mla_table(rates: Rates = H200) -> Table:
    """Returns cycles per token and CTA of each unit, for variants with 128 heads and the published estimate."""
    rows = [["variant", "state", *map(str, Unit), "cycles", "binds"]]
    for name, variant in PUBLISHED:
        rows.append([name, "estimate", *_budget_cells(model.budget(variant, PUBLISHED_H800, READERS), published=True)])
    for variant in MLA_VARIANTS:
        state = "built" if variant.built else "prediction"
        rows.append([variant.name, state, *_budget_cells(model.budget(variant, rates, READERS))])
    return rows


def _budget_cells(found: model.Budget, published: bool = False) -> list[str]:
    # units that the published estimate leaves out have no number there
    silent = {Unit.POWER, Unit.SMEM, Unit.GATHER, Unit.DSM, Unit.HBM, Unit.LATENCY} if published else set()
    cells = ["–" if unit in silent else _short(found.demands[unit]) for unit in Unit]
    binds = Unit.TENSOR if published and found.binds is Unit.POWER else found.binds
    return [*cells, _short(found.cycles), str(binds)]


def gqa_table(rates: Rates = H200) -> Table:
    """Makes a table of cycles per token and KV head of each unit, for each kind of cache with heads of 128."""
    units = [unit for chain in GQA_VARIANTS[0].chains for unit in chain]
    rows = [["cache", "bytes", *map(str, units), "cycles", "binds"]]
    for variant in GQA_VARIANTS:
        found = model.budget(variant, rates)
        cells = [_short(found.demands[unit]) for unit in units]
        rows.append([variant.name, f"{variant.bytes_per_token:.0f}", *cells, _short(found.cycles), str(found.binds)])
    return rows


def speed_table(rates: Rates = H200) -> Table:
    """Makes a table of each variant's predicted time in three cases: microseconds and TFLOP/s."""
    shown = [LONG, MlaCase("sparse", 128, 128, 2, 32768), MlaCase("sparse", 1, 128)]
    rows = [["variant", "state", *(f"{_size(case)}, topk {case.keys}" for case in shown)]]
    for variant in MLA_VARIANTS:
        times = [predict_mla(case, variant, rates).us for case in shown]
        speeds = [case.flops / us / 1e6 for case, us in zip(shown, times, strict=True)]
        cells = [f"{_short(us)} us, {speed:.0f} TFLOP/s" for us, speed in zip(times, speeds, strict=True)]
        rows.append([variant.name, "built" if variant.built else "prediction", *cells])
    return rows


def rates_of(record: Record) -> Rates:
    """Returns the rates of a record's card; other cards than an H200 get the ceilings that were measured on them.

    The constants of the kernels come from the H200's record, so errors on another card are errors of a forecast.
    """
    if H200.card in record["card"]:
        return H200
    ceilings = {rate: record["ceilings"][name] for rate, name in CEILINGS.items()}
    return H200.measured({"card": record["card"], **ceilings})


def mla_errors(record: Record) -> Table:
    """Makes a table of every MLA case of a record with its prediction."""
    rates = rates_of(record)
    rows = [["`mla_fp8_decode`", "keys", "us", "p10 .. p90", "back to back", "predicted, us", "error", "binds"]]
    for bench in PREDICTED:
        case = find_case(record, bench.key)
        if case is None or "us" not in case:
            continue
        found = predict_mla(bench, rates=rates)
        note = " (calibrated on it)" if rates is H200 and bench.key in (LONG.key, SHORT.key) else ""
        times = [_short(case["us"]), f"{_short(case['us_p10'])} .. {_short(case['us_p90'])}", _short(measured(case))]
        error = f"{found.us / measured(case) - 1:+.1%}{note}"
        name = f"{bench.mode} {_size(bench)}{mark(case)}"
        rows.append([name, str(bench.keys), *times, _short(found.us), error, str(found.binds)])
    return rows


def gqa_errors(record: Record) -> Table:
    """Makes a table of predictions for the GQA cases of a record: their number, and their errors."""
    errors, rates = dict[str, list[float]](), rates_of(record)
    for bench in gqa.DECODE_CASES:
        case = find_case(record, bench.key)
        if case is not None and "us" in case:
            group = f"{bench.kv_dtype}, {'from 32' if bench.batch >= 32 else 'below 32'} sequences{mark(case)}"
            errors.setdefault(group, []).append(predict_gqa(bench, rates).us / measured(case) - 1)
    rows = [["`gqa_decode`", "cases", "error: lowest", "median", "highest"]]
    for group, found in errors.items():
        ordered = sorted(found)
        figures = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
        rows.append([group, str(len(ordered)), *(f"{error:+.1%}" for error in figures)])
    return rows


def measured(case: Mapping[str, Any]) -> float:
    """Returns the microseconds that the budget predicts: of calls back to back."""
    return case.get("us_back_to_back", case["us"])


def calibrated(record: Record) -> tuple[float, float]:
    """Fits (LATENCY_CYCLES, CTA_CYCLES) to the two named cases of a record.

    Raises:
        ValueError: the record lacks one of them.
    """
    points = []
    for bench in (LONG, SHORT):
        case = find_case(record, bench.key)
        if case is None or "us" not in case:
            raise ValueError(f"record: has no time of {bench.name}")
        points.append((launch(bench, H200.sms), measured(case)))
    return model.calibrate(points[0], points[1])


def _size(case: MlaCase) -> str:
    return f"{case.batch} x {case.h_q} x {case.s_q}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


# ---- pages and terminals


def markdown(rows: Table) -> list[str]:
    """Formats a table for a page."""
    return report_markdown.table(rows[0], rows[1:])


PARTS: Final[Mapping[str, Callable[[], list[str]]]] = {
    "budget-mla": lambda: markdown(mla_table()),
    "budget-gqa": lambda: markdown(gqa_table()),
    "budget-speed": lambda: markdown(speed_table()),
}
"""Tables that do not depend on a record, by the markers of scripts/results_table.py."""


def errors(record: Record) -> list[str]:
    """Returns both tables of errors; no lines if the record has no such case."""
    tables = [markdown(table) for table in (mla_errors(record), gqa_errors(record)) if len(table) > 1]
    return report_markdown.paragraphs(*tables)


def predictions(rates: Rates = H200) -> list[str]:
    """Returns the tables that need no measurement, for a terminal."""
    return [
        f"Cycles per token and CTA of 64 heads, {HEADS} heads; rates of {rates.card}",
        *(*aligned(mla_table(rates)), "", "Time of a call"),
        *(*aligned(speed_table(rates)), "", "GQA: cycles per token and KV head of 128"),
        *(*aligned(gqa_table(rates)), ""),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true", help="only the two constants of the built kernel")
    parser.add_argument("--results", type=pathlib.Path, default=records.RESULTS / "h200.jsonl")
    options = parser.parse_args(arguments)
    record = records.read(options.results)
    if options.calibrate:
        latency, cta = calibrated(record)
        print(f"LATENCY_CYCLES, CTA_CYCLES = {latency:.1f}, {cta:_.1f}  # in cute_kernels/budget/variants.py")
        print(f"now: {variants.LATENCY_CYCLES}, {variants.CTA_CYCLES:_}")
        return 0
    compared = [*aligned(mla_errors(record)), "", *aligned(gqa_errors(record))]
    print("\n".join([*predictions(), f"Against {record['card']}, {record['date']}", *compared]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
