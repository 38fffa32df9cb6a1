"""Softmax of a tile of scores in the forward, for the two rows of a thread; attend.py calls it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import softmax, wgmma

RESCALE_THRESHOLD = 8.0  # log2 of the growth of a maximum that moves row_max, and so of the largest P


@cute.jit
def exp2_once(x: Float32) -> Float32:
    """Returns 2^x from the MUFU, by an instruction that the compiler does not duplicate.

    The compiler copies an ordinary exp2 behind the loop, and keeps its argument in a register for that.
    """
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def keep_before_wait(row_sum: cute.Tensor):
    """Keeps the exponentials before the wait that follows, by a branch that is never taken: sums are not negative.

    ptxas moves a wait up over arithmetic that does not need the products, here to before the maxima. Then the softmax
    would not overlap with PV. ptxas does not move a wait over a branch.
    """
    if cute.arch.vote_any_sync(row_sum[0] + row_sum[1] < 0.0):
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(0)])


@cute.jit
def exponentiate(
    acc_s: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    alpha: cute.Tensor,
    scale_log2: Float32,
):
    """Turns S into P and updates row_max and row_sum; O has to be multiplied by `alpha`.

    row_max moves only for a score that is more than 8 ahead, in units of log2. P is at most 2^8, which float16 and
    bfloat16 hold as precisely as 1, and O is hardly ever rescaled.
    """
    s = wgmma.by_row(acc_s)
    columns = cute.size(s, mode=[1])
    for r in cutlass.range_constexpr(2):
        peak = s[r, 0]
        for c in cutlass.range_constexpr(1, columns):
            peak = cute.arch.fmax(peak, s[r, c])
        peak = cute.arch.warp_reduction_max(peak, threads_in_group=4)
        old = row_max[r]
        # -inf - -inf is NaN, and no NaN is above the threshold: a row without keys so far keeps -inf
        new = cutlass.select_((peak - old) * scale_log2 > RESCALE_THRESHOLD, peak, old)
        row_max[r] = new
        shift = softmax.finite(new) * scale_log2
        alpha[r] = cute.math.exp2((old - softmax.finite(new)) * scale_log2, fastmath=True)  # mostly exactly 1
        tile_sum = Float32(0.0)
        for c in cutlass.range_constexpr(columns):
            x = s[r, c] * scale_log2 - shift
            s[r, c] = exp2_once(x)
            tile_sum += s[r, c]
        row_sum[r] = row_sum[r] * alpha[r] + tile_sum
