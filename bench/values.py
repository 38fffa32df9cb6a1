"""Time over families of values: what a cache and queries hold must not decide how long a call takes.

    python -m bench.values --only 'sparse 128x128x2' --seconds 300 --out build/values.json

Every case of MLA decoding in the record, GQA decoding over each kind of cache, sink attention forward and backward. All
families of `tests.kit.values` are timed in turns, in-layer. Each is checked against the oracle on a few rows first,
and what its graph writes has the bits of eager calls. FlashMLA runs beside N(0,1), the two families that take longest
and the one whose key tiles are all slow. `gpu_check.py --sections values` puts this into the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from bench import gqa as bench_gqa
from bench import kernels_run, records
from bench import mla as bench_mla
from bench import mla_formats as bench_formats
from bench import sink as bench_sink
from bench.gqa import GqaBench
from bench.in_layer import Graphs, prepare, time_together
from bench.mla import DecodeBench
from bench.mla_formats import FormatBench, FormatCaches
from bench.peers import PEER_LIMIT, Peer
from bench.sink import SinkBench
from bench.timing import Call, Expected
from cute_kernels.gqa.reference import quantize
from cute_kernels.mla.plan import plan_decode
from cute_kernels.runtime.compile import precompile
from cute_kernels.sink import backward_spec
from cute_kernels.sink import spec as forward_spec
from fp8_mla.formats import FP8_MAX
from tests.kit.compare import Comparison, check_decode
from tests.kit.gqa_cases import KV_DTYPES, SCALE_NAMES, GqaCase, check_gqa
from tests.kit.mla_cases import generator
from tests.kit.sink_cases import NAMES
from tests.kit.values import FAMILIES, SLOW, keys, query

NORMAL: Final = "normal"
ROWS_CHECKED: Final = 2
PEER_FAMILIES: Final = 2
"""So many of the families that take longest are timed with the peer too."""
SECONDS: Final = 420.0
MUST: Final = {"worst_ratio": FAMILIES[NORMAL].limit}
MLA_MUST: Final = {**MUST, "slow_ratio": FAMILIES[SLOW].limit}
PEER_MUST: Final = {"worst_ratio_peer": 1.25}
"""Of the two sparse cases whose families FlashMLA is held against: 64 x 128 and 128 x 128 x 2."""
WITH_PEER_MUST: Final = (("sparse", 64, 128, 1, 2048), ("sparse", 128, 128, 2, 2048))
RESULTS: Final = ("out", "lse")
GQA_CASES: Final = tuple(
    GqaBench(16, 4096, scales, kv_dtype=kv_dtype)
    for kv_dtype, scales in (
        ("int8", "per_token_head"),
        ("int8", "per_tensor"),
        ("fp8", "per_tensor"),
        ("bf16", "none"),
    )
)
"""One size over every kind of cache."""
SINK_CASES: Final = tuple(SinkBench(4096, 64, 8, 64, backward=backward) for backward in (False, True))
SINKS_TOGETHER: Final = 5
"""Families of sink attention in turns: inputs and results of one take up to 9 GB."""


@dataclass(frozen=True)
class Ready:
    """One case with values of one family.

    calls    makes calls over rotated input sets, which write to memory of their own
    check    of the results of such a first call
    results  names of what a call returns
    limits   as `Expected` takes them
    peer     makes the peer's calls of the same values; None: there is none
    """

    calls: Callable[[], Sequence[Call]]
    check: Comparison
    results: Sequence[str] = RESULTS
    limits: Mapping[str, float] = field(default_factory=dict)
    peer: Callable[[], Mapping[str, Peer]] | None = None


@dataclass(frozen=True)
class ValueBench:
    """One case over all families.

    name      as `--only` matches it
    key       names the case in a results file
    make      a family's calls
    specs     the kernels that it runs, for so many SMs
    must      figures that the entry has to reach
    apart     families that have a limit of their own
    together  families that are timed in turns, N(0,1) among them: as many as the card's memory holds
    done      frees what only this case needs
    """

    name: str
    key: Mapping[str, Any]
    make: Callable[[str], Ready]
    specs: Callable[[int], list[Any]]
    must: Mapping[str, float] = field(default_factory=lambda: MUST)
    apart: tuple[str, ...] = ()
    together: int = len(FAMILIES)
    done: Callable[[], object] = lambda: None


def run(bench: ValueBench) -> dict[str, Any]:
    """The entry of a case: microseconds of each family, the worst of them, and the peer's times.

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
    for start in range(0, len(others), bench.together - 1):
        found = _timed(bench, [NORMAL, *others[start : start + bench.together - 1]], wrong)
        for family, us in found.items():
            times.setdefault(family, us)
            ratios.setdefault(family, us / found[NORMAL])
    entry: dict[str, Any] = {**bench.key, "values": {family: round(us, 3) for family, us in times.items()}}
    common = {family: ratio for family, ratio in ratios.items() if family not in bench.apart}
    worst = sorted(common, key=common.__getitem__, reverse=True)
    entry["worst_family"] = worst[0]
    entry |= {"worst_us": round(times[worst[0]], 3), "worst_ratio": round(common[worst[0]], 3)}
    apart = [ratios[family] for family in bench.apart if family in ratios]
    entry |= {"slow_ratio": round(max(apart), 3)} if apart else {}
    asked = list(dict.fromkeys([NORMAL, *worst[:PEER_FAMILIES], *(name for name in bench.apart if name in ratios)]))
    if peers := _beside_the_peer(bench, asked):
        entry["peer"] = peers
        for figure, family in (("normal_ratio_peer", NORMAL), ("worst_ratio_peer", worst[0])):
            if "ratio" in peers.get(family, {}):
                entry[figure] = peers[family]["ratio"]
    entry |= {"wrong": wrong} if wrong else {}
    must = {name: limit for name, limit in bench.must.items() if name != "worst_ratio_peer" or "peer" in entry}
    entry = records.with_must(entry, must)
    show(bench, entry, ratios)
    return entry


