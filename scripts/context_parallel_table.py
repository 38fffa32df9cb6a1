"""Context parallelism: times of ranks, and a prediction for eight GPUs with a million tokens.

    python scripts/context_parallel_table.py            print the tables that scripts/results_table.py puts into pages
    torchrun --nproc-per-node 2 scripts/context_parallel_table.py --measure build/ranks.json

The second one measures on GPUs of one host. Records are copied by hand: cp build/ranks.json results/ranks/h100_x2.json

Predicted decode times are those of the cycle budget (docs/maintainers/budget.md).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import budget, gqa, mla  # noqa: E402
from bench import ranks as bench_ranks  # noqa: E402
from bench.jsonl import folded  # noqa: E402
from bench.ranks import GQA_D, GQA_HEADS, GQA_KV_HEADS, MLA_D, MLA_HEADS  # noqa: E402
from bench.records import card_slug  # noqa: E402
from bench.report import markdown  # noqa: E402
from bench.report.markdown import hundredths, short  # noqa: E402
from cute_kernels.budget.ranks import Exchange, crossing_tokens, predict_ranks  # noqa: E402
from fp8_mla.formats import V3_2  # noqa: E402

RANKS, CONTEXT = 8, 1 << 20
BATCHES = (1, 2, 4, 8, 16, 32, 64)
OPS = {"mla": "FP8 MLA", "gqa": "INT8 GQA"}

Record = Mapping[str, Any]


# ---- as measured


def records() -> list[dict[str, Any]]:
    """Returns the records, by name of their files."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "results" / "ranks").glob("*.json"))
    ]


def measured(record: Record) -> list[str]:
    """Returns lines of markdown: whole decodes, then only exchanges and merges."""
    ranks, link = record["ranks"], record["link"]
    papers = [bench_ranks.exchange_of(case["batch"], case["heads"], ranks) for case in record["exchanges"]]
    decodes = [
        [
            f"{OPS[case['op']]}, {case['batch']} x {case['keys']}", short(case["us"]), short(case["share_us"]),
            short(case["symmetric_us"]), short(case["collective_us"]), *(
                f"{hundredths(case['us'] / case[key])} x" for key in ("share_us", "symmetric_us", "collective_us")
            ), ", ".join(dict.fromkeys(map(str, case["calls"].values()))),
        ]
        for case in record["decodes"]
    ]  # fmt: skip
    exchanges = [
        [
            str(case["batch"]), case["heads"], short(case["received_bytes"] / 1e3),
            short(case["symmetric_us"]), short(us if math.isfinite(us := paper.symmetric_us()) else None),
            short(case["collective_us"]), short(paper.collective_us()),
            f"{case['received_bytes'] / case['symmetric_us'] / 1e3:.0f}",
        ]
        for case, paper in zip(record["exchanges"], papers, strict=True)
    ]  # fmt: skip
    decode_header = (
        "decode, batch x tokens", "one GPU, us", "a rank's share", "symmetric", "collective",
        "speed-up: without exchange", "symmetric", "collective", "calls of a replay",
    )  # fmt: skip
    exchange_header = (
        "query tokens", "heads", "received, KB", "symmetric, us", "on paper", "collective, us", "on paper",
        "GB/s, symmetric",
    )  # fmt: skip
    said = f"{ranks} x {record['card']} of one host, NCCL {record['nccl']}, torch {record['torch']}, {record['date']}. "
    said += f"A small all-gather by itself takes {short(link['start_us'])} us; in a large one a rank receives "
    said += f"{link['gbps']:.0f} GB/s, {link['gbps'] / 450:.2f} of what NVLink has nominally."
    return markdown.paragraphs(
        [said], markdown.table(decode_header, decodes), markdown.table(exchange_header, exchanges)
    )


def speeds(found: Sequence[Record]) -> list[str]:
    """Makes one table: how many times as fast as one GPU the ranks of each record decode, either way."""
    header, rows = ["decode, batch x tokens"], dict[str, list[str]]()
    for record in found:
        host = f"{record['ranks']} x {card_slug(record['card']).upper()}"
        header += [f"{host}: one GPU, us", "symmetric", "collective"]
        for case in record["decodes"]:
            ratios = [f"{hundredths(case['us'] / case[key])} x" for key in ("symmetric_us", "collective_us")]
            label = f"{OPS[case['op']]}, {case['batch']} x {case['keys']}"
            rows.setdefault(label, []).extend([short(case["us"]), *ratios])
    return markdown.table(header, ([label, *cells] for label, cells in rows.items())) if rows else []


# ---- on paper


def mla_us(batch: int, keys: int) -> float:
    """Predicts microseconds of `mla_fp8_decode` over the 656-byte format, 128 heads."""
    return budget.predict_mla(mla.MlaCase("dense", batch, MLA_HEADS, 1, keys)).us


def gqa_us(batch: int, keys: int) -> float:
    """Predicts microseconds of `gqa_decode` over INT8 with a scale for each token and head."""
    sizes: dict[str, Any] = {"page_size": 64, "h_q": GQA_HEADS, "h_kv": GQA_KV_HEADS, "d": GQA_D}
    return budget.predict_gqa(gqa.GqaDecodeCase(batch, keys, "per_token_head", "paged_NHD", **sizes)).us


def on_paper() -> list[str]:
    """Returns lines of markdown: eight GPUs and a million tokens, and where "gather" and "scatter" cross."""
    header = (
        "cache", "batch", "one GPU, us", "8 GPUs, decode", "exchange: gather", "scatter", "q and scatter", "gather by",
        "all: gather", "scatter", "binds", "speed-up: gather", "scatter",
    )  # fmt: skip
    rows = []
    for op, us, heads, d, d_q in (
        ("mla", mla_us, MLA_HEADS, MLA_D, V3_2.d_qk),
        ("gqa", gqa_us, GQA_HEADS, GQA_D, GQA_D),
    ):
        for batch in BATCHES:
            one, share = us(batch, CONTEXT), us(batch, CONTEXT // RANKS)
            gather, scatter, queried = (
                predict_ranks(share, Exchange(RANKS, batch * heads, d, kind, width))
                for kind, width in (("gather", 0), ("scatter", 0), ("scatter", d_q))
            )
            exchanged = [short(found.exchange_us) for found in (gather, scatter, queried)]
            all_of_it = [short(found.us) for found in (gather, scatter)]
            speed_ups = [f"{one / found.us:.1f} x" for found in (gather, scatter)]
            cells = [OPS[op], str(batch), short(one), short(share), *exchanged, gather.way, *all_of_it]
            rows.append([*cells, gather.binds, *speed_ups])
    mla = crossing_tokens(RANKS, MLA_HEADS, MLA_D, V3_2.d_qk)
    gqa = crossing_tokens(RANKS, GQA_HEADS, GQA_D, GQA_D)
    crossing = (
        f"Gathering q and scattering heads takes less than `gather` from {mla} query tokens on for MLA, and from "
    )
    crossing += f"{gqa} on for GQA."
    return markdown.paragraphs(markdown.table(header, rows), [crossing])


def measure(path: pathlib.Path) -> None:
    """Writes a record, on every rank of torchrun."""
    first = os.environ["RANK"] == "0"
    record = bench_ranks.measure(functools.partial(print, flush=True) if first else lambda line: None)
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(folded(record) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="FILE", type=pathlib.Path, help="write a record; under torchrun, on GPUs")
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.measure)
    else:
        print("\n".join(markdown.paragraphs(*map(measured, records()), on_paper())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
