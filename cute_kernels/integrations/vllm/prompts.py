"""Prompts that have earlier tokens in the cache, on vLLM's FlashAttention 3. Imports no vLLM.

It reads 16-bit caches directly. For INT8 and FP8 caches the pages that a prompt sees are copied as 16-bit numbers
first: 32,768 tokens of 8 heads of 128 are 200 MB of traffic, 0.05 ms, and 2,048 queries of 32 heads over them are 1.1
TFLOP, 2 ms. Copies have a size limit; larger contexts come in parts, which are merged by their log-sum-exps. Prompts of
few tokens are decoded instead, `MAX_QUERIES` of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from cute_kernels.gqa.gather_op import gather_pages
from cute_kernels.integrations.vllm.calls import COPY_BYTES, MAX_QUERIES, CacheViews, GqaCalls
from cute_kernels.merge.op import merge_states

FEW = 24
"""Most tokens of a prompt that is decoded: its keys are read once for each `MAX_QUERIES` tokens, as codes.

Microseconds with INT8 on an H200, decoded and by copies: 16 tokens over 32,752 take 95 and 107, 16 requests of 16 over
8,176 take 253 and 385; with 32 tokens 135 and 111, 492 and 393."""
SLACK = 128
"""Tokens by which lengths on the host may be too large: drafts that were rejected in unfinished steps."""
AHEAD = 8
"""Tokens by which lengths may be too small: a draft model has one more token than the batch that it is handed."""
STATES = 4
"""Results of a context's parts that are kept before they are merged."""


class Run(NamedTuple):
    """The keys of one call: some requests, and consecutive pages of each.

    requests  first and last (exclusive) of the step's prompts
    pages     first and last (exclusive) page of each request
    causal    False: earlier keys of a single request, all of which every query sees
    """

    requests: tuple[int, int]
    pages: tuple[tuple[int, int], ...]
    causal: bool


