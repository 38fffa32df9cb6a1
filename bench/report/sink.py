"""Tables of sink attention: parts "sink", "sink-summary" and "sink-routing"."""

from __future__ import annotations

from bench.kernels_run import mark
from bench.report import markdown
from bench.report.cases import (
    FLASH_HEADER,
    LOADED_HEADER,
    Case,
    Record,
    cases_of,
    flash,
    has_flash,
    left_out_columns,
    loaded,
    must,
    must_and_missed,
    peer_of,
    peer_ratios,
    ratio_range,
    spread,
)
from bench.report.markdown import MISSING, scientific, short

OP = "sink_attention"
HEADER = (
    "`sink_attention`: pass, heads",
    "batch x tokens",
    "us",
    "p10 .. p90",
    *LOADED_HEADER,
    "TFLOP/s",
    "GB/s",
    "needs",
    "cuDNN without sinks, us",
    "its time / ours",
    "under load",
    FLASH_HEADER,
    "without sinks, us",
    "relative error",
)


def forward_backward(record: Record) -> list[str]:
    """Every case of the forward and of the backward."""
    cases = passes(record)
    left_out = left_out_columns(cases)
    kept = [place for place, name in enumerate(HEADER) if name not in left_out]
    rows = [[row[place] for place in kept] for row in map(_row, cases)]
    return markdown.table([HEADER[place] for place in kept], rows) if cases else []


def summary(record: Record) -> list[str]:
    """The cases that have to reach a number, in bold where they miss it."""
    header = ["`sink_attention`: pass, heads", "batch x tokens", "needs", "reached", "cuDNN: its time / ours"]
    cases, rows = passes(record), []
    columns = [FLASH_HEADER] if has_flash(cases) else []
    for case in cases:
        if not case.get("must"):
            continue
        reached = "check failed" if "failed" in case else f"{short(case['us'])} us, {short(case['TFLOPs'])} TFLOP/s"
        reached = reached if case.get("met") else f"**{reached}**"
        rows.append(
            [
                name(case) + mark(case),
                size(case),
                must(case),
                reached,
                ratio_range([case]),
                *([flash(case)] if columns else []),
            ]
        )
    return markdown.table([*header, *columns], rows) if rows else []


def routing(record: Record) -> list[str]:
    """Few queries: a table for each batch, rows of keys, columns of queries, both times, that of the route in bold."""
    cases = [case for case in cases_of(record, OP) if case.get("pass") == "routing"]
    blocks = []
    for batch in dict.fromkeys(case["batch"] for case in cases):
        by_size = {(case["s_k"], case["s_q"]): case for case in cases if case["batch"] == batch}
        columns = list(dict.fromkeys(s_q for _, s_q in by_size))
        rows = [
            [str(s_k), *(_both_routes(by_size.get((s_k, s_q))) for s_q in columns)]
            for s_k in dict.fromkeys(s_k for s_k, _ in by_size)
        ]
        first = next(iter(by_size.values()))
        heads = f"{first['h_q']} and {first['h_kv']} heads of {first['d']}"
        header = [f"batch {batch}, {heads}: decoded / prefilled, us; keys", *(f"s_q {s_q}" for s_q in columns)]
        blocks.append(markdown.table(header, rows))
    return markdown.paragraphs(*blocks)


def passes(record: Record) -> list[Case]:
    """The cases of forward and backward."""
    return [case for case in cases_of(record, OP) if case.get("pass") != "routing"]


def name(case: Case) -> str:
    """Pass, heads, and what else is not as in most cases."""
    if "case" in case:  # it raised before it had a key
        return case["case"]
    window = f", window {case['window']}" if "window" in case else ""
    deterministic = ", deterministic" if case.get("deterministic") else ""
    return f"{case['pass']}, {case['h_q']}/{case['h_kv']} of {case['d']}{window}{deterministic}"


def size(case: Case) -> str:
    """Sequences and their tokens."""
    return f"{case['batch']} x {case['s_k']}" if "batch" in case else MISSING


def _row(case: Case) -> list[str]:
    if "failed" in case:
        return [name(case) + mark(case), size(case), "failed", *[MISSING] * (len(HEADER) - 3)]
    cells = [short(case["us"]), spread(case), *loaded(case), short(case.get("TFLOPs")), short(case.get("GBps"))]
    cells += [must_and_missed(case), short(peer_of(case).get("us")), *peer_ratios(case), flash(case)]
    cells += [short(case.get("us_without_sinks")), scientific(case.get("rel_err"))]
    return [name(case) + mark(case), size(case), *cells]


def _both_routes(case: Case | None) -> str:
    if case is None or "failed" in case:
        return MISSING if case is None else "check failed"
    times = {route: f"{case[f'{route}_us']:.1f}" for route in ("decode", "prefill")}
    return " / ".join(f"**{us}**" if route == case["route"] else us for route, us in times.items()) + mark(case)
