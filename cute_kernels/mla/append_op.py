"""`mla_fp8_append`: quantize new tokens and write them to their slots of the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.mla.append_launch import prepare_append
from cute_kernels.mla.checks import check_cache, check_names
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, refuse_gradients
from cute_kernels.runtime.launch import PreparedLaunches, launch_or_explain
from cute_kernels.runtime.ops import register_op
from cute_kernels.runtime.overlap import check_written, holds
from fp8_mla import TOKEN_BYTES, pack, row_views, write_pages
from fp8_mla.formats import CACHE_LAYOUTS, FORMATS, V3_2, PageLayout, TokenFormat, format_of_cache

_ALIGN = 16  # bytes: every access of the kernels
_TENSORS = ("kv", "kv_cache", "slot_mapping")


def mla_fp8_append(
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_format: str | None = None,
    cache_layout: str | None = None,
) -> None:
    """Quantize latent key/value vectors and store each in its slot of a paged latent cache, in place.

    The stored bytes equal those of `fp8_mla.pack`, whose docstring has the rules; docs/users/formats.md has the formats
    of a token. Data and scale rows are written in one launch.

    Args:
        kv: (tokens, 576) bfloat16: 512 latent elements, then 64 with rotary encoding; (tokens, 512) for formats other
            than "v3.2". Rows are contiguous and start at multiples of 16 bytes; any distance between rows.
        kv_cache: (num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes) uint8 or float8_e4m3fn, any page
            size. The bytes of a slot are contiguous and start at a multiple of 16; any distance between slots and
            between pages. Of a planar cache only the address, the shape and the distance of two pages count.
            No two slots share memory, and none is also another argument's.
        slot_mapping: (tokens,) int64 or int32, which is widened first, ``page * page_size + offset``. A token whose
            slot is negative or past the cache is skipped. Slots must differ: if two tokens have the same one, its bytes
            may be a mixture of both.
        cache_format: as `mla_fp8_decode` takes it. Default: "v3.2" for 656 bytes a token with 576 columns of kv,
            "v3.2_nope" with 512, which leaves the other bytes of a slot alone; "v4" for 584; "v4.1_fp4" for 288. 528
            bytes need it: "v3.2_nope" and "v4.1" both have as many.
        cache_layout: "planar" or "interleaved", for "v4.1" and "v4.1_fp4". Default: planar.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, format, stride, alignment or device does not fit, the GPU is not an SM90, or a tensor
            requires gradients while they are enabled: there is no backward.

    CPU tensors are packed by plain torch.
    """
    if torch.is_grad_enabled():
        refuse_gradients("mla_fp8_append", _TENSORS, kv, kv_cache, slot_mapping)
    _append(kv, kv_cache, slot_mapping, cache_format, cache_layout)


_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
_prepared: PreparedLaunches[tuple[Any, ...], _Kernel] = PreparedLaunches()
"""Kernels; the key is all that they are chosen by and all that they do not check themselves."""


def _launch(
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_format: str | None = None,
    cache_layout: str | None = None,
) -> None:
    if slot_mapping.dtype is torch.int32:
        slot_mapping = slot_mapping.long()
    key: tuple[Any, ...] = (
        kv.get_device(), kv.shape, kv_cache.shape, kv_cache.stride(), kv_cache.dtype, slot_mapping.dtype, cache_format,
        cache_layout,
    )  # fmt: skip
    if kv_cache.shape[-1] != TOKEN_BYTES or kv.shape[-1] != V3_2.d_qk:
        # these kernels are told where rows are, and do not check it
        key = (*key, kv_cache.untyped_storage().nbytes() - kv_cache.storage_offset())
    if holds(kv_cache, (kv.data_ptr(), slot_mapping.data_ptr())):
        _check(kv, kv_cache, slot_mapping, cache_format, cache_layout)
    kernel = _prepared.get(key) or _prepare(key, kv, kv_cache, slot_mapping, cache_format, cache_layout)
    # a view of the pages without checks: the key's shape and dtype passed them
    if kv_cache.dtype is not torch.uint8:
        kv_cache = kv_cache.view(torch.uint8)
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(2)
    kernel(kv, kv_cache, slot_mapping)


def _prepare(
    key: tuple[Any, ...],
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_format: str | None = None,
    cache_layout: str | None = None,
) -> _Kernel:
    """Loads the kernel after all checks.

    On a CPU, or without tokens, another function replaces it. That one checks nothing, so it is not kept.
    """
    token_format, layout = _check(kv, kv_cache, slot_mapping, cache_format, cache_layout)
    if kv.device.type == "cpu":
        return _append_reference(token_format, layout.cache_layout)
    tokens = kv.shape[0]
    if not tokens or not kv_cache.shape[0]:
        return _append_nothing
    return _prepared.keep(key, prepare_append(tokens, token_format, layout), kv.device)


def _check(
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_format: str | None = None,
    cache_layout: str | None = None,
) -> tuple[TokenFormat, PageLayout]:
    """Raises what is wrong with the arguments, by name; returns the format of the cache and where its rows are."""
    check_tensor("kv", kv, dtype=torch.bfloat16, shape=(None, None), align=_ALIGN, unit_last_stride=True)
    check_names("cache_format", cache_format, tuple(FORMATS))
    check_names("cache_layout", cache_layout, CACHE_LAYOUTS)
    check_tensor("kv_cache", kv_cache, device=kv.device)
    if cache_format is None:
        token_format = format_of_cache(kv_cache.shape[-1] if kv_cache.dim() else 0, kv.shape[1])
    else:
        token_format = V3_2 if cache_format == V3_2.name else FORMATS[cache_format]
    layout = check_cache("kv_cache", kv_cache, token_format, cache_layout)
    check_tensor("kv", kv, shape=(None, token_format.d_qk))
    slot_dtypes = (torch.int64, torch.int32)
    check_tensor("slot_mapping", slot_mapping, dtype=slot_dtypes, shape=(kv.shape[0],), device=kv.device)
    if kv.device.type != "cpu":
        require_sm90("kv", kv.device)
    for rows in row_views(kv_cache, token_format, cache_layout):
        check_written({"kv_cache": rows}, {"kv": kv, "slot_mapping": slot_mapping})
    return token_format, layout


def _append_nothing(kv: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    pass


def _append_reference(token_format: TokenFormat, cache_layout: str) -> _Kernel:
    def append(kv: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        packed = pack(kv, token_format=token_format)
        write_pages(pages, slot_mapping, packed, token_format=token_format, cache_layout=cache_layout)

    return append


def _explain(*arguments: Any) -> None:
    _check(*arguments)


_append = register_op(
    "mla_fp8_append",
    "(Tensor kv, Tensor(a!) kv_cache, Tensor slot_mapping, str? cache_format=None, str? cache_layout=None) -> ()",
    launch_or_explain(_launch, _explain, _TENSORS),
    lambda *arguments: None,
)
