"""dq of sink attention on SM90 where queries stay and keys stream past; deterministic, no scratch memory.

A CTA takes blocks of 64 query rows per consumer warpgroup, as the forward does, with the same producer, barriers and
order of tiles (forward.py, query_blocks.py), but without turns: a tile has three products.
    S = Q K^T and dP = dO V^T issued    wait 1: P = exp2(S scale - L), masked
                                        wait 0: V is given back; dS = P (dP - delta), rounded
    dQ += dS K issued                   wait 0: K is given back
Statistics L and delta of a row come from prepare.py: L is the log2-sum-exp2 with the sink.

Instructions of a score outside the products: FFMA, MUFU.EX2, FADD, FMUL and half an F2FP.

Registers of a consumer: 32 of S, 32 of dP, 16 of dS; 32 (d 64) or 64 (d 128) of dQ.
Shared memory: Q, dO and dQ of warpgroups x 64 rows; 4 (d 128) or 8 (d 64) stages of tiles of 64 keys.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import softmax, wgmma
from cute_kernels.sink.backward_spec import SinkQueryGradSpec
from cute_kernels.sink.kernels import schedule as schedule
from cute_kernels.sink.kernels.query_blocks import QueryBlocks
from cute_kernels.sink.spec import ROWS

BAR_STORE = 1


class SinkQueryGradKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: SinkQueryGradSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.dtype = schedule.DTYPES[spec.dtype]
        self.blocks = QueryBlocks(spec)

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        batch, s_q, s_k, h_q, h_kv = (cute.sym_int() for _ in range(5))
        q, d_out, d_q = (schedule.fake_rows(self.dtype, spec.packed, (batch, s_q, h_q), spec.d) for _ in range(3))
        k, v = (schedule.fake_rows(self.dtype, spec.packed, (batch, s_k, h_kv), spec.d) for _ in range(2))
        packed = schedule.fake_packed(spec.packed)
        numbers = (Float32(1.0), *[Int32(1)] * 4, Int64(0))
        stats = schedule.fake_stats(h_q)
        return (q, k, v, d_out, stats, d_q, *packed, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    def layouts(self):
        """Shared memory: Q and dO (64, d, slots), dQ (64, d, warpgroups), K and V (tile, d, stages)."""
        spec, row = self.spec, LayoutEnum.ROW_MAJOR
        tiler = (ROWS, spec.tile, spec.d)
        return (
            sm90.make_smem_layout_a(row, tiler, self.dtype, spec.q_stages),
            sm90.make_smem_layout_epi(self.dtype, row, (ROWS, spec.d), spec.warpgroups),
            sm90.make_smem_layout_b(row, tiler, self.dtype, spec.stages),
        )

    def tiled_mmas(self):
        """S = Q K^T and dP = dO V^T from shared memory; dQ += dS K with dS in registers."""
        k, mn, one, t = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1), self.dtype
        registers = warpgroup.OperandSource.RMEM
        return (
            sm90.make_trivial_tiled_mma(t, t, k, k, Float32, one, (ROWS, self.spec.tile)),
            sm90.make_trivial_tiled_mma(t, t, k, mn, Float32, one, (ROWS, self.spec.d), registers),
        )

    def storage(self):
        """The struct in shared memory."""
        spec, dtype = self.spec, self.dtype
        layout_q, layout_out, layout_kv = self.layouts()

        @cute.struct
        class Shared:
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_q)], 1024]
            d_out: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_q)], 1024]
            d_q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_out)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_kv)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_kv)], 1024]
            work: cute.struct.MemRange[Int32, schedule.RECORD * schedule.SLOTS]
            work_full: cute.struct.MemRange[Int64, schedule.SLOTS]
            work_empty: cute.struct.MemRange[Int64, schedule.SLOTS]
            q_full: cute.struct.MemRange[Int64, spec.q_stages]
            q_empty: cute.struct.MemRange[Int64, spec.q_stages]
            k_full: cute.struct.MemRange[Int64, spec.stages]
            k_empty: cute.struct.MemRange[Int64, spec.stages]
            v_full: cute.struct.MemRange[Int64, spec.stages]
            v_empty: cute.struct.MemRange[Int64, spec.stages]
            kept: Int64

        return Shared

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mDOut: cute.Tensor,
        mStats: cute.Tensor,
        mDQ: cute.Tensor,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mWork: cute.Tensor | None,
        softmax_scale: Float32,
        window: Int32,
        causal: Int32,
        section: Int32,
        ctas: Int32,
        counters: Int64,
        stream: cuda.CUstream,
    ):
        """One launch of `ctas` CTAs, one for each SM, after SinkPrepareKernel.

        Every size of a tensor is above 0; single sequences of a packed call may be empty.
        mQ, mDOut, mDQ  (batch, s_q, h_q, d) or packed (tokens, h_q, d), strides as in the forward
        mK, mV     (batch, s_k, h_kv, d) or packed (tokens, h_kv, d)
        mStats     (2, h_q, positions) float32, contiguous, of SinkPrepareKernel
        mWork      packed: the list of SinkWorkListKernel(keys=False) for blocks of spec.rows queries
        the rest   as in SinkForwardKernel; the counters are two int32, 0 before and after. No scratch memory
        """
        spec = self.spec
        heads = mQ.shape[1 if const_expr(spec.packed) else 2]
        ratio = heads // mK.shape[1 if const_expr(spec.packed) else 2]
        if const_expr(spec.grouped):
            heads, section = heads // ratio, section // ratio
        blocks, items, pairs = Int32(1), Int32(0), Int32(1)
        max_q, max_k = (Int32(t.shape[0 if const_expr(spec.packed) else 1]) for t in (mQ, mK))
        if const_expr(not spec.packed):
            blocks = cute.ceil_div(max_q, spec.rows)
            pairs = section
            items = blocks * heads * mQ.shape[0]
        reach = Int32(0) if causal != 0 else Int32(schedule.UNLIMITED)
        divisors = tuple(cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (pairs * blocks, pairs, heads, ratio))

        layout_q, layout_out, layout_kv = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        box_q, box_kv = (ROWS, spec.d), (spec.tile, spec.d)
        (load_q, tQ), (load_do, tDO) = (
            cpasync.make_tiled_tma_atom(
                load, schedule.rows_view(t, spec.packed), cute.select(layout_q, mode=[0, 1]), box_q
            )
            for t in (mQ, mDOut)
        )
        (load_k, tK), (load_v, tV) = (
            cpasync.make_tiled_tma_atom(
                load, schedule.rows_view(t, spec.packed), cute.select(layout_kv, mode=[0, 1]), box_kv
            )
            for t in (mK, mV)
        )
        store_dq, tDQ = cpasync.make_tiled_tma_atom(
            store, schedule.rows_view(mDQ, spec.packed), cute.select(layout_out, mode=[0, 1]), box_q
        )
        self.kernel(
            load_q, tQ, load_do, tDO, load_k, tK, load_v, tV, store_dq, tDQ, mStats, mCuQ, mCuK, mWork,
            softmax_scale, window, reach, max_q, max_k, blocks, items, counters, divisors,
        ).launch(
            grid=[ctas, 1, 1],
            block=[spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        load_do: cute.CopyAtom,
        tDO: cute.Tensor,
        load_k: cute.CopyAtom,
        tK: cute.Tensor,
        load_v: cute.CopyAtom,
        tV: cute.Tensor,
        store_dq: cute.CopyAtom,
        tDQ: cute.Tensor,
        mStats: cute.Tensor,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mWork: cute.Tensor | None,
        softmax_scale: Float32,
        window: Int32,
        reach: Int32,
        max_q: Int32,
        max_k: Int32,
        blocks: Int32,
        items: Int32,
        counters: Int64,
        divisors: tuple,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(self.storage())
        if warp_idx == 0:
            for atom in (load_q, load_do, load_k, load_v, store_dq):
                cpasync.prefetch_descriptor(atom)
        self.blocks.init_barriers(smem, tidx)
        layout_q, _, layout_kv = self.layouts()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(spec.load_registers)
            if warp_idx == 0:
                sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
                sDO = smem.d_out.get_tensor(layout_q.outer, swizzle=layout_q.inner)
                sK = smem.k.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
                sV = smem.v.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
                self.blocks.produce(
                    smem, ((load_q, tQ, sQ), (load_do, tDO, sDO)), load_k, tK, sK, load_v, tV, sV, mCuQ, mCuK, mWork,
                    window, reach, max_q, max_k, blocks, items, counters, divisors, tidx,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(spec.consumer_registers)
            wg, tid = warp_idx // 4 - 1, tidx % 128
            self.consume(smem, store_dq, tDQ, mStats, softmax_scale, window, reach, divisors[3].divisor, wg, tid)

    @cute.jit
    def consume(
        self,
        smem,
        store_dq: cute.CopyAtom,
        tDQ: cute.Tensor,
        mStats: cute.Tensor,
        softmax_scale: Float32,
        window: Int32,
        reach: Int32,
        ratio: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """One consumer warpgroup: its 64 rows of each item, or its heads."""
        spec = self.spec
        _, mma_dq = self.tiled_mmas()
        sWork = smem.work.get_tensor(cute.make_layout((schedule.RECORD, schedule.SLOTS)))
        acc_dq = cute.make_rmem_tensor(mma_dq.partition_shape_C((ROWS, spec.d)), Float32)
        total, delta, of_next = (cute.make_rmem_tensor(n, Float32) for n in (2, 2, 4))
        scale_log2 = softmax_scale * softmax.LOG2_E
        turn, use, running = Int32(0), Int32(0), Int32(1)
        mine_first = Int32(wg)  # the first head of an item that is this warpgroup's
        while running == 1:
            slot = turn % schedule.SLOTS
            cute.arch.mbarrier_wait(smem.work_full.data_ptr() + slot, turn // schedule.SLOTS % 2)
            if sWork[0, slot] < 0:
                running = Int32(0)
            else:
                first, head, batch, s_q, s_k, start_q = (sWork[i, slot] for i in range(6))
                cute.arch.mbarrier_arrive(smem.work_empty.data_ptr() + slot)
                begin, tiles = self.blocks.extent(first, s_q, s_k, window, reach)
                mine = first if const_expr(spec.grouped) else first + ROWS * wg
                low, high, edges = self.blocks.edges(mine, s_q, s_k, begin, tiles, window, reach, tid)
                position = schedule.position(spec.packed, start_q, batch, s_q) + mine
                if const_expr(spec.grouped):
                    streamed = tiles > spec.stages
                    if mine_first < ratio:
                        self.statistics(mStats, head * ratio + mine_first, position, s_q - mine, of_next, tid)
                    for number in cutlass.range(mine_first, mine_first + ratio, spec.warpgroups, unroll=1):
                        following = number + spec.warpgroups
                        kept = following - mine_first < ratio and not streamed
                        if number < ratio:
                            for r in cutlass.range_constexpr(2):
                                total[r], delta[r] = of_next[r], of_next[2 + r]
                            q_head = head * ratio + number
                            if following < ratio:
                                of_head = q_head + spec.warpgroups
                                self.statistics(mStats, of_head, position, s_q - mine, of_next, tid)
                            nth = turn * ratio + number
                            self.differentiate(
                                smem, acc_dq, total, delta, scale_log2, low, high, tiles, edges, nth % spec.q_stages,
                                nth // spec.q_stages % 2, use, kept, tid,
                            )  # fmt: skip
                            gDQ = self.target(tDQ, mine, s_q, start_q, q_head, batch)
                            self.store(smem, acc_dq, softmax_scale, store_dq, gDQ, wg, tid)
                        elif not kept:
                            for i in cutlass.range(tiles, unroll=1):
                                self.pass_over(smem, use + i)
                        if not kept:
                            use += tiles
                    mine_first = (mine_first + (spec.warpgroups - ratio % spec.warpgroups)) % spec.warpgroups
                else:
                    self.statistics(mStats, head, position, s_q - mine, of_next, tid)
                    for r in cutlass.range_constexpr(2):
                        total[r], delta[r] = of_next[r], of_next[2 + r]
                    use = self.differentiate(
                        smem, acc_dq, total, delta, scale_log2, low, high, tiles, edges, wg, turn % 2, use, False, tid
                    )
                    gDQ = self.target(tDQ, mine, s_q, start_q, head, batch)
                    self.store(smem, acc_dq, softmax_scale, store_dq, gDQ, wg, tid)
                turn += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def statistics(
        self, mStats: cute.Tensor, head: Int32, position: Int32, rows: Int32, values: cute.Tensor, tid: Int32
    ):
        """L and delta of this thread's two rows, the first of 64 at `position`, of which `rows` are of the sequence."""
        for r in cutlass.range_constexpr(2):
            row = wgmma.row(tid, r)
            values[r], values[2 + r] = Float32.inf, Float32(0.0)  # P is 0 in rows behind the last
            if row < rows:
                values[r] = mStats[0, head, position + row]
                values[2 + r] = mStats[1, head, position + row]

    @cute.jit
    def target(self, tDQ: cute.Tensor, mine: Int32, s_q: Int32, start_q: Int32, head: Int32, batch: Int32):
        """Where dq of 64 rows from `mine` on of a head goes."""
        row0, outer = schedule.place(self.spec.packed, s_q, start_q, batch)
        return cute.local_tile(
            cute.domain_offset((row0 + mine, 0, 0, 0), tDQ), (ROWS, self.spec.d), (0, 0, head, outer)
        )

    @cute.jit
    def differentiate(
        self,
        smem,
        acc_dq: cute.Tensor,
        total: cute.Tensor,
        delta: cute.Tensor,
        scale_log2: Float32,
        low: Int32,
        high: Int32,
        tiles: Int32,
        edges: tuple,
        slot: Int32,
        phase_q: Int32,
        use: Int32,
        kept,
        tid: Int32,
    ):
        """DQ / softmax_scale of the rows in `slot`; the use of a stage that is next. Tiles may be `kept` for others."""
        spec = self.spec
        layout_q, _, layout_kv = self.layouts()
        mma_s, mma_dq = self.tiled_mmas()
        thr_s, thr_dq = mma_s.get_slice(tid), mma_dq.get_slice(tid)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sDO = smem.d_out.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sK = smem.k.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
        sV = smem.v.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
        rQ, rDO = (mma_s.make_fragment_A(thr_s.partition_A(t))[None, None, None, slot] for t in (sQ, sDO))
        rK, rV = (mma_s.make_fragment_B(thr_s.partition_B(t)) for t in (sK, sV))
        rKt = mma_dq.make_fragment_B(thr_dq.partition_B(wgmma.transposed(sK)))
        acc_s, acc_dp = (cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, spec.tile)), Float32) for _ in range(2))
        s, dp = wgmma.by_row(acc_s), wgmma.by_row(acc_dp)
        of_d = [(k, k) for k in range(spec.d // 16)]
        of_keys = [(k, k) for k in range(spec.tile // 16)]
        k_full, k_empty = smem.k_full.data_ptr(), smem.k_empty.data_ptr()
        v_full, v_empty = smem.v_full.data_ptr(), smem.v_empty.data_ptr()

        if const_expr(spec.grouped):
            low, high = Int32(0), tiles  # all warpgroups have the same rows
        for _ in cutlass.range(tiles - high, unroll=1):
            self.pass_over(smem, use)
            use += 1

        acc_dq.fill(0.0)
        cute.arch.mbarrier_wait(smem.q_full.data_ptr() + slot, phase_q)
        tile = high
        while tile > low:
            tile -= 1
            stage, phase = schedule.stage_of(use, spec.stages)
            use += 1
            cute.arch.mbarrier_wait(k_full + stage, phase)
            warpgroup.fence()
            wgmma.issue(mma_s, acc_s, rQ, rK[None, None, None, stage], False, of_d)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(v_full + stage, phase)
            wgmma.issue(mma_s, acc_dp, rDO, rV[None, None, None, stage], False, of_d)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            self.blocks.mask(acc_s, tile, edges)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] = cute.math.exp2(s[r, c] * scale_log2 - total[r], fastmath=True)
            warpgroup.wait_group(0)
            self.blocks.give_back(smem, v_empty, stage, kept)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] *= dp[r, c] - delta[r]
            rDS = mma_dq.make_fragment_A(mma_dq.partition_shape_A((ROWS, spec.tile)))
            rDS.store(acc_s.load().to(self.dtype).reshape(rDS.shape))
            warpgroup.fence()
            wgmma.issue(mma_dq, acc_dq, rDS, rKt[None, None, None, stage], True, of_keys)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.blocks.give_back(smem, k_empty, stage, kept)

        cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + slot)
        for _ in cutlass.range(low, unroll=1):
            self.pass_over(smem, use)
            use += 1
        return use

    @cute.jit
    def pass_over(self, smem, use: Int32):
        """Gives back a tile that none of these rows sees. To wait for it keeps two uses of a stage apart."""
        stage, phase = schedule.stage_of(use, self.spec.stages)
        cute.arch.mbarrier_wait(smem.k_full.data_ptr() + stage, phase)
        cute.arch.mbarrier_arrive(smem.k_empty.data_ptr() + stage)
        cute.arch.mbarrier_wait(smem.v_full.data_ptr() + stage, phase)
        cute.arch.mbarrier_arrive(smem.v_empty.data_ptr() + stage)

    @cute.jit
    def store(
        self,
        smem,
        acc_dq: cute.Tensor,
        softmax_scale: Float32,
        store_dq: cute.CopyAtom,
        gDQ: cute.Tensor,
        wg: Int32,
        tid: Int32,
    ):
        """Scales dQ and stores it by TMA."""
        _, layout_out, _ = self.layouts()
        _, mma_dq = self.tiled_mmas()
        sDQ = smem.d_q.get_tensor(layout_out.outer, swizzle=layout_out.inner)
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_dq)
        thr_copy = to_smem.get_slice(tid)
        rDQ = cute.make_rmem_tensor(acc_dq.shape, self.dtype)
        rDQ.store((acc_dq.load() * softmax_scale).to(self.dtype))
        if tid // 32 == 0:  # the warp that issues the stores: the one before has read shared memory
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=BAR_STORE + wg, number_of_threads=128)
        cute.copy(to_smem, thr_copy.retile(rDQ), thr_copy.partition_D(sDQ[None, None, wg]))
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by the copy engine
        cute.arch.barrier(barrier_id=BAR_STORE + wg, number_of_threads=128)
        tSsS, tSgS = cpasync.tma_partition(
            store_dq, 0, cute.make_layout(1), cute.group_modes(sDQ, 0, 2), cute.group_modes(gDQ, 0, 2)
        )
        if tid // 32 == 0:
            cute.copy(store_dq, tSsS[None, wg], tSgS)
            cute.arch.cp_async_bulk_commit_group()
