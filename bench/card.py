"""A Hopper card and its prediction: measure its units, predict the cases, run them, compare, draw.

scripts/run_h800_bench.sh runs this and says what the options mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import card_plots, records, timeline, unit_rates
from bench import gqa as bench_gqa
from bench import mla as bench_mla
from bench import sink as bench_sink
from bench.card_summary import STANDARD, summary
from bench.cases import Bench, card_slug, case_name, run_benches
from bench.ceilings import measure_ceilings
from bench.progress import Progress
from bench.units.spec import EVENTS, ROLES, TRACED_TILES, GatherSpec
from cute_kernels.budget import model
from cute_kernels.budget.rates import H200, Rates
from cute_kernels.runtime.compile import compile_kernel, precompile
from scripts import budget_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
# In addition to the cases of gpu_check: the published one at other topk, 32768 among them.
SWEEP = tuple(bench_mla.DecodeBench("sparse", 128, 128, 2, topk) for topk in (512, 8192, 32768))
MLA_CASES = (*bench_mla.PREDICTED_CASES, *SWEEP)
GQA_CASES = tuple(bench for bench in bench_gqa.DECODE_CASES if bench.kv_dtype == "int8")


def select(quick: bool, only: str | None) -> tuple[list[bench_mla.DecodeBench], list[bench_gqa.GqaBench]]:
    """The cases to run."""

    def wanted(bench: Any) -> bool:
        return (bench.quick or not quick) and (only is None or re.search(only, bench.name) is not None)

    return [bench for bench in MLA_CASES if wanted(bench)], [bench for bench in GQA_CASES if wanted(bench)]


def with_prediction(case: dict[str, Any], found: model.Prediction, cycles: float | None = None) -> dict[str, Any]:
    """A case of a record with what the budget says of it: time, error of the time, the unit that decides.

    A case whose check failed has no time, and gets none by this.
    """
    if "us" not in case:
        return case
    more: dict[str, Any] = {
        "predicted_us": round(found.us, 3),
        "model_error": round(found.us / case["us"] - 1, 4),
        "binds": str(found.binds),
    }
    return {**case, **more, **({} if cycles is None else {"predicted_cycles_per_token": cycles})}


def at_clock_of(rates: Rates, cases: Sequence[dict[str, Any]]) -> Rates:
    """The rates with the SM clock of the MLA cases after a rest, the median of what was read."""
    mla = (case for case in cases if case["op"] == "mla_fp8_decode")
    clocks = [case["sm_mhz_rested"] for case in mla if case.get("sm_mhz_rested")]
    return dataclasses.replace(rates, sm_mhz=statistics.median(clocks)) if clocks else rates


def predicted(
    cases: Sequence[dict[str, Any]],
    mla: Sequence[bench_mla.DecodeBench],
    gqa: Sequence[bench_gqa.GqaBench],
    rates: Rates,
) -> list[dict[str, Any]]:
    """The cases with their predictions. They stand in the order of the benchmarks, MLA first."""
    found = []
    benches: list[bench_mla.DecodeBench | bench_gqa.GqaBench] = [*mla, *gqa]
    for case, bench in zip(cases, benches, strict=True):
        if isinstance(bench, bench_mla.DecodeBench):
            cycles = bench_mla.predicted_cycles(bench, rates)
            found.append(with_prediction(case, bench_mla.predict(bench, rates=rates), cycles))
        else:
            found.append(with_prediction(case, bench_gqa.predict(bench, rates)))
    return found


def case_table(cases: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line a case: speed, cycles, prediction, what decides, and the peer."""
    rows = [
        ["case", "us", "TFLOP/s", "GB/s", "cycles/token", "predicted", "predicted us", "error", "binds", "peer/ours"]
    ]
    for case in cases:
        if "us" not in case:
            rows.append([case_name(case), "FAILED", str(case.get("failed"))[:80], *[""] * (len(rows[0]) - 3)])
            continue
        keys = ("us", "TFLOPs", "GBps", "cycles_per_token", "predicted_cycles_per_token", "predicted_us")
        figures = ["" if case.get(key) is None else f"{case[key]:.4g}" for key in keys]
        peers = " ".join(str(peer.get("ratio", "failed")) for peer in (case.get("peers") or {}).values())
        rows.append([case_name(case), *figures, f"{case['model_error']:+.1%}", case["binds"], peers])
    return rows


