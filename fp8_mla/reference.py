"""Decoding attention over a latent cache in plain torch.

It is the oracle of the kernels (float64 over the dequantized cache), and `mla_fp8_decode` runs it on a CPU. It is
simple rather than fast: it first lists the keys that a query sees, and reads only their bytes. It never masks by adding
to a score or multiplying one, so a NaN in any other slot cannot reach the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from fp8_mla.formats import TokenFormat, as_format, format_of_cache, format_of_extra_cache
from fp8_mla.layout import check_same_device, describe
from fp8_mla.packing import unpack
from fp8_mla.pages import gather, row_views
from fp8_mla.slots import check_index_tensor, slots_from_block_table, valid_slots

KEYS_PER_CHUNK: Final = 8192
"""Keys that are dequantized at a time: 38 MB as float64, plus 8 MB of scores at 128 heads, for any sequence length."""


class _Cache(NamedTuple):
    """A paged cache: its format, and a view for each row that a token has."""

    token_format: TokenFormat
    rows: tuple[torch.Tensor, ...]

    @property
    def num_pages(self) -> int:
        return self.rows[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.rows[0].shape[1]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


class _Keys(NamedTuple):
    """Keys in one cache that the queries of a work item share."""

    cache: _Cache
    slots: torch.Tensor
    """(n,) int64: slots of the keys, all valid."""
    counts: list[int]
    """For each query, the number of leading slots that it sees."""


class _WorkItem(NamedTuple):
    """Queries of one sequence that share lists of keys, one for each cache."""

    row: int
    queries: slice
    keys: list[_Keys]


class _Selection(NamedTuple):
    """The keys in one cache that a sparse call names."""

    cache: _Cache
    indices: torch.Tensor
    topk_length: torch.Tensor | None

    def seen(self) -> torch.Tensor:
        """Returns which indices count: bool, of their shape."""
        seen = valid_slots(self.indices, self.cache.num_slots)
        if self.topk_length is not None:
            length = self.topk_length if self.topk_length.ndim == 2 else self.topk_length.unsqueeze(1)
            places = torch.arange(self.indices.shape[2], dtype=torch.int64, device=self.indices.device)
            seen &= places < length.unsqueeze(-1)
        return seen


def _sparse_work(selections: list[_Selection]) -> Iterator[_WorkItem]:
    """Yields one item per query: each query has its own lists of keys."""
    batch, s_q, _ = selections[0].indices.shape
    seen = [selection.seen() for selection in selections]
    for row in range(batch):
        for query in range(s_q):
            keys = []
            for selection, counts in zip(selections, seen, strict=True):
                slots = selection.indices[row, query][counts[row, query]].long()
                keys.append(_Keys(selection.cache, slots, [len(slots)]))
            yield _WorkItem(row, slice(query, query + 1), keys)


def _dense_work(
    cache: _Cache, block_table: torch.Tensor, cache_seqlens: torch.Tensor, causal: bool, s_q: int
) -> Iterator[_WorkItem]:
    """Yields one item per sequence: query j sees a prefix of its keys."""
    page_size = cache.page_size
    capacity = block_table.shape[1] * page_size
    for row, length in enumerate(cache_seqlens.tolist()):
        seqlen = min(max(length, 0), capacity)  # before any subtraction: kernels use 32 bits
        table, known = block_table[row : row + 1], cache_seqlens[row : row + 1]
        slots = slots_from_block_table(table, known, page_size, num_pages=cache.num_pages, max_tokens=seqlen)[0]
        positions = torch.nonzero(slots >= 0).squeeze(1)
        limits = [seqlen - s_q + 1 + query if causal else seqlen for query in range(s_q)]
        counts = torch.searchsorted(positions, positions.new_tensor(limits)).tolist()
        yield _WorkItem(row, slice(0, s_q), [_Keys(cache, slots[positions], counts)])


def _attend(q: torch.Tensor, keys: list[_Keys], softmax_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes softmax attention of (queries, h_q, d_qk) to gathered keys, cache by cache and chunk by chunk.

    Returns out (queries, h_q, d_v) and lse (queries, h_q); 0 and -inf where a query has no key.
    """
    d_v = keys[0].cache.token_format.d_v
    row_max = q.new_full(q.shape[:-1], -torch.inf)
    row_sum = q.new_zeros(q.shape[:-1])
    acc = q.new_zeros((*q.shape[:-1], d_v))
    for cache, slots, counts in keys:
        for start in range(0, max(counts, default=0), KEYS_PER_CHUNK):
            tokens = gather(cache.rows, slots[start : start + KEYS_PER_CHUNK])
            # The product of code and scale is exact in float64; a float32 caller gets it rounded once.
            chunk = unpack(tokens, torch.float64, token_format=cache.token_format).to(q.dtype)
            for query, count in enumerate(counts):
                if count <= start:
                    continue
                seen = chunk[: count - start]
                scores = (q[query] @ seen.T) * softmax_scale
                new_max = torch.maximum(row_max[query], scores.amax(dim=-1))
                # A row whose scores are all -inf is shifted by 0, since -inf minus -inf is NaN; its sum is then 0.
                shift = torch.where(new_max == -torch.inf, 0.0, new_max)
                weights = torch.exp(scores - shift.unsqueeze(-1))
                decay = torch.exp(row_max[query] - shift)
                row_sum[query] = row_sum[query] * decay + weights.sum(dim=-1)
                acc[query] = acc[query] * decay.unsqueeze(-1) + weights @ seen[:, :d_v]
                row_max[query] = new_max
    empty = row_sum == 0
    out = torch.where(empty.unsqueeze(-1), 0.0, acc / row_sum.unsqueeze(-1))
    return out, torch.where(empty, -torch.inf, row_max + torch.log(row_sum))


