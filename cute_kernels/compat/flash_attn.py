"""FlashAttention's interface over `gqa_decode` and `sink_attention`, for bfloat16 and float16 keys and values.

Replace ``import flash_attn_interface`` with ``import cute_kernels.compat.flash_attn as flash_attn_interface``. Order
and meaning of the arguments are those of FlashAttention 3 (github.com/Dao-AILab/flash-attention, hopper/). Arguments
that version 2, or the builds of vLLM and the kernels hub, add or name differently are taken by keyword: `block_table`,
`alibi_slopes`, `s_aux`, `learnable_sink`, `dropout_p`, `out`, `return_softmax_lse`, `fa_version`.

An argument that cannot be honoured raises NotImplementedError and is named. Docstrings leave out arguments that must
keep their defaults (`qv`, rotary encoding, `cache_batch_idx`, `cache_leftpad`, `cu_seqlens_k_new`, `seqused_q`,
descales, `attention_chunk`, `sm_margin`, `dropout_p`), and those that are ignored because they only change speed
(`pack_gqa`, `scheduler_metadata`, `max_seqlen_k`, `fa_version`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from cute_kernels.gqa.plan import MAX_S_Q
from cute_kernels.runtime.checks import check_flag, check_int, check_tensor, fail, refuse_gradients
from cute_kernels.runtime.overlap import check_written

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_MAX_LENGTH = torch.iinfo(torch.int32).max


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    fa_version: int | None = None,
) -> Result:
    """Decode 1 to 8 query tokens of each sequence over a cache, contiguous or paged.

    Args:
        q: (batch, s_q, h_q, d) bfloat16 or float16, d 64 to 512; (batch * s_q, h_q, d) with `cu_seqlens_q`.
        k_cache: (batch, s_k, h_kv, d) of q's dtype; with a table (pages, page_size, h_kv, d), page sizes powers of two.
        v_cache: likewise.
        k: (batch, s_new, h_kv, d), stored in `k_cache` after its first `cache_seqlens` tokens before attention.
            A token for which there is no room, or no page, is dropped.
        v: likewise.
        cache_seqlens: (batch,) int32 or a number: tokens in the cache, without those of `k`; default: all of it.
        page_table: (batch, max_pages) int32.
        cu_seqlens_q: with `max_seqlen_q`, if all sequences have that many query tokens. Its contents are not read.
        max_seqlen_q: query tokens of each sequence, with `cu_seqlens_q`.
        softmax_scale: default d ** -0.5.
        causal: query j sees the first ``length - s_q + 1 + j`` keys.
        window_size: (left, right): keys from left before a query's own to right after it; -1 is no limit. Right is 0 or
            no limit.
        softcap: c > 0: scores become ``c * tanh(score / c)``.
        num_splits: splits of each sequence; 0: planned.
        return_softmax_lse: also return the log-sum-exp.
        block_table: another name of `page_table`.
        alibi_slopes: (h_q,) or (batch, h_q) float32; with `causal` or one query token.
        s_aux: (h_q,), a logit per head that joins the denominator.
        learnable_sink: another name of `s_aux`.
        out: q's shape and dtype, to write to.

    Returns:
        out of q's shape and dtype; with `return_softmax_lse` also lse (batch, h_q, s_q), for packed q (h_q, tokens),
        float32: natural log, the sink included in its sum, as in FlashAttention, so that parts can be merged by it.
        A query that sees no key has out 0 and the sink's logit, or -inf.

    Raises:
        NotImplementedError: an argument that cannot be honoured, by name.
        TypeError, ValueError: what `gqa_decode` refuses; there `page_table` is called block_table.
    """
    from cute_kernels.gqa.op import gqa_decode  # here, so that importing this module loads no kernel

    _refuse(
        qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk or None,
        sm_margin=sm_margin or None,
    )  # fmt: skip
    seen = _Seen.of(causal, window_size)
    table = _either("page_table", page_table, "block_table", block_table)
    queries, lse_of = _batched(q, cu_seqlens_q, max_seqlen_q)
    if isinstance(cache_seqlens, int):
        check_int("cache_seqlens", cache_seqlens, -_MAX_LENGTH - 1, _MAX_LENGTH)
        cache_seqlens = torch.full((len(queries),), max(cache_seqlens, 0), dtype=torch.int32, device=q.device)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: got None; needs a tensor, as the other one is")
    _check_alibi(alibi_slopes, seen, queries.shape[1])
    given: dict[str, Any] = {
        "q": queries,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "layout": "BSNH" if table is None else "paged_NHD",
        "cache_seqlens": cache_seqlens,
        "block_table": table,
        "causal": seen.causal,
        "window": seen.window,
        "softcap": float(softcap) if softcap else None,
        "alibi_slopes": alibi_slopes,
        "s_aux": _sinks(s_aux, learnable_sink),
        "softmax_scale": softmax_scale,
        "num_splits": num_splits or None,
        "out": None if out is None else out.view(queries.shape),
    }
    if k is not None and v is not None:
        given["cache_seqlens"] = _append(k, v, given)
    result, lse = gqa_decode(**given, return_lse=True)
    result = result.view(q.shape) if out is None else out
    return (result, lse_of(_with_sinks(lse, given["s_aux"]))) if return_softmax_lse else result


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    fa_version: int | None = None,
) -> Result:
    """Compute attention of a batch of sequences of one length, differentiable in q, k, v and the sinks.

    Arguments that are not here are as in `flash_attn_with_kvcache`.

    Args:
        q: (batch, s_q, h_q, d) bfloat16 or float16, d 64 or 128; 256 with up to 8 query tokens and no gradients.
        k: (batch, s_k, h_kv, d).
        v: likewise.
        causal: query j sees the first ``s_k - s_q + 1 + j`` keys.
        softcap: with up to 8 query tokens and no gradients; so are `alibi_slopes`.
        num_splits: ignored.
        deterministic: gradients have the same bits in the same call.
        return_attn_probs: also return the log-sum-exp, as FlashAttention 3 does; never probabilities.
        return_softmax_lse: another name of `return_attn_probs`.
        out: q's shape and dtype, to write to; without gradients.

    Returns:
        out of q's shape and dtype, and, if wanted, lse (batch, h_q, s_q) float32, as in `flash_attn_with_kvcache`.

    Raises:
        NotImplementedError: an argument that cannot be honoured, by name.
        TypeError, ValueError: what `sink_attention` or `gqa_decode` refuses.
    """
    from cute_kernels.gqa.op import gqa_decode
    from cute_kernels.runtime.ops import needs_grad
    from cute_kernels.sink.op import sink_attention

    _refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk or None,
        sm_margin=sm_margin or None, dropout_p=dropout_p or None,
    )  # fmt: skip
    if softmax_scale == 0:
        raise ValueError("softmax_scale: got 0; needs another number: the fourth argument is not version 2's dropout_p")
    seen, sinks = _Seen.of(causal, window_size), _sinks(s_aux, learnable_sink)
    decodes = q.dim() == 4 and q.shape[1] <= MAX_S_Q and not needs_grad(q, k, v, sinks)
    result: Any
    if decodes and (softcap or alibi_slopes is not None or q.shape[-1] == 256):
        _check_alibi(alibi_slopes, seen, q.shape[1])
        result, lse = gqa_decode(
            q, k, v, layout="BSNH", causal=seen.causal, window=seen.window, softcap=float(softcap) or None,
            alibi_slopes=alibi_slopes, s_aux=sinks, softmax_scale=softmax_scale, return_lse=True,
        )  # fmt: skip
    else:
        where = f"more than {MAX_S_Q} query tokens, or gradients"
        _refuse(where, softcap=softcap or None, alibi_slopes=alibi_slopes)
        result, lse = sink_attention(
            q, k, v, sinks, causal=seen.causal, window=seen.window, softmax_scale=softmax_scale,
            deterministic=deterministic, return_lse=True,
        )  # fmt: skip
    result = _written(out, result)
    return (result, _with_sinks(lse, sinks).transpose(1, 2)) if return_attn_probs or return_softmax_lse else result


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
    fa_version: int | None = None,
) -> Result:
    """Compute attention of packed sequences, differentiable; with a table, decode over pages.

    Arguments that are not here are as in `flash_attn_func`.

    Args:
        q: (tokens, h_q, d) bfloat16 or float16, d 64 or 128.
        k: (tokens, h_kv, d); with a table (pages, page_size, h_kv, d).
        v: likewise.
        cu_seqlens_q: (batch + 1,) int32: where sequences of q begin and end. Rows past the last one are padding: their
            output and gradient is 0.
        cu_seqlens_k: the same of k and v; None with a table.
        max_seqlen_q: query tokens of the longest sequence. With it, and without gradients, `cu_seqlens_q` and
            `cu_seqlens_k` are not read on the host. With a table 1 to 8, and of every sequence.
        seqused_k: (batch,) int32, with a table: tokens of each sequence, those of the queries included.
        causal: the last query of a sequence sees its last key.
        softcap: with a table, and so are `alibi_slopes` and `num_splits`.
        q_v: another name of `qv`.
        block_table: (batch, max_pages) int32: k and v are pages.
        page_table: another name of `block_table`.

    Returns:
        out of q's shape and dtype, and, if wanted, lse (h_q, tokens) float32, as in `flash_attn_with_kvcache`.

    Raises:
        NotImplementedError: an argument that cannot be honoured, by name; with a table also more than 8 query tokens,
            and sequences with different numbers of them.
        TypeError, ValueError: what `sink_attention` or `gqa_decode` refuses.
    """
    from cute_kernels.sink.op import sink_attention

    _refuse(seqused_q=seqused_q, q_v=q_v, dropout_p=dropout_p or None)
    wants_lse = return_attn_probs or return_softmax_lse
    table = _either("page_table", page_table, "block_table", block_table)
    if table is not None:
        _refuse("a block_table", cu_seqlens_k=cu_seqlens_k)
        if max_seqlen_q is None or seqused_k is None:
            name = "max_seqlen_q" if max_seqlen_q is None else "seqused_k"
            raise ValueError(f"{name}: got None with a block_table; needs a value")
        return flash_attn_with_kvcache(
            q, k, v, qv=qv, cache_seqlens=seqused_k, page_table=table, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, attention_chunk=attention_chunk,
            softcap=softcap, num_splits=num_splits, sm_margin=sm_margin, return_softmax_lse=wants_lse,
            alibi_slopes=alibi_slopes, s_aux=s_aux, learnable_sink=learnable_sink, out=out,
        )  # fmt: skip
    _refuse(
        "packed sequences without a block_table", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk or None, sm_margin=sm_margin or None, seqused_k=seqused_k,
        softcap=softcap or None, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    if cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: got None; needs a tensor, or block_table and seqused_k")
    seen, sinks = _Seen.of(causal, window_size), _sinks(s_aux, learnable_sink)
    result: Any
    result, lse = sink_attention(
        q, k, v, sinks, causal=seen.causal, window=seen.window, softmax_scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, deterministic=deterministic, return_lse=True,
        max_seqlen_q=_longest(max_seqlen_q, q),
    )  # fmt: skip
    result = _written(out, result)
    return (result, _with_sinks(lse, sinks).transpose(0, 1)) if wants_lse else result


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """Returns None: `gqa_decode` plans each call by itself.

    Args:
        args: ignored.
        kwargs: ignored.
    """


# ---- what arguments mean


class _Seen(NamedTuple):
    """The keys that a query sees, in this package's terms: `window` counts the query's own token."""

    causal: bool
    window: int | None

    @classmethod
    def of(cls, causal: bool, window_size: Sequence[int] | None) -> _Seen:
        """Raises NotImplementedError for a limit after the query other than its own position."""
        if window_size is None:
            window_size = (-1, -1)
        if not isinstance(window_size, Sequence) or len(window_size) != 2:
            fail("window_size", repr(window_size), "two numbers, left and right")
        check_flag("causal", causal)
        left, right = window_size
        for end in window_size:
            check_int("window_size", end, -(2**63), 2**62)
        if not causal and right > 0:
            _unable("window_size", tuple(window_size), "a right limit of 0, or of -1, none")
        return cls(causal or right == 0, None if left < 0 else left + 1)


def _batched(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None) -> tuple[torch.Tensor, Any]:
    """Returns queries as (batch, s_q, h_q, d), and the function that reorders (batch, s_q, h_q) for FlashAttention."""
    if cu_seqlens_q is None:
        return q, lambda lse: lse.transpose(1, 2)
    batch, tokens = cu_seqlens_q.shape[0] - 1, q.shape[0]
    s_q = int(max_seqlen_q or 0)
    if q.dim() != 3 or batch * s_q != tokens:
        got = f"{batch} sequences of up to {s_q} with {tokens} query tokens"
        _unable("cu_seqlens_q", got, "max_seqlen_q query tokens of every sequence: a batch that is only decoded")
    if s_q > MAX_S_Q:
        _unable("max_seqlen_q", s_q, f"at most {MAX_S_Q} query tokens over a cache")
    return q.view(batch, s_q, *q.shape[1:]), lambda lse: lse.flatten(0, 1).transpose(0, 1)


def _longest(max_seqlen_q: Any, q: torch.Tensor) -> int | None:
    """Returns `max_seqlen_q` as a number. Reading a tensor, which transformers passes, would wait: then all tokens."""
    if max_seqlen_q is None:
        return None
    return q.shape[0] if isinstance(max_seqlen_q, torch.Tensor) else int(max_seqlen_q)


def _check_new(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Checks new tokens: as many of k as of v, in q's dtype, with the cache's heads."""
    if torch.is_grad_enabled():
        refuse_gradients("flash_attn_with_kvcache", {"k": k, "v": v})
    check_tensor("k", k, ndim=4)
    for name, new in (("k", k), ("v", v)):
        shape = (q.shape[0], k.shape[1], *k_cache.shape[2:])
        check_tensor(name, new, dtype=q.dtype, shape=shape, device=q.device)


