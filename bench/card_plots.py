"""The plots of scripts/h800_bench.py: roofline and budget of each variant."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from bench import svg
from cute_kernels.budget import model
from cute_kernels.budget.rates import Rates
from cute_kernels.budget.variants import MLA_VARIANTS, Unit

Case = dict[str, Any]
ROOF = "#4a5568"
UNIT_COLOURS = {
    Unit.TENSOR: "#2b6cb0",
    Unit.POWER: "#63b3ed",
    Unit.SMEM: "#38a169",
    Unit.CONVERSION: "#c05621",
    Unit.GATHER: "#f6ad55",
    Unit.DSM: "#805ad5",
    Unit.HBM: "#4a5568",
    Unit.LATENCY: "#cbd5e0",
}


def draw(cases: Sequence[Case], rates: Rates, folder: pathlib.Path) -> list[str]:
    """Write the plots there is something for, and return their names: none where matplotlib is missing."""
    timed = [case for case in cases if case.get("us") and "failed" not in case]
    made = {"roofline.svg": _roofline, "budget.svg": _budget}
    return svg.write({name: functools.partial(plot, timed, rates) for name, plot in made.items()}, folder)


def _roofline(cases: Sequence[Case], rates: Rates, plt: Any) -> Any:
    """TFLOP/s over FLOP per byte, under the two ceilings that were measured."""
    cases = [case for case in cases if case.get("TFLOPs") and case.get("GBps")]
    if not cases:
        return None
    figure, axis = plt.subplots(figsize=(8, 4.6))
    knee = rates.gemm_tflops / rates.read_gbps * 1e3
    intensities = [case["TFLOPs"] / case["GBps"] * 1e3 for case in cases]
    low, high = min(*intensities, knee) / 2, max(*intensities, knee) * 2
    axis.plot(
        [low, knee, high],
        [low * rates.read_gbps / 1e3, rates.gemm_tflops, rates.gemm_tflops],
        color=ROOF,
        linewidth=1,
        label=f"{rates.read_gbps:.0f} GB/s read, {rates.gemm_tflops:.0f} TFLOP/s product",
    )
    groups = {
        "mla_fp8_decode, sparse": ("o", "#2b6cb0"),
        "mla_fp8_decode, dense": ("s", "#63b3ed"),
        "gqa_decode": ("^", "#c05621"),
    }
    for label, (marker, colour) in groups.items():
        op, _, mode = label.partition(", ")
        points = [
            (x, case["TFLOPs"])
            for x, case in zip(intensities, cases, strict=True)
            if case["op"] == op and (not mode or case.get("mode") == mode)
        ]
        if points:
            axis.plot(*zip(*points, strict=True), marker, color=colour, markersize=5, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte that a call has to move")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"On {rates.card}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _budget(cases: Sequence[Case], rates: Rates, plt: Any) -> Any:
    """Cycles per token of each variant: a bar for each chain of units, stacked where their times add up."""
    figure, axis = plt.subplots(figsize=(10, 0.95 * len(MLA_VARIANTS) + 1.2))
    ticks, labelled = [], set()
    for place, variant in enumerate(MLA_VARIANTS):
        found = model.budget(variant, rates, readers=2)
        for row, chain in enumerate(variant.chains):
            y, left = place + 0.8 * (row / len(variant.chains) - 0.5), 0.0
            for unit in chain:
                cycles = found.demands[unit]
                label = None if unit in labelled or not cycles else str(unit)
                axis.barh(y, cycles, 0.8 / len(variant.chains), left=left, color=UNIT_COLOURS[unit], label=label)
                labelled |= {unit} if label else set()
                left += cycles
        state = "built" if variant.built else "prediction"
        ticks.append(f"{variant.name}\n{state}: {found.cycles:.0f}, {found.binds}")
    measured = [case["cycles_per_token"] for case in cases if _is_big(case) and case.get("cycles_per_token")]
    for cycles in measured:
        axis.axvline(
            cycles, color="#e53e3e", linewidth=1, linestyle="--", label="measured, batch 128, s_q 2, topk 2048"
        )
    axis.set_yticks(range(len(ticks)), ticks, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("cycles per token and CTA of 64 heads")
    axis.set_title(f"Cycle budget with the rates of {rates.card}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _is_big(case: Case) -> bool:
    return (case["op"], case.get("batch"), case.get("h_q"), case.get("s_q"), case.get("topk")) == (
        "mla_fp8_decode", 128, 128, 2, 2048)  # fmt: skip
