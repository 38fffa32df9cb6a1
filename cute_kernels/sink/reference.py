"""Attention with sinks and its gradients in plain torch: the definition of what the kernels compute.

It is the kernels' oracle, in float64, and `sink_attention` runs it on a CPU. The gradients are written out, so that
they can be read beside a backward kernel; a test compares them with numerical differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from einops import rearrange

ELEMENTS_PER_CHUNK: Final = 1 << 23
"""Scores held at a time: 67 MB as float64, and a backward has four such tensors."""


class _Sequences(NamedTuple):
    """Sequences of one length: a contiguous batch, or one sequence of a packed one. Results are written into the views.

    queries   tensors with a row for each query: (batch, s_q, heads[, d]) each
    keys      tensors with a row for each key: (batch, s_k, h_kv, d) each
    """

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]


def _sequences(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> Iterator[_Sequences]:
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing}: got None; needs a tensor, as the other one is")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        yield _Sequences(queries, keys)
        return
    borders = (pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()))
    for (q_begin, q_end), (k_begin, k_end) in zip(*borders, strict=True):
        yield _Sequences([t[None, q_begin:q_end] for t in queries], [t[None, k_begin:k_end] for t in keys])


class _Block(NamedTuple):
    """Queries of a sequence, and the keys that at least one of them sees."""

    queries: slice
    keys: slice
    seen: torch.Tensor  # (queries, keys) bool


def _blocks(sequences: _Sequences, causal: bool, window: int | None) -> Iterator[_Block]:
    """Yields blocks of queries. Query j is at position s_k - s_q + j: the last query sees the last key.

    A query sees one interval of keys. If a number is not finite, queries come one at a time with only their interval:
    masking would multiply hidden keys by 0, and 0 x NaN is NaN.
    """
    batch, s_q, heads = sequences.queries[0].shape[:3]
    s_k = sequences.keys[0].shape[1]
    offset = s_k - s_q
    step = max(1, ELEMENTS_PER_CHUNK // max(1, batch * heads * s_k))
    if not all(bool(t.isfinite().all()) for t in (*sequences.queries, *sequences.keys)):
        step = 1
    device = sequences.queries[0].device
    for start in range(0, s_q, step):
        stop = min(start + step, s_q)
        begin = 0 if window is None else max(offset + start - window + 1, 0)
        end = min(offset + stop, s_k) if causal else s_k
        if begin >= end:
            continue
        query = torch.arange(offset + start, offset + stop, dtype=torch.int64, device=device).unsqueeze(1)
        key = torch.arange(begin, end, dtype=torch.int64, device=device)
        seen = key <= query if causal else torch.ones_like(key <= query)
        if window is not None:
            seen &= key > query - window
        yield _Block(slice(start, stop), slice(begin, end), seen)


def _scores(q: torch.Tensor, k: torch.Tensor, block: _Block, scale: float) -> torch.Tensor:
    """Returns (batch, h_kv, ratio, queries, keys), -inf where a query does not see a key."""
    scores = torch.einsum("bsgrd,btgd->bgrst", q[:, block.queries], k[:, block.keys]) * scale
    return torch.where(block.seen, scores, -torch.inf)


def _grouped(t: torch.Tensor, h_kv: int, dtype: torch.dtype) -> torch.Tensor:
    """Views (batch, s, h_q, d) as (batch, s, h_kv, ratio, d)."""
    return rearrange(t.to(dtype), "b s (h_kv ratio) d -> b s h_kv ratio d", h_kv=h_kv)


def _default_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale


@torch.no_grad()
def reference_sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s_aux: torch.Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention with sinks. Nothing that a query does not see reaches its output, NaN included.

    Args:
        q: as `cute_kernels.sink_attention` takes it, of any dtype and head dimension; `cute_kernels.sink.request`
            describes the other arguments.
        dtype: torch.float64 or torch.float32, of the computation and the results.

    Returns:
        out, shaped like q, and lse, q's shape without d, both in `dtype`. The lse is in natural log and without the
        sink. A query that sees no key has out 0 and lse -inf.
    """
    scale, h_kv = _default_scale(q, softmax_scale), k.shape[-2]
    out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    for sequences in _sequences([q, out, lse], [k, v], cu_seqlens_q, cu_seqlens_k):
        (q_rows, out_rows, lse_rows), (keys, values) = sequences
        finite = _Sequences([q_rows], [keys, values])  # lse is not finite yet
        grouped, keys, values = _grouped(q_rows, h_kv, dtype), keys.to(dtype), values.to(dtype)
        for block in _blocks(finite, causal, window):
            scores = _scores(grouped, keys, block, scale)
            row_max = scores.amax(dim=-1, keepdim=True)
            # A row whose scores are all -inf has no largest score: shift it by 0, and its sum is 0.
            shift = torch.where(row_max == -torch.inf, 0.0, row_max)
            weights = torch.exp(scores - shift)
            row_sum = weights.sum(dim=-1, keepdim=True)
            empty = row_sum == 0
            block_lse = torch.where(empty, -torch.inf, shift + row_sum.log()).squeeze(-1)
            weights = torch.where(empty, 0.0, weights / row_sum)
            block_out = torch.einsum("bgrst,btgd->bsgrd", weights, values[:, block.keys])
            block_out = torch.where(empty.squeeze(-1).permute(0, 3, 1, 2).unsqueeze(-1), 0.0, block_out)
            out_rows[:, block.queries] = block_out.flatten(2, 3)
            lse_rows[:, block.queries] = block_lse.flatten(1, 2).transpose(1, 2)
    if s_aux is not None:
        out = torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, out * _key_share(lse, s_aux).unsqueeze(-1))
    return out, lse