def _timed(bench: ValueBench, families: Sequence[str], wrong: dict[str, str]) -> dict[str, float]:
    """Microseconds of each family whose check passes; the others come into `wrong`."""
    graphs = {}
    for family in families:
        ready = bench.make(family)
        if not ready.check:
            wrong[family] = str(ready.check)[:500]
            continue
        expected = Expected.of(ready.results, ready.calls(), limits=ready.limits)
        graphs[family] = prepare(ready.calls(), expected=expected)
    if NORMAL not in graphs:
        raise RuntimeError(f"{bench.name}: {wrong[NORMAL]}")
    return {family: timing.us for family, timing in time_together(graphs, sustained=False).items()}


def _beside_the_peer(bench: ValueBench, families: Sequence[str]) -> dict[str, Any]:
    """Of each family the peer's microseconds and their ratio to ours, all in turns; or why there is none."""
    graphs: dict[tuple[str, str], Graphs] = {}
    found: dict[str, Any] = {}
    for family in families:
        ready = bench.make(family)
        for peer in (ready.peer() if ready.peer else {}).values():
            if peer.graphs is None:
                found[family] = {"failed": peer.failed}
                continue
            graphs["ours", family] = prepare(ready.calls())
            graphs["peer", family] = peer.graphs
    if not graphs:
        return found
    named = {f"{who} {family}": graph for (who, family), graph in graphs.items()}
    timings = time_together(named, sustained=False)
    for who, family in graphs:
        if who == "peer":
            us = timings[f"peer {family}"].us
            found[family] = {"us": round(us, 3), "ratio": round(us / timings[f"ours {family}"].us, 3)}
    return found


