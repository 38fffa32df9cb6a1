"""Time that ranks of one host take to exchange partial results, and how much faster they decode together.

Runs on every rank of torchrun; all ranks return the same record. Times are those of the slowest rank, in-layer: graphs
of a small kernel and a call in turn, less graphs of the small kernels, medians of `REPLAYS` replays.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from bench import gqa as bench_gqa
from bench import in_layer, records, timing
from bench.mla import PAGE_SIZE
from cute_kernels import gqa_decode, mla_fp8_decode
from cute_kernels.budget.ranks import Exchange
from cute_kernels.distributed import context_parallel_decode, exchange, shard_lengths, symmetric
from cute_kernels.distributed.exchange import Member, Rows, Target
from fp8_mla import QK_DIM
from tests.kit.compare import relative_error
from tests.kit.draws import generator
from tests.kit.mla_cases import latent_tokens

EXCHANGED: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Query tokens of an exchange."""
MLA_HEADS, MLA_D = 128, 512
GQA_HEADS, GQA_KV_HEADS, GQA_D = 64, 8, 128
DECODED: Final = (
    ("mla", 1, 1 << 18),
    ("mla", 1, 1 << 20),
    ("mla", 8, 1 << 17),
    ("gqa", 1, 1 << 18),
    ("gqa", 1, 1 << 20),
)
"""(op, batch, tokens of each context)."""
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 26
"""Bytes sent by each rank in a bare collective: its start decides, or the link."""
FEW, MANY, REPLAYS = 4, 20, 21
"""Calls of a shorter and a longer replay. A call's time is the difference of the two over the difference in calls:
ranks may begin a replay apart, and the first exchange waits for that. With an exchange, each of 4 decodes of 82 us took
33 us more, each of 20 took 10."""
ENQUEUE_CYCLES = 10_000_000
"""Five milliseconds, in which the host enqueues a replay."""
REST_SECONDS = 0.05
"""Idle time before a replay of decodes, as in `bench.in_layer`."""


def measure(say: Callable[[str], None]) -> dict[str, Any]:
    """Makes a record: card and versions, "link", "exchanges", "decodes". Needs torchrun, with a GPU for each rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        member = Member.of(None)
        record: dict[str, Any] = {**records.machine(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        record |= {"ranks": member.world_size, "link": link(member, device)}
        say(f"link: {record['link']}")
        for name, found in (("exchanges", exchanges(member, device)), ("decodes", decodes(member, device))):
            record[name] = []
            for case in found:
                say(str(case))
                record[name].append(case)
        return record
    finally:
        dist.destroy_process_group()


def link(member: Member, device: torch.device) -> dict[str, float]:
    """Measures bare collectives: microseconds of a small one, and GB/s that a rank receives in a large one."""
    times = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        sent = torch.zeros(size, dtype=torch.uint8, device=device)
        received = sent.new_empty((member.world_size, size))
        times.append(time_us(functools.partial(member.exchange, "link", exchange.all_gather(), received, sent)))
    received_bytes = LARGE_BYTES * (member.world_size - 1)
    return {"start_us": round(times[0], 2), "gbps": round(received_bytes / (times[1] - times[0]) / 1e3, 1)}


def exchange_of(batch: int, heads: str, ranks: int) -> Exchange:
    """Returns the exchange of `batch` query tokens of MLA."""
    return Exchange(ranks, batch * MLA_HEADS, MLA_D, heads)


def exchanges(member: Member, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measures an exchange of partial MLA results and its merge, in both ways, which must agree to one rounding."""
    for batch in EXCHANGED:
        for heads in ("gather", "scatter"):
            shape = (batch, 1, MLA_HEADS)
            gen = generator(batch * member.world_size + member.rank, device)
            rows = Rows.empty(shape, MLA_D, torch.bfloat16, device)
            rows.out.copy_(torch.randn((*shape, MLA_D), device=device, generator=gen))
            rows.lse.copy_(torch.randn(shape, device=device, generator=gen))
            target = Target.of(heads, member, shape, MLA_D, torch.bfloat16, device, None, None, None)
            buffer = symmetric.peer_buffer("symmetric", member, rows, target)
            assert buffer is not None
            ways = {
                "symmetric": functools.partial(symmetric.combine_with_peers, rows, buffer, target),
                "collective": functools.partial(exchange.combine, "measured", rows, member, target),
            }
            results = {name: way()[0] for name, way in ways.items()}
            yield {
                "batch": batch,
                "heads": heads,
                "received_bytes": exchange_of(batch, heads, member.world_size).received,
                **{f"{name}_us": round(time_us(way), 2) for name, way in ways.items()},
                "difference": relative_error(results["symmetric"], results["collective"]),
            }


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decode of whole contexts on one GPU, and of this rank's share of them.

    op      decode op of the package
    whole   its arguments over all tokens
    share   its arguments over this rank's tokens; lengths are those of the whole contexts
    local   the lengths that this rank has
    """

    op: Callable[..., Any]
    whole: Mapping[str, Any]
    share: Mapping[str, Any]
    local: torch.Tensor

    @classmethod
    def of(cls, op: str, batch: int, tokens: int, member: Member, device: torch.device) -> Decode:
        """Makes the same contexts on every rank, of `tokens` each, and keeps every world_size-th token."""
        gen = generator(tokens, device)
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        caches: dict[str, torch.Tensor] = {}
        if op == "mla":
            caches["kv_cache"] = latent_tokens(batch * tokens, gen)
            q = torch.randn((batch, 1, MLA_HEADS, QK_DIM), device=device, generator=gen).bfloat16()
            named: dict[str, Any] = {}
        else:
            pool = bench_gqa.Pool(str(device))
            for which in "kv":
                caches[f"{which}_cache"] = pool.codes(which, "int8", (batch * tokens, GQA_KV_HEADS, GQA_D))
                scale = torch.rand((batch * tokens, GQA_KV_HEADS), device=device, generator=gen) + 0.5
                caches[f"{which}_scale"] = (scale / bench_gqa.CODE_SIZE).half()
            q = torch.randn((batch, 1, GQA_HEADS, GQA_D), device=device, generator=gen).bfloat16()
            named = {"layout": "paged_NHD"}

        def arguments(rank: int, world_size: int) -> dict[str, Any]:
            pages = batch * tokens // world_size // PAGE_SIZE
            own = {
                name: cache[rank::world_size].contiguous().view(pages, PAGE_SIZE, *cache.shape[1:])
                for name, cache in caches.items()
            }
            table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)
            return {"q": q, **own, **named, "block_table": table, "cache_seqlens": lengths}

        local = shard_lengths(lengths, rank=member.rank, world_size=member.world_size)
        share = arguments(member.rank, member.world_size)
        return cls(mla_fp8_decode if op == "mla" else gqa_decode, arguments(0, 1), share, local)

    def together(self, combine: str) -> Any:
        """Decodes on all ranks together."""
        lengths = self.local.view(-1, 1)  # for one query token
        return context_parallel_decode(self.op, None, **self.share, combine=combine, local_lengths=lengths)

    def alone(self) -> Any:
        """Decodes on one GPU."""
        return self.op(**self.whole)

    def of_share(self) -> Any:
        """Decodes over this rank's tokens, without an exchange."""
        return self.op(**{**self.share, "cache_seqlens": self.local}, return_lse=True)