def write(record: dict[str, Any], path: pathlib.Path) -> None:
    """Write as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)


def trace(folder: pathlib.Path, card: str, say: Callable[[str], None]) -> list[timeline.Span]:
    """Time the roles of the kernel that gathers and converts, and draw one CTA of it.

    The decode kernel leaves no timestamps; of what it does, this kernel does the producer's part.
    """
    spec = GatherSpec(trace=True)
    ctas = torch.cuda.get_device_properties("cuda").multi_processor_count // 2 * 2
    times = torch.zeros((ctas, len(ROLES) + 1, 2 * TRACED_TILES, 2), dtype=torch.int64, device="cuda")
    run, out, _, expected = unit_rates.gather_call(spec, compile_kernel(spec), unit_rates.FAR_ROWS, "cuda", times)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    if not torch.equal(out, expected):
        say("trace: the kernel's result is wrong, nothing is drawn")
        return []
    found = timeline.spans(times.tolist(), 0, ROLES, EVENTS)
    title = f"One CTA that gathers and converts rows (bench/units/gather.py), on {card}"
    drawn = timeline.draw(found, folder / "trace.svg", title)
    for (role, event), ns in timeline.busy(found).items():
        say(f"trace: {role}, {event}: {ns:.0f} ns in the first {TRACED_TILES} tiles")
    say(f"trace: {folder / 'trace.svg' if drawn else 'matplotlib is missing, nothing is drawn'}")
    return found


def measure(options: argparse.Namespace) -> int:
    """Everything that needs a GPU."""
    progress = Progress()
    machine = records.machine()
    card = machine["card"]
    partial = options.quick or options.only is not None or options.no_units
    place = ROOT / ("build" if partial else "results") / f"bench_{card_slug(card)}"
    folder = options.out or place
    progress.say(f"{card}, driver {machine['driver']}, torch {machine['torch']}; output goes to {folder}")

    details: list[str] = []
    with progress.step("ceilings: matrix product, read, copy"):
        ceilings = measure_ceilings()
    details.append(", ".join(f"{name} {value:.0f}" for name, value in ceilings.items()))
    units: list[Any] = []
    if not options.no_units:
        chosen = unit_rates.selected(lambda name: options.only is None or re.search(options.only, name) is not None)
        progress.say(f"{len(chosen)} units of the card")
        units = unit_rates.run_units(chosen, details.append)
    figures = {"card": card, "sms": torch.cuda.get_device_properties("cuda").multi_processor_count}
    figures |= unit_rates.figures_from(units, ceilings)
    rates = H200.measured(figures)
    kept = sorted({field.name for field in dataclasses.fields(Rates)} - set(figures) - {"sm_mhz"})
    details.append(f"rates taken from an H200, not measured here: {', '.join(kept) or 'none'}")
    budget_table.print_predictions(rates, details.append)

    mla, gqa = select(options.quick, options.only)
    peer = bench_mla.import_peer()
    if isinstance(peer, str):
        details.append(f"no peer to compare with: {peer}")
    caches = bench_mla.Caches(max((bench.cache_tokens for bench in mla), default=0))
    pool = bench_gqa.Pool()
    with progress.step("kernels of the benchmarks"):
        precompile(bench.spec for bench in gqa)
    benches: list[Bench] = [
        *((bench.name, functools.partial(bench_mla.run_decode, bench, caches, peer)) for bench in mla),
        *((bench.name, functools.partial(bench_gqa.run_decode, bench, pool)) for bench in gqa),
    ]
    predictable = len(benches)
    benches += others(options.only)
    found = run_benches(benches, ceilings, progress)
    cases, unpredicted = found[:predictable], found[predictable:]
    rates = at_clock_of(rates, cases)
    cases = predicted(cases, mla, gqa, rates)
    traced = trace(folder, card, details.append) if options.trace else []

    record = {
        **machine,
        "source_digest": records.source_digest(),
        "ceilings": ceilings,
        "units": [unit.as_record() for unit in units],
        "rates": dataclasses.asdict(rates),
        "rates_not_measured": kept,
        "budget": budget_table.mla_table(rates),
        "cases": [*cases, *unpredicted],
        "trace": [dataclasses.asdict(span) for span in traced],
    }
    write(record, folder / "bench.json")
    drawn = card_plots.draw(cases, rates, folder)
    errors = [abs(case["model_error"]) for case in cases if "model_error" in case]
    print("\n".join([*summary(machine, ceilings, [*cases, *unpredicted]), "", *details]))
    for line in budget_table.plain(case_table(cases)):
        print(line)
    if errors:
        far = sum(error > 0.15 for error in errors)
        print(f"the budget is off by {statistics.median(errors):.1%} in the median, by more than 15% in {far} cases")
    print(f"on {card}: {folder / 'bench.json'}, {', '.join(drawn) or 'no plots, for matplotlib is missing'}")
    return int(any("failed" in case for case in found) or any(unit.problem for unit in units))


def others(only: str | None) -> list[Bench]:
    """The standard cases of the operations that the budget has no prediction of."""
    benches: list[Bench] = [("mla_fp8_append", bench_mla.run_append)]
    append = bench_gqa.APPEND_CASES[0]
    benches.append((append.name, functools.partial(bench_gqa.run_append, append, "cuda")))
    for key in (standard.key for standard in STANDARD if standard.key["op"] == "sink_attention"):
        sink = next(bench for bench in bench_sink.CASES if key.items() <= bench.key.items() and bench.peer)
        benches.append((sink.name, functools.partial(bench_sink.run, sink)))
    return [(name, run) for name, run in benches if only is None or re.search(only, name) is not None]
