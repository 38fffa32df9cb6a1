"""Several runs of a case of the same machine code: all are kept, and its figures are their medians."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Final

from bench import records

TIMES: Final = ("us", "us_p10", "us_p90", "us_back_to_back", "us_sustained", "us_loaded_alone")
CARD: Final = ("sm_mhz", "sm_mhz_rested", "watts")
FIGURES: Final = (
    *TIMES, *CARD, "TFLOPs", "GBps", "read_fraction", "copy_fraction", "cycles_per_token", "host_us", "host_mul_us",
)  # fmt: skip
PEER_FIGURES: Final = (*TIMES, *CARD, "ratio", "ratio_back_to_back", "ratio_sustained")
"""What differs from run to run, of a case and of a peer."""


def joined(case: dict[str, Any], earlier: Mapping[str, Any], dates: tuple[str, str]) -> dict[str, Any]:
    """A case with the runs of an earlier record, if that ran the same machine code and both passed; else as it is.

    Its figures are medians over all runs, which are kept in "runs"; its errors are the largest.

    Args:
        case: of this record.
        earlier: the same case of another one.
        dates: of both records.
    """
    if "failed" in case or "failed" in earlier or not case.get("kernels"):
        return case
    if sorted(case["kernels"]) != sorted(earlier.get("kernels") or []):
        return case
    own = case.get("runs") or [_run(case, dates[0])]
    runs = [run for run in earlier.get("runs") or [_run(earlier, dates[1])] if run not in own] + own
    if len(runs) == 1:
        return case
    peers = {name: _joined_peer(peer, name, runs) for name, peer in (case.get("peers") or {}).items()}
    errors = {
        key: max(case[key], earlier[key])
        for key in ("rel_err", "lse_err")
        if case.get(key) is not None and earlier.get(key) is not None
    }
    whole = {**case, **errors, **_medians(case, FIGURES, runs), **({"peers": peers} if peers else {}), "runs": runs}
    return records.with_must(whole, case.get("must") or {})


def _run(case: Mapping[str, Any], date: str) -> dict[str, Any]:
    """What one run has of its own."""
    peers = {
        name: {key: peer[key] for key in PEER_FIGURES if key in peer}
        for name, peer in (case.get("peers") or {}).items()
        if "failed" not in peer
    }
    return {"date": date, **{key: case[key] for key in FIGURES if key in case}, **({"peers": peers} if peers else {})}


def _joined_peer(peer: Mapping[str, Any], name: str, runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    own = [run["peers"][name] for run in runs if name in run.get("peers", {})]
    return dict(peer) if "failed" in peer else {**peer, **_medians(peer, PEER_FIGURES, own)}


def _medians(figures: Mapping[str, Any], names: Iterable[str], runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure the median over the runs that have it; whole numbers stay whole."""
    found: dict[str, Any] = {}
    for key in names:
        if key in figures:
            median = statistics.median([run[key] for run in runs if key in run])
            found[key] = round(median) if isinstance(figures[key], int) else round(median, 3)
    return found
