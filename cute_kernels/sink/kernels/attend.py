"""Consumer warpgroups of the forward. Each computes QK, softmax, PV and the epilogue of 64 rows.

A step multiplies P and V of one key tile, and Q and K' of the next ('). "Wait n" leaves n wgmma groups in flight.
    turn     issues S' = Q K'^T and O += P V, then gives the turn to the next warpgroup
    wait 1   S' is complete: releases K'; computes row_max, P' = exp2(S' scale - row_max) and row_sum
    wait 0   O is complete: releases V; rescales O if a row_max has moved; rounds P' to the operand P
The softmax of a tile therefore overlaps with PV of the tile before, and with the products of other warpgroups.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.pipeline import Slot
from cute_kernels.sink.kernels import scheduler, views
from cute_kernels.sink.kernels import softmax as row_softmax
from cute_kernels.sink.kernels.epilogue import RowStore
from cute_kernels.sink.kernels.masks import QueryLimits, QueryMasks, Visibility
from cute_kernels.sink.kernels.pipelines import ForwardNamedBarrier, query_pipelines
from cute_kernels.sink.kernels.smem import query_layouts, query_mmas, view
from cute_kernels.sink.kernels.views import DTYPES, Tma
from cute_kernels.sink.spec import ROWS


class RowState(NamedTuple):
    """State of a thread's two rows: O, the maximum that P is relative to, and P's sum over the thread's columns."""

    o: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


class Results(NamedTuple):
    """Tensors of the epilogue: it writes `out` and `lse`, and reads the sink of each head."""

    out: Tma
    lse: cute.Tensor
    sink: cute.Tensor


class HeadGroup(NamedTuple):
    """Number of query heads of a KV head, and the first one of a grouped work tile that this warpgroup takes."""

    ratio: Int32
    first: Int32


class Targets(NamedTuple):
    """Where results of 64 rows go: a TMA store, its target for O, and the log-sum-exps of the sequence."""

    store: Tma
    out: cute.Tensor
    lse: cute.Tensor