def decodes(member: Member, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measures whole contexts on one GPU, and on all ranks together."""
    for op, batch, tokens in DECODED:
        decode = Decode.of(op, batch, tokens, member, device)
        whole = decode.alone()
        ways = ("symmetric", "collective")
        errors = [relative_error(decode.together(way), whole) for way in ways]
        calls = {"us": decode.alone, "share_us": decode.of_share}
        calls |= {f"{way}_us": functools.partial(decode.together, way) for way in ways}
        us = {name: time_us(call, REST_SECONDS) for name, call in calls.items()}
        case = {"op": op, "batch": batch, "keys": tokens, "cache_bytes": _bytes(decode.whole)}
        counted = {"calls": dict.fromkeys(us, f"{FEW} to {MANY}"), "difference": max(errors)}
        yield {**case, **{name: round(value, 2) for name, value in us.items()}, **counted}
        del decode, whole
        torch.cuda.empty_cache()


def _bytes(arguments: Mapping[str, Any]) -> int:
    return sum(t.numel() * t.element_size() for name, t in arguments.items() if name.endswith(("cache", "scale")))


def time_us(call: Callable[[], Any], rest: float = 0.0) -> float:
    """Returns the microseconds of a call, in-layer, on the slowest rank, after rests of `rest` seconds.

    All ranks call it at the same time.
    """
    call()
    torch.cuda.synchronize()
    small = in_layer.small_kernel()
    us = _more_us(lambda: (small(), call()), rest) - _small_us()
    slowest = torch.tensor(us, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


@functools.cache
def _small_us() -> float:
    """Returns the microseconds of the small kernel; all ranks ask for it first at the same time."""
    return _more_us(in_layer.small_kernel(), 0.0)


def _more_us(call: Callable[[], Any], rest: float) -> float:
    """Returns the microseconds of a call, from a longer replay and a shorter one."""
    spans = []
    for calls in (FEW, MANY):
        graph, _ = timing.capture([call] * calls, warmed=True)
        spans.append(statistics.median(_spans(graph, rest)))
    return (spans[1] - spans[0]) / (MANY - FEW)


def _spans(graph: torch.cuda.CUDAGraph, rest: float) -> list[float]:
    """Returns the microseconds of replays. All ranks meet on their GPUs before each, when every host has enqueued it.

    Otherwise the slower host's rank starts tens of microseconds later, and the other rank's exchange waits for it.
    """
    met = torch.zeros(1, device="cuda")
    spans = []
    for number in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        time.sleep(rest)
        torch.cuda._sleep(ENQUEUE_CYCLES)
        dist.all_reduce(met)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number:  # the first replay uploads the graph
            spans.append(begin.elapsed_time(end) * 1e3)
    return spans