def _written(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Returns the result, in the caller's tensor if there is one."""
    if out is None:
        return result
    check_tensor("out", out, dtype=result.dtype, shape=tuple(result.shape), device=result.device)
    check_written({"out": out}, {})
    return out.copy_(result)


def _append(k: torch.Tensor, v: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Stores new tokens behind those of each sequence, if the call is one of `gqa_decode`; returns the new lengths."""
    from cute_kernels.gqa.op import check_decode
    from cute_kernels.gqa.request import DECODE

    lengths = given["cache_seqlens"]
    if lengths is None:
        fail("cache_seqlens", "None with k and v", "the tokens before them")
    if not torch.compiler.is_compiling():
        check_decode(DECODE.request(**given))  # before anything is stored
    _check_new(k, v, given["q"], given["k_cache"])
    if not torch.compiler.is_compiling():
        read = {"k": k, "v": v, **{name: t for name, t in given.items() if isinstance(t, torch.Tensor)}}
        caches = {name: read.pop(name) for name in ("k_cache", "v_cache")}
        check_written(caches, read)
    _store(((given["k_cache"], k), (given["v_cache"], v)), lengths, given["block_table"])
    # clamped before the sum: any length below 0 or beyond the cache is legal
    return lengths.clamp(0, _MAX_LENGTH - k.shape[1]) + k.shape[1]


def _store(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], cache_seqlens: torch.Tensor, table: torch.Tensor | None
) -> None:
    """Writes new tokens after those of their sequences; drops those for which there is no room or page.

    It works under graph capture, because nothing waits for the device. A dropped token is written as the first kept
    one, to the same place, so no two writes differ; if none is kept, a place gets its old contents.
    """
    cache, new = pairs[0]
    batch, tokens = new.shape[:2]
    outer_size, rows = cache.shape[:2]
    capacity = rows if table is None else rows * table.shape[1]
    if not (batch and tokens and outer_size and capacity):
        return
    position = torch.arange(tokens, dtype=torch.int64, device=new.device) + cache_seqlens.long().clamp(0).unsqueeze(1)
    keep = position < capacity
    position = position.clamp(max=capacity - 1)
    if table is None:
        outer = torch.arange(batch, dtype=torch.int64, device=new.device).unsqueeze(1).expand_as(position)
    else:
        page = table.long().gather(1, position // rows)
        keep = keep & (page >= 0) & (page < outer_size)
        outer, position = page.clamp(0, outer_size - 1), position % rows
    keep, outer, position = keep.flatten(), outer.flatten(), position.flatten()
    first = keep.to(torch.int8).argmax(0, keepdim=True)
    outer, position = (torch.where(keep, t, t.index_select(0, first)) for t in (outer, position))
    for cache, new in pairs:
        values = new.flatten(0, 1).to(cache.dtype)
        values = torch.where(keep[:, None, None], values, values.index_select(0, first))
        cache[outer, position] = torch.where(keep.any(), values, cache[outer, position])


def _check_alibi(alibi_slopes: torch.Tensor | None, seen: _Seen, s_q: int) -> None:
    """Refuses slopes with keys after a query: FlashAttention's bias falls there, `gqa_decode`'s goes on rising."""
    if alibi_slopes is not None and s_q > 1 and not seen.causal:
        _unable("alibi_slopes", f"slopes of {s_q} query tokens that see later ones", "causal")


def _sinks(s_aux: torch.Tensor | None, learnable_sink: torch.Tensor | None) -> torch.Tensor | None:
    sinks = _either("s_aux", s_aux, "learnable_sink", learnable_sink)
    return None if sinks is None else sinks.float()


def _with_sinks(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Adds the sink to the log-sum-exps (..., heads) of this package's ops, which leave it out."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.detach())


def _either(name: str, value: torch.Tensor | None, other_name: str, other: torch.Tensor | None) -> torch.Tensor | None:
    """Returns one argument that has two names."""
    if value is not None and other is not None:
        raise ValueError(f"{name}, {other_name}: got both; needs one, they are two names of it")
    return other if value is None else value


def _refuse(where: str = "", **arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            needs = "0" if isinstance(value, (int, float)) else "None"
            _unable(name, f"{got} with {where}" if where else got, needs)


def _unable(name: str, got: Any, needs: str) -> NoReturn:
    raise NotImplementedError(f"{name}: got {got}; needs {needs}: no kernel of this package does more")
