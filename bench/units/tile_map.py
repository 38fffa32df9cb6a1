"""Where the threads of a warpgroup put the pieces of gathered rows: shared by the kernels that convert."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32
from cutlass.tensor_utils import LayoutEnum

from bench.units.spec import QK, TILE


def tile_layout(rows: int, stages: int):
    """Shared memory of bf16 tiles as wgmma reads them, 128-byte swizzle: (rows, 576, stages)."""
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, rows, QK), BFloat16, stages)


def lanes(tidx):
    """(row of a pass of 16, half of a quantization tile, quarter of that half) of a thread of the warpgroup."""
    lane, warp_idx = tidx % 32, tidx // 32
    odd_row, phase = lane // 4 % 2, lane // 8
    return 4 * warp_idx + 2 * (phase // 2) + odd_row, (phase + odd_row) % 2, lane % 4


def targets(pointer: cute.Pointer, tidx, rows: int, passes: int, stages: int):
    """Tensors (8, 4, passes, stages) of the even and the odd 16-byte chunks of a thread's codes, and of its rope part.

    The 16-byte chunk c of row r is at c ^ (r % 8), and 16 codes become two chunks, so four pieces of an even and four
    of an odd row fill all eight groups of banks.
    """
    row, half, quarter = lanes(tidx)
    x, row_start = row % 8, half * rows * 64 + row * 64
    places = (
        row_start + ((2 * quarter) ^ x) * 8,
        row_start + ((2 * quarter + 1) ^ x) * 8,
        8 * rows * 64 + row * 64 + ((4 * half + quarter) ^ x) * 8,
    )
    layout = cute.make_layout((8, 4, passes, stages), stride=(1, 2 * rows * 64, 16 * 64, rows * QK))
    return [cute.make_tensor(pointer + cute.assume(place, divby=8), layout) for place in places]


@cute.jit
def convert(raw: cute.Tensor, even: cute.Tensor, odd: cute.Tensor, rope: cute.Tensor):
    """Stores a row: raw (16, 6) bytes, four pieces of codes, one of the rope part, and the four scales."""
    cute.autovec_copy(cute.recast_tensor(raw[None, 4], BFloat16), rope)
    scales = cute.recast_tensor(raw[None, 5], Float32)
    for j in cutlass.range_constexpr(4):
        out = cute.make_rmem_tensor((8, 2), BFloat16)
        codes = cute.recast_tensor(raw[None, j], Float8E4M3FN)
        for half in cutlass.range_constexpr(2):  # eight at a time: with sixteen live, ptxas spills
            eight = cute.make_tensor(codes.iterator + 8 * half, cute.make_layout(8)).load().to(Float32)
            out[None, half].store((eight * scales[j]).to(BFloat16))
        cute.autovec_copy(out[None, 0], even[None, j])
        cute.autovec_copy(out[None, 1], odd[None, j])
