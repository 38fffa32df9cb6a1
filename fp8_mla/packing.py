"""Quantize latent vectors into the 656-byte format, and read them back.

`pack` defines the format's quantization rule bit by bit: the append kernel is tested for equal bytes. `docs/format.md`
states the rule in words.
"""

from __future__ import annotations

import torch

from fp8_mla.formats import FP8_MAX, FP8_NAN, MIN_SCALE
from fp8_mla.layout import (
    NOPE_DIM,
    NUM_SCALES,
    QK_DIM,
    QUANT_TILE,
    ROPE_OFFSET,
    SCALE_OFFSET,
    TOKEN_BYTES,
    describe,
    token_bytes,
)

_BF16_MAX = torch.finfo(torch.bfloat16).max
_PACK_DTYPES = (torch.bfloat16, torch.float32)
_UNPACK_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def _tile_scales(tiles: torch.Tensor) -> torch.Tensor:
    """The scale of each 1x128 tile: (..., 4, 128) float32 -> (..., 4, 1) float32, always positive and finite."""
    # A NaN must not choose the scale of its 127 neighbours, and an Inf must leave them a finite one.
    absmax = tiles.abs().nan_to_num(nan=0.0, posinf=_BF16_MAX).amax(dim=-1, keepdim=True)
    # The divisor is a tensor because on CUDA torch turns division by a number into multiplication by its reciprocal.
    # 1/448 is no float32: of all bfloat16 magnitudes, 55% would get a scale that is off in its last bit.
    scale = (absmax / torch.full_like(absmax, FP8_MAX)).clamp_min(MIN_SCALE)
    return torch.where(absmax == 0, 1.0, scale)


def _quantize(tiles: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes as uint8: the product with the reciprocal scale, clamped to +-448 and rounded to nearest even."""
    codes = (tiles * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(tiles.isnan(), FP8_NAN)


def pack(kv: torch.Tensor) -> torch.Tensor:
    """Quantize latent key/value vectors into 656-byte tokens.

    For every tile of 128 elements the scale is the largest magnitude over 448, at least 2**-126, and 1 for a tile of
    zeros. A NaN is ignored there and becomes code 0x7F; an Inf counts as the largest finite bfloat16 and saturates at
    448. The 64 rope elements are kept as bfloat16, bit for bit.

    Args:
        kv: (..., 576) bfloat16 or float32, any strides: 512 latent elements, then 64 with rotary encoding. A float32
            rope part is rounded to bfloat16.

    Returns:
        (..., 656) uint8 on the same device, contiguous.

    Raises:
        TypeError: `kv` is not a tensor of one of these dtypes.
        ValueError: its last dimension is not 576.
    """
    if not isinstance(kv, torch.Tensor) or kv.dtype not in _PACK_DTYPES:
        raise TypeError(f"kv: got {describe(kv)}; needs a tensor of bfloat16 or float32")
    if kv.ndim == 0 or kv.shape[-1] != QK_DIM:
        raise ValueError(f"kv: got {describe(kv)}; needs {QK_DIM} elements in the last dimension")
    kv = kv.detach()
    tiles = kv[..., :NOPE_DIM].float().reshape((*kv.shape[:-1], NUM_SCALES, QUANT_TILE))
    scale = _tile_scales(tiles)
    packed = torch.empty((*kv.shape[:-1], TOKEN_BYTES), dtype=torch.uint8, device=kv.device)
    packed[..., :SCALE_OFFSET] = _quantize(tiles, scale).flatten(-2)
    packed[..., SCALE_OFFSET:ROPE_OFFSET] = scale.squeeze(-1).contiguous().view(torch.uint8)
    packed[..., ROPE_OFFSET:] = kv[..., NOPE_DIM:].bfloat16().contiguous().view(torch.uint8)
    return packed


def unpack(cache: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Read 656-byte tokens back as vectors: code times scale, then the rope part.

    The product is exact in float64. For float32 it is rounded once, and for bfloat16 the float32 product is rounded
    again. Any positive finite scale is honoured as it is, whoever wrote it.

    Args:
        cache: (..., 656) uint8 or float8_e4m3fn, any strides.
        dtype: bfloat16, float32 or float64.

    Returns:
        (..., 576) in `dtype` on the same device, contiguous.

    Raises:
        TypeError: `cache` or `dtype` is of another type.
        ValueError: the last dimension of `cache` is not 656.
    """
    tokens = token_bytes(cache)
    if dtype not in _UNPACK_DTYPES:
        raise TypeError(f"dtype: got {dtype}; needs torch.bfloat16, torch.float32 or torch.float64")
    product_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tiles = tokens[..., :SCALE_OFFSET].reshape((*tokens.shape[:-1], NUM_SCALES, QUANT_TILE)).view(torch.float8_e4m3fn)
    scale = _reinterpret(tokens[..., SCALE_OFFSET:ROPE_OFFSET], torch.float32).to(product_dtype)
    unpacked = torch.empty((*tokens.shape[:-1], QK_DIM), dtype=dtype, device=tokens.device)
    unpacked[..., :NOPE_DIM] = (tiles.to(product_dtype) * scale.unsqueeze(-1)).flatten(-2)
    unpacked[..., NOPE_DIM:] = _reinterpret(tokens[..., ROPE_OFFSET:], torch.bfloat16)
    return unpacked


def _reinterpret(field: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of one field read as `dtype`. Copied first: a view would need strides and an offset that divide."""
    return field.clone(memory_format=torch.contiguous_format).view(dtype)
