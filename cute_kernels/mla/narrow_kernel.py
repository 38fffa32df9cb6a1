"""The consumer warpgroups of the MLA decode kernel for few heads, which are columns of the matrix products."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import operands, softmax, wgmma
from cute_kernels.mla.producer_kernel import GROUP, GROUPS, NOPE, PARTS, ROPE, STAGES
from cute_kernels.mla.spec import TOKENS_PER_TILE, MlaDecodeSpec
from cute_kernels.mla.tile_kernel import BAR_OWNER, BAR_STORED, layouts, start_q

MAX_GROWTH = 8.0  # of scores over the maximum that P is relative to, in units of log2, before it moves
O_STRIDE = NOPE + 4  # float32 values from a head's row of O to the next: lanes of a store meet all 32 banks
WARPS = 4  # of a warpgroup


class NarrowConsumer:
    """Device code for the 256 threads that multiply in :class:`cute_kernels.mla.kernel.MlaDecodeKernel`.

    With 8 or 16 heads 64 rows of a wgmma would be mostly padding, so operands change places:

        S^T (64 keys x heads) = K Q^T        O^T (512 x heads) = V^T P^T

    A tile takes 576 + 512 clocks of the tensor core whatever the heads, half of what 64 rows of heads take, and a
    quarter of the accumulators with 16. Warpgroup w has the tiles t with t % 2 == w to itself, with sums, maxima and
    accumulators of its own, which meet at the end. Shared memory holds P^T for each quantization tile, f included.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.heads = spec.heads
        self.columns = spec.heads // 4  # of a thread

    def mmas(self):
        """S^T = K Q^T, O^T += V^T P^T; all operands in shared memory."""
        k, mn, one = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1)
        tile = (TOKENS_PER_TILE, self.heads)
        return tuple(sm90.make_trivial_tiled_mma(BFloat16, BFloat16, major, k, Float32, one, tile) for major in (k, mn))

    @cute.jit
    def decode(
        self,
        smem,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor | None,
        mPartialLse: cute.Tensor | None,
        mSink: cute.Tensor,
        scale_log2: Float32,
        count: Int32,
        work: tuple,
        warp_idx: Int32,
        tid: Int32,
    ):
        """All that the consumers do for one CTA, which has one item of work of `count` tiles."""
        wg = warp_idx // 4
        _, mma_pv = self.mmas()
        shape = mma_pv.partition_shape_C((GROUP, self.heads))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(GROUPS)]
        for j in cutlass.range_constexpr(GROUPS):
            acc_o[j].fill(0.0)
        peak = cute.make_rmem_tensor(self.columns, Float32)
        total = cute.make_rmem_tensor(self.columns, Float32)
        peak.fill(-Float32.inf)
        total.fill(0.0)
        if count > 0:
            if warp_idx == 0:
                start_q(smem, load_q, tQ, work, self.heads)
            cute.arch.mbarrier_wait(smem.q_full.ptr, 0)
            for t in cutlass.range(wg, count, 2, unroll=1):
                self.attend(smem, acc_o, peak, total, scale_log2, t, wg, tid)
        self.meet(smem, acc_o, peak, total, wg, tid)
        self.store(smem, mOut, mLse, mPartial, mPartialLse, mSink, work, wg * 128 + tid)

    @cute.jit
    def attend(
        self,
        smem,
        acc_o,
        peak: cute.Tensor,
        total: cute.Tensor,
        scale_log2: Float32,
        t: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Adds tile t to O, the maxima and this thread's part of the sums."""
        layout_nope, layout_rope, layout_q = layouts(self.heads)
        mma_qk, mma_pv = self.mmas()
        thr_qk, thr_pv = mma_qk.get_slice(tid), mma_pv.get_slice(tid)
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sRope = smem.rope.get_tensor(layout_rope.outer, swizzle=layout_rope.inner)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        layout_p = self.layout_p()
        sP = smem.p.get_tensor(layout_p.outer, swizzle=layout_p.inner)
        sV = cute.local_tile(wgmma.transposed(sNope), (GROUP, TOKENS_PER_TILE), (None, 0, None))
        rNope = mma_qk.make_fragment_A(thr_qk.partition_A(sNope))
        rRope = mma_qk.make_fragment_A(thr_qk.partition_A(sRope))
        rQ = mma_qk.make_fragment_B(thr_qk.partition_B(sQ))[None, None, None, 0]
        rV = mma_pv.make_fragment_A(thr_pv.partition_A(sV))
        rP = mma_pv.make_fragment_B(thr_pv.partition_B(sP))
        acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((TOKENS_PER_TILE, self.heads)), Float32)
        s = wgmma.by_row(acc_s)
        sFactor = cute.make_tensor(smem.factor.data_ptr(), cute.make_layout((TOKENS_PER_TILE, GROUPS, 2, STAGES)))
        sMask = cute.make_tensor(smem.mask.data_ptr(), cute.make_layout((TOKENS_PER_TILE, STAGES)))

        cute.arch.mbarrier_wait(smem.full.data_ptr() + wg, t // STAGES % 2)
        cute.arch.fence_proxy("async.shared", space="cta")  # the producers' stores, read by wgmma
        warpgroup.fence()
        of_rope = [(k, NOPE // 16 + k) for k in range(ROPE // 16)]
        wgmma.issue(mma_qk, acc_s, rRope[None, None, None, wg], rQ, False, of_rope)
        for j in cutlass.range_constexpr(GROUPS):
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            for r in cutlass.range_constexpr(2):
                quotient = sFactor[wgmma.row(tid, r), j, 0, wg]
                for c in cutlass.range_constexpr(self.columns):
                    s[r, c] *= quotient
            k_blocks = [GROUP // 16 * j + k for k in range(GROUP // 16)]
            warpgroup.fence()
            wgmma.issue(mma_qk, acc_s, rNope[None, None, None, wg], rQ, True, [(k, k) for k in k_blocks])
        warpgroup.commit_group()
        warpgroup.wait_group(0)

        grown = Int32(0)
        for r in cutlass.range_constexpr(2):
            factor = sFactor[wgmma.row(tid, r), GROUPS - 1, 1, wg] * scale_log2
            mask = sMask[wgmma.row(tid, r), wg]
            for c in cutlass.range_constexpr(self.columns):
                s[r, c] = s[r, c] * factor + mask
                if s[r, c] > peak[c] + MAX_GROWTH:
                    grown = Int32(1)
        if wgmma.any_thread(grown, BAR_OWNER + wg) == 1:
            self.raise_peaks(smem, acc_o, s, peak, total, wg, tid)
        for c in cutlass.range_constexpr(self.columns):
            shift = softmax.finite(peak[c])
            for r in cutlass.range_constexpr(2):
                s[r, c] = cute.math.exp2(s[r, c] - shift, fastmath=True)
                total[c] += s[r, c]

        self.store_probabilities(smem, s, sFactor, wg, tid)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)
        warpgroup.fence()
        all_keys = [(k, k) for k in range(TOKENS_PER_TILE // 16)]
        for j in cutlass.range_constexpr(GROUPS):
            values, p = rV[None, None, None, j, wg], rP[None, None, None, wg * GROUPS + j]
            wgmma.issue(mma_pv, acc_o[j], values, p, True, all_keys)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.mbarrier_arrive(smem.empty.data_ptr() + PARTS * wg + PARTS - 1)

    def layout_p(self):
        """P^T in shared memory: (heads, 64 keys, quantization tiles of both warpgroups), 128-byte swizzle."""
        tile = (TOKENS_PER_TILE, self.heads, TOKENS_PER_TILE)
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, BFloat16, 2 * GROUPS)

    @cute.jit
    def raise_peaks(self, smem, acc_o, s: cute.Tensor, peak: cute.Tensor, total: cute.Tensor, wg: Int32, tid: Int32):
        """Makes maxima those of all that this warpgroup has seen, and O and sums relative to them."""
        sMax = self.of_warps(smem)
        found = cute.make_rmem_tensor(self.columns, Float32)
        for c in cutlass.range_constexpr(self.columns):
            found[c] = cute.arch.fmax(s[0, c], s[1, c])
            for step in cutlass.range_constexpr(3):
                found[c] = cute.arch.fmax(found[c], cute.arch.shuffle_sync_bfly(found[c], 4 << step))
            if tid % 32 < 4:
                sMax[self.column(tid, c), tid // 32, wg] = found[c]
        cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)
        for c in cutlass.range_constexpr(self.columns):
            new_peak = peak[c]
            for w in cutlass.range_constexpr(WARPS):
                new_peak = cute.arch.fmax(new_peak, sMax[self.column(tid, c), w, wg])
            found[c] = softmax.rescaling(peak[c], new_peak)
            peak[c] = new_peak
            total[c] *= found[c]
        for j in cutlass.range_constexpr(GROUPS):
            for m in cutlass.range_constexpr(GROUP // 64):
                o = wgmma.by_row(acc_o[j][None, m, 0])
                for c in cutlass.range_constexpr(self.columns):
                    for r in cutlass.range_constexpr(2):
                        o[r, c] *= found[c]

    @cute.jit
    def store_probabilities(self, smem, s: cute.Tensor, sFactor: cute.Tensor, wg: Int32, tid: Int32):
        """P^T times f of each quantization tile, rounded to bf16, as rows of heads.

        A matrix of 8 keys x 8 heads is stored transposed: the lane that gives the address of its k-th row gives that of
        head k.
        """
        lane, warp_idx = tid % 32, tid // 32
        blocks = self.heads // 8
        at_once = min(2 * blocks, 4)  # matrices of a store: keys 0..7 and 8..15 of a warp, for one or two times 8 heads
        matrix = lane // 8 % at_once
        head, chunk = 8 * (matrix // 2) + lane % 8, 2 * warp_idx + matrix % 2
        start = Int32(smem.p.data_ptr().toint()) + wg * (GROUPS * self.heads * 128)
        start += head * 128 + ((chunk ^ (lane % 8)) << 4)
        pair = cute.make_rmem_tensor(2, BFloat16)
        word = cute.recast_tensor(pair, Int32)
        wide = cute.make_rmem_tensor(2, Float32)
        words = cute.make_rmem_tensor(at_once, Int32)
        for j in cutlass.range_constexpr(GROUPS):
            f = [sFactor[wgmma.row(tid, r), j, 1, wg] for r in range(2)]
            for first in cutlass.range_constexpr(0, 2 * blocks, at_once):
                for i in cutlass.range_constexpr(at_once):
                    block, r = (first + i) // 2, (first + i) % 2
                    for e in cutlass.range_constexpr(2):
                        wide[e] = s[r, 2 * block + e] * f[r]
                    pair.store(wide.load().to(BFloat16))
                    words[i] = word[0]
                address = start + (j * self.heads + 8 * (first // 2)) * 128
                operands.store_matrices(address, [words[i] for i in range(at_once)], True)

    @cute.jit
    def meet(self, smem, acc_o, peak: cute.Tensor, total: cute.Tensor, wg: Int32, tid: Int32):
        """Leaves O, sums and maxima of both warpgroups in shared memory, where the stages were."""
        sPeak, sTotal, sO = self.states(smem)
        cute.arch.barrier(barrier_id=BAR_STORED, number_of_threads=256)  # nobody reads the stages any more
        for c in cutlass.range_constexpr(self.columns):
            for step in cutlass.range_constexpr(3):
                total[c] += cute.arch.shuffle_sync_bfly(total[c], 4 << step)
            if tid % 32 < 4:
                sTotal[self.column(tid, c), tid // 32, wg] = total[c]
                sPeak[self.column(tid, c), wg] = peak[c]
        for j in cutlass.range_constexpr(GROUPS):
            for m in cutlass.range_constexpr(GROUP // 64):
                o = wgmma.by_row(acc_o[j][None, m, 0])
                for c in cutlass.range_constexpr(self.columns):
                    for r in cutlass.range_constexpr(2):
                        sO[GROUP * j + 64 * m + wgmma.row(tid, r), self.column(tid, c), wg] = o[r, c]
        cute.arch.barrier(barrier_id=BAR_STORED, number_of_threads=256)

    @cute.jit
    def store(
        self,
        smem,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial,
        mPartialLse,
        mSink: cute.Tensor,
        work: tuple,
        tid: Int32,
    ):
        """Merges both warpgroups, and stores the result, sink included, or the partial result without it."""
        head_block, split_idx, query_idx, batch_idx = work
        sPeak, sTotal, sO = self.states(smem)
        vectors = NOPE // 4
        for item in cutlass.range(tid, self.heads * vectors, 256, unroll=2):
            n, vector = item // vectors, item % vectors
            head = head_block * self.heads + n
            if head < mSink.shape[0]:
                peak = cute.arch.fmax(sPeak[n, 0], sPeak[n, 1])
                total = Float32(0.0)
                acc, one = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
                acc.fill(0.0)
                for w in cutlass.range_constexpr(2):
                    weight = softmax.rescaling(sPeak[n, w], peak)
                    for i in cutlass.range_constexpr(WARPS):
                        total += weight * sTotal[n, i, w]
                    at = sO.iterator + cute.assume((w * self.heads + n) * O_STRIDE + 4 * vector, divby=4)
                    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), one)
                    for c in cutlass.range_constexpr(4):
                        acc[c] += weight * one[c]
                joined = total
                if const_expr(not self.spec.split):
                    sink = mSink[head] * softmax.LOG2_E
                    joined += cute.math.exp2(sink - softmax.finite(peak), fastmath=True)
                share = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / joined)
                for c in cutlass.range_constexpr(4):
                    acc[c] *= share
                lse = softmax.log_sum_exp(peak, total)
                if const_expr(self.spec.split):
                    row = mPartial[split_idx, batch_idx, query_idx, head, None]
                    at = row.iterator + cute.assume(4 * vector, divby=4)
                    cute.autovec_copy(acc, cute.make_tensor(at, cute.make_layout(4)))
                    if vector == 0:
                        mPartialLse[split_idx, batch_idx, query_idx, head] = lse
                else:
                    rounded = cute.make_rmem_tensor(4, BFloat16)
                    rounded.store(acc.load().to(BFloat16))
                    row = mOut[batch_idx, query_idx, head, None]
                    at = row.iterator + cute.assume(4 * vector, divby=4)
                    cute.autovec_copy(rounded, cute.make_tensor(at, cute.make_layout(4)))
                    if vector == 0:
                        mLse[batch_idx, query_idx, head] = lse

    def column(self, tid, c: int):
        """Head of the c-th column that a thread has."""
        return 8 * (c // 2) + 2 * (tid % 4) + c % 2

    def of_warps(self, smem) -> cute.Tensor:
        """(head, warp, warpgroup): maxima of a tile, in the end sums."""
        return cute.make_tensor(smem.column_max.data_ptr(), cute.make_layout((self.heads, WARPS, 2)))

    def states(self, smem):
        """Maxima (head, warpgroup), sums (head, warp, warpgroup) and O (512, head, warpgroup)."""
        sPeak = cute.make_tensor(smem.row_max.data_ptr(), cute.make_layout((self.heads, 2)))
        shape = cute.make_layout((NOPE, self.heads, 2), stride=(1, O_STRIDE, O_STRIDE * self.heads))
        return sPeak, self.of_warps(smem), cute.make_tensor(cute.recast_ptr(smem.nope.data_ptr(), dtype=Float32), shape)