def plan(
    starts: Sequence[int], lengths: Sequence[int], page_size: int, window: int | None, limit: int, alone: bool = False
) -> list[list[Run]]:
    """Plans which pages are copied for which queries. Runs of one list have the same queries: their results are merged.

    Requests of up to `FEW` tokens are left out, unless each is `alone`.

    Args:
        starts: where tokens of each request begin, and where those of the last one end.
        lengths: keys of each request, its new tokens included; at most `SLACK` + `AHEAD` too many.
        page_size: tokens of a page.
        window: most tokens that a query sees; keys that no query of a request sees are left out.
        limit: pages of a call, unless the keys of one request that not all of its queries see are more.
        alone: whether no requests share a call.
    """
    found: list[list[Run]] = []
    for request, length in enumerate(lengths):
        count = starts[request + 1] - starts[request]
        if count <= (0 if alone else FEW):
            continue
        before = max(length - count - SLACK - AHEAD, 0)  # keys that all queries would see without a window
        first = 0 if window is None else max(before - window + 1, 0) // page_size
        last = max(-(-length // page_size), 1)
        one = (request, request + 1)
        tail = min(last - limit, before // page_size)
        if window is None and tail > 0:
            cuts = [*range(0, tail, limit), tail, last]
            found.append([Run(one, ((a, b),), b == last) for a, b in pairwise(cuts)])
            continue
        before_it = found[-1][0] if found and len(found[-1]) == 1 else None
        if before_it and before_it.requests[1] == request and not alone:
            pages = (*before_it.pages, (first, last))
            if sum(b - a for a, b in pages) <= limit:
                found[-1] = [Run((before_it.requests[0], request + 1), pages, True)]
                continue
        found.append([Run(one, ((first, last),), True)])
    return found


@dataclass(frozen=True)
class Part:
    """A run as arguments of FlashAttention.

    queries   slice of the step's prompt tokens
    pages     (n,) int32, pages of the cache
    table     (requests, pages of the longest) int32, places in `pages`
    starts    (requests + 1,) int32, where queries of each request begin
    lengths   (requests,) int32, keys of each request
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


@dataclass(frozen=True)
class Pieces:
    """Requests of few tokens as arguments of `gqa_decode`: `MAX_QUERIES` places for each piece of a request.

    rows      (places,) int64, the token of each place; places before a request's first token may repeat it
    lengths   (pieces,) int32, keys that the last place sees
    table     (pieces, pages) int32
    places    (tokens,) int64, places that are not repetitions
    tokens    (tokens,) int64, the tokens of these places
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor


@dataclass
class Prompts:
    """The requests of a step that do not decode, for the layers of one group of caches.

    starts         (requests + 1,) int32, where tokens of each request begin
    lengths        (requests,) int32, keys of each request, its new tokens included
    block_table    (requests, pages) int32
    starts_host    `starts` on the host
    lengths_host   `lengths` on the host; at most `SLACK` more, and `AHEAD` less
    alone          a request's calls, and so its bits, depend on that request alone
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    starts_host: list[int]
    lengths_host: list[int]
    alone: bool = False
    _parts: dict[tuple[int, int | None, int], list[list[Part]]] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """Query tokens of the longest request."""
        return _longest(self.starts_host)

    def lengths_at_most(self, page_size: int) -> list[int]:
        """Returns upper bounds of the keys of each request, on the host."""
        room = self.block_table.shape[1] * page_size
        return [min(length + AHEAD, room) for length in self.lengths_host]

    def parts(self, page_size: int, window: int | None, limit: int) -> list[list[Part]]:
        """Makes the parts of `plan`, once for all layers with the same pages and window."""
        key = page_size, window, limit
        if key not in self._parts:
            lengths = self.lengths_at_most(page_size)
            runs = plan(self.starts_host, lengths, page_size, window, limit, self.alone)
            self._parts[key] = [[self._part(run, page_size) for run in group] for group in runs]
        return self._parts[key]

    @cached_property
    def pieces(self) -> Pieces | None:
        """Makes the pieces of requests of few tokens, once for all layers; None without such requests."""
        rows: list[int] = []
        places: list[int] = []
        owners: list[int] = []  # request of each piece
        after: list[int] = []  # tokens of the request after the piece
        for request, (begin, end) in enumerate(pairwise(self.starts_host)):
            if self.alone or not 0 < end - begin <= FEW:
                continue
            for first in range(end - -(-(end - begin) // MAX_QUERIES) * MAX_QUERIES, end, MAX_QUERIES):
                places += [len(rows) + i for i in range(MAX_QUERIES) if first + i >= begin]
                rows += [max(first + i, begin) for i in range(MAX_QUERIES)]
                owners.append(request)
                after.append(end - first - MAX_QUERIES)
        if not rows:
            return None
        lists = (rows, places, owners, after)
        host = torch.tensor([n for numbers in lists for n in numbers], dtype=torch.int64, device="cpu")
        moved = host.to(self.lengths.device, non_blocking=True).split([len(numbers) for numbers in lists])
        lengths = self.lengths.index_select(0, moved[2]) - moved[3].int()
        table = self.block_table.index_select(0, moved[2])
        return Pieces(moved[0], lengths, table, moved[1], moved[0].index_select(0, moved[1]))

    def _part(self, run: Run, page_size: int) -> Part:
        device, (first, last) = self.lengths.device, run.requests
        pages = torch.cat([self.block_table[first + i, a:b] for i, (a, b) in enumerate(run.pages)])
        counts = [b - a for a, b in run.pages]
        rows = [
            [sum(counts[:i]) for i in range(len(counts))],
            [a * page_size for a, _ in run.pages],
            [count * page_size for count in counts],
        ]
        places, skipped, room = torch.tensor(rows, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        begins = self.starts_host[first : last + 1]
        return Part(
            queries=slice(begins[0], begins[-1]),
            pages=pages,
            table=places.unsqueeze(1) + torch.arange(max(counts), dtype=torch.int32, device=device),
            starts=self.starts[first : last + 1] - begins[0],
            # the host's lengths told which pages exist
            lengths=torch.minimum(self.lengths[first:last] - skipped, room),
            longest=_longest(begins),
            causal=run.causal,
        )


def _longest(starts: Sequence[int]) -> int:
    return max(end - begin for begin, end in pairwise(starts))


# ---- attention


def page_limit(calls: GqaCalls, page_size: int) -> int:
    """Returns how many pages of a layer's cache are copied at one time."""
    return max(calls.copied_tokens // page_size, 1)


def reserve(calls: GqaCalls, output: torch.Tensor) -> None:
    """Allocates and frees the memory of copies, so that vLLM's measurement of a step includes it.

    If a context may come in parts, it also allocates their results and the merge of two of them.
    """
    if not calls.copies_pages:
        return
    size = COPY_BYTES
    if calls.max_tokens > calls.copied_tokens:
        size += (STATES + 1) * output.numel() * output.element_size()
    torch.empty(size, dtype=torch.uint8, device=output.device)


def attend(calls: GqaCalls, query: torch.Tensor, views: CacheViews, prompts: Prompts, output: torch.Tensor) -> None:
    """Computes attention of any number of tokens of each request over the cache, which already has these tokens.

    Args:
        calls: a layer that has FlashAttention.
        query: (tokens, heads, d).
        views: views of the layer's cache.
        prompts: prompts of the step.
        output: (tokens, heads, d).
    """
    if not calls.quantized:
        calls.flash_attend(
            query, _usual_strides(views.k), _usual_strides(views.v), output, cu_seqlens_q=prompts.starts,
            max_seqlen_q=prompts.longest, seqused_k=prompts.lengths,
            max_seqlen_k=max(prompts.lengths_at_most(views.page_size)), block_table=prompts.block_table, causal=True,
        )  # fmt: skip
        return
    pieces = prompts.pieces
    if pieces is not None:
        rows = query.index_select(0, pieces.rows)
        found = torch.empty_like(rows)
        calls.decode(rows, views, pieces.lengths, pieces.table, found)
        output.index_copy_(0, pieces.tokens, found.index_select(0, pieces.places))
    k_codes, v_codes, k_scale, v_scale = views.tokens_first()
    k_codes, v_codes = _usual_strides(k_codes), _usual_strides(v_codes)

    def attend_part(part: Part, out: torch.Tensor, is_part: bool = False) -> torch.Tensor | None:
        k, v = gather_pages(k_codes, v_codes, k_scale, v_scale, part.pages, query.dtype)
        return calls.flash_attend(
            query[part.queries], k, v, out, is_part=is_part, cu_seqlens_q=part.starts, max_seqlen_q=part.longest,
            seqused_k=part.lengths, max_seqlen_k=part.table.shape[1] * views.page_size, block_table=part.table,
            causal=part.causal,
        )  # fmt: skip

    for parts in prompts.parts(views.page_size, calls.window, page_limit(calls, views.page_size)):
        own = output[parts[0].queries]
        if len(parts) == 1:
            attend_part(parts[0], own)
        else:
            _merge(parts, attend_part, own, calls.s_aux)


def _merge(
    parts: Sequence[Part], attend_part: Callable[[Part, torch.Tensor, bool], torch.Tensor | None],
    output: torch.Tensor, s_aux: torch.Tensor | None,
) -> None:  # fmt: skip
    """Computes attention over parts of a context. Of each `STATES` results the merged one is the first of the next."""
    outs = output.new_empty((STATES, *output.shape))
    lses = output.new_empty(outs.shape[:-1], dtype=torch.float32)
    kept = 0
    for part in parts:
        if kept == STATES:
            merged, merged_lse = merge_states(outs, lses)
            outs[0].copy_(merged)
            lses[0].copy_(merged_lse)
            kept = 1
        lse = attend_part(part, outs[kept], True)
        assert lse is not None
        lses[kept].copy_(lse)
        kept += 1
    merge_states(outs[:kept], lses[:kept], s_aux=s_aux, out=output)


def _usual_strides(t: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with usual strides in dimensions of size 1: kernels refuse a stride of 2 bytes."""
    if 1 not in t.shape[:-1]:
        return t
    strides = list(t.stride())
    for i in reversed(range(t.dim() - 1)):
        if t.shape[i] == 1:
            strides[i] = strides[i + 1] * t.shape[i + 1]
    return t.as_strided(t.shape, strides)
