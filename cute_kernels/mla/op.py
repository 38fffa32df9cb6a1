"""`mla_fp8_decode`: launch what is prepared, prepare what is new, explain what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fp8_mla
from cute_kernels.mla.plan import EXCHANGES, MAX_SPLITS, plan_decode
from cute_kernels.mla.spec import MASKED_SCALE, MAX_KEYS, PARTIAL_FLOATS, SCORES
from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, fail, refuse_gradients, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, launch_or_explain
from cute_kernels.runtime.ops import register_op

MAX_HEADS = 128
MAX_SLOTS = 2**31
"""Fewer than these: indices are int32."""
DEFAULT_SCALE = fp8_mla.QK_DIM**-0.5
_INTS, _FLOATS = (int, type(None)), (float, type(None))

_OF_REFERENCE = ("indices", "topk_length", "block_table", "cache_seqlens", "causal", "softmax_scale", "s_aux")
_TENSORS = ("q", "kv_cache", "indices", "topk_length", "block_table", "cache_seqlens", "s_aux", "out", "lse")


class _Request(NamedTuple):
    """The arguments of one call, those of the operator first, in its order. `return_lse` is an eager call's."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    indices: torch.Tensor | None
    topk_length: torch.Tensor | None
    block_table: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    causal: bool
    softmax_scale: float | None
    s_aux: torch.Tensor | None
    num_splits: int | None
    exchange: str | None
    scores: str | None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = True


_NEEDS_KEYS = "either indices (sparse; topk_length is optional), or block_table and cache_seqlens (dense)"


