"""The consumer warpgroups of the key-stationary kernel: dK and dV of their keys, and dS for dQ.

Of one tile of 64 queries:
    S^T = K Q^T and dP^T = V dO^T issued   wait 1: P^T = exp2(S^T scale - L), masked, rounded
    dV += P^T dO issued                    wait 1: dP^T is complete: dS^T = P^T (dP^T - delta), rounded
    dK += dS^T Q issued                    fused: dS^T stored to shared memory
    the second key block, if there is one: S^T after dK, wait 0, dP^T issued, and so on
    fused, one tile in turn of a warpgroup: dQ of the tile before over all keys (query_sums.py)
    wait 0                                 the tile is released

Variants, by the spec
  ahead  dP is issued when S is complete, and S of the next tile after dK of this one: wait 0, dP, P, dV, wait 1, dS,
         dK, next S, wait 1 (dK: the tile is released). Only S is in flight from one turn of the loop to the next:
         with dP as well ptxas serializes the products
  skips  without dq: a warpgroup skips tiles none of whose queries sees its keys
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.ring import ring_slot_pow2, ring_slot_signed, use_phase
from cute_kernels.sink.backward_spec import DS_STAGES, QUERIES
from cute_kernels.sink.kernels import scheduler, views
from cute_kernels.sink.kernels.epilogue import KeyGrads, KeyStore
from cute_kernels.sink.kernels.masks import KeyMasks, Visibility
from cute_kernels.sink.kernels.query_sums import QuerySums, Sums
from cute_kernels.sink.kernels.smem import key_layouts, key_mmas, view
from cute_kernels.sink.kernels.views import DTYPES, Tma
from cute_kernels.sink.spec import ROWS


class KeyOperands(NamedTuple):
    """K and V as operands in shared memory, one for each block of 64 keys of the warpgroup."""

    k: tuple
    v: tuple


class QueryTile(NamedTuple):
    """A tile of 64 queries from `query` on; its number in the ring, and that of the tile after it."""

    query: Int32
    ring_tile: Int32
    following: Int32


class KeyGrad:
    """Device code of a consumer warpgroup."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.masks = KeyMasks(spec)
        self.dq = QuerySums(spec)
        self.epilogue = KeyStore(spec)

    @cute.jit
    def run(
        self,
        smem,
        d_k: Tma,
        d_v: Tma,
        sums: Sums,
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
        acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, QUERIES)), Float32)
        shape = mma_kv.partition_shape_C((ROWS, spec.d))
        acc_dk, acc_dv = (
            tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(spec.key_blocks)) for _ in range(2)
        )
        grads = KeyGrads(acc_dk, acc_dv)
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
                first = work.first + rank * spec.keys_of_cta + ROWS * spec.key_blocks * wg
                limits = tuple(
                    self.masks.limits(first + ROWS * b, work.s_q, work.s_k, visible, tid)
                    for b in range(spec.key_blocks)
                )
                for b in cutlass.range_constexpr(spec.key_blocks):
                    acc_dk[b].fill(0.0)
                    acc_dv[b].fill(0.0)
                cute.arch.mbarrier_wait(smem.kv_full.ptr, use_phase(count))
                rK, rV = (
                    tuple(self.key_operand(t, wg * spec.key_blocks + b, tid) for b in range(spec.key_blocks))
                    for t in (smem.k, smem.v)
                )
                operands = KeyOperands(rK, rV)
                scale_log2 = softmax_scale * softmax.LOG2_E
                position = views.position(spec.packed, work.start_q, work.batch, work.s_q) + begin
                previous = Int64(0)
                if const_expr(spec.ahead):
                    total, t = ratio * tiles, Int32(0)
                    if total > 0:
                        self.issue_scores(smem, acc_s, operands.k[0], ring_tile, tid)
                        for i in cutlass.range(total, unroll=1):
                            # after the last tile its S is made again, for nothing: a branch there would
                            # serialize the products
                            following = cutlass.select_(i == total - 1, ring_tile, ring_tile + 1)
                            query = begin + QUERIES * t
                            tile = QueryTile(query, ring_tile, following)
                            self.differentiate(
                                smem, acc_s, grads, operands, previous, scale_log2, tile, limits, rank, wg, tid
                            )
                            ring_tile += 1
                            t = cutlass.select_(t == tiles - 1, Int32(0), t + 1)
                        warpgroup.wait_group(0)
                else:
                    if const_expr(spec.skips):
                        seen = self.masks.seeing(work.first + ROWS * wg, work.s_q, work.s_k, visible)
                    for g in cutlass.range(ratio, unroll=1):
                        row = (
                            Int64(work.head * ratio + g) * sums.positions + position
                        )  # of the first tile in the sums of dq
                        for t in cutlass.range(tiles, unroll=1):
                            query = begin + QUERIES * t
                            if const_expr(spec.skips):
                                if query + QUERIES > seen.begin and query < seen.end:
                                    self.issue_scores(smem, acc_s, operands.k[0], ring_tile, tid)
                                    tile = QueryTile(query, ring_tile, ring_tile)
                                    self.differentiate(
                                        smem, acc_s, grads, operands, Int64(0), scale_log2, tile, limits, rank, wg, tid
                                    )
                                else:  # waiting for the tile first keeps two uses of a stage apart
                                    slot = ring_slot_pow2(ring_tile, spec.stages)
                                    cute.arch.mbarrier_wait(smem.q_full.data_ptr() + slot.index, slot.phase)
                                    cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + slot.index)
                            else:
                                self.issue_scores(smem, acc_s, operands.k[0], ring_tile, tid)
                                target = sums.address + (row + QUERIES * t) * (4 * spec.d)
                                tile = QueryTile(query, ring_tile, ring_tile)
                                self.differentiate(
                                    smem,
                                    acc_s,
                                    grads,
                                    operands,
                                    previous,
                                    scale_log2,
                                    tile,
                                    limits,
                                    rank,
                                    wg,
                                    tid,
                                )
                                previous = target
                            ring_tile += 1
                if const_expr(spec.fused):
                    buffer = (ring_tile - 1) % DS_STAGES
                    if previous != 0 and (ring_tile - 1) % spec.warpgroups == wg:
                        ds_phase = use_phase((ring_tile - 1) // DS_STAGES)
                        cute.arch.mbarrier_wait(smem.ds_full.data_ptr() + buffer, ds_phase)
                        self.dq.add_dq(smem, previous, None, buffer, rank, wg, tid)
                # read again instead of kept: registers are short while dK, dV, S and dP are alive
                targets = self.epilogue.targets(d_k, d_v, record, rank)
                cute.arch.mbarrier_arrive(smem.work_empty.data_ptr() + stage)
                if const_expr(not spec.reuses):
                    cute.arch.mbarrier_arrive(smem.kv_empty.ptr)
                self.epilogue.store(smem, grads, softmax_scale, d_k, d_v, targets, wg, tid)
                count += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def differentiate(
        self,
        smem,
        acc_s: cute.Tensor,
        grads: KeyGrads,
        operands: KeyOperands,
        target: Int64,
        scale_log2: Float32,
        tile: QueryTile,
        limits: tuple,
        rank: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Adds a tile of queries to dK / softmax_scale and to dV.

        Its S^T is in flight; with spec.ahead, that of the following tile is at the end. With spec.fused, this
        warpgroup makes dQ of the tile before if it is its turn, and adds it to the sums at `target`, unless 0.
        """
        spec = self.spec
        layouts, (mma_s, mma_kv, _) = key_layouts(spec), key_mmas(spec)
        ring_tile, query = tile.ring_tile, tile.query
        thr_kv = mma_kv.get_slice(tid)
        sQ, sDO = view(smem.q, layouts.q), view(smem.d_out, layouts.q)
        rQt, rDOt = (mma_kv.make_fragment_B(thr_kv.partition_B(wgmma.transposed(t))) for t in (sQ, sDO))
        acc_dp = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, QUERIES)), Float32)
        s, dp = wgmma.by_row(acc_s), wgmma.by_row(acc_dp)
        columns = cute.size(s, mode=[1])
        query_blocks = [(k, k) for k in range(QUERIES // 16)]
        stage, _ = ring_slot_pow2(ring_tile, spec.stages)
        # L and delta of this thread's columns: column 8j + 2 (lane % 4) + c is element (c, j)
        thread_stats = smem.stats.data_ptr() + cute.assume(stage * 2 * QUERIES + 2 * (tid % 4), divby=2)

        buffer = ring_tile % DS_STAGES
        for b in cutlass.range_constexpr(spec.key_blocks):
            last = b == spec.key_blocks - 1
            if const_expr(b > 0 or spec.ahead):
                warpgroup.wait_group(0)
                warpgroup.fence()
            self.issue_transposed(operands.v[b], smem.d_out, acc_dp, stage, tid)
            values = column_stats(thread_stats)
            if const_expr(b == 0 and not spec.ahead):
                warpgroup.wait_group(1)
            self.masks.mask(acc_s, query, limits[b])
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(columns):
                    s[r, c] = cute.math.exp2(s[r, c] * scale_log2 - values[c], fastmath=True)
            rP = mma_kv.make_fragment_A(mma_kv.partition_shape_A((ROWS, QUERIES)))
            rP.store(acc_s.load().to(self.dtype).reshape(rP.shape))
            warpgroup.fence()
            wgmma.issue(mma_kv, grads.d_v[b], rP, rDOt[None, None, None, stage], True, query_blocks)
            warpgroup.commit_group()

            values = column_stats(thread_stats + QUERIES)
            warpgroup.wait_group(1)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(columns):
                    s[r, c] *= dp[r, c] - values[c]
            rDS = mma_kv.make_fragment_A(mma_kv.partition_shape_A((ROWS, QUERIES)))
            rDS.store(acc_s.load().to(self.dtype).reshape(rDS.shape))
            warpgroup.fence()
            wgmma.issue(mma_kv, grads.d_k[b], rDS, rQt[None, None, None, stage], True, query_blocks)
            warpgroup.commit_group()

            if const_expr(not last):
                warpgroup.fence()
                self.issue_transposed(operands.k[b + 1], smem.q, acc_s, stage, tid)
            elif const_expr(spec.ahead):
                self.issue_scores(smem, acc_s, operands.k[0], tile.following, tid)
            if const_expr(spec.fused):
                if const_expr(b == 0):
                    cute.arch.mbarrier_wait(smem.ds_empty.data_ptr() + buffer, use_phase(ring_tile // DS_STAGES) ^ 1)
                sDS = view(smem.d_s, layouts.d_s)
                store_ds = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
                to_smem = cute.make_tiled_copy_C(store_ds, mma_s)
                thr_copy = to_smem.get_slice(tid)
                own = 2 * buffer if const_expr(spec.pair) else buffer
                mine = cute.local_tile(sDS[None, None, own], (ROWS, QUERIES), (wg * spec.key_blocks + b, 0))
                fragment = cute.make_tensor(rDS.iterator, acc_s.layout)
                cute.copy(to_smem, thr_copy.retile(fragment), thr_copy.partition_D(mine))
                if const_expr(last):
                    cute.arch.fence_proxy("async.shared", space="cta")  # makes ordinary stores visible to wgmma
                    if const_expr(spec.pair):
                        self.dq.send(smem, buffer, rank, wg, tid)
                    else:
                        cute.arch.mbarrier_arrive(smem.ds_full.data_ptr() + buffer)
        if const_expr(spec.fused):
            if target != 0 and (ring_tile - 1) % spec.warpgroups == wg:
                earlier = buffer ^ 1
                cute.arch.mbarrier_wait(smem.ds_full.data_ptr() + earlier, use_phase((ring_tile - 1) // DS_STAGES))
                self.dq.add_dq(smem, target, stage, earlier, rank, wg, tid)
            else:
                warpgroup.wait_group(0)
                cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + stage)
        else:
            warpgroup.wait_group(1 if spec.ahead else 0)
            cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + stage)

    @cute.jit
    def key_operand(self, field, block: Int32, tid: Int32):
        """64 rows of K or V as an operand in shared memory."""
        sX = cute.local_tile(view(field, key_layouts(self.spec).kv), (ROWS, self.spec.d), (block, 0, None))
        mma_s = key_mmas(self.spec).qk
        return mma_s.make_fragment_A(mma_s.get_slice(tid).partition_A(sX))[None, None, None, 0]

    @cute.jit
    def issue_transposed(self, operand: cute.Tensor, field, acc: cute.Tensor, stage: Int32, tid: Int32):
        """Issues K Q^T or V dO^T of 64 keys and of a tile of queries, and commits the group."""
        mma_s = key_mmas(self.spec).qk
        staged = view(field, key_layouts(self.spec).q)
        queries = mma_s.make_fragment_B(mma_s.get_slice(tid).partition_B(staged))
        blocks = [(k, k) for k in range(self.spec.d // 16)]
        wgmma.issue(mma_s, acc, operand, queries[None, None, None, stage], False, blocks)
        warpgroup.commit_group()

    @cute.jit
    def issue_scores(self, smem, acc_s: cute.Tensor, operand: cute.Tensor, ring_tile: Int32, tid: Int32):
        """Issues S^T of a tile once it is loaded."""
        stage, phase = ring_slot_pow2(ring_tile, self.spec.stages)
        cute.arch.mbarrier_wait(smem.q_full.data_ptr() + stage, phase)
        warpgroup.fence()
        self.issue_transposed(operand, smem.q, acc_s, stage, tid)


def column_stats(source: cute.Pointer) -> cute.Tensor:
    """L or delta of this thread's columns, (2, 8), in registers."""
    values = cute.make_rmem_tensor((2, QUERIES // 8), Float32)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, QUERIES // 8), stride=(1, 8))), values)
    return values
