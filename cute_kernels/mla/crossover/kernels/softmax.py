"""Softmax of the crossover kernel: the QK warpgroup makes P of its S and hands it to the PV warpgroups."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from cute_kernels.device import softmax, wgmma
from cute_kernels.mla.crossover.kernels.smem import P_SHIFT, RowState, p_fragment, shared_row_state, tiled_mmas
from cute_kernels.mla.crossover.kernels.tile import STAGES
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE


@cute.jit
def store_p(smem, acc_s: cute.Tensor, rows: RowState, scale_log2: Float32, stage: Int32, last, tid: Int32):
    """Stores P of a key tile as float16 over its rope part, and the rescaling factors; updates `rows`.

    With the `last` key tile of a work tile it also stores row_max and row_sum. Until then a thread's row_sum covers
    only its own columns.
    """
    row_max, row_sum = rows
    thr = tiled_mmas().qk.get_slice(tid)
    mask_layout = cute.make_layout((WIDE, TOKENS_PER_TILE, STAGES), stride=(0, 1, TOKENS_PER_TILE))
    mask = wgmma.by_row(thr.partition_C(smem.mask.get_tensor(mask_layout)[None, None, stage]))
    s = wgmma.by_row(acc_s)
    columns = cute.size(s, mode=[1])
    for c in cutlass.range_constexpr(columns):
        bias = mask[0, c]
        for r in cutlass.range_constexpr(2):
            s[r, c] = s[r, c] * scale_log2 + bias
    shared = shared_row_state(smem, stage, tid)
    for r in cutlass.range_constexpr(2):
        old_max = row_max[r]
        maxima = [cute.arch.fmax(s[r, c], s[r, c + columns // 2]) for c in range(columns // 2)]
        while const_expr(len(maxima) > 1):
            maxima = [cute.arch.fmax(maxima[i], maxima[i + len(maxima) // 2]) for i in range(len(maxima) // 2)]
        new_max = cute.arch.fmax(old_max, cute.arch.warp_reduction_max(maxima[0], threads_in_group=4))
        row_max[r] = new_max
        shift = softmax.finite(new_max) - P_SHIFT
        tile_sum = Float32(0.0)
        for c in cutlass.range_constexpr(columns):
            s[r, c] = cute.math.exp2(s[r, c] - shift, fastmath=True)
            tile_sum += s[r, c]
        rescaling = softmax.rescaling(old_max, new_max)
        row_sum[r] = row_sum[r] * rescaling + tile_sum
        if tid % 4 == 0:
            shared.rescaling[r] = rescaling
    if last:
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            if tid % 4 == 0:
                shared.row_sum[r], shared.row_max[r] = total, row_max[r]
    rP = cute.make_rmem_tensor((8, TOKENS_PER_TILE // 16), Float16)
    rP.store(acc_s.load().to(Float16).reshape(rP.shape))
    cute.autovec_copy(rP, p_fragment(smem, stage, tid))
