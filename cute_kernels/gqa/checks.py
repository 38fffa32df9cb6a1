"""Checks the arguments of `gqa_decode`, and finds the sizes and scale kinds that they imply."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.gqa import codes
from cute_kernels.gqa.blocks_plan import HEADS_SHARE, Strided, VirtualPages, virtual_pages
from cute_kernels.gqa.layouts import ALIGNMENT, LAYOUTS, CacheLayout, CacheSizes, ScaleKind, cache_sizes, scale_kind
from cute_kernels.gqa.plan import MAX_S_Q
from cute_kernels.gqa.request import DECODE, Request
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_given, check_tensor, fail, require
from cute_kernels.runtime.memory import MAX_HEADS

Q_DTYPES, CACHE_DTYPES, SCALE_DTYPES = (
    tuple(getattr(torch, name) for name in names) for names in (codes.DTYPES, codes.CODES, codes.SCALE_DTYPES)
)
ROTATED_DTYPES = tuple(getattr(torch, name) for name in codes.ROTATED)
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*CACHE_DTYPES, *ROTATED_DTYPES, *SCALE_DTYPES)}


def sizes_of(request: Request, layout: CacheLayout) -> CacheSizes:
    """Returns the sizes that both caches of a call agree on."""
    k_cache, v_cache = request["k_cache"], request["v_cache"]
    shapes = tuple(k_cache.shape), tuple(v_cache.shape)
    values = (codes.values_of(NAMES[cache.dtype]) for cache in (k_cache, v_cache))
    return cache_sizes(layout, *shapes, k_cache.element_size(), *values)


def capacity_of(request: Request, layout: CacheLayout, sizes: CacheSizes) -> int:
    """Returns how many tokens a sequence can have."""
    if not layout.paged:
        return sizes.rows
    assert request["block_table"] is not None  # `check` has seen it
    return sizes.rows * request["block_table"].shape[1]


def kinds_of(request: Request, layout: CacheLayout, sizes: CacheSizes) -> tuple[ScaleKind | None, ScaleKind | None]:
    """Returns the kinds of the scales of K and of V; None without scales."""
    scales = (("k_scale", request["k_scale"]), ("v_scale", request["v_scale"]))
    k, v = (None if t is None else scale_kind(name, tuple(t.shape), layout, sizes) for name, t in scales)
    return k, v


def check(request: Request) -> None:
    """Checks the arguments of a call; an error names the wrong one."""
    q, k_cache, v_cache = request["q"], request["k_cache"], request["v_cache"]
    check_tensor("q", q, dtype=Q_DTYPES, ndim=4, align=8, unit_last_stride=True)
    device = q.device
    batch, s_q, h_q, d = q.shape
    DECODE.check_options(request)
    layout = LAYOUTS[request["layout"]]
    check_tensor("k_cache", k_cache, dtype=(*CACHE_DTYPES, *ROTATED_DTYPES), device=device)
    check_kind(request["kind"], k_cache)
    v_dtype = codes.ROTATED_KINDS.get(request["kind"] or "", NAMES[k_cache.dtype])
    check_tensor("v_cache", v_cache, dtype=getattr(torch, v_dtype), device=device)
    if k_cache.element_size() == 2:
        require(
            k_cache.dtype is q.dtype,
            "k_cache",
            k_cache.dtype,
            f"q's dtype {q.dtype}, {' or '.join(codes.WIDENED)}",
            TypeError,
        )
    sizes = sizes_of(request, layout)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_rows(name, cache, layout)
    require(d == sizes.d, "q", f"head dimension {d}", f"{sizes.d}, that of the caches")
    require(1 <= s_q <= MAX_S_Q, "q", f"s_q = {s_q}", f"1 to {MAX_S_Q} query tokens")
    good = sizes.h_kv > 0 and h_q > 0 and h_q % sizes.h_kv == 0 and h_q <= MAX_HEADS
    require(good, "q", f"{h_q} heads", f"a multiple of the caches' {sizes.h_kv}, at most {MAX_HEADS}")
    _check_scales(request, layout, sizes)
    if layout.paged:
        if request["block_table"] is None or request["cache_seqlens"] is None:
            missing = "block_table" if request["block_table"] is None else "cache_seqlens"
            fail(missing, None, f"a tensor: layout {layout.name!r} is paged")
        table, shape = request["block_table"], (batch, None)
        check_tensor("block_table", table, dtype=torch.int32, shape=shape, device=device, unit_last_stride=True)
    else:
        require(request["block_table"] is None, "block_table", "a tensor", f"None: layout {layout.name!r} has no pages")
        got = f"{sizes.outer} sequences"
        require(sizes.outer == batch, "k_cache", got, f"{batch}, the batch of q")
    capacity = capacity_of(request, layout, sizes)
    require(capacity < 2**30, "k_cache", f"room for {capacity} tokens of a sequence", "fewer than 2^30")
    slopes = request["alibi_slopes"]
    per_sequence = isinstance(slopes, torch.Tensor) and slopes.dim() == 2
    per_head = {"dtype": torch.float32, "shape": (h_q,), "unit_last_stride": True}
    check_given(
        request,
        device,
        cache_seqlens={"dtype": torch.int32, "shape": (batch,)},
        cache_starts={"dtype": torch.int32, "shape": (batch,)},
        alibi_slopes={**per_head, "shape": (batch, h_q)} if per_sequence else per_head,
        s_aux=per_head,
        out={"dtype": q.dtype, "shape": tuple(q.shape), "align": 8, "unit_last_stride": True},
        lse={"dtype": torch.float32, "shape": (batch, s_q, h_q)},
    )
    if request["indices"] is not None:
        _check_indices(request, layout, sizes)
    if device.type != "cpu":
        require_sm90("q", device)
    DECODE.check_outputs(request)


def strided_of(request: Request, layout: CacheLayout, sizes: CacheSizes) -> list[Strided]:
    """Returns the caches, and those of their scales that have pages, for `virtual_pages`."""
    axes = {"k_cache": layout.key, "v_cache": layout.value}
    for name, known in zip(("k_scale", "v_scale"), kinds_of(request, layout, sizes), strict=True):
        if known is not None and layout.outer in layout.scale_axes(known.granularity):
            axes[name] = layout.scale_axes(known.granularity)
    tensors: Any = request
    return [Strided(name, own, tuple(tensors[name].shape), tensors[name].stride()) for name, own in axes.items()]


def pages_of(request: Request, layout: CacheLayout, sizes: CacheSizes) -> VirtualPages:
    """Returns the virtual pages that a block-sparse call reads."""
    indices = request["indices"]
    assert indices is not None
    tensors = strided_of(request, layout, sizes)
    return virtual_pages(layout, sizes, request["index_block"], indices.shape[2], tensors)


def _check_indices(request: Request, layout: CacheLayout, sizes: CacheSizes) -> None:
    """Checks lists of blocks, and refuses arguments that lists exclude."""
    indices, block = request["indices"], request["index_block"]
    batch, s_q = request["q"].shape[:2]
    shape = (batch, s_q, None, None)
    check_tensor("indices", indices, dtype=torch.int32, shape=shape, device=request["q"].device, unit_last_stride=True)
    assert indices is not None
    lists, n = indices.shape[2:]
    needs = f"1 or {sizes.h_kv} lists of a query token, for all KV heads or one each"
    require(lists in (1, sizes.h_kv), "indices", f"shape {tuple(indices.shape)}", needs)
    require(0 < n < 2**30 // block, "indices", f"{n} blocks of {block}", "1 or more, of fewer than 2^30 tokens")
    positions = "None with indices: the kernel does not see where a key of a list is"
    require(request["window"] is None, "window", request["window"], positions)
    require(request["alibi_slopes"] is None, "alibi_slopes", "a tensor", positions)
    require(request["cache_starts"] is None, "cache_starts", "a tensor", positions)
    if not layout.paged:
        got = f"room for {sizes.rows} tokens of a sequence"
        require(sizes.rows % block == 0, "k_cache", got, f"a multiple of index_block, {block}, with indices")
    if lists > 1:
        own = "with indices of each KV head"
        require(request["s_aux"] is None, "s_aux", "a tensor", f"None {own}")
        for name, known in zip(("k_scale", "v_scale"), kinds_of(request, layout, sizes), strict=True):
            shared = known is not None and known.granularity in HEADS_SHARE
            require(not shared, name, known and known.granularity, f"per_tensor, per_token_head or per_group {own}")
    pages_of(request, layout, sizes)


def check_kind(kind: str | None, k_cache: torch.Tensor) -> None:
    """Raises if a kind's keys have another dtype, or if keys of a dtype that needs a kind come without it."""
    if kind is not None:
        dtype = getattr(torch, codes.KINDS[kind][0])
        require(k_cache.dtype is dtype, "k_cache", k_cache.dtype, f"{dtype}, that of kind {kind!r}", TypeError)
    elif k_cache.dtype in ROTATED_DTYPES:
        known = [repr(name) for name, (k, _) in codes.KINDS.items() if k in codes.ROTATED]
        fail("k_cache", f"{k_cache.dtype} without kind", f"kind {' or '.join(known)}", TypeError)


