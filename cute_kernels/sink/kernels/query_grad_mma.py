"""Consumer warpgroups of the query-stationary dq. Each computes dQ of 64 rows.

A key tile takes these steps. "Wait n" leaves n wgmma groups in flight.
    issue S = Q K^T and dP = dO V^T    wait 1: S is complete: P = exp2(S scale - L), masked
                                       wait 0: dP is complete: release V; dS = P (dP - delta), rounded
    issue dQ += dS K                   wait 0: dQ is complete: release K
Statistics L and delta of a row come from prepare.py. L is the log2-sum-exp2 of its scores and its sink.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.pipeline import Slot
from cute_kernels.sink.kernels import scheduler, views
from cute_kernels.sink.kernels.epilogue import RowStore
from cute_kernels.sink.kernels.masks import QueryLimits, QueryMasks, Visibility
from cute_kernels.sink.kernels.pipelines import QueryGradNamedBarrier, query_pipelines
from cute_kernels.sink.kernels.smem import query_layouts, query_mmas, view
from cute_kernels.sink.kernels.views import DTYPES, Tma
from cute_kernels.sink.spec import ROWS


class RowGrads(NamedTuple):
    """State of this thread's two rows: dQ / softmax_scale, and the statistics L and delta."""

    d_q: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor


class QueryGrad:
    """Device code of a consumer warpgroup."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.masks = QueryMasks(spec)
        self.edges = query_pipelines(spec)
        self.rows = RowStore(spec, QueryGradNamedBarrier.STORE)

    @cute.jit
    def run(
        self,
        smem,
        out: Tma,
        mStats: cute.Tensor,
        softmax_scale: Float32,
        visible: Visibility,
        ratio: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Computes dQ of this warpgroup's 64 rows, or if grouped of its heads, of every work tile of the CTA."""
        spec = self.spec
        acc_dq = cute.make_rmem_tensor(query_mmas(spec).pv.partition_shape_C((ROWS, spec.d)), Float32)
        lse, delta, next_stats = (cute.make_rmem_tensor(n, Float32) for n in (2, 2, 4))
        grads = RowGrads(acc_dq, lse, delta)
        scale_log2 = softmax_scale * softmax.LOG2_E
        count, ring_tile, running = Int32(0), Int32(0), Int32(1)
        first_head = Int32(wg)  # the first head of the work tile that this warpgroup takes
        while running == 1:
            smem.work_full.data_ptr()  # see `start`
            record = scheduler.await_record(smem, self.edges.work, count)
            if record.first < 0:
                running = Int32(0)
            else:
                work = scheduler.read(record)
                self.edges.work.release(smem, record.slot)
                keys = self.masks.key_range(work.first, work.s_q, work.s_k, visible)
                first = work.first if const_expr(spec.grouped) else work.first + ROWS * wg
                limits = self.masks.limits(first, work.s_q, work.s_k, keys, visible, tid)
                position = views.position(spec.packed, work.start_q, work.batch, work.s_q) + first
                if const_expr(spec.grouped):
                    streamed = keys.tiles > spec.stages
                    if first_head < ratio:
                        head = work.head * ratio + first_head
                        self.statistics(mStats, head, position, work.s_q - first, next_stats, tid)
                    for number in cutlass.range(first_head, first_head + ratio, spec.warpgroups, unroll=1):
                        following = number + spec.warpgroups
                        kept = following - first_head < ratio and not streamed
                        if number < ratio:
                            for r in cutlass.range_constexpr(2):
                                lse[r], delta[r] = next_stats[r], next_stats[2 + r]
                            q_head = work.head * ratio + number
                            if following < ratio:
                                next_head = q_head + spec.warpgroups
                                self.statistics(mStats, next_head, position, work.s_q - first, next_stats, tid)
                            q_slot = self.edges.q.slot(count * ratio + number)
                            self.differentiate(
                                smem, grads, scale_log2, keys.tiles, limits, q_slot, ring_tile, kept, tid
                            )
                            target = self.rows.target(out, first, q_head, work)
                            self.rows.store(smem, acc_dq, softmax_scale, out, target, wg, tid)
                        elif not kept:
                            for i in cutlass.range(keys.tiles, unroll=1):
                                self.edges.skip(smem, self.edges.k.slot(ring_tile + i))
                        if not kept:
                            ring_tile += keys.tiles
                    first_head = (first_head + (spec.warpgroups - ratio % spec.warpgroups)) % spec.warpgroups
                else:
                    self.statistics(mStats, work.head, position, work.s_q - first, next_stats, tid)
                    for r in cutlass.range_constexpr(2):
                        lse[r], delta[r] = next_stats[r], next_stats[2 + r]
                    q_slot = Slot(wg, count % 2)
                    ring_tile = self.differentiate(
                        smem, grads, scale_log2, keys.tiles, limits, q_slot, ring_tile, False, tid
                    )
                    target = self.rows.target(out, first, work.head, work)
                    self.rows.store(smem, acc_dq, softmax_scale, out, target, wg, tid)
                count += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def statistics(
        self, mStats: cute.Tensor, head: Int32, position: Int32, rows: Int32, values: cute.Tensor, tid: Int32
    ):
        """Loads L and delta of this thread's two rows, of 64 from `position` on; the sequence has only `rows` there."""
        for r in cutlass.range_constexpr(2):
            row = wgmma.row(tid, r)
            values[r], values[2 + r] = Float32.inf, Float32(0.0)  # P is 0 in rows past the last
            if row < rows:
                values[r] = mStats[0, head, position + row]
                values[2 + r] = mStats[1, head, position + row]

    @cute.jit
    def differentiate(
        self,
        smem,
        grads: RowGrads,
        scale_log2: Float32,
        tiles: Int32,
        limits: QueryLimits,
        q_slot: Slot,
        ring_tile: Int32,
        kept,
        tid: Int32,
    ) -> Int32:
        """Makes dQ / softmax_scale of a slot. `kept` tiles stay for the next head. Returns the next key tile."""
        spec = self.spec
        layouts, (mma_s, mma_dq) = query_layouts(spec), query_mmas(spec)
        thr_s, thr_dq = mma_s.get_slice(tid), mma_dq.get_slice(tid)
        sQ, sDO = view(smem.q, layouts.q), view(smem.d_out, layouts.q)
        sK, sV = view(smem.k, layouts.kv), view(smem.v, layouts.kv)
        rQ, rDO = (mma_s.make_fragment_A(thr_s.partition_A(t))[None, None, None, q_slot.index] for t in (sQ, sDO))
        rK, rV = (mma_s.make_fragment_B(thr_s.partition_B(t)) for t in (sK, sV))
        rKt = mma_dq.make_fragment_B(thr_dq.partition_B(wgmma.transposed(sK)))
        acc_s, acc_dp = (cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, spec.tile)), Float32) for _ in range(2))
        s, dp = wgmma.by_row(acc_s), wgmma.by_row(acc_dp)
        qk_blocks = [(k, k) for k in range(spec.d // 16)]
        key_blocks = [(k, k) for k in range(spec.tile // 16)]

        first_tile, end_tile = limits.first_tile, limits.end_tile
        if const_expr(spec.grouped):
            first_tile, end_tile = Int32(0), tiles  # all warpgroups have the same rows
        for _ in cutlass.range(tiles - end_tile, unroll=1):
            self.edges.skip(smem, self.edges.k.slot(ring_tile))
            ring_tile += 1

        grads.d_q.fill(0.0)
        self.edges.q.wait(smem, q_slot)
        tile = end_tile
        while tile > first_tile:
            tile -= 1
            slot = self.edges.k.slot(ring_tile)
            ring_tile += 1
            self.edges.k.wait(smem, slot)
            warpgroup.fence()
            wgmma.issue(mma_s, acc_s, rQ, rK[None, None, None, slot.index], False, qk_blocks)
            warpgroup.commit_group()
            self.edges.v.wait(smem, slot)
            wgmma.issue(mma_s, acc_dp, rDO, rV[None, None, None, slot.index], False, qk_blocks)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            self.masks.mask(acc_s, tile, limits)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] = cute.math.exp2(s[r, c] * scale_log2 - grads.lse[r], fastmath=True)
            warpgroup.wait_group(0)
            self.edges.release(smem, self.edges.v, slot, kept)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] *= dp[r, c] - grads.delta[r]
            rDS = mma_dq.make_fragment_A(mma_dq.partition_shape_A((ROWS, spec.tile)))
            rDS.store(acc_s.load().to(self.dtype).reshape(rDS.shape))
            warpgroup.fence()
            wgmma.issue(mma_dq, grads.d_q, rDS, rKt[None, None, None, slot.index], True, key_blocks)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.edges.release(smem, self.edges.k, slot, kept)

        self.edges.q.release(smem, q_slot)
        for _ in cutlass.range(first_tile, unroll=1):
            self.edges.skip(smem, self.edges.k.slot(ring_tile))
            ring_tile += 1
        return ring_tile
