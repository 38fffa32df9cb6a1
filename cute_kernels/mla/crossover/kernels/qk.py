"""The QK warpgroup of the crossover: Q's conversion, QK and the softmax of every tile."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, token_cache, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.arguments import KeySource, QueryLoad, TileRange
from cute_kernels.mla.crossover.kernels.barriers import NamedBarrier
from cute_kernels.mla.crossover.kernels.smem import (
    P_SHIFT,
    layouts,
    p_fragment,
    row_states,
    scales,
    tiled_mmas,
)
from cute_kernels.mla.crossover.kernels.tile import BLOCK, STAGES
from cute_kernels.mla.crossover.spec import EVENTS, ROLES, WEIGHT, MlaCrossoverSpec
from cute_kernels.mla.kernels.convert_q import MAX_EXPONENT, MAX_PEAK, MIN_PEAK, max_magnitudes
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.load_q import start_q
from cute_kernels.mla.kernels.scheduler import WorkTile
from cute_kernels.mla.kernels.smem import place_of_weight
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE

CHUNKS = 8  # of eight numbers of Q that a thread converts together


class QkWarpgroup:
    """Device code for 128 threads: S, P, row_max and row_sum of all tiles, for the two PV warpgroups.

        S = q_rope k_rope + sum_j scale_j (q_j code_j)      scales in float32, products of float16 numbers

    Codes are exact as float16, and so is Q: numbers 2^-16 below the largest of the 128 that meet a scale lose bits, and
    are too small to matter. Where float16 does not hold the largest, a power of two per row and quant tile scales them.

    row_max (in units of log2) and row_sum stay in registers from tile to tile; each thread sums its own columns.
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.spec = spec
        self.tracer = Tracer(spec.trace, len(ROLES))
        self.keys = KeyFinder(spec)

    @cute.jit
    def prepare(self, smem, q_load: QueryLoad, work: WorkTile, loads: Int32, warp_idx: Int32, tid: Int32):
        """Makes Q float16 but for its rope part, in place; `loads` loads of Q came before.

        Returns whether S has to be multiplied by the powers of Q, and the new number of loads.
        """
        cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
        loads += 1
        fits = self.convert(smem, tid)
        scaled = Int32(0)
        if wgmma.every_thread(fits, Int32(NamedBarrier.QK)) == 0:
            scaled = Int32(1)
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, and then those of a copy
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=128)
            if warp_idx == 0:
                start_q(smem, *q_load, work, WIDE, unrolled=True)
            cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
            loads += 1
            self.convert_by_powers(smem, tid)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=128)
        return scaled, loads

    def chunk_of_q(self, smem, tid: Int32, j: Int32, c: Int32):
        """Chunk c of 16 in one of the two quant tiles that a thread converts: 8 numbers of its row."""
        row, quant_tile = tid % WIDE, tid // WIDE * (QUANT_TILES // 2) + j
        block = quant_tile * (QUANT_TILE // BLOCK_COLUMNS) + c // 8
        start = block * BLOCK + row * BLOCK_COLUMNS + ((c % 8) ^ (row % 8)) * 8
        pointer = smem.q.data_ptr() + cute.assume(start, divby=8)
        eight = cute.make_layout(8)
        return cute.make_tensor(pointer, eight), cute.make_tensor(cute.recast_ptr(pointer, dtype=Float16), eight)

    @cute.jit
    def convert(self, smem, tid: Int32) -> Int32:
        """Stores Q as float16; returns whether float16 holds it."""
        fits = Int32(1)
        for j in cutlass.range(QUANT_TILES // 2, unroll=1):
            largest = cute.make_rmem_tensor(4, Int32)
            largest.fill(0)
            seen = Int32(0)
            for first in cutlass.range(0, QUANT_TILE // 8, CHUNKS, unroll=1):
                eights = cute.make_rmem_tensor((8, CHUNKS), BFloat16)  # loads in flight together
                for i in cutlass.range_constexpr(CHUNKS):
                    old, _ = self.chunk_of_q(smem, tid, j, first + i)
                    cute.autovec_copy(old, eights[None, i])
                old_words = cute.recast_tensor(eights, Int32)
                for i in cutlass.range_constexpr(CHUNKS):
                    _, new = self.chunk_of_q(smem, tid, j, first + i)
                    half = cute.make_rmem_tensor(8, Float16)
                    half.store(eights[None, i].load().to(Float32).to(Float16))
                    words = cute.recast_tensor(half, Int32)
                    for w in cutlass.range_constexpr(4):
                        largest[w] = max_magnitudes(largest[w], words[w])
                        seen |= old_words[w, i]
                    cute.autovec_copy(half, new)
            both = max_magnitudes(max_magnitudes(largest[0], largest[1]), max_magnitudes(largest[2], largest[3]))
            pair = cute.make_rmem_tensor(1, Int32)
            pair[0] = both
            found = cute.recast_tensor(pair, Float16)
            peak = cute.arch.fmax(found[0].to(Float32), found[1].to(Float32))
            if seen & 0x7FFF7FFF != 0 and (peak < MIN_PEAK or peak > MAX_PEAK):
                fits = Int32(0)
        return fits

    @cute.jit
    def convert_by_powers(self, smem, tid: Int32):
        """Stores Q times a power of two for each row and quant tile, as float16; stores the inverse powers."""
        sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((WIDE, QUANT_TILES)))
        eight, half = cute.make_rmem_tensor(8, BFloat16), cute.make_rmem_tensor(8, Float16)
        for j in cutlass.range(QUANT_TILES // 2, unroll=1):
            peak = Float32(0.0)
            for c in cutlass.range(QUANT_TILE // 8, unroll=1):
                old, _ = self.chunk_of_q(smem, tid, j, c)
                cute.autovec_copy(old, eight)
                for i in cutlass.range_constexpr(8):
                    number = eight[i].to(Float32)
                    peak = cute.arch.fmax(peak, cute.arch.fmax(number, -number))
            exponent = cutlass.min(cutlass.max(softmax.exponent(peak), -MAX_EXPONENT), MAX_EXPONENT)
            power = softmax.power_of_two(-exponent)
            for c in cutlass.range(QUANT_TILE // 8, unroll=1):
                old, new = self.chunk_of_q(smem, tid, j, c)
                cute.autovec_copy(old, eight)
                half.store((eight.load().to(Float32) * power).to(Float16))
                cute.autovec_copy(half, new)
            sPower[tid % WIDE, tid // WIDE * (QUANT_TILES // 2) + j] = softmax.power_of_two(exponent)

    @cute.jit
    def run(
        self,
        smem,
        q_load: QueryLoad,
        source: KeySource,
        scale_log2: Float32,
        tiles: TileRange,
        has_next,
        next_work: WorkTile,
        scaled: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Makes S and P of the key tiles of a work tile; Q has come.

        As soon as nobody needs this Q, the load of the next work tile's is started. The load warpgroups bring codes
        alone; a pair of threads here loads the scales of a key, a tile ahead, while the warpgroup waits for codes.
        """
        mKV, zero_row, entries, begin, limit, page_divisor = source
        done, count = tiles
        token, pair = tid // 2, tid % 2
        position, last_position = begin + token, limit - 1
        pair_scales = cute.make_rmem_tensor(2, Float32)
        valid, entry = Int32(0), Int32(0)
        if count > 0:
            entry = self.keys.read_entry(entries, position, last_position, page_divisor)
            valid, row = self.keys.locate(mKV, zero_row, entry, position, last_position, page_divisor)
            token_cache.load_scales(row, pair, pair_scales)
            position += TOKENS_PER_TILE
            entry = self.keys.read_entry(entries, position, last_position, page_divisor)
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        if count == 0:
            # all have waited for the Q that is not used
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=128)
            if has_next and warp_idx == 0:
                start_q(smem, *q_load, next_work, WIDE, unrolled=True)
        for t in cutlass.range(done, done + count, unroll=1):
            last = t == done + count - 1
            stage = t % STAGES
            self.stamp(smem, t, 0, 0, tid)
            cute.arch.mbarrier_wait(smem.empty.data_ptr() + stage, (t // STAGES + 1) % 2)
            self.store_scales(smem, pair_scales, valid, stage, tid)
            valid, row = self.keys.locate(mKV, zero_row, entry, position, last_position, page_divisor)
            token_cache.load_scales(row, pair, pair_scales)
            position += TOKENS_PER_TILE
            entry = self.keys.read_entry(entries, position, last_position, page_divisor)
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=128)
            cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, t // STAGES % 2)
            # ordinary stores, read by wgmma. Where they are made a fence would wait for loads in flight
            cute.arch.fence_proxy("async.shared", space="cta")
            self.stamp(smem, t, 0, 1, tid)
            self.stamp(smem, t, 1, 0, tid)
            acc_s = self.multiply(smem, stage, scaled, tid)
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=128)
            self.stamp(smem, t, 1, 1, tid)
            if last and has_next and warp_idx == 0:
                start_q(smem, *q_load, next_work, WIDE, unrolled=True)
            self.stamp(smem, t, 2, 0, tid)
            self.softmax(smem, acc_s, row_max, row_sum, scale_log2, stage, last, tid)
            cute.arch.mbarrier_arrive(smem.p_full.data_ptr() + stage)
            self.stamp(smem, t, 2, 1, tid)

    @cute.jit
    def store_scales(self, smem, found: cute.Tensor, valid: Int32, stage: Int32, tid: Int32):
        """Stores two scales of a key, their weights and, once, its mask."""
        token, pair = tid // 2, tid % 2
        layout = cute.make_layout((TOKENS_PER_TILE, QUANT_TILES, STAGES))
        sScale = cute.make_tensor(smem.scale.data_ptr(), layout)
        sWeight = cute.make_tensor(smem.weight.data_ptr(), layout)
        place = place_of_weight(token)
        for i in cutlass.range_constexpr(2):
            weight = found[i] * WEIGHT
            inside = weight == 0.0 or (weight >= 2.0**-14 and weight < 2.0)
            weight = Float32(cutlass.select_(inside, weight, Float32(float("nan"))))
            sScale[token, 2 * pair + i, stage] = found[i]
            sWeight[place, 2 * pair + i, stage] = weight.to(Float16)
        if pair == 0:
            sMask = cute.make_tensor(smem.mask.data_ptr(), cute.make_layout((TOKENS_PER_TILE, STAGES)))
            sMask[token, stage] = Float32(0.0) if valid != 0 else -Float32.inf

    @cute.jit
    def multiply(self, smem, stage: Int32, scaled: Int32, tid: Int32):
        """S of a tile, scales and rope part included."""
        layout_nope, layout_rope, layout_q = layouts()
        mma, mma_rope, _ = tiled_mmas()
        thr, thr_rope = mma.get_slice(tid), mma_rope.get_slice(tid)
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sRope = smem.rope.get_tensor(layout_rope.outer, swizzle=layout_rope.inner)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sQ_codes = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner, dtype=Float16)
        rQ = mma.make_fragment_A(thr.partition_A(sQ_codes))[None, None, None, 0]
        rQ_rope = mma_rope.make_fragment_A(thr_rope.partition_A(sQ))[None, None, None, 0]
        rNope = mma.make_fragment_B(thr.partition_B(sNope))[None, None, None, stage]
        rRope = mma_rope.make_fragment_B(thr_rope.partition_B(sRope))[None, None, None, stage]
        shape = mma.partition_shape_C((WIDE, TOKENS_PER_TILE))
        acc_s, acc = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        s, partial_s = wgmma.by_row(acc_s), wgmma.by_row(acc)
        key_scales = scales(smem, thr, stage)
        columns = cute.size(s, mode=[1])
        scale = cute.make_rmem_tensor(columns, Float32)
        sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((WIDE, QUANT_TILES)))
        for j in cutlass.range_constexpr(QUANT_TILES):
            warpgroup.fence()
            if const_expr(j == 0):
                rope_steps = [(NOPE // 16 + k, k) for k in range(ROPE // 16)]
                wgmma.issue(mma_rope, acc_s, rQ_rope, rRope, False, rope_steps)
            k_blocks = [QUANT_TILE // 16 * j + k for k in range(QUANT_TILE // 16)]
            wgmma.issue(mma, acc, rQ, rNope, False, [(k, k) for k in k_blocks])
            warpgroup.commit_group()
            by_column = wgmma.by_row(key_scales[None, None, None, j])
            for c in cutlass.range_constexpr(columns):
                scale[c] = by_column[0, c]
            warpgroup.wait_group(0)
            if scaled != 0:
                for r in cutlass.range_constexpr(2):
                    power = sPower[wgmma.row(tid, r), j]
                    for c in cutlass.range_constexpr(columns):
                        partial_s[r, c] *= power
            for c in cutlass.range_constexpr(columns):
                for r in cutlass.range_constexpr(2):
                    s[r, c] += partial_s[r, c] * scale[c]
        return acc_s

    @cute.jit
    def softmax(
        self,
        smem,
        acc_s: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        scale_log2: Float32,
        stage: Int32,
        last,
        tid: Int32,
    ):
        """Stores P of a tile in place of its rope part, and the rows' rescaling, row_max and row_sum (`row_states`)."""
        thr = tiled_mmas()[0].get_slice(tid)
        mask_layout = cute.make_layout((WIDE, TOKENS_PER_TILE, STAGES), stride=(0, 1, TOKENS_PER_TILE))
        mask = wgmma.by_row(thr.partition_C(smem.mask.get_tensor(mask_layout)[None, None, stage]))
        s = wgmma.by_row(acc_s)
        columns = cute.size(s, mode=[1])
        for c in cutlass.range_constexpr(columns):
            bias = mask[0, c]
            for r in cutlass.range_constexpr(2):
                s[r, c] = s[r, c] * scale_log2 + bias
        sRescaling, sMax, sSum = row_states(smem, stage, tid)
        for r in cutlass.range_constexpr(2):
            old_max = row_max[r]
            found = [cute.arch.fmax(s[r, c], s[r, c + columns // 2]) for c in range(columns // 2)]
            while const_expr(len(found) > 1):
                found = [cute.arch.fmax(found[i], found[i + len(found) // 2]) for i in range(len(found) // 2)]
            new_max = cute.arch.fmax(old_max, cute.arch.warp_reduction_max(found[0], threads_in_group=4))
            row_max[r] = new_max
            shift = softmax.finite(new_max) - P_SHIFT
            partial = Float32(0.0)
            for c in cutlass.range_constexpr(columns):
                s[r, c] = cute.math.exp2(s[r, c] - shift, fastmath=True)
                partial += s[r, c]
            rescaling = softmax.rescaling(old_max, new_max)
            row_sum[r] = row_sum[r] * rescaling + partial
            if tid % 4 == 0:
                sRescaling[r] = rescaling
        if last:
            for r in cutlass.range_constexpr(2):
                total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
                if tid % 4 == 0:
                    sSum[r], sMax[r] = total, row_max[r]
        rP = cute.make_rmem_tensor((8, TOKENS_PER_TILE // 16), Float16)
        rP.store(acc_s.load().to(Float16).reshape(rP.shape))
        cute.autovec_copy(rP, p_fragment(smem, stage, tid))

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """A timestamp of a tile."""
        self.tracer.stamp(smem.trace.ptr, 1, len(EVENTS[1]) * t + event, edge, tid == 0)
