"""The rotation of `gqa.rotation_reference` in registers, in place.

A lane has a part of a vector, neighbouring elements, and the lanes beside it have the other parts in order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.gqa.codes import FLIPPED


@cute.jit
def hadamard(acc: cute.Tensor, part: Int32, lanes: cutlass.Constexpr):
    """Multiplies the vector of `lanes` neighbours, all of which call it, by H; other lanes of the warp need not call.

    Sums of neighbours come first, as in the reference.
    """
    size = const_expr(cute.size(acc))
    mask = Int32((1 << lanes) - 1) << (cute.arch.lane_idx() & -lanes) if const_expr(lanes < 32) else -1
    for bit in cutlass.range_constexpr(size.bit_length() - 1):
        for low in cutlass.range_constexpr(size):
            if const_expr(low & (1 << bit) == 0):
                a, b = acc[low], acc[low | 1 << bit]
                acc[low], acc[low | 1 << bit] = a + b, a - b
    for bit in cutlass.range_constexpr(lanes.bit_length() - 1):
        sign = ((part >> bit) & 1) << 31
        for i in cutlass.range_constexpr(size):
            other = cute.arch.shuffle_sync_bfly(acc[i], 1 << bit, mask=mask)
            acc[i] = other + (acc[i].bitcast(Int32) ^ sign).bitcast(Float32)


@cute.jit
def flip_signs(acc: cute.Tensor, part: Int32, d: cutlass.Constexpr):
    """Multiplies a part of a vector of d by D."""
    size = const_expr(cute.size(acc))
    parts = const_expr(32 // size)  # parts of a word
    flipped = Int32(0)
    for word in cutlass.range_constexpr(d // 32):
        bits = const_expr((FLIPPED >> 32 * word) & 0xFFFFFFFF)
        bits = const_expr(bits - (1 << 32) if bits >> 31 else bits)
        flipped = cutlass.select_(part // parts == word, Int32(bits), flipped)
    flipped = flipped >> (size * (part % parts))
    for i in cutlass.range_constexpr(size):
        acc[i] = (acc[i].bitcast(Int32) ^ (((flipped >> i) & 1) << 31)).bitcast(Float32)