def _key_share(lse: torch.Tensor, s_aux: torch.Tensor) -> torch.Tensor:
    """Returns exp(lse) / (exp(lse) + exp(s_aux)), the keys' share. NaN if neither sink nor keys have any weight."""
    return torch.sigmoid(lse - s_aux.to(lse.dtype))


@torch.no_grad()
def reference_sink_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    s_aux: torch.Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Computes gradients of `reference_sink_attention` from its output and lse; nothing is normalized again.

    So k and v may be only some of the keys, with the out and lse of all keys: gradients of parts add up.

    P are the weights of the keys, which add up to 1 with the sink's weight; delta = sum_d dout out of each query:

        dv = P^T dout    dS = P (dout v^T - delta)    dq = scale dS k    dk = scale dS^T q
        ds_aux = - sum over queries of (weight of the sink) delta

    Args:
        dout: gradient of the output, q's shape.
        q: as in the forward, and so are all arguments that are not described here.
        out: q's shape, of any dtype.
        lse: q's shape without d. Queries with -inf or +inf have gradients of 0.
        delta: lse's shape; default sum_d dout out.

    Returns:
        dq, dk, dv in the shapes of q, k, v, and ds_aux (h_q,), None without s_aux; in `dtype`. A query without keys
        gives and gets nothing, and so does a key that no query sees.
    """
    scale, h_kv, lse = _default_scale(q, softmax_scale), k.shape[-2], lse.to(dtype)
    empty = lse.isinf()
    delta = (dout.to(dtype) * out.to(dtype)).sum(dim=-1) if delta is None else delta.to(dtype)
    delta = torch.where(empty, 0.0, delta)
    share = torch.ones_like(lse) if s_aux is None else torch.where(empty, 0.0, _key_share(lse, s_aux))
    dq, dk, dv = (torch.zeros_like(t, dtype=dtype, memory_format=torch.contiguous_format) for t in (q, k, v))
    rows = [q, dout, delta, lse, share, dq]
    for sequences in _sequences(rows, [k, v, dk, dv], cu_seqlens_q, cu_seqlens_k):
        (q_rows, dout_rows, delta_rows, lse_rows, share_rows, dq_rows), (keys, values, dk_rows, dv_rows) = sequences
        finite = _Sequences([q_rows, dout_rows], [keys, values])
        grouped, douts = _grouped(q_rows, h_kv, dtype), _grouped(dout_rows, h_kv, dtype)
        keys, values = keys.to(dtype), values.to(dtype)
        # (batch, h_kv, ratio, s_q, 1), like the scores
        deltas, lses, shares = (
            t.unflatten(2, (h_kv, -1)).permute(0, 2, 3, 1).unsqueeze(-1) for t in (delta_rows, lse_rows, share_rows)
        )
        for block in _blocks(finite, causal, window):
            own = block.queries
            row_lse = lses[..., own, :]
            weights = torch.exp(_scores(grouped, keys, block, scale) - row_lse) * shares[..., own, :]
            weights = torch.where(row_lse.isinf(), 0.0, weights)
            dweights = torch.einsum("bsgrd,btgd->bgrst", douts[:, own], values[:, block.keys])
            dscores = torch.where(block.seen, weights * (dweights - deltas[..., own, :]), 0.0) * scale
            dq_rows[:, own] = torch.einsum("bgrst,btgd->bsgrd", dscores, keys[:, block.keys]).flatten(2, 3)
            dk_rows[:, block.keys] += torch.einsum("bgrst,bsgrd->btgd", dscores, grouped[:, own])
            dv_rows[:, block.keys] += torch.einsum("bgrst,bsgrd->btgd", weights, douts[:, own])
    if s_aux is None:
        return dq, dk, dv, None
    sink_share = torch.where(empty, 0.0, torch.sigmoid(s_aux.to(dtype) - lse))
    ds_aux = -(sink_share * delta).flatten(0, -2).sum(dim=0)
    return dq, dk, dv, ds_aux
