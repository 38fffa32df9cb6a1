"""Online softmax in units of log2: row_max, row_sum and the rescaling of accumulators by rows."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import wgmma

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@cute.jit
def finite(x: Float32) -> Float32:
    """Returns x, or 0 for the -inf of a row without keys: exp2(-inf - 0) is 0, but exp2(-inf - -inf) would be NaN."""
    return cutlass.select_(x == -Float32.inf, Float32(0.0), x)


@cute.jit
def rescaling(old_max: Float32, new_max: Float32) -> Float32:
    """Returns the factor of a row's O and row_sum when its row_max moves."""
    return cute.math.exp2(old_max - finite(new_max), fastmath=True)


@cute.jit
def log_sum_exp(row_max: Float32, row_sum: Float32) -> Float32:
    """Returns the natural logarithm of row_sum * 2^row_max; -inf for a row without keys."""
    lse = (row_max + cute.math.log2(row_sum, fastmath=True)) * LN_2
    return cutlass.select_(row_sum == 0.0, -Float32.inf, lse)


def result_lse(lse: Float32, inf_if_empty: bool) -> Any:
    """Returns the log-sum-exp of a result. With `inf_if_empty`, a constant of the spec, a row without keys has +inf."""
    return cutlass.select_(lse == -Float32.inf, Float32.inf, lse) if inf_if_empty else lse


@cute.jit
def multiply_rows(accumulators, factor: cute.Tensor):
    """Multiplies all accumulators by `factor` (2), one for each of a thread's two rows."""
    for i in cutlass.range_constexpr(len(accumulators)):
        o = wgmma.by_row(accumulators[i])
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                o[r, c] *= factor[r]


@cute.jit
def rescale(accumulators, alpha: cute.Tensor):
    """Calls `multiply_rows`, unless no row_max of the warp has moved."""
    if not cute.arch.vote_all_sync(alpha[0] == 1.0 and alpha[1] == 1.0):
        multiply_rows(accumulators, alpha)


@cute.jit
def normalize(accumulators, row_sum: cute.Tensor, denominator: cute.Tensor):
    """Divides accumulators by `denominator` (2), row by row; a row without keys, whose row_sum is 0, becomes 0."""
    for r in cutlass.range_constexpr(2):
        denominator[r] = cutlass.select_(row_sum[r] == 0.0, Float32(0.0), 1.0 / denominator[r])
    multiply_rows(accumulators, denominator)


def exponent(x: Float32) -> Int32:
    """Returns floor(log2(x)) of x >= 0; -127 for 0 and subnormal numbers, 128 for Inf and NaN."""
    return (x.bitcast(Int32) >> 23) - 127


@cute.jit
def block_scale(peak: Float32) -> Float32:
    """Returns the fp16 block scale of values up to `peak`: a power of two that divides them to below 2^15."""
    return power_of_two(cutlass.min(cutlass.max(exponent(peak), -112), 127) - 14)


def power_of_two(n: Int32) -> Float32:
    """Returns 2^n, n from -126 to 127."""
    return ((n + 127) << 23).bitcast(Float32)
