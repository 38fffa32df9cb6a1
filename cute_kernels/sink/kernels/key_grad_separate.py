"""The consumer warpgroups of the key-stationary kernel where it makes no dq: dK and dV of 64 keys each.

Of one tile of queries, 128 at d 64, whose S^T = K Q^T is in flight:
    wait 0: S is complete     dP^T = V dO^T issued; P^T = exp2(S^T scale - L), masked, rounded
    dV += P^T dO issued       wait 1: dP^T is complete: dS^T = P^T (dP^T - delta), rounded
    dK += dS^T Q issued       wait 1: dV is complete, so P is no operand any more
    S^T of the next tile      wait 1: dK is complete: the tile is released

Only S is in flight from one turn of the loop to the next: with dP as well ptxas serializes the products. It serializes
them too (C7512) where P is still an operand when S of the next tile is issued.

Where the spec `skips`, tiles have 64 queries, S is issued with dP, and a warpgroup skips tiles none of whose queries
sees its keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import registers, softmax, wgmma
from cute_kernels.device.ring import ring_slot_pow2, ring_slot_signed, use_phase
from cute_kernels.sink.kernels import scheduler
from cute_kernels.sink.kernels.epilogue import KeyGrads
from cute_kernels.sink.kernels.key_grad_mma import KeyProducts, column_stats
from cute_kernels.sink.kernels.masks import KeyLimits, Visibility
from cute_kernels.sink.kernels.smem import key_mmas
from cute_kernels.sink.kernels.views import Tma
from cute_kernels.sink.spec import ROWS


class SeparateKeyGrad(KeyProducts):
    """Device code of a consumer warpgroup."""

    @cute.jit
    def run(
        self,
        smem,
        d_k: Tma,
        d_v: Tma,
        softmax_scale: Float32,
        visible: Visibility,
        ratio: Int32,
        rank: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """The warpgroup, from its first work tile to the record that ends the kernel: its keys of each."""
        spec = self.spec
        mma_s, mma_kv, _ = key_mmas(spec)
        words = scheduler.records(smem)
        acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, spec.queries)), Float32)
        acc_dk, acc_dv = (cute.make_rmem_tensor(mma_kv.partition_shape_C((ROWS, spec.d)), Float32) for _ in range(2))
        count, ring_tile, running = Int32(0), Int32(0), Int32(1)
        while running == 1:
            stage, phase = ring_slot_signed(count, scheduler.WORK_STAGES)
            cute.arch.mbarrier_wait(smem.work_full.data_ptr() + stage, phase)
            record = scheduler.WorkRecord(words, stage)
            work = scheduler.read(record)
            if work.first < 0:
                running = Int32(0)
            else:
                begin, tiles = self.masks.query_range(work.first, work.s_q, work.s_k, visible)
                first = work.first + ROWS * wg
                limits = self.masks.limits(first, work.s_q, work.s_k, visible, tid)
                acc_dk.fill(0.0)
                acc_dv.fill(0.0)
                cute.arch.mbarrier_wait(smem.kv_full.ptr, use_phase(count))
                rK, rV = (self.operand(t, wg, tid) for t in (smem.k, smem.v))
                scale_log2 = softmax_scale * softmax.LOG2_E
                total, t = ratio * tiles, Int32(0)
                if const_expr(spec.skips):
                    seen = self.masks.seeing(first, work.s_q, work.s_k, visible)
                    for _ in cutlass.range(total, unroll=1):
                        query = begin + spec.queries * t
                        if query + spec.queries > seen.begin and query < seen.end:
                            self.issue_scores(smem, acc_s, rK, ring_tile, tid)
                            self.differentiate(
                                smem, acc_s, acc_dk, acc_dv, rV, scale_log2, query, ring_tile, limits, tid
                            )
                            warpgroup.wait_group(0)
                        else:  # waiting for the tile first keeps two uses of a stage apart
                            slot = ring_slot_pow2(ring_tile, spec.stages)
                            cute.arch.mbarrier_wait(smem.q_full.data_ptr() + slot.index, slot.phase)
                        self.release(smem, ring_tile)
                        ring_tile += 1
                        t = cutlass.select_(t == tiles - 1, Int32(0), t + 1)
                elif total > 0:
                    self.issue_scores(smem, acc_s, rK, ring_tile, tid)
                    for i in cutlass.range(total, unroll=1):
                        query = begin + spec.queries * t
                        self.differentiate(smem, acc_s, acc_dk, acc_dv, rV, scale_log2, query, ring_tile, limits, tid)
                        # after the last tile its S is made again, for nothing: a branch there would
                        # serialize the products
                        following = cutlass.select_(i == total - 1, ring_tile, ring_tile + 1)
                        self.issue_scores(smem, acc_s, rK, following, tid)
                        warpgroup.wait_group(1)
                        self.release(smem, ring_tile)
                        ring_tile += 1
                        t = cutlass.select_(t == tiles - 1, Int32(0), t + 1)
                    warpgroup.wait_group(0)
                # read again instead of kept: registers are short while dK, dV, S and dP are alive
                targets = self.epilogue.targets(d_k, d_v, record, rank)
                cute.arch.mbarrier_arrive(smem.work_empty.data_ptr() + stage)
                cute.arch.mbarrier_arrive(smem.kv_empty.ptr)
                grads = KeyGrads((acc_dk,), (acc_dv,))
                # opaque: addresses made from it before the loop would take eight registers
                self.epilogue.store(smem, grads, softmax_scale, d_k, d_v, targets, wg, registers.opaque(tid))
                count += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def differentiate(
        self,
        smem,
        acc_s: cute.Tensor,
        acc_dk: cute.Tensor,
        acc_dv: cute.Tensor,
        rV: cute.Tensor,
        scale_log2: Float32,
        query: Int32,
        ring_tile: Int32,
        limits: KeyLimits,
        tid: Int32,
    ):
        """Adds a tile of queries from `query` on to dK / softmax_scale and to dV.

        Its S^T is in flight at the beginning, dK at the end.
        """
        spec = self.spec
        acc_dp = cute.make_rmem_tensor(acc_s.shape, Float32)
        s, dp = wgmma.by_row(acc_s), wgmma.by_row(acc_dp)
        stage, _ = ring_slot_pow2(ring_tile, spec.stages)
        # L and delta of this thread's columns: column 8j + 2 (lane % 4) + c is element c of pair j
        thread_stats = smem.stats.data_ptr() + cute.assume(stage * 2 * spec.queries + 2 * (tid % 4), divby=2)
        if const_expr(not spec.skips):
            warpgroup.wait_group(0)
            warpgroup.fence()
        self.issue_transposed(rV, smem.d_out, acc_dp, stage, tid)
        if const_expr(spec.skips):
            warpgroup.wait_group(1)
        self.masks.mask(acc_s, query, limits)
        for j in cutlass.range_constexpr(spec.queries // 8):  # pair by pair: all together take too many registers
            values = column_stats(thread_stats + 8 * j, 8)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    s[r, 2 * j + c] = cute.math.exp2(s[r, 2 * j + c] * scale_log2 - values[c], fastmath=True)
        self.issue_gradient(acc_dv, self.rounded(acc_s), smem.d_out, stage, tid)

        warpgroup.wait_group(1)
        for j in cutlass.range_constexpr(spec.queries // 8):
            values = column_stats(thread_stats + spec.queries + 8 * j, 8)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    s[r, 2 * j + c] *= dp[r, 2 * j + c] - values[c]
        self.issue_gradient(acc_dk, self.rounded(acc_s), smem.q, stage, tid)
        warpgroup.wait_group(1)

    @cute.jit
    def release(self, smem, ring_tile: Int32):
        """Gives the stage of a tile back."""
        cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + ring_slot_pow2(ring_tile, self.spec.stages).index)
