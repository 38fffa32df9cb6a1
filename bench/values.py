"""Times over families of values: the numbers in a cache and in queries must not decide how long a call takes.

    python -m bench.values --only 'sparse 128x128x2' --seconds 300 --out build/values.jsonl

Every case of MLA decoding in the record, GQA decoding over each kind of cache, sink attention forward and backward. All
families of `tests.kit.values` are timed in turns, in-layer. Each is checked against the oracle on a few rows first, and
what its graph writes has the bits of eager calls. FlashMLA runs beside N(0,1), the two families that take longest and
the one whose key tiles are all slow. `gpu_check.py --sections values` puts this into the record.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from bench import cases, gqa, jsonl, mla, records, sink
from bench.in_layer import time_together
from bench.progress import Progress
from bench.records import Record
from bench.run import run_each, selected
from cute_kernels.runtime.compile import precompile
from tests.kit.values import FAMILIES, SLOW

NORMAL: Final = "normal"
ROWS_CHECKED: Final = 2
PEER_FAMILIES: Final = 2
"""Number of the slowest families that are timed with the peer too."""
SECONDS: Final = 420.0
MUST: Final = {"worst_ratio": FAMILIES[NORMAL].limit}
MLA_MUST: Final = {**MUST, "slow_ratio": FAMILIES[SLOW].limit}
PEER_MUST: Final = {
    mla.MlaCase("sparse", 64, 128).name: {"worst_ratio_peer": 1.25},
    mla.MlaCase("sparse", 128, 128, 2).name: {"worst_ratio_peer": 1.25},
}
"""The two sparse cases whose families are compared with FlashMLA."""
KINDS_OF_CACHE: Final = (
    ("int8", "per_token_head"),
    ("int8", "per_tensor"),
    ("fp8", "per_tensor"),
    ("fp8", "per_token_head"),
    ("int8_k_int4_v", "per_token_head"),
    ("int4", "per_token_head"),
    ("bf16", "none"),
)
SINKS_TOGETHER: Final = 5
"""Families of sink attention that take turns: inputs and results of one take up to 9 GB."""


class Subject(NamedTuple):
    """A case over all families.

    must      figures that the entry has to reach
    apart     families that have a limit of their own
    together  families that are timed in turns, N(0,1) among them: as many as the card's memory holds
    """

    case: Any
    store: Any
    must: Mapping[str, float] = MUST
    apart: tuple[str, ...] = ()
    together: int = len(FAMILIES)


def subjects(quick: bool = False, only: str | None = None) -> list[Subject]:
    """Returns all cases, or only quick ones, or those whose name matches."""
    caches, pool = mla.Caches(), gqa.Pool()
    of_gqa = [gqa.GqaDecodeCase(16, 4096, scales, kv_dtype=kv_dtype) for kv_dtype, scales in KINDS_OF_CACHE]
    of_sink = [sink.SinkAttentionCase(4096, 64, 8, 64, backward=backward) for backward in (False, True)]
    found = [
        Subject(case, caches, {**MLA_MUST, **PEER_MUST.get(case.name, {})}, (SLOW,))
        for case in selected(mla.DECODE_CASES, quick, only)
    ]
    found += [Subject(case, pool) for case in selected(of_gqa, quick, only)]
    return found + [Subject(case, "cuda", together=SINKS_TOGETHER) for case in selected(of_sink, quick, only)]


def run(subject: Subject) -> Record:
    """Makes the entry of a case: microseconds of each family, the worst of them, and the peer's times.

    values        {family: us}
    worst_family  the one that takes longest, of those without a limit of their own; worst_us its time, worst_ratio that
                  over the time with N(0,1), timed in turns with it
    slow_ratio    the same ratio of the family that has a limit of its own
    peer          {family: {"us", "ratio"}}; worst_ratio_peer and normal_ratio_peer are its times over ours
    wrong         {family: why it was not timed}
    """
    times: dict[str, float] = {}
    ratios: dict[str, float] = {}
    wrong: dict[str, str] = {}
    others = [family for family in FAMILIES if family != NORMAL]
    for start in range(0, len(others), subject.together - 1):
        found = _timed(subject, [NORMAL, *others[start : start + subject.together - 1]], wrong)
        for family, us in found.items():
            times.setdefault(family, us)
            ratios.setdefault(family, us / found[NORMAL])
    common = {family: ratio for family, ratio in ratios.items() if family not in subject.apart}
    worst = sorted(common, key=common.__getitem__, reverse=True)
    apart = [family for family in subject.apart if family in ratios]
    entry: Record = {**subject.case.key, "values": {family: round(us, 3) for family, us in times.items()}}
    entry |= {
        "worst_family": worst[0],
        "worst_us": round(times[worst[0]], 3),
        "worst_ratio": round(common[worst[0]], 3),
    }
    entry |= {"slow_ratio": round(max(ratios[family] for family in apart), 3)} if apart else {}
    if peers := _beside_peers(subject, list(dict.fromkeys([NORMAL, *worst[:PEER_FAMILIES], *apart]))):
        entry["peer"] = peers
        for figure, family in (("normal_ratio_peer", NORMAL), ("worst_ratio_peer", worst[0])):
            if "ratio" in peers.get(family, {}):
                entry[figure] = peers[family]["ratio"]
    entry |= {"wrong": wrong} if wrong else {}
    must = {name: limit for name, limit in subject.must.items() if name != "worst_ratio_peer" or "peer" in entry}
    entry = records.with_must(entry, must)
    _show(subject.case.name, entry, ratios)
    return entry


def _timed(subject: Subject, families: Sequence[str], wrong: dict[str, str]) -> dict[str, float]:
    """Returns microseconds of each family whose check passes; the others are added to `wrong`."""
    graphs = {}
    for family in families:
        work = subject.case.work(subject.store, family, ROWS_CHECKED)
        if work.check:
            graphs[family] = work.graphs()
        else:
            wrong[family] = str(work.check)[:500]
    if NORMAL not in graphs:
        raise RuntimeError(f"{subject.case.name}: {wrong[NORMAL]}")
    return {family: timing.us for family, timing in time_together(graphs, sustained=False).items()}


def _beside_peers(subject: Subject, families: Sequence[str]) -> Record:
    """Returns for each family the peer's microseconds and their ratio to ours, all in turns; or why there is none."""
    graphs, found = {}, {}
    for family in families if subject.case.peers else ():
        work = subject.case.work(subject.store, family, ROWS_CHECKED)
        for peer in work.peers().values():
            if peer.graphs is None:
                found[family] = {"failed": peer.failed}
                continue
            graphs[f"ours {family}"], graphs[f"peer {family}"] = work.graphs(), peer.graphs
    timings = time_together(graphs, sustained=False) if graphs else {}
    for family in families:
        if f"peer {family}" in timings:
            us, own = timings[f"peer {family}"].us, timings[f"ours {family}"].us
            found[family] = {"us": round(us, 3), "ratio": round(us / own, 3)}
    return found


