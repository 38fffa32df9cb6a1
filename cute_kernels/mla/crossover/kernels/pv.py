"""The two PV warpgroups of the crossover, 256 of the 512 columns each: O += P V, and the results."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.merge.spec import UNIT_VALUES
from cute_kernels.mla.crossover.kernels.arguments import TileRange
from cute_kernels.mla.crossover.kernels.smem import (
    P_SHIFT,
    layouts,
    p_fragment,
    row_scales,
    row_states,
    scales,
    tiled_mmas,
)
from cute_kernels.mla.crossover.kernels.tile import STAGES
from cute_kernels.mla.crossover.spec import EVENTS, ROLES, WEIGHT, MlaCrossoverSpec
from cute_kernels.mla.kernels.arguments import Results
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable, WorkTile
from cute_kernels.mla.kernels.smem import weights
from cute_kernels.mla.kernels.tile import QUANT_TILE
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE

KEY_BLOCKS = TOKENS_PER_TILE // 16
IN_FLIGHT = 1  # blocks of 16 keys that are multiplied while P of the next one is prepared
LOADED = 2  # blocks whose P is on its way from shared memory, 200 clocks while others use it
HALVES = 2  # quant tiles of a warpgroup
BLOCK_SCALES = QUANT_TILE // UNIT_VALUES  # of a quant tile, in partials
P_EXPONENT = 13  # of the largest P x scale x row scale of a row, where float16 holds 2^16
O_EXPONENT = 100  # up to here O may grow when its row scale changes


class PvWarpgroups:
    """Device code for 2 x 128 threads: O += P V, with P, row_max and row_sum of the QK warpgroup; then the result.

        O_j += (P scale_j) code_j      products of float16 numbers

    O_j of a row is kept times a row scale, with which P scale_j fits into float16. It is WEIGHT for all rows: then P is
    multiplied by `smem.weights` as they are. A scale that these do not hold shows there as a NaN; from that tile on to
    the end of the work tile each row chooses its own row scale, a power of two, tile by tile (`multiply_row_scaled`).
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(
        self,
        smem,
        results: Results,
        tiles: TileRange,
        number: Int32,
        table: WorkTable,
        wg: Int32,
        tid: Int32,
    ):
        """Adds up the key tiles of work tile `number`, and stores its result or partial."""
        done, count = tiles
        work = self.scheduler.locate(number, table)
        layout_nope, _, _ = layouts()
        _, _, mma = tiled_mmas()
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sV = cute.local_tile(wgmma.transposed(sNope), (QUANT_TILE, TOKENS_PER_TILE), (None, 0, None))
        rV = mma.make_fragment_B(mma.get_slice(tid).partition_B(sV))
        shape = mma.partition_shape_C((WIDE, QUANT_TILE))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(HALVES)]
        for half in cutlass.range_constexpr(HALVES):
            acc_o[half].fill(0.0)
        row_scaled = Int32(0)
        row_max, row_sum, alpha = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        for t in cutlass.range(done, done + count, unroll=1):
            stage = t % STAGES
            self.stamp(smem, t, 0, 0, wg, tid)
            cute.arch.mbarrier_wait(smem.p_full.data_ptr() + stage, t // STAGES % 2)
            cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, t // STAGES % 2)  # long complete; acquires copies
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores of codes, read by wgmma
            self.stamp(smem, t, 0, 1, wg, tid)
            self.stamp(smem, t, 1, 0, wg, tid)
            sRescaling, _, _ = row_states(smem, stage, tid)
            for r in cutlass.range_constexpr(2):
                alpha[r] = sRescaling[r]
            softmax.rescale(acc_o, alpha)
            if self.needs_row_scales(smem, stage, wg, tid) and row_scaled == 0:
                row_scaled = Int32(1)
                if tid % 4 == 0:
                    for half in cutlass.range_constexpr(HALVES):
                        row_scales(smem, half, wg, tid).fill(WEIGHT)
                cute.arch.sync_warp()
            if row_scaled == 0:
                self.multiply_weighted(smem, mma, rV, acc_o, stage, wg, tid)
            else:
                self.multiply_row_scaled(smem, mma, rV, acc_o, stage, wg, tid)
            if t == done + count - 1:
                _, sMax, sSum = row_states(smem, stage, tid)
                for r in cutlass.range_constexpr(2):
                    row_max[r], row_sum[r] = sMax[r], sSum[r]
            cute.arch.mbarrier_arrive(smem.empty.data_ptr() + stage)
            self.stamp(smem, t, 1, 1, wg, tid)
        if row_scaled != 0:
            for half in cutlass.range_constexpr(HALVES):
                sRowScale = row_scales(smem, half, wg, tid)
                for r in cutlass.range_constexpr(2):
                    alpha[r] = WEIGHT / sRowScale[r]
                softmax.multiply_rows([acc_o[half]], alpha)
        if const_expr(self.spec.split):
            self.store_partial(acc_o, row_max, row_sum, results, work, wg, tid)
        else:
            self.store(acc_o, row_max, row_sum, results, work, wg, tid)

    @cute.jit
    def needs_row_scales(self, smem, stage: Int32, wg: Int32, tid: Int32):
        """Whether a key of the tile has a scale that its weight does not hold; the same in all threads."""
        seen = Int32(0)
        for half in cutlass.range_constexpr(HALVES):
            found = cute.make_rmem_tensor((8, 2), Float16)
            cute.autovec_copy(weights(smem, stage, HALVES * wg + half, tid), found)
            words = cute.recast_tensor(found, Int32)
            for i in cutlass.range_constexpr(8):
                seen |= words[i]
        return cute.arch.vote_any_sync(seen & 0x40004000 != 0)  # of numbers below 2 the first bit of the exponent is 0

    @cute.jit
    def multiply_weighted(self, smem, mma: cute.TiledMma, rV: cute.Tensor, acc_o, stage: Int32, wg: Int32, tid: Int32):
        """O += (P weight) codes; P of the next keys is prepared while products run."""
        pieces = [(half, first + block) for first in (0, 2) for half in range(HALVES) for block in range(2)]
        loaded = [self.load(smem, *pieces[i], stage, wg, tid) for i in range(LOADED)]
        for i in cutlass.range_constexpr(len(pieces)):
            half, block = pieces[i]
            p, key_weights = loaded[i % LOADED]
            operand = mma.make_fragment_A(mma.partition_shape_A((WIDE, 16)))
            factors = cute.make_rmem_tensor(8, Float16)
            for e in cutlass.range_constexpr(8):  # as in the accumulator: neighbours, rows, then eight columns on
                factors[e] = key_weights[e % 2 + 2 * (e // 4)]
            cute.make_tensor(operand.iterator, cute.make_layout(8)).store(p.load() * factors.load())
            warpgroup.fence()
            values = rV[None, None, None, HALVES * wg + half, stage]
            wgmma.issue(mma, acc_o[half], operand, values, True, [(0, block)])
            warpgroup.commit_group()
            if const_expr(i + LOADED < len(pieces)):
                loaded[i % LOADED] = self.load(smem, *pieces[i + LOADED], stage, wg, tid)
            warpgroup.wait_group(0 if i + 1 in (len(pieces) // 2, len(pieces)) else IN_FLIGHT)

    @cute.jit
    def load(self, smem, half: cutlass.Constexpr, block: cutlass.Constexpr, stage: Int32, wg: Int32, tid: Int32):
        """P of a block of 16 keys (8), and their weights in a quant tile (4)."""
        p, key_weights = cute.make_rmem_tensor(8, Float16), cute.make_rmem_tensor(4, Float16)
        cute.autovec_copy(p_fragment(smem, stage, tid)[None, block], p)
        start = weights(smem, stage, HALVES * wg + half, tid)[None, block // 2].iterator + block % 2 * 4
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(4)), key_weights)
        return p, key_weights

    @cute.jit
    def multiply_row_scaled(
        self, smem, mma: cute.TiledMma, rV: cute.Tensor, acc_o, stage: Int32, wg: Int32, tid: Int32
    ):
        """O += (P scale row_scale) codes; the row scale brings a row's largest P x scale near 2^P_EXPONENT."""
        for half in cutlass.range_constexpr(HALVES):
            o, gain = wgmma.by_row(acc_o[half]), cute.make_rmem_tensor(2, Float32)
            peaks, largest, new_scale = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
            sRowScale = row_scales(smem, half, wg, tid)
            peaks.fill(0.0)
            for block in cutlass.range_constexpr(KEY_BLOCKS):
                products = self.products(smem, half, block, stage, wg, tid)
                for e in cutlass.range_constexpr(8):
                    peaks[e // 2 % 2] = cute.arch.fmax(peaks[e // 2 % 2], cute.arch.fmax(products[e], -products[e]))
            for r in cutlass.range_constexpr(2):
                largest[r] = Float32(0.0)
                for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    largest[r] = cute.arch.fmax(largest[r], cute.arch.fmax(o[r, c], -o[r, c]))
                peak = cute.arch.warp_reduction_max(peaks[r], threads_in_group=4)
                o_exponent = softmax.exponent(cute.arch.warp_reduction_max(largest[r], threads_in_group=4))
                old_exponent = softmax.exponent(sRowScale[r])
                change = cutlass.min(P_EXPONENT - softmax.exponent(peak) - old_exponent, O_EXPONENT - o_exponent)
                change = cutlass.min(cutlass.max(change, -O_EXPONENT - old_exponent), O_EXPONENT - old_exponent)
                if peak == 0.0:
                    change = Int32(0)
                new_scale[r] = softmax.power_of_two(old_exponent + change)
                # in two factors: float32 does not hold a change of 2^-200
                gain[r] = softmax.power_of_two(change // 2)
                largest[r] = softmax.power_of_two(change - change // 2)
            cute.arch.sync_warp()  # the four threads of a row have read its scale
            if tid % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    sRowScale[r] = new_scale[r]
            cute.arch.sync_warp()
            softmax.multiply_rows([acc_o[half]], gain)
            softmax.multiply_rows([acc_o[half]], largest)
            for block in cutlass.range_constexpr(KEY_BLOCKS):
                products = self.products(smem, half, block, stage, wg, tid)
                for e in cutlass.range_constexpr(8):
                    products[e] *= new_scale[e // 2 % 2]
                operand = mma.make_fragment_A(mma.partition_shape_A((WIDE, 16)))
                operand.store(products.load().to(Float16).reshape(operand.shape))
                warpgroup.fence()
                values = rV[None, None, None, HALVES * wg + half, stage]
                wgmma.issue(mma, acc_o[half], operand, values, True, [(0, block)])
                warpgroup.commit_group()
                warpgroup.wait_group(0)

    @cute.jit
    def products(self, smem, half: cutlass.Constexpr, block: cutlass.Constexpr, stage: Int32, wg: Int32, tid: Int32):
        """P x scale of a block of 16 keys: this thread's eight, as in the accumulator."""
        key_scales = scales(smem, tiled_mmas()[0].get_slice(tid), stage)
        by_column = wgmma.by_row(key_scales[None, None, None, HALVES * wg + half])
        eight, products = cute.make_rmem_tensor(8, Float16), cute.make_rmem_tensor(8, Float32)
        cute.autovec_copy(p_fragment(smem, stage, tid)[None, block], eight)
        for e in cutlass.range_constexpr(8):
            products[e] = eight[e].to(Float32) * by_column[0, 4 * block + e % 2 + 2 * (e // 4)]
        return products

    @cute.jit
    def store(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        results: Results,
        work: WorkTile,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O, sink included, and stores it as bf16; stores the log-sum-exp.

        From registers: the next work tile needs all of shared memory, and its Q is on the way.
        """
        mSink, mOut, mLse, _ = results
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
        self.normalize(acc_o, row_sum, denominator)
        self.store_rows(acc_o, mOut[batch_idx, query_idx, None, None], mSink.shape[0], head_block, wg, tid)

    @cute.jit
    def store_partial(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        results: Results,
        work: WorkTile,
        wg: Int32,
        tid: Int32,
    ):
        """Normalizes O without the sink and stores it as float16, with its log-sum-exp, for the merge.

        The 128 numbers of a row that four lanes have share a block scale, which is stored for each 64.
        """
        partials: Any = results.partials
        mSink = results.mSink
        head_block, split_idx, query_idx, batch_idx = work
        denominator = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            denominator[r] = row_sum[r]
            head = head_block * WIDE + wgmma.row(tid, r)
            if head < mSink.shape[0] and wg == 0 and tid % 4 == 0:
                lse = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
                partials.lse[split_idx, batch_idx, query_idx, head] = lse
        self.normalize(acc_o, row_sum, denominator)
        for half in cutlass.range_constexpr(HALVES):
            o, inverse = wgmma.by_row(acc_o[half]), cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                peak = Float32(0.0)
                for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    peak = cute.arch.fmax(peak, cute.arch.fmax(o[r, c], -o[r, c]))
                for step in cutlass.range_constexpr(2):
                    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1 << step))
                block_scale = softmax.unit(peak)
                inverse[r] = 1.0 / block_scale
                head = head_block * WIDE + wgmma.row(tid, r)
                if head < mSink.shape[0] and tid % 4 < BLOCK_SCALES:
                    first = BLOCK_SCALES * (HALVES * wg + half)
                    partials.scales[split_idx, batch_idx, query_idx, head, first + tid % 4] = block_scale
            softmax.multiply_rows([acc_o[half]], inverse)
        heads = partials.out[split_idx, batch_idx, query_idx, None, None]
        self.store_rows(acc_o, heads, mSink.shape[0], head_block, wg, tid)

    @cute.jit
    def normalize(self, acc_o, row_sum: cute.Tensor, denominator: cute.Tensor):
        """O / WEIGHT / denominator by rows; 0 where there is no key."""
        for r in cutlass.range_constexpr(2):
            denominator[r] *= WEIGHT
        softmax.normalize(acc_o, row_sum, denominator)

    @cute.jit
    def store_rows(self, acc_o, heads: cute.Tensor, h_q: Int32, head_block: Int32, wg: Int32, tid: Int32):
        """Stores O, rounded to the dtype of `heads` (h_q, 512)."""
        for half in cutlass.range_constexpr(HALVES):
            rounded = cute.make_rmem_tensor(acc_o[half].shape, heads.element_type)
            rounded.store(acc_o[half].load().to(heads.element_type))
            by_row = wgmma.by_row(rounded)
            for r in cutlass.range_constexpr(2):
                head = head_block * WIDE + wgmma.row(tid, r)
                self.store_row(by_row[r, None], heads, head, h_q, QUANT_TILE * (HALVES * wg + half), tid)

    @cute.jit
    def store_row(self, pairs: cute.Tensor, heads: cute.Tensor, head: Int32, h_q: Int32, first: Int32, tid: Int32):
        """128 numbers of 16 bits of a row, of which each of four lanes has two of every eight, in stores of 16 bytes.

        Of four blocks of eight each lane gets a whole one. In stores of 4 bytes the 64 KB of a work tile keep the load
        and store units busy for 10,000 clocks, and everything else on the SM waits.
        """
        q, number = tid % 4, cute.size(pairs) // 2
        odd, upper = q % 2 == 1, q // 2 == 1
        own = cute.make_rmem_tensor(cute.size(pairs), heads.element_type)
        cute.autovec_copy(pairs, own)
        words = cute.recast_tensor(own, Int32)
        block = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(0, number, 4):
            a = [words[i + k] for k in range(4)]
            low, high = [], []
            for k in cutlass.range_constexpr(2):
                other = cute.arch.shuffle_sync_bfly(Int32(cutlass.select_(odd, a[2 * k], a[2 * k + 1])), 1)
                low.append(Int32(cutlass.select_(odd, other, a[2 * k])))
                high.append(Int32(cutlass.select_(odd, a[2 * k + 1], other)))
            x = cute.arch.shuffle_sync_bfly(Int32(cutlass.select_(upper, low[0], low[1])), 2)
            y = cute.arch.shuffle_sync_bfly(Int32(cutlass.select_(upper, high[0], high[1])), 2)
            block[0], block[1] = cutlass.select_(upper, x, low[0]), cutlass.select_(upper, y, high[0])
            block[2], block[3] = cutlass.select_(upper, low[1], x), cutlass.select_(upper, high[1], y)
            if head < h_q:
                pointer = heads[head, None].iterator + cute.assume(first + 8 * (i + q), divby=8)
                cute.autovec_copy(
                    cute.recast_tensor(block, heads.element_type), cute.make_tensor(pointer, cute.make_layout(8))
                )

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, wg: Int32, tid: Int32):
        """A timestamp of a tile."""
        for w in cutlass.range_constexpr(2):
            self.tracer.stamp(smem.trace.ptr, 2 + w, len(EVENTS[2]) * t + event, edge, wg == w and tid == 0)
