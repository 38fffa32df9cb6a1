"""Consumer warpgroups of the fused key-stationary kernel: they compute dK and dV of their keys, and dS for dQ.

A query tile of 64 queries takes these steps. "Wait n" leaves n wgmma groups in flight.
    issue S^T = K Q^T and dP^T = V dO^T   wait 1: S^T is complete: P^T = exp2(S^T scale - L), masked, rounded
    issue dV += P^T dO                    wait 1: dP^T is complete: dS^T = P^T (dP^T - delta), rounded
    issue dK += dS^T Q                    store dS^T to shared memory
    if there is a second key block: issue its S^T after dK, wait 0, issue its dP^T, and so on
    if it is this warpgroup's turn: make dQ of the tile before, over all keys (query_sums.py)
    wait 0                                release the tile
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.device import registers, softmax, wgmma
from cute_kernels.sink.backward_spec import QUERIES
from cute_kernels.sink.kernels import scheduler
from cute_kernels.sink.kernels.epilogue import KeyStore
from cute_kernels.sink.kernels.masks import KeyMasks, TileRange, Visibility
from cute_kernels.sink.kernels.pipelines import key_pipelines
from cute_kernels.sink.kernels.query_sums import QuerySums
from cute_kernels.sink.kernels.smem import key_layouts, key_mmas, view
from cute_kernels.sink.kernels.views import DTYPES, Tma
from cute_kernels.sink.spec import ROWS


class KeyBlocks(NamedTuple):
    """The keys of a warpgroup. A tuple has a member for each block of 64 keys.

    d_k     accumulators of dK / softmax_scale
    d_v     accumulators of dV
    k, v    operands in shared memory
    limits  `KeyLimits` of each block
    seen    if the spec skips, the QueryRange that sees any of the keys; otherwise None
    """

    d_k: tuple
    d_v: tuple
    k: tuple
    v: tuple
    limits: tuple
    seen: Any


class QueryTiles(NamedTuple):
    """The query tiles that the keys of a work tile meet.

    each_head   query tiles of each query head
    ratio       query heads of the KV head
    scale_log2  softmax scale, times log2 e
    """

    each_head: TileRange
    ratio: Int32
    scale_log2: Float32


class Place(NamedTuple):
    """Numbers of a consumer thread: of its CTA in the pair, of its warpgroup, and of the thread in that."""

    rank: Int32
    wg: Int32
    tid: Int32


class KeyGrad:
    """Device code of a consumer warpgroup; `spec` is a SinkBackwardSpec. A subclass orders the products."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.masks = KeyMasks(spec)
        self.epilogue = KeyStore(spec)
        self.edges = key_pipelines(spec)

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
        """Computes dK and dV of this warpgroup's keys, of every work tile of the CTA."""
        spec = self.spec
        mma_s, mma_kv, _ = key_mmas(spec)
        acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, spec.queries)), Float32)
        shape, blocks = mma_kv.partition_shape_C((ROWS, spec.d)), range(spec.key_blocks)
        acc_dk, acc_dv = (tuple(cute.make_rmem_tensor(shape, Float32) for _ in blocks) for _ in range(2))
        count, ring_tile, running = Int32(0), Int32(0), Int32(1)
        while running == 1:
            smem.work_full.data_ptr()  # see `start`
            record = scheduler.await_record(smem, self.edges.work, count)
            work = scheduler.read(record)
            if work.first < 0:
                running = Int32(0)
            else:
                sizes = work.s_q, work.s_k, visible
                queries = self.masks.query_range(work.first, *sizes)
                first = work.first + rank * spec.keys_of_cta + ROWS * spec.key_blocks * wg
                limits = tuple(self.masks.limits(first + ROWS * b, *sizes, tid) for b in blocks)
                for b in cutlass.range_constexpr(spec.key_blocks):
                    acc_dk[b].fill(0.0)
                    acc_dv[b].fill(0.0)
                self.edges.kv.wait(smem, count)
                k, v = (tuple(self.operand(t, wg * spec.key_blocks + b, tid) for b in blocks) for t in (smem.k, smem.v))
                scale_log2 = softmax_scale * softmax.LOG2_E
                seen = self.masks.seeing(first, *sizes) if const_expr(spec.skips) else None
                keys = KeyBlocks(acc_dk, acc_dv, k, v, limits, seen)
                tiles, place = QueryTiles(queries, ratio, scale_log2), Place(rank, wg, tid)
                ring_tile = self.add_tiles(smem, acc_s, keys, tiles, ring_tile, place)
                # the record is read again instead of kept: registers are short while dK, dV, S and dP are alive
                targets = self.epilogue.targets(d_k, d_v, record, rank)
                self.edges.work.release(smem, record.slot)
                if const_expr(not spec.reuses):
                    self.edges.kv.release(smem, count)
                # opaque: addresses that ptxas makes from tid before the loop would take eight registers
                thread = tid if const_expr(spec.fused) else registers.opaque(tid)
                self.epilogue.store(smem, acc_dk, acc_dv, softmax_scale, d_k, d_v, targets, wg, thread)
                count += 1
        if tid // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add_tiles(
        self, smem, acc_s: cute.Tensor, keys: KeyBlocks, tiles: QueryTiles, ring_tile: Int32, place: Place
    ) -> Int32:
        """Adds the query tiles of all query heads of the group to dK and dV; returns the next query tile."""
        raise NotImplementedError

    @cute.jit
    def operand(self, field, block: Int32, tid: Int32):
        """Returns 64 rows of K or V as an operand in shared memory."""
        sX = cute.local_tile(view(field, key_layouts(self.spec).kv), (ROWS, self.spec.d), (block, 0, None))
        mma_s = key_mmas(self.spec).qk
        return mma_s.make_fragment_A(mma_s.get_slice(tid).partition_A(sX))[None, None, None, 0]

    @cute.jit
    def issue_transposed(self, operand: cute.Tensor, field, acc: cute.Tensor, stage: Int32, tid: Int32):
        """Issues K Q^T or V dO^T of 64 keys and a query tile, and commits the group."""
        mma_s = key_mmas(self.spec).qk
        staged = view(field, key_layouts(self.spec).q)
        queries = mma_s.make_fragment_B(mma_s.get_slice(tid).partition_B(staged))
        blocks = [(k, k) for k in range(self.spec.d // 16)]
        wgmma.issue(mma_s, acc, operand, queries[None, None, None, stage], False, blocks)
        warpgroup.commit_group()

    @cute.jit
    def issue_scores(self, smem, acc_s: cute.Tensor, operand: cute.Tensor, ring_tile: Int32, tid: Int32):
        """Issues S^T of a query tile once it is loaded."""
        slot = self.edges.q.slot(ring_tile)
        self.edges.q.wait(smem, slot)
        warpgroup.fence()
        self.issue_transposed(operand, smem.q, acc_s, slot.index, tid)

    @cute.jit
    def issue_gradient(self, acc: cute.Tensor, rows: cute.Tensor, field, stage: Int32, tid: Int32):
        """Issues dV += P^T dO or dK += dS^T Q of 64 keys and a query tile, and commits the group."""
        mma_kv = key_mmas(self.spec).kv
        queries = wgmma.transposed(view(field, key_layouts(self.spec).q))
        operand = mma_kv.make_fragment_B(mma_kv.get_slice(tid).partition_B(queries))
        blocks = [(k, k) for k in range(self.spec.queries // 16)]
        warpgroup.fence()
        wgmma.issue(mma_kv, acc, rows, operand[None, None, None, stage], True, blocks)
        warpgroup.commit_group()

    def rounded(self, acc: cute.Tensor) -> cute.Tensor:
        """Returns P^T or dS^T, rounded, as the operand of a gradient."""
        mma_kv = key_mmas(self.spec).kv
        rows = mma_kv.make_fragment_A(mma_kv.partition_shape_A((ROWS, self.spec.queries)))
        rows.store(acc.load().to(self.dtype).reshape(rows.shape))
        return rows


class FusedKeyGrad(KeyGrad):
    """Device code that also stores dS; the warpgroups make dQ of it in turn. See the module's docstring."""

    def __init__(self, spec):
        super().__init__(spec)
        self.dq = QuerySums(spec)

    @cute.jit
    def add_tiles(
        self, smem, acc_s: cute.Tensor, keys: KeyBlocks, tiles: QueryTiles, ring_tile: Int32, place: Place
    ) -> Int32:
        """Does what `KeyGrad.add_tiles` does."""
        spec = self.spec
        queries, ratio, scale_log2 = tiles
        rank, wg, tid = place
        total, t = ratio * queries.tiles, Int32(0)
        for i in cutlass.range(total, unroll=1):
            self.issue_scores(smem, acc_s, keys.k[0], ring_tile, tid)
            query = queries.begin + spec.queries * t
            self.differentiate(smem, acc_s, keys, i > 0, scale_log2, query, ring_tile, place)
            ring_tile += 1
            t = cutlass.select_(t == queries.tiles - 1, Int32(0), t + 1)
        if total > 0 and (ring_tile - 1) % spec.warpgroups == wg:
            self.dq.make_dq(smem, None, ring_tile - 1, rank, wg, tid)
        return ring_tile

    @cute.jit
    def differentiate(
        self,
        smem,
        acc_s: cute.Tensor,
        keys: KeyBlocks,
        follows,
        scale_log2: Float32,
        query: Int32,
        ring_tile: Int32,
        place: Place,
    ):
        """Adds the query tile from `query` on, whose S^T is in flight, to dK / softmax_scale and to dV.

        If the tile `follows` another of the work tile, and it is this warpgroup's turn, it makes dQ of that other tile.
        """
        spec = self.spec
        rank, wg, tid = place
        layouts, mma_s = key_layouts(spec), key_mmas(spec).qk
        acc_dp = cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, spec.queries)), Float32)
        s, dp = wgmma.by_row(acc_s), wgmma.by_row(acc_dp)
        columns = cute.size(s, mode=[1])
        stage = self.edges.q.index(ring_tile)
        # L and delta of this thread's columns: column 8j + 2 (lane % 4) + c is element (c, j)
        thread_stats = smem.stats.data_ptr() + cute.assume(stage * 2 * spec.queries + 2 * (tid % 4), divby=2)

        ds_slot = self.edges.ds.slot(ring_tile)
        for b in cutlass.range_constexpr(spec.key_blocks):
            if const_expr(b > 0):
                warpgroup.wait_group(0)
                warpgroup.fence()
            self.issue_transposed(keys.v[b], smem.d_out, acc_dp, stage, tid)
            values = column_stats(thread_stats)
            if const_expr(b == 0):
                warpgroup.wait_group(1)
            self.masks.mask(acc_s, query, keys.limits[b])
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(columns):
                    s[r, c] = cute.math.exp2(s[r, c] * scale_log2 - values[c], fastmath=True)
            self.issue_gradient(keys.d_v[b], self.rounded(acc_s), smem.d_out, stage, tid)

            values = column_stats(thread_stats + spec.queries)
            warpgroup.wait_group(1)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(columns):
                    s[r, c] *= dp[r, c] - values[c]
            rDS = self.rounded(acc_s)
            self.issue_gradient(keys.d_k[b], rDS, smem.q, stage, tid)

            if const_expr(b == 0):
                if const_expr(spec.key_blocks > 1):
                    warpgroup.fence()
                    self.issue_transposed(keys.k[1], smem.q, acc_s, stage, tid)
                # not ds_slot: with a phase computed before the products, ptxas orders the products differently
                self.edges.ds.acquire(smem, self.edges.ds.slot(ring_tile))
            sDS = view(smem.d_s, layouts.d_s)
            store_ds = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            to_smem = cute.make_tiled_copy_C(store_ds, mma_s)
            thr_copy = to_smem.get_slice(tid)
            own = 2 * ds_slot.index if const_expr(spec.pair) else ds_slot.index
            mine = cute.local_tile(sDS[None, None, own], (ROWS, spec.queries), (wg * spec.key_blocks + b, 0))
            fragment = cute.make_tensor(rDS.iterator, acc_s.layout)
            cute.copy(to_smem, thr_copy.retile(fragment), thr_copy.partition_D(mine))
        cute.arch.fence_proxy("async.shared", space="cta")  # makes ordinary stores visible to wgmma
        if const_expr(spec.pair):
            self.dq.send(smem, ds_slot, rank, wg, tid)
        else:
            self.edges.ds.arrive(smem, ds_slot)
        if follows and (ring_tile - 1) % spec.warpgroups == wg:
            self.dq.make_dq(smem, ring_tile, ring_tile - 1, rank, wg, tid)
        else:
            warpgroup.wait_group(0)
            self.edges.q.release(smem, ring_tile)


def column_stats(source: cute.Pointer, columns: int = QUERIES) -> cute.Tensor:
    """Loads L or delta of this thread's columns into registers, (2, columns / 8)."""
    values = cute.make_rmem_tensor((2, columns // 8), Float32)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout((2, columns // 8), stride=(1, 8))), values)
    return values
