"""Reading the cases of a record: what the tables of all systems ask of a case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from bench.records import identity
from bench.report.markdown import MISSING, hundredths, short

Record = dict[str, Any]
Case = dict[str, Any]
FLASH: Final = {
    "fa3": "FA3",
    "fa4": "FA4",
    "fa3_bf16": "FA3 over bf16",
    "fa3_fp8": "FA3 over fp8",
    "xqa_fp8": "XQA over fp8",
}
"""Entries of FlashAttention and XQA among a case's peers, and what tables call them."""
FLASH_HEADER: Final = "FlashAttention, XQA: their time / ours (under load)"


def cases_of(record: Record, *ops: str) -> list[Case]:
    """The cases of these operations."""
    return [case for case in record["cases"] if case["op"] in ops]


def _named_peer(case: Case) -> tuple[str, dict[str, Any]]:
    return next(((name, peer) for name, peer in (case.get("peers") or {}).items() if name not in FLASH), ("", {}))


def peer_of(case: Case) -> dict[str, Any]:
    """FlashMLA or cuDNN, where it ran the same case; empty where it did not."""
    return _named_peer(case)[1]


def peer_name(case: Case) -> str:
    """Of `peer_of`, as in the record."""
    return _named_peer(case)[0]


def flash(case: Case) -> str:
    """Times of FlashAttention and XQA over ours, in-layer and, in parentheses, under load."""
    found = []
    for name, peer in (case.get("peers") or {}).items():
        if name in FLASH and "ratio" in peer:
            under_load = f" ({hundredths(peer['ratio_sustained'])})" if "ratio_sustained" in peer else ""
            found.append(f"{FLASH[name]} {hundredths(peer['ratio'])}{under_load}")
    return ", ".join(found) or MISSING


def has_flash(cases: Iterable[Case]) -> bool:
    """Whether FlashAttention or XQA ran any of the cases."""
    return any(flash(case) != MISSING for case in cases)


def peer_ratio(case: Case) -> str:
    """The peer's time over ours."""
    return hundredths(peer_of(case).get("ratio"))


def ratios(case: Case) -> list[float]:
    """The ratio of every peer that has one, but FlashAttention's and XQA's."""
    return [peer["ratio"] for name, peer in (case.get("peers") or {}).items() if "ratio" in peer and name not in FLASH]


def ratio_range(cases: Iterable[Case]) -> str:
    """The lowest and the highest ratio of the cases' peers."""
    found = [ratio for case in cases for ratio in ratios(case)]
    if not found:
        return MISSING
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return low if low == high else f"{low} .. {high}"


def host(case: Case) -> str:
    """Host microseconds of an eager call, and how many times those of torch's `mul_` they are."""
    if case.get("host_mul_us"):
        return f"{short(case['host_us'])} ({case['host_us'] / case['host_mul_us']:.2f} x)"
    return short(case.get("host_us"))


def spread(case: Case) -> str:
    """10th and 90th percentile of the time."""
    return f"{short(case['us_p10'])} .. {short(case['us_p90'])}"


def has_three_times(cases: Iterable[Case]) -> bool:
    """Whether times are in-layer, with those back to back and under load; in older records they are back to back."""
    return any("us_back_to_back" in case for case in cases)


LOADED_HEADER = ("back to back, us", "under load, us", "at MHz")
OF_THREE_TIMES = (*LOADED_HEADER, "under load")
"""Columns of records in which each case has three times."""


def left_out_columns(cases: Iterable[Case]) -> set[str]:
    """Columns that no case has anything for."""
    shown = list(cases)
    left_out = set() if has_three_times(shown) else set(OF_THREE_TIMES)
    return left_out if has_flash(shown) else left_out | {FLASH_HEADER}


def loaded(case: Case) -> list[str]:
    """Cells below `LOADED_HEADER`."""
    mhz = case.get("sm_mhz")
    times = [short(case.get("us_back_to_back")), short(case.get("us_sustained"))]
    return [*times, MISSING if mhz is None else f"{mhz:.0f}"]


def peer_ratios(case: Case) -> list[str]:
    """The peer's time over ours, in-layer and under load."""
    return [hundredths(peer_of(case).get(name)) for name in ("ratio", "ratio_sustained")]


def must(case: Case) -> str:
    """What a case has to reach, in words."""
    words = {
        "read_fraction": "{:.2f} of reads",
        "copy_fraction": "{:.2f} of copies",
        "us": "{:g} us",
        "TFLOPs": "{:g} TFLOP/s",
        "ratio": f"{{:g}} x {_ratio_of(case)}",
        "ratio_sustained": "{:g} x under load",
        "us_sustained": "{:g} us under load",
    }
    return ", ".join(words[key].format(limit) for key, limit in (case.get("must") or {}).items()) or MISSING


def values_of(record: Record, case: Case) -> dict[str, Any]:
    """What a record has of a case's families of values; empty where it has nothing, or the case failed there."""
    wanted = identity(case)
    found: dict[str, Any] = next((entry for entry in record.get("values", []) if identity(entry) == wanted), {})
    return {} if "failed" in found else found


def _ratio_of(case: Case) -> str:
    """Which peer a ratio that a case has to reach is of."""
    if has_flash([case]):
        return "the fastest peer"
    return "FlashMLA" if case["op"].startswith("mla") else "cuDNN"


def must_and_missed(case: Case) -> str:
    """What a case has to reach, and whether it misses that."""
    return must(case) + ("" if case.get("met", True) else " (missed)")
