"""`kv_int8_append`: quantize new keys and values and write them to their slots of an INT8 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.gqa.append_spec import KvAppendSpec, sharing
from cute_kernels.gqa.layouts import ALIGNMENT, LAYOUTS, CacheLayout, ScaleKind, cache_sizes, scale_kind, token_major
from cute_kernels.gqa.reference import reference_append
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, fail, refuse_gradients, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import MAX_PREPARED, PreparedLaunches, launch_or_explain
from cute_kernels.runtime.ops import register_op
from cute_kernels.runtime.overlap import check_written, holds

_DTYPES = (torch.bfloat16, torch.float16)
_SCALE_DTYPES = (torch.float32, torch.float16)
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_TENSORS = ("k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "slot_mapping")


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
    stored bytes are equal.

    Args:
        k: (tokens, h_kv, d) bfloat16 or float16, d 64, 128 or 256. Rows of d elements are contiguous and start at
            multiples of 16 bytes; any distance between tokens and between heads.
        v: like k.
        k_cache: int8, of the shape that `layout` says; see `gqa_decode`. The innermost axis is contiguous, and all
            strides are multiples of 16 bytes.
        v_cache: likewise; of paged_vllm, any strides.
        k_scale: float16 or float32. per_token, per_token_head and per_group (32, 64): written, and the granularity
            follows from the shape. per_tensor () or (1,) and per_head (h_kv,): read; positive and finite.
        v_scale: likewise, of the same dtype. Its granularity may be another. What is written shares no memory, neither
            among its own elements nor with another argument.
        slot_mapping: (tokens,) int64, or int32, which is widened first: ``page * page_size + offset``, without pages
            ``sequence * s + position``. A token whose slot is negative or past the cache is skipped. Slots must differ:
            if two tokens have the same one, it may hold a mixture of both.
        layout: "BNSH", "BSNH", "paged_NHD", "paged_HND" or "paged_vllm"; any name in `gqa.layouts.LAYOUTS`.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment, device or the name of the layout does not fit, a scale's shape fits no
            granularity or several, the GPU is not an SM90, or a tensor requires gradients while they are enabled: there
            is no backward.

    CPU tensors are quantized by plain torch.
    """
    if torch.is_grad_enabled():
        refuse_gradients("kv_int8_append", _TENSORS, k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
    _append(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, layout)


class PreparedLaunch(NamedTuple):
    """A compiled kernel and what the layout decides of its arguments.

    heads_first  whether a token's heads lie a row apart (1) or next to each other (0)
    views        axes in which the kernel gets k_cache, v_cache, k_scale and v_scale; None: as the caller has them
    apart        distances of v_cache, k_scale and v_scale from k_cache, in bytes, with which none of them overlap; None
                 where every call is checked
    """

    kernel: Callable[..., None]
    heads_first: int = 0
    views: tuple[tuple[int, ...], ...] | None = None
    apart: set[tuple[int, ...]] | None = None


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
) -> None:
    if slot_mapping.dtype is torch.int32:
        slot_mapping = slot_mapping.long()
    key = (
        k.get_device(), k.dtype, k.shape, k_cache.dtype, k_cache.shape, v_cache.dtype, v_cache.shape, k_scale.dtype,
        k_scale.shape, v_scale.shape, slot_mapping.dtype, layout, k_cache.stride(), v_cache.stride(), k_scale.stride(),
        v_scale.stride(), k_scale.is_neg(), v_scale.is_neg(),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, layout)
    if prepared.apart is not None:
        addresses = [t.data_ptr() for t in (k_cache, v_cache, k_scale, v_scale)]
        distances = (addresses[1] - addresses[0], addresses[2] - addresses[0], addresses[3] - addresses[0])
        if (
            distances not in prepared.apart
            or holds(k, addresses)
            or holds(v, addresses)
            or holds(slot_mapping, addresses)
        ):
            _check(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, layout)
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
    prepared.kernel(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, prepared.heads_first)


