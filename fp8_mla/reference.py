"""Decoding attention over a latent cache in plain torch.

It is the oracle of the kernels (float64 over the dequantized cache), and what `mla_fp8_decode` runs on a CPU. It is
simple rather than fast: it first lists the keys that a query sees, and reads only their bytes. It never masks by adding
to a score or multiplying one, so a NaN in any other slot cannot reach the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from fp8_mla.formats import V3_2, TokenFormat
from fp8_mla.layout import as_pages, check_same_device, describe
from fp8_mla.packing import unpack
from fp8_mla.slots import check_index_tensor, slots_from_block_table, valid_slots

KEYS_PER_CHUNK: Final = 8192
"""Keys dequantized at a time: 38 MB as float64, plus 8 MB of scores at 128 heads, however long the sequence is."""


class _WorkItem(NamedTuple):
    """Queries of one sequence that share a list of keys."""

    row: int
    queries: slice
    slots: torch.Tensor
    """(n,) int64: slots of the keys, all valid."""
    counts: list[int]
    """For each query, how many of the leading slots it sees."""


def _sparse_work(indices: torch.Tensor, topk_length: torch.Tensor | None, num_slots: int) -> Iterator[_WorkItem]:
    """One item per query: each query has its own list of keys."""
    batch, s_q, topk = indices.shape
    seen = valid_slots(indices, num_slots)
    if topk_length is not None:
        length = topk_length if topk_length.ndim == 2 else topk_length.unsqueeze(1)
        seen &= torch.arange(topk, dtype=torch.int64, device=indices.device) < length.unsqueeze(-1)
    for row in range(batch):
        for query in range(s_q):
            slots = indices[row, query][seen[row, query]].long()
            yield _WorkItem(row, slice(query, query + 1), slots, [len(slots)])


def _dense_work(
    block_table: torch.Tensor, cache_seqlens: torch.Tensor, causal: bool, s_q: int, page_size: int, num_pages: int
) -> Iterator[_WorkItem]:
    """One item per sequence: query j sees a prefix of its keys."""
    capacity = block_table.shape[1] * page_size
    for row, length in enumerate(cache_seqlens.tolist()):
        seqlen = min(max(length, 0), capacity)  # before any subtraction: kernels have 32 bits
        table, known = block_table[row : row + 1], cache_seqlens[row : row + 1]
        slots = slots_from_block_table(table, known, page_size, num_pages=num_pages, max_tokens=seqlen)[0]
        positions = torch.nonzero(slots >= 0).squeeze(1)
        limits = [seqlen - s_q + 1 + query if causal else seqlen for query in range(s_q)]
        counts = torch.searchsorted(positions, positions.new_tensor(limits)).tolist()
        yield _WorkItem(row, slice(0, s_q), slots[positions], counts)


def _attend(
    q: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    counts: list[int],
    softmax_scale: float,
    token_format: TokenFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of (queries, h_q, 576) over gathered keys, chunk by chunk.

    Returns out (queries, h_q, 512) and lse (queries, h_q); 0 and -inf where a query has no key.
    """
    page_size, d_v = pages.shape[1], token_format.d_v
    row_max = q.new_full(q.shape[:-1], -torch.inf)
    row_sum = q.new_zeros(q.shape[:-1])
    acc = q.new_zeros((*q.shape[:-1], d_v))
    for start in range(0, max(counts, default=0), KEYS_PER_CHUNK):
        chunk = slots[start : start + KEYS_PER_CHUNK]
        # The product of code and scale is exact in float64; a float32 caller gets it rounded once.
        keys = unpack(pages[chunk // page_size, chunk % page_size], torch.float64, token_format=token_format)
        keys = keys.to(q.dtype)
        for query, count in enumerate(counts):
            if count <= start:
                continue
            seen = keys[: count - start]
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
    """Add the sink to the denominator: multiply by exp(lse) / (exp(lse) + exp(s_aux)). Rows without keys stay 0."""
    factor = torch.sigmoid(lse - s_aux.to(lse.dtype))
    return torch.where((lse == -torch.inf).unsqueeze(-1), out, out * factor.unsqueeze(-1))


def _check_query(q: torch.Tensor, dtype: torch.dtype, d_qk: int) -> None:
    if dtype not in (torch.float64, torch.float32):
        raise TypeError(f"dtype: got {dtype}; needs torch.float64 or torch.float32")
    if not isinstance(q, torch.Tensor) or not q.dtype.is_floating_point:
        raise TypeError(f"q: got {describe(q)}; needs a floating-point tensor")
    if q.ndim != 4 or q.shape[-1] != d_qk or 0 in q.shape[1:]:
        raise ValueError(f"q: got {describe(q)}; needs (batch, s_q, h_q, {d_qk}) with s_q >= 1 and h_q >= 1")


def _list_work(
    q: torch.Tensor,
    pages: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    causal: bool,
) -> Iterator[_WorkItem]:
    """Check that keys are given either by indices or by a block table, and list them."""
    batch, s_q = q.shape[:2]
    num_pages, page_size, _ = pages.shape
    named = {
        "indices": indices,
        "topk_length": topk_length,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
    }
    given = [name for name, tensor in named.items() if tensor is not None]
    for name in given:
        check_same_device(name, named[name], q.device)
    if indices is not None and block_table is None and cache_seqlens is None:
        check_index_tensor("indices", indices, (batch, s_q, None))
        if topk_length is not None:
            per_query = isinstance(topk_length, torch.Tensor) and topk_length.ndim == 2
            check_index_tensor("topk_length", topk_length, (batch, s_q) if per_query else (batch,))
        return _sparse_work(indices, topk_length, num_pages * page_size)
    if block_table is not None and cache_seqlens is not None and indices is None and topk_length is None:
        check_index_tensor("block_table", block_table, (batch, None))
        check_index_tensor("cache_seqlens", cache_seqlens, (batch,))
        return _dense_work(block_table, cache_seqlens, causal, s_q, page_size, num_pages)
    needs = "indices (with or without topk_length), or else block_table and cache_seqlens"
    raise ValueError(f"{', '.join(named)}: got {' and '.join(given) or 'none of them'}; needs {needs}")


def _check_sink(q: torch.Tensor, s_aux: torch.Tensor | None) -> None:
    if s_aux is None:
        return
    if not isinstance(s_aux, torch.Tensor) or not s_aux.dtype.is_floating_point:
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
    token_format: TokenFormat = V3_2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries over a paged cache of 656-byte tokens, sparse or dense.

    Sparse: `indices` names the keys of each query. Dense: `block_table` and `cache_seqlens` name the keys of each
    sequence. Keys that do not exist are skipped and their bytes never matter: an index that is negative or not below
    ``num_pages * page_size``, one at or past `topk_length`, a position at or past `cache_seqlens` or the block table's
    capacity, a table entry outside the cache. A NaN in a key that exists makes the output of queries that see it NaN.

    Memory beyond inputs and outputs: the slots and queries of one sequence, and `KEYS_PER_CHUNK` dequantized keys.

    Args:
        q: (batch, s_q, h_q, 576), any floating-point dtype, h_q >= 1, s_q >= 1.
        kv_cache: (num_pages, page_size, 656) or (num_pages, page_size, 1, 656), uint8 or float8_e4m3fn.
        indices: (batch, s_q, topk) int32 or int64: slots, ``page * page_size + offset``. A slot named twice counts
            twice.
        topk_length: (batch,) or (batch, s_q) int32 or int64: only that many leading indices count.
        block_table: (batch, max_pages) int32 or int64.
        cache_seqlens: (batch,) int32 or int64, tokens. Below 0 counts as 0, beyond the block table as all of it.
        causal: dense only: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys. False: all see all.
        softmax_scale: default 576 ** -0.5.
        s_aux: (h_q,) floating point: a logit per head, natural log and not scaled, that joins the denominator alone.
            -inf is no sink, +inf makes the output 0.
        dtype: torch.float64 or torch.float32, of the computation and the results.
        token_format: of the cache; one row a token. Numbers here are those of the default.

    Returns:
        out (batch, s_q, h_q, 512) and lse (batch, s_q, h_q), both in `dtype`. The lse is in natural log and without the
        sink. A query that sees no key has out 0 and lse -inf.

    Raises:
        TypeError: an argument is not a tensor of a dtype named above.
        ValueError: a shape does not fit, tensors are on different devices, or neither or both of the sparse and the
            dense arguments are given.
    """
    _check_query(q, dtype, token_format.d_qk)
    pages = as_pages(kv_cache, token_format=token_format)
    check_same_device("kv_cache", kv_cache, q.device)
    work = _list_work(q, pages, indices, topk_length, block_table, cache_seqlens, causal)
    _check_sink(q, s_aux)

    scale = token_format.d_qk**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty((*q.shape[:-1], token_format.d_v), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for row, queries, slots, counts in work:
        some = q[row, queries].to(dtype)
        out[row, queries], lse[row, queries] = _attend(some, pages, slots, counts, scale, token_format)
    if s_aux is not None:
        out = _apply_sink(out, lse, s_aux)
    return out, lse
