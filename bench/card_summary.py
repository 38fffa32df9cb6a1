"""The ten lines that scripts/run_h800_bench.sh prints first: what to expect of a card, and what limits it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.report.cases import peer_name, peer_of
from bench.report.markdown import short

Case = dict[str, Any]


class Standard(NamedTuple):
    """A case that stands for its operation.

    name  in the summary
    key   names it: the first case that has these values
    """

    name: str
    key: Mapping[str, Any]


SINK = {"op": "sink_attention", "h_q": 64, "d": 64, "s_k": 16384}
STANDARD = (
    Standard("MLA sparse, 128 x 128 x 2, topk 2048", {"op": "mla_fp8_decode", "h_q": 128, "s_q": 2, "topk": 2048}),
    Standard("MLA dense, 64 x 128, 8192 keys", {"op": "mla_fp8_decode", "batch": 64, "h_q": 128, "s_k": 8192}),
    Standard("GQA INT8, 64 x 8192", {"op": "gqa_decode", "kv_dtype": "int8", "batch": 64, "s_k": 8192}),
    Standard("MLA append, 65,536 tokens", {"op": "mla_fp8_append"}),
    Standard("INT8 append, 65,536 tokens", {"op": "kv_int8_append"}),
    Standard("sinks forward, 4 x 16384", {**SINK, "pass": "forward"}),
    Standard("sinks backward, 4 x 16384", {**SINK, "pass": "backward"}),
)
PEERS = {"flash_mla": "FlashMLA", "flash_mla_bf16": "FlashMLA over bf16", "cudnn_bf16": "cuDNN over bf16"}
WAYS = {"sum_GBps": "torch.sum", "tma_GBps": "TMA", "copy_GBps": "copy"}


def summary(machine: Mapping[str, str], ceilings: Mapping[str, float], cases: Sequence[Case]) -> list[str]:
    """Ten lines: the card, its ceilings, its clock, and a line for each operation."""
    ways = ", ".join(f"{name} {ceilings[key]:.0f}" for key, name in WAYS.items() if key in ceilings)
    lines = [
        f"{machine['card']}, driver {machine['driver']}, torch {machine['torch']}, CuTe DSL {machine['cutlass_dsl']}",
        f"ceilings: reads {ceilings['read_GBps']:.0f} GB/s ({ways}), bf16 products "
        f"{ceilings['bf16_gemm_TFLOPs']:.0f} TFLOP/s",
        clock(cases),
    ]
    return [*lines, *(_line(standard, find(standard, cases), ceilings) for standard in STANDARD)]


def find(standard: Standard, cases: Sequence[Case]) -> Case | None:
    """The case of a standard one, if it ran."""
    return next((case for case in cases if standard.key.items() <= case.items()), None)


def clock(cases: Sequence[Case]) -> str:
    """SM clocks after a rest and under load: the slowest case says what power costs."""
    rested = [case["sm_mhz_rested"] for case in cases if case.get("sm_mhz_rested")]
    loaded = [case for case in cases if case.get("sm_mhz")]
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


def _line(standard: Standard, case: Case | None, ceilings: Mapping[str, float]) -> str:
    """Time, fraction, what binds, and the peer."""
    if case is None:
        return f"{standard.name}: did not run"
    if "us" not in case:
        return f"{standard.name}: FAILED, {str(case.get('failed'))[:90]}"
    under_load = f", {short(case['us_sustained'])} under load" if case.get("us_sustained") else ""
    fraction, ceiling = reached(case, ceilings)
    peer = peer_of(case)
    name = peer_name(case)
    beside = f"; {PEERS.get(name, name)} takes {peer['ratio']:.2f} x" if "ratio" in peer else ""
    binds = case.get("binds") or ("tensor core" if ceiling == "products" else "HBM")
    return f"{standard.name}: {short(case['us'])} us{under_load}; {fraction:.0%} of {ceiling}; {binds} binds{beside}"


def reached(case: Case, ceilings: Mapping[str, float]) -> tuple[float, str]:
    """The largest fraction of a ceiling that a case reaches, and of what."""
    fractions = {
        "copies": case.get("copy_fraction", 0.0),
        "reads": case.get("read_fraction", case.get("GBps", 0.0) / ceilings["read_GBps"]),
        "products": case.get("TFLOPs", 0.0) / ceilings["bf16_gemm_TFLOPs"],
    }
    if fractions["copies"]:
        return fractions["copies"], "copies"
    what = max(fractions, key=lambda name: fractions[name])
    return fractions[what], what