def mla_fp8_decode(
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
    num_splits: int | None = None,
    exchange: str | None = None,
    scores: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention of a few query tokens over a paged cache of 656-byte FP8 tokens, sparse or dense.

    The attention is DeepSeek's absorbed form: all heads share one key of 576 elements, whose first 512 are also the
    value. The cache format is that of DeepSeek-V3.2 (docs/users/formats.md); scales are used as they are, in float32.

    Runs on the current stream, captures into a CUDA graph after one eager call with the same shapes, and traces under
    torch.compile. CPU tensors run the reference, which computes in float64.

    Args:
        q: (batch, s_q, h_q, 576) bfloat16, 1 <= h_q <= 128, s_q >= 1. Rows contiguous and 16-byte aligned.
        kv_cache: (num_pages, page_size, 656) or (num_pages, page_size, 1, 656), uint8 or float8_e4m3fn, any page size.
            Rows contiguous and 16-byte aligned; pages may be strided.
        indices: sparse: (batch, s_q, topk) int32, each ``page * page_size + offset``. Indices outside of the cache are
            masked, at any position.
        topk_length: (batch,) or (batch, s_q) int32: only that many leading indices count. Negative counts as 0.
        block_table: dense: (batch, max_pages) int32. Entries past a sequence's last page may be anything; the keys of a
            page that does not exist are masked.
        cache_seqlens: dense: (batch,) int32, tokens. Negative counts as 0; a length past the block table's capacity
            counts as that capacity.
        causal: dense, s_q > 1: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys.
        softmax_scale: default 576 ** -0.5.
        s_aux: (h_q,) float32, a logit per head in natural-log units that joins the softmax denominator alone.
        num_splits: splits of each query's keys, one CTA each; default: planned from the shapes. A plan for several
            queries with lengths is a balanced schedule instead: each CTA gets an equal share of all their keys.
        exchange: what two CTAs with 64 heads each send each other of every key that one of them has gathered: "codes",
            its 656 bytes; "values", 16-bit numbers; or "none": each CTA gathers all keys. Default: planned. With more
            than 64 heads and a given number of splits, results are equal bit for bit.
        scores: how exact S = Q K^T is. "exact": a float32 sum of exact products; the log-sum-exp is within 2e-5.
            "fp8": codes meet Q as two e4m3 numbers, hi + lo, on the FP8 tensor core, whose sums are off by some 3e-4 of
            their rms; the log-sum-exp is off by at most half of what keys rounded to bf16 cost. Default: planned.
            "fp8" goes with no exchange.
        out: (batch, s_q, h_q, 512) bfloat16 to write to; rows contiguous and 16-byte aligned.
        lse: (batch, s_q, h_q) float32 to write to.
        return_lse: also return the log-sum-exp.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16; with `return_lse` also lse (batch, s_q, h_q) float32, natural log, without
        the sink. A query without keys has out 0 and lse -inf. Tokens that a query does not see, NaN included, change
        neither.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what it got and what it needs.
            Also if gradients are enabled and a tensor requires them: there is no backward.
    """
    if torch.is_grad_enabled():
        refuse_gradients(
            "mla_fp8_decode", _TENSORS, q, kv_cache, indices, topk_length, block_table, cache_seqlens, s_aux, out, lse
        )
    arguments = (
        q, kv_cache, indices, topk_length, block_table, cache_seqlens, causal, softmax_scale, s_aux, num_splits,
        exchange, scores,
    )  # fmt: skip
    if isinstance(q, torch.Tensor) and q.is_cuda and not torch.compiler.is_compiling():
        out, lse = _decode_on_gpu(*arguments, out, lse, return_lse)
        return (out, lse) if return_lse else out
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        _check(*arguments, out, lse)
    if out is None:
        out = q.new_empty((*q.shape[:3], fp8_mla.V_DIM), dtype=torch.bfloat16)
    if lse is None:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _decode_into(*arguments, out, lse)
    return (out, lse) if return_lse else out


class PreparedLaunch(NamedTuple):
    """All that stays the same while the shapes of a call do. `kernel` is None if there is no key."""

    kernel: Callable[..., Any] | None
    num_splits: int
    merge_ctas: int
    max_ctas: int
    need: workspace.Need
    zero_row: int  # address of the token that masked keys read
    no_sink: torch.Tensor
    no_length: torch.Tensor
    unread_lse: torch.Tensor  # for callers that want no lse


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def _launch(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches for the arguments of a `_Request`, or raises before any launch."""
    (
        q, pages, indices, topk_length, block_table, cache_seqlens, causal, softmax_scale, s_aux, num_splits, exchange,
        scores, out, lse, return_lse,
    ) = arguments  # fmt: skip
    # a kernel takes True for 1, and 1.0 finds the launch that 1 prepared
    if type(num_splits) not in _INTS or type(softmax_scale) not in _FLOATS:
        _check_options(softmax_scale, num_splits, exchange, scores)
    batch, s_q, h_q, _ = q.shape
    if pages.dtype is not torch.uint8:
        if pages.dtype is not torch.float8_e4m3fn:
            fail("kv_cache", pages.dtype, "uint8 or float8_e4m3fn", TypeError)
        pages = pages.view(torch.uint8)
    if pages.dim() == 4:
        pages = pages.squeeze(2)
    num_pages, page_size, _ = pages.shape
    if not page_size or num_pages * page_size >= MAX_SLOTS:
        fail("kv_cache", f"{num_pages} pages of {page_size}", "slots that 31 bits count")
    sparse = indices is not None
    index = indices if sparse else block_table
    if index is None or sparse != (cache_seqlens is None) or (block_table if sparse else topk_length) is not None:
        fail("indices", "neither or both kinds of arguments", _NEEDS_KEYS)
    device = q.get_device()
    given_length = topk_length if sparse else cache_seqlens
    ragged = given_length is not None
    key = (
        device, sparse, batch, s_q, h_q, index.shape[-1], num_pages > 0, page_size, ragged, num_splits, exchange,
        scores,
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(*key)
    if out is None:
        out = torch.empty((batch, s_q, h_q, fp8_mla.V_DIM), dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else prepared.unread_lse
    if prepared.kernel is None:
        _check(*arguments)
        out.zero_()
        lse.fill_(-torch.inf)
        return out, lse
    length = prepared.no_length if given_length is None else given_length
    # the compiled kernel takes unsigned integers for signed ones
    if index.dtype is not torch.int32 or length.dtype is not torch.int32:
        fail("indices", f"{index.dtype}, lengths {length.dtype}", "int32", TypeError)
    if sparse and length.dim() == 1:
        if length.shape[0] != batch:
            fail("topk_length", f"shape {tuple(length.shape)}", f"({batch},)")
        length = length.unsqueeze(1).expand(batch, s_q)
    scratch, counters = workspace.addresses(prepared.need)
    prepared.kernel(  # on the current stream of the tensors' device
        q, pages, index, length, prepared.no_sink if s_aux is None else s_aux, out, lse, scratch, counters,
        prepared.zero_row, DEFAULT_SCALE if softmax_scale is None else softmax_scale, prepared.num_splits,
        prepared.merge_ctas, prepared.max_ctas, 1 if causal else 0, 0,
    )  # fmt: skip
    return out, lse


def _prepare(
    device_index: int,
    sparse: bool,
    batch: int,
    s_q: int,
    h_q: int,
    width: int,
    any_page: bool,
    page_size: int,
    ragged: bool,
    num_splits: int | None,
    exchange: str | None,
    scores: str | None,
) -> PreparedLaunch:
    """Plans a call and loads its kernel; the arguments are the key that `_launch` looks up."""
    device = torch.device("cuda", device_index)
    require_sm90("q", device)
    _check_sizes(s_q, h_q)
    _check_options(None, num_splits, exchange, scores)
    _check_width(sparse, width, page_size)
    constants, zero_row = memory.constants(device), _zero_row(device)
    kernel, splits, merge_ctas, max_ctas, blocks, partial_rows = None, 1, 1, 1, 1, 0
    if batch and width and any_page:
        plan = plan_decode(
            sparse=sparse,
            batch=batch,
            s_q=s_q,
            h_q=h_q,
            max_keys=width if sparse else width * page_size,
            num_sms=constants.num_sms,
            ragged=ragged,
            num_splits=num_splits,
            exchange=exchange,
            scores=scores,
        )
        kernel, splits, merge_ctas = get_kernel(plan.spec), plan.num_splits, plan.merge_ctas
        blocks, max_ctas, partial_rows = plan.spec.head_blocks(h_q), plan.max_ctas, plan.partial_rows
    prepared = PreparedLaunch(
        kernel,
        splits,
        merge_ctas,
        max_ctas,
        workspace.reserve(device, partial_rows * PARTIAL_FLOATS, batch * s_q * blocks if partial_rows else 0),
        zero_row.data_ptr(),
        constants.no_sink[:h_q],
        constants.no_length.expand(batch, s_q),
        memory.unread((batch, s_q, h_q), device),
    )
    key = (device_index, sparse, batch, s_q, h_q, width, any_page, page_size, ragged, num_splits, exchange, scores)
    return _prepared.keep(key, prepared, device)


@memory.once_per_device
def _zero_row(device: torch.device) -> torch.Tensor:
    """(656,) uint8, the token that masked keys read; kept as long as the process: graphs hold its address."""
    memory.require_not_capturing(device)

    def make() -> torch.Tensor:
        row = torch.zeros(fp8_mla.TOKEN_BYTES, dtype=torch.uint8, device=device)
        # scales in the range of real keys: the kernel divides by them
        row[fp8_mla.SCALE_OFFSET : fp8_mla.ROPE_OFFSET].view(torch.float32).fill_(MASKED_SCALE)
        return row

    return memory.for_all_streams(device, make)


def _check_sizes(s_q: int, h_q: int) -> None:
    require(1 <= h_q <= MAX_HEADS, "q", f"{h_q} heads", f"1 to {MAX_HEADS} heads")
    require(s_q >= 1, "q", f"s_q = {s_q}", "at least one query token")


def _check_options(
    softmax_scale: float | None, num_splits: int | None, exchange: str | None, scores: str | None
) -> None:
    if softmax_scale is not None:
        is_number = isinstance(softmax_scale, (int, float)) and not isinstance(softmax_scale, bool)
        require(is_number, "softmax_scale", type(softmax_scale).__name__, "a number", TypeError)
    if num_splits is not None:
        is_int = isinstance(num_splits, int) and not isinstance(num_splits, bool)
        require(is_int, "num_splits", type(num_splits).__name__, "an int", TypeError)
        require(1 <= num_splits <= MAX_SPLITS, "num_splits", num_splits, f"1 to {MAX_SPLITS}")
    require(exchange is None or exchange in EXCHANGES, "exchange", repr(exchange), f"None or one of {EXCHANGES}")
    require(scores is None or scores in SCORES, "scores", repr(scores), f"None or one of {SCORES}")
    if scores == "fp8" and exchange not in (None, "none"):
        fail("scores", f"'fp8' with exchange {exchange!r}", "exchange None or 'none', or scores None or 'exact'")


def _check_width(sparse: bool, width: int, page_size: int) -> None:
    """Key positions are 32-bit numbers."""
    name, got = ("indices", f"topk {width}") if sparse else ("block_table", f"{width} pages of {page_size} tokens")
    require((width if sparse else width * page_size) <= MAX_KEYS, name, got, f"at most {MAX_KEYS} keys of a query")


def _check(*arguments: Any) -> None:
    """Raises what is wrong with the arguments of a `_Request`, by name."""
    request = _Request(*arguments)
    q, kv_cache, indices, topk_length, block_table, cache_seqlens = request[:6]
    softmax_scale, s_aux, out, lse = request.softmax_scale, request.s_aux, request.out, request.lse
    check_tensor(
        "q", q, dtype=torch.bfloat16, shape=(None, None, None, fp8_mla.QK_DIM), align=16, unit_last_stride=True
    )
    device = q.device
    batch, s_q, h_q, _ = q.shape
    _check_sizes(s_q, h_q)
    check_tensor("kv_cache", kv_cache, dtype=fp8_mla.CACHE_DTYPES, device=device, align=16, unit_last_stride=True)
    num_pages, page_size, _ = fp8_mla.as_pages(kv_cache).shape
    num_slots = num_pages * page_size
    require(num_slots < MAX_SLOTS, "kv_cache", f"{num_slots} slots", "fewer than 2^31")
    if indices is not None:
        if block_table is not None or cache_seqlens is not None:
            fail("indices", "indices and dense arguments", _NEEDS_KEYS)
        shape: tuple[int | None, ...] = (batch, s_q, None)
        check_tensor("indices", indices, dtype=torch.int32, shape=shape, device=device, unit_last_stride=True)
        _check_width(True, indices.shape[2], 1)
        if topk_length is not None:
            per_query = isinstance(topk_length, torch.Tensor) and topk_length.dim() == 2
            shape = (batch, s_q) if per_query else (batch,)
            check_tensor("topk_length", topk_length, dtype=torch.int32, shape=shape, device=device)
    else:
        if block_table is None or cache_seqlens is None or topk_length is not None:
            names = ("topk_length", "block_table", "cache_seqlens")
            given = [n for n, t in zip(names, (topk_length, block_table, cache_seqlens), strict=True) if t is not None]
            fail("indices", f"None, with {' and '.join(given) or 'nothing else'}", _NEEDS_KEYS)
        shape = (batch, None)
        check_tensor("block_table", block_table, dtype=torch.int32, shape=shape, device=device, unit_last_stride=True)
        _check_width(False, block_table.shape[1], kv_cache.shape[1])
        check_tensor("cache_seqlens", cache_seqlens, dtype=torch.int32, shape=(batch,), device=device)
    if s_aux is not None:
        check_tensor("s_aux", s_aux, dtype=torch.float32, shape=(h_q,), device=device, unit_last_stride=True)
    _check_options(softmax_scale, request.num_splits, request.exchange, request.scores)
    if out is not None:
        shape = (batch, s_q, h_q, fp8_mla.V_DIM)
        check_tensor("out", out, dtype=torch.bfloat16, shape=shape, device=device, align=16, unit_last_stride=True)
    if lse is not None:
        check_tensor("lse", lse, dtype=torch.float32, shape=(batch, s_q, h_q), device=device)
    if device.type != "cpu":
        require_sm90("q", device)


_decode_on_gpu = launch_or_explain(_launch, _check)


def _run(*arguments: Any) -> None:
    """The operator, for torch.compile and CPU tensors."""
    request = _Request(*arguments)
    if request.q.is_cuda:
        _decode_on_gpu(*request)
        return
    _check(*request)
    given = {name: getattr(request, name) for name in _OF_REFERENCE}
    result, result_lse = fp8_mla.reference_decode(request.q, fp8_mla.as_pages(request.kv_cache), **given)
    assert request.out is not None and request.lse is not None  # the schema requires both
    request.out.copy_(result)
    request.lse.copy_(result_lse)


_decode_into = register_op(
    "mla_fp8_decode",
    "(Tensor q, Tensor kv_cache, Tensor? indices, Tensor? topk_length, Tensor? block_table, Tensor? cache_seqlens, "
    "bool causal, float? softmax_scale, Tensor? s_aux, int? num_splits, str? exchange, str? scores, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
    _run,
    lambda *args: None,
)
