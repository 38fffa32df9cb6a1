"""Softmax of a tile of scores in the forward, of the two rows that a thread has; see forward.py."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import softmax, wgmma

SLACK = 8.0  # log2 of what P may exceed 1 by


@cute.jit
def exp2_once(x: Float32) -> Float32:
    """2^x by the MUFU, as an instruction that the compiler does not repeat.

    Of an ordinary one it makes a second copy behind the loop, and keeps the arguments in registers for it.
    """
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def hold(row_sum: cute.Tensor):
    """Keeps the wait that follows behind the exponentials. No instruction of it matters: the sums are positive.

    ptxas moves a wait for products up over arithmetic that does not need them, here to before the maxima, and the
    softmax would no longer run beside PV. It does not move a wait over a branch.
    """
    if cute.arch.vote_any_sync(row_sum[0] + row_sum[1] < 0.0):
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(0)])


@cute.jit
def exponentials(
    acc_s: cute.Tensor,
    reference: cute.Tensor,
    row_sum: cute.Tensor,
    alpha: cute.Tensor,
    scale_log2: Float32,
):
    """S becomes P; references move where a score is too far ahead, and `alpha` is what O is to be scaled by."""
    s = wgmma.by_row(acc_s)
    columns = cute.size(s, mode=[1])
    for r in cutlass.range_constexpr(2):
        peak = s[r, 0]
        for c in cutlass.range_constexpr(1, columns):
            peak = cute.arch.fmax(peak, s[r, c])
        peak = cute.arch.warp_reduction_max(peak, threads_in_group=4)
        old = reference[r]
        # -inf - -inf is NaN, which is not above: a row without keys so far keeps -inf
        new = cutlass.select_((peak - old) * scale_log2 > SLACK, peak, old)
        reference[r] = new
        shift = softmax.finite(new) * scale_log2
        alpha[r] = cute.math.exp2((old - softmax.finite(new)) * scale_log2, fastmath=True)  # 1 exactly, mostly
        partial = Float32(0.0)
        for c in cutlass.range_constexpr(columns):
            x = s[r, c] * scale_log2 - shift
            s[r, c] = exp2_once(x)
            partial += s[r, c]
        row_sum[r] = row_sum[r] * alpha[r] + partial
