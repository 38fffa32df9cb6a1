"""The numbers of the V3.2 format under the names that users import, and the checks of a cache tensor."""

from __future__ import annotations

from typing import Final

import torch

from fp8_mla.formats import V3_2, TokenFormat

NOPE_DIM: Final = V3_2.nope_dim
"""Elements without position encoding, stored as float8 e4m3 codes: 512. They are also the value."""
ROPE_DIM: Final = V3_2.rope_dim
"""Elements with rotary position encoding, stored as bfloat16: 64."""
QK_DIM: Final = V3_2.d_qk
"""Elements of a key (and of a query): 576."""
V_DIM: Final = V3_2.d_v
"""Elements of a value, the leading ones of its key: 512."""
QUANT_TILE: Final = V3_2.quant_tile
"""Consecutive elements of one token that share a scale: 128."""
NUM_SCALES: Final = V3_2.num_scales
"""Scales of a token: 4."""

CODE_OFFSET: Final = V3_2.codes.offset
"""First byte of the e4m3 codes."""
SCALE_OFFSET: Final = V3_2.scales.offset
"""First byte of the float32 scales: 512."""
ROPE_OFFSET: Final = V3_2.field("rope").offset
"""First byte of the bfloat16 rope part: 528."""
TOKEN_BYTES: Final = V3_2.token_bytes
"""Bytes of one token: 656."""

CACHE_DTYPES: Final = (torch.uint8, torch.float8_e4m3fn)
"""The dtypes that a cache tensor may have. Both mean raw bytes."""


def describe(value: object) -> str:
    """Describes a tensor by shape, dtype and device, anything else by its repr, for the "got" half of an error."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "a nested tensor"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"


def check_same_device(name: str, tensor: torch.Tensor | None, device: torch.device) -> None:
    """Raise ValueError if `tensor` is on another device than the queries."""
    if isinstance(tensor, torch.Tensor) and tensor.device != device:
        raise ValueError(f"{name}: got {describe(tensor)}; needs to be on {device} like q")


def token_bytes(cache: torch.Tensor, name: str = "cache", *, token_format: TokenFormat = V3_2) -> torch.Tensor:
    """View a (..., 656) uint8 or float8_e4m3fn tensor as uint8.

    Args:
        cache: bytes of tokens, each all rows of a token one after the other.
        name: name of the argument, for messages.
        token_format: how many bytes a token has; 656 by default.

    Raises:
        TypeError: `cache` is not a tensor of one of these dtypes.
        ValueError: its last dimension is not 656.
    """
    if not isinstance(cache, torch.Tensor) or cache.is_nested or cache.dtype not in CACHE_DTYPES:
        raise TypeError(f"{name}: got {describe(cache)}; needs a tensor of uint8 or float8_e4m3fn")
    if cache.ndim == 0 or cache.shape[-1] != token_format.token_bytes:
        raise ValueError(f"{name}: got {describe(cache)}; needs {token_format.token_bytes} bytes in the last dimension")
    return cache.view(torch.uint8)
