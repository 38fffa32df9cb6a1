"""`mla_fp8_append`: quantize new tokens and write them to their slots of the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, refuse_gradients, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, launch_or_explain
from cute_kernels.runtime.ops import register_op
from fp8_mla import QK_DIM, as_pages, pack, valid_slots

_ALIGN = 16  # bytes: every access of the kernel
_TENSORS = ("kv", "kv_cache", "slot_mapping")


def mla_fp8_append(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Quantize latent key/value vectors and store each in its slot of a paged FP8 cache, in place.

    The stored bytes equal those of `fp8_mla.pack`, whose docstring has the rule; docs/users/formats.md has the format.

    Args:
        kv: (tokens, 576) bfloat16: 512 latent elements, then 64 with rotary encoding. Rows are contiguous and start at
            multiples of 16 bytes; any distance between rows.
        kv_cache: (num_pages, page_size, 656) or (num_pages, page_size, 1, 656) uint8 or float8_e4m3fn, any page size.
            The 656 bytes of a slot are contiguous and start at a multiple of 16; any distance between slots and
            between pages.
        slot_mapping: (tokens,) int64, ``page * page_size + offset``. A token whose slot is negative or past the cache
            is skipped. Slots must differ: if two tokens have the same one, its bytes may be a mixture of both.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment or device does not fit, the GPU is not an SM90, or a tensor requires
            gradients while they are enabled: there is no backward.

    CPU tensors are packed by plain torch.
    """
    if torch.is_grad_enabled():
        refuse_gradients("mla_fp8_append", _TENSORS, kv, kv_cache, slot_mapping)
    _append(kv, kv_cache, slot_mapping)


_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
_prepared: PreparedLaunches[tuple[Any, ...], _Kernel] = PreparedLaunches()
"""Kernels; the key is all that they are chosen by and all that they do not check themselves."""


def _launch(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    key = (kv.get_device(), kv.shape, kv_cache.shape, kv_cache.dtype, slot_mapping.dtype)
    kernel = _prepared.get(key) or _prepare(key, kv, kv_cache, slot_mapping)
    # as_pages without its checks: the key's shape and dtype passed them
    if kv_cache.dtype is not torch.uint8:
        kv_cache = kv_cache.view(torch.uint8)
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(2)
    kernel(kv, kv_cache, slot_mapping)


def _prepare(key: tuple[Any, ...], kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> _Kernel:
    """Loads the kernel after all checks.

    On a CPU, or without tokens, another function replaces it. That one checks nothing, so it is not kept.
    """
    _check(kv, kv_cache, slot_mapping)
    if kv.device.type == "cpu":
        return _append_reference
    tokens = kv.shape[0]
    if not tokens or not kv_cache.shape[0]:
        return _append_nothing
    return _prepared.keep(key, get_kernel(MlaAppendSpec.for_launch(tokens)), kv.device)


def _check(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Raises what is wrong with the arguments, by name."""
    check_tensor("kv", kv, dtype=torch.bfloat16, shape=(None, QK_DIM), align=_ALIGN, unit_last_stride=True)
    pages = as_pages(kv_cache)
    check_tensor("kv_cache", pages, device=kv.device, align=_ALIGN)
    check_tensor("slot_mapping", slot_mapping, dtype=torch.int64, shape=(kv.shape[0],), device=kv.device)
    num_slots = pages.shape[0] * pages.shape[1]
    require(num_slots < 2**31, "kv_cache", f"{num_slots} slots", "fewer than 2^31")
    if kv.device.type != "cpu":
        require_sm90("kv", kv.device)


def _append_nothing(kv: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    pass


def _append_reference(kv: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    page_size = pages.shape[1]
    keep = valid_slots(slot_mapping, pages.shape[0] * page_size)
    slots = slot_mapping[keep]
    pages[slots // page_size, slots % page_size] = pack(kv[keep])


_append = register_op(
    "mla_fp8_append",
    "(Tensor kv, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    launch_or_explain(_launch, _check),
    lambda kv, kv_cache, slot_mapping: None,
)
