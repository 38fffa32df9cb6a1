"""Times of the indexer: `index_decode` and its two kernels separately, and `index_topk` beside `torch.topk`.

    python -m bench.indexer

Keys lie in a pool that no cache of the card holds, and each call reads other pages of it. Logits of `index_topk` are in
the L2 cache if they fit, since the kernel that makes them leaves them there; "cold" ones are read from memory. Bounds
are the bytes of keys or logits over the read bandwidth of an H100.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench.in_layer import prepare, time_together
from bench.timing import Call
from cute_kernels import index_decode, index_topk
from cute_kernels.indexer import decode_op
from cute_kernels.indexer.reference import index_topk_reference
from fp8_mla import INDEX_KEY, row_views

DECODES = ((1, 8192, 1), (1, 32_768, 1), (1, 131_072, 1), (1, 2**20, 1), (8, 32_768, 1), (8, 131_072, 1), (64, 8192, 1),
           (64, 32_768, 1), (64, 131_072, 1), (128, 131_072, 1), (64, 32_768, 2), (64, 32_768, 3),
           (64, 32_768, 4), (64, 32_768, 8))  # fmt: skip
"""(requests, keys of each request, queries of each request)."""
CHOICES = ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (8, 131072), (64, 8192), (64, 32768),
           (64, 131072), (128, 131072))  # fmt: skip
"""(rows of logits, logits of a row)."""
HEADS, TOPK, PAGE_SIZE, POOL_BYTES = 64, 2048, 64, 1.35e9
BYTES_A_US = 3.06e6
CODES = 150
"""Code of the number 1: logits are then about 1, as a model's are, and the bins of the choice cover them."""
SETS = 4
COLD_BYTES = 200e6


def show(title: str, nbytes: float, ways: Mapping[str, Sequence[Call]], more: str = "") -> None:
    """Times all ways in turns, and prints a line."""
    times = time_together({name: prepare(calls) for name, calls in ways.items()}, sustained=False)
    found = ", ".join(f"{name} {timing.us:.1f} ({timing.us_back_to_back:.1f})" for name, timing in times.items())
    print(f"{title}: bound {nbytes / BYTES_A_US:.1f}, {found}{more}", flush=True)


# ---- index_decode


def key_pool(gen: torch.Generator) -> torch.Tensor:
    """Makes pages (n, 64, 132) uint8 of index keys."""
    pages = int(POOL_BYTES / (PAGE_SIZE * 132))
    cache = torch.empty(pages, PAGE_SIZE, 132, dtype=torch.uint8, device="cuda")
    codes, scales = row_views(cache, INDEX_KEY)
    for part in codes.split(4096):
        part.copy_(e4m3(part.shape, gen).view(torch.uint8))
    scales.copy_((torch.rand(pages, PAGE_SIZE, 1, device="cuda", generator=gen) / CODES).view(torch.uint8))
    return cache


def e4m3(shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """Makes codes of normal numbers whose largest is about 448."""
    drawn = torch.randn(shape, device="cuda", generator=gen) * CODES
    return drawn.clamp(-448, 448).to(torch.float8_e4m3fn)


def decode_ways(
    cache: torch.Tensor, batch: int, length: int, s_q: int, gen: torch.Generator
) -> tuple[Call, Call, Call]:
    """Returns a call of the op, and of its two kernels, over the same pages."""
    call: dict[str, Any] = {
        "q": e4m3((batch, s_q, HEADS, 128), gen),
        "weights": torch.randn(batch, s_q, HEADS, device="cuda") / CODES / (HEADS * 128) ** 0.5,
        "k_cache": cache,
        "block_table": torch.randint(len(cache), (batch, length // PAGE_SIZE), device="cuda", generator=gen).int(),
        "cache_seqlens": torch.full((batch,), length, dtype=torch.int32, device="cuda"),
    }
    whole = functools.partial(index_decode, **call)
    whole()
    prepared: Any = next(reversed(decode_op._prepared.values()))
    rows = torch.empty(batch * s_q, length, device="cuda")
    lengths = torch.empty(batch * s_q, dtype=torch.int32, device="cuda")
    out = torch.empty(batch * s_q, TOPK, dtype=torch.int32, device="cuda")
    codes, seqlens = call["q"].view(torch.uint8), call["cache_seqlens"].unsqueeze(1)
    tensors = codes, call["weights"], cache, call["block_table"], seqlens, rows, lengths
    score = functools.partial(prepared.score, *tensors, prepared.ctas, 0, 0, 0)
    score()
    return (
        whole,
        score,
        functools.partial(prepared.choose, rows, lengths, None, call["block_table"], out, *prepared.slots),
    )


# ---- index_topk


def choice(logits: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a call of `index_topk` that gives slots of pages."""
    rows, width = logits.shape
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    table = torch.randperm(rows * width // PAGE_SIZE, device="cuda").int().view(rows, -1)
    out = torch.empty(rows, TOPK, dtype=torch.int32, device="cuda")
    return functools.partial(index_topk, logits, lengths, TOPK, block_table=table, page_size=PAGE_SIZE, out=out)


def choice_ways(logits: torch.Tensor) -> dict[str, Sequence[Call]]:
    """Makes random logits in L2 and in memory, families in which a choice is hard, and torch's kernel."""
    families = {"warm": logits}
    if logits.shape[1] >= 32768 and len(logits) in (1, 64):
        zeros, equal = (logits - 3).clamp(min=0.0), torch.full_like(logits, 1.5)
        families |= {"zeros": zeros, "equal": equal, "100 more": logits + 100}
    ways: dict[str, Sequence[Call]] = {name: [choice(values)] for name, values in families.items()}
    ways["torch.topk"] = [functools.partial(torch.topk, logits, TOPK, dim=1)]
    if 4 * logits.numel() < COLD_BYTES / 3:
        ways["cold"] = [choice(logits.roll(i, 1)) for i in range(min(64, int(COLD_BYTES / 4 / logits.numel())))]
    return ways


def main() -> None:
    gen = torch.Generator(device="cuda").manual_seed(0)
    cache = key_pool(gen)
    print("index_decode, us in a layer (back to back):")
    for batch, length, s_q in DECODES:
        calls = zip(*(decode_ways(cache, batch, length, s_q, gen) for _ in range(SETS)), strict=True)
        ways = dict(zip(("both", "score", "choose"), calls, strict=True))
        show(f"{batch} x {length} x {s_q}", batch * length * 132, ways)
    print("index_topk, us in a layer (back to back):")
    for rows, width in CHOICES:
        logits = torch.randn(rows, width, device="cuda")
        lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
        exact = torch.equal(index_topk(logits, lengths, TOPK), index_topk_reference(logits, lengths, TOPK))
        show(f"{rows} x {width}", 4 * logits.numel(), choice_ways(logits), "" if exact else ", WRONG")


if __name__ == "__main__":
    main()