def show(bench: ValueBench, entry: Mapping[str, Any], ratios: Mapping[str, float]) -> None:
    """Prints an entry in a few lines."""
    peer = [f"FlashMLA {entry[name]:.2f} x" for name in ("normal_ratio_peer", "worst_ratio_peer") if name in entry]
    slow = f", {SLOW} {entry['slow_ratio']:.3f}" if "slow_ratio" in entry else ""
    missed = "" if entry["met"] else "  MISSED"
    print(
        f"{bench.name}: {entry['values'][NORMAL]:.1f} us, {entry['worst_family']} {entry['worst_ratio']:.3f}{slow}"
        f"{', ' + ' and '.join(peer) if peer else ''}{missed}"
    )
    print("    " + "  ".join(f"{family} {ratio:.2f}" for family, ratio in ratios.items() if family != NORMAL))
    for family, reason in entry.get("wrong", {}).items():
        print(f"    WRONG {family}: {reason}")
    sys.stdout.flush()


def run_all(
    chosen: Sequence[ValueBench], seconds: float, *, after: Callable[[list[dict[str, Any]]], object] = lambda _: None
) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """The entries of cases, and the specs of the kernels that each asked for.

    Args:
        chosen: the cases.
        seconds: no case is begun later.
        after: is called with all entries after each case.
    """
    deadline = time.monotonic() + seconds
    entries: list[dict[str, Any]] = []
    ran: list[list[Any]] = []
    for place, bench in enumerate(chosen):
        if time.monotonic() > deadline:
            print(f"no time for {', '.join(left.name for left in chosen[place:])}", flush=True)
            break
        with kernels_run.noting() as asked:
            try:
                entries.append(run(bench))
            except Exception as error:  # the others still run, whatever broke this one
                entries.append({**bench.key, "failed": f"{type(error).__name__}: {error}"[:500]})
                print(f"{bench.name}: FAILED {entries[-1]['failed']}", flush=True)
        ran.append(list(asked))
        bench.done()
        torch.cuda.empty_cache()
        after(entries)
    return entries, ran


def specs_of(chosen: Sequence[ValueBench]) -> list[Any]:
    """The kernels of cases on this card."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    return list(dict.fromkeys(spec for bench in chosen for spec in bench.specs(sms)))


# ---- MLA


class _Kept:
    """Caches of gigabytes, which neighbouring cases of one kind share."""

    def __init__(self) -> None:
        self._kind = ""
        self._kept: dict[str, tuple[int, Any]] = {}

    def get(self, kind: str, family: str, run: int, make: Callable[[str, int], Any]) -> Any:
        """What `make(family, run)` returns, made once; a family that leaves keys alone has the caches of N(0,1).

        Those of other kinds of cases are freed, and so are those that the family had sorted in other runs.
        """
        if kind != self._kind:
            self.clear()
        self._kind = kind
        name = NORMAL if FAMILIES[family].of_query else family
        run = run if FAMILIES[family].sorted else 0
        if name not in self._kept or self._kept[name][0] != run:
            self._kept.pop(name, None)  # freed before the next one is allocated
            self._kept[name] = run, make(name, run)
        return self._kept[name][1]

    def values(self) -> list[Any]:
        """All that is kept."""
        return [made for _, made in self._kept.values()]

    def clear(self) -> None:
        """Frees all."""
        self._kept.clear()


def _mla_bench(bench: DecodeBench, kept: _Kept, tokens: int, peer: types.ModuleType | str, device: str) -> ValueBench:
    """A case over the cache of V3.2; `tokens` of it, which all cases share."""
    run_of = bench_mla.CONTEXT if bench.mode == "sparse" else bench.keys

    def make_caches(family: str, run: int) -> bench_mla.Caches:
        return bench_mla.Caches(tokens, device, family, run)

    def make(family: str) -> Ready:
        caches = kept.get("mla", family, run_of, make_caches)
        inputs = bench_mla.decode_inputs(bench, caches.fp8, family)

        def calls() -> list[Call]:
            return [bench_mla.decode_call(case, **bench.forced) for case in inputs]

        out, lse = calls()[0]()
        rows = _rows(bench.batch)
        some = inputs[0].rows(rows).arguments()
        check = check_decode(out[rows], lse[rows], name=family, **some)
        peers = functools.partial(bench_mla._peers, bench, inputs, caches, peer, rows, _limit(family))
        return Ready(calls, _finite(check, out, lse), peer=peers)

    def done() -> None:
        for caches in kept.values():
            caches.drop_bf16()

    sizes = bench.mode, bench.batch, bench.h_q, bench.s_q, bench.keys
    against_peer = PEER_MUST if sizes in WITH_PEER_MUST else {}
    return ValueBench(
        bench.name,
        bench.key,
        make,
        lambda sms: [bench_mla.plan(bench, sms).spec],
        must={**MLA_MUST, **against_peer},
        apart=(SLOW,),
        done=done,
    )


def _rows(batch: int) -> list[int]:
    return torch.linspace(0, batch - 1, min(ROWS_CHECKED, batch)).long().tolist()


def _limit(family: str) -> float:
    """Of a peer's relative error: keys in bf16 lose scores of hundreds, which is no reason not to time it."""
    return PEER_LIMIT if family == NORMAL else math.inf


