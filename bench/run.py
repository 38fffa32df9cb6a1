"""The steps that all cases share: check the first result, time all computations in turns, make the record's entry.

A case is a frozen dataclass with a name, a key and required figures. Its `work` makes inputs that together outgrow the
L2 cache, makes the first call, and compares it with the float64 oracle on some rows. The timed graph must then write
the bits of eager calls, in every input set.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from bench import kernels_run, peers, records
from bench.in_layer import Graphs, Timing, prepare, time_together
from bench.peers import OURS, Peer
from bench.progress import Progress
from bench.records import Record
from bench.report.markdown import aligned
from bench.timing import Call, Expected, host_times
from tests.kit.compare import Comparison

RESULTS: Final = ("out", "lse")
Maker = Callable[[], Sequence[Call]]


@dataclass(frozen=True)
class Work:
    """A case whose inputs are made and whose first result is checked.

    check     check of the first call's results
    make      makes calls over the rotated input sets, which write to memory of their own and return what they write
    first     results of the first call, which were checked
    results   names of what a call returns
    limits    by result, the largest relative error if bits may differ: of sums whose terms come in any order
    peers     makes the peers of the case
    variants  other computations that are timed in turn with this one, by the key of the record. A key with one unnamed
              choice has a number in the record, others have a number for each choice
    facts     further entries of the record
    """

    check: Comparison
    make: Maker
    first: Sequence[torch.Tensor]
    results: Sequence[str] = RESULTS
    limits: Mapping[str, float] = field(default_factory=dict)
    peers: Callable[[], dict[str, Peer]] = dict
    variants: Mapping[str, Mapping[str, Maker]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def graphs(self) -> Graphs:
        """Returns the calls, captured for timing, with their expected results."""
        expected = Expected.of(self.results, self.make()[1:], checked=self.first, limits=self.limits)
        return prepare(self.make(), expected=expected)

    def variant(self, make: Maker) -> Graphs:
        """Captures another computation, whose results are not checked otherwise."""
        return prepare(make(), expected=Expected.of(self.results, make(), limits=self.limits))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A benchmark case.

    must       figures that the case has to reach: the project's goals
    peers      names of peers that also run, see `bench.peers`
    sustained  whether times under load are taken too
    power      whether the power under load is measured with them
    host       whether to time the eager call too
    quick      whether `--quick` runs it
    """

    must: Mapping[str, float] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    sustained: bool = False
    power: bool = False
    host: bool = False
    quick: bool = False
    op: ClassVar[str]
    ceiling: ClassVar[str] = "read"

    @property
    def name(self) -> str:
        """Name for `--only`: the operator, then sizes."""
        return records.case_name(self.key)

    @property
    def key(self) -> dict[str, Any]:
        """Returns the entries of a record that identify the case."""
        raise NotImplementedError

    def work(self, store: Any) -> Work:
        """Makes the case's inputs; `store` has the caches that cases share."""
        raise NotImplementedError

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernels that the case runs on a card with `num_sms` SMs."""
        raise NotImplementedError

    @property
    def bytes_moved(self) -> int:
        """Returns cycles per token and CTA of each unit, for variants with 128 heads and the published estimate."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """FLOP of the products; 0 if there are none."""
        return 0

    def rates(self, timing: Timing, ceilings: Mapping[str, float]) -> dict[str, Any]:
        """Returns TFLOP/s, GB/s and the fraction of the card's ceiling for reads or copies."""
        gb_per_s = self.bytes_moved / timing.us / 1e3
        products = {"TFLOPs": round(self.flops / timing.us / 1e6, 1)} if self.flops else {}
        fraction = round(gb_per_s / ceilings[f"{self.ceiling}_GBps"], 3)
        return {**products, "GBps": round(gb_per_s, 1), f"{self.ceiling}_fraction": fraction}


def measure(case: Case, store: Any, ceilings: Mapping[str, float]) -> Record:
    """Checks, times and records a case."""
    work = case.work(store)
    entry = records.record_case(case.key, work.check, functools.partial(_speeds, case, work, ceilings))
    return records.with_must(entry, case.must)


def _speeds(case: Case, work: Work, ceilings: Mapping[str, float]) -> Record:
    found = work.peers()
    loaded = {OURS: work.graphs(), **peers.graphs(found)}
    variants = {
        (key, choice): work.variant(make) for key, choices in work.variants.items() for choice, make in choices.items()
    }
    together = {**loaded, **{f"{key} {choice}": graphs for (key, choice), graphs in variants.items()}}
    timings = time_together(together, sustained=list(loaded) if case.sustained else False, power=case.power)
    timing = timings[OURS]
    more: Record = {}
    for key, choice in variants:
        us = round(timings[f"{key} {choice}"].us, 3)
        more[key] = {**more.get(key, {}), choice: us} if choice else us
    host = host_times(work.make()[0]) if case.host else {}
    peer_entries = {"peers": peers.entries(found, timings)} if found else {}
    return {**timing.as_record(), **case.rates(timing, ceilings), **work.facts, **host, **more, **peer_entries}


