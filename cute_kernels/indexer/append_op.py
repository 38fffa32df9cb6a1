"""`index_append` quantizes keys of the indexer and writes them to their slots of the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.indexer.append_spec import IndexAppendSpec
from cute_kernels.indexer.request import APPEND, AppendInputs, AppendOptions, AppendRequest
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, do_nothing, launch_or_explain
from cute_kernels.runtime.overlap import check_written, holds
from fp8_mla import INDEX_KEY, pack_index_keys, row_views, write_pages

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ALIGN = 16  # bytes: alignment of every access of the kernel except those of scales
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@APPEND.describe
def index_append(
    k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor, **options: Unpack[AppendOptions]
) -> None:
    """Quantize keys of the indexer and store each in its slot of a paged cache, in place and in one launch.

    The stored bytes equal those of `fp8_mla.pack_index_keys`, whose docstring has both rules of scales. CPU tensors are
    packed by plain torch. `cute_kernels.indexer.request` has the arguments.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment or device does not fit, the GPU is not an SM90, or a tensor requires
            gradients while they are enabled: there is no backward.
    """
    tensors: AppendInputs = {"k": k, "k_cache": k_cache, "slot_mapping": slot_mapping}
    request: AppendRequest = {**APPEND.defaults, **options, **tensors}
    if len(request) != len(APPEND.defaults):
        APPEND.refuse_unknown(options)
    if torch.is_grad_enabled():
        APPEND.refuse_gradients(request)
    _append(request)


_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
_prepared: PreparedLaunches[tuple[Any, ...], _Kernel] = PreparedLaunches()
"""Prepared kernels. The key has what selects a kernel and what the kernel does not check itself."""


def _launch(request: AppendRequest) -> None:
    k, k_cache, slot_mapping = request["k"], request["k_cache"], request["slot_mapping"]
    if slot_mapping.dtype is torch.int32:
        slot_mapping = slot_mapping.long()
    key: tuple[Any, ...] = (
        k.get_device(), k.shape, k.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype, slot_mapping.dtype,
        APPEND.key(request),
        k_cache.untyped_storage().nbytes() - k_cache.storage_offset(),  # the kernel is not told where pages end
    )  # fmt: skip
    if holds(k_cache, (k.data_ptr(), slot_mapping.data_ptr())):
        check(request)
    kernel = _prepared.get(key) or _prepare(key, request)
    # a view of the pages, unchecked: the key's shape and dtype passed the checks
    if k_cache.dtype is not torch.uint8:
        k_cache = k_cache.view(torch.uint8)
    if k_cache.dim() == 4:
        k_cache = k_cache.squeeze(2)
    kernel(k, k_cache, slot_mapping)


def _prepare(key: tuple[Any, ...], request: AppendRequest) -> _Kernel:
    """Loads the kernel after all checks.

    On a CPU, or without tokens, another function replaces the kernel. It checks nothing, so it is not kept.
    """
    check(request)
    k, k_cache, scale = request["k"], request["k_cache"], request["scale"]
    if k.device.type == "cpu":
        return lambda k, pages, slots: write_pages(
            pages, slots, pack_index_keys(k, scale=scale), token_format=INDEX_KEY
        )
    if not k.shape[0] or not k_cache.shape[0]:
        return do_nothing
    return _prepared.keep(key, get_kernel(IndexAppendSpec(scale, _DTYPES[k.dtype])), k.device)


def check(request: AppendRequest) -> None:
    """Checks the arguments; an error names the wrong one."""
    k, k_cache, slot_mapping = request["k"], request["k_cache"], request["slot_mapping"]
    check_tensor("k", k, dtype=tuple(_DTYPES), shape=(None, INDEX_KEY.d_qk), align=_ALIGN, unit_last_stride=True)
    APPEND.check_options(request)
    check_index_cache(k_cache, k.device)
    slot_dtypes = (torch.int64, torch.int32)
    check_tensor("slot_mapping", slot_mapping, dtype=slot_dtypes, shape=(k.shape[0],), device=k.device)
    if k.device.type != "cpu":
        require_sm90("k", k.device)
    for rows in row_views(k_cache, INDEX_KEY, name="k_cache"):
        check_written({"k_cache": rows}, {"k": k, "slot_mapping": slot_mapping})


def check_index_cache(k_cache: torch.Tensor, device: torch.device) -> None:
    """Checks a cache of index keys; an error names the wrong argument."""
    check_tensor("k_cache", k_cache, device=device)
    row_views(k_cache, INDEX_KEY, name="k_cache")  # checks dtype, shape, strides and the end of the memory
    num_pages, page_size = k_cache.shape[:2]
    slots = num_pages * page_size
    require(slots < 2**31, "k_cache", f"{slots} slots", "fewer than 2^31")
    aligned = not k_cache.data_ptr() % _ALIGN and (num_pages <= 1 or not k_cache.stride(0) % _ALIGN)
    got = f"address {k_cache.data_ptr() % _ALIGN} beyond a multiple of 16 and pages {k_cache.stride(0)} bytes apart"
    require(aligned, "k_cache", got, f"{_ALIGN}-byte alignment of each page")


_append = APPEND.register(launch_or_explain(APPEND, _launch, check), lambda request: None)
