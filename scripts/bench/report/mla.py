"""Tables of FP8 MLA decoding: parts "mla", "mla-sustained", "mla-scores" and "crossover"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.bench.kernels_run import mark
from scripts.bench.report import append_merge, markdown
from scripts.bench.report.cases import Case, Record, cases_of, peer_of, peer_ratio, spread
from scripts.bench.report.markdown import MISSING, hundredths, scientific, short

OP = "mla_fp8_decode"
KEYS = {"sparse": "topk", "dense": "s_k"}
"""By mode, the key of a case that says how many keys a query has."""
PEERS = {"sparse": "FlashMLA", "dense": "FlashMLA over a bf16 cache"}


def decode_append_merge(record: Record) -> list[str]:
    """A table of sparse cases, one of dense cases, one of the append and the merge."""
    decode = cases_of(record, OP)
    # a case that raised has no mode, and must be seen all the same
    raised = [case for case in decode if "mode" not in case]
    return markdown.paragraphs(
        *(_decode_table(mode, [case for case in decode if case.get("mode") == mode]) for mode in KEYS),
        append_merge.table([*raised, *cases_of(record, "mla_fp8_append", "merge_states")]),
    )


def sustained(record: Record) -> list[str]:
    """The cases that are timed under load as well."""
    rows = []
    for case in cases_of(record, OP):
        if "sustained" not in case:
            continue
        loaded = case["sustained"]
        peer: dict[str, Any] = next((entry for entry in case["peers"].values() if "sustained_us" in entry), {})
        under_load = f"{peer['sustained_us'] / loaded['us']:.2f}" if peer else MISSING
        times = [short(case["us"]), short(loaded["us"])]
        clocks = [f"{mhz:.0f}" if mhz else MISSING for mhz in (case.get("sm_mhz"), loaded.get("sm_mhz"))]
        ratios = [hundredths(peer.get("ratio")), under_load]
        rows.append([case_name(case) + mark(case), *map(" / ".join, (times, clocks, ratios))])
    return markdown.table(["case", "us after a rest / under load", "MHz", "x FlashMLA"], rows) if rows else []


def scores(record: Record) -> list[str]:
    """The cases that are timed with exact and with fp8 scores forced."""
    rows = []
    for case in cases_of(record, OP):
        times = case.get("scores_us")
        if times:
            shown = [short(times[choice]) for choice in ("exact", "fp8")]
            rows.append([case_name(case) + mark(case), *shown, f"{times['exact'] / times['fp8']:.2f}"])
    return markdown.table(["case", "exact, us", "fp8, us", "gain of fp8"], rows) if rows else []


def crossover(record: Record) -> list[str]:
    """The cases that are timed with each exchange forced."""
    rows = []
    for case in cases_of(record, OP):
        times = case.get("exchange_us")
        if times:
            shown = [short(times[exchange]) for exchange in ("none", "codes", "values")]
            rows.append([case_name(case) + mark(case), *shown, f"{times['none'] / times['values']:.2f}"])
    header = ["batch x heads x s_q", "each gathers all, us", "codes, us", "values, us", "gain of values"]
    return markdown.table(header, rows)


def case_name(case: Case) -> str:
    """A case where a table mixes both modes."""
    keys = f"topk {_keys(case)}" if case["mode"] == "sparse" else f"{_keys(case)} keys"
    return f"{case['mode']}, {_queries(case)}, {keys}"


def _decode_table(mode: str, cases: Sequence[Case]) -> list[str]:
    if not cases:
        return []
    header = [f"`{OP}`, {mode}: batch x heads x s_q", KEYS[mode], "us", "p10 .. p90", "TFLOP/s", "GB/s"]
    header += [f"{PEERS[mode]}, us", "its time / ours", "relative error", "lse error"]
    return markdown.table(header, map(_decode_row, cases))


def _decode_row(case: Case) -> list[str]:
    name = _queries(case) + mark(case)
    errors = [scientific(case.get("rel_err")), scientific(case.get("lse_err"))]
    if "failed" in case:
        return [name, _keys(case), "check failed", *[MISSING] * 5, *errors]
    peer = peer_of(case)
    note = f" ({peer['note']})" if peer.get("note") else ""
    speeds = [short(case["us"]), spread(case), short(case.get("TFLOPs")), short(case.get("GBps"))]
    return [name, _keys(case), *speeds, short(peer.get("us")) + note, peer_ratio(case), *errors]


def _keys(case: Case) -> str:
    """How many keys a query has, at most where lengths are ragged."""
    keys = str(case[KEYS[case["mode"]]])
    return f"up to {keys}" if case.get("ragged") else keys


def _queries(case: Case) -> str:
    """Batch x heads x s_q."""
    return f"{case['batch']} x {case['h_q']} x {case['s_q']}"