def selected(cases: Sequence[Case], quick: bool, only: str | None) -> list[Case]:
    """Returns all cases, or only quick ones, or those whose name matches."""
    return [
        case for case in cases if (case.quick or not quick) and (only is None or re.search(only, case.name) is not None)
    ]


def run_all(
    cases: Sequence[tuple[Case, Any]], ceilings: Mapping[str, float], progress: Progress, seconds: float = math.inf
) -> list[Record]:
    """Returns the entry of each case, which comes with its store; see `run_each`."""
    made = [(case, store, functools.partial(measure, case, store, ceilings)) for case, store in cases]
    return run_each(made, progress, seconds)


def run_each(
    cases: Sequence[tuple[Case, Any, Callable[[], Record]]],
    progress: Progress,
    seconds: float = math.inf,
    after: Callable[[list[Record]], object] = lambda _: None,
) -> list[Record]:
    """Returns the entries of cases, with the machine code that each ran; one that raises is recorded as failed.

    Args:
        cases: each with its store, which is cleared before the next one's fills, and with what makes its entry. The
            caches of MLA and GQA and what sinks need are more than 80 GB.
        progress: shows how far the run is.
        seconds: time after which no case is begun.
        after: called with all entries after each case.
    """
    entries: list[Record] = []
    deadline = time.monotonic() + seconds
    for number, (case, store, make) in enumerate(cases):
        if time.monotonic() > deadline:
            progress.say(f"no time for {', '.join(left.name for left, *_ in cases[number:])}")
            break
        with progress.step(case.name, number, len(cases)), kernels_run.noting() as asked:
            try:
                entry = make()
            except Exception as error:  # the record must say which case broke, whatever broke it
                entry = {**case.key, "failed": f"{type(error).__name__}: {error}"[:500]}
                progress.say(f"FAILED {entry['failed']}")
        entries.append({**entry, "kernels": kernels_run.digests(asked)})
        needed_next = any(following is store for _, following, _ in cases[number + 1 : number + 2])
        if hasattr(store, "clear") and not needed_next:
            store.clear()
        torch.cuda.empty_cache()
        after(entries)
    return entries


def finite(check: Comparison, *results: torch.Tensor) -> Comparison:
    """Returns the check, failed if an element of the results is not finite."""
    if all(bool(result.isfinite().all()) for result in results):
        return check
    return dataclasses.replace(check, problems=(*check.problems, "not every element of the results is finite"))


def spread_rows(batch: int, number: int) -> list[int]:
    """Returns evenly spaced batch rows, the first and the last included."""
    return torch.linspace(0, batch - 1, min(number, batch)).long().tolist()


def same_bits(name: str, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Comparison:
    """Compares what an append has written with its reference."""
    parts = {key: (got[key] != expected[key]).float().mean().item() for key in expected}
    problems = tuple(f"{key}: {part:.2%} differs from the reference" for key, part in parts.items() if part)
    return Comparison(name, problems, rel_err=max(parts.values()), rel_err_baseline=0.0, worst=0.0, lse_err=0.0)


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """Formats one line per case: its name, times and rates, whether that is enough, the peers' times over ours."""
    header = ("case", "us", "alone", "loaded", "MHz", "TFLOP/s", "GB/s", "of ceiling", "must", "peer/ours", "loaded")
    return "\n".join(aligned([header, *map(_row, cases)]))


def _row(case: Mapping[str, Any]) -> tuple[str, ...]:
    if "failed" in case:
        return records.case_name(case), "FAILED", case["failed"]
    must = " ".join(f"{key} {limit}" for key, limit in (case.get("must") or {}).items())
    must += {True: " met", False: " MISSED", None: ""}[case.get("met")]
    ratios = list(_ratios(case, "ratio")), list(_ratios(case, "ratio_sustained"))
    keys = ("us", "us_back_to_back", "us_sustained", "sm_mhz", "TFLOPs", "GBps")
    figures = [*(case.get(key, "") for key in keys), case.get("read_fraction", case.get("copy_fraction", ""))]
    return (records.case_name(case), *map(str, figures), must, *(" ".join(found) for found in ratios))


def _ratios(case: Mapping[str, Any], key: str) -> Iterator[str]:
    for peer in (case.get("peers") or {}).values():
        yield str(peer.get(key, "failed" if "failed" in peer else ""))
