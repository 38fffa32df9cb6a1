"""The consumer warpgroups of the MLA decode kernel: scores, softmax and values of every tile."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.producer_kernel import GROUP, GROUPS, NOPE, ROPE, STAGES
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE, MlaDecodeSpec
from cute_kernels.mla.tile_kernel import BAR_OWNER, EVENTS, P_SHIFT, ROLES, layouts, start_q, tiled_mmas

STEPS = 1 + GROUPS  # of QK: the rope part, then the quantization tiles
KEY_BLOCKS = TOKENS_PER_TILE // 16
# PV for the 256 columns of a warpgroup comes in pieces: two quantization tiles x two halves of the keys
PIECES_OF_HALF = ((0, 1), (2, 3))
PIECES = 4
EAGER = False
INTERLEAVED = ((), (0,), (1,), (2,), (3,))  # pieces of the tile before that are multiplied beside each step of QK


class WideConsumer:
    """Device code for the 256 threads that multiply in :class:`cute_kernels.mla.kernel.MlaDecodeKernel`.

    Warpgroup w has the tiles t with t % 2 == w, its own ones: it computes their S and P. P of every tile meets V in
    both.

        own tile t:  QK of t in five steps, beside them PV of t - 1; softmax of t, P handed over; PV of t

    So the tensor core has PV of another tile to do while the chain of S waits, and QK of one warpgroup while the other
    one is in its softmax. Between two steps a warpgroup waits for all that it has issued: then ptxas sees accumulators
    that nothing else touches while they are written.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def decode(
        self,
        smem,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        store_out: cute.CopyAtom,
        tOut: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor | None,
        mPartialLse: cute.Tensor | None,
        mSink: cute.Tensor,
        scale_log2: Float32,
        done: Int32,
        count: Int32,
        loads: Int32,
        turn: Int32,
        work: tuple,
        warp_idx: Int32,
        tidx: Int32,
    ):
        """All that the consumers do for one item of work: attention over `count` tiles, the result or partial result.

        `done` tiles, `loads` loads of Q and `turn` items came before.
        """
        wg, tid = warp_idx // 4 - 1, tidx % 128
        _, mma_pv = tiled_mmas()
        shape = mma_pv.partition_shape_C((WIDE, GROUP))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        for half in cutlass.range_constexpr(2):
            acc_o[half].fill(0.0)
        sSum, _ = self.row_state(smem, wg, tid)
        sSum.fill(0.0)
        if count > 0:
            if warp_idx == 4:
                if turn > 0:
                    cute.arch.mbarrier_wait(smem.q_free.ptr, (turn - 1) % 2)
                start_q(smem, load_q, tQ, work, WIDE)
            cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
            self.attend(smem, acc_o, scale_log2, done, count, wg, tid)
        row_max, row_sum = self.finish_rows(smem, done + count, count, turn, wg, tid)
        if const_expr(self.spec.split):
            self.store_partial(acc_o, row_max, row_sum, mSink, mPartial, mPartialLse, work, wg, tid)
        else:
            self.store(smem, acc_o, row_max, row_sum, mSink, store_out, tOut, mLse, work, wg, tid)
        if tid == 0:  # of both warpgroups: nobody reads Q, or O that stands in its place, any more
            cute.arch.mbarrier_arrive(smem.q_free.ptr)

    @cute.jit
    def attend(self, smem, acc_o, scale_log2: Float32, done: Int32, count: Int32, wg: Int32, tid: Int32):
        """Online softmax over `count` > 0 tiles, the first of which is tile `done`.

        The running maxima (units of log2, common to both warpgroups) and sums (of this one's tiles) live in shared
        memory: 160 accumulators and P leave few registers for what is touched once a tile.
        """
        layout_nope, layout_rope, layout_q, _ = layouts()
        mma_qk, mma_pv = tiled_mmas()
        thr_qk, thr_pv = mma_qk.get_slice(tid), mma_pv.get_slice(tid)
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sRope = smem.rope.get_tensor(layout_rope.outer, swizzle=layout_rope.inner)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        rQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, 0]
        rNope = mma_qk.make_fragment_B(thr_qk.partition_B(sNope))
        rRope = mma_qk.make_fragment_B(thr_qk.partition_B(sRope))
        sV = cute.local_tile(wgmma.transposed(sNope), (GROUP, TOKENS_PER_TILE), (None, 0, None))
        rV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        operands = (rQ, rRope, rNope, rV)
        acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((WIDE, TOKENS_PER_TILE)), Float32)
        owns_first = done % 2 == wg
        end = done + count
        if const_expr(EAGER):
            start = cutlass.select_(owns_first, done, done + 1)
            for t in cutlass.range(start, end, 2, unroll=1):
                beside = Int32(0)
                if t > done:
                    ready = cute.arch.mbarrier_test_wait(smem.full.data_ptr() + wg, t // STAGES % 2)
                    beside = wgmma.every_thread(cutlass.select_(ready, Int32(1), Int32(0)), BAR_OWNER + wg)
                if beside == 1:
                    self.own_tile(smem, operands, acc_o, acc_s, scale_log2, t, done, wg, tid, True)
                else:
                    if t > done:
                        self.other_tile(smem, operands, acc_o, t - 1, done, wg, tid)
                    self.own_tile(smem, operands, acc_o, acc_s, scale_log2, t, done, wg, tid, False)
        else:
            if owns_first:
                self.own_tile(smem, operands, acc_o, acc_s, scale_log2, done, done, wg, tid, False)
            start = cutlass.select_(owns_first, done + 2, done + 1)
            for t in cutlass.range(start, end, 2, unroll=1):
                self.own_tile(smem, operands, acc_o, acc_s, scale_log2, t, done, wg, tid, True)
        if (end - 1) % 2 != wg:
            self.other_tile(smem, operands, acc_o, end - 1, done, wg, tid)

    @cute.jit
    def other_tile(self, smem, operands: tuple, acc_o, t: Int32, done: Int32, wg: Int32, tid: Int32):
        """PV of the other warpgroup's tile t by itself."""
        self.receive(smem, acc_o, t, done, wg, tid)
        self.add_values(smem, operands, acc_o, self.handed_over(smem, 1 - wg, tid), 1 - wg, wg, tid)
        cute.arch.mbarrier_arrive(smem.empty.data_ptr() + 1 - wg)

    @cute.jit
    def own_tile(
        self,
        smem,
        operands: tuple,
        acc_o,
        acc_s: cute.Tensor,
        scale_log2: Float32,
        t: Int32,
        done: Int32,
        wg: Int32,
        tid: Int32,
        interleaved: cutlass.Constexpr,
    ):
        """S, P and this warpgroup's columns of PV of tile t; with `interleaved` also PV of tile t - 1."""
        rQ, rRope, rNope, _ = operands
        mma_qk, _ = tiled_mmas()
        thr_qk = mma_qk.get_slice(tid)
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        s = wgmma.by_row(acc_s)
        columns = cute.size(s, mode=[1])
        quotient, f = self.factors(smem, thr_qk, wg)
        before = self.handed_over(smem, 1 - wg, tid)
        places = INTERLEAVED if const_expr(interleaved) else ((),) * STEPS
        first = next((step for step in range(STEPS) if places[step]), None)

        self.stamp(smem, t, 0, 0, wg, tid)
        cute.arch.mbarrier_wait(full + wg, t // STAGES % 2)
        if const_expr(self.spec.exchange == "values"):  # ordinary remote stores of the rope part, read by wgmma
            cute.arch.fence_proxy("async.shared", space="cta")
        self.stamp(smem, t, 0, 1, wg, tid)
        self.stamp(smem, t, 1, 0, wg, tid)
        for step in cutlass.range_constexpr(STEPS):
            if const_expr(step == first):
                self.stamp(smem, t, 2, 0, wg, tid)
                self.receive(smem, acc_o, t - 1, done, wg, tid)
                self.stamp(smem, t, 2, 1, wg, tid)
            if const_expr(step > 0):
                by_column = wgmma.by_row(quotient[None, None, None, step - 1])
                for c in cutlass.range_constexpr(columns):
                    for r in cutlass.range_constexpr(2):
                        s[r, c] *= by_column[0, c]
            probabilities = self.probabilities(smem, before, places[step], 1 - wg, wg, tid)
            warpgroup.fence()
            if const_expr(step == 0):
                of_rope = [(NOPE // 16 + k, k) for k in range(ROPE // 16)]
                wgmma.issue(mma_qk, acc_s, rQ, rRope[None, None, None, wg], False, of_rope)
            else:
                k_blocks = [GROUP // 16 * (step - 1) + k for k in range(GROUP // 16)]
                wgmma.issue(mma_qk, acc_s, rQ, rNope[None, None, None, wg], True, [(k, k) for k in k_blocks])
            self.multiply_values(operands, acc_o, probabilities, places[step], 1 - wg, wg)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if const_expr(PIECES - 1 in places[step]):
                cute.arch.mbarrier_arrive(empty + 1 - wg)
        cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)
        self.stamp(smem, t, 1, 1, wg, tid)
        self.stamp(smem, t, 3, 0, wg, tid)

        sSum, sMax = self.row_state(smem, wg, tid)
        of_columns = cute.make_layout((WIDE, TOKENS_PER_TILE, STAGES), stride=(0, 1, TOKENS_PER_TILE))
        mask = wgmma.by_row(thr_qk.partition_C(smem.mask.get_tensor(of_columns)[None, None, wg]))
        last = wgmma.by_row(f[None, None, None, GROUPS - 1])
        alpha = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            old_max = self.max_before(sMax[r, 1 - wg], t, done)
            new_max = old_max
            for c in cutlass.range_constexpr(columns):
                s[r, c] = s[r, c] * (last[0, c] * scale_log2) + mask[0, c]
                new_max = cute.arch.fmax(new_max, s[r, c])
            new_max = cute.arch.warp_reduction_max(new_max, threads_in_group=4)
            alpha[r] = softmax.rescaling(old_max, new_max)
            shift = softmax.finite(new_max) - P_SHIFT
            partial = Float32(0.0)
            for c in cutlass.range_constexpr(columns):
                s[r, c] = cute.math.exp2(s[r, c] - shift, fastmath=True)
                partial += s[r, c]
            sSum[r] = sSum[r] * alpha[r] + partial  # this thread's columns only; lanes are added at the end
            if tid % 4 == 0:
                sMax[r, wg] = new_max
        rP = cute.make_rmem_tensor((8, KEY_BLOCKS), Float16)
        rP.store(acc_s.load().to(Float16).reshape(rP.shape))
        cute.autovec_copy(rP, self.handed_over(smem, wg, tid))
        cute.arch.mbarrier_arrive(smem.p_full.data_ptr() + wg)
        self.stamp(smem, t, 3, 1, wg, tid)
        self.stamp(smem, t, 4, 0, wg, tid)
        softmax.rescale(acc_o, alpha)
        self.add_values(smem, operands, acc_o, rP, wg, wg, tid)
        cute.arch.mbarrier_arrive(empty + wg)
        self.stamp(smem, t, 4, 1, wg, tid)

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, wg: Int32, tid: Int32):
        """A timestamp of an own tile."""
        step = len(EVENTS[1]) * (t // 2) + event
        for w in cutlass.range_constexpr(2):
            self.tracer.stamp(smem.trace.ptr, 1 + w, step, edge, wg == w and tid == 0)

    @cute.jit
    def receive(self, smem, acc_o, t: Int32, done: Int32, wg: Int32, tid: Int32):
        """Waits for P of the other warpgroup's tile t, and makes sums and O relative to its maxima."""
        cute.arch.mbarrier_wait(smem.p_full.data_ptr() + 1 - wg, t // STAGES % 2)
        sSum, sMax = self.row_state(smem, wg, tid)
        alpha = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            alpha[r] = softmax.rescaling(self.max_before(sMax[r, wg], t, done), sMax[r, 1 - wg])
            sSum[r] *= alpha[r]
        softmax.rescale(acc_o, alpha)

    def max_before(self, stored, t: Int32, first: Int32):
        """The maximum before tile t; nothing has been seen before the first one of an item."""
        return cutlass.select_(t == first, -Float32.inf, stored)

    @cute.jit
    def add_values(self, smem, operands: tuple, acc_o, p: cute.Tensor, stage: Int32, wg: Int32, tid: Int32):
        """O += P V for the keys in a stage, waited for. The operands of all four pieces at once would spill."""
        for half in cutlass.range_constexpr(2):
            some = PIECES_OF_HALF[half]
            probabilities = self.probabilities(smem, p, some, stage, wg, tid)
            warpgroup.fence()
            self.multiply_values(operands, acc_o, probabilities, some, stage, wg)
            warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def probabilities(self, smem, p: cute.Tensor, pieces, stage: Int32, wg: Int32, tid: Int32):
        """P times the factor of the keys in a quantization tile, as operands: one for each of `pieces`.

        p: (8, KEY_BLOCKS) float16, this thread's fragment, in registers or in shared memory.
        """
        mma_qk, mma_pv = tiled_mmas()
        _, f = self.factors(smem, mma_qk.get_slice(tid), stage)
        found = []
        for i in cutlass.range_constexpr(len(pieces)):
            half, k_blocks = _piece(pieces[i])
            by_column = wgmma.by_row(f[None, None, None, 2 * wg + half])
            eight = cute.make_rmem_tensor(8, Float16)
            scaled = cute.make_rmem_tensor((8, len(k_blocks)), Float32)
            for k in cutlass.range_constexpr(len(k_blocks)):
                cute.autovec_copy(p[None, k_blocks[k]], eight)
                wide = eight.load().to(Float32)
                for e in cutlass.range_constexpr(8):  # as in the accumulator: neighbours, rows, then eight columns on
                    scaled[e, k] = wide[e] * by_column[0, 4 * k_blocks[k] + e % 2 + 2 * (e // 4)]
            shape = mma_pv.partition_shape_A((WIDE, 16 * len(k_blocks)))
            operand = mma_pv.make_fragment_A(shape)
            operand.store(scaled.load().to(BFloat16).reshape(operand.shape))
            found.append(operand)
        return found

    @cute.jit
    def multiply_values(self, operands: tuple, acc_o, probabilities, pieces, stage: Int32, wg: Int32):
        """Issues O += P V for `pieces`; the caller fences before, commits and waits after."""
        _, _, _, rV = operands
        _, mma_pv = tiled_mmas()
        for i in cutlass.range_constexpr(len(pieces)):
            half, k_blocks = _piece(pieces[i])
            values = rV[None, None, None, 2 * wg + half, stage]
            wgmma.issue(mma_pv, acc_o[half], probabilities[i], values, True, list(enumerate(k_blocks)))

    def handed_over(self, smem, stage: Int32, tid: Int32) -> cute.Tensor:
        """This thread's fragment of P of the tile in a stage, over its rope block: (8, KEY_BLOCKS) float16.

        Columns 16 k and on are piece k of 16 bytes.
        """
        start = cute.assume(tid * 8 + stage * (TOKENS_PER_TILE * ROPE), divby=8)
        pointer = cute.recast_ptr(smem.rope.data_ptr(), dtype=Float16) + start
        return cute.make_tensor(pointer, cute.make_layout((8, KEY_BLOCKS), stride=(1, 128 * 8)))

    @cute.jit
    def factors(self, smem, thr_qk, stage: Int32):
        """f_(j-1) / f_j and f_j of the columns of this thread's fragment of S, each (fragment, GROUPS)."""
        layout = cute.make_layout((WIDE, TOKENS_PER_TILE, GROUPS), stride=(0, 1, TOKENS_PER_TILE))
        per_stage = 2 * GROUPS * TOKENS_PER_TILE
        first = smem.factor.data_ptr() + cute.assume(stage * per_stage, divby=per_stage)
        quotient, f = (cute.make_tensor(first + i * GROUPS * TOKENS_PER_TILE, layout) for i in range(2))
        return thr_qk.partition_C(quotient), thr_qk.partition_C(f)

    def row_state(self, smem, wg: Int32, tid: Int32):
        """This thread's sums of its two rows (2), and their running maxima after the tile in a stage (2, stages)."""
        sums = smem.partial_sum.data_ptr() + cute.assume((wg * 128 + tid) * 2, divby=2)
        maxima = cute.make_layout((2, STAGES), stride=(8, WIDE))
        return (
            cute.make_tensor(sums, cute.make_layout(2)),
            cute.make_tensor(smem.row_max.data_ptr() + wgmma.row(tid, 0), maxima),
        )

    @cute.jit
    def finish_rows(self, smem, end: Int32, count: Int32, turn: Int32, wg: Int32, tid: Int32):
        """Final maxima and complete sums of this thread's rows: over the four lanes of a row and both warpgroups.

        Afterwards nobody reads Q any more, so O may be staged there.
        """
        partial, sMax = self.row_state(smem, wg, tid)
        # in turns: a slow thread may still read the sums of the item before
        sSum = smem.row_sum.get_tensor(cute.make_layout((WIDE, 2, 2)))[None, None, turn % 2]
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(partial[r], threads_in_group=4)
            if tid % 4 == 0:
                sSum[wgmma.row(tid, r), wg] = total
        cute.arch.mbarrier_arrive(smem.sums_full.ptr)
        cute.arch.mbarrier_wait(smem.sums_full.ptr, turn % 2)
        for r in cutlass.range_constexpr(2):
            row_max[r] = cutlass.select_(count > 0, sMax[r, (end + STAGES - 1) % STAGES], -Float32.inf)
            row_sum[r] = sSum[wgmma.row(tid, r), 0] + sSum[wgmma.row(tid, r), 1]
        return row_max, row_sum

    @cute.jit
    def store(
        self,
        smem,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        mSink: cute.Tensor,
        store_out: cute.CopyAtom,
        tOut: cute.Tensor,
        mLse: cute.Tensor,
        work,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O, sink included, and stores it as bf16 by TMA; stores the log-sum-exp."""
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

        _, _, _, layout_out = layouts()
        _, mma_pv = tiled_mmas()
        sO = smem.q.get_tensor(layout_out.outer, swizzle=layout_out.inner)
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), mma_pv)
        thr_copy = to_smem.get_slice(tid)
        for half in cutlass.range_constexpr(2):
            rO = cute.make_rmem_tensor(acc_o[half].shape, BFloat16)
            rO.store(acc_o[half].load().to(BFloat16))
            cute.copy(to_smem, thr_copy.retile(rO), thr_copy.partition_D(sO[None, None, 2 * wg + half]))
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by the copy engine
        cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)
        gO = cute.local_tile(tOut, (WIDE, GROUP), (head_block, None, query_idx, batch_idx))
        tOsO, tOgO = cpasync.tma_partition(
            store_out, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
        )
        if tid // 32 == 0:
            for half in cutlass.range_constexpr(2):
                cute.copy(store_out, tOsO[None, 2 * wg + half], tOgO[None, 2 * wg + half])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=BAR_OWNER + wg, number_of_threads=128)  # the next item may have no Q to wait for

    @cute.jit
    def store_partial(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        mSink: cute.Tensor,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        work,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O without the sink and stores it as float32, with its log-sum-exp, for the merge."""
        head_block, split_idx, query_idx, batch_idx = work
        denominator = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            denominator[r] = row_sum[r]
        softmax.normalize(acc_o, row_sum, denominator)
        thr_pv = tiled_mmas()[1].get_slice(tid)
        gO = cute.local_tile(mPartial[split_idx, batch_idx, query_idx, None, None], (WIDE, GROUP), (head_block, None))
        for r in cutlass.range_constexpr(2):
            head = head_block * WIDE + wgmma.row(tid, r)
            if head < mSink.shape[0]:
                if wg == 0 and tid % 4 == 0:
                    lse = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
                    mPartialLse[split_idx, batch_idx, query_idx, head] = lse
                for half in cutlass.range_constexpr(2):
                    target = wgmma.by_row(thr_pv.partition_C(gO[None, None, 2 * wg + half]))
                    cute.autovec_copy(wgmma.by_row(acc_o[half])[r, None], target[r, None])


def _piece(piece: int) -> tuple[int, tuple[int, ...]]:
    """(which of the two quantization tiles, blocks of 16 keys) of a piece of PV."""
    per_half = PIECES // 2
    keys = KEY_BLOCKS // per_half
    return piece // per_half, tuple(piece % per_half * keys + k for k in range(keys))
