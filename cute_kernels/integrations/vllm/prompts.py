"""Prompts that have earlier tokens in the cache, on vLLM's FlashAttention 3. Imports no vLLM.

It reads 16-bit caches as they are. Of INT8 and FP8 caches the pages that a prompt sees are copied as 16-bit numbers
first, which costs little beside attention: 32,768 tokens of 8 heads of 128 are 270 MB of traffic, some 0.1 ms, and
2,048 queries of 32 heads over them 1.1 TFLOP, 2 ms. Copies have a limit; what does not fit comes in parts, and those of
one request are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from cute_kernels.merge.op import merge_states

if TYPE_CHECKING:
    from cute_kernels.integrations.vllm.calls import CacheViews, GqaCalls

COPY_BYTES = 256 << 20
"""Of the keys and values that are there as 16-bit numbers at one time: 65,536 tokens of 8 heads of 128."""
SLACK = 128
"""Tokens by which lengths on the host may be too large: drafts that were rejected in the steps under way."""


class Run(NamedTuple):
    """What one call attends to: some requests, and consecutive pages of each.

    requests  first and last of the step's prompts; the last one is not in it, as in a slice
    pages     first and last page of each request, likewise
    causal    False: earlier keys of a single request, all of which every query sees
    """

    requests: tuple[int, int]
    pages: tuple[tuple[int, int], ...]
    causal: bool


def plan(
    starts: Sequence[int], lengths: Sequence[int], page_size: int, window: int | None, limit: int
) -> list[list[Run]]:
    """Which pages are copied for which queries. Runs of one list have the same queries: their results are merged.

    Args:
        starts: where tokens of each request begin, and where the last one's end.
        lengths: keys of each request, its new tokens included; at most `SLACK` too many.
        page_size: tokens of a page.
        window: tokens that a query sees; what no query of a request sees is left out.
        limit: pages of a call, unless the keys of one request that not all of its queries see are more.
    """
    found: list[list[Run]] = []
    for request, length in enumerate(lengths):
        count = starts[request + 1] - starts[request]
        if not count:
            continue
        before = max(length - count - SLACK, 0)  # keys that all queries see, were there no window
        first = 0 if window is None else max(before - window + 1, 0) // page_size
        last = -(-length // page_size)
        one = (request, request + 1)
        tail = min(last - limit, before // page_size)
        if window is None and tail > 0:
            cuts = [*range(0, tail, limit), tail, last]
            found.append([Run(one, ((a, b),), b == last) for a, b in pairwise(cuts)])
            continue
        before_it = found[-1][0] if found and len(found[-1]) == 1 else None
        if before_it and before_it.requests[1] == request:
            pages = (*before_it.pages, (first, last))
            if sum(b - a for a, b in pages) <= limit:
                found[-1] = [Run((before_it.requests[0], request + 1), pages, True)]
                continue
        found.append([Run(one, ((first, last),), True)])
    return found


@dataclass(frozen=True)
class Part:
    """A run as a call of FlashAttention takes it.

    queries   tokens of the step's prompts
    pages     (n,) int32, of the cache
    table     (requests, pages of the longest) int32, places in `pages`
    starts    (requests + 1,) int32, where queries of each request begin
    lengths   (requests,) int32, keys of each
    longest   query tokens of a request
    causal    as in `Run`
    """

    queries: slice
    pages: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int
    causal: bool


@dataclass
class Prompts:
    """The requests of a step that do not decode, for the layers of one group of caches.

    starts         (requests + 1,) int32, where their tokens begin
    lengths        (requests,) int32, keys of each, its new tokens included
    block_table    (requests, pages) int32
    starts_host    the same on the host
    lengths_host   likewise; at most `SLACK` more than `lengths`
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    starts_host: list[int]
    lengths_host: list[int]
    _parts: dict[tuple[int, int | None, int], list[list[Part]]] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Query tokens of a request."""
        return max(b - a for a, b in pairwise(self.starts_host))

    def parts(self, page_size: int, window: int | None, limit: int) -> list[list[Part]]:
        """What `plan` says, made once for all layers with the same pages and window."""
        key = page_size, window, limit
        if key not in self._parts:
            runs = plan(self.starts_host, self.lengths_host, page_size, window, limit)
            self._parts[key] = [[self._part(run, page_size) for run in group] for group in runs]
        return self._parts[key]

    def _part(self, run: Run, page_size: int) -> Part:
        device, (first, last) = self.lengths.device, run.requests
        pages = torch.cat([self.block_table[first + i, a:b] for i, (a, b) in enumerate(run.pages)])
        counts = [b - a for a, b in run.pages]
        rows = [[sum(counts[:i]) for i in range(len(counts))], [a * page_size for a, _ in run.pages]]
        places, skipped = torch.tensor(rows, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        lengths = self.lengths[first:last] - skipped
        begins = self.starts_host[first : last + 1]
        return Part(
            queries=slice(begins[0], begins[-1]),
            pages=pages,
            table=places.unsqueeze(1) + torch.arange(max(counts), dtype=torch.int32, device=device),
            starts=self.starts[first : last + 1] - begins[0],
            lengths=lengths if run.causal else lengths.clamp(max=counts[0] * page_size),
            longest=max(b - a for a, b in pairwise(begins)),
            causal=run.causal,
        )


# ---- attention


def page_limit(calls: GqaCalls, page_size: int) -> int:
    """Pages of a layer's cache that are copied at one time."""
    return max(COPY_BYTES // (2 * 2 * calls.kv_heads * calls.head_dim * page_size), 1)


def reserve(calls: GqaCalls, output: torch.Tensor) -> None:
    """Asks for the memory of copies and lets go of it: where vLLM measures what a step takes.

    Beside the numbers of keys or values there are their codes, at half of the size. Where a context may come in parts,
    their merge is compiled now, not in the middle of serving.
    """
    if calls.flash is None or not calls.quantized:
        return
    torch.empty(COPY_BYTES + COPY_BYTES // 4, dtype=torch.uint8, device=output.device)
    if calls.max_tokens > page_limit(calls, 1):
        for tokens in {1, output.shape[0]}:
            outs = output.new_zeros((2, tokens, calls.heads, calls.head_dim))
            merge_states(outs, outs.new_zeros(outs.shape[:-1], dtype=torch.float32), s_aux=calls.s_aux)


def attend(
    calls: GqaCalls, query: torch.Tensor, kv_cache: torch.Tensor, prompts: Prompts, k_scale: torch.Tensor,
    v_scale: torch.Tensor, output: torch.Tensor,
) -> None:  # fmt: skip
    """Attention of any number of tokens of each request over the cache, in which they are already.

    Args:
        calls: a layer that has FlashAttention.
        query: (tokens, heads, d).
        kv_cache: as vLLM hands it to the layer.
        prompts: of the step.
        k_scale: of an FP8 cache: one factor.
        v_scale: likewise.
        output: (tokens, heads, d).
    """
    views = calls.views(kv_cache)
    if not calls.quantized:
        calls.flash_attend(
            query, _usual_strides(views.k), _usual_strides(views.v), output, cu_seqlens_q=prompts.starts,
            max_seqlen_q=prompts.longest, seqused_k=prompts.lengths, max_seqlen_k=max(prompts.lengths_host),
            block_table=prompts.block_table, causal=True,
        )  # fmt: skip
        return
    for parts in prompts.parts(views.page_size, calls.window, page_limit(calls, views.page_size)):
        rows = parts[0].queries
        merged = len(parts) > 1
        results = []
        for part in parts:
            k, v = copied(views, part.pages, query.dtype, k_scale, v_scale)
            result = calls.flash_attend(
                query[rows], k, v, None if merged else output[rows], cu_seqlens_q=part.starts,
                max_seqlen_q=part.longest, seqused_k=part.lengths, max_seqlen_k=part.table.shape[1] * views.page_size,
                block_table=part.table, causal=part.causal,
            )  # fmt: skip
            results += [result] if result else []
        if merged:
            outs, lses = (torch.stack(tensors) for tensors in zip(*results, strict=True))
            merge_states(outs, lses, s_aux=calls.s_aux, out=output[rows])


def copied(
    views: CacheViews, pages: torch.Tensor, dtype: torch.dtype, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some pages, (pages, tokens, kv_heads, d) of `dtype`.

    Args:
        views: of a quantized cache.
        pages: (n,) int32.
        dtype: bfloat16 or float16.
        k_scale: of an FP8 cache: one factor.
        v_scale: likewise.
    """
    found = []
    for codes, scale, factor in ((views.k, views.k_scale, k_scale), (views.v, views.v_scale, v_scale)):
        # eight bytes at a time: torch copies elements
        rows = codes.view(torch.int64).index_select(0, pages).view(codes.dtype)
        if scale is None:
            copies = rows.to(dtype).mul_(factor)
        else:
            copies = torch.empty(rows.shape, dtype=dtype, device=rows.device)
            torch.mul(rows, scale.index_select(0, pages).unsqueeze(-1), out=copies)
        found.append(copies if views.layout == "paged_NHD" else copies.transpose(1, 2))
    return found[0], found[1]


def _usual_strides(t: torch.Tensor) -> torch.Tensor:
    """The same tensor; a dimension of size 1 gets a stride as if it had more: TMA refuses one of 2 bytes."""
    if 1 not in t.shape[:-1]:
        return t
    strides = list(t.stride())
    for i in reversed(range(t.dim() - 1)):
        if t.shape[i] == 1:
            strides[i] = strides[i + 1] * t.shape[i + 1]
    return t.as_strided(t.shape, strides)
