"""Plots of speeds, one an operation: what scripts/results_table.py puts into docs/img/."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from bench import svg
from bench.report.cases import Case, Record, cases_of, name, ratios, size, variant
from bench.report.markdown import short
from bench.report.tables import passes

COLOURS = ("#2b6cb0", "#63b3ed", "#c05621", "#f6ad55")


def draw(record: Record, folder: pathlib.Path) -> list[str]:
    """Write the plots that the record has cases for, and return their names: none without matplotlib."""
    made = {"mla_speed.svg": mla_speed, "gqa_speed.svg": gqa_speed, "sink_speed.svg": sink_speed}
    return svg.write({name: functools.partial(plot, record) for name, plot in made.items()}, folder)


def mla_speed(record: Record, plt: Any) -> Any:
    """Bars of TFLOP/s with FlashMLA's, a panel for sparse and one for dense."""
    decode = [case for case in cases_of(record, "mla_fp8_decode") if case.get("TFLOPs") and "cache_format" not in case]
    panels = [(mode, [case for case in decode if case["mode"] == mode]) for mode in ("sparse", "dense")]
    panels = [(mode, cases) for mode, cases in panels if cases]
    if not panels:
        return None
    figure, axes = _panels(plt, [len(cases) for _, cases in panels])
    for axis, (mode, cases) in zip(axes, panels, strict=True):
        keys = "topk" if mode == "sparse" else "s_k"
        labels = [
            f"{case['batch']}x{case['h_q']}x{case['s_q']}\n{'to ' if case.get('ragged') else ''}{case[keys]}"
            for case in cases
        ]
        fp8 = [case.get("scores") == "fp8" for case in cases]
        labels = [f"{label}\nfp8" if is_fp8 else label for label, is_fp8 in zip(labels, fp8, strict=True)]
        _bars(axis, cases, "FlashMLA" if mode == "sparse" else "FlashMLA, bf16 cache", labels)
        axis.set_title(f"{mode}: batch x heads x s_q, {keys}", fontsize=9)
    figure.suptitle(f"mla_fp8_decode on {record['card']}, {record['date']}", fontsize=10)
    return figure


def gqa_speed(record: Record, plt: Any) -> Any:
    """GB/s over the bytes that a call reads, under the read ceiling; cuDNN's speed in bytes of the same INT8 cache."""
    decode = [case for case in cases_of(record, "gqa_decode") if case.get("GBps") and case["kv_dtype"] == "int8"]
    plain = [case for case in decode if (case["h_q"], case["s_q"]) == (32, 1) and "window" not in case]
    series: dict[str, list[Case]] = {}
    for case in sorted(plain, key=_bytes_read):
        series.setdefault(variant(case), []).append(case)
    # the layouts and scales that were measured at more than one size
    series = {name: cases for name, cases in series.items() if len(cases) > 1}
    if not series:
        return None
    figure, axis = plt.subplots(figsize=(9, 4.2))
    axis.axhline(record["ceilings"]["read_GBps"], color="#4a5568", linewidth=1, linestyle="--", label="read ceiling")
    for place, (label, cases) in enumerate(series.items()):
        places, rates = [_bytes_read(case) for case in cases], [case["GBps"] for case in cases]
        axis.plot(
            places, rates, marker="o", markersize=4, linewidth=1, color=COLOURS[place % len(COLOURS)], label=label
        )
    first = next(iter(series.values()))
    peers = {size(case): (_bytes_read(case), case["GBps"] / ratio) for case in first for ratio in ratios(case)}
    if peers:
        axis.plot(
            *zip(*peers.values(), strict=True),
            "s",
            color="#a0aec0",
            markersize=5,
            label="cuDNN, bf16 cache (same tokens)",
        )
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    ticks = {size(case): _bytes_read(case) for case in first}
    labels = [f"{size}\n{short(places / 1e6)} MB" for size, places in ticks.items()]
    axis.set_xticks(list(ticks.values()), labels, fontsize=7, rotation=20)
    axis.set_xticks([], minor=True)
    axis.set_xlabel("batch x s_k, and the bytes of a call", fontsize=8)
    axis.set_ylabel("GB/s of INT8 cache")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_title(f"gqa_decode, 32 query and 8 KV heads of 128, on {record['card']}, {record['date']}", fontsize=9)
    return figure


def sink_speed(record: Record, plt: Any) -> Any:
    """Bars of TFLOP/s with cuDNN's, which has no sinks, a panel for the forward and one for the backward."""
    timed = [case for case in passes(record) if case.get("TFLOPs")]
    panels = [(way, [case for case in timed if case["pass"] == way]) for way in ("forward", "backward")]
    panels = [(way, cases) for way, cases in panels if cases]
    if not panels:
        return None
    figure, axes = _panels(plt, [len(cases) for _, cases in panels])
    for axis, (way, cases) in zip(axes, panels, strict=True):
        labels = [name(case).removeprefix(f"{way}, ").replace(", ", "\n") for case in cases]
        _bars(axis, cases, "cuDNN, no sinks", labels)
        axis.set_title(f"{way}: query/KV heads of d, batch x tokens", fontsize=9)
    figure.suptitle(f"sink_attention on {record['card']}, {record['date']}", fontsize=10)
    return figure


def _panels(plt: Any, widths: Sequence[int]) -> tuple[Any, Sequence[Any]]:
    """A figure of panels side by side, each as wide as it has cases, over one axis of TFLOP/s."""
    figure, axes = plt.subplots(1, len(widths), figsize=(12, 4.2), width_ratios=widths, sharey=True, squeeze=False)
    axes[0][0].set_ylabel("TFLOP/s")
    return figure, axes[0]


def _bars(axis: Any, cases: Sequence[Case], peer: str, labels: Sequence[str]) -> None:
    """TFLOP/s of each case with those of its peer."""
    ours = [case["TFLOPs"] for case in cases]
    peer_ratios = [next(iter(ratios(case)), None) for case in cases]
    theirs = [rate / ratio if ratio else 0.0 for rate, ratio in zip(ours, peer_ratios, strict=True)]
    places = range(len(cases))
    axis.bar([place - 0.2 for place in places], ours, 0.4, label="cute_kernels", color="#2b6cb0")
    axis.bar([place + 0.2 for place in places], theirs, 0.4, label=peer, color="#cbd5e0")
    axis.set_xticks(list(places), labels, fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def _bytes_read(case: Case) -> float:
    """Bytes of a call, from its rate."""
    return case["GBps"] * case["us"] * 1e3
