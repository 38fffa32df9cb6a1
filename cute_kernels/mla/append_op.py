"""`mla_fp8_append`: quantize new tokens and write them to their slots of the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, refuse_gradients, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import optimistic, remember
from cute_kernels.runtime.ops import register_op
from fp8_mla import QK_DIM, as_pages, pack, valid_slots

_ALIGN = 16  # bytes: every access of the kernel
_TENSORS = ("kv", "kv_cache", "slot_mapping")


def mla_fp8_append(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Quantize latent key/value vectors and store each in its slot of a paged FP8 cache, in place.

    The stored bytes are those of `fp8_mla.pack`, whose docstring has the rule; `docs/format.md` has the format.

    Args:
        kv: (tokens, 576) bfloat16: 512 latent elements, then 64 with rotary encoding. Rows are contiguous and start at
            multiples of 16 bytes; their distance is free.
        kv_cache: (num_pages, page_size, 656) or (num_pages, page_size, 1, 656) uint8 or float8_e4m3fn, any page size.
            The 656 bytes of a slot are contiguous and start at a multiple of 16; the distances of slots and pages are
            free.
        slot_mapping: (tokens,) int64, ``page * page_size + offset``. A token whose slot is negative or beyond the cache
            is skipped. Slots must differ: where two tokens name the same one, its bytes may be a mixture of both.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: a shape, stride, alignment or device does not fit, the GPU is not an SM90, or a tensor requires
            gradients while they are enabled: there is no backward.

    CPU tensors are packed by plain torch.
    """
    if torch.is_grad_enabled():
        refuse_gradients("mla_fp8_append", _TENSORS, kv, kv_cache, slot_mapping)
    _append(kv, kv_cache, slot_mapping)


_prepared: dict[tuple[Any, ...], Callable[..., None]] = {}


def _key(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[Any, ...]:
    """What the choice of a kernel depends on, and what the kernel does not check itself."""
    return kv.get_device(), kv.shape, kv_cache.shape, kv_cache.dtype, slot_mapping.dtype


def _launch_prepared(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> bool:
    kernel = _prepared.get(_key(kv, kv_cache, slot_mapping))
    if kernel is None:
        return False
    # as_pages without its checks, which the key's shape and dtype have passed
    if kv_cache.dtype is not torch.uint8:
        kv_cache = kv_cache.view(torch.uint8)
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(2)
    kernel(kv, kv_cache, slot_mapping)
    return True


def _checked(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_tensor("kv", kv, dtype=torch.bfloat16, shape=(None, QK_DIM), align=_ALIGN, unit_last_stride=True)
    pages = as_pages(kv_cache)
    check_tensor("kv_cache", pages, device=kv.device, align=_ALIGN)
    check_tensor("slot_mapping", slot_mapping, dtype=torch.int64, shape=(kv.shape[0],), device=kv.device)
    num_slots = pages.shape[0] * pages.shape[1]
    require(num_slots < 2**31, "kv_cache", f"{num_slots} slots", "fewer than 2^31")
    if kv.device.type == "cpu":
        _append_reference(kv, pages, slot_mapping)
        return
    require_sm90("kv", kv.device)
    tokens = kv.shape[0]
    if tokens and num_slots:
        kernel = get_kernel(MlaAppendSpec.for_launch(tokens))
        kernel(kv, pages, slot_mapping)
        remember(_prepared, _key(kv, kv_cache, slot_mapping), kernel)


def _append_reference(kv: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    page_size = pages.shape[1]
    keep = valid_slots(slot_mapping, pages.shape[0] * page_size)
    slots = slot_mapping[keep]
    pages[slots // page_size, slots % page_size] = pack(kv[keep])


_append = register_op(
    "mla_fp8_append",
    "(Tensor kv, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    optimistic(_launch_prepared, _checked),
    lambda kv, kv_cache, slot_mapping: None,
)
