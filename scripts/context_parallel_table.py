"""The table of docs/users/context_parallel.md: eight GPUs and a context of a million tokens, on paper.

python scripts/context_parallel_table.py            print it
python scripts/context_parallel_table.py --write    write it into the page

torchrun --nproc-per-node 2 scripts/context_parallel_table.py --measure    what an exchange takes, on GPUs of one host

Decode times are those of the cycle budget (docs/maintainers/budget.md); the link's rate is an assumption.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

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


CALLS, REPLAYS = 20, 15
MEASURED = ("batch", "heads", "received, KB", "symmetric memory, us", "NCCL, us")


def measured() -> Iterator[str]:
    """Lines of markdown: an exchange and its merge by both ways, 1 to 128 rows of MLA, on every rank of torchrun.

    A graph of `CALLS` exchanges, the median of `REPLAYS` replays on the slowest rank. Nothing of it has been seen on a
    card yet.
    """
    import torch
    import torch.distributed as dist

    from cute_kernels.distributed import exchange, symmetric
    from cute_kernels.distributed.exchange import Member, Rows, Target

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    member = Member.of(None)
    yield _line(MEASURED)
    yield _line(["---:", "---", *["---:"] * 3])
    for batch in (*BATCHES, 128):
        for heads in ("gather", "scatter"):
            shape = (batch, 1, MLA_HEADS)
            rows = Rows.empty(shape, MLA_D, torch.bfloat16, device)
            rows.out.normal_()
            rows.lse.normal_()
            target = Target.of(heads, member, shape, MLA_D, torch.bfloat16, device, None, None, None)
            buffer = symmetric.peer_buffer("symmetric", member, rows, target)
            assert buffer is not None
            ways = (
                functools.partial(symmetric.combine_with_peers, rows, buffer, target),
                functools.partial(exchange.combine, "measured", rows, member, target),
            )
            received = Exchange(member.world_size, batch * MLA_HEADS, MLA_D, heads).received / 1e3
            yield _line([str(batch), heads, f"{received:.0f}", *(_short(_replayed_us(way)) for way in ways)])
    dist.destroy_process_group()


def _replayed_us(call: Callable[[], object]) -> float:
    """Microseconds of a call in a graph, on the slowest rank."""
    import torch
    import torch.distributed as dist

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


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
    parser.add_argument("--measure", action="store_true", help="print what an exchange takes; under torchrun, on GPUs")
    options = parser.parse_args(arguments)
    if options.measure:
        for line in measured():
            if os.environ["RANK"] == "0":
                print(line, flush=True)
    elif options.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join([*table(), "", *crossings()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
