"""Token formats of quantized multi-head latent attention caches: bytes, packing, pages, slots and a reference decode.

It needs torch and nothing else, and works on CPU and CUDA tensors. Importing it touches no device; torch is loaded with
the first name that needs it. `fp8_mla.formats` is plain Python.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8_mla.formats import (
        CACHE_LAYOUTS,
        FORMATS,
        FP8_MAX,
        FP8_NAN,
        INDEX_KEY,
        MIN_SCALE,
        PAIRS,
        V3_2,
        V3_2_NOPE,
        V4,
        V4_1,
        V4_1_FP4,
        PageLayout,
        TokenFormat,
    )
    from fp8_mla.indexer import pack_index_keys, reference_index_decode, reference_index_logits, unpack_index_keys
    from fp8_mla.layout import (
        CACHE_DTYPES,
        CODE_OFFSET,
        NOPE_DIM,
        NUM_SCALES,
        QK_DIM,
        QUANT_TILE,
        ROPE_DIM,
        ROPE_OFFSET,
        SCALE_OFFSET,
        TOKEN_BYTES,
        V_DIM,
    )
    from fp8_mla.packing import pack, unpack
    from fp8_mla.pages import as_pages, read_pages, row_views, write_pages
    from fp8_mla.reference import reference_decode
    from fp8_mla.slots import INVALID_SLOT, slots_from_block_table, slots_from_positions, valid_slots

__all__ = [
    "CACHE_DTYPES",
    "CACHE_LAYOUTS",
    "CODE_OFFSET",
    "FORMATS",
    "FP8_MAX",
    "FP8_NAN",
    "INDEX_KEY",
    "INVALID_SLOT",
    "MIN_SCALE",
    "NOPE_DIM",
    "NUM_SCALES",
    "PAIRS",
    "PageLayout",
    "QK_DIM",
    "QUANT_TILE",
    "ROPE_DIM",
    "ROPE_OFFSET",
    "SCALE_OFFSET",
    "TOKEN_BYTES",
    "TokenFormat",
    "V3_2",
    "V3_2_NOPE",
    "V4",
    "V4_1",
    "V4_1_FP4",
    "V_DIM",
    "as_pages",
    "pack",
    "pack_index_keys",
    "read_pages",
    "reference_decode",
    "reference_index_decode",
    "reference_index_logits",
    "row_views",
    "slots_from_block_table",
    "slots_from_positions",
    "unpack",
    "unpack_index_keys",
    "valid_slots",
    "write_pages",
]

_MODULES = ("formats", "layout", "slots", "packing", "pages", "indexer", "reference")
"""Modules in which a name is looked up, in this order: the first needs no torch."""


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            globals()[name] = getattr(found, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
