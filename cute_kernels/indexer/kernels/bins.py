"""Logits as integers in their order, bins of such integers, and the bin in which a wanted count is reached.

A float32 becomes a signed 32-bit *key*: its bits if it is positive, the complement of its magnitude if it is negative.
-0.0 counts as 0.0, NaN as -inf. No number has the key `ABSENT`, which is below all others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.indexer.topk_spec import BINS

ABSENT = -(2**31)
HALF = BINS // 2
FRACTION_BITS = 5
SHIFT = 23 - FRACTION_BITS
OFFSET = 107 << FRACTION_BITS
"""Bins begin at 2^-20: 32 binades of 32 bins. The first bin has smaller magnitudes too, the last one larger ones."""
ABOVE_INFINITY = 0x7F800001


@cute.jit
def ordered(x: Float32) -> Int32:
    """Returns the key of a number."""
    number = cute.arch.fmax(x + Float32(0.0), -Float32.inf)
    bits = number.bitcast(Int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@cute.jit
def bin_of(key: Int32) -> Int32:
    """Returns the bin of a key: 1024 for zero, 1025 to 2047 for positive numbers, 1022 down to 0 for negative ones."""
    sign = key >> 31
    magnitude = key ^ sign
    step = cutlass.max((magnitude >> SHIFT) - OFFSET, cutlass.min(magnitude, 1))
    return HALF + (cutlass.min(step, HALF - 1) ^ sign)


@cute.jit
def keys_of_bin(bin_index: Int32):
    """Returns (first, end) of the keys in a bin."""
    is_positive = bin_index >= HALF
    step = cutlass.select_(is_positive, bin_index - HALF, HALF - 1 - bin_index)
    begin, end = (step + OFFSET) << SHIFT, (step + OFFSET + 1) << SHIFT
    begin = cutlass.select_(step <= 1, step, begin)
    end = cutlass.select_(step == 0, Int32(1), cutlass.select_(step == HALF - 1, Int32(ABOVE_INFINITY), end))
    return cutlass.select_(is_positive, begin, -end), cutlass.select_(is_positive, end, -begin)


@cute.jit
def shift_for(width: Int32) -> Int32:
    """Returns the smallest shift after which `width` keys fall into the bins of a histogram."""
    return cutlass.max(21 - Int32(cute.arch.clz(width - 1)), 0)


@cute.jit
def count(histogram: Int32, bin_index: Int32):
    """Adds 1 to a bin of the histogram at an address in shared memory.

    It adds a constant 1: ptxas then counts additions to one address instead of making them one by one.
    """
    cute.arch.inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[histogram + 4 * bin_index])
