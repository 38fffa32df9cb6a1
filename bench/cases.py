"""The cases of all operations: which ones run, running them, their names and their table for a terminal."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import gqa as bench_gqa
from bench import kernels_run
from bench import mla as bench_mla
from bench import mla_formats as bench_mla_formats
from bench import sink as bench_sink
from bench.parts import OPS
from bench.progress import Progress
from bench.records import card_slug as card_slug
from fp8_mla.formats import FORMATS as TOKEN_FORMATS

FORMATS = ("cache_format", "extra_cache_format", "extra_topk")
Bench = tuple[str, Callable[[dict[str, float]], dict[str, Any]]]
"""A case's name, and what runs it with the ceilings of the card."""


def select_benches(quick: bool, only: str | None, sections: Sequence[str] = tuple(OPS)) -> tuple[list[Bench], int]:
    """The benchmarks to run, and the tokens of the FP8 cache that those of MLA share.

    Args:
        quick: few.
        only: a pattern of their names.
        sections: those of `parts.OPS` to take them from.
    """
    ops = {op for name in sections for op in OPS.get(name, ())}
    peer = bench_mla.import_peer() if "mla" in sections else ""
    if isinstance(peer, str) and peer:
        print(f"no peer to compare with: {peer}", flush=True)

    def wanted(name: str) -> bool:
        return name.partition(" ")[0] in ops and (only is None or re.search(only, name) is not None)

    decode = [bench for bench in bench_mla.DECODE_CASES if (bench.quick or not quick) and wanted(bench.name)]
    # as many as input sets outgrow the L2 cache of the card; names alone are asked for without one
    tokens = max((bench.cache_tokens for bench in decode), default=0) if torch.cuda.is_available() else 0
    caches = bench_mla.Caches(tokens)
    benches: list[Bench] = [
        (bench.name, functools.partial(bench_mla.run_decode, bench, caches, peer)) for bench in decode
    ]
    formats = bench_mla_formats.FormatCaches()
    others: list[Bench] = [
        (bench.name, functools.partial(bench_mla_formats.run, bench, formats, peer))
        for bench in bench_mla_formats.CASES
        if bench.quick or not quick
    ]
    others += [
        (f"mla_fp8_append {name}", functools.partial(bench_mla.run_append, token_format=token_format))
        for name, token_format in TOKEN_FORMATS.items()
        if not quick or name == "v3.2"
    ]
    others.append(("merge_states", bench_mla.run_merge))
    pool = bench_gqa.Pool()
    others += [
        (gqa.name, functools.partial(bench_gqa.run_decode, gqa, pool))
        for gqa in bench_gqa.DECODE_CASES
        if gqa.quick or not quick
    ]
    others += [
        (append.name, functools.partial(bench_gqa.run_append, append, pool.device))
        for append in bench_gqa.APPEND_CASES
        if append.quick or not quick
    ]
    others += [
        (sink.name, functools.partial(bench_sink.run, sink)) for sink in bench_sink.CASES if sink.quick or not quick
    ]
    others += [
        (routing.name, functools.partial(bench_sink.run_routing, routing))
        for routing in bench_sink.ROUTING_CASES
        if routing.quick or not quick
    ]
    return benches + [(name, run) for name, run in others if wanted(name)], tokens


def run_benches(
    benches: Sequence[Bench],
    ceilings: dict[str, float],
    progress: Progress,
    ran: list[list[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Run each; one that raises is recorded as failed and the others go on.

    To `ran` are added, for each case, the specs of the kernels that it asked for.
    """
    cases = []
    for number, (name, run) in enumerate(benches):
        with progress.step(name, number, len(benches)), kernels_run.noting() as asked:
            try:
                cases.append(run(ceilings))
            except Exception as error:  # the record must say which case broke, whatever broke it
                op, _, sizes = name.partition(" ")
                cases.append({"op": op, "case": sizes, "failed": f"{type(error).__name__}: {error}"[:500]})
        if ran is not None:
            ran.append(list(asked))
        torch.cuda.empty_cache()
    return cases


def name_kernels(
    cases: Sequence[dict[str, Any]], ran: Sequence[Sequence[Any]], others: Sequence[Any], code: Any
) -> dict[str, Any]:
    """Puts into each case which kernels it ran, and returns the record's "kernels" and "toolchain".

    Args:
        cases: of the record.
        ran: the specs of each.
        others: specs that only tests ran.
        code: `kernels_run.machine_code()`.
    """
    digests = code.digests_of_specs([*(spec for specs in ran for spec in specs), *others])
    for case, specs in zip(cases, ran, strict=True):
        case["kernels"] = kernels_run.ids(specs, digests)
    return {"kernels": kernels_run.described(digests), "toolchain": dict(code.toolchain())}


def table(cases: Sequence[dict[str, Any]]) -> str:
    """One line a case: what it was, time, rates, whether that is enough, the peer's time over ours, errors."""
    header: tuple[str, ...] = ("case", "us", "alone", "loaded", "MHz", "TFLOP/s", "GB/s", "of ceiling", "must")
    header += ("cyc/token", "peer/ours", "loaded", "rel err", "lse err")
    rows: list[tuple[str, ...]] = [(*header, "host us")]
    for case in cases:
        name = case_name(case)
        if "failed" in case:
            rows.append((name, "FAILED", case["failed"], *[""] * (len(rows[0]) - 3)))
            continue
        peers, loaded = (
            " ".join(str(peer.get(ratio, "failed")) for peer in (case.get("peers") or {}).values())
            for ratio in ("ratio", "ratio_sustained")
        )
        must = " ".join(f"{key} {limit}" for key, limit in (case.get("must") or {}).items())
        must += {True: " met", False: " MISSED", None: ""}[case.get("met")]
        times = ("us", "us_back_to_back", "us_sustained", "sm_mhz")
        figures = [case.get(key) for key in (*times, "TFLOPs", "GBps")]
        fraction = case.get("read_fraction", case.get("copy_fraction"))
        errors = [case.get(key) for key in ("rel_err", "lse_err", "host_us")]
        figures += [fraction, must, case.get("cycles_per_token"), peers, loaded]
        rows.append((name, *("" if value is None else str(value) for value in (*figures, *errors))))
    columns = range(len(header) + 1)
    widths = [max(len(row[column]) for row in rows if row[1] != "FAILED" or column < 2) for column in columns]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def case_name(case: dict[str, Any]) -> str:
    """What a case of the record was, in one line."""
    keys = ("op", "mode", "pass", "case", "cache_format", "kv_dtype", "scales", "layout")
    named = [str(case[key]) for key in keys if case.get(key)]
    if "page_size" in case:
        named[-1] += f"_{case['page_size']}"
    if "batch" in case:
        named.append(f"{case['batch']}x{case['h_q']}x{case['s_q']}")
    sizes = [
        f"{key} {case[key]}"
        for key in ("topk", "s_k", "ragged", "d", "tokens", "splits", "window", "deterministic", "scores", *FORMATS)
        if key in case
    ]
    return " ".join([*named, *sizes])
