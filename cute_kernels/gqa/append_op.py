"""`kv_append` and `kv_int8_append` quantize new keys and values and write them to their slots of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.gqa.append_spec import KvAppendSpec, sharing
from cute_kernels.gqa.checks import NAMES, Q_DTYPES, SCALE_DTYPES
from cute_kernels.gqa.codes import INT8, KINDS, values_of
from cute_kernels.gqa.layouts import ALIGNMENT, LAYOUTS, CacheLayout, ScaleKind, scale_kind, token_major
from cute_kernels.gqa.reference import reference_append, sizes_of
from cute_kernels.gqa.request import APPEND, INT8_APPEND, AppendRequest
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import MAX_PREPARED, PreparedLaunches, by_name, do_nothing, launch_or_explain
from cute_kernels.runtime.overlap import check_written, holds


@APPEND.describe
def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: str,
    kind: str,
) -> None:
    """Quantize keys and values and store each token in its slot of the caches, in place and in one launch.

    | kind | K | V |
    |---|---|---|
    | "int8" | int8, as `kv_int8_append` | int8 |
    | "fp8_per_token_head" | e4m3 of x / scale, scale absmax / 448 | the same |
    | "int8_k_int4_v" | int8, a scale per token and head | 4-bit codes of the vector rotated, in pairs |
    | "int4" | 4-bit codes of the vector rotated, in pairs | the same |

    `cute_kernels.gqa.reference` defines the rules, `quantize`, `quantize_e4m3` and `quantize_rotated`; the stored bytes
    are equal. CPU tensors are quantized by plain torch. `cute_kernels.gqa.request` has the arguments.

    Raises:
        TypeError, ValueError: as `kv_int8_append`; also a kind that is not known, or whose caches and scales differ.
    """
    request: AppendRequest = {
        "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale,
        "slot_mapping": slot_mapping, "layout": layout, "kind": kind,
    }  # fmt: skip
    if torch.is_grad_enabled():
        APPEND.refuse_gradients(request)
    _append(request)


@INT8_APPEND.describe
def kv_int8_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: str,
) -> None:
    """Quantize keys and values to INT8 and store each token in its slot of the caches, in place and in one launch.

    Codes are symmetric: ``x / scale`` in float32, rounded half to even, within [-127, 127]. A scale is absmax / 127 of
    the elements that share it, at least 2^-126 (float32) or 2^-14 (float16), rounded to its dtype; it is 1 for zeros.
    NaN counts as 0, Inf as the largest number of its dtype. `cute_kernels.gqa.reference.quantize` defines the rule; the
    stored bytes are equal. CPU tensors are quantized by plain torch. `cute_kernels.gqa.request` has the arguments.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment, device or the name of the layout does not fit, a scale's shape fits no
            granularity or several, the GPU is not an SM90, or a tensor requires gradients while they are enabled: there
            is no backward.
    """
    request: AppendRequest = {
        "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale,
        "slot_mapping": slot_mapping, "layout": layout, "kind": INT8,
    }  # fmt: skip
    if torch.is_grad_enabled():
        INT8_APPEND.refuse_gradients(request)
    _append_int8(request)


def stored_rows(kind: str, d: int) -> list[tuple[torch.dtype, int]]:
    """Returns dtype and size of a row of k_cache and of v_cache, for d values."""
    return [(getattr(torch, name), d // values_of(name)) for name in KINDS[kind]]


class PreparedLaunch(NamedTuple):
    """A compiled kernel, and the facts about its arguments that the layout decides.

    launch  the kernel, called by name
    views   axes in which the kernel gets k_cache, v_cache, k_scale and v_scale; None: as the caller has them
    apart   distances of v_cache, k_scale and v_scale from k_cache, in bytes, with which none of them overlap; None if
            every call is checked
    """

    launch: Callable[..., None]
    views: tuple[tuple[int, ...], ...] | None = None
    apart: set[tuple[int, ...]] | None = None


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def _launch(request: AppendRequest) -> None:
    k, v, slots = request["k"], request["v"], request["slot_mapping"]
    k_cache, v_cache, k_scale, v_scale = request["k_cache"], request["v_cache"], request["k_scale"], request["v_scale"]
    if slots.dtype is torch.int32:
        slots = slots.long()
    key = (
        k.get_device(), k.dtype, k.shape, k_cache.dtype, k_cache.shape, v_cache.dtype, v_cache.shape, k_scale.dtype,
        k_scale.shape, v_scale.shape, slots.dtype, k_cache.stride(), v_cache.stride(), k_scale.stride(),
        v_scale.stride(), k_scale.is_neg(), v_scale.is_neg(), request["layout"], request["kind"],
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, request)
    if prepared.apart is not None:
        addresses = [t.data_ptr() for t in (k_cache, v_cache, k_scale, v_scale)]
        distances = (addresses[1] - addresses[0], addresses[2] - addresses[0], addresses[3] - addresses[0])
        if distances not in prepared.apart or holds(k, addresses) or holds(v, addresses) or holds(slots, addresses):
            check(request)
            if len(prepared.apart) >= MAX_PREPARED:
                prepared.apart.clear()
            prepared.apart.add(distances)
    if k_scale.dim() == 0:
        k_scale = k_scale.view(1)
    if v_scale.dim() == 0:
        v_scale = v_scale.view(1)
    if prepared.views is not None:
        tensors = (k_cache, v_cache, k_scale, v_scale)
        k_cache, v_cache, k_scale, v_scale = (t.permute(axes) for t, axes in zip(tensors, prepared.views, strict=True))
    prepared.launch(
        request, mK=k, mV=v, mKCache=k_cache, mVCache=v_cache, mKScale=k_scale, mVScale=v_scale, mSlots=slots
    )


def _prepare(key: tuple[Any, ...], request: AppendRequest) -> PreparedLaunch:
    """Loads the kernel after all checks.

    On a CPU, or without rows, another function replaces the kernel. It checks nothing, so it is not kept.
    """
    check(request)
    k, k_cache, v_cache = request["k"], request["k_cache"], request["v_cache"]
    if k.device.type == "cpu":
        return PreparedLaunch(_append_on_cpu)
    layout = LAYOUTS[request["layout"]]
    sizes = sizes_of(layout, k_cache, v_cache)
    if not k.shape[0] * sizes.h_kv or not sizes.num_slots:
        return PreparedLaunch(do_nothing)
    k_kind = scale_kind("k_scale", tuple(request["k_scale"].shape), layout, sizes)
    v_kind = scale_kind("v_scale", tuple(request["v_scale"].shape), layout, sizes)
    spec = KvAppendSpec.for_launch(
        dtype=NAMES[k.dtype],
        d=sizes.d,
        h_kv=sizes.h_kv,
        k_scale=sharing(k_kind),
        v_scale=sharing(v_kind),
        scale_dtype=NAMES[request["k_scale"].dtype],
        kind=request["kind"],
        x_packed=layout.x_packed,
    )
    launch = by_name(APPEND, get_kernel(spec), spec.kernel, heads_first=int(layout.kernel_layout == "heads_first"))
    return _prepared.keep(key, PreparedLaunch(launch, _views(layout, k_kind, v_kind), set()), k.device)


def _append_on_cpu(request: AppendRequest, **tensors: torch.Tensor) -> None:
    reference_append(**request)


def check(request: AppendRequest) -> None:
    """Checks the arguments; an error names the wrong one."""
    k, v, slots = request["k"], request["v"], request["slot_mapping"]
    k_cache, v_cache, k_scale, v_scale = (request[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale"))
    APPEND.check_options(request)
    layout = LAYOUTS[request["layout"]]
    check_tensor("k", k, dtype=Q_DTYPES, ndim=3)
    kind = request["kind"]
    k_dtype, v_dtype = (getattr(torch, name) for name in KINDS[kind])
    check_tensor("k_cache", k_cache, dtype=k_dtype, device=k.device)
    check_tensor("v_cache", v_cache, dtype=v_dtype, device=k.device)
    sizes = sizes_of(layout, k_cache, v_cache)
    check_tensor("k_cache", k_cache, align=ALIGNMENT, unit_last_stride=True)
    if not layout.x_packed:  # the kernel stores packed values byte by byte
        check_tensor("v_cache", v_cache, align=ALIGNMENT, unit_last_stride=True)
    check_tensor("k", k, shape=(None, sizes.h_kv, sizes.d), align=ALIGNMENT, unit_last_stride=True)
    check_tensor("v", v, dtype=k.dtype, shape=tuple(k.shape), device=k.device, align=ALIGNMENT, unit_last_stride=True)
    written, read = {"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v, "slot_mapping": slots}
    scale_dtypes = SCALE_DTYPES if kind == INT8 else torch.float32
    for name, scale, known in (("k_scale", k_scale, scale_dtypes), ("v_scale", v_scale, None)):
        # both have the same dtype
        check_tensor(name, scale, dtype=known or k_scale.dtype, device=k.device)
        # raises if no granularity fits, or several do
        granularity = scale_kind(name, tuple(scale.shape), layout, sizes).granularity
        good = kind == INT8 or granularity == "per_token_head"
        require(good, name, granularity, f"per_token_head, as kind {kind!r} has it")
        is_read = granularity in ("per_tensor", "per_head")
        (read if is_read else written)[name] = scale
    slot_dtypes = (torch.int64, torch.int32)
    check_tensor("slot_mapping", slots, dtype=slot_dtypes, shape=(k.shape[0],), device=k.device)
    num_slots, rows = sizes.num_slots, k.shape[0] * sizes.h_kv
    require(num_slots < 2**31, "k_cache", f"{num_slots} slots", "fewer than 2^31")
    require(rows < 2**30, "k", f"{rows} tokens times heads", "fewer than 2^30")
    if k.device.type != "cpu":
        require_sm90("k", k.device)
    check_written(written, read)


def _views(layout: CacheLayout, *kinds: ScaleKind) -> tuple[tuple[int, ...], ...] | None:
    """Returns the axes for `PreparedLaunch.views`: kernels take any strides, but the outer axis must come first."""
    if layout.key[0] == layout.outer:
        return None
    scales = (token_major(layout.scale_axes(kind.granularity)) or (0,) for kind in kinds)
    return (token_major(layout.key), token_major(layout.value), *scales)


_run = launch_or_explain(APPEND, _launch, check)
_append = APPEND.register(_run, lambda request: None)
_append_int8 = INT8_APPEND.register(lambda request: _run({**request, "kind": INT8}), lambda request: None)