def _finite(check: Comparison, *results: torch.Tensor) -> Comparison:
    if all(bool(result.isfinite().all()) for result in results):
        return check
    return dataclasses.replace(check, problems=(*check.problems, "not every element of the results is finite"))


def _format_bench(bench: FormatBench, kept: _Kept, peer: types.ModuleType | str, device: str) -> ValueBench:
    """A case over the other latent formats."""

    def make(family: str) -> Ready:
        caches = kept.get("formats", family, 1, lambda name, _: FormatCaches(device, name))
        inputs = bench_formats.inputs(bench, caches, family)

        def calls() -> list[Call]:
            return [bench_formats.decode_call(call) for call in inputs]

        out, lse = calls()[0]()
        rows = _rows(bench.batch)
        check = bench_formats.check_rows(out[rows], lse[rows], bench_formats.some_rows(inputs[0], rows), family)
        peers = functools.partial(bench_formats._peers, bench, inputs, peer, rows, _limit(family))
        return Ready(calls, _finite(check, out, lse), peer=peers)

    def specs(sms: int) -> list[Any]:
        plan = plan_decode(
            sparse=True,
            batch=bench.batch,
            s_q=bench.s_q,
            h_q=bench.h_q,
            max_keys=bench.topk,
            num_sms=sms,
            ragged=bench.ragged,
            cache_format=bench.formats[0],
            extra_format=bench.formats[1] if bench.extra_topk else "",
            extra_keys=bench.extra_topk,
        )
        return [plan.spec]

    return ValueBench(bench.name, bench.key, make, specs, must=MLA_MUST, apart=(SLOW,))


# ---- GQA, sink attention


def _gqa_bench(bench: GqaBench, kept: _Kept, device: str) -> ValueBench:
    """A case over contiguous caches."""

    def make(family: str) -> Ready:
        kept.clear()
        inputs = gqa_inputs(bench, family, device)

        def calls() -> list[Call]:
            return [bench_gqa.decode_call(case) for case in inputs]

        out, lse = calls()[0]()
        rows, sample = bench_gqa.some_rows(inputs[0], bench.scales)
        return Ready(calls, _finite(check_gqa(out[rows], lse[rows], sample, name=family), out, lse))

    return ValueBench(bench.name, bench.key, make, lambda sms: [bench.spec])


