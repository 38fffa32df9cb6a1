"""Copies pages of a quantized cache as 16-bit numbers, for attention kernels that read no codes."""

from __future__ import annotations

import torch

from cute_kernels.gqa.codes import ROTATED
from cute_kernels.gqa.gather_spec import KvGatherSpec
from cute_kernels.gqa.layouts import ScaleKind
from cute_kernels.gqa.reference import codes_per_element, dequantize_tokens
from cute_kernels.runtime.compile import get_kernel


def gather_spec(
    kv_dtype: torch.dtype, dtype: torch.dtype, d: int, one_scale: bool = False, v_dtype: torch.dtype | None = None
) -> KvGatherSpec:
    """Makes the spec for a cache and copies of these dtypes; `one_scale` for all values, or one per token and head."""
    kv_name, name, v_name = (str(known).removeprefix("torch.") for known in (kv_dtype, dtype, v_dtype))
    return KvGatherSpec(kv_name, name, d, one_scale, v_name if v_name in ROTATED else None)


def gather_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    pages: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies some pages, (n, page_size, h_kv, d) of `dtype` each: codes times scales in float32, rounded once.

    It checks no argument; the kernel checks dtypes, sizes that are fixed, strides and devices.

    Args:
        k_cache: (num_pages, page_size, h_kv, d) int8 or float8_e4m3fn; rows contiguous, at multiples of 16 bytes. 4-bit
            codes are (num_pages, page_size, h_kv, d / 2) uint8, and are rotated back.
        v_cache: likewise; uint8 if k_cache is, and optionally if k_cache is int8.
        k_scale: (num_pages, page_size, h_kv) float32, or one float32 for an FP8 cache.
        v_scale: likewise.
        pages: (n,) int32. A number that is not a page's becomes the nearest page.
        dtype: bfloat16 or float16.
    """
    size = (pages.shape[0], *k_cache.shape[1:3], k_cache.shape[3] * codes_per_element(k_cache))
    if k_cache.device.type == "cpu":
        pages = pages.clamp(0, k_cache.shape[0] - 1)
        pairs = ((k_cache, k_scale), (v_cache, v_scale))
        k, v = (_copied(codes, scale, pages).to(dtype) for codes, scale in pairs)
        return k, v
    k, v = (torch.empty(size, dtype=dtype, device=k_cache.device) for _ in "kv")
    if k.numel():
        spec = gather_spec(k_cache.dtype, dtype, size[3], k_scale.dim() < 3, v_cache.dtype)
        scales = (k_scale.reshape(1), v_scale.reshape(1)) if spec.one_scale else (k_scale, v_scale)
        get_kernel(spec)(k_cache.view(torch.int8), v_cache.view(torch.int8), *scales, pages, k, v)
    return k, v


def dense(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts codes with a scale for each token and head to numbers (..., d) of `dtype`, in plain torch.

    Args:
        codes: (..., d) int8 or float8_e4m3fn; (..., d / 2) uint8, rotated 4-bit codes.
        scale: (...) float16 or float32.
        dtype: dtype of the result. Products are float32, rounded once.
    """
    return dequantize_tokens(codes, scale, ScaleKind("per_token_head"), dtype)


def _copied(codes: torch.Tensor, scale: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Copies pages in float32, because not every device gathers FP8."""
    if codes.dtype is torch.uint8:
        return dense(codes[pages.long()], scale[pages.long()], torch.float32)
    rows = codes.view(torch.int8)[pages.long()].view(codes.dtype).float()
    return rows * (scale[pages.long()].unsqueeze(-1) if scale.dim() == 3 else scale)
