"""`gqa_decode`: launch what is prepared, prepare what is new, explain what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch

from cute_kernels.gqa.layouts import ALIGNMENT, LAYOUTS, CacheLayout, CacheSizes, ScaleKind, cache_sizes, scale_kind
from cute_kernels.gqa.plan import MAX_S_Q, SOFTCAPS, choose_spec, kernel_softcap, plan_decode
from cute_kernels.gqa.reference import reference_gqa_decode
from cute_kernels.gqa.spec import ITEMSIZE, MAX_RANGES, GqaDecodeSpec
from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import (
    check_flag,
    check_int,
    check_number,
    check_tensor,
    fail,
    is_finite,
    refuse_gradients,
    require,
)
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, launch_or_explain
from cute_kernels.runtime.memory import MAX_HEADS
from cute_kernels.runtime.ops import is_traced, register_op
from cute_kernels.runtime.overlap import check_written, share_storage

NO_WINDOW = 2**30
"""Wider than any cache, and far enough from 2^31 for differences."""
Q_DTYPES = (torch.bfloat16, torch.float16)
CACHE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
SCALE_DTYPES = (torch.float16, torch.float32)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*CACHE_DTYPES, torch.float32)}

_INTS, _INF, _INT_END = (int, type(None)), float("inf"), 2**63
_TENSORS = (
    "q", "k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens", "block_table", "alibi_slopes", "s_aux", "out",
    "lse",
)  # fmt: skip


class _Request(NamedTuple):
    """The arguments of one call, those of the operator first, in its order. `return_lse` is an eager call's."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    layout: str
    cache_seqlens: torch.Tensor | None
    block_table: torch.Tensor | None
    causal: bool
    window: int | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    s_aux: torch.Tensor | None
    softmax_scale: float | None
    num_splits: int | None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = True