def gqa_inputs(bench: GqaBench, family: str, device: str) -> list[GqaCase]:
    """The rotated input sets over contiguous caches (BNSH), in which each head of a token has values of its own."""
    gen, dtype = generator(bench.batch, device), KV_DTYPES[bench.kv_dtype]
    shape = (bench.batch, bench.h_kv, bench.s_k, bench.d)
    cases = []
    for _ in range(bench.sets):
        caches: dict[str, Any] = {}
        for which in "kv":
            x = _heads_of_tokens(family, shape, gen)
            if bench.kv_dtype == "bf16":
                caches[f"{which}_cache"] = x.to(dtype)
                continue
            codes, scale = quantize(x.flatten(0, 2).unsqueeze(1), SCALE_NAMES[bench.scales], torch.float16)
            if bench.kv_dtype == "fp8":
                scale = (scale.float() * (127 / FP8_MAX)).half()
                codes = (x / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(dtype)
            if FAMILIES[family].unwritten and scale.numel() > 1:
                scale[(codes == 0).all(dim=-1)] = 0
            caches[f"{which}_cache"] = codes.view(shape)
            caches[f"{which}_scale"] = scale.view(shape[:3]) if scale.numel() > 1 else scale
        q = query(family, (bench.batch, bench.s_q, bench.h_q, bench.d), gen)
        lengths = torch.tensor(bench.seqlens, dtype=torch.int32, device=device)
        cases.append(GqaCase(q=q, **caches, layout=bench.layout, cache_seqlens=lengths))
    return cases


def _heads_of_tokens(family: str, shape: tuple[int, int, int, int], gen: torch.Generator) -> torch.Tensor:
    """(batch, heads, tokens, d) float32: to a family each head of a token is a token, its quant tiles are quarters."""
    batch, heads, length, d = shape
    rows = batch * heads * length
    groups = torch.arange(rows, dtype=torch.int64, device=gen.device) // length
    return keys(family, (rows, d), d // 4, gen, groups=groups).view(shape)


def _sink_bench(bench: SinkBench, kept: _Kept, device: str) -> ValueBench:
    """A forward or a backward."""

    def make(family: str) -> Ready:
        kept.clear()
        cases = [bench_sink._inputs(bench, seed, device) for seed in range(bench_sink.SETS)]
        for seed, case in enumerate(cases):
            gen = generator(seed, device)
            case.q.copy_(query(family, tuple(case.q.shape), gen))
            for tensor in (case.k, case.v):
                batch, length, heads, d = tensor.shape
                tensor.copy_(_heads_of_tokens(family, (batch, heads, length, d), gen).transpose(1, 2))

        def calls() -> list[Call]:
            return [bench_sink._call(bench, case) for case in cases]

        first = bench_sink._call(bench, cases[0])
        check = bench_sink.check_call(bench, cases[0], first, first(), sums=family == NORMAL)
        # dq is a sum whose terms come in any order: how much that changes depends on how much of it cancels
        limits = {"dq": math.inf} if bench.backward else {}
        return Ready(calls, check, NAMES if bench.backward else RESULTS, limits)

    def specs(sms: int) -> list[Any]:
        return backward_spec.shipped_specs() if bench.backward else forward_spec.shipped_specs()

    return ValueBench(bench.name, bench.key, make, specs, together=SINKS_TOGETHER)


# ---- all


def benches(quick: bool = False, only: str | None = None, device: str = "cuda") -> list[ValueBench]:
    """All cases, or few, or those whose name matches."""

    def wanted(bench: Any) -> bool:
        return (bench.quick or not quick) and (only is None or re.search(only, bench.name) is not None)

    peer, kept = bench_mla.import_peer(), _Kept()
    if isinstance(peer, str):
        print(f"no peer to compare with: {peer}", flush=True)
    decode = [bench for bench in bench_mla.DECODE_CASES if wanted(bench)]
    tokens = max((bench.cache_tokens for bench in decode), default=0) if torch.cuda.is_available() else 0
    found = [_mla_bench(bench, kept, tokens, peer, device) for bench in decode]
    found += [_format_bench(bench, kept, peer, device) for bench in bench_formats.CASES if wanted(bench)]
    found += [_gqa_bench(bench, kept, device) for bench in GQA_CASES if wanted(bench)]
    return found + [_sink_bench(bench, kept, device) for bench in SINK_CASES if wanted(bench)]


def all_specs() -> list[Any]:
    """The kernels of all cases."""
    return specs_of(benches())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and shows the cases; 1 where one is wrong or misses what it must reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"begin no case later ({SECONDS:.0f})")
    parser.add_argument("--out", type=pathlib.Path, help="JSON, written after each case")
    options = parser.parse_args(arguments)

    def write(entries: list[dict[str, Any]]) -> None:
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")

    chosen = benches(options.quick, options.only)
    precompile(specs_of(chosen))
    entries, _ = run_all(chosen, options.seconds, after=write)
    return int(any("failed" in entry or "wrong" in entry or not entry["met"] for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
