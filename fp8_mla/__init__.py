"""The 656-byte FP8 token format of multi-head latent attention caches: layout, packing, slots and a reference decode.

Needs torch alone. Works on CPU and CUDA tensors; importing it touches no device.
"""

from fp8_mla.layout import (
    CACHE_DTYPES,
    CODE_OFFSET,
    FP8_MAX,
    FP8_NAN,
    MIN_SCALE,
    NOPE_DIM,
    NUM_SCALES,
    QK_DIM,
    QUANT_TILE,
    ROPE_DIM,
    ROPE_OFFSET,
    SCALE_OFFSET,
    TOKEN_BYTES,
    V_DIM,
    as_pages,
)
from fp8_mla.pack import pack, unpack
from fp8_mla.reference import reference_decode
from fp8_mla.slots import INVALID_SLOT, slots_from_block_table, slots_from_positions, valid_slots

__all__ = [
    "CACHE_DTYPES",
    "CODE_OFFSET",
    "FP8_MAX",
    "FP8_NAN",
    "INVALID_SLOT",
    "MIN_SCALE",
    "NOPE_DIM",
    "NUM_SCALES",
    "QK_DIM",
    "QUANT_TILE",
    "ROPE_DIM",
    "ROPE_OFFSET",
    "SCALE_OFFSET",
    "TOKEN_BYTES",
    "V_DIM",
    "as_pages",
    "pack",
    "reference_decode",
    "slots_from_block_table",
    "slots_from_positions",
    "unpack",
    "valid_slots",
]