def _check_rows(name: str, cache: torch.Tensor, layout: CacheLayout) -> None:
    """Checks what TMA requires, on a CPU too, because a call that runs there must run on a GPU."""
    if not layout.x_packed:
        check_tensor(name, cache, align=ALIGNMENT, unit_last_stride=True)
        return
    # the kernel copies a page of a head as one row of bytes
    rows = cache.as_strided((*cache.shape[:2], 1), (*cache.stride()[:2], 1))
    check_tensor(name, rows, align=ALIGNMENT)
    whole = cache.numel() == 0 or cache[0, 0].is_contiguous()
    require(whole, name, f"strides {cache.stride()}", "contiguous bytes of each page and head")


def _check_scales(request: Request, layout: CacheLayout, sizes: CacheSizes) -> None:
    k_scale, v_scale, dtype = request["k_scale"], request["v_scale"], request["k_cache"].dtype
    for name, scale, other in (("k_scale", k_scale, v_scale), ("v_scale", v_scale, k_scale)):
        if scale is None:
            known = codes.TYPES[NAMES[dtype]]
            needed = known.needs_scales or (known.widened and other is not None)
            require(not needed, name, None, f"a tensor: a cache of {dtype} has both scales")
            continue
        require(dtype.itemsize == 1, name, "a tensor", f"None: a cache of {dtype} has no scale")
        check_tensor(name, scale, dtype=SCALE_DTYPES, device=request["q"].device)
        found = scale_kind(name, tuple(scale.shape), layout, sizes)  # raises if no granularity fits, or several do
        if request["kind"] in codes.ROTATED_KINDS:
            check_tensor(name, scale, dtype=torch.float32)
            got = f"shape {tuple(scale.shape)}"
            require(found.granularity == "per_token_head", name, got, "one for each token and head")
    if k_scale is not None and v_scale is not None:
        same = k_scale.dtype is v_scale.dtype
        require(same, "v_scale", v_scale.dtype, f"{k_scale.dtype}, that of k_scale", TypeError)
