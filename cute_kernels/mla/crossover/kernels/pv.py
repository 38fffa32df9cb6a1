"""The two PV warpgroups of the crossover kernel: O += P V, 256 of the 512 columns each."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.epilogue import HALVES, Epilogue
from cute_kernels.mla.crossover.kernels.pipelines import pipelines
from cute_kernels.mla.crossover.kernels.smem import (
    RowState,
    key_scales,
    layouts,
    o_powers,
    p_fragment,
    shared_row_state,
    tiled_mmas,
)
from cute_kernels.mla.crossover.spec import EVENTS, ROLES, WEIGHT, MlaCrossoverSpec
from cute_kernels.mla.kernels.arguments import Results
from cute_kernels.mla.kernels.merge import PartialMerger
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.smem import weights
from cute_kernels.mla.kernels.tile import QUANT_TILE
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE

KEY_BLOCKS = TOKENS_PER_TILE // 16
IN_FLIGHT = 1  # wgmmas of 16 keys in flight while P of the next 16 is prepared
LOADED = 2  # blocks of 16 keys whose P is loaded ahead: shared memory answers after 200 clocks while others use it
P_EXPONENT = 13  # exponent of the largest P x scale x power of a row; float16 holds up to 2^16
O_EXPONENT = 100  # O stays below 2^100 when its power changes


class PBlock(NamedTuple):
    """P of a block of 16 keys (8) and their weights in a quant tile (4), float16: one thread's factors."""

    p: cute.Tensor
    weights: cute.Tensor


