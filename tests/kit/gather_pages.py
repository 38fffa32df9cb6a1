"""Quantized caches as `gather_pages` takes them, and the values in their pages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.gqa.codes import KINDS as STORED
from cute_kernels.gqa.codes import ROTATED_KINDS, values_of
from cute_kernels.gqa.reference import dequantize_uint4
from cute_kernels.gqa.rotation_reference import unrotate
from cute_kernels.integrations.vllm.calls import scaled_views, stock_views
from tests.kit.draws import generator, integers, uniform
from tests.kit.vllm_batches import stock_cache

PAGES, PAGE_SIZE, KV_HEADS = 5, 16, 3


class GatherCache(NamedTuple):
    """Codes (pages, page_size, h_kv, d), and scales (pages, page_size, h_kv) or a single one."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def to(self, device: str) -> GatherCache:
        """A copy on another device with the same strides."""
        return GatherCache(*(_moved(t, device) for t in self))


def _moved(t: torch.Tensor, device: str) -> torch.Tensor:
    moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    moved.view(torch.uint8).copy_(t.view(torch.uint8)) if t.dtype is torch.float8_e4m3fn else moved.copy_(t)
    return moved


KINDS = ("int8", "fp8", "fp8_per_token_head", *ROTATED_KINDS)
"""INT8 and FP8 with a scale per token and head, FP8 with one scale for all tokens, and kinds with 4-bit codes."""


def gather_cache(kind: str, layout: str, d: int) -> GatherCache:
    """Random codes of every value except NaN, and scales from 2^-20 to 2^20.

    Args:
        kind: one of KINDS.
        layout: "NHD" or "HND": separate tensors; "interleaved": a cache of vLLM, or one tensor with 4-bit codes.
    """
    if kind in ROTATED_KINDS:
        return _rotated_cache(kind, layout, d)
    gen = generator(d)
    int8, scaled = kind == "int8", kind != "fp8"
    kv_dtype = torch.int8 if int8 else torch.float8_e4m3fn
    if layout == "interleaved":
        page_dtype, scaled_codes = torch.int8 if int8 else torch.uint8, kv_dtype if scaled else None
        kv_cache = stock_cache(PAGES, KV_HEADS, PAGE_SIZE, d, page_dtype, "NHD", codes=scaled_codes)
        views = scaled_views(kv_cache, d, kv_dtype) if scaled else stock_views(kv_cache, d, fp8=True)
        k, v, *scales = views.tokens_first()
    else:
        shape = (PAGES, PAGE_SIZE, KV_HEADS) if layout == "NHD" else (PAGES, KV_HEADS, PAGE_SIZE)
        k, v = torch.zeros(2, *shape, d, dtype=torch.int8, device="cpu").view(kv_dtype)
        scales = list(torch.zeros(2, *shape, dtype=torch.float32, device="cpu")) if scaled else []
        if layout == "HND":
            k, v, *scales = (t.transpose(1, 2) for t in (k, v, *scales))
    for codes in (k, v):
        drawn = integers(-127, 127, codes.shape, gen, torch.int8)
        codes.view(torch.int8).copy_(drawn)  # 0x7F and 0xFF are NaN in FP8
        if not int8:
            codes.view(torch.int8).masked_fill_(drawn == -1, 0)
    for scale in scales:
        scale.copy_((uniform(scale.shape, gen) * 40 - 20).exp2())
    if not scaled:
        scales = [torch.tensor(factor, dtype=torch.float32, device="cpu") for factor in (0.37, 1.9)]
    return GatherCache(k, v, scales[0], scales[1])


def _rotated_cache(kind: str, layout: str, d: int) -> GatherCache:
    """A cache with 4-bit codes. If interleaved, each token and head has K, V and both scales side by side."""
    gen, shape = generator(d), (PAGES, PAGE_SIZE, KV_HEADS)
    if layout == "HND":
        shape = (PAGES, KV_HEADS, PAGE_SIZE)
    sizes = [d // values_of(name) for name in STORED[kind]]
    whole = integers(0, 256, (*shape, sum(sizes) + 16), gen, torch.uint8)
    k, v, room = whole.split([*sizes, 16], dim=-1)
    scales = (uniform((2, *shape), gen) * 40 - 20).exp2()
    zero_points = integers(0, 16, scales.shape, gen, torch.int32)
    scales = (scales.view(torch.int32) ^ zero_points).view(torch.float32)
    k_scale, v_scale = scales
    if layout == "interleaved":
        room[..., :8].view(torch.float32).copy_(scales.movedim(0, -1))
        k_scale, v_scale = room[..., :8].view(torch.float32).unbind(-1)
    else:
        k, v = k.contiguous(), v.contiguous()
    k = k.view(getattr(torch, STORED[kind][0]))
    tensors = (k, v, k_scale, v_scale)
    return GatherCache(*(t.transpose(1, 2) for t in tensors) if layout == "HND" else tensors)


def expected(cache: GatherCache, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The dequantized pages, computed in float32 page by page."""
    found = []
    for codes, scale in ((cache.k_cache, cache.k_scale), (cache.v_cache, cache.v_scale)):
        if codes.dtype == torch.uint8:
            rotated = torch.stack([dequantize_uint4(codes[page], scale[page], torch.float32) for page in pages])
            found.append(unrotate(rotated))
            continue
        rows = torch.stack([codes[page].float() for page in pages])
        scales = scale if scale.dim() == 0 else torch.stack([scale[page] for page in pages]).unsqueeze(-1)
        found.append(rows * scales)
    return found[0], found[1]
