"""The QK warpgroup of the crossover kernel: S = Q K^T and the softmax of each key tile."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import token_cache, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.arguments import KeySource
from cute_kernels.mla.crossover.kernels.convert_q import QConverter
from cute_kernels.mla.crossover.kernels.pipelines import NamedBarrier, pipelines
from cute_kernels.mla.crossover.kernels.smem import RowState, key_scales, layouts, tiled_mmas
from cute_kernels.mla.crossover.kernels.softmax import store_p
from cute_kernels.mla.crossover.kernels.tile import STAGES, THREADS
from cute_kernels.mla.crossover.spec import EVENTS, ROLES, WEIGHT, MlaCrossoverSpec
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.load_q import QTma, start_q
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable, WorkTile
from cute_kernels.mla.kernels.smem import place_of_weight
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE

MIN_WEIGHT, MAX_WEIGHT = 2.0**-14, 2.0  # normal float16 numbers; below 2 the first exponent bit is 0


class NextQ(NamedTuple):
    """The next work tile of this CTA, if any: its Q is loaded as soon as the last S of the current one is made."""

    exists: Any
    work: WorkTile


class QkWarpgroup:
    """Device code for 128 threads: S, P, row_max and row_sum of all key tiles, for the two PV warpgroups.

        S = q_rope k_rope + sum_j scale_j (q_j code_j)      scales in float32, products of float16 numbers

    Codes are exact as float16, and Q is as exact as matters (convert_q.py). row_max (units of log2) and row_sum stay in
    registers from tile to tile.
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.q = QConverter()
        self.scheduler = Scheduler(spec)
        self.finder = KeyFinder(spec.sparse)
        _, self.keys, self.p, _, _ = pipelines(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, q: QTma, table: WorkTable, scale_log2: Float32, warp_idx: Int32, tidx: Int32):
        """Computes P of all work tiles. `tidx` counts threads of the CTA, `warp_idx` the warps of the warpgroup."""
        first_work, end_work, step = table.share.first, table.share.end, table.share.step
        work = self.scheduler.locate(first_work, table)
        if warp_idx == 0 and first_work < end_work:
            start_q(smem, q.atom, q.tensor, work, WIDE, unrolled=True)
        done, loads = Int32(0), Int32(0)
        length = self.scheduler.length(work, table.mLength)
        for index in cutlass.range(first_work, end_work, step, unroll=1):
            work = self.scheduler.locate(index, table)
            keys = self.scheduler.keys(index, work, length, table)
            following = index + step
            has_next = following < end_work
            last = cutlass.min(following, end_work - 1)
            next_work = self.scheduler.locate(last, table)
            q_scaled, loads = self.q.prepare(smem, q, work, loads, warp_idx, tidx % 128)
            length = self.scheduler.length(next_work, table.mLength)  # a work tile ahead: it takes about 1000 clocks
            tid = tidx % 128
            entries = self.scheduler.entries(work, table.mIndex)
            page_size = table.divisors.page_size
            source = KeySource(table.mKV, table.zero_row, entries, keys.begin, keys.limit, page_size)
            next_q = NextQ(has_next, next_work)
            self.qk_work_tile(smem, q, source, scale_log2, done, keys.tiles, next_q, q_scaled, warp_idx, tid)
            done += keys.tiles

    @cute.jit
    def qk_work_tile(
        self,
        smem,
        q: QTma,
        keys: KeySource,
        scale_log2: Float32,
        done: Int32,
        tiles: Int32,
        next_q: NextQ,
        q_scaled: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Computes P of the key tiles done, done + 1, ... of a work tile, whose Q is ready; starts loading the next Q.

        The load warpgroup brings only codes. Here a pair of threads loads the scales of a key, a tile ahead, during the
        wait for codes.
        """
        key, pair = tid // 2, tid % 2
        position, last_position = keys.begin + key, keys.limit - 1
        scale_pair = cute.make_rmem_tensor(2, Float32)
        valid, entry = Int32(0), Int32(0)
        if tiles > 0:
            entry = self.finder.read_entry(keys.entries, position, last_position, keys.page_size)
            valid, row = self.finder.locate(keys.mKV, keys.zero_row, entry, position, last_position, keys.page_size)
            token_cache.load_scales(row, pair, scale_pair)
            position += TOKENS_PER_TILE
            entry = self.finder.read_entry(keys.entries, position, last_position, keys.page_size)
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        rows = RowState(row_max, row_sum)
        if tiles == 0:
            # without keys nobody reads this Q, but all threads have waited for it
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=THREADS)
            if next_q.exists and warp_idx == 0:
                start_q(smem, q.atom, q.tensor, next_q.work, WIDE, unrolled=True)
        for t in cutlass.range(done, done + tiles, unroll=1):
            last = t == done + tiles - 1
            stage = self.keys.index(t)
            self.stamp(smem, t, 0, 0, tid)
            self.keys.acquire(smem, t)
            self.store_scales(smem, scale_pair, valid, stage, tid)
            valid, row = self.finder.locate(keys.mKV, keys.zero_row, entry, position, last_position, keys.page_size)
            token_cache.load_scales(row, pair, scale_pair)
            position += TOKENS_PER_TILE
            entry = self.finder.read_entry(keys.entries, position, last_position, keys.page_size)
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=THREADS)  # scales and masks are stored
            self.keys.wait(smem, t)
            # ordinary stores before wgmma reads. The load warpgroup has no fence: it would wait for the loads in flight
            cute.arch.fence_proxy("async.shared", space="cta")
            self.stamp(smem, t, 0, 1, tid)
            self.stamp(smem, t, 1, 0, tid)
            acc_s = self.multiply(smem, stage, q_scaled, tid)
            # all threads have read Q and the rope part, which P overwrites
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=THREADS)
            self.stamp(smem, t, 1, 1, tid)
            if last and next_q.exists and warp_idx == 0:
                start_q(smem, q.atom, q.tensor, next_q.work, WIDE, unrolled=True)
            self.stamp(smem, t, 2, 0, tid)
            store_p(smem, acc_s, rows, scale_log2, stage, last, tid)
            self.p.arrive(smem, t)
            self.stamp(smem, t, 2, 1, tid)

    @cute.jit
    def store_scales(self, smem, scale_pair: cute.Tensor, valid: Int32, stage: Int32, tid: Int32):
        """Stores two scales of a key and their weights, NaN if out of range; one thread of a pair stores the mask."""
        key, pair = tid // 2, tid % 2
        layout = cute.make_layout((TOKENS_PER_TILE, QUANT_TILES, STAGES))
        sScale = cute.make_tensor(smem.scale.data_ptr(), layout)
        sWeight = cute.make_tensor(smem.weight.data_ptr(), layout)
        weight_index = place_of_weight(key)
        for i in cutlass.range_constexpr(2):
            weight = scale_pair[i] * WEIGHT
            in_range = weight == 0.0 or (weight >= MIN_WEIGHT and weight < MAX_WEIGHT)
            weight = Float32(cutlass.select_(in_range, weight, Float32(float("nan"))))
            sScale[key, 2 * pair + i, stage] = scale_pair[i]
            sWeight[weight_index, 2 * pair + i, stage] = weight.to(Float16)
        if pair == 0:
            sMask = cute.make_tensor(smem.mask.data_ptr(), cute.make_layout((TOKENS_PER_TILE, STAGES)))
            sMask[key, stage] = Float32(0.0) if valid != 0 else -Float32.inf

    @cute.jit
    def multiply(self, smem, stage: Int32, q_scaled: Int32, tid: Int32):
        """Computes S of a key tile, complete in registers."""
        layout, mmas = layouts(), tiled_mmas()
        mma, mma_rope = mmas.qk, mmas.qk_rope
        thr, thr_rope = mma.get_slice(tid), mma_rope.get_slice(tid)
        sNope = smem.nope.get_tensor(layout.nope.outer, swizzle=layout.nope.inner)
        sRope = smem.rope.get_tensor(layout.rope.outer, swizzle=layout.rope.inner)
        sQ = smem.q.get_tensor(layout.q.outer, swizzle=layout.q.inner)
        sQ_codes = smem.q.get_tensor(layout.q.outer, swizzle=layout.q.inner, dtype=Float16)
        rQ = mma.make_fragment_A(thr.partition_A(sQ_codes))[None, None, None, 0]
        rQ_rope = mma_rope.make_fragment_A(thr_rope.partition_A(sQ))[None, None, None, 0]
        rNope = mma.make_fragment_B(thr.partition_B(sNope))[None, None, None, stage]
        rRope = mma_rope.make_fragment_B(thr_rope.partition_B(sRope))[None, None, None, stage]
        shape = mma.partition_shape_C((WIDE, TOKENS_PER_TILE))
        acc_s, acc = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        s, products = wgmma.by_row(acc_s), wgmma.by_row(acc)
        tile_scales = key_scales(smem, thr, stage)
        columns = cute.size(s, mode=[1])
        scale = cute.make_rmem_tensor(columns, Float32)
        sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((WIDE, QUANT_TILES)))
        for j in cutlass.range_constexpr(QUANT_TILES):
            warpgroup.fence()
            if const_expr(j == 0):
                rope_blocks = [(NOPE // 16 + k, k) for k in range(ROPE // 16)]
                wgmma.issue(mma_rope, acc_s, rQ_rope, rRope, False, rope_blocks)
            k_blocks = [QUANT_TILE // 16 * j + k for k in range(QUANT_TILE // 16)]
            wgmma.issue(mma, acc, rQ, rNope, False, [(k, k) for k in k_blocks])
            warpgroup.commit_group()
            column_scales = wgmma.by_row(tile_scales[None, None, None, j])
            for c in cutlass.range_constexpr(columns):
                scale[c] = column_scales[0, c]
            warpgroup.wait_group(0)
            if q_scaled != 0:
                for r in cutlass.range_constexpr(2):
                    power = sPower[wgmma.row(tid, r), j]
                    for c in cutlass.range_constexpr(columns):
                        products[r, c] *= power
            for c in cutlass.range_constexpr(columns):
                for r in cutlass.range_constexpr(2):
                    s[r, c] += products[r, c] * scale[c]
        return acc_s

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """Stores a timestamp of a key tile."""
        self.tracer.stamp(smem.trace.ptr, 1, len(EVENTS[1]) * t + event, edge, tid == 0)
