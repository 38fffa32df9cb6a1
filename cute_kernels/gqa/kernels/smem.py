"""Shared memory of the GQA decode kernel."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int8, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.gqa.spec import GqaDecodeSpec

DTYPES = {"int8": Int8, "float8_e4m3fn": Float8E4M3FN, "bfloat16": BFloat16, "float16": Float16, "float32": Float32}
QK_FACTOR, SINK, OUT_FACTOR, ROW_TERMS = 0, 1, 2, 3
"""Terms of a query row: the factor of S but for the softmax scale, the sink, the factor of O; and how many."""


class SharedMemory(NamedTuple):
    """Pointers to the parts of a CTA's shared memory.

    tiles      stages x (K, V) of a tile, as TMA writes them
    q          Q as fragments of B: a lane's 16 bytes of two k steps lie together
    sums       O of each warp: (d, query row, warp) float32, rows padded to d + 4
    stats      (query row, warp, maximum or sum) float32
    row_terms  two sets of (query row, term) float32, used in turns
    scales     stages x (key, scale of the token) float32
    valid      stages x a bit for each box of a tile: its page exists
    full       mbarriers, one a stage; see barriers.py
    empty      the same
    arrived    how many CTAs had finished a sequence before this one
    """

    tiles: cute.Pointer
    q: cute.Pointer
    sums: cute.Pointer
    stats: cute.Pointer
    row_terms: cute.Pointer
    scales: cute.Pointer
    valid: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    arrived: cute.Pointer


def allocate(spec: GqaDecodeSpec) -> SharedMemory:
    """Lays out the shared memory of a CTA."""
    smem = SmemAllocator()
    rows, stages = spec.columns, spec.stages
    tile_values = 2 * stages * spec.tile_bytes // spec.itemsize
    tiles = smem.allocate_array(DTYPES[spec.kv_dtype], tile_values, byte_alignment=1024)
    q = smem.allocate_array(DTYPES[spec.k_operand], rows * spec.d, byte_alignment=16)
    sums = smem.allocate_array(Float32, spec.warps * rows * spec.sums_stride, byte_alignment=16)
    stats = smem.allocate_array(Float32, 2 * spec.warps * rows, byte_alignment=16)
    row_terms = smem.allocate_array(Float32, 2 * ROW_TERMS * rows, byte_alignment=16)
    scales = smem.allocate_array(Float32, max(stages * spec.scale_values, 1), byte_alignment=16)
    valid = smem.allocate_array(Int32, stages * spec.valid_words, byte_alignment=4)
    full = smem.allocate_array(Int64, 2 * stages, byte_alignment=8)
    arrived = smem.allocate_array(Int32, 1, byte_alignment=4)
    return SharedMemory(tiles, q, sums, stats, row_terms, scales, valid, full, full + stages, arrived)


def row_terms_tensor(spec: GqaDecodeSpec, row_terms: cute.Pointer) -> cute.Tensor:
    """One set of row terms as (query row, term)."""
    return cute.make_tensor(row_terms, cute.make_layout((spec.columns, ROW_TERMS)))
