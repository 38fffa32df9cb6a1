"""Time of `index_decode`, its two kernels apart, beside the bytes of the keys over the bandwidth of an H100.

    python -m bench.index_decode

Keys lie in a pool that no cache of the card holds, each call reads other pages of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.in_layer import prepare, time_together
from cute_kernels import index_decode
from cute_kernels.indexer import decode_op
from fp8_mla import INDEX_KEY, row_views

CASES = ((1, 8192, 1), (1, 32_768, 1), (1, 131_072, 1), (1, 2**20, 1), (8, 32_768, 1), (8, 131_072, 1), (64, 8192, 1),
         (64, 32_768, 1), (64, 131_072, 1), (128, 131_072, 1), (64, 32_768, 2), (64, 32_768, 3),
         (64, 32_768, 4), (64, 32_768, 8))  # fmt: skip
"""Requests, keys of each, queries of each."""
HEADS, PAGE_SIZE, POOL_BYTES = 64, 64, 1.35e9
BYTES_A_US = 3.06e6
CODES = 150
"""Of a number of 1. So logits are about 1, as a model's are, and the choice's bins hold them."""
SETS = 4


def main() -> None:
    gen = torch.Generator(device="cuda").manual_seed(0)
    pages = int(POOL_BYTES / (PAGE_SIZE * 132))
    cache = torch.empty(pages, PAGE_SIZE, 132, dtype=torch.uint8, device="cuda")
    codes, scales = row_views(cache, INDEX_KEY)
    for part in codes.split(4096):
        part.copy_(e4m3(part.shape, gen).view(torch.uint8))
    scales.copy_((torch.rand(pages, PAGE_SIZE, 1, device="cuda", generator=gen) / CODES).view(torch.uint8))
    print("us in a layer (back to back):")
    for batch, length, s_q in CASES:
        calls, scored, chosen = [], [], []
        for _ in range(SETS):
            q = e4m3((batch, s_q, HEADS, 128), gen)
            order = torch.randint(pages, (batch, length // PAGE_SIZE), device="cuda", generator=gen).int()
            call: dict[str, Any] = {
                "q": q,
                "weights": torch.randn(batch, s_q, HEADS, device="cuda") / CODES / (HEADS * 128) ** 0.5,
                "k_cache": cache,
                "block_table": order,
                "cache_seqlens": torch.full((batch,), length, dtype=torch.int32, device="cuda"),
            }
            calls.append(_whole(call))
            index_decode(**call)
            prepared = next(reversed(decode_op._prepared.values()))
            rows = torch.empty(batch * s_q, length, device="cuda")
            lengths = torch.empty(batch * s_q, dtype=torch.int32, device="cuda")
            out = torch.empty(batch * s_q, 2048, dtype=torch.int32, device="cuda")
            scored.append(_score(prepared, call, rows, lengths))
            scored[-1]()
            chosen.append(_choose(prepared, call, rows, lengths, out))
        times = time_together(
            {"both": prepare(calls), "score": prepare(scored), "choose": prepare(chosen)}, sustained=False
        )
        bound = batch * length * 132 / BYTES_A_US
        found = ", ".join(f"{name} {timing.us:.1f} ({timing.us_back_to_back:.1f})" for name, timing in times.items())
        print(f"{batch} x {length} x {s_q}: keys {bound:.1f}, {found}", flush=True)


def e4m3(shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """Codes of normal numbers whose largest is about 448."""
    drawn = torch.randn(shape, device="cuda", generator=gen) * CODES
    return drawn.clamp(-448, 448).to(torch.float8_e4m3fn)


def _whole(call: dict[str, Any]) -> Callable[[], Any]:
    return lambda: index_decode(**call)


def _score(prepared: Any, call: dict[str, Any], rows: torch.Tensor, lengths: torch.Tensor) -> Callable[[], Any]:
    q, seqlens = call["q"].view(torch.uint8), call["cache_seqlens"].unsqueeze(1)
    tensors = q, call["weights"], call["k_cache"], call["block_table"], seqlens, rows, lengths
    return lambda: prepared.score(*tensors, prepared.ctas, 0, 0, 0)


def _choose(
    prepared: Any, call: dict[str, Any], rows: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
) -> Callable[[], Any]:
    return lambda: prepared.choose(rows, lengths, None, call["block_table"], out, *prepared.slots)


if __name__ == "__main__":
    main()
