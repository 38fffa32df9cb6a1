"""Reading the cases of a record: what the tables of all systems ask of a case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.bench.report.markdown import MISSING, hundredths, short

Record = dict[str, Any]
Case = dict[str, Any]


def cases_of(record: Record, *ops: str) -> list[Case]:
    """The cases of these operations."""
    return [case for case in record["cases"] if case["op"] in ops]


def peer_of(case: Case) -> dict[str, Any]:
    """The other library that ran the same case; empty where none did."""
    return next(iter((case.get("peers") or {}).values()), {})


def peer_ratio(case: Case) -> str:
    """The peer's time over ours."""
    return hundredths(peer_of(case).get("ratio"))


def ratios(case: Case) -> list[float]:
    """The ratio of every peer that has one."""
    return [peer["ratio"] for peer in (case.get("peers") or {}).values() if "ratio" in peer]


def ratio_range(cases: Iterable[Case]) -> str:
    """The lowest and the highest ratio of the cases' peers."""
    found = [ratio for case in cases for ratio in ratios(case)]
    if not found:
        return MISSING
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return low if low == high else f"{low} .. {high}"


def spread(case: Case) -> str:
    """10th and 90th percentile of the time."""
    return f"{short(case['us_p10'])} .. {short(case['us_p90'])}"


def has_three_times(cases: Iterable[Case]) -> bool:
    """Whether times are in-layer, with those back to back and under load; in older records they are back to back."""
    return any("us_back_to_back" in case for case in cases)


LOADED_HEADER = ("back to back, us", "under load, us", "at MHz")


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
        "ratio": f"{{:g}} x {'FlashMLA' if case['op'].startswith('mla') else 'cuDNN'}",
        "ratio_sustained": "{:g} x under load",
        "us_sustained": "{:g} us under load",
    }
    return ", ".join(words[key].format(limit) for key, limit in (case.get("must") or {}).items()) or MISSING


def must_and_missed(case: Case) -> str:
    """What a case has to reach, and whether it misses that."""
    return must(case) + ("" if case.get("met", True) else " (missed)")
