"""Rows of a key tile in shared memory: which part of a row a thread of the load warpgroup stores, and where."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.mla.crossover.kernels.tile import BLOCK
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE


class RowPart(NamedTuple):
    """The part of a row that a thread stores in each pass of 16 rows.

    row      the row, of 16
    column   its first code of 16 in a quant tile
    even     place of its even chunk of eight codes, in elements after the first row of the pass
    odd      place of its odd chunk
    rope     place of its chunk of the rope part
    """

    row: Int32
    column: Int32
    even: Int32
    odd: Int32
    rope: Int32


class RowTargets(NamedTuple):
    """Targets of one row of a thread: even and odd chunks, (8, quant tiles) float16 each, and the rope chunk (8)."""

    even: cute.Tensor
    odd: cute.Tensor
    rope: cute.Tensor


def row_part(tid: Int32) -> RowPart:
    """Returns the part of thread `tid`; row % 8, which swizzles chunks, is the same in every pass."""
    lane, warp_idx = tid % 32, tid // 32
    quarter, odd_row, store_phase = lane % 4, lane // 4 % 2, lane // 8
    row, half = 4 * warp_idx + 2 * (store_phase // 2) + odd_row, (store_phase + odd_row) % 2
    swizzle = row % 8
    start = half * BLOCK + row * BLOCK_COLUMNS
    even, odd = (start + ((2 * quarter + i) ^ swizzle) * 8 for i in range(2))
    rope = row * BLOCK_COLUMNS + ((4 * half + quarter) ^ swizzle) * 8
    return RowPart(row, 64 * half + 16 * quarter, even, odd, rope)


@cute.jit
def row_targets(smem, part: RowPart, stage: Int32, first_row: Int32) -> RowTargets:
    """Returns the targets of a thread's row in the pass over rows `first_row`, first_row + 1, ... of a stage."""
    nope, chunks = smem.nope.data_ptr(), cute.make_layout((8, QUANT_TILES), stride=(1, 2 * BLOCK))
    start = stage * (TOKENS_PER_TILE * NOPE) + first_row * BLOCK_COLUMNS
    sEven = cute.make_tensor(nope + cute.assume(start + part.even, divby=8), chunks)
    sOdd = cute.make_tensor(nope + cute.assume(start + part.odd, divby=8), chunks)
    start = stage * (TOKENS_PER_TILE * ROPE) + first_row * BLOCK_COLUMNS
    sRope = cute.make_tensor(smem.rope.data_ptr() + cute.assume(start + part.rope, divby=8), cute.make_layout(8))
    return RowTargets(sEven, sOdd, sRope)
