"""Quantize latent vectors into tokens of a cache, 656 bytes each in the V3.2 format, and read them back.

`pack` defines the quantization rule bit by bit: the append kernel must write equal bytes. The rule in
words: `docs/users/formats.md`.
"""

from __future__ import annotations

import torch

from fp8_mla.formats import FP8_MAX, FP8_NAN, MIN_SCALE, V3_2, Field, TokenFormat
from fp8_mla.layout import describe, require_one_row, token_bytes

_BF16_MAX = torch.finfo(torch.bfloat16).max
_PACK_DTYPES = (torch.bfloat16, torch.float32)
_UNPACK_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def _tile_scales(tiles: torch.Tensor) -> torch.Tensor:
    """The scale of each quant tile: (..., 4, 128) float32 -> (..., 4, 1) float32, always positive and finite."""
    # A NaN must not decide the scale of its 127 neighbours, and an Inf must leave them a finite one.
    absmax = tiles.abs().nan_to_num(nan=0.0, posinf=_BF16_MAX).amax(dim=-1, keepdim=True)
    # The divisor is a tensor because on CUDA torch replaces division by a number with multiplication by its reciprocal.
    # 1/448 is no float32: 55% of all bfloat16 magnitudes would get a scale with a wrong last bit.
    scale = (absmax / torch.full_like(absmax, FP8_MAX)).clamp_min(MIN_SCALE)
    return torch.where(absmax == 0, 1.0, scale)


def _quantize(tiles: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes as uint8: the product with the reciprocal scale, clamped to +-448 and rounded to nearest even."""
    codes = (tiles * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(tiles.isnan(), FP8_NAN)


def pack(kv: torch.Tensor, *, token_format: TokenFormat = V3_2) -> torch.Tensor:
    """Quantize latent key/value vectors into tokens of a cache.

    The scale of a quant tile (128 elements) is its largest magnitude over 448, at least 2**-126, and 1 for a tile of
    zeros. A NaN does not count there and becomes code 0x7F; an Inf counts as the largest finite bfloat16 and saturates
    at 448. The 64 rope elements are kept as bfloat16, bit for bit. Bytes of no field are 0.

    Args:
        kv: (..., 576) bfloat16 or float32, any strides: 512 latent elements, then 64 with rotary encoding. A float32
            rope part is rounded to bfloat16.
        token_format: where the bytes go; one row a token. Numbers here are those of the default.

    Returns:
        (..., 656) uint8 on the same device, contiguous.

    Raises:
        TypeError: `kv` is not a tensor of one of these dtypes.
        ValueError: its last dimension is not 576, or a token of the format has several rows.
    """
    require_one_row(token_format)
    if not isinstance(kv, torch.Tensor) or kv.dtype not in _PACK_DTYPES:
        raise TypeError(f"kv: got {describe(kv)}; needs a tensor of bfloat16 or float32")
    if kv.ndim == 0 or kv.shape[-1] != token_format.d_qk:
        raise ValueError(f"kv: got {describe(kv)}; needs {token_format.d_qk} elements in the last dimension")
    kv, nope_dim = kv.detach(), token_format.nope_dim
    tiles = kv[..., :nope_dim].float().reshape((*kv.shape[:-1], token_format.num_scales, token_format.quant_tile))
    scale = _tile_scales(tiles)
    packed = torch.zeros((*kv.shape[:-1], token_format.token_bytes), dtype=torch.uint8, device=kv.device)
    _write(packed, token_format.codes, _quantize(tiles, scale).flatten(-2))
    _write(packed, token_format.scales, scale.squeeze(-1))
    if token_format.rope is not None:
        _write(packed, token_format.rope, kv[..., nope_dim:].bfloat16())
    return packed


def unpack(
    cache: torch.Tensor, dtype: torch.dtype = torch.bfloat16, *, token_format: TokenFormat = V3_2
) -> torch.Tensor:
    """Read tokens of a cache back as vectors: code times scale, then the rope part.

    The product is exact in float64. For float32 it is rounded once; for bfloat16 the float32 product is rounded again.
    Any positive finite scale is used as it is, whoever wrote it.

    Args:
        cache: (..., 656) uint8 or float8_e4m3fn, any strides.
        dtype: bfloat16, float32 or float64.
        token_format: where the bytes are; one row a token. Numbers here are those of the default.

    Returns:
        (..., 576) in `dtype` on the same device, contiguous.

    Raises:
        TypeError: `cache` or `dtype` is of another type.
        ValueError: the last dimension of `cache` is not 656, or a token of the format has several rows.
    """
    tokens = token_bytes(cache, token_format=token_format)
    if dtype not in _UNPACK_DTYPES:
        raise TypeError(f"dtype: got {dtype}; needs torch.bfloat16, torch.float32 or torch.float64")
    product_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    nope_dim = token_format.nope_dim
    tiles = _read(tokens, token_format.codes).unflatten(-1, (token_format.num_scales, token_format.quant_tile))
    scale = _read(tokens, token_format.scales).to(product_dtype)
    unpacked = torch.empty((*tokens.shape[:-1], token_format.d_qk), dtype=dtype, device=tokens.device)
    unpacked[..., :nope_dim] = (tiles.to(product_dtype) * scale.unsqueeze(-1)).flatten(-2)
    if token_format.rope is not None:
        unpacked[..., nope_dim:] = _read(tokens, token_format.rope)
    return unpacked


def _write(packed: torch.Tensor, field: Field, values: torch.Tensor) -> None:
    """Puts (..., count) elements of the field's width at the field's bytes."""
    packed[..., field.offset : field.end] = values.contiguous().view(torch.uint8)


def _read(tokens: torch.Tensor, field: Field) -> torch.Tensor:
    """The field of each token as (..., count) in the field's dtype. A copy: a view needs an aligned offset."""
    chosen = tokens[..., field.offset : field.end].clone(memory_format=torch.contiguous_format)
    return chosen.view(getattr(torch, field.dtype))