@overload
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., *, layout: str = ..., cache_seqlens: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ..., causal: bool = ..., window: int | None = ..., softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ..., s_aux: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    num_splits: int | None = ..., out: torch.Tensor | None = ..., lse: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., *, layout: str = ..., cache_seqlens: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ..., causal: bool = ..., window: int | None = ..., softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ..., s_aux: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    num_splits: int | None = ..., out: torch.Tensor | None = ..., lse: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., *, layout: str = ..., cache_seqlens: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ..., causal: bool = ..., window: int | None = ..., softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ..., s_aux: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    num_splits: int | None = ..., out: torch.Tensor | None = ..., lse: torch.Tensor | None = ...,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    layout: str = "BNSH",
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one to eight query tokens over a KV cache of int8, FP8 or 16-bit elements; MHA, GQA and MQA.

    Query head h reads head ``h // (h_q // h_kv)`` of the cache. The queries are the last tokens of their sequence:
    query j is at position ``cache_seqlens - s_q + j``.

    Runs on the current stream, captures into a CUDA graph after one eager call with the same shapes (lengths and tables
    may change between replays), and traces under torch.compile. CPU tensors run the reference, which computes in
    float64.

    Args:
        q: (batch, s_q, h_q, d) bfloat16 or float16, 1 <= s_q <= 8, d 64, 128 or 256, h_q a multiple of h_kv. Rows
            contiguous and 8-byte aligned.
        k_cache: int8, float8_e4m3fn, or q's dtype, as `layout` says; rows contiguous, all strides multiples of 16
            bytes.
        v_cache: the same dtype and sizes.
        k_scale: the factors of k_cache's elements: float16 or float32, of one of these shapes:
            per_tensor () or (1,); per_head (h_kv,); per_token, the cache's shape without heads and d; per_token_head,
            the cache's shape without d; per_group, the cache's shape with d / 32 or d / 64 instead of d. In paged_vllm
            these are (pages, page_size), (pages, h_kv, page_size) and (pages, h_kv, groups, page_size). Required with
            int8; optional, both or none, with float8_e4m3fn; None with 16-bit caches.
        v_scale: k_scale's dtype, of any granularity.
        layout: "BNSH" (batch, h_kv, s, d) · "BSNH" (batch, s, h_kv, d) · "paged_NHD" (pages, page_size, h_kv, d) ·
            "paged_HND" (pages, h_kv, page_size, d), page sizes powers of two · "paged_vllm" K (pages, h_kv, d / x,
            page_size, x) with x = 16 bytes, V (pages, h_kv, d, page_size), page sizes 8, 16, 32.
        cache_seqlens: (batch,) int32, tokens, those of the queries included; default: all of a contiguous cache.
            Negative counts as 0; a length past the cache's capacity counts as that capacity.
        block_table: (batch, max_pages) int32, with paged layouts. Entries past a sequence's last page may be anything;
            the keys of a page that does not exist are masked.
        causal: a query does not see tokens after its own.
        window: a query sees at most so many tokens, its own included; tiles outside of every window are not read.
        softcap: c > 0, finite: scores become ``c * tanh(score / c)``, to float32 rounding whatever c is.
        alibi_slopes: (h_q,) or (batch, h_q) float32; ``slope * (key - own position)`` is added to scores.
        s_aux: (h_q,) float32, a logit per head in natural-log units that joins the softmax denominator alone.
        softmax_scale: default d ** -0.5.
        num_splits: splits of each sequence; default: planned over the whole batch.
        out: (batch, s_q, h_q, d), q's dtype, to write to; rows contiguous and 8-byte aligned. It may be q itself.
        lse: (batch, s_q, h_q) float32 to write to. Neither shares memory with another argument otherwise.
        return_lse: also return the log-sum-exp.

    Returns:
        out (batch, s_q, h_q, d) of q's dtype; with `return_lse` also lse (batch, s_q, h_q) float32, natural log,
        without the sink. A query without keys has out 0 and lse -inf. Tokens that a query does not see, NaN included,
        change neither; an infinity in values or scales may become NaN for queries that see it.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what it got and what it needs.
            Also if gradients are enabled and a tensor requires them: there is no backward.
    """
    if torch.is_grad_enabled():
        refuse_gradients(
            "gqa_decode", _TENSORS, q, k_cache, v_cache, k_scale, v_scale, cache_seqlens, block_table, alibi_slopes,
            s_aux, out, lse,
        )  # fmt: skip
    arguments = (
        q, k_cache, v_cache, k_scale, v_scale, layout, cache_seqlens, block_table, causal, window, softcap,
        alibi_slopes, s_aux, softmax_scale, num_splits,
    )  # fmt: skip
    if isinstance(q, torch.Tensor) and q.is_cuda and not is_traced():
        out, lse = _decode_on_gpu(*arguments, out, lse, return_lse)
        return (out, lse) if return_lse else out
    if not isinstance(q, torch.Tensor) or q.is_nested or q.dim() != 4:
        _check(*arguments, out, lse)
    if out is None:
        out = q.new_empty(q.shape)
    if lse is None:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _decode_into(*arguments, out, lse)
    return (out, lse) if return_lse else out


def check_decode(**arguments: Any) -> None:
    """Raises what `gqa_decode` would, for adapters of this package that write to a cache before they call it.

    Args:
        arguments: of `gqa_decode` by name, but `return_lse`.
    """
    if torch.is_grad_enabled():
        refuse_gradients("gqa_decode", _TENSORS, *(arguments.get(name) for name in _TENSORS))
    _check(*_Request(**{**dict.fromkeys(_Request._fields[:-1]), **arguments}))


class PreparedLaunch(NamedTuple):
    """All that stays the same while the shapes of a call do. `kernel` is None if there is no key."""

    kernel: Callable[..., Any] | None
    paged: bool
    ranges: int
    splits: int
    ctas: int
    k_strides: tuple[int, int, int, int]  # outer, head, row, group; in elements
    v_strides: tuple[int, int, int, int]
    alibi_batch: int
    default_scale: float
    need: workspace.Need
    no_sink: torch.Tensor
    no_length: torch.Tensor
    unread_lse: torch.Tensor  # for callers that want no lse


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def _signature(t: torch.Tensor | None) -> tuple[Any, ...] | None:
    """The facts that a compiled kernel does not check of a tensor that it gets as an address."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg())


