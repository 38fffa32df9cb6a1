"""Tables of GQA decoding: parts "gqa" and "gqa-summary"."""

from __future__ import annotations

from bench.kernels_run import mark
from bench.report import append_merge, markdown
from bench.report.cases import (
    FLASH_HEADER,
    LOADED_HEADER,
    Case,
    Record,
    cases_of,
    flash,
    host,
    left_out_columns,
    loaded,
    must,
    must_and_missed,
    peer_of,
    peer_ratios,
    ratio_range,
    spread,
)
from bench.report.markdown import MISSING, hundredths, scientific, short

OP = "gqa_decode"
HEADER = (
    "`gqa_decode`: cache, layout",
    "batch x s_k",
    "us",
    "p10 .. p90",
    *LOADED_HEADER,
    "GB/s",
    "of reads",
    "needs",
    "TFLOP/s",
    "cuDNN over bf16, us",
    "its time / ours",
    "under load",
    FLASH_HEADER,
    "relative error",
    "lse error",
    "host, us (of torch's `mul_`)",
)


def decode_append(record: Record) -> list[str]:
    """Every case of decoding, and of the append."""
    decode = cases_of(record, OP)
    return markdown.paragraphs(
        markdown.table(*_decode_table(decode)) if decode else [],
        append_merge.table(cases_of(record, "kv_int8_append")),
    )


def summary(record: Record) -> list[str]:
    """The cases that have to reach a number, in bold where they miss it.

    Layouts and scales that were measured at several sizes share a table with a line a size; the others follow.
    """
    cases = [case for case in cases_of(record, OP) if case.get("must")]
    variants = [variant(case) for case in cases]
    columns = [name for name in dict.fromkeys(variants) if variants.count(name) > 1]
    shared = [case for case in cases if variant(case) in columns]
    rows = []
    for line in dict.fromkeys(map(size, shared)):
        by_variant = {variant(case): case for case in shared if size(case) == line}
        needs = must(next(iter(by_variant.values())))
        reached = [_reached(by_variant.get(column)) for column in columns]
        rows.append([line, needs, *reached, ratio_range(by_variant.values())])
    header = ["`gqa_decode`: batch x s_k", "needs", *columns, "cuDNN over bf16: its time / ours"]
    others = [[variant(case), size(case), must(case), _reached(case)] for case in cases if case not in shared]
    return markdown.paragraphs(
        markdown.table(header, rows) if rows else [],
        markdown.table(["`gqa_decode`: cache, layout", "batch x s_k", "needs", "reached"], others) if others else [],
    )


def variant(case: Case) -> str:
    """Dtype, scales and layout of the cache, whatever its size."""
    scales = "" if case["scales"] == "none" else f" {case['scales'].replace('_', ' ')}"
    layout = f"{case['layout']} {case['page_size']}" if "page_size" in case else case["layout"]
    return f"{case['kv_dtype']}{scales}, {layout}"


def size(case: Case) -> str:
    """Batch and length, and what else is not as in most cases."""
    usual = {"h_q": 32, "h_kv": 8, "d": 128, "s_q": 1, "window": None}
    unusual = [f"{key} {case[key]}" for key, value in usual.items() if case.get(key, value) != value]
    return ", ".join([f"{case['batch']} x {case['s_k']}", *unusual])


def _decode_table(cases: list[Case]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, without the columns that this record has nothing for."""
    left_out = left_out_columns(cases)
    kept = [place for place, name in enumerate(HEADER) if name not in left_out]
    return [HEADER[place] for place in kept], [[row[place] for place in kept] for row in map(_decode_row, cases)]


def _decode_row(case: Case) -> list[str]:
    if "case" in case:  # it raised before it had a key
        return [case["case"], MISSING, "failed", *[MISSING] * (len(HEADER) - 3)]
    name = variant(case) + mark(case)
    errors = [scientific(case.get("rel_err")), scientific(case.get("lse_err"))]
    if "failed" in case:
        return [name, size(case), "check failed", *[MISSING] * 12, *errors, MISSING]
    cells = [short(case["us"]), spread(case), *loaded(case), short(case.get("GBps"))]
    cells += [hundredths(case.get("read_fraction")), must_and_missed(case), short(case.get("TFLOPs"))]
    cells += [short(peer_of(case).get("us")), *peer_ratios(case), flash(case)]
    return [name, size(case), *cells, *errors, host(case)]


def _reached(case: Case | None) -> str:
    """Time and fraction of the ceiling, in bold where that is not enough."""
    if case is None:
        return MISSING
    if "failed" in case:
        return "**check failed**" + mark(case)
    text = f"{short(case['us'])} us, {hundredths(case.get('read_fraction'))}"
    return (text if case.get("met", True) else f"**{text}**") + mark(case)
