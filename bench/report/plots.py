"""Plots of speeds, one per operation: scripts/results_table.py puts them into docs/img/."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from bench import svg
from bench.report.cases import PEERS, Case, Record, cases_of, name, peer_name, ratios
from bench.report.tables import passes

Panels = Mapping[str, Sequence[Case]]


def draw(record: Record, folder: pathlib.Path) -> list[str]:
    """Writes the plots for which the record has cases, and returns their names: none without matplotlib."""
    mla = [case for case in cases_of(record, "mla_fp8_decode") if _is_usual(case)]
    gqa = [case for case in cases_of(record, "gqa_decode") if ratios(case)]
    sink = passes(record)
    plots: dict[str, tuple[Panels, str]] = {
        "mla_speed.svg": (_panels(mla, "mode"), "TFLOPs"),
        "gqa_speed.svg": (_panels(gqa, "kv_dtype"), "GBps"),
        "sink_speed.svg": (_panels(sink, "pass"), "TFLOPs"),
    }
    made = {
        file: functools.partial(_bars, record, panels, rate) for file, (panels, rate) in plots.items() if any(panels)
    }
    return svg.write(made, folder)


def _is_usual(case: Case) -> bool:
    return "cache_format" not in case


def _panels(cases: Sequence[Case], key: str) -> Panels:
    """Groups the cases that have a speed by the value of a field."""
    timed = [case for case in cases if case.get("us") and "failed" not in case]
    return {value: [case for case in timed if case[key] == value] for value in dict.fromkeys(c[key] for c in timed)}


def _bars(record: Record, panels: Panels, rate: str, plt: Any) -> Any:
    """Draws the rate of each case beside its peer's, panels side by side, each as wide as its number of cases."""
    widths = [len(cases) for cases in panels.values()]
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.6), width_ratios=widths, sharey=True, squeeze=False)
    axes[0][0].set_ylabel({"TFLOPs": "TFLOP/s", "GBps": "GB/s, the peer's in bytes of our cache"}[rate])
    for axis, (title, cases) in zip(axes[0], panels.items(), strict=True):
        ours = [case[rate] for case in cases]
        theirs = [value / (ratios(case) or [float("inf")])[0] for case, value in zip(cases, ours, strict=True)]
        peers = sorted({PEERS[peer_name(case)] for case in cases if ratios(case)})
        places = range(len(cases))
        axis.bar([place - 0.2 for place in places], ours, 0.4, label="cute_kernels", color="#2b6cb0")
        axis.bar([place + 0.2 for place in places], theirs, 0.4, label=", ".join(peers) or "no peer", color="#cbd5e0")
        axis.set_xticks(list(places), [name(case) for case in cases], fontsize=6, rotation=60, ha="right")
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    if rate == "GBps":
        axes[0][0].axhline(record["ceilings"]["read_GBps"], color="#4a5568", linewidth=1, linestyle="--")
    figure.suptitle(f"{record['card']}, {record['date']}", fontsize=9)
    return figure
