"""Tables of FP8 MLA decoding: the parts "mla" and "mla-...", "crossover"; and the sentence "accumulator"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.kernels_run import mark
from bench.report import append_merge, markdown
from bench.report.cases import (
    LOADED_HEADER,
    Case,
    Record,
    cases_of,
    has_three_times,
    loaded,
    must_and_missed,
    peer_of,
    peer_ratio,
    peer_ratios,
    spread,
)
from bench.report.markdown import MISSING, hundredths, scientific, short

OP = "mla_fp8_decode"
KEYS = {"sparse": "topk", "dense": "s_k"}
"""By mode, the key of a case that says how many keys a query has."""
PEERS = {"sparse": "FlashMLA", "dense": "FlashMLA over a bf16 cache"}


def decode_append_merge(record: Record) -> list[str]:
    """A table of sparse cases, one of dense cases, one of the append and the merge."""
    decode = cases_of(record, OP)
    # a case that raised has no mode, and must be seen all the same
    raised = [case for case in decode if "mode" not in case]
    usual = [case for case in decode if "cache_format" not in case]
    return markdown.paragraphs(
        *(_decode_table(mode, [case for case in usual if case.get("mode") == mode]) for mode in KEYS),
        append_merge.table([*raised, *cases_of(record, "mla_fp8_append", "merge_states")]),
    )


def sustained(record: Record) -> list[str]:
    """The cases whose power is measured; of older records, those that were timed under load."""
    cases = cases_of(record, OP)
    if not has_three_times(cases):
        return _sustained_before(cases)
    rows = []
    for case in cases:
        if "watts" not in case:
            continue
        peer = peer_of(case)
        ratios = " / ".join([*peer_ratios(case), hundredths(peer.get("ratio_loaded_alone"))])
        rows.append([case_name(case) + mark(case), *_under_load(case), ratios, *_under_load(peer)])
    own = ["us", "under load", "alone", "MHz", "W", "mJ a call"]
    header = ["case", *own, "x FlashMLA / under load / alone", *(f"FlashMLA: {name}" for name in own)]
    return markdown.table(header, rows) if rows else []


def _under_load(case: Case) -> list[str]:
    """Times, clock, power, energy of a call: the power is that of a load of this kernel alone."""
    watts, us = case.get("watts"), case.get("us_loaded_alone")
    energy = None if watts is None or us is None else watts * us * 1e-3
    clock = [f"{case[key]:.0f}" if key in case else MISSING for key in ("sm_mhz", "watts")]
    return [short(case.get("us")), short(case.get("us_sustained")), short(us), *clock, short(energy)]


def _sustained_before(cases: Sequence[Case]) -> list[str]:
    rows = []
    for case in cases:
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


def formats(record: Record) -> list[str]:
    """The cases over other formats than that of 656 bytes."""
    cases = [case for case in cases_of(record, OP) if "cache_format" in case]
    header = ["formats", "batch x heads x s_q", "keys", "us", "p10 .. p90", *LOADED_HEADER, "TFLOP/s", "GB/s"]
    header += ["needs", "FlashMLA, us", "its time / ours", "under load", "relative error", "lse error"]
    rows = []
    for case in cases:
        both = [case["cache_format"], *([case["extra_cache_format"]] if "extra_topk" in case else [])]
        keys = f"{case['topk']} + {'up to ' * bool(case.get('ragged'))}{case['extra_topk']}" if len(both) > 1 else ""
        named = [" + ".join(both) + mark(case), _queries(case), keys or str(case["topk"])]
        errors = [scientific(case.get("rel_err")), scientific(case.get("lse_err"))]
        if "failed" in case:
            rows.append([*named, "check failed", *[MISSING] * (len(header) - 6), *errors])
            continue
        peer = peer_of(case)
        note = f" ({peer['note']})" if peer.get("note") else ""
        cells = [short(case["us"]), spread(case), *loaded(case), short(case.get("TFLOPs")), short(case.get("GBps"))]
        cells += [must_and_missed(case), short(peer.get("us")) + note, *peer_ratios(case)]
        rows.append([*named, *cells, *errors])
    return markdown.table(header, rows) if rows else []


WAYS = {"exact": "exact", "fp8": "fp8", "bf16 keys": "keys in bf16", "flash_mla": "FlashMLA"}
"""Of the table of accuracy: who computed it, and what that is called."""


def accuracy(record: Record) -> list[str]:
    """Errors of output and log-sum-exp, a row for each kind of inputs."""
    rows = []
    for row in record.get("accuracy", ()):
        cells = [row["inputs"], row["scales"].replace("power_of_two", "powers of two")]
        for name in WAYS:
            found = row["errors"].get(name, {})
            cells.append(f"{scientific(found.get('out'))}, {scientific(found.get('lse'))}" if found else MISSING)
        rows.append(cells)
    header = ["inputs", "scales", *(f"{name}: out, log-sum-exp" for name in WAYS.values())]
    return markdown.table(header, rows) if rows else []


def accumulator(record: Record) -> list[str]:
    """A sentence on what the FP8 tensor core keeps."""
    found = record.get("accumulator")
    if not found:
        return []
    if "problem" in found:
        return [f"The probe of the accumulator failed on {record['card']}: {found['problem']}."]
    signs = [f"{found[sign]} where it is {sign}" for sign in ("positive", "negative")]
    rest = found["positive"] if found["positive"] == found["negative"] else ", ".join(signs)
    lost = found["lost_together"]
    together = "are lost" if lost == 0 else f"leave {lost:g} of 15.5 such bits"
    return [
        f"Measured on {record['card']}: of a product, {found['bits_same']} bits below the largest product of its "
        f"instruction are kept, and {found['bits_after']} below the accumulator; of the accumulator, "
        f"{found['bits_before']} below a product. What is smaller is {rest}; 31 products of half the last bit together "
        f"{together}."
    ]


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
    three = has_three_times(cases)
    header = [f"`{OP}`, {mode}: batch x heads x s_q", KEYS[mode], "us", "p10 .. p90", *(LOADED_HEADER if three else ())]
    header += ["TFLOP/s", "GB/s", f"{PEERS[mode]}, us", "its time / ours", *(["under load"] if three else [])]
    header += ["relative error", "lse error"]
    return markdown.table(header, (_decode_row(case, three) for case in cases))


def _decode_row(case: Case, three: bool) -> list[str]:
    name = _queries(case) + mark(case)
    errors = [scientific(case.get("rel_err")), scientific(case.get("lse_err"))]
    if "failed" in case:
        return [name, _keys(case), "check failed", *[MISSING] * (9 if three else 5), *errors]
    peer = peer_of(case)
    note = f" ({peer['note']})" if peer.get("note") else ""
    speeds = [short(case["us"]), spread(case), *(loaded(case) if three else [])]
    speeds += [short(case.get("TFLOPs")), short(case.get("GBps"))]
    ratios = peer_ratios(case) if three else [peer_ratio(case)]
    return [name, _keys(case), *speeds, short(peer.get("us")) + note, *ratios, *errors]


def _keys(case: Case) -> str:
    """How many keys a query has, at most where lengths are ragged."""
    keys = str(case[KEYS[case["mode"]]])
    return f"up to {keys}" if case.get("ragged") else keys


def _queries(case: Case) -> str:
    """Batch x heads x s_q."""
    return f"{case['batch']} x {case['h_q']} x {case['s_q']}" + ", fp8 scores" * (case.get("scores") == "fp8")
