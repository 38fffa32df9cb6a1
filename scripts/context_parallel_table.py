"""The table of docs/users/context_parallel.md: eight GPUs and a context of a million tokens, on paper.

python scripts/context_parallel_table.py            print it
python scripts/context_parallel_table.py --write    write it into the page

torchrun --nproc-per-node 2 scripts/context_parallel_table.py --measure build/ranks.json

The last one measures on GPUs of one host. Records are copied by hand: cp build/ranks.json results/ranks/h100_x2.json
Decode times are those of the cycle budget (docs/maintainers/budget.md); the link's rate is an assumption.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from cute_kernels.budget.ranks import ASSUMED_NVLINK, Exchange, Link, crossing_rows, predict_ranks  # noqa: E402
from fp8_mla.formats import V3_2  # noqa: E402
from scripts.bench import gqa as bench_gqa  # noqa: E402
from scripts.bench import mla as bench_mla  # noqa: E402
from scripts.bench.report import markdown  # noqa: E402

PAGE = ROOT / "docs" / "users" / "context_parallel.md"
BLOCK = "context-parallel"
RANKS, CONTEXT = 8, 1 << 20
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MLA_HEADS, MLA_D = 128, 512
GQA_HEADS, GQA_KV_HEADS, GQA_D = 64, 8, 128
HEADER = (
    "cache", "batch", "one GPU, us", "8 GPUs, decode", "link: gather", "link: scatter", "link: q and scatter",
    "all: gather", "all: scatter", "binds", "speed-up: gather", "speed-up: scatter",
)  # fmt: skip


def mla_us(batch: int, keys: int) -> float:
    """Microseconds of `mla_fp8_decode` over the 656-byte format, 128 heads."""
    return bench_mla.predict(bench_mla.DecodeBench("dense", batch, MLA_HEADS, 1, keys)).us


def gqa_us(batch: int, keys: int) -> float:
    """Microseconds of `gqa_decode` over INT8 with a scale for each token and head."""
    bench = bench_gqa.GqaBench(batch, keys, "per_token_head", "paged_NHD", 64)
    return bench_gqa.predict(dataclasses.replace(bench, h_q=GQA_HEADS, h_kv=GQA_KV_HEADS, d=GQA_D)).us


def table(link: Link = ASSUMED_NVLINK) -> list[str]:
    """Lines of markdown."""
    lines = [_line(HEADER), _line(["---"] + ["---:"] * (len(HEADER) - 1))]
    for name, us, heads, d, d_q in (
        ("FP8 MLA", mla_us, MLA_HEADS, MLA_D, V3_2.d_qk),
        ("INT8 GQA", gqa_us, GQA_HEADS, GQA_D, GQA_D),
    ):
        for batch in BATCHES:
            one, share, rows = us(batch, CONTEXT), us(batch, CONTEXT // RANKS), batch * heads
            gather = predict_ranks(share, Exchange(RANKS, rows, d, "gather"), link=link)
            scatter = predict_ranks(share, Exchange(RANKS, rows, d, "scatter"), link=link)
            queried = Exchange(RANKS, rows, d, "scatter", d_q)
            cells = [one, share, gather.link_us, scatter.link_us, queried.link_us(link), gather.us, scatter.us]
            speed_ups = (f"{one / found.us:.1f} x" for found in (gather, scatter))
            lines.append(_line([name, str(batch), *map(_short, cells), gather.binds, *speed_ups]))
    return lines


def crossings(link: Link = ASSUMED_NVLINK) -> list[str]:
    """Where gathering q and scattering heads begins to cost the link less than "gather"."""
    mla = crossing_rows(RANKS, MLA_D, V3_2.d_qk, link) / MLA_HEADS
    gqa = crossing_rows(RANKS, GQA_D, GQA_D, link) / GQA_HEADS
    return [
        f"Gathering q and scattering heads costs the link less than `gather` from {mla:.0f} query tokens on for MLA, "
        f"and from {gqa:.0f} on for GQA."
    ]


def filled(page: str) -> str:
    """The page with the table between its marks; raises as `markdown.fill`."""
    return markdown.fill(page, BLOCK, "\n".join([*table(), "", *crossings()]))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into its page")
    parser.add_argument("--measure", metavar="FILE", type=pathlib.Path, help="write a record; under torchrun, on GPUs")
    options = parser.parse_args(arguments)
    if options.measure:
        from scripts.bench import ranks

        first = os.environ["RANK"] == "0"
        record = ranks.measure(functools.partial(print, flush=True) if first else lambda line: None)
        if first:
            options.measure.parent.mkdir(parents=True, exist_ok=True)
            options.measure.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    elif options.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join([*table(), "", *crossings()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
