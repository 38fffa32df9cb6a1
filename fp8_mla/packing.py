"""Quantize latent vectors into tokens of a cache, and read them back.

`pack` defines the quantization rules bit by bit: the append kernel must write equal bytes. The rules in words:
`docs/users/formats.md`. A packed token is all its rows one after the other; `fp8_mla.pages` puts the rows to their
places in a page.
"""

from __future__ import annotations

import torch

from fp8_mla.formats import (
    E8M0_BIAS,
    E8M0_NAN,
    FP4_MAX,
    FP4_VALUES,
    FP8_MAX,
    FP8_NAN,
    MIN_FP4_SCALE,
    MIN_SCALE,
    MIN_SCALE_EXPONENT,
    V3_2,
    Field,
    TokenFormat,
    as_format,
)
from fp8_mla.layout import describe, token_bytes

_BF16_MAX = torch.finfo(torch.bfloat16).max
_PACK_DTYPES = (torch.bfloat16, torch.float32)
_UNPACK_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def _absmax(tiles: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of each quant tile: (..., tiles, elements) float32 -> (..., tiles, 1), finite."""
    # A NaN must not decide the scale of its neighbours, and an Inf must leave them a finite one.
    return tiles.abs().nan_to_num(nan=0.0, posinf=_BF16_MAX).amax(dim=-1, keepdim=True)


def _divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divides exactly: on CUDA torch would replace division by a number with multiplication by its reciprocal.

    1/448 is not a float32: 55% of all bfloat16 magnitudes would get a scale with a wrong last bit.
    """
    return x / torch.full_like(x, divisor)


def _e4m3_codes(scaled: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Returns codes as uint8: clamped to +-448 and rounded to nearest even; any NaN of `tiles` becomes one code."""
    codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(tiles.isnan(), FP8_NAN)


def _float32_scales(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, and the largest magnitude over 448 as a float32 scale, which is always positive and finite."""
    absmax = _absmax(tiles)
    scale = torch.where(absmax == 0, 1.0, _divide(absmax, FP8_MAX).clamp_min(MIN_SCALE))
    return _e4m3_codes(tiles * scale.reciprocal(), tiles), scale


def _power_of_two_scales(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and ue8m0 scales: the least power of two not below the largest magnitude over 448."""
    bits = _absmax(tiles).view(torch.int32)
    # 448 is 1.75 x 2^8: a magnitude (1 + m) x 2^e needs 2^(e - 8), or twice that if 1 + m is above 1.75
    above = (bits & 0x7FFFFF) > 0x600000
    exponent = ((bits >> 23) - E8M0_BIAS - 8 + above.to(torch.int32)).clamp_min(MIN_SCALE_EXPONENT)
    inverse = ((E8M0_BIAS - exponent) << 23).view(torch.float32)
    return _e4m3_codes(tiles * inverse, tiles), (exponent + E8M0_BIAS).to(torch.uint8)


def _fp4_scales(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, one a byte, and the largest magnitude over 6 as an e4m3 scale."""
    absmax = tiles.abs().amax(dim=-1, keepdim=True)  # NaN if an element is NaN
    unusable = ~(absmax < torch.inf)
    rounded = _divide(absmax.masked_fill(unusable, 0.0), FP4_MAX).clamp(MIN_FP4_SCALE, FP8_MAX).to(torch.float8_e4m3fn)
    quotient = tiles / rounded.float()
    # the midpoint of two values belongs to the even code: to the lower one of every other pair
    magnitude, code = quotient.abs(), torch.zeros_like(tiles, dtype=torch.uint8)
    for lower, (small, large) in enumerate(zip(FP4_VALUES, FP4_VALUES[1:], strict=False)):
        middle = (small + large) / 2
        code += (magnitude > middle if lower % 2 == 0 else magnitude >= middle).to(torch.uint8)
    code += quotient.signbit().to(torch.uint8) << 3
    scale = rounded.view(torch.uint8).masked_fill(unusable, FP8_NAN)
    return code.masked_fill(unusable, 0), scale


def pack(kv: torch.Tensor, *, token_format: TokenFormat | str = V3_2) -> torch.Tensor:
    """Quantize latent key/value vectors into tokens of a cache.

    Elements that share a scale, 128 in the V3.2 format, are a quant tile. Its scale is

    - float32 ("v3.2", "v3.2_nope"): the largest magnitude over 448, at least 2**-126, and 1 for a tile of zeros;
    - ue8m0 ("v4", "v4.1"): the least power of two that is not below the largest magnitude over 448, at least 2**-22;
    - e4m3 ("v4.1_fp4"): the largest magnitude over 6, from 2**-9 to 448, rounded to nearest even.

    Codes are the elements over the scale, rounded to nearest even, saturating. With e4m3 codes a NaN does not count for
    the scale and becomes code 0x7F; an Inf counts as the largest finite bfloat16 and saturates. e2m1 codes have no NaN:
    the scale of a tile with a NaN or an Inf is NaN, 0x7F, and its codes are 0. Elements with rotary encoding are kept
    as bfloat16, bit for bit. Bytes of no field are 0.

    Args:
        kv: (..., 576) bfloat16 or float32, any strides: 512 latent elements, then 64 with rotary encoding. A float32
            rope part is rounded to bfloat16. Other formats than "v3.2" have 512 elements in all.
        token_format: a format or its name.

    Returns:
        (..., 656) uint8 on the same device, contiguous; for a format of two rows the data row, then the scale row.

    Raises:
        TypeError: `kv` is not a tensor of one of these dtypes.
        ValueError: its last dimension is not 576, or there is no such format.
    """
    token_format = as_format(token_format)
    if not isinstance(kv, torch.Tensor) or kv.is_nested or kv.dtype not in _PACK_DTYPES:
        raise TypeError(f"kv: got {describe(kv)}; needs a tensor of bfloat16 or float32")
    if kv.ndim == 0 or kv.shape[-1] != token_format.d_qk:
        raise ValueError(f"kv: got {describe(kv)}; needs {token_format.d_qk} elements in the last dimension")
    kv, nope_dim = kv.detach(), token_format.nope_dim
    tiles = kv[..., :nope_dim].float().reshape((*kv.shape[:-1], token_format.num_scales, token_format.quant_tile))
    if token_format.codes.bits == 4:
        codes, scale = _fp4_scales(tiles)
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    elif token_format.scales.dtype == "float8_e8m0fnu":
        codes, scale = _power_of_two_scales(tiles)
    else:
        codes, scale = _float32_scales(tiles)
    packed = torch.zeros((*kv.shape[:-1], token_format.token_bytes), dtype=torch.uint8, device=kv.device)
    _write(packed, token_format, token_format.codes, codes.flatten(-2))
    _write(packed, token_format, token_format.scales, scale.squeeze(-1))
    if token_format.rope is not None:
        _write(packed, token_format, token_format.rope, kv[..., nope_dim:].bfloat16())
    return packed


def unpack(
    cache: torch.Tensor, dtype: torch.dtype = torch.bfloat16, *, token_format: TokenFormat | str = V3_2
) -> torch.Tensor:
    """Read tokens of a cache back as vectors: code times scale, then the rope part.

    The product is exact in float64. For float32 it is rounded once; for bfloat16 the float32 product is rounded again,
    which changes nothing in a cache with ue8m0 or e4m3 scales unless it leaves bfloat16's range. A scale is used as it
    is, whoever wrote it; a NaN scale makes its quant tile NaN.

    Args:
        cache: (..., 656) uint8 or float8_e4m3fn, any strides: tokens as `pack` returns them.
        dtype: bfloat16, float32 or float64.
        token_format: a format or its name. Numbers in this docstring are those of the default.

    Returns:
        (..., 576) in `dtype` on the same device, contiguous.

    Raises:
        TypeError: `cache` or `dtype` is of another type.
        ValueError: the last dimension of `cache` is not 656, or there is no such format.
    """
    token_format = as_format(token_format)
    tokens = token_bytes(cache, token_format=token_format)
    if dtype not in _UNPACK_DTYPES:
        raise TypeError(f"dtype: got {dtype}; needs torch.bfloat16, torch.float32 or torch.float64")
    product_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    nope_dim = token_format.nope_dim
    codes = _values(tokens, token_format, token_format.codes, product_dtype)
    tiles = codes.unflatten(-1, (token_format.num_scales, token_format.quant_tile))
    scale = _values(tokens, token_format, token_format.scales, product_dtype)
    unpacked = torch.empty((*tokens.shape[:-1], token_format.d_qk), dtype=dtype, device=tokens.device)
    unpacked[..., :nope_dim] = (tiles * scale.unsqueeze(-1)).flatten(-2)
    if token_format.rope is not None:
        unpacked[..., nope_dim:] = _values(tokens, token_format, token_format.rope, dtype)
    return unpacked


def _write(packed: torch.Tensor, token_format: TokenFormat, field: Field, values: torch.Tensor) -> None:
    """Writes (..., count) items of the field's width at the field's bytes."""
    start = token_format.start(field)
    packed[..., start : start + field.num_bytes] = values.contiguous().view(torch.uint8)


def _values(tokens: torch.Tensor, token_format: TokenFormat, field: Field, dtype: torch.dtype) -> torch.Tensor:
    """Reads the field's elements of each token, (..., count), exact in float32 and wider types."""
    start = token_format.start(field)
    # a copy: a view in another dtype needs an aligned offset
    chosen = tokens[..., start : start + field.num_bytes].clone(memory_format=torch.contiguous_format)
    if field.dtype == "float4_e2m1fn_x2":
        values = torch.tensor(FP4_VALUES, dtype=dtype, device=tokens.device)
        both = torch.stack([chosen & 0xF, chosen >> 4], dim=-1).flatten(-2)
        return torch.cat([values, -values])[both.int()]
    if field.dtype == "float8_e8m0fnu":
        # the byte is a float32's exponent; 0 is 2^-127, whose exponent is that of subnormal numbers
        bits = chosen.int() << 23
        bits = torch.where(chosen == 0, 0x00400000, bits).masked_fill(chosen == E8M0_NAN, 0x7FC00000)
        return bits.view(torch.float32).to(dtype)
    return chosen.view(getattr(torch, field.dtype)).to(dtype)
