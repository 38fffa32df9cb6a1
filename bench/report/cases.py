"""The name, the figures and the peers of a recorded case, for tables."""

from __future__ import annotations

from typing import Any, Final

from bench.records import identity
from bench.report.markdown import MISSING, hundredths, short

Record = dict[str, Any]
Case = dict[str, Any]
PEERS: Final = {
    "flash_mla": "FlashMLA",
    "flash_mla_bf16": "FlashMLA over bf16",
    "cudnn": "cuDNN without sinks",
    "cudnn_bf16": "cuDNN over bf16",
    "fa3": "FA3",
    "fa4": "FA4",
    "fa3_bf16": "FA3 over bf16",
    "fa3_fp8": "FA3 over fp8",
    "xqa_fp8": "XQA over fp8",
}
"""Entries of "peers" in a case, and their names in tables."""
FLASH: Final = ("fa3", "fa4", "fa3_bf16", "fa3_fp8", "xqa_fp8")
"""Peers from other wheels, which not every run has."""
USUAL: Final = {"h_q": 32, "h_kv": 8, "d": 128, "s_q": 1, "window": None}
"""Sizes of most GQA cases; a name mentions only other sizes."""


def cases_of(record: Record, *ops: str) -> list[Case]:
    """Returns the cases of these operations."""
    return [case for case in record["cases"] if case["op"] in ops]


# ---- names


def name(case: Case) -> str:
    """Returns the name of a row, without the operation."""
    names = {"mla_fp8_decode": _mla_name, "gqa_decode": _gqa_name, "sink_attention": _sink_name}
    return names.get(case["op"], _append_name)(case)


def _mla_name(case: Case) -> str:
    keys = "topk" if case["mode"] == "sparse" else "s_k"
    up_to = "up to " if case.get("ragged") else ""
    if "extra_topk" in case:
        formats = f"{case['cache_format']} + {case['extra_cache_format']}"
        return f"{formats}: {heads(case)}, {case['topk']} + {up_to}{case['extra_topk']} keys"
    named = f"{case['cache_format']}: " if "cache_format" in case else ""
    return f"{named}{case['mode']}, {heads(case)}, {up_to}{case[keys]} keys"


def heads(case: Case) -> str:
    """Returns batch, heads and query tokens."""
    return f"{case['batch']} x {case['h_q']} x {case['s_q']}"


def _gqa_name(case: Case) -> str:
    """Returns dtype, scales and layout of the cache, batch and length, and what differs from most cases."""
    scales = "" if case["scales"] == "none" else f" {case['scales'].replace('_', ' ')}"
    layout = f"{case['layout']} {case['page_size']}" if "page_size" in case else case["layout"]
    unusual = [f"{key} {case[key]}" for key, value in USUAL.items() if case.get(key, value) != value]
    return ", ".join([f"{case['kv_dtype']}{scales}", layout, f"{case['batch']} x {case['s_k']}", *unusual])


def _sink_name(case: Case) -> str:
    window = f", window {case['window']}" if "window" in case else ""
    deterministic = ", deterministic" if case.get("deterministic") else ""
    size = f"{case['batch']} x {case['s_k']}" if "s_k" in case else f"{case['batch']} of {case['tokens']} tokens in all"
    return f"{case['pass']}, {case['h_q']}/{case['h_kv']} heads of {case['d']}, {size}{window}{deterministic}"


def _append_name(case: Case) -> str:
    values = [str(case[key]) for key in ("cache_format", "scales", "layout") if key in case]
    keys = ("page_size", "tokens", "splits", "batch", "h_q", "h_kv", "s_q", "d")
    return f"`{case['op']}`: " + ", ".join([*values, *(f"{key} {case[key]}" for key in keys if key in case)])


# ---- figures


def spread(case: Case) -> str:
    """Returns the 10th and 90th percentile of the time."""
    return f"{short(case['us_p10'])} .. {short(case['us_p90'])}" if "us_p10" in case else MISSING


def fraction(case: Case) -> str:
    """Returns the rate of a case over the card's ceiling for reads or copies."""
    kinds = {"copy_fraction": "copies", "read_fraction": "reads"}
    return next((f"{case[key]:.2f} of {kind}" for key, kind in kinds.items() if key in case), MISSING)


def host(case: Case) -> str:
    """Returns host microseconds of an eager call, and their ratio to torch's `mul_`."""
    if case.get("host_mul_us"):
        return f"{short(case['host_us'])} ({case['host_us'] / case['host_mul_us']:.2f} x)"
    return short(case.get("host_us"))


def must(case: Case) -> str:
    """Returns in words what a case has to reach, and whether it misses that."""
    words = {
        "read_fraction": "{:.2f} of reads",
        "copy_fraction": "{:.2f} of copies",
        "us": "{:g} us",
        "TFLOPs": "{:g} TFLOP/s",
        "ratio": "{:g} x the fastest peer",
        "ratio_sustained": "{:g} x under load",
        "us_sustained": "{:g} us under load",
    }
    said = ", ".join(words[key].format(limit) for key, limit in (case.get("must") or {}).items())
    return f"{said}{'' if case.get('met', True) else ' (missed)'}" if said else MISSING


def values_of(record: Record, case: Case) -> dict[str, Any]:
    """Returns a record's entry for a case's families of values; empty if it has none, or the case failed there."""
    wanted = identity(case)
    found: dict[str, Any] = next((entry for entry in record.get("values", []) if identity(entry) == wanted), {})
    return {} if "failed" in found else found


# ---- peers


def peer_name(case: Case) -> str:
    """Returns the record's name of the peer that every run has, FlashMLA or cuDNN; empty if it did not run the case."""
    return next((peer for peer in case.get("peers") or {} if peer not in FLASH), "")


def peer_of(case: Case) -> dict[str, Any]:
    """Returns the record's entry for `peer_name`; empty if it did not run the case."""
    peers = case.get("peers") or {}
    return peers.get(peer_name(case), {})


def ratios(case: Case) -> list[float]:
    """Returns the peer's times over ours, as far as they were measured."""
    return [peer_of(case)["ratio"]] if "ratio" in peer_of(case) else []


def faster(case: Case, times: bool = False) -> str:
    """Returns how many times as long each peer takes, in-layer and, in parentheses, under load; with time and note."""
    found = []
    for peer, entry in (case.get("peers") or {}).items():
        if "ratio" in entry:
            under_load = f" ({hundredths(entry['ratio_sustained'])})" if "ratio_sustained" in entry else ""
            note = f", {entry['note']}" if times and entry.get("note") else ""
            us = f", {short(entry['us'])} us{note}" if times else ""
            found.append(f"{PEERS.get(peer, peer)} {hundredths(entry['ratio'])}{under_load}{us}")
    return "; ".join(found) or MISSING