def _launch(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches for the arguments of a `_Request`, or raises before any launch."""
    (
        q, k_cache, v_cache, k_scale, v_scale, layout, cache_seqlens, block_table, causal, window, softcap,
        alibi_slopes, s_aux, softmax_scale, num_splits, out, lse, return_lse,
    ) = arguments  # fmt: skip
    # a kernel takes True for 1, and 1.0 finds the launch that 1 prepared
    if not (
        (window is None or (type(window) is int and 0 < window < _INT_END))
        and type(num_splits) in _INTS
        and type(causal) is bool
        and (softmax_scale is None or (type(softmax_scale) is float and is_finite(softmax_scale)))
        and (softcap is None or (type(softcap) is float and 0 < softcap < _INF))
    ):
        _check_numbers(_Request(*arguments))
    key = (
        q.shape, q.dtype, k_cache.shape, k_cache.dtype, layout, _signature(k_scale), _signature(v_scale),
        None if block_table is None else block_table.shape[-1], softcap is None, _signature(alibi_slopes), num_splits,
        q.get_device(),
        None if out is None or out.is_contiguous() else out.stride(),
        None if lse is None or lse.is_contiguous() else (lse.stride(), lse.is_neg()),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, _Request(*arguments))
    if (out is not None or lse is not None) and share_storage(
        out,
        lse,
        (None if out is q else q, k_cache, v_cache, k_scale, v_scale, cache_seqlens, block_table, alibi_slopes, s_aux),
    ):
        _check_outputs(_Request(*arguments))
    if out is None:
        out = memory.empty_like(q)
    if lse is None:
        lse = memory.empty_like(prepared.unread_lse) if return_lse else prepared.unread_lse
    if prepared.kernel is None:
        _check(*arguments)
        out.zero_()
        lse.fill_(-torch.inf)
        return out, lse
    lengths = prepared.no_length if cache_seqlens is None else cache_seqlens
    # the compiled kernel takes unsigned integers for signed ones
    if lengths.dtype is not torch.int32 or (block_table is not None and block_table.dtype is not torch.int32):
        fail("cache_seqlens", lengths.dtype, "int32", TypeError)
    if v_cache.dtype is not k_cache.dtype or (block_table is None) != (prepared.paged is False):
        fail("v_cache", v_cache.dtype, "k_cache's")
    if prepared.paged and cache_seqlens is None:
        fail("cache_seqlens", None, "lengths")
    if softcap is not None and not softcap > 0:
        fail("softcap", softcap, "a positive number")
    scratch, counters = workspace.addresses(prepared.need)
    prepared.kernel(  # on the current stream of the tensors' device
        q,
        k_cache,
        v_cache,
        block_table,
        lengths,
        prepared.no_sink if s_aux is None else s_aux,
        out,
        lse,
        0 if k_scale is None else k_scale.data_ptr(),
        *prepared.k_strides,
        0 if v_scale is None else v_scale.data_ptr(),
        *prepared.v_strides,
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        prepared.alibi_batch,
        prepared.default_scale if softmax_scale is None else softmax_scale,
        1.0 if softcap is None else kernel_softcap(softcap),
        NO_WINDOW if window is None else min(window, NO_WINDOW),
        1 if causal else 0,
        prepared.ranges,
        prepared.splits,
        prepared.ctas,
        scratch,
        counters,
    )
    return out, lse


def _prepare(key: tuple[Any, ...], request: _Request) -> PreparedLaunch:
    """Plans a call and loads its kernel, after all checks."""
    _check(*request)
    q = request.q
    layout = LAYOUTS[request.layout]
    sizes = _sizes(request, layout)
    kinds = _kinds(request, layout, sizes)
    batch, s_q, h_q, d = q.shape
    device = q.device
    constants = memory.constants(device)
    spec = decode_spec(request, constants.num_sms)
    capacity = _capacity(request, layout, sizes)
    kernel, size, counters, plan = None, 0, 0, None
    if batch and capacity and sizes.outer:
        plan = plan_decode(
            spec,
            batch=batch,
            h_kv=sizes.h_kv,
            rows=h_q // sizes.h_kv * s_q,
            max_keys=capacity,
            num_sms=constants.num_sms,
            num_splits=request.num_splits,
        )
        kernel, size, counters = get_kernel(spec), plan.states * plan.state_floats, plan.counters
    slopes = request.alibi_slopes
    prepared = PreparedLaunch(
        kernel,
        layout.paged,
        plan.ranges if plan else 1,
        plan.splits if plan else 0,
        plan.ctas if plan else 1,
        _scale_strides(request.k_scale, kinds[0], layout),
        _scale_strides(request.v_scale, kinds[1], layout),
        slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        d**-0.5,
        workspace.reserve(device, size, counters if size else 0),
        constants.no_sink[:h_q],
        constants.no_length.expand(batch),
        memory.unread((batch, s_q, h_q), device),
    )
    return _prepared.keep(key, prepared, device)


def decode_spec(request: _Request, num_sms: int = 132) -> GqaDecodeSpec:
    """The kernel for checked arguments."""
    layout = LAYOUTS[request.layout]
    sizes = _sizes(request, layout)
    batch, s_q, h_q, _ = request.q.shape
    scale = request.k_scale
    return choose_spec(
        layout,
        sizes,
        q_shape=(batch, s_q, h_q),
        q_dtype=_NAMES[request.q.dtype],
        kv_dtype=_NAMES[request.k_cache.dtype],
        kinds=_kinds(request, layout, sizes),
        scale_dtype="float32" if scale is None else _NAMES[scale.dtype],
        max_keys=_capacity(request, layout, sizes),
        num_sms=num_sms,
        num_splits=request.num_splits,
        alibi=request.alibi_slopes is not None,
        softcap=request.softcap is not None,
    )


def _scale_strides(
    scale: torch.Tensor | None, kind: ScaleKind | None, layout: CacheLayout
) -> tuple[int, int, int, int]:
    """Strides of (outer, head, row, group); 0 along axes that share a scale."""
    if scale is None or kind is None or kind.granularity == "per_tensor":
        return (0, 0, 0, 0)
    stride = dict(zip(layout.scale_axes(kind.granularity), scale.stride(), strict=True))
    return stride.get(layout.outer, 0), stride.get("h", 0), stride.get(layout.rows, 0), stride.get("g", 0)


def _sizes(request: _Request, layout: CacheLayout) -> CacheSizes:
    itemsize = ITEMSIZE[_NAMES[request.k_cache.dtype]]
    return cache_sizes(layout, tuple(request.k_cache.shape), tuple(request.v_cache.shape), itemsize)


def _capacity(request: _Request, layout: CacheLayout, sizes: CacheSizes) -> int:
    """Tokens that a sequence can have."""
    if not layout.paged:
        return sizes.rows
    assert request.block_table is not None  # `_check` has seen it
    return sizes.rows * request.block_table.shape[1]


def _kinds(request: _Request, layout: CacheLayout, sizes: CacheSizes) -> tuple[ScaleKind | None, ScaleKind | None]:
    scales = (("k_scale", request.k_scale), ("v_scale", request.v_scale))
    k, v = (None if t is None else scale_kind(name, tuple(t.shape), layout, sizes) for name, t in scales)
    return k, v


def _check(*arguments: Any) -> None:
    """Raises what is wrong with the arguments of a `_Request`, by name."""
    request = _Request(*arguments)
    q, k_cache, v_cache, out, lse = request.q, request.k_cache, request.v_cache, request.out, request.lse
    check_tensor("q", q, dtype=Q_DTYPES, ndim=4, align=8, unit_last_stride=True)
    device = q.device
    batch, s_q, h_q, d = q.shape
    if not isinstance(request.layout, str) or request.layout not in LAYOUTS:
        fail("layout", repr(request.layout), f"one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[request.layout]
    check_tensor("k_cache", k_cache, dtype=CACHE_DTYPES, device=device)
    check_tensor("v_cache", v_cache, dtype=k_cache.dtype, device=device)
    if k_cache.element_size() == 2:
        require(
            k_cache.dtype is q.dtype, "k_cache", k_cache.dtype, f"q's dtype {q.dtype}, int8 or float8_e4m3fn", TypeError
        )
    sizes = _sizes(request, layout)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_rows(name, cache, layout)
    require(d == sizes.d, "q", f"head dimension {d}", f"{sizes.d}, that of the caches")
    require(1 <= s_q <= MAX_S_Q, "q", f"s_q = {s_q}", f"1 to {MAX_S_Q} query tokens")
    good = sizes.h_kv > 0 and h_q > 0 and h_q % sizes.h_kv == 0 and h_q <= MAX_HEADS
    require(good, "q", f"{h_q} heads", f"a multiple of the caches' {sizes.h_kv}, at most {MAX_HEADS}")
    _check_scales(request, layout, sizes)
    if layout.paged:
        if request.block_table is None or request.cache_seqlens is None:
            missing = "block_table" if request.block_table is None else "cache_seqlens"
            fail(missing, None, f"a tensor: layout {layout.name!r} is paged")
        table, shape = request.block_table, (batch, None)
        check_tensor("block_table", table, dtype=torch.int32, shape=shape, device=device, unit_last_stride=True)
    else:
        require(request.block_table is None, "block_table", "a tensor", f"None: layout {layout.name!r} has no pages")
        got = f"{sizes.outer} sequences"
        require(sizes.outer == batch, "k_cache", got, f"{batch}, the batch of q")
    capacity = _capacity(request, layout, sizes)
    require(capacity < 2**30, "k_cache", f"room for {capacity} tokens of a sequence", "fewer than 2^30")
    if request.cache_seqlens is not None:
        check_tensor("cache_seqlens", request.cache_seqlens, dtype=torch.int32, shape=(batch,), device=device)
    _check_numbers(request)
    if request.alibi_slopes is not None:
        slopes = request.alibi_slopes
        per_sequence = isinstance(slopes, torch.Tensor) and slopes.dim() == 2
        slopes_shape = (batch, h_q) if per_sequence else (h_q,)
        check_tensor(
            "alibi_slopes", slopes, dtype=torch.float32, shape=slopes_shape, device=device, unit_last_stride=True
        )
    if request.s_aux is not None:
        check_tensor("s_aux", request.s_aux, dtype=torch.float32, shape=(h_q,), device=device, unit_last_stride=True)
    if out is not None:
        check_tensor("out", out, dtype=q.dtype, shape=tuple(q.shape), device=device, align=8, unit_last_stride=True)
    if lse is not None:
        check_tensor("lse", lse, dtype=torch.float32, shape=(batch, s_q, h_q), device=device)
    if device.type != "cpu":
        require_sm90("q", device)
    _check_outputs(request)


def _check_outputs(request: _Request) -> None:
    """Raises where the memory of an output is also another argument's. Only `out is q` may be, row for row."""
    outputs = {"out": request.out, "lse": request.lse}
    inputs = {name: getattr(request, name) for name in _TENSORS if name not in outputs}
    check_written(outputs, inputs, in_place=("out", "q"))


def _check_rows(name: str, cache: torch.Tensor, layout: CacheLayout) -> None:
    """What TMA asks for, on a CPU too: what runs there must run on a GPU."""
    if not layout.packed:
        check_tensor(name, cache, align=ALIGNMENT, unit_last_stride=True)
        return
    # the kernel copies a page of a head as one row of bytes
    rows = cache.as_strided((*cache.shape[:2], 1), (*cache.stride()[:2], 1))
    check_tensor(name, rows, align=ALIGNMENT)
    whole = cache.numel() == 0 or cache[0, 0].is_contiguous()
    require(whole, name, f"strides {cache.stride()}", "contiguous bytes of each page and head")


def _check_scales(request: _Request, layout: CacheLayout, sizes: CacheSizes) -> None:
    scales = {"k_scale": request.k_scale, "v_scale": request.v_scale}
    dtype = request.k_cache.dtype
    for name, scale in scales.items():
        if scale is None:
            other = next(s for n, s in scales.items() if n != name)
            needed = dtype is torch.int8 or (dtype is torch.float8_e4m3fn and other is not None)
            require(not needed, name, None, f"a tensor: a cache of {dtype} has both scales")
            continue
        require(dtype.itemsize == 1, name, "a tensor", f"None: a cache of {dtype} has no scale")
        check_tensor(name, scale, dtype=SCALE_DTYPES, device=request.q.device)
        scale_kind(name, tuple(scale.shape), layout, sizes)  # raises where no granularity fits, or several
    if request.k_scale is not None and request.v_scale is not None:
        same = request.k_scale.dtype is request.v_scale.dtype
        require(same, "v_scale", request.v_scale.dtype, f"{request.k_scale.dtype}, that of k_scale", TypeError)


def _check_numbers(request: _Request) -> None:
    check_flag("causal", request.causal)
    if request.window is not None:
        check_int("window", request.window, 1, needs="at least 1, or None for no window")
    if request.num_splits is not None:
        needs = f"1 to {MAX_RANGES}, or None to have it planned"
        check_int("num_splits", request.num_splits, 1, MAX_RANGES, needs=needs)
    if request.softmax_scale is not None:
        check_number("softmax_scale", request.softmax_scale)
    if request.softcap is not None:
        check_number(
            "softcap", min(request.softcap, SOFTCAPS[1]) if type(request.softcap) is float else request.softcap
        )
        is_cap = 0 < request.softcap < float("inf")
        require(is_cap, "softcap", request.softcap, "a positive finite number, or None for no cap")


_decode_on_gpu = launch_or_explain(_launch, _check, _Request._fields)


def _run(*arguments: Any) -> None:
    """The operator, for torch.compile and CPU tensors."""
    request = _Request(*arguments)
    if request.q.is_cuda:
        _decode_on_gpu(*request)
        return
    _check(*request)
    given = request._asdict()
    for name in ("num_splits", "out", "lse", "return_lse"):
        del given[name]
    result, result_lse = reference_gqa_decode(**given)
    assert request.out is not None and request.lse is not None  # the schema requires both
    request.out.copy_(result)
    request.lse.copy_(result_lse)


_decode_into = register_op(
    "gqa_decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale, str layout, Tensor? cache_seqlens, "
    "Tensor? block_table, bool causal, int? window, float? softcap, Tensor? alibi_slopes, Tensor? s_aux, "
    "float? softmax_scale, int? num_splits, Tensor(a!) out, Tensor(b!) lse) -> ()",
    _run,
    lambda *args: None,
)
