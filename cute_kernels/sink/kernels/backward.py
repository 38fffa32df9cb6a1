"""Backward of sink attention on SM90 where keys stay: dk and dv in registers, dq (fused) added in global memory.

A CTA takes blocks of 128, 192 or 256 keys of one KV head, 64 or 2 x 64 for each of two or three consumer warpgroups.
Tiles of 64 queries stream past, of each query head of the group in turn, so that dk and dv sum over the group in
registers. Everything is transposed: rows are keys, columns are queries, and P^T and dS^T are operands straight from
the accumulators.
    S^T = K Q^T and dP^T = V dO^T issued   wait 1: P^T = exp2(S^T scale - L), masked, rounded
    dV += P^T dO issued                    wait 1: dP^T is there: dS^T = P^T (dP^T - delta), rounded
    dK += dS^T Q issued                    fused: dS^T stored to shared memory
    the second 64 keys, if there are: S^T behind dK, wait 0, dP^T issued, and so on
    fused, one tile in turn of a warpgroup: dQ = dS K of the tile before over all keys, added in global memory
    wait 0                                 the tile is given back
dQ of the tile before is made so that no warpgroup waits for the dS of another, and they may be half a tile apart: one's
softmax then meets another's products. In turns, since half of the columns each would read shared memory at 192 or 128
bytes a clock where m64n64k16 reads 128, and half of the keys each would add twice as much. dQ goes to shared memory,
16 KB at a time, from where one thread has the copy engine add it.

Products of a tile of 128 x 64: 5 x 256 clocks (d 64), 5 x 512 (d 128). Shared memory: K, Q, V and dO for S and dP
64 KB (128 KB), dO and Q for dV and dK 32 KB (64 KB), dS and K for dQ 32 KB (64 KB), stores of dS 16 KB, dQ 32 KB
(64 KB), TMA 16 KB (32 KB): 192 KB are 1540 clocks, 368 KB are 2940. Of 256 x 64 at d 64, 5 x 512 clocks: 336 KB, 2690.
Instructions of a score outside the products: FFMA, MUFU.EX2, FADD, FMUL and one F2FP: 5, and 2 of masks at edges.

Variants, by fields of the spec
  helper  a warpgroup behind those with keys makes dQ of all tiles. 24 + 2 x 200 + 88 registers of 4 x 128
  ahead   dP is issued when S is there, and S of the next tile behind dK of this one: wait 0, dP, P, dV, wait 1, dS, dK,
          next S, dS stored, wait 1 (dK: the tile is given back). Only S is in flight from one turn of the loop to the
          next: with dP as well ptxas serializes the products. dQ is made in the registers of dP
  skips   without dq: tiles none of whose queries sees a key of the warpgroup are passed over
  warpgroups, blocks  three of 64 keys, or two of 2 x 64: more keys share an addition, and less is added
  pair    two CTAs of a cluster have neighbouring blocks of 128 keys and the same tiles. Each copies its dS into the
          other, 16 KB a tile, and makes half of the columns of dQ over the keys of both: as many products, half of the
          additions. These columns of the other's K are kept beside the own K and V. A cluster takes one item; there are
          as many clusters as items may be, and the counters are left alone
  multicast  each of a pair loads half of every tile of Q and dO, for both

Roles
  warpgroup 0     producer, 24 to 40 registers: its first warp takes items and issues TMA copies; the others idle
  warpgroup 1, 2  consumers, 240 registers: at d 128 and with two blocks, 64 + 64 of dK and dV, 32 + 32 of S and dP,
                  later 32 of dQ; 16 + 16 of P and dS as operands, 16 of L or delta
  warpgroup 1 - 3 consumers, 160 registers: 32 + 32 of dK and dV; L and delta are read where they are used
  warpgroup 3     helper

Barriers                arrivals per phase
  work_full[slot]       32: the producer's lanes, of which one has written the record
  work_empty[slot]      every consumer, and the helper's threads: they have read the record for the last time
  kv_full               1 + 2 x keys x d x 2 bytes
  kv_empty              likewise, after their last product that reads K or V. Where dK and dV leave through the place of
                        K and V, 32: the warp that has stored them
  q_full[stage]         1 + 2 x 64 x d x 2 bytes of Q and dO + 512 of L and delta
  q_empty[stage]        every consumer, after the last product that reads the tile; with multicast also a lane of each
                        of the other CTA's warps
  ds_full[t % 2]        every consumer: dS of tile t is in shared memory. Of a pair, 16 KB: the other's is as well
  ds_empty[t % 2]       128: whoever made dQ of tile t has read it. Of a pair, 4 more: warps of the other CTA have, so
                        the copies of dS from here have ended, and there is room for the next
  added_empty           128, of a pair: the copy engine has read dQ, which has one place; warpgroups use it in turn
  named 3  BAR_ITEM     every consumer: dK and dV may be overwritten, or are complete, in shared memory
  named 4 - 6  BAR_ADD  128: a place of dQ may be overwritten, or is complete, in shared memory; of a pair, dS is

Shared memory: K and V of keys x d; 4 (d 64) or 2 (d 128) stages of Q and dO of 64 x d, L and delta of 64; fused: 2 x dS
of keys x 64, and dQ of 64 x d float32 for each warpgroup with keys. That is 225 KB of 227 KB at d 128 and 226 KB with
256 keys, where dK and dV leave through the place of K and V. Else they have their own, so that the next K and V come
while they are stored. Of a pair, 4 x dS, 16 KB of the other's K and 16 KB of dQ: as much.

Sums of dq are laid out as accumulators are: see prepare.py.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax, wgmma
from cute_kernels.sink.backward_spec import QUERIES, SinkBackwardSpec
from cute_kernels.sink.kernels import schedule as schedule
from cute_kernels.sink.kernels.key_blocks import KeyBlocks
from cute_kernels.sink.kernels.key_tiles import KeyTiles
from cute_kernels.sink.kernels.query_sums import QuerySums
from cute_kernels.sink.spec import ROWS

BAR_ITEM = 3


class SinkBackwardKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: SinkBackwardSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.dtype = schedule.DTYPES[spec.dtype]
        self.blocks = KeyBlocks(spec)
        self.tiles = KeyTiles(spec)
        self.dq = QuerySums(spec)

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        batch, s_q, s_k, h_q, h_kv = (cute.sym_int() for _ in range(5))
        q, d_out = (schedule.fake_rows(self.dtype, spec.packed, (batch, s_q, h_q), spec.d) for _ in range(2))
        k, v, d_k, d_v = (schedule.fake_rows(self.dtype, spec.packed, (batch, s_k, h_kv), spec.d) for _ in range(4))
        packed = schedule.fake_packed(spec.packed)
        numbers = (Int64(0), Float32(1.0), *[Int32(1)] * 4, Int64(0))
        stats = schedule.fake_stats(h_q)
        return (q, k, v, d_out, stats, d_k, d_v, *packed, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mDOut: cute.Tensor,
        mStats: cute.Tensor,
        mDK: cute.Tensor,
        mDV: cute.Tensor,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mWork: cute.Tensor | None,
        sums: Int64,
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
        mQ, mDOut  (batch, s_q, h_q, d) or packed (tokens, h_q, d), strides as in the forward
        mK, mV, mDK, mDV  (batch, s_k, h_kv, d) or packed (tokens, h_kv, d); every row of dk and dv is written
        mStats     (2, h_q, positions) float32, contiguous, of SinkPrepareKernel
        mCuQ, mCuK, mWork   packed: (batch + 1,) int32 each, and the list of SinkWorkListKernel(keys=True) for blocks
                   of 128 keys; otherwise None
        sums       fused: address of h_q x positions x d float32, set to 0 by SinkPrepareKernel, which receive dq /
                   softmax_scale for SinkFinishKernel; otherwise not read
        softmax_scale, window, causal, ctas, counters   as in SinkForwardKernel
        section    not packed: pairs of a sequence and a KV head that are worked on together; a divisor of batch x h_kv
        """
        spec = self.spec
        heads = mK.shape[1 if const_expr(spec.packed) else 2]
        ratio = mQ.shape[1 if const_expr(spec.packed) else 2] // heads
        blocks, items, pairs = Int32(1), Int32(0), Int32(1)
        max_q, max_k = (Int32(t.shape[0 if const_expr(spec.packed) else 1]) for t in (mQ, mK))
        if const_expr(not spec.packed):
            blocks = cute.ceil_div(max_k, spec.keys)
            pairs = section
            items = blocks * heads * mK.shape[0]
        if const_expr(spec.pair):  # two CTAs for each item that there may be
            ctas = 2 * items
            if const_expr(spec.packed):
                assert mWork is not None
                ctas = 2 * (mWork.shape[0] - 1) * heads
        reach = Int32(0) if causal != 0 else Int32(schedule.UNLIMITED)
        divisors = tuple(cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (pairs * blocks, pairs, heads))

        layout_kv, layout_q, _, layout_stats = self.tiles.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        box_q, box_kv = (QUERIES, spec.d), (spec.keys_of_cta, spec.d)
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
        (store_dk, tDK), (store_dv, tDV) = (
            cpasync.make_tiled_tma_atom(
                store, schedule.rows_view(t, spec.packed), cute.select(layout_kv, mode=[0, 1]), box_kv
            )
            for t in (mDK, mDV)
        )
        load_others, tOthers = None, None
        if const_expr(spec.pair):
            load_others, tOthers = cpasync.make_tiled_tma_atom(
                load,
                schedule.rows_view(mK, spec.packed),
                cute.select(self.tiles.layout_others(), mode=[0, 1]),
                (spec.keys_of_cta, spec.columns),
            )
        by_position = cute.make_tensor(mStats.iterator, cute.select(mStats.layout, mode=[2, 1, 0]))
        load_stats, tStats = cpasync.make_tiled_tma_atom(
            load, by_position, cute.select(layout_stats, mode=[0, 1, 2]), (QUERIES, 1, 2)
        )
        self.kernel(
            load_q, tQ, load_do, tDO, load_k, tK, load_v, tV, load_stats, tStats, store_dk, tDK, store_dv, tDV,
            mCuQ, mCuK, mWork, sums, mStats.shape[2], softmax_scale, window, reach, max_q, max_k, ratio, items,
            counters, divisors, load_others, tOthers,
        ).launch(
            grid=[ctas, 1, 1],
            block=[spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[2, 1, 1] if const_expr(spec.pair) else None,
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
        load_stats: cute.CopyAtom,
        tStats: cute.Tensor,
        store_dk: cute.CopyAtom,
        tDK: cute.Tensor,
        store_dv: cute.CopyAtom,
        tDV: cute.Tensor,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mWork: cute.Tensor | None,
        sums: Int64,
        positions: Int32,
        softmax_scale: Float32,
        window: Int32,
        reach: Int32,
        max_q: Int32,
        max_k: Int32,
        ratio: Int32,
        items: Int32,
        counters: Int64,
        divisors: tuple,
        load_others: cute.CopyAtom | None,
        tOthers: cute.Tensor | None,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(self.tiles.storage())
        if warp_idx == 0:
            for atom in (load_q, load_do, load_k, load_v, load_stats, store_dk, store_dv):
                cpasync.prefetch_descriptor(atom)
        if tidx == 0:
            readers = spec.threads - 128
            for i in cutlass.range_constexpr(schedule.SLOTS):
                cute.arch.mbarrier_init(smem.work_full.data_ptr() + i, 32)
                cute.arch.mbarrier_init(smem.work_empty.data_ptr() + i, readers)
            cute.arch.mbarrier_init(smem.kv_full.ptr, 1)
            cute.arch.mbarrier_init(smem.kv_empty.ptr, 32 if spec.reuses else readers)
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(smem.ds_full.data_ptr() + i, spec.consumers)
                cute.arch.mbarrier_init(smem.ds_empty.data_ptr() + i, 128 + (4 if spec.pair else 0))
            if const_expr(spec.pair):
                cute.arch.mbarrier_init(smem.added_empty.ptr, 128)
            for i in cutlass.range_constexpr(spec.stages):
                cute.arch.mbarrier_init(smem.q_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(smem.q_empty.data_ptr() + i, spec.consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        rank = Int32(0)
        if const_expr(spec.pair):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(spec.load_registers)
            if warp_idx == 0:
                layout_kv, layout_q, _, layout_stats = self.tiles.layouts()
                sK, sV = (t.get_tensor(layout_kv.outer, swizzle=layout_kv.inner) for t in (smem.k, smem.v))
                sQ, sDO = (t.get_tensor(layout_q.outer, swizzle=layout_q.inner) for t in (smem.q, smem.d_out))
                sStats = smem.stats.get_tensor(layout_stats)
                others = None
                if const_expr(spec.pair):
                    layout_others = self.tiles.layout_others()
                    sOthers = smem.others.get_tensor(layout_others.outer, swizzle=layout_others.inner)
                    others = (load_others, tOthers, sOthers)
                self.blocks.produce(
                    smem, ((load_k, tK, sK), (load_v, tV, sV)), ((load_q, tQ, sQ), (load_do, tDO, sDO)),
                    load_stats, tStats, sStats, mCuQ, mCuK, mWork, window, reach, max_q, max_k, ratio, items,
                    counters, divisors, others, rank, tidx,
                )  # fmt: skip
        else:
            wg, tid = warp_idx // 4 - 1, tidx % 128
            cute.arch.setmaxregister_increase(spec.consumer_registers)
            self.consume(
                smem, store_dk, tDK, store_dv, tDV, sums, positions, softmax_scale, window, reach, ratio,
                rank, wg, tid,
            )  # fmt: skip
        if const_expr(spec.pair):  # nobody leaves while the other one reads or writes here
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def consume(
        self,
        smem,
        store_dk: cute.CopyAtom,
        tDK: cute.Tensor,
        store_dv: cute.CopyAtom,
        tDV: cute.Tensor,
        sums: Int64,
        positions: Int32,
        softmax_scale: Float32,
        window: Int32,
        reach: Int32,
        ratio: Int32,
        rank: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """One consumer warpgroup: its keys of each item."""
        spec = self.spec
        mma_s, mma_kv, _ = self.tiles.tiled_mmas()
        sWork = smem.work.get_tensor(cute.make_layout((schedule.RECORD, schedule.SLOTS)))
        acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, QUERIES)), Float32)
        shape = mma_kv.partition_shape_C((ROWS, spec.d))
        acc_dk, acc_dv = (
            tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(spec.key_blocks)) for _ in range(2)
        )
        turn, use, running = Int32(0), Int32(0), Int32(1)
        while running == 1:
            slot = turn % schedule.SLOTS
            cute.arch.mbarrier_wait(smem.work_full.data_ptr() + slot, turn // schedule.SLOTS % 2)
            first, head, batch = sWork[0, slot], sWork[1, slot], sWork[2, slot]
            s_q, s_k, start_q = sWork[3, slot], sWork[4, slot], sWork[5, slot]
            if first < 0:
                running = Int32(0)
            else:
                begin, tiles = self.blocks.extent(first, s_q, s_k, window, reach)
                mine = first + rank * spec.keys_of_cta + ROWS * spec.key_blocks * wg
                edges = tuple(
                    self.blocks.edges(mine + ROWS * b, s_q, s_k, window, reach, tid) for b in range(spec.key_blocks)
                )
                for b in cutlass.range_constexpr(spec.key_blocks):
                    acc_dk[b].fill(0.0)
                    acc_dv[b].fill(0.0)
                cute.arch.mbarrier_wait(smem.kv_full.ptr, turn % 2)
                rK, rV = (
                    tuple(self.tiles.mine_of(t, wg * spec.key_blocks + b, tid) for b in range(spec.key_blocks))
                    for t in (smem.k, smem.v)
                )
                scale_log2 = softmax_scale * softmax.LOG2_E
                position = schedule.position(spec.packed, start_q, batch, s_q) + begin
                before = Int64(0)
                if const_expr(spec.ahead):
                    count, t = ratio * tiles, Int32(0)
                    target = sums + (Int64(head * ratio) * positions + position) * (4 * spec.d)
                    if count > 0:
                        self.tiles.scores(smem, acc_s, rK[0], use, tid)
                        for i in cutlass.range(count, unroll=1):
                            # behind the last tile S of the same one is made again, for nothing: a branch
                            # there would serialize the products
                            following = cutlass.select_(i == count - 1, use, use + 1)
                            query = begin + QUERIES * t
                            self.differentiate(
                                smem, acc_s, acc_dk, acc_dv, rK, rV, before, scale_log2, query, edges, use,
                                following, rank, wg, tid,
                            )  # fmt: skip
                            use += 1
                            t = cutlass.select_(t == tiles - 1, Int32(0), t + 1)
                        warpgroup.wait_group(0)
                else:
                    seen_from, seen_to = self.blocks.seeing(first + ROWS * wg, s_q, s_k, window, reach)
                    for g in cutlass.range(ratio, unroll=1):
                        row = Int64(head * ratio + g) * positions + position  # of the first tile in the sums of dq
                        for t in cutlass.range(tiles, unroll=1):
                            query = begin + QUERIES * t
                            if const_expr(spec.skips):
                                if query + QUERIES > seen_from and query < seen_to:
                                    self.tiles.scores(smem, acc_s, rK[0], use, tid)
                                    self.differentiate(
                                        smem, acc_s, acc_dk, acc_dv, rK, rV, Int64(0), scale_log2, query, edges,
                                        use, use, rank, wg, tid,
                                    )  # fmt: skip
                                else:  # to wait for it keeps two uses of a stage apart
                                    stage, phase = schedule.stage_of(use, spec.stages)
                                    cute.arch.mbarrier_wait(smem.q_full.data_ptr() + stage, phase)
                                    cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + stage)
                            else:
                                self.tiles.scores(smem, acc_s, rK[0], use, tid)
                                target = sums + (row + QUERIES * t) * (4 * spec.d)
                                self.differentiate(
                                    smem, acc_s, acc_dk, acc_dv, rK, rV, before, scale_log2, query, edges, use,
                                    use, rank, wg, tid,
                                )  # fmt: skip
                                before = target
                            use += 1
                if const_expr(spec.fused):
                    buffer = (use - 1) % 2
                    if before != 0 and (use - 1) % spec.warpgroups == wg:
                        cute.arch.mbarrier_wait(smem.ds_full.data_ptr() + buffer, (use - 1) // 2 % 2)
                        self.dq.add_dq(smem, before, None, None, buffer, wg, rank, tid)
                # read again, and not kept: every register counts while dK, dV, S and dP are alive
                first, head, batch, s_k, start_k = (sWork[i, slot] for i in (0, 1, 2, 4, 6))
                key0, outer = schedule.place(spec.packed, s_k, start_k, batch)
                gDK, gDV = (
                    cute.local_tile(
                        cute.domain_offset((key0 + first + rank * spec.keys_of_cta, 0, 0, 0), t),
                        (spec.keys_of_cta, spec.d),
                        (0, 0, head, outer),
                    )
                    for t in (tDK, tDV)
                )
                cute.arch.mbarrier_arrive(smem.work_empty.data_ptr() + slot)
                if const_expr(not spec.reuses):
                    cute.arch.mbarrier_arrive(smem.kv_empty.ptr)
                self.store(smem, acc_dk, acc_dv, softmax_scale, store_dk, gDK, store_dv, gDV, wg, tid)
                turn += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def differentiate(
        self,
        smem,
        acc_s: cute.Tensor,
        acc_dk: tuple,
        acc_dv: tuple,
        rK: tuple,
        rV: tuple,
        target: Int64,
        scale_log2: Float32,
        query: Int32,
        edges: tuple,
        use: Int32,
        following: Int32,
        rank: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Adds a tile of 64 queries from `query` on to dK / softmax_scale and to dV.

        If spec.fused, dQ of the tile before is made here where it is this warpgroup's turn, and added to the sums at
        `target`, or 0 where there is none.

        Its S^T is in flight; if spec.ahead, that of the `following` tile is in the end.
        """
        spec = self.spec
        _, layout_q, layout_ds, _ = self.tiles.layouts()
        mma_s, mma_kv, _ = self.tiles.tiled_mmas()
        thr_kv = mma_kv.get_slice(tid)
        sQ, sDO = (t.get_tensor(layout_q.outer, swizzle=layout_q.inner) for t in (smem.q, smem.d_out))
        rQt, rDOt = (mma_kv.make_fragment_B(thr_kv.partition_B(wgmma.transposed(t))) for t in (sQ, sDO))
        acc_dp = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, QUERIES)), Float32)
        s, dp = wgmma.by_row(acc_s), wgmma.by_row(acc_dp)
        columns = cute.size(s, mode=[1])
        of_queries = [(k, k) for k in range(QUERIES // 16)]
        stage, _ = schedule.stage_of(use, spec.stages)
        # L and delta of this thread's columns: column 8j + 2 (lane % 4) + c is element (c, j)
        of_thread = smem.stats.data_ptr() + cute.assume(stage * 2 * QUERIES + 2 * (tid % 4), divby=2)

        buffer = use % 2
        for b in cutlass.range_constexpr(spec.key_blocks):
            last = b == spec.key_blocks - 1
            if const_expr(b > 0 or spec.ahead):
                warpgroup.wait_group(0)
                warpgroup.fence()
            self.tiles.transposed_product(rV[b], smem.d_out, acc_dp, stage, tid)
            values = self.tiles.of_columns(of_thread)
            if const_expr(b == 0 and not spec.ahead):
                warpgroup.wait_group(1)
            self.blocks.mask(acc_s, query, edges[b])
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(columns):
                    s[r, c] = cute.math.exp2(s[r, c] * scale_log2 - values[c], fastmath=True)
            rP = mma_kv.make_fragment_A(mma_kv.partition_shape_A((ROWS, QUERIES)))
            rP.store(acc_s.load().to(self.dtype).reshape(rP.shape))
            warpgroup.fence()
            wgmma.issue(mma_kv, acc_dv[b], rP, rDOt[None, None, None, stage], True, of_queries)
            warpgroup.commit_group()

            values = self.tiles.of_columns(of_thread + QUERIES)
            warpgroup.wait_group(1)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(columns):
                    s[r, c] *= dp[r, c] - values[c]
            rDS = mma_kv.make_fragment_A(mma_kv.partition_shape_A((ROWS, QUERIES)))
            rDS.store(acc_s.load().to(self.dtype).reshape(rDS.shape))
            warpgroup.fence()
            wgmma.issue(mma_kv, acc_dk[b], rDS, rQt[None, None, None, stage], True, of_queries)
            warpgroup.commit_group()

            if const_expr(not last):
                warpgroup.fence()
                self.tiles.transposed_product(rK[b + 1], smem.q, acc_s, stage, tid)
            elif const_expr(spec.ahead):
                self.tiles.scores(smem, acc_s, rK[0], following, tid)
            if const_expr(spec.fused):
                if const_expr(b == 0):
                    cute.arch.mbarrier_wait(smem.ds_empty.data_ptr() + buffer, use // 2 % 2 ^ 1)
                sDS = smem.d_s.get_tensor(layout_ds.outer, swizzle=layout_ds.inner)
                store_ds = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
                to_smem = cute.make_tiled_copy_C(store_ds, mma_s)
                thr_copy = to_smem.get_slice(tid)
                own = 2 * buffer if const_expr(spec.pair) else buffer
                mine = cute.local_tile(sDS[None, None, own], (ROWS, QUERIES), (wg * spec.key_blocks + b, 0))
                fragment = cute.make_tensor(rDS.iterator, acc_s.layout)
                cute.copy(to_smem, thr_copy.retile(fragment), thr_copy.partition_D(mine))
                if const_expr(last):
                    cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
                    if const_expr(spec.pair):
                        self.dq.send(smem, buffer, rank, wg, tid)
                    else:
                        cute.arch.mbarrier_arrive(smem.ds_full.data_ptr() + buffer)
        if const_expr(spec.fused):
            if target != 0 and (use - 1) % spec.warpgroups == wg:
                earlier = buffer ^ 1
                cute.arch.mbarrier_wait(smem.ds_full.data_ptr() + earlier, (use - 1) // 2 % 2)
                self.dq.add_dq(smem, target, None, stage, earlier, wg, rank, tid)
            else:
                warpgroup.wait_group(0)
                self.tiles.give_back(smem, stage, rank, tid)
        else:
            warpgroup.wait_group(1 if spec.ahead else 0)
            self.tiles.give_back(smem, stage, rank, tid)

    @cute.jit
    def store(
        self,
        smem,
        acc_dk: tuple,
        acc_dv: tuple,
        softmax_scale: Float32,
        store_dk: cute.CopyAtom,
        gDK: cute.Tensor,
        store_dv: cute.CopyAtom,
        gDV: cute.Tensor,
        wg: Int32,
        tid: Int32,
    ):
        """Stores dK and dV by TMA."""
        spec = self.spec
        layout_kv, _, _, _ = self.tiles.layouts()
        _, mma_kv, _ = self.tiles.tiled_mmas()
        to_smem = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_kv)
        thr_copy = to_smem.get_slice(tid)
        issues = wg == 0 and tid // 32 == 0  # the warp that issues the stores
        if issues:  # those before have read shared memory
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=BAR_ITEM, number_of_threads=spec.consumers)
        places = (smem.k, smem.v) if const_expr(spec.reuses) else (smem.d_k, smem.d_v)
        sDK, sDV = (t.get_tensor(layout_kv.outer, swizzle=layout_kv.inner) for t in places)
        results = ((acc_dk, softmax_scale, sDK), (acc_dv, Float32(1.0), sDV))
        for i in cutlass.range_constexpr(2):
            acc, factor, staged = results[i]
            for b in cutlass.range_constexpr(spec.key_blocks):
                rounded = cute.make_rmem_tensor(acc[b].shape, self.dtype)
                rounded.store((acc[b].load() * factor).to(self.dtype))
                mine = cute.local_tile(staged[None, None, 0], (ROWS, spec.d), (wg * spec.key_blocks + b, 0))
                cute.copy(to_smem, thr_copy.retile(rounded), thr_copy.partition_D(mine))
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by the copy engine
        cute.arch.barrier(barrier_id=BAR_ITEM, number_of_threads=spec.consumers)
        one = cute.make_layout(1)
        tKsK, tKgK = cpasync.tma_partition(store_dk, 0, one, cute.group_modes(sDK, 0, 2), cute.group_modes(gDK, 0, 2))
        tVsV, tVgV = cpasync.tma_partition(store_dv, 0, one, cute.group_modes(sDV, 0, 2), cute.group_modes(gDV, 0, 2))
        if issues:
            cute.copy(store_dk, tKsK[None, 0], tKgK)
            cute.copy(store_dv, tVsV[None, 0], tVgV)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(spec.reuses):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(smem.kv_empty.ptr)
