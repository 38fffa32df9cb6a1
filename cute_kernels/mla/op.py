"""`mla_fp8_decode`: launch what is prepared, prepare what is new, explain what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch

import fp8_mla
from cute_kernels.mla.checks import (
    MAX_SLOTS,
    NEEDS_KEYS,
    TENSORS,
    check_options,
    check_outputs,
    check_sizes,
    check_width,
)
from cute_kernels.mla.checks import Request as _Request
from cute_kernels.mla.checks import check as _check
from cute_kernels.mla.launch_latent import launch_latent
from cute_kernels.mla.plan import plan_decode
from cute_kernels.mla.spec import MASKED_SCALE, PARTIAL_FLOATS
from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import fail, is_finite, refuse_gradients, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, launch_or_explain
from cute_kernels.runtime.ops import is_traced, register_op
from cute_kernels.runtime.overlap import check_strides, share_storage
from fp8_mla.formats import V3_2

DEFAULT_SCALE = fp8_mla.QK_DIM**-0.5
_D_QK, _TOKEN_BYTES = fp8_mla.QK_DIM, fp8_mla.TOKEN_BYTES
_INPUTS = _Request._fields.index("out")  # of a request, before what is written
_INTS = (int, type(None))

_OF_REFERENCE = (
    "indices",
    "topk_length",
    "block_table",
    "cache_seqlens",
    "causal",
    "softmax_scale",
    "s_aux",
    "cache_format",
    "cache_layout",
    "extra_kv_cache",
    "extra_indices",
    "extra_topk_length",
    "extra_cache_format",
)


@overload
def mla_fp8_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, indices: torch.Tensor | None = ...,
    topk_length: torch.Tensor | None = ..., block_table: torch.Tensor | None = ...,
    cache_seqlens: torch.Tensor | None = ..., causal: bool = ..., softmax_scale: float | None = ...,
    s_aux: torch.Tensor | None = ..., num_splits: int | None = ..., exchange: str | None = ...,
    scores: str | None = ..., cache_format: str | None = ..., cache_layout: str | None = ...,
    extra_kv_cache: torch.Tensor | None = ..., extra_indices: torch.Tensor | None = ...,
    extra_topk_length: torch.Tensor | None = ..., extra_cache_format: str | None = ...,
    out: torch.Tensor | None = ..., lse: torch.Tensor | None = ..., return_lse: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def mla_fp8_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, indices: torch.Tensor | None = ...,
    topk_length: torch.Tensor | None = ..., block_table: torch.Tensor | None = ...,
    cache_seqlens: torch.Tensor | None = ..., causal: bool = ..., softmax_scale: float | None = ...,
    s_aux: torch.Tensor | None = ..., num_splits: int | None = ..., exchange: str | None = ...,
    scores: str | None = ..., cache_format: str | None = ..., cache_layout: str | None = ...,
    extra_kv_cache: torch.Tensor | None = ..., extra_indices: torch.Tensor | None = ...,
    extra_topk_length: torch.Tensor | None = ..., extra_cache_format: str | None = ...,
    out: torch.Tensor | None = ..., lse: torch.Tensor | None = ..., return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def mla_fp8_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, indices: torch.Tensor | None = ...,
    topk_length: torch.Tensor | None = ..., block_table: torch.Tensor | None = ...,
    cache_seqlens: torch.Tensor | None = ..., causal: bool = ..., softmax_scale: float | None = ...,
    s_aux: torch.Tensor | None = ..., num_splits: int | None = ..., exchange: str | None = ...,
    scores: str | None = ..., cache_format: str | None = ..., cache_layout: str | None = ...,
    extra_kv_cache: torch.Tensor | None = ..., extra_indices: torch.Tensor | None = ...,
    extra_topk_length: torch.Tensor | None = ..., extra_cache_format: str | None = ...,
    out: torch.Tensor | None = ..., lse: torch.Tensor | None = ..., return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
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
    cache_format: str | None = None,
    cache_layout: str | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_cache_format: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention of a few query tokens over a paged cache of quantized tokens, sparse or dense.

    The attention is DeepSeek's absorbed form: all heads share one key of d_qk elements, 576 or 512, whose first 512 are
    also the value. docs/users/formats.md has the formats of a token; scales are used as they are.

    A sparse call may have two caches, such as a window and a compressed one: one softmax goes over the keys that
    `indices` names in `kv_cache` and those that `extra_indices` names in `extra_kv_cache`.

    Runs on the current stream, captures into a CUDA graph after one eager call with the same shapes, and traces under
    torch.compile. CPU tensors run the reference, which computes in float64.

    Args:
        q: (batch, s_q, h_q, d_qk) bfloat16, 1 <= h_q <= 128, s_q >= 1. Rows contiguous and 16-byte aligned. d_qk is 576
            for "v3.2", 512 for the other formats.
        kv_cache: (num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes), uint8 or float8_e4m3fn, any page
            size. Rows contiguous and 16-byte aligned; pages may be strided. Of a planar cache only the address, the
            shape and the distance of two pages count, a multiple of 16 bytes: each page has all its data rows, then all
            its scale rows.
        indices: sparse: (batch, s_q, topk) int32, each ``page * page_size + offset``. Indices outside of the cache are
            masked, at any position.
        topk_length: (batch,) or (batch, s_q) int32: only that many leading indices count. Negative counts as 0.
        block_table: dense: (batch, max_pages) int32. Entries past a sequence's last page may be anything; the keys of a
            page that does not exist are masked.
        cache_seqlens: dense: (batch,) int32, tokens. Negative counts as 0; a length past the block table's capacity
            counts as that capacity.
        causal: dense, s_q > 1: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys.
        softmax_scale: default d_qk ** -0.5.
        s_aux: (h_q,) float32, a logit per head in natural-log units that joins the softmax denominator alone.
        num_splits: splits of each query's keys, one CTA each; default: planned from the shapes. A plan for several
            queries with lengths is a balanced schedule instead: each CTA gets an equal share of all their keys.
        exchange: what two CTAs with 64 heads each send each other of every key that one of them has gathered: "codes",
            its 656 bytes; "values", 16-bit numbers; or "none": each CTA gathers all keys. Default: planned. With more
            than 64 heads and a given number of splits, results are equal bit for bit.
        scores: "exact", which is the default: S = Q K^T is a float32 sum of exact products; the log-sum-exp is within
            2e-5, and within 7e-5 where a few channels are 20 times the others.
        cache_format: "v3.2", "v3.2_nope", "v4", "v4.1" or "v4.1_fp4". Default: "v3.2" for 656 bytes a token with 576
            columns of q, "v3.2_nope" with 512; "v4" for 584; "v4.1_fp4" for 288. 528 bytes need it: "v3.2_nope" and
            "v4.1" both have as many.
        cache_layout: "planar" or "interleaved", for both caches: "v4.1" and "v4.1_fp4" exist in both, with the same
            shapes. Default: planar. "v4" is planar, "v3.2" and "v3.2_nope" are interleaved.
        extra_kv_cache: a second cache, as `kv_cache`, with a page size of its own. Pairs of formats: one format twice,
            or ("v4.1", "v4.1_fp4"); not "v4.1_fp4" twice.
        extra_indices: (batch, s_q, extra_topk) int32, as `indices`: slots of the second cache.
        extra_topk_length: as `topk_length`, for `extra_indices`.
        extra_cache_format: as `cache_format`. Default: what pairs with the first and has as many bytes.
        out: (batch, s_q, h_q, 512) bfloat16 to write to; rows contiguous and 16-byte aligned. It may be q itself where
            q has 512 columns.
        lse: (batch, s_q, h_q) float32 to write to. Neither shares memory with another argument otherwise.
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
            "mla_fp8_decode", TENSORS, q, kv_cache, indices, topk_length, block_table, cache_seqlens, s_aux, out, lse,
            extra_kv_cache, extra_indices, extra_topk_length,
        )  # fmt: skip
    arguments = (
        q, kv_cache, indices, topk_length, block_table, cache_seqlens, causal, softmax_scale, s_aux, num_splits,
        exchange, scores, cache_format, cache_layout, extra_kv_cache, extra_indices, extra_topk_length,
        extra_cache_format,
    )  # fmt: skip
    if isinstance(q, torch.Tensor) and q.is_cuda and not is_traced():
        out, lse = _decode_on_gpu(*arguments, out, lse, False, return_lse)
    else:
        out, lse = _decode_by_operator(_Request(*arguments, out, lse))
    return (out, lse) if return_lse else out


def decode_request(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_fp8_decode` for adapters of this package, which may ask for `inf_if_empty`.

    Args:
        arguments: fields of a `Request` by name: the arguments of `mla_fp8_decode`, and `inf_if_empty`.

    Returns:
        out and lse, as of `mla_fp8_decode`; with `inf_if_empty` lse of a query without keys is +inf.

    Raises:
        TypeError, ValueError: as `mla_fp8_decode`.
    """
    request = _Request(**arguments)
    if torch.is_grad_enabled():
        refuse_gradients("mla_fp8_decode", TENSORS, *(getattr(request, name) for name in TENSORS))
    if isinstance(request.q, torch.Tensor) and request.q.is_cuda and not is_traced():
        return _decode_on_gpu(*request)
    return _decode_by_operator(request)