class Attend:
    """Device code of a consumer warpgroup."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.masks = QueryMasks(spec)
        self.edges = query_pipelines(spec)
        self.rows = RowStore(spec, ForwardNamedBarrier.STORE)

    @cute.jit
    def run(
        self, smem, results: Results, scale_log2: Float32, visible: Visibility, ratio: Int32, wg: Int32, tid: Int32
    ):
        """Computes attention of every work tile of the CTA, for this warpgroup's 64 rows or, if grouped, its heads."""
        spec = self.spec
        acc_o = cute.make_rmem_tensor(query_mmas(spec).pv.partition_shape_C((ROWS, spec.d)), Float32)
        state = RowState(acc_o, cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32))
        if const_expr(spec.turns):
            if wg == spec.warpgroups - 1:  # this arrival gives the first turn
                cute.arch.barrier_arrive(barrier_id=ForwardNamedBarrier.TURN, number_of_threads=256)

        count, ring_tile, running = Int32(0), Int32(0), Int32(1)
        first_head = Int32(wg)  # the first head of the work tile that this warpgroup takes
        while running == 1:
            smem.work_full.data_ptr()  # see `start`
            work = scheduler.await_record(smem, self.edges.work, count)
            if work.first < 0:
                running = Int32(0)
            elif const_expr(spec.grouped):
                heads = HeadGroup(ratio, first_head)
                ring_tile = self.attend_heads(
                    smem, state, results, work, scale_log2, visible, heads, count, ring_tile, wg, tid
                )
                first_head = (first_head + (spec.warpgroups - ratio % spec.warpgroups)) % spec.warpgroups
                count += 1
            else:
                first, s_q, s_k = work.first + ROWS * wg, work.s_q, work.s_k
                keys = self.masks.key_range(work.first, s_q, s_k, visible)
                limits = self.masks.limits(first, s_q, s_k, keys, visible, tid)
                q_slot = Slot(wg, count % 2)
                ring_tile = self.attend(smem, state, scale_log2, keys.tiles, limits, q_slot, ring_tile, False, wg, tid)
                # the record is read again instead of kept: registers are short while P, S and O are alive
                rows = scheduler.WorkTile(work.first + ROWS * wg, work.head, work.batch, work.s_q, None, work.start_q)
                self.edges.work.release(smem, work.slot)
                targets = self.targets(results, rows, rows.head)
                self.store(smem, state, targets, scale_log2, results.sink[rows.head], rows, wg, tid)
                count += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def attend_heads(
        self,
        smem,
        state: RowState,
        results: Results,
        record: scheduler.WorkRecord,
        scale_log2: Float32,
        visible: Visibility,
        heads: HeadGroup,
        count: Int32,
        ring_tile: Int32,
        wg: Int32,
        tid: Int32,
    ) -> Int32:
        """Computes attention of every `warpgroups`-th head of a work tile, `heads.first` first; returns the next tile.

        Head h of the count-th work tile has number n = count x ratio + h. Its Q is in stage n % q_stages.
        """
        spec, (ratio, first_head) = self.spec, heads
        work = scheduler.read(record)
        self.edges.work.release(smem, record.slot)
        keys = self.masks.key_range(work.first, work.s_q, work.s_k, visible)
        limits = self.masks.limits(work.first, work.s_q, work.s_k, keys, visible, tid)
        streamed = keys.tiles > spec.stages
        for number in cutlass.range(first_head, first_head + ratio, spec.warpgroups, unroll=1):
            kept = number - first_head + spec.warpgroups < ratio and not streamed
            if number < ratio:
                head = work.head * ratio + number
                sink = results.sink[head]
                q_slot = self.edges.q.slot(count * ratio + number)
                self.attend(smem, state, scale_log2, keys.tiles, limits, q_slot, ring_tile, kept, wg, tid)
                targets = self.targets(results, work, head)
                self.store(smem, state, targets, scale_log2, sink, work, wg, tid)
            elif not kept:
                for i in cutlass.range(keys.tiles, unroll=1):
                    self.skip(smem, ring_tile + i, wg)
            if not kept:
                ring_tile += keys.tiles
        return ring_tile

    @cute.jit
    def attend(
        self,
        smem,
        state: RowState,
        scale_log2: Float32,
        tiles: Int32,
        limits: QueryLimits,
        q_slot: Slot,
        ring_tile: Int32,
        kept,
        wg: Int32,
        tid: Int32,
    ) -> Int32:
        """Computes O, row_max and row_sum (of this thread's columns) of the rows in a slot; returns the next key tile.

        The first key tile is `ring_tile`, counted since the kernel started. `kept` tiles stay for the next head.
        """
        spec = self.spec
        layouts, mmas = query_layouts(spec), query_mmas(spec)
        thr_qk, thr_pv = mmas.qk.get_slice(tid), mmas.pv.get_slice(tid)
        sQ, sK, sV = view(smem.q, layouts.q), view(smem.k, layouts.kv), view(smem.v, layouts.kv)
        rQ = mmas.qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, q_slot.index]
        rK = mmas.qk.make_fragment_B(thr_qk.partition_B(sK))
        rV = mmas.pv.make_fragment_B(thr_pv.partition_B(wgmma.transposed(sV)))
        rP = mmas.pv.make_fragment_A(mmas.pv.partition_shape_A((ROWS, spec.tile)))
        acc_s = cute.make_rmem_tensor(mmas.qk.partition_shape_C((ROWS, spec.tile)), Float32)
        alpha = cute.make_rmem_tensor(2, Float32)
        qk_blocks = [(k, k) for k in range(spec.d // 16)]
        pv_blocks = [(k, k) for k in range(spec.tile // 16)]

        first_tile, end_tile = limits.first_tile, limits.end_tile
        if const_expr(spec.grouped):
            first_tile, end_tile = Int32(0), tiles  # all warpgroups have the same rows
        for _ in cutlass.range(tiles - end_tile, unroll=1):
            self.skip(smem, ring_tile, wg)
            ring_tile += 1

        state.o.fill(0.0)
        first = self.edges.k.slot(ring_tile)
        self.edges.q.wait(smem, q_slot)
        self.edges.k.wait(smem, first)
        warpgroup.fence()
        wgmma.issue(mmas.qk, acc_s, rQ, rK[None, None, None, first.index], False, qk_blocks)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.edges.release(smem, self.edges.k, first, kept)
        tile = end_tile - 1
        self.masks.mask(acc_s, tile, limits)
        for r in cutlass.range_constexpr(2):
            state.row_max[r] = -Float32.inf
            state.row_sum[r] = Float32(0.0)
        row_softmax.exponentiate(acc_s, state.row_max, state.row_sum, alpha, scale_log2)

        while tile > first_tile:
            tile -= 1
            # not rounded where P is computed: ptxas counts a P that the loop carries twice, and serializes the products
            rP.store(acc_s.load().to(self.dtype).reshape(rP.shape))
            current = self.edges.v.slot(ring_tile)
            ring_tile += 1
            following = self.edges.k.slot(ring_tile)
            self.edges.k.wait(smem, following)
            self.await_turn(wg)
            warpgroup.fence()
            wgmma.issue(mmas.qk, acc_s, rQ, rK[None, None, None, following.index], False, qk_blocks)
            warpgroup.commit_group()
            self.edges.v.wait(smem, current)
            warpgroup.fence()
            wgmma.issue(mmas.pv, state.o, rP, rV[None, None, None, current.index], True, pv_blocks)
            warpgroup.commit_group()
            self.give_turn(wg)
            warpgroup.wait_group(1)
            self.edges.release(smem, self.edges.k, following, kept)
            self.masks.mask(acc_s, tile, limits)
            row_softmax.exponentiate(acc_s, state.row_max, state.row_sum, alpha, scale_log2)
            row_softmax.keep_before_wait(state.row_sum)
            warpgroup.wait_group(0)
            self.edges.release(smem, self.edges.v, current, kept)
            softmax.rescale([state.o], alpha)

        self.edges.q.release(smem, q_slot)
        rP.store(acc_s.load().to(self.dtype).reshape(rP.shape))
        last = self.edges.v.slot(ring_tile)
        self.edges.v.wait(smem, last)
        warpgroup.fence()
        wgmma.issue(mmas.pv, state.o, rP, rV[None, None, None, last.index], True, pv_blocks)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.edges.release(smem, self.edges.v, last, kept)
        ring_tile += 1
        for _ in cutlass.range(first_tile, unroll=1):
            self.skip(smem, ring_tile, wg)
            ring_tile += 1
        return ring_tile

    @cute.jit
    def skip(self, smem, ring_tile: Int32, wg: Int32):
        """Releases a tile that none of these rows sees. It takes and gives a turn, as for every tile."""
        slot = self.edges.k.slot(ring_tile)
        self.await_turn(wg)
        self.give_turn(wg)
        self.edges.skip(smem, slot)

    @cute.jit
    def await_turn(self, wg: Int32):
        """Waits until the warpgroup before this one has issued its products."""
        if const_expr(self.spec.turns):
            cute.arch.barrier(barrier_id=ForwardNamedBarrier.TURN + wg, number_of_threads=256)

    @cute.jit
    def give_turn(self, wg: Int32):
        """Lets the warpgroup after this one issue its products."""
        if const_expr(self.spec.turns):
            following = cutlass.select_(wg == self.spec.warpgroups - 1, Int32(0), wg + 1)
            cute.arch.barrier_arrive(barrier_id=ForwardNamedBarrier.TURN + following, number_of_threads=256)

    @cute.jit
    def targets(self, results: Results, rows: scheduler.WorkTile, head: Int32) -> Targets:
        """Returns where 64 rows of a head, from rows.first on, go, and the log-sum-exps of all rows of the sequence."""
        out = self.rows.target(results.out, rows.first, head, rows)
        lse = views.head_rows(results.lse, self.spec.packed, rows.start_q, rows.batch, head)
        return Targets(results.out, out, lse)

    @cute.jit
    def store(
        self,
        smem,
        state: RowState,
        targets: Targets,
        scale_log2: Float32,
        sink: Float32,
        rows: scheduler.WorkTile,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes 64 rows of O, from rows.first on, with the sink; stores them, and their LSE without the sink."""
        factor = cute.make_rmem_tensor(2, Float32)
        row_sum = state.row_sum
        for r in cutlass.range_constexpr(2):
            row_sum[r] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            top = softmax.finite(state.row_max[r]) * scale_log2
            denominator = row_sum[r] + cute.math.exp2(sink * softmax.LOG2_E - top, fastmath=True)
            # rcp.approx is within one unit of the last place; an IEEE division would call a slow path
            factor[r] = cutlass.select_(row_sum[r] == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))
            row = rows.first + wgmma.row(tid, r)
            if tid % 4 == 0 and row < rows.s_q:
                targets.lse[row] = softmax.log_sum_exp(top, row_sum[r])
        softmax.multiply_rows([state.o], factor)
        self.rows.store(smem, state.o, None, targets.store, targets.out, wg, tid)