class PvWarpgroups:
    """Device code for 2 x 128 threads: O += P V with P and row_max from the QK warpgroup; then the epilogue.

        O_j += (P scale_j) code_j      products of float16 numbers

    O_j of a row is kept multiplied by a power of two, with which P scale_j fits into float16. For all rows this power
    is WEIGHT: P is multiplied by `smem.weight` (`add_by_weights`). A scale out of range of weights shows there as a
    NaN; from that key tile to the end of the work tile each row has its own power, chosen tile by tile
    (`add_by_powers`). `wg` is 0 or 1, `tid` counts within one warpgroup.
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.spec = spec
        self.epilogue = Epilogue(spec)
        self.scheduler = Scheduler(spec)
        _, self.keys, self.p, _, _ = pipelines(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        if spec.split:
            self.merger = PartialMerger(spec)

    @cute.jit
    def run(self, smem, results: Results, counters: Int64, table: WorkTable, wg: Int32, tidx: Int32):
        """Computes all work tiles of this CTA; `wg` is 0 or 1, `tidx` the number of the thread in the CTA."""
        first_work, end_work, step = table.share.first, table.share.end, table.share.step
        done, tid = Int32(0), tidx % 128
        for index in cutlass.range(first_work, end_work, step, unroll=1):
            work = self.scheduler.locate(index, table)
            length = self.scheduler.length(work, table.mLength)
            keys = self.scheduler.keys(index, work, length, table)
            self.pv_work_tile(smem, results, done, keys.tiles, index, table, wg, tid)
            if const_expr(self.spec.split):
                rest, head_block = divmod(index, table.divisors.head_blocks)
                head_group = rest // table.divisors.splits * table.divisors.head_blocks.divisor + head_block
                self.merger.count_partial(counters, head_group, tidx)
            done += keys.tiles

    @cute.jit
    def pv_work_tile(
        self,
        smem,
        results: Results,
        done: Int32,
        tiles: Int32,
        index: Int32,
        table: WorkTable,
        wg: Int32,
        tid: Int32,
    ):
        """Computes O of the key tiles done, done + 1, ... of work tile `index`, and runs its epilogue."""
        work = self.scheduler.locate(index, table)
        layout, mma = layouts().nope, tiled_mmas().pv
        sNope = smem.nope.get_tensor(layout.outer, swizzle=layout.inner)
        sV = cute.local_tile(wgmma.transposed(sNope), (QUANT_TILE, TOKENS_PER_TILE), (None, 0, None))
        rV = mma.make_fragment_B(mma.get_slice(tid).partition_B(sV))
        shape = mma.partition_shape_C((WIDE, QUANT_TILE))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(HALVES)]
        for half in cutlass.range_constexpr(HALVES):
            acc_o[half].fill(0.0)
        by_powers = Int32(0)
        row_max, row_sum, alpha = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        for t in cutlass.range(done, done + tiles, unroll=1):
            stage = self.keys.index(t)
            self.stamp(smem, t, 0, 0, wg, tid)
            self.p.wait(smem, t)
            # the phase was complete long ago; the wait makes visible what bulk copies brought
            self.keys.wait(smem, t)
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores of codes, which wgmma reads
            self.stamp(smem, t, 0, 1, wg, tid)
            self.stamp(smem, t, 1, 0, wg, tid)
            shared = shared_row_state(smem, stage, tid)
            for r in cutlass.range_constexpr(2):
                alpha[r] = shared.rescaling[r]
            softmax.rescale(acc_o, alpha)
            if self.has_invalid_weight(smem, stage, wg, tid) and by_powers == 0:
                by_powers = Int32(1)
                if tid % 4 == 0:
                    for half in cutlass.range_constexpr(HALVES):
                        o_powers(smem, half, wg, tid).fill(WEIGHT)
                cute.arch.sync_warp()
            if by_powers == 0:
                self.add_by_weights(smem, mma, rV, acc_o, stage, wg, tid)
            else:
                self.add_by_powers(smem, mma, rV, acc_o, stage, wg, tid)
            if t == done + tiles - 1:
                last = shared_row_state(smem, stage, tid)
                for r in cutlass.range_constexpr(2):
                    row_max[r], row_sum[r] = last.row_max[r], last.row_sum[r]
            self.keys.release(smem, t)
            self.stamp(smem, t, 1, 1, wg, tid)
        if by_powers != 0:
            for half in cutlass.range_constexpr(HALVES):
                sPowers = o_powers(smem, half, wg, tid)
                for r in cutlass.range_constexpr(2):
                    alpha[r] = WEIGHT / sPowers[r]
                softmax.multiply_rows([acc_o[half]], alpha)
        if const_expr(self.spec.split):
            self.epilogue.store_partial(acc_o, RowState(row_max, row_sum), results, work, wg, tid)
        else:
            self.epilogue.store(acc_o, RowState(row_max, row_sum), results, work, wg, tid)

    @cute.jit
    def has_invalid_weight(self, smem, stage: Int32, wg: Int32, tid: Int32):
        """Whether a weight of the key tile is NaN, its scale being out of range. The same in the whole warpgroup."""
        seen = Int32(0)
        for half in cutlass.range_constexpr(HALVES):
            tile_weights = cute.make_rmem_tensor((8, 2), Float16)
            cute.autovec_copy(weights(smem, stage, HALVES * wg + half, tid), tile_weights)
            words = cute.recast_tensor(tile_weights, Int32)
            for i in cutlass.range_constexpr(8):
                seen |= words[i]
        return cute.arch.vote_any_sync(seen & 0x40004000 != 0)  # weights below 2: first bit of the exponent is 0

    @cute.jit
    def add_by_weights(self, smem, mma: cute.TiledMma, rV: cute.Tensor, acc_o, stage: Int32, wg: Int32, tid: Int32):
        """Adds (P weight) codes to O; P of the next 16 keys is prepared while wgmma runs."""
        pieces = [(half, first + block) for first in (0, 2) for half in range(HALVES) for block in range(2)]
        loaded = [self.load_p(smem, *pieces[i], stage, wg, tid) for i in range(LOADED)]
        for i in cutlass.range_constexpr(len(pieces)):
            half, block = pieces[i]
            p, key_weights = loaded[i % LOADED]
            operand = mma.make_fragment_A(mma.partition_shape_A((WIDE, 16)))
            element_weights = cute.make_rmem_tensor(8, Float16)
            for e in cutlass.range_constexpr(8):  # as in the accumulator: two columns, two rows, then columns + 8
                element_weights[e] = key_weights[e % 2 + 2 * (e // 4)]
            cute.make_tensor(operand.iterator, cute.make_layout(8)).store(p.load() * element_weights.load())
            warpgroup.fence()
            values = rV[None, None, None, HALVES * wg + half, stage]
            wgmma.issue(mma, acc_o[half], operand, values, True, [(0, block)])
            warpgroup.commit_group()
            if const_expr(i + LOADED < len(pieces)):
                loaded[i % LOADED] = self.load_p(smem, *pieces[i + LOADED], stage, wg, tid)
            warpgroup.wait_group(0 if i + 1 in (len(pieces) // 2, len(pieces)) else IN_FLIGHT)

    @cute.jit
    def load_p(self, smem, half: cutlass.Constexpr, block: cutlass.Constexpr, stage: Int32, wg: Int32, tid: Int32):
        """Starts loading P of a block of 16 keys and their weights in a quant tile."""
        p, key_weights = cute.make_rmem_tensor(8, Float16), cute.make_rmem_tensor(4, Float16)
        cute.autovec_copy(p_fragment(smem, stage, tid)[None, block], p)
        start = weights(smem, stage, HALVES * wg + half, tid)[None, block // 2].iterator + block % 2 * 4
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(4)), key_weights)
        return PBlock(p, key_weights)

    @cute.jit
    def add_by_powers(self, smem, mma: cute.TiledMma, rV: cute.Tensor, acc_o, stage: Int32, wg: Int32, tid: Int32):
        """Adds (P scale power) codes to O; each row's power brings its largest P x scale near 2^P_EXPONENT."""
        for half in cutlass.range_constexpr(HALVES):
            o, gain = wgmma.by_row(acc_o[half]), cute.make_rmem_tensor(2, Float32)
            peaks, largest, power = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
            sPowers = o_powers(smem, half, wg, tid)
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
                power_exponent = softmax.exponent(sPowers[r])
                change = cutlass.min(P_EXPONENT - softmax.exponent(peak) - power_exponent, O_EXPONENT - o_exponent)
                change = cutlass.min(cutlass.max(change, -O_EXPONENT - power_exponent), O_EXPONENT - power_exponent)
                if peak == 0.0:
                    change = Int32(0)
                power[r] = softmax.power_of_two(power_exponent + change)
                # two factors, because one float32 does not hold 2^-200
                gain[r] = softmax.power_of_two(change // 2)
                largest[r] = softmax.power_of_two(change - change // 2)
            cute.arch.sync_warp()  # the four threads of a row have read its power
            if tid % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    sPowers[r] = power[r]
            cute.arch.sync_warp()
            softmax.multiply_rows([acc_o[half]], gain)
            softmax.multiply_rows([acc_o[half]], largest)
            for block in cutlass.range_constexpr(KEY_BLOCKS):
                products = self.products(smem, half, block, stage, wg, tid)
                for e in cutlass.range_constexpr(8):
                    products[e] *= power[e // 2 % 2]
                operand = mma.make_fragment_A(mma.partition_shape_A((WIDE, 16)))
                operand.store(products.load().to(Float16).reshape(operand.shape))
                warpgroup.fence()
                values = rV[None, None, None, HALVES * wg + half, stage]
                wgmma.issue(mma, acc_o[half], operand, values, True, [(0, block)])
                warpgroup.commit_group()
                warpgroup.wait_group(0)

    @cute.jit
    def products(self, smem, half: cutlass.Constexpr, block: cutlass.Constexpr, stage: Int32, wg: Int32, tid: Int32):
        """Returns P x scale of a block of 16 keys: this thread's eight, in the order of the accumulator."""
        tile_scales = key_scales(smem, tiled_mmas().qk.get_slice(tid), stage)
        column_scales = wgmma.by_row(tile_scales[None, None, None, HALVES * wg + half])
        eight, products = cute.make_rmem_tensor(8, Float16), cute.make_rmem_tensor(8, Float32)
        cute.autovec_copy(p_fragment(smem, stage, tid)[None, block], eight)
        for e in cutlass.range_constexpr(8):
            products[e] = eight[e].to(Float32) * column_scales[0, 4 * block + e % 2 + 2 * (e // 4)]
        return products

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, wg: Int32, tid: Int32):
        """Stores a timestamp of a key tile."""
        for w in cutlass.range_constexpr(2):
            self.tracer.stamp(smem.trace.ptr, 2 + w, len(EVENTS[2]) * t + event, edge, wg == w and tid == 0)