def _prepare(
    key: tuple[Any, ...],
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
) -> PreparedLaunch:
    """Loads the kernel after all checks.

    On a CPU, or without rows, another function replaces it. That one checks nothing, so it is not kept.
    """
    _check(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, layout)
    if k.device.type == "cpu":
        return PreparedLaunch(lambda *tensors_and_flag: reference_append(*tensors_and_flag[:-1], layout=layout))
    known = LAYOUTS[layout]
    sizes = cache_sizes(known, tuple(k_cache.shape), tuple(v_cache.shape), 1)
    if not k.shape[0] * sizes.h_kv or not sizes.num_slots:
        return PreparedLaunch(lambda *tensors_and_flag: None)
    k_kind = scale_kind("k_scale", tuple(k_scale.shape), known, sizes)
    v_kind = scale_kind("v_scale", tuple(v_scale.shape), known, sizes)
    spec = KvAppendSpec.for_launch(
        dtype=_NAMES[k.dtype],
        d=sizes.d,
        h_kv=sizes.h_kv,
        k_scale=sharing(k_kind),
        v_scale=sharing(v_kind),
        scale_dtype=_NAMES[k_scale.dtype],
        vllm=known.packed,
    )
    heads_first = int(known.kernel_layout == "heads_first")
    prepared = PreparedLaunch(get_kernel(spec), heads_first, _views(known, k_kind, v_kind), set())
    return _prepared.keep(key, prepared, k.device)


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
) -> None:
    """Raises what is wrong with the arguments, by name."""
    require(isinstance(layout, str), "layout", type(layout).__name__, "a str", TypeError)
    known = LAYOUTS.get(layout)
    if known is None:
        fail("layout", repr(layout), f"one of {tuple(LAYOUTS)}")
    check_tensor("k", k, dtype=_DTYPES, ndim=3)
    check_tensor("k_cache", k_cache, dtype=torch.int8, device=k.device)
    check_tensor("v_cache", v_cache, dtype=torch.int8, device=k.device)
    sizes = cache_sizes(known, tuple(k_cache.shape), tuple(v_cache.shape), 1)
    check_tensor("k_cache", k_cache, align=ALIGNMENT, unit_last_stride=True)
    if not known.packed:  # the kernel stores packed values byte by byte
        check_tensor("v_cache", v_cache, align=ALIGNMENT, unit_last_stride=True)
    check_tensor("k", k, shape=(None, sizes.h_kv, sizes.d), align=ALIGNMENT, unit_last_stride=True)
    check_tensor("v", v, dtype=k.dtype, shape=tuple(k.shape), device=k.device, align=ALIGNMENT, unit_last_stride=True)
    written, read = {"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v, "slot_mapping": slot_mapping}
    for name, scale, dtype in (("k_scale", k_scale, _SCALE_DTYPES), ("v_scale", v_scale, None)):
        # both have the same dtype
        check_tensor(name, scale, dtype=dtype or k_scale.dtype, device=k.device)
        # raises where no granularity fits, or several
        is_read = scale_kind(name, tuple(scale.shape), known, sizes).granularity in ("per_tensor", "per_head")
        (read if is_read else written)[name] = scale
    slot_dtypes = (torch.int64, torch.int32)
    check_tensor("slot_mapping", slot_mapping, dtype=slot_dtypes, shape=(k.shape[0],), device=k.device)
    num_slots, rows = sizes.num_slots, k.shape[0] * sizes.h_kv
    require(num_slots < 2**31, "k_cache", f"{num_slots} slots", "fewer than 2^31")
    require(rows < 2**30, "k", f"{rows} tokens times heads", "fewer than 2^30")
    if k.device.type != "cpu":
        require_sm90("k", k.device)
    check_written(written, read)


def _views(layout: CacheLayout, *kinds: ScaleKind) -> tuple[tuple[int, ...], ...] | None:
    """What `PreparedLaunch.views` holds: the kernel takes any strides, but the outer axis must come first."""
    if layout.key[0] == layout.outer:
        return None
    scales = (token_major(layout.scale_axes(kind.granularity)) or (0,) for kind in kinds)
    return (token_major(layout.key), token_major(layout.value), *scales)


_append = register_op(
    "kv_int8_append",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scale, Tensor(d!) v_scale, "
    "Tensor slot_mapping, str layout) -> ()",
    launch_or_explain(_launch, _check, _TENSORS),
    lambda k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, layout: None,
)