def _apply_sink(out: torch.Tensor, lse: torch.Tensor, s_aux: torch.Tensor) -> torch.Tensor:
    """Adds the sink to the denominator: multiplies by exp(lse) / (exp(lse) + exp(s_aux)). Rows without keys stay 0."""
    factor = torch.sigmoid(lse - s_aux.to(lse.dtype))
    return torch.where((lse == -torch.inf).unsqueeze(-1), out, out * factor.unsqueeze(-1))


def _check_query(q: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype not in (torch.float64, torch.float32):
        raise TypeError(f"dtype: got {dtype}; needs torch.float64 or torch.float32")
    if not isinstance(q, torch.Tensor) or q.is_nested or not q.dtype.is_floating_point:
        raise TypeError(f"q: got {describe(q)}; needs a floating-point tensor")
    if q.ndim != 4 or 0 in q.shape[1:]:
        raise ValueError(f"q: got {describe(q)}; needs (batch, s_q, h_q, d_qk) with s_q >= 1 and h_q >= 1")


def _first_cache(
    q: torch.Tensor, kv_cache: torch.Tensor, cache_format: TokenFormat | str | None, cache_layout: str | None
) -> _Cache:
    if cache_format is not None:
        token_format = as_format(cache_format, "cache_format")
    else:
        token_format = format_of_cache(_last_dimension("kv_cache", kv_cache), q.shape[-1])
    if q.shape[-1] != token_format.d_qk:
        needs = f"(batch, s_q, h_q, {token_format.d_qk}) for {token_format.name}"
        raise ValueError(f"q: got {describe(q)}; needs {needs}")
    rows = row_views(kv_cache, token_format, cache_layout)
    check_same_device("kv_cache", kv_cache, q.device)
    return _Cache(token_format, rows)


def _extra_cache(
    q: torch.Tensor, first: _Cache, extra_kv_cache: torch.Tensor, extra_format: str | None, cache_layout: str | None
) -> _Cache:
    num_bytes = _last_dimension("extra_kv_cache", extra_kv_cache)
    token_format = format_of_extra_cache(first.token_format, num_bytes, extra_format)
    rows = row_views(extra_kv_cache, token_format, cache_layout, name="extra_kv_cache")
    check_same_device("extra_kv_cache", extra_kv_cache, q.device)
    return _Cache(token_format, rows)


def _last_dimension(name: str, cache: torch.Tensor) -> int:
    if not isinstance(cache, torch.Tensor) or cache.is_nested or cache.ndim == 0:
        raise TypeError(f"{name}: got {describe(cache)}; needs a tensor (num_pages, page_size, bytes)")
    return cache.shape[-1]


def _selection(
    q: torch.Tensor, cache: _Cache, indices: torch.Tensor, topk_length: torch.Tensor | None, *, extra: str = ""
) -> _Selection:
    """Checks the indices into one cache; `extra` begins their arguments' names."""
    batch, s_q = q.shape[:2]
    check_same_device(f"{extra}indices", indices, q.device)
    check_same_device(f"{extra}topk_length", topk_length, q.device)
    check_index_tensor(f"{extra}indices", indices, (batch, s_q, None))
    if topk_length is not None:
        per_query = isinstance(topk_length, torch.Tensor) and topk_length.ndim == 2
        check_index_tensor(f"{extra}topk_length", topk_length, (batch, s_q) if per_query else (batch,))
    return _Selection(cache, indices, topk_length)


def _list_work(
    q: torch.Tensor,
    cache: _Cache,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    causal: bool,
    extra: _Selection | None,
) -> Iterator[_WorkItem]:
    """Checks that keys are given either by indices or by a block table, and lists them."""
    batch, s_q = q.shape[:2]
    named = {
        "indices": indices,
        "topk_length": topk_length,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
    }
    given = [name for name, tensor in named.items() if tensor is not None]
    if indices is not None and block_table is None and cache_seqlens is None:
        first = _selection(q, cache, indices, topk_length)
        return _sparse_work([first] if extra is None else [first, extra])
    if block_table is not None and cache_seqlens is not None and indices is None and topk_length is None:
        if extra is not None:
            raise ValueError("extra_kv_cache: got a second cache and a block_table; needs indices into both caches")
        for name in given:
            check_same_device(name, named[name], q.device)
        check_index_tensor("block_table", block_table, (batch, None))
        check_index_tensor("cache_seqlens", cache_seqlens, (batch,))
        return _dense_work(cache, block_table, cache_seqlens, causal, s_q)
    needs = "indices (with or without topk_length), or else block_table and cache_seqlens"
    raise ValueError(f"{', '.join(named)}: got {' and '.join(given) or 'none of them'}; needs {needs}")


def _check_sink(q: torch.Tensor, s_aux: torch.Tensor | None) -> None:
    if s_aux is None:
        return
    if not isinstance(s_aux, torch.Tensor) or s_aux.is_nested or not s_aux.dtype.is_floating_point:
        raise TypeError(f"s_aux: got {describe(s_aux)}; needs a floating-point tensor")
    if s_aux.shape != (q.shape[2],):
        raise ValueError(f"s_aux: got {describe(s_aux)}; needs shape ({q.shape[2]},), one logit a query head")
    check_same_device("s_aux", s_aux, q.device)


@torch.no_grad()
def reference_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    s_aux: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    cache_format: TokenFormat | str | None = None,
    cache_layout: str | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_cache_format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of a few queries over one paged latent cache, sparse or dense, or over two, sparse.

    Sparse: `indices` names the keys of each query. Dense: `block_table` and `cache_seqlens` name the keys of each
    sequence. Keys that do not exist are skipped and their bytes never matter: an index that is negative or not below
    ``num_pages * page_size``, one at or past `topk_length`, a position at or past `cache_seqlens` or the block table's
    capacity, a table entry outside the cache. A NaN in a key that exists makes the output of queries that see it NaN.
    With a second cache, `extra_kv_cache`, one softmax goes over the keys that a query has in both.

    Memory beyond inputs and outputs: the slots and queries of one sequence, and `KEYS_PER_CHUNK` dequantized keys.

    Args:
        q: (batch, s_q, h_q, d_qk), any floating-point dtype, h_q >= 1, s_q >= 1. d_qk is 576 for "v3.2", else 512.
        kv_cache: (num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes), uint8 or float8_e4m3fn.
        indices: (batch, s_q, topk) int32 or int64: slots, ``page * page_size + offset``. A slot named twice counts
            twice.
        topk_length: (batch,) or (batch, s_q) int32 or int64: only that many leading indices count.
        block_table: (batch, max_pages) int32 or int64.
        cache_seqlens: (batch,) int32 or int64, tokens. Below 0 counts as 0, beyond the block table as all of it.
        causal: dense only: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys. False: all see all.
        softmax_scale: default d_qk ** -0.5.
        s_aux: (h_q,) floating point: a logit per head, natural log and not scaled, that joins the denominator alone.
            -inf is no sink, +inf makes the output 0.
        dtype: torch.float64 or torch.float32, of the computation and the results.
        cache_format: a key of `fp8_mla.FORMATS`, or a format. None: what the bytes of a token and d_qk say; for 528
            bytes they say too little.
        cache_layout: "planar" or "interleaved", for both caches, if their formats have both. None: planar.
        extra_kv_cache: a second cache, as `kv_cache`, with a page size of its own. The formats are one of
            `fp8_mla.formats.PAIRS`.
        extra_indices: (batch, s_q, extra_topk), as `indices`: slots of the second cache.
        extra_topk_length: as `topk_length`.
        extra_cache_format: as `cache_format`. None: the format that pairs with the first and has this many bytes.

    Returns:
        out (batch, s_q, h_q, 512) and lse (batch, s_q, h_q), both in `dtype`. The lse is in natural log and without the
        sink. A query that sees no key has out 0 and lse -inf.

    Raises:
        TypeError: an argument is not a tensor of a dtype named above.
        ValueError: a shape or a format does not fit, tensors are on different devices, neither or both of the sparse
            and the dense arguments are given, or some but not all of a second cache.
    """
    _check_query(q, dtype)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {causal!r}; needs a bool, such as bool(causal)")
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: got {softmax_scale}; needs a finite number")
    cache = _first_cache(q, kv_cache, cache_format, cache_layout)
    extra = None
    if extra_kv_cache is not None:
        second = _extra_cache(q, cache, extra_kv_cache, extra_cache_format, cache_layout)
        if extra_indices is None:
            raise ValueError("extra_indices: got None; needs (batch, s_q, extra_topk) with extra_kv_cache")
        extra = _selection(q, second, extra_indices, extra_topk_length, extra="extra_")
    elif extra_indices is not None or extra_topk_length is not None or extra_cache_format is not None:
        raise ValueError("extra_kv_cache: got None with other arguments of a second cache; needs that cache")
    work = _list_work(q, cache, indices, topk_length, block_table, cache_seqlens, causal, extra)
    _check_sink(q, s_aux)

    token_format = cache.token_format
    scale = token_format.d_qk**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty((*q.shape[:-1], token_format.d_v), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for row, queries, keys in work:
        some = q[row, queries].to(dtype)
        out[row, queries], lse[row, queries] = _attend(some, keys, scale)
    if s_aux is not None:
        out = _apply_sink(out, lse, s_aux)
    return out, lse