def _decode_by_operator(request: _Request) -> tuple[torch.Tensor, torch.Tensor]:
    """A call that torch.compile traces, or one on a CPU."""
    q, out, lse = request.q, request.out, request.lse
    if not isinstance(q, torch.Tensor) or q.is_nested or q.dim() != 4:
        _check(*request)
    if out is None:
        out = q.new_empty((*q.shape[:3], fp8_mla.V_DIM), dtype=torch.bfloat16)
    if lse is None:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _decode_into(*request[:_INPUTS], out, lse, request.inf_if_empty)
    return out, lse


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
    out_like: torch.Tensor  # a template
    unread_lse: torch.Tensor  # for callers that want no lse


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def _launch(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches for the arguments of a `_Request`, or raises before any launch."""
    (
        q, pages, indices, topk_length, block_table, cache_seqlens, causal, softmax_scale, s_aux, num_splits, exchange,
        scores, cache_format, cache_layout, extra_cache, extra_indices, extra_topk_length, extra_format, out, lse,
        inf_if_empty, return_lse,
    ) = arguments  # fmt: skip
    # a kernel takes True for 1, and 1.0 finds the launch that 1 prepared
    if not (
        type(num_splits) in _INTS
        and type(causal) is bool
        and (softmax_scale is None or (type(softmax_scale) is float and is_finite(softmax_scale)))
    ):
        check_options(causal, softmax_scale, num_splits, exchange, scores)
    batch, s_q, h_q, d_qk = q.shape
    if pages.dtype is not torch.uint8:
        if pages.dtype is not torch.float8_e4m3fn:
            fail("kv_cache", pages.dtype, "uint8 or float8_e4m3fn", TypeError)
        pages = pages.view(torch.uint8)
    if pages.dim() == 4:
        pages = pages.squeeze(2)
    num_pages, page_size, token_bytes = pages.shape
    # one chain of comparisons for the usual call: a name costs 20 ns
    usual = cache_format is cache_layout is extra_cache is extra_indices is extra_topk_length is extra_format is None
    if d_qk != _D_QK or token_bytes != _TOKEN_BYTES or not (usual or _is_v3_2_alone(*arguments[12:18])):
        return launch_latent(_Request(*arguments))
    if not page_size or num_pages * page_size >= MAX_SLOTS:
        fail("kv_cache", f"{num_pages} pages of {page_size}", "slots that 31 bits count")
    sparse = indices is not None
    index = indices if sparse else block_table
    if index is None or sparse != (cache_seqlens is None) or (block_table if sparse else topk_length) is not None:
        fail("indices", "neither or both kinds of arguments", NEEDS_KEYS)
    device = q.get_device()
    given_length = topk_length if sparse else cache_seqlens
    ragged = given_length is not None
    key = (
        device, sparse, batch, s_q, h_q, index.shape[-1], num_pages > 0, page_size, ragged, num_splits, exchange,
        scores, inf_if_empty,
        None if out is None or out.is_contiguous() else out.stride(),
        None if lse is None or lse.is_contiguous() else (lse.stride(), lse.is_neg()),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(*key)
    if (out is not None or lse is not None) and share_storage(
        out, lse, (None if out is q else q, pages, index, given_length, s_aux)
    ):
        check_outputs(_Request(*arguments))
    if out is None:
        out = memory.empty_like(prepared.out_like)
    if lse is None:
        lse = memory.empty_like(prepared.unread_lse) if return_lse else prepared.unread_lse
    if prepared.kernel is None:
        _check(*arguments)
        out.zero_()
        lse.fill_(torch.inf if inf_if_empty else -torch.inf)
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


def _is_v3_2_alone(cache_format: str | None, cache_layout: str | None, *extra: Any) -> bool:
    """Whether a call that names a format, a layout or a second cache is still one over a single cache of V3.2."""
    named = cache_format is None or cache_format == V3_2.name
    laid_out = cache_layout is None or cache_layout == "interleaved"
    return named and laid_out and all(argument is None for argument in extra)


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
    inf_if_empty: bool,
    out_stride: tuple[int, ...] | None,
    lse_view: tuple[tuple[int, ...], bool] | None,
) -> PreparedLaunch:
    """Plans a call and loads its kernel; the arguments are the key that `_launch` looks up."""
    device = torch.device("cuda", device_index)
    require_sm90("q", device)
    check_sizes(s_q, h_q)
    check_options(True, None, num_splits, exchange, scores)
    rows = (batch, s_q, h_q)
    if out_stride is not None:
        check_strides("out", (*rows, fp8_mla.V_DIM), out_stride)
    if lse_view is not None:
        check_strides("lse", rows, lse_view[0])
        require(not lse_view[1], "lse", "a view with its neg bit set", "lse.resolve_neg()")
    check_width(sparse, width, page_size)
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
            inf_if_empty=inf_if_empty,
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
        memory.template((batch, s_q, h_q, fp8_mla.V_DIM), torch.bfloat16, device),
        memory.unread((batch, s_q, h_q), device),
    )
    key = (
        device_index, sparse, batch, s_q, h_q, width, any_page, page_size, ragged, num_splits, exchange, scores,
        inf_if_empty, out_stride, lse_view,
    )  # fmt: skip
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


_decode_on_gpu = launch_or_explain(_launch, _check, _Request._fields)


def _run(*arguments: Any) -> None:
    """The operator, for torch.compile and CPU tensors."""
    request = _Request(*arguments)
    if request.q.is_cuda:
        _decode_on_gpu(*request)
        return
    _check(*request)
    given = {name: getattr(request, name) for name in _OF_REFERENCE}
    result, result_lse = fp8_mla.reference_decode(request.q, request.kv_cache, **given)
    assert request.out is not None and request.lse is not None  # the schema requires both
    request.out.copy_(result)
    request.lse.copy_(result_lse)
    if request.inf_if_empty:
        request.lse.masked_fill_(request.lse == -torch.inf, torch.inf)


_decode_into = register_op(
    "mla_fp8_decode",
    "(Tensor q, Tensor kv_cache, Tensor? indices, Tensor? topk_length, Tensor? block_table, Tensor? cache_seqlens, "
    "bool causal, float? softmax_scale, Tensor? s_aux, int? num_splits, str? exchange, str? scores, "
    "str? cache_format, str? cache_layout, Tensor? extra_kv_cache, Tensor? extra_indices, Tensor? extra_topk_length, "
    "str? extra_cache_format, "
    "Tensor(a!) out, Tensor(b!) lse, bool inf_if_empty=False) -> ()",
    _run,
    lambda *args: None,
)
