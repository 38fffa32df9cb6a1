"""Two ranks that share the keys of requests as vLLM's ranks do, and the errors of what each attends to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from cute_kernels.integrations.vllm import context_parallel
from cute_kernels.integrations.vllm.calls import GqaCalls
from cute_kernels.integrations.vllm.context_parallel import Ranks
from tests.kit.vllm_batches import HEADS, LIMITS, Batch, draw_batch, empty_cache

WORLD: Final = 2
PAGE: Final = 16
BATCHES: Final = {
    "decode": ([40, 17, 1, 2, 100], [1, 1, 1, 1, 1]),
    "prompts": ([40, 33, 25, 9], [20, 1, 25, 8]),
}
"""Lengths and query tokens of requests. Only one rank has a request with one token; a prompt may have no context."""


def one_head(batch: Batch) -> Batch:
    """Makes both KV heads equal: ranks that share keys have one KV head each, and query heads of their own."""
    return dataclasses.replace(
        batch, keys=batch.keys[:, :1].repeat(1, 2, 1), values=batch.values[:, :1].repeat(1, 2, 1)
    )


def gathered(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensors of all ranks, as vLLM's groups gather them."""
    parts = [torch.empty_like(t) for _ in range(WORLD)]
    dist.all_gather(parts, t)
    return torch.cat(parts, dim=dim)


def local_slots(batch: Batch, ranks: Ranks) -> torch.Tensor:
    """(all tokens,) int64: where this rank keeps them; -1 for those of others."""
    slots = []
    for row, length in zip(batch.block_table.long(), batch.seq_lens.tolist(), strict=True):
        position = torch.arange(length, dtype=torch.int64, device="cpu")
        turn, place = position // ranks.interleave, position % ranks.interleave
        local = turn // ranks.size * ranks.interleave + place
        own = turn % ranks.size == ranks.rank
        slots.append(torch.where(own, row[local // PAGE] * PAGE + local % PAGE, -1))
    return torch.cat(slots)


def attended(ranks: Ranks, batch: Batch, cache_dtype: str, s_aux: torch.Tensor | None, decodes: bool) -> torch.Tensor:
    """The output of this rank's heads, (query tokens, HEADS / WORLD, d)."""
    own = slice(ranks.rank * HEADS // WORLD, (ranks.rank + 1) * HEADS // WORLD)
    layer = GqaCalls(HEADS // WORLD, 1, 64, 0.125, cache_dtype, s_aux=None if s_aux is None else s_aux[own])
    assert context_parallel.refusal(layer) is None
    kv_cache = empty_cache(batch.pages, PAGE, cache_dtype, kv_heads=1)
    keys, values, slots = batch.keys[:, :1], batch.values[:, :1], local_slots(batch, ranks)
    views = layer.views(kv_cache, *batch.scales)
    append = layer.append_plain if layer.kind is None else layer.append_scaled
    append(keys, values, views, slots)
    query, out = batch.query[:, own], torch.full_like(batch.query[:, own], torch.nan)
    if decodes:
        lengths = ranks.lengths(batch.seq_lens)
        context_parallel.decode(layer, ranks, query, views, lengths, batch.block_table, out)
        return out
    new = torch.isin(batch.all_slots, batch.slots)
    context_parallel.prefill(
        layer, ranks, query, keys[new], values[new], views, batch.starts, batch.starts.tolist(), batch.seq_lens,
        batch.block_table, out,
    )  # fmt: skip
    return out


def errors(rank: int) -> Iterator[tuple[str, float]]:
    """By case, how many times as large as it may be the error is."""
    cases: Any = itertools.product(BATCHES, LIMITS, (1, 4), (False, True))
    for kind, cache_dtype, interleave, sinks in cases:
        ranks = Ranks(WORLD, rank, interleave, gathered, dist.group.WORLD)
        batch = one_head(draw_batch(*BATCHES[kind], PAGE))
        s_aux = torch.linspace(-1, 3, HEADS, dtype=torch.float32, device="cpu") if sinks else None
        out = gathered(attended(ranks, batch, cache_dtype, s_aux, kind == "decode"), dim=1)
        error = batch.error(out, None, s_aux)
        yield f"{kind}, {cache_dtype}, interleave {interleave}, sinks {sinks}", error / LIMITS[cache_dtype]
