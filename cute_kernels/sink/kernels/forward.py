"""Forward of sink attention on SM90: persistent CTAs, TMA, wgmma, softmax beside the next tile's products.

A CTA takes blocks of 64 query rows per consumer warpgroup of one head. Keys come in tiles from the last to the first.
The first tile starts at the first key that any row of the block sees, not at a multiple of the tile: with a window of
128 and tiles of 64, a warpgroup needs 3 tiles wherever its rows lie. A warpgroup passes over tiles that none of its
own rows sees. Only tiles that hold the edge of a row's keys are masked.

Of one tile, with S of the next in flight:
    turn     S' = Q K'^T issued, O += P V issued, turn given to the next warpgroup
    wait 1   S' is there: K' is given back; maxima, P' = exp2(S' scale - reference), sums
    wait 0   O is there: V is given back; O is scaled where a reference has moved; P' is rounded to the operand P
The reference of a row is a maximum of its scores, but follows a larger one only when that is more than 2^8 ahead:
P then stays below 2^8, which float16 and bfloat16 hold as well as 1, and O is hardly ever rescaled.

Instructions of a score outside the products: FMNMX, FFMA, MUFU.EX2, FADD and half an F2FP, 4.5 in all. At d 64 a
64 x 128 tile takes 512 clocks of the tensor core, 512 of the MUFU (16 a clock) and 288 issue slots of each scheduler.

With spec.grouped an item is 64 rows of all query heads of a KV head: head h of the n-th item of a CTA is number
n x ratio + h, the warpgroup number % warpgroups takes it, and its Q lies in slot number % slots. Tiles are loaded once
for all heads where those of an item fit into the stages, as with small windows; otherwise once for every `warpgroups`
heads. A window of 128 needs 191 keys: 48 KB of K and V for 64 x ratio rows, where three warpgroups of one head read
80 KB for 192. And warpgroups need not keep step: at d 64 a block of 64 rows is a chain of some 3000 clocks, whose gaps
others fill.

Roles (384 threads with two consumers, 512 with three, 640 with four)
  warpgroup 0     producer, 40, 32 or 24 registers: its first warp takes items and issues TMA copies; the others idle
  warpgroup 1..   consumers, 232, 160 or 112 registers: at d 128, 64 of O, 64 of S, 32 of P; at d 64, 32 of O

Barriers                   arrivals per phase; the n-th phase is the n-th use
  work_full[slot]          32: the producer's lanes, of which one has written the record
  work_empty[slot]         128 x warpgroups: consumers have read the record for the last time
  q_full[w]                1 + 64 x d x 2 bytes; grouped: of a slot
  q_empty[w]               128: threads of w, after their last QK of the item; grouped: of the head
  k_full, v_full[stage]    1 + tile x d x 2 bytes
  k_empty, v_empty[stage]  128 x warpgroups, each after its wgmma has read the tile or where it passes over it
  kept                     grouped: takes arrivals for tiles that are not given back yet, and means nothing
  named 1 + w  BAR_TURN    256 = 128 that wait for their turn + 128 of the warpgroup before that give it. Every
                           warpgroup has one turn a tile after the first, also for tiles that it passes over, so the
                           counts agree. The last warpgroup gives the first turn when the kernel starts.
  named 5 + w  BAR_STORE   128: O of w may be overwritten, or is complete, in shared memory

Shared memory
  q     slots x 64 x d x 2           24 KB (d 64, three), 32 KB (d 128, two)
  out   warpgroups x 64 x d x 2      the same; grouped: half of q
  k, v  stages x tile x d x 2 each   4 stages of 2 x 16 KB (d 64), 2 of 2 x 32 KB (d 128)
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import softmax, wgmma
from cute_kernels.sink.kernels import schedule as schedule
from cute_kernels.sink.kernels import softmax as row_softmax
from cute_kernels.sink.kernels.query_blocks import QueryBlocks
from cute_kernels.sink.spec import ROWS, SinkForwardSpec

BAR_TURN, BAR_STORE = 1, 5


class SinkForwardKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: SinkForwardSpec):
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

        q, out = (schedule.fake_rows(self.dtype, spec.packed, (batch, s_q, h_q), spec.d) for _ in range(2))
        k, v = (schedule.fake_rows(self.dtype, spec.packed, (batch, s_k, h_kv), spec.d) for _ in range(2))
        sink = make_fake_tensor(Float32, (h_q,), (1,), assumed_align=4)
        lse = schedule.fake_rows(Float32, spec.packed, (batch, s_q, h_q), None)
        packed = schedule.fake_packed(spec.packed)
        numbers = (Float32(1.0), *[Int32(1)] * 4, Int64(0))
        return (q, k, v, sink, out, lse, *packed, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    def layouts(self):
        """Shared memory: Q (64, d, slots), O (64, d, warpgroups), K and V (tile, d, stages)."""
        spec, row = self.spec, LayoutEnum.ROW_MAJOR
        tiler = (ROWS, spec.tile, spec.d)
        return (
            sm90.make_smem_layout_a(row, tiler, self.dtype, spec.q_stages),
            sm90.make_smem_layout_epi(self.dtype, row, (ROWS, spec.d), spec.warpgroups),
            sm90.make_smem_layout_b(row, tiler, self.dtype, spec.stages),
        )

    def tiled_mmas(self):
        """S = Q K^T with both operands in shared memory; O += P V with P in registers."""
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
            out: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_out)], 1024]
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
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
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
        """One launch of `ctas` CTAs, one for each SM.

        Every size of a tensor is above 0; single sequences of a packed call may be empty.
        mQ, mOut   (batch, s_q, h_q, d) or packed (tokens, h_q, d); any strides that are multiples of 8, that of d is 1
        mK, mV     (batch, s_k, h_kv, d) or packed (tokens, h_kv, d); h_q is a multiple of h_kv
        mSink      (h_q,) float32, -inf where there is no sink
        mLse       (batch, s_q, h_q) or (tokens, h_q) float32, any strides
        mCuQ, mCuK, mWork   packed: (batch + 1,) int32 each, and the list of work_list.py for blocks of
                   spec.rows queries; otherwise None
        softmax_scale  above 0
        window     keys that a query sees at most, below 2^30; not read unless spec.window
        causal     1 or 0
        section    not packed: pairs of a sequence and a head that are worked on together, so that their keys stay in
                   L2; a divisor of batch x h_q, with spec.grouped also a multiple of h_q / h_kv. Packed: not read
        counters   address of two int32, 0 before and after the launch. No other scratch memory
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
        load_q, tQ = cpasync.make_tiled_tma_atom(
            load, schedule.rows_view(mQ, spec.packed), cute.select(layout_q, mode=[0, 1]), box_q
        )
        load_k, tK = cpasync.make_tiled_tma_atom(
            load, schedule.rows_view(mK, spec.packed), cute.select(layout_kv, mode=[0, 1]), box_kv
        )
        load_v, tV = cpasync.make_tiled_tma_atom(
            load, schedule.rows_view(mV, spec.packed), cute.select(layout_kv, mode=[0, 1]), box_kv
        )
        store_out, tOut = cpasync.make_tiled_tma_atom(
            store, schedule.rows_view(mOut, spec.packed), cute.select(layout_out, mode=[0, 1]), box_q
        )
        self.kernel(
            load_q, tQ, load_k, tK, load_v, tV, store_out, tOut, mSink, mLse, mCuQ, mCuK, mWork,
            softmax_scale * softmax.LOG2_E, window, reach, max_q, max_k, blocks, items, counters, divisors,
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
        load_k: cute.CopyAtom,
        tK: cute.Tensor,
        load_v: cute.CopyAtom,
        tV: cute.Tensor,
        store_out: cute.CopyAtom,
        tOut: cute.Tensor,
        mSink: cute.Tensor,
        mLse: cute.Tensor,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mWork: cute.Tensor | None,
        scale_log2: Float32,
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
            for atom in (load_q, load_k, load_v, store_out):
                cpasync.prefetch_descriptor(atom)
        self.blocks.init_barriers(smem, tidx)

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(spec.load_registers)
            if warp_idx == 0:
                layout_q, _, layout_kv = self.layouts()
                sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
                sK = smem.k.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
                sV = smem.v.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
                self.blocks.produce(
                    smem, ((load_q, tQ, sQ),), load_k, tK, sK, load_v, tV, sV, mCuQ, mCuK, mWork, window, reach, max_q,
                    max_k, blocks, items, counters, divisors, tidx,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(spec.consumer_registers)
            self.consume(
                smem, store_out, tOut, mSink, mLse, scale_log2, window, reach, divisors[3].divisor,
                warp_idx // 4 - 1, tidx % 128,
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        smem,
        store_out: cute.CopyAtom,
        tOut: cute.Tensor,
        mSink: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
        window: Int32,
        reach: Int32,
        ratio: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """One consumer warpgroup: its 64 rows of each item, or its heads."""
        spec = self.spec
        mma_qk, mma_pv = self.tiled_mmas()
        sWork = smem.work.get_tensor(cute.make_layout((schedule.RECORD, schedule.SLOTS)))
        acc_o = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, spec.d)), Float32)
        reference, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        if const_expr(spec.turns):
            if wg == spec.warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=BAR_TURN, number_of_threads=256)

        turn, use, running = Int32(0), Int32(0), Int32(1)
        mine_first = Int32(wg)  # the first head of an item that is this warpgroup's
        while running == 1:
            slot = turn % schedule.SLOTS
            cute.arch.mbarrier_wait(smem.work_full.data_ptr() + slot, turn // schedule.SLOTS % 2)
            if sWork[0, slot] < 0:
                running = Int32(0)
            elif const_expr(spec.grouped):
                first, kv_head, batch, s_q, s_k, start_q = (sWork[i, slot] for i in range(6))
                cute.arch.mbarrier_arrive(smem.work_empty.data_ptr() + slot)
                begin, tiles = self.blocks.extent(first, s_q, s_k, window, reach)
                low, high, edges = self.blocks.edges(first, s_q, s_k, begin, tiles, window, reach, tid)
                streamed = tiles > spec.stages
                for number in cutlass.range(mine_first, mine_first + ratio, spec.warpgroups, unroll=1):
                    kept = number - mine_first + spec.warpgroups < ratio and not streamed
                    if number < ratio:
                        head = kv_head * ratio + number
                        sink = mSink[head]
                        nth = turn * ratio + number
                        self.attend(
                            smem, acc_o, reference, row_sum, scale_log2, low, high, tiles, edges, nth % spec.q_stages,
                            nth // spec.q_stages % 2, use, kept, wg, tid,
                        )  # fmt: skip
                        gOut, gLse = self.targets(tOut, mLse, first, s_q, start_q, head, batch)
                        self.store(
                            smem,
                            acc_o,
                            reference,
                            row_sum,
                            scale_log2,
                            sink,
                            store_out,
                            gOut,
                            gLse,
                            first,
                            s_q,
                            wg,
                            tid,
                        )
                    elif not kept:
                        for i in cutlass.range(tiles, unroll=1):
                            self.pass_over(smem, use + i, wg)
                    if not kept:
                        use += tiles
                mine_first = (mine_first + (spec.warpgroups - ratio % spec.warpgroups)) % spec.warpgroups
                turn += 1
            else:
                mine, s_q, s_k = sWork[0, slot] + ROWS * wg, sWork[3, slot], sWork[4, slot]
                begin, tiles = self.blocks.extent(sWork[0, slot], s_q, s_k, window, reach)
                low, high, edges = self.blocks.edges(mine, s_q, s_k, begin, tiles, window, reach, tid)
                use = self.attend(
                    smem,
                    acc_o,
                    reference,
                    row_sum,
                    scale_log2,
                    low,
                    high,
                    tiles,
                    edges,
                    wg,
                    turn % 2,
                    use,
                    False,
                    wg,
                    tid,
                )
                # read again, and not kept: every register counts while P, S and O are alive
                mine, head, batch = sWork[0, slot] + ROWS * wg, sWork[1, slot], sWork[2, slot]
                s_q, start_q = sWork[3, slot], sWork[5, slot]
                cute.arch.mbarrier_arrive(smem.work_empty.data_ptr() + slot)
                gOut, gLse = self.targets(tOut, mLse, mine, s_q, start_q, head, batch)
                self.store(
                    smem, acc_o, reference, row_sum, scale_log2, mSink[head], store_out, gOut, gLse, mine, s_q, wg, tid
                )
                turn += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def targets(
        self,
        tOut: cute.Tensor,
        mLse: cute.Tensor,
        mine: Int32,
        s_q: Int32,
        start_q: Int32,
        head: Int32,
        batch: Int32,
    ):
        """Where 64 rows from `mine` on of a head go, and the log-sum-exps of all rows."""
        spec = self.spec
        row0, outer = schedule.place(spec.packed, s_q, start_q, batch)
        gOut = cute.local_tile(cute.domain_offset((row0 + mine, 0, 0, 0), tOut), (ROWS, spec.d), (0, 0, head, outer))
        if const_expr(spec.packed):
            gLse = cute.domain_offset((start_q,), mLse[None, head])
        else:
            gLse = mLse[batch, None, head]
        return gOut, gLse

    @cute.jit
    def attend(
        self,
        smem,
        acc_o: cute.Tensor,
        reference: cute.Tensor,
        row_sum: cute.Tensor,
        scale_log2: Float32,
        low: Int32,
        high: Int32,
        tiles: Int32,
        edges: tuple,
        slot: Int32,
        phase_q: Int32,
        use: Int32,
        kept,
        wg: Int32,
        tid: Int32,
    ):
        """O, references and sums (of this thread's columns) of the rows in `slot`; the use of a stage that is next.

        `use` counts tiles since the kernel started: use % stages is the stage, use / stages % 2 the barriers' phase.
        Tiles that are `kept` are needed again and not given back.
        """
        spec = self.spec
        layout_q, _, layout_kv = self.layouts()
        mma_qk, mma_pv = self.tiled_mmas()
        thr_qk, thr_pv = mma_qk.get_slice(tid), mma_pv.get_slice(tid)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sK = smem.k.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
        sV = smem.v.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
        rQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, slot]
        rK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))
        rV = mma_pv.make_fragment_B(thr_pv.partition_B(wgmma.transposed(sV)))
        rP = mma_pv.make_fragment_A(mma_pv.partition_shape_A((ROWS, spec.tile)))
        acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, spec.tile)), Float32)
        alpha = cute.make_rmem_tensor(2, Float32)
        qk_blocks = [(k, k) for k in range(spec.d // 16)]
        pv_blocks = [(k, k) for k in range(spec.tile // 16)]
        k_full, k_empty = smem.k_full.data_ptr(), smem.k_empty.data_ptr()
        v_full, v_empty = smem.v_full.data_ptr(), smem.v_empty.data_ptr()

        if const_expr(spec.grouped):
            low, high = Int32(0), tiles  # all warpgroups have the same rows
        for _ in cutlass.range(tiles - high, unroll=1):
            self.pass_over(smem, use, wg)
            use += 1

        acc_o.fill(0.0)
        stage, phase = schedule.stage_of(use, spec.stages)
        cute.arch.mbarrier_wait(smem.q_full.data_ptr() + slot, phase_q)
        cute.arch.mbarrier_wait(k_full + stage, phase)
        warpgroup.fence()
        wgmma.issue(mma_qk, acc_s, rQ, rK[None, None, None, stage], False, qk_blocks)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.blocks.give_back(smem, k_empty, stage, kept)
        tile = high - 1
        self.blocks.mask(acc_s, tile, edges)
        for r in cutlass.range_constexpr(2):
            reference[r] = -Float32.inf
            row_sum[r] = Float32(0.0)
        row_softmax.exponentials(acc_s, reference, row_sum, alpha, scale_log2)

        while tile > low:
            tile -= 1
            # here, and not where P is made: carried round the loop, ptxas counts P twice and serializes the products
            rP.store(acc_s.load().to(self.dtype).reshape(rP.shape))
            before, phase_before = schedule.stage_of(use, spec.stages)
            use += 1
            after, phase_after = schedule.stage_of(use, spec.stages)
            cute.arch.mbarrier_wait(k_full + after, phase_after)
            self.await_turn(wg)
            warpgroup.fence()
            wgmma.issue(mma_qk, acc_s, rQ, rK[None, None, None, after], False, qk_blocks)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(v_full + before, phase_before)
            warpgroup.fence()
            wgmma.issue(mma_pv, acc_o, rP, rV[None, None, None, before], True, pv_blocks)
            warpgroup.commit_group()
            self.give_turn(wg)
            warpgroup.wait_group(1)
            self.blocks.give_back(smem, k_empty, after, kept)
            self.blocks.mask(acc_s, tile, edges)
            row_softmax.exponentials(acc_s, reference, row_sum, alpha, scale_log2)
            row_softmax.hold(row_sum)
            warpgroup.wait_group(0)
            self.blocks.give_back(smem, v_empty, before, kept)
            softmax.rescale([acc_o], alpha)

        cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + slot)
        rP.store(acc_s.load().to(self.dtype).reshape(rP.shape))
        last, phase_last = schedule.stage_of(use, spec.stages)
        cute.arch.mbarrier_wait(v_full + last, phase_last)
        warpgroup.fence()
        wgmma.issue(mma_pv, acc_o, rP, rV[None, None, None, last], True, pv_blocks)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.blocks.give_back(smem, v_empty, last, kept)
        use += 1
        for _ in cutlass.range(low, unroll=1):
            self.pass_over(smem, use, wg)
            use += 1
        return use

    @cute.jit
    def pass_over(self, smem, use: Int32, wg: Int32):
        """Gives back a tile that none of these rows sees. To wait for it keeps two uses of a stage apart."""
        stage, phase = schedule.stage_of(use, self.spec.stages)
        self.await_turn(wg)
        self.give_turn(wg)
        cute.arch.mbarrier_wait(smem.k_full.data_ptr() + stage, phase)
        cute.arch.mbarrier_arrive(smem.k_empty.data_ptr() + stage)
        cute.arch.mbarrier_wait(smem.v_full.data_ptr() + stage, phase)
        cute.arch.mbarrier_arrive(smem.v_empty.data_ptr() + stage)

    @cute.jit
    def await_turn(self, wg: Int32):
        """Until the warpgroup before this one has issued its products."""
        if const_expr(self.spec.turns):
            cute.arch.barrier(barrier_id=BAR_TURN + wg, number_of_threads=256)

    @cute.jit
    def give_turn(self, wg: Int32):
        """To the warpgroup after this one."""
        if const_expr(self.spec.turns):
            following = cutlass.select_(wg == self.spec.warpgroups - 1, Int32(0), wg + 1)
            cute.arch.barrier_arrive(barrier_id=BAR_TURN + following, number_of_threads=256)

    @cute.jit
    def store(
        self,
        smem,
        acc_o: cute.Tensor,
        reference: cute.Tensor,
        row_sum: cute.Tensor,
        scale_log2: Float32,
        sink: Float32,
        store_out: cute.CopyAtom,
        gOut: cute.Tensor,
        gLse: cute.Tensor,
        mine: Int32,
        s_q: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O, sink included, and stores it by TMA; stores the log-sum-exp without the sink."""
        factor = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            row_sum[r] = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            top = softmax.finite(reference[r]) * scale_log2
            denominator = row_sum[r] + cute.math.exp2(sink * softmax.LOG2_E - top, fastmath=True)
            # rcp.approx is within one unit of the last place; an IEEE division would call a slow path
            factor[r] = cutlass.select_(row_sum[r] == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))
            row = mine + wgmma.row(tid, r)
            if tid % 4 == 0 and row < s_q:
                gLse[row] = softmax.log_sum_exp(top, row_sum[r])
        softmax.multiply_rows([acc_o], factor)

        _, layout_out, _ = self.layouts()
        _, mma_pv = self.tiled_mmas()
        sO = smem.out.get_tensor(layout_out.outer, swizzle=layout_out.inner)
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_pv)
        thr_copy = to_smem.get_slice(tid)
        rO = cute.make_rmem_tensor(acc_o.shape, self.dtype)
        rO.store(acc_o.load().to(self.dtype))
        if tid // 32 == 0:  # the warp that issues the stores: the one before has read shared memory
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=BAR_STORE + wg, number_of_threads=128)
        cute.copy(to_smem, thr_copy.retile(rO), thr_copy.partition_D(sO[None, None, wg]))
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by the copy engine
        cute.arch.barrier(barrier_id=BAR_STORE + wg, number_of_threads=128)
        tOsO, tOgO = cpasync.tma_partition(
            store_out, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        if tid // 32 == 0:
            cute.copy(store_out, tOsO[None, wg], tOgO)
            cute.arch.cp_async_bulk_commit_group()
