"""The warpgroup of the MLA decode kernel that scores keys: QK and the softmax of every tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.producer_kernel import GROUP, GROUPS, NOPE, ROPE, STAGES
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, WIDE, MlaDecodeSpec
from cute_kernels.mla.tile_kernel import (
    BAR_OWNER,
    P_SHIFT,
    factors,
    handed_over,
    layouts,
    row_states,
    start_q,
    tiled_mmas,
)


class ScoreWarpgroup:
    """Device code for 128 threads: S, P, maxima and sums of all tiles, which the two warpgroups of values then need.

    Maxima (units of log2) and sums stay in registers from tile to tile, a thread's columns apart.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def score(
        self,
        smem,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        scale_log2: Float32,
        done: Int32,
        count: Int32,
        has_next,
        next_work: tuple,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Scores the `count` tiles of an item of work, the first of which is tile `done`; Q has come.

        As soon as nobody needs its Q any more, the load of the next item's is started.
        """
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        if count == 0:
            cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)  # all have waited for the Q that is not used
            if has_next and warp_idx == 0:
                start_q(smem, load_q, tQ, next_work, WIDE)
        for t in cutlass.range(done, done + count, unroll=1):
            last = t == done + count - 1
            stage = t % STAGES
            self.stamp(smem, t, 0, 0, tid)
            cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, t // STAGES % 2)
            if const_expr(self.spec.exchange == "values"):  # ordinary remote stores of the rope part, read by wgmma
                cute.arch.fence_proxy("async.shared", space="cta")
            self.stamp(smem, t, 0, 1, tid)
            self.stamp(smem, t, 1, 0, tid)
            acc_s, acc_rope = self.multiply(smem, stage, tid)
            cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)
            self.stamp(smem, t, 1, 1, tid)
            if last and has_next and warp_idx == 0:
                start_q(smem, load_q, tQ, next_work, WIDE)
            self.stamp(smem, t, 2, 0, tid)
            self.softmax(smem, acc_s, acc_rope, row_max, row_sum, scale_log2, stage, last, tid)
            cute.arch.mbarrier_arrive(smem.p_full.data_ptr() + stage)
            self.stamp(smem, t, 2, 1, tid)

    @cute.jit
    def multiply(self, smem, stage: Int32, tid: Int32):
        """(S of the quantization tiles in units of the last one's f, S of the rope part), complete."""
        layout_nope, layout_rope, layout_q = layouts()
        mma, _ = tiled_mmas()
        thr = mma.get_slice(tid)
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sRope = smem.rope.get_tensor(layout_rope.outer, swizzle=layout_rope.inner)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        rQ = mma.make_fragment_A(thr.partition_A(sQ))[None, None, None, 0]
        rNope = mma.make_fragment_B(thr.partition_B(sNope))[None, None, None, stage]
        rRope = mma.make_fragment_B(thr.partition_B(sRope))[None, None, None, stage]
        shape = mma.partition_shape_C((WIDE, TOKENS_PER_TILE))
        acc_s, acc_rope = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        quotient, _ = factors(smem, thr, stage)
        s = wgmma.by_row(acc_s)
        columns = cute.size(s, mode=[1])
        by_column = cute.make_rmem_tensor(columns, Float32)
        for j in cutlass.range_constexpr(GROUPS):
            if const_expr(j > 0):
                for c in cutlass.range_constexpr(columns):
                    for r in cutlass.range_constexpr(2):
                        s[r, c] *= by_column[c]
            warpgroup.fence()
            k_blocks = [GROUP // 16 * j + k for k in range(GROUP // 16)]
            wgmma.issue(mma, acc_s, rQ, rNope, j > 0, [(k, k) for k in k_blocks])
            if const_expr(j == GROUPS - 1):
                of_rope = [(NOPE // 16 + k, k) for k in range(ROPE // 16)]
                wgmma.issue(mma, acc_rope, rQ, rRope, False, of_rope)
            warpgroup.commit_group()
            if const_expr(j < GROUPS - 1):
                following = wgmma.by_row(quotient[None, None, None, j + 1])
                for c in cutlass.range_constexpr(columns):
                    by_column[c] = following[0, c]
            warpgroup.wait_group(0)
        return acc_s, acc_rope

    @cute.jit
    def softmax(
        self,
        smem,
        acc_s: cute.Tensor,
        acc_rope: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        scale_log2: Float32,
        stage: Int32,
        last,
        tid: Int32,
    ):
        """P of a tile where its rope part was, the maxima behind it, and behind the last tile of an item the sums."""
        mma, _ = tiled_mmas()
        thr = mma.get_slice(tid)
        _, f = factors(smem, thr, stage)
        f_last = wgmma.by_row(f[None, None, None, GROUPS - 1])
        of_columns = cute.make_layout((WIDE, TOKENS_PER_TILE, STAGES), stride=(0, 1, TOKENS_PER_TILE))
        mask = wgmma.by_row(thr.partition_C(smem.mask.get_tensor(of_columns)[None, None, stage]))
        s, s_rope = wgmma.by_row(acc_s), wgmma.by_row(acc_rope)
        columns = cute.size(s, mode=[1])
        for c in cutlass.range_constexpr(columns):
            factor, bias = f_last[0, c] * scale_log2, mask[0, c]
            for r in cutlass.range_constexpr(2):
                s[r, c] = s[r, c] * factor + (s_rope[r, c] * scale_log2 + bias)
        sMax, sSum = row_states(smem, stage, tid)
        for r in cutlass.range_constexpr(2):
            old_max = row_max[r]
            found = [cute.arch.fmax(s[r, c], s[r, c + columns // 2]) for c in range(columns // 2)]
            while const_expr(len(found) > 1):
                found = [cute.arch.fmax(found[i], found[i + len(found) // 2]) for i in range(len(found) // 2)]
            new_max = cute.arch.fmax(old_max, cute.arch.warp_reduction_max(found[0], threads_in_group=4))
            row_max[r] = new_max
            shift = softmax.finite(new_max) - P_SHIFT
            partial = Float32(0.0)
            for c in cutlass.range_constexpr(columns):
                s[r, c] = cute.math.exp2(s[r, c] - shift, fastmath=True)
                partial += s[r, c]
            row_sum[r] = row_sum[r] * softmax.rescaling(old_max, new_max) + partial
            if tid % 4 == 0:
                sMax[r] = new_max
        if last:
            for r in cutlass.range_constexpr(2):
                total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
                if tid % 4 == 0:
                    sSum[r] = total
        rP = cute.make_rmem_tensor((8, TOKENS_PER_TILE // 16), Float16)
        rP.store(acc_s.load().to(Float16).reshape(rP.shape))
        cute.autovec_copy(rP, handed_over(smem, stage, tid))

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """A timestamp of a tile."""
        self.tracer.stamp(smem.trace.ptr, 1, len(EVENTS[1]) * t + event, edge, tid == 0)
