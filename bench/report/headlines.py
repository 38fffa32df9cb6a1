"""The part "headlines": one case an operation, with its conditions in words, for the README."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.kernels_run import mark
from bench.records import card_slug
from bench.report import markdown
from bench.report.cases import Case, Record, flash, has_flash, peer_of, values_of
from bench.report.markdown import scientific, short
from fp8_mla.formats import V3_2

GQA = {"op": "gqa_decode", "kv_dtype": "int8", "scales": "per_token_head", "layout": "BNSH", "batch": 64, "s_k": 8192}
SINK = {"op": "sink_attention", "batch": 4, "h_q": 64, "h_kv": 8, "d": 64, "s_k": 16384}
BF16_BYTES = 2 * V3_2.d_qk
"""Of a token in the cache that FlashMLA reads in dense decoding."""
SINK_CONDITIONS = "{batch} x {s_k} tokens, {h_q}/{h_kv} heads of {d}, causal, with sinks"


class Headline(NamedTuple):
    """A row of the table.

    call        what is called
    conditions  with names of the case's keys in braces
    key         names the case: it has these values, and no window, ragged lengths or order of sums
    speed       of the case, in words
    """

    call: str
    conditions: str
    key: Mapping[str, Any]
    speed: Callable[[Case], str]


def _times(peer: str) -> Callable[[Case], str]:
    """How many times as long the peer takes."""

    def speed(case: Case) -> str:
        found = peer_of(case)
        under_load = f" ({found['ratio_sustained']:.2f} under load)" if "ratio_sustained" in found else ""
        others = f"; {flash(case)}" if has_flash([case]) else ""
        return f"{found['ratio']:.2f} x {peer}{under_load}{others}" if "ratio" in found else markdown.MISSING

    return speed


def _gqa_speed(case: Case) -> str:
    return f"{_times('cuDNN over a bf16 cache')(case)}, {case['read_fraction']:.2f} of a plain read"


WITHOUT_SINKS = _times("cuDNN without sinks")
HEADLINES = (
    Headline(
        "`mla_fp8_decode`, sparse",
        "{batch} requests x {s_q} tokens, {h_q} heads, topk {topk}",
        {"op": "mla_fp8_decode", "mode": "sparse", "batch": 128, "h_q": 128, "s_q": 2, "topk": 2048},
        _times("FlashMLA"),
    ),
    Headline(
        "`mla_fp8_decode`, dense",
        "{batch} requests, {h_q} heads, {s_k} keys",
        {"op": "mla_fp8_decode", "mode": "dense", "batch": 64, "h_q": 128, "s_q": 1, "s_k": 8192},
        _times(f"FlashMLA over a bf16 cache ({BF16_BYTES / V3_2.token_bytes:.2f} x the bytes)"),
    ),
    Headline(
        "`gqa_decode`",
        "{batch} requests, {h_q}/{h_kv} heads of {d}, {s_k} tokens, INT8 {scales}, {layout}",
        {**GQA, "h_q": 32, "s_q": 1},
        _gqa_speed,
    ),
    Headline("`sink_attention`, forward", SINK_CONDITIONS, {**SINK, "pass": "forward"}, WITHOUT_SINKS),
    Headline("`sink_attention`, backward", SINK_CONDITIONS, {**SINK, "pass": "backward"}, WITHOUT_SINKS),
)
UNUSUAL = ("window", "ragged", "deterministic", "cache_format")


def headlines(*records: Record) -> list[str]:
    """The table: a row for each headline that a record has a case of, columns for each card."""
    alone = len(records) == 1
    header = ["call", "conditions"]
    for record in records:
        card = "" if alone else f"{card_slug(record['card']).upper()}: "
        header += [f"{card}us", f"{card}speed"]
    rows = []
    for headline in HEADLINES:
        found = [_cases(headline, record) for record in records]
        first = next((cases[0] for cases in found if cases), None)
        if first is None:
            continue
        cells = [
            cell for record, cases in zip(records, found, strict=True) for cell in _figures(headline, record, cases)
        ]
        errors = "; ".join(scientific(case.get("rel_err")) for case in next(filter(None, found)))
        older = "".join(sorted({mark(case) for cases in found for case in cases}))
        rows.append([headline.call, headline.conditions.format(**first) + older, *cells, errors])
    return markdown.table([*header, "error against float64"], rows) if rows else []


def _cases(headline: Headline, record: Record) -> list[Case]:
    """The cases of a headline: one, or that of exact and that of fp8 scores."""
    return [
        case
        for case in record["cases"]
        if not any(key in case for key in UNUSUAL) and all(case.get(k) == v for k, v in headline.key.items())
    ]


def _figures(headline: Headline, record: Record, cases: list[Case]) -> list[str]:
    """Time and speed, of several cases with what they are; both with the family of values that takes longest too."""
    if not cases:
        return [markdown.MISSING] * 2
    times, speeds = [], []
    for case in cases:
        name = f"{case['scores']} scores: " if len(cases) > 1 else ""
        if "failed" in case:
            times.append(f"{name}check failed")
            speeds.append(markdown.MISSING)
            continue
        us, ratio = _worst(record, case)
        times.append(name + short(case["us"]) + us)
        speeds.append(headline.speed(case) + ratio)
    return ["; ".join(times), "; ".join(speeds)]


def _worst(record: Record, case: Case) -> tuple[str, str]:
    """What follows time and speed: those with the values that take longest; nothing where they were not measured."""
    found = values_of(record, case)
    if not found:
        return "", ""
    us = f", worst values ({found['worst_family']}) {short(found['worst_us'])}, {found['worst_ratio']:.2f} x"
    return us, f", worst values {found['worst_ratio_peer']:.2f}" if "worst_ratio_peer" in found else ""