def _show(name: str, entry: Mapping[str, Any], ratios: Mapping[str, float]) -> None:
    """Prints an entry in a few lines."""
    peer = [f", FlashMLA {entry[key]:.2f} x" for key in ("normal_ratio_peer", "worst_ratio_peer") if key in entry]
    slow = f", {SLOW} {entry['slow_ratio']:.3f}" if "slow_ratio" in entry else ""
    worst = f"{entry['worst_family']} {entry['worst_ratio']:.3f}"
    print(f"{name}: {entry['values'][NORMAL]:.1f} us, {worst}{slow}{''.join(peer)}{'' if entry['met'] else '  MISSED'}")
    print("    " + "  ".join(f"{family} {ratio:.2f}" for family, ratio in ratios.items() if family != NORMAL))
    for family, reason in entry.get("wrong", {}).items():
        print(f"    WRONG {family}: {reason}")
    sys.stdout.flush()


def run_all(
    chosen: Sequence[Subject],
    seconds: float,
    progress: Progress,
    after: Callable[[list[Record]], object] = lambda _: None,
) -> list[Record]:
    """Returns the entries of cases; see `bench.run.run_each`."""
    made = [(subject.case, subject.store, functools.partial(run, subject)) for subject in chosen]
    return run_each(made, progress, seconds, after)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and shows the cases; 1 if one is wrong or misses a required figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"begin no case later ({SECONDS:.0f})")
    parser.add_argument("--out", type=pathlib.Path, default=records.ROOT / "build" / "values.jsonl")
    options = parser.parse_args(arguments)
    chosen = subjects(options.quick, options.only)
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    precompile(cases.specs([subject.case for subject in chosen], sms))
    machine = records.machine()
    entries = run_all(
        chosen, options.seconds, Progress(), lambda made: jsonl.write({**machine, "values": made}, options.out)
    )
    return int(any("failed" in entry or "wrong" in entry or not entry["met"] for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
