"""Measure a Hopper card's ceilings, predict what the kernels should reach on it, run them, and compare.

    bash scripts/run_h800_bench.sh                    all of it
    bash scripts/run_h800_bench.sh --quick            few cases
    bash scripts/run_h800_bench.sh --only 'sparse'    cases whose name matches
    bash scripts/run_h800_bench.sh --trace            a CTA's timeline by warp role as well

Ten lines come first: the card, its ceilings, its clock under load, and the standard case of each operator with its
speed and the unit that binds it. Details follow, first the budget of each unit. Progress goes to standard error.

Writes bench.jsonl, and with --trace trace.svg, into results/bench_<card>/; a run that leaves something out into
build/bench_<card>/, unless --out says where. Without an SM90 GPU it prints the predictions. The name does not choose a
card: everything printed and written names the one that it ran on.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from bench import budget, cases, gqa, jsonl, mla, records, run, sink, timeline
from bench.ceilings import measure_ceilings
from bench.progress import Progress
from bench.records import Record
from bench.report.cases import peer_name, peer_of
from bench.report.markdown import aligned, short
from cute_kernels.budget import model
from cute_kernels.budget.rates import H200, Rates
from cute_kernels.runtime.arch import is_sm90
from cute_kernels.runtime.compile import precompile

NO_GPU: Final = "No SM90 GPU was found (Hopper, compute capability 9.0): nothing was measured, these are predictions."
SWEEP: Final = tuple(mla.MlaCase("sparse", 128, 128, 2, topk, peers=("flash_mla",)) for topk in (512, 8192, 32768))
"""The published case at other values of topk, 32768 among them."""
MLA_CASES: Final = (*budget.PREDICTED, *SWEEP)
GQA_CASES: Final = tuple(case for case in gqa.DECODE_CASES if case.kv_dtype == "int8")
OTHERS: Final = {"mla": (mla.MlaAppendCase("v3.2"),), "gqa": gqa.APPEND_CASES[:1], "sink": sink.ATTENTION_CASES[:5:4]}
"""Standard cases that the budget does not predict."""
STANDARD: Final[Mapping[str, run.Case]] = {
    "MLA sparse, 128 x 128 x 2, topk 2048": budget.LONG,
    "MLA dense, 64 x 128, 8192 keys": mla.MlaCase("dense", 64, 128, 1, 8192),
    "GQA INT8, 64 x 8192": gqa.GqaDecodeCase(64, 8192),
    "MLA append, 65,536 tokens": mla.MlaAppendCase("v3.2"),
    "INT8 append, 65,536 tokens": gqa.APPEND_CASES[0],
    "sinks forward, 4 x 16384": sink.ATTENTION_CASES[0],
    "sinks backward, 4 x 16384": sink.ATTENTION_CASES[4],
}
"""The standard case of each operator, by its name in the summary."""


# ---- predictions


def with_prediction(case: Record, found: model.Prediction) -> Record:
    """Adds the budget's prediction to a case: time, error of the time, the unit that decides.

    A case whose check failed has no time, and does not get one here.
    """
    if "us" not in case:
        return case
    error = round(found.us / case["us"] - 1, 4)
    return {**case, "predicted_us": round(found.us, 3), "model_error": error, "binds": str(found.binds)}


def predicted(case: Record, bench: Any, rates: Rates) -> Record:
    """Returns a case with its prediction, if the budget has one."""
    if isinstance(bench, mla.MlaCase):
        entry = with_prediction(case, budget.predict_mla(bench, rates=rates))
        return {**entry, "predicted_cycles_per_token": budget.predicted_cycles(bench, rates)}
    return with_prediction(case, budget.predict_gqa(bench, rates)) if isinstance(bench, gqa.GqaDecodeCase) else case


def at_clock_of(rates: Rates, found: Sequence[Record]) -> Rates:
    """Returns the rates with the median SM clock that was read in the MLA cases after a rest."""
    clocks = [case["sm_mhz_rested"] for case in found if case["op"] == mla.MlaCase.op and case.get("sm_mhz_rested")]
    return dataclasses.replace(rates, sm_mhz=statistics.median(clocks)) if clocks else rates


# ---- the summary


def summary(machine: Mapping[str, str], ceilings: Mapping[str, float], found: Sequence[Record]) -> list[str]:
    """Returns ten lines: the card, its ceilings, its clock, and a line for each operator."""
    return [
        f"{machine['card']}, driver {machine['driver']}, torch {machine['torch']}, CuTe DSL {machine['cutlass_dsl']}",
        f"ceilings: reads {ceilings['read_GBps']:.0f} GB/s, copies {ceilings['copy_GBps']:.0f} GB/s, bf16 products "
        f"{ceilings['bf16_gemm_TFLOPs']:.0f} TFLOP/s",
        clock(found),
        *(f"{name}: {_line(records.find_case({'cases': found}, one.key), ceilings)}" for name, one in STANDARD.items()),
    ]


def clock(found: Sequence[Record]) -> str:
    """Returns SM clocks after a rest and under load: the slowest case shows the cost of the power limit."""
    rested = [case["sm_mhz_rested"] for case in found if case.get("sm_mhz_rested")]
    loaded = [case for case in found if case.get("sm_mhz")]
    if not rested:
        return "clock: not known, NVML cannot be read"
    if not loaded:
        return f"clock: {statistics.median(rested):.0f} MHz after a rest"
    slowest = min(loaded, key=lambda case: case["sm_mhz"])
    watts = f" and {slowest['watts']:.0f} W" if "watts" in slowest else ""
    lost = 1 - slowest["sm_mhz"] / statistics.median(rested)
    return (
        f"clock: {statistics.median(rested):.0f} MHz after a rest; under load {slowest['sm_mhz']:.0f} MHz{watts} at "
        f"least ({slowest['op']}): a server loses up to {lost:.0%}"
    )


def _line(case: Record | None, ceilings: Mapping[str, float]) -> str:
    """Returns time, fraction of the ceiling, the unit that binds, and the peer, in a line."""
    if case is None or "us" not in case:
        return "did not run" if case is None else f"FAILED, {str(case.get('failed'))[:90]}"
    under_load = f", {short(case['us_sustained'])} under load" if case.get("us_sustained") else ""
    fraction, ceiling = reached(case, ceilings)
    peer = peer_of(case)
    beside = f"; {peer_name(case)} takes {peer['ratio']:.2f} x" if "ratio" in peer else ""
    binds = case.get("binds") or ("tensor core" if ceiling == "products" else "HBM")
    return f"{short(case['us'])} us{under_load}; {fraction:.0%} of {ceiling}; {binds} binds{beside}"


def reached(case: Record, ceilings: Mapping[str, float]) -> tuple[float, str]:
    """Returns the largest fraction of a ceiling that a case reaches, and which ceiling that is."""
    if "copy_fraction" in case:
        return case["copy_fraction"], "copies"
    fractions = {
        "reads": case.get("read_fraction", case.get("GBps", 0.0) / ceilings["read_GBps"]),
        "products": case.get("TFLOPs", 0.0) / ceilings["bf16_gemm_TFLOPs"],
    }
    what = max(fractions, key=lambda name: fractions[name])
    return fractions[what], what


def case_table(found: Sequence[Record]) -> list[list[str]]:
    """Makes a table with a line per case: speed, cycles, prediction, the unit that decides, and the peer."""
    keys = ("us", "TFLOPs", "GBps", "cycles_per_token", "predicted_cycles_per_token", "predicted_us")
    rows = [["case", *keys, "error", "binds", "peer/ours"]]
    for case in found:
        if "us" not in case:
            rows.append([records.case_name(case), "FAILED", str(case.get("failed"))[:80], *[""] * 7])
            continue
        figures = ["" if case.get(key) is None else f"{case[key]:.4g}" for key in keys]
        error = f"{case['model_error']:+.1%}" if "model_error" in case else ""
        ratios = " ".join(str(peer.get("ratio", "failed")) for peer in (case.get("peers") or {}).values())
        rows.append([records.case_name(case), *figures, error, case.get("binds", ""), ratios])
    return rows


# ---- everything that needs a GPU


def measure(options: argparse.Namespace) -> int:
    """Measures, prints and writes; 1 if a case is wrong."""
    progress, machine = Progress(), records.machine()
    card = machine["card"]
    partial = options.quick or options.only is not None
    place = records.ROOT / ("build" if partial else "results") / f"bench_{records.card_slug(card)}"
    folder = options.out or place
    progress.say(f"{card}, driver {machine['driver']}, torch {machine['torch']}; output goes to {folder}")
    with progress.step("ceilings: matrix product, read, copy"):
        ceilings = measure_ceilings()
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    measured = {rate: ceilings[name] for rate, name in budget.CEILINGS.items()}
    rates = H200.measured({"card": card, "sms": sms, **measured})
    details = budget.predictions(rates)
    wanted = _wanted(options)
    with progress.step("kernels"):
        traced = [timeline.SPEC] if options.trace else []
        precompile([*traced, *cases.specs([case for case, _ in wanted], sms)])
    found = run.run_all(wanted, ceilings, progress)
    rates = at_clock_of(rates, found)
    found = [predicted(case, bench, rates) for case, (bench, _) in zip(found, wanted, strict=True)]
    record = {**machine, "ceilings": ceilings, "rates": dataclasses.asdict(rates), "cases": found}
    jsonl.write(record, folder / "bench.jsonl")
    print("\n".join([*summary(machine, ceilings, found), "", *details, *aligned(case_table(found))]))
    if errors := [abs(case["model_error"]) for case in found if "model_error" in case]:
        far = sum(error > 0.15 for error in errors)
        print(f"the budget is off by {statistics.median(errors):.1%} in the median, by more than 15% in {far} cases")
    if options.trace:
        with progress.step("the timeline of a CTA"):
            steps = timeline.measure()
        drawn = [f"trace: {folder / name}" for name in timeline.draw(steps, folder, card)]
        print("\n".join([*timeline.busy(steps), *(drawn or ["trace: matplotlib is missing, nothing is drawn"])]))
    print(f"on {card}: {folder / 'bench.jsonl'}")
    return int(any("failed" in case for case in found))


def _wanted(options: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Returns the cases to run, each with its store, those with a prediction first."""
    stores = {name: section.store("cuda") for name, section in cases.SECTIONS.items()}
    predictable = [(case, stores["mla"]) for case in run.selected(MLA_CASES, options.quick, options.only)]
    predictable += [(case, stores["gqa"]) for case in run.selected(GQA_CASES, options.quick, options.only)]
    others = [(case, stores[name]) for name, some in OTHERS.items() for case in run.selected(some, False, options.only)]
    return predictable + others


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--trace", action="store_true", help="draw a CTA's timeline by warp role")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where to write")
    options = parser.parse_args()
    if torch.cuda.is_available() and is_sm90(torch.device("cuda")):
        return measure(options)
    print("\n".join([*budget.predictions(), NO_GPU]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
