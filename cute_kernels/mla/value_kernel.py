"""The two warpgroups of the MLA decode kernel that add up values, 256 of the 512 columns each."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.producer_kernel import GROUP, STAGES
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, WIDE, MlaDecodeSpec
from cute_kernels.mla.tile_kernel import P_SHIFT, factors, handed_over, layouts, row_states, tiled_mmas

KEY_BLOCKS = TOKENS_PER_TILE // 16
HALVES = 2  # quantization tiles of a warpgroup
KEYS_AT_ONCE = 1  # blocks of 16 keys whose P is prepared while IN_FLIGHT pieces before it are multiplied
IN_FLIGHT = 1


class ValueWarpgroups:
    """Device code for 2 x 128 threads: O += P V, with P and the maxima of the warpgroup that scores; then the result."""

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def add(
        self,
        smem,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor | None,
        mPartialLse: cute.Tensor | None,
        mSink: cute.Tensor,
        done: Int32,
        count: Int32,
        work: tuple,
        wg: Int32,
        tid: Int32,
    ):
        """Adds up the `count` tiles of an item of work, the first of which is tile `done`, and stores what it gives."""
        layout_nope, _, _ = layouts()
        _, mma = tiled_mmas()
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sV = cute.local_tile(wgmma.transposed(sNope), (GROUP, TOKENS_PER_TILE), (None, 0, None))
        rV = mma.make_fragment_B(mma.get_slice(tid).partition_B(sV))
        shape = mma.partition_shape_C((WIDE, GROUP))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(HALVES)]
        for half in cutlass.range_constexpr(HALVES):
            acc_o[half].fill(0.0)
        row_max, row_sum, alpha = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        for t in cutlass.range(done, done + count, unroll=1):
            stage = t % STAGES
            self.stamp(smem, t, 0, 0, wg, tid)
            cute.arch.mbarrier_wait(smem.p_full.data_ptr() + stage, t // STAGES % 2)
            cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, t // STAGES % 2)  # long since; what came by copies
            self.stamp(smem, t, 0, 1, wg, tid)
            self.stamp(smem, t, 1, 0, wg, tid)
            sMax, sSum = row_states(smem, stage, tid)
            for r in cutlass.range_constexpr(2):
                alpha[r] = softmax.rescaling(row_max[r], sMax[r])
                row_max[r], row_sum[r] = sMax[r], sSum[r]  # the sum is there behind the last tile
            softmax.rescale(acc_o, alpha)
            pieces = [(half, first) for half in range(HALVES) for first in range(0, KEY_BLOCKS, KEYS_AT_ONCE)]
            for i in cutlass.range_constexpr(len(pieces)):
                half, first = pieces[i]
                p = self.probabilities(smem, half, first, stage, wg, tid)
                warpgroup.fence()
                values = rV[None, None, None, HALVES * wg + half, stage]
                wgmma.issue(mma, acc_o[half], p, values, True, [(k, first + k) for k in range(KEYS_AT_ONCE)])
                warpgroup.commit_group()
                warpgroup.wait_group(IN_FLIGHT if i < len(pieces) - 1 else 0)
            cute.arch.mbarrier_arrive(smem.empty.data_ptr() + stage)
            self.stamp(smem, t, 1, 1, wg, tid)
        if const_expr(self.spec.split):
            self.store_partial(acc_o, row_max, row_sum, mSink, mPartial, mPartialLse, work, wg, tid)
        else:
            self.store(acc_o, row_max, row_sum, mSink, mOut, mLse, work, wg, tid)

    @cute.jit
    def probabilities(
        self, smem, half: cutlass.Constexpr, first: cutlass.Constexpr, stage: Int32, wg: Int32, tid: Int32
    ):
        """P of blocks of 16 keys, `first` and on, times their f of a quantization tile, rounded to bf16 once: an operand."""
        mma_qk, mma_pv = tiled_mmas()
        _, f = factors(smem, mma_qk.get_slice(tid), stage)
        by_column = wgmma.by_row(f[None, None, None, HALVES * wg + half])
        p = handed_over(smem, stage, tid)
        eight = cute.make_rmem_tensor(8, Float16)
        scaled = cute.make_rmem_tensor((8, KEYS_AT_ONCE), Float32)
        for k in cutlass.range_constexpr(KEYS_AT_ONCE):
            cute.autovec_copy(p[None, first + k], eight)
            wide = eight.load().to(Float32)
            for e in cutlass.range_constexpr(8):  # as in the accumulator: neighbours, rows, then eight columns on
                scaled[e, k] = wide[e] * by_column[0, 4 * (first + k) + e % 2 + 2 * (e // 4)]
        operand = mma_pv.make_fragment_A(mma_pv.partition_shape_A((WIDE, 16 * KEYS_AT_ONCE)))
        operand.store(scaled.load().to(BFloat16).reshape(operand.shape))
        return operand

    @cute.jit
    def store(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        work: tuple,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O, sink included, and stores it as bf16; stores the log-sum-exp.

        From registers: shared memory has no room that the next item would not need, and its Q is on the way.
        """
        head_block, _, query_idx, batch_idx = work
        denominator = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            denominator[r] = row_sum[r]
            head = head_block * WIDE + wgmma.row(tid, r)
            if head < mSink.shape[0]:
                sink = mSink[head] * softmax.LOG2_E
                denominator[r] += cute.math.exp2(sink - softmax.finite(row_max[r]) + P_SHIFT, fastmath=True)
                if wg == 0 and tid % 4 == 0:
                    mLse[batch_idx, query_idx, head] = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
        softmax.normalize(acc_o, row_sum, denominator)
        self.store_rows(acc_o, mOut[batch_idx, query_idx, None, None], mSink.shape[0], head_block, wg, tid)

    @cute.jit
    def store_partial(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        mSink: cute.Tensor,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        work: tuple,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O without the sink and stores it as float32, with its log-sum-exp, for the merge."""
        head_block, split_idx, query_idx, batch_idx = work
        denominator = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            denominator[r] = row_sum[r]
            head = head_block * WIDE + wgmma.row(tid, r)
            if head < mSink.shape[0] and wg == 0 and tid % 4 == 0:
                lse = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
                mPartialLse[split_idx, batch_idx, query_idx, head] = lse
        softmax.normalize(acc_o, row_sum, denominator)
        heads = mPartial[split_idx, batch_idx, query_idx, None, None]
        self.store_rows(acc_o, heads, mSink.shape[0], head_block, wg, tid)

    @cute.jit
    def store_rows(self, acc_o, heads: cute.Tensor, h_q: Int32, head_block: Int32, wg: Int32, tid: Int32):
        """O, rounded to the dtype of `heads` (h_q, 512), which it goes to."""
        _, mma = tiled_mmas()
        gO = cute.local_tile(heads, (WIDE, GROUP), (head_block, None))
        for half in cutlass.range_constexpr(HALVES):
            rounded = cute.make_rmem_tensor(acc_o[half].shape, heads.element_type)
            rounded.store(acc_o[half].load().to(heads.element_type))
            target = wgmma.by_row(mma.get_slice(tid).partition_C(gO[None, None, HALVES * wg + half]))
            for r in cutlass.range_constexpr(2):
                if head_block * WIDE + wgmma.row(tid, r) < h_q:
                    cute.autovec_copy(wgmma.by_row(rounded)[r, None], target[r, None])

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, wg: Int32, tid: Int32):
        """A timestamp of a tile."""
        for w in cutlass.range_constexpr(2):
            self.tracer.stamp(smem.trace.ptr, 2 + w, len(EVENTS[2]) * t + event, edge, wg == w and tid == 0)
