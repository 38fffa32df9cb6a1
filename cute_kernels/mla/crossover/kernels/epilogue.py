"""The epilogue of the crossover kernel: O of the PV warpgroups to global memory, as a result or as a partial."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import softmax, wgmma
from cute_kernels.merge.spec import BLOCK_SCALE_VALUES
from cute_kernels.mla.crossover.kernels.smem import P_SHIFT, RowState
from cute_kernels.mla.crossover.spec import WEIGHT, MlaCrossoverSpec
from cute_kernels.mla.kernels.arguments import Results
from cute_kernels.mla.kernels.scheduler import WorkTile
from cute_kernels.mla.kernels.tile import QUANT_TILE
from cute_kernels.mla.spec import WIDE

HALVES = 2  # quant tiles of a PV warpgroup, which has 256 of the 512 columns
BLOCK_SCALES = QUANT_TILE // BLOCK_SCALE_VALUES  # fp16 block scales of a quant tile in a partial


class Epilogue:
    """Device code for the PV warpgroups; `wg` is 0 or 1, `tid` counts within a warpgroup."""

    def __init__(self, spec: MlaCrossoverSpec):
        self.spec = spec

    @cute.jit
    def store(self, acc_o, rows: RowState, results: Results, work: WorkTile, wg: Int32, tid: Int32):
        """Normalizes O, with the sink, and stores it as bf16; stores the LSE.

        O comes from registers: all shared memory already belongs to the next work tile, whose Q is in flight.
        """
        row_max, row_sum = rows
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
                    lse = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
                    mLse[batch_idx, query_idx, head] = softmax.result_lse(lse, self.spec.inf_if_empty)
        self.normalize(acc_o, row_sum, denominator)
        self.store_rows(acc_o, mOut[batch_idx, query_idx, None, None], mSink.shape[0], head_block, wg, tid)

    @cute.jit
    def store_partial(self, acc_o, rows: RowState, results: Results, work: WorkTile, wg: Int32, tid: Int32):
        """Normalizes O without the sink and stores it as float16, with block scales and the LSE, for the merge.

        The 128 numbers of a row that four lanes hold share a block scale, which is stored once per 64 of them.
        """
        row_max, row_sum = rows
        mSink, _, _, partials = results
        mPartial, mPartialLse, mBlockScales = partials
        head_block, split_idx, query_idx, batch_idx = work
        denominator = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            denominator[r] = row_sum[r]
            head = head_block * WIDE + wgmma.row(tid, r)
            if head < mSink.shape[0] and wg == 0 and tid % 4 == 0:
                lse = softmax.log_sum_exp(row_max[r] - P_SHIFT, row_sum[r])
                mPartialLse[split_idx, batch_idx, query_idx, head] = lse
        self.normalize(acc_o, row_sum, denominator)
        for half in cutlass.range_constexpr(HALVES):
            o, inverse = wgmma.by_row(acc_o[half]), cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                peak = Float32(0.0)
                for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    peak = cute.arch.fmax(peak, cute.arch.fmax(o[r, c], -o[r, c]))
                for step in cutlass.range_constexpr(2):
                    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1 << step))
                block_scale = softmax.block_scale(peak)
                inverse[r] = 1.0 / block_scale
                head = head_block * WIDE + wgmma.row(tid, r)
                if head < mSink.shape[0] and tid % 4 < BLOCK_SCALES:
                    first = BLOCK_SCALES * (HALVES * wg + half)
                    mBlockScales[split_idx, batch_idx, query_idx, head, first + tid % 4] = block_scale
            softmax.multiply_rows([acc_o[half]], inverse)
        heads = mPartial[split_idx, batch_idx, query_idx, None, None]
        self.store_rows(acc_o, heads, mSink.shape[0], head_block, wg, tid)

    @cute.jit
    def normalize(self, acc_o, row_sum: cute.Tensor, denominator: cute.Tensor):
        """Divides O by WEIGHT and by `denominator`, row by row; rows without keys become 0."""
        for r in cutlass.range_constexpr(2):
            denominator[r] *= WEIGHT
        softmax.normalize(acc_o, row_sum, denominator)

    @cute.jit
    def store_rows(self, acc_o, heads: cute.Tensor, h_q: Int32, head_block: Int32, wg: Int32, tid: Int32):
        """Rounds O to the dtype of `heads` (h_q, 512) and stores it there."""
        for half in cutlass.range_constexpr(HALVES):
            rounded = cute.make_rmem_tensor(acc_o[half].shape, heads.element_type)
            rounded.store(acc_o[half].load().to(heads.element_type))
            by_row = wgmma.by_row(rounded)
            for r in cutlass.range_constexpr(2):
                head = head_block * WIDE + wgmma.row(tid, r)
                self.store_row(by_row[r, None], heads, head, h_q, QUANT_TILE * (HALVES * wg + half), tid)

    @cute.jit
    def store_row(self, pairs: cute.Tensor, heads: cute.Tensor, head: Int32, h_q: Int32, first: Int32, tid: Int32):
        """Stores 128 16-bit numbers of a row, 16 bytes at a time.

        Each of four lanes has two of every eight numbers; shuffles give each lane one whole block of eight out of four.
        With stores of 4 bytes the 64 KB of a work tile would occupy the load and store units for 10,000 clocks, while
        everything else on the SM waits.
        """
        quarter, number = tid % 4, cute.size(pairs) // 2
        odd, upper = quarter % 2 == 1, quarter // 2 == 1
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
                pointer = heads[head, None].iterator + cute.assume(first + 8 * (i + quarter), divby=8)
                cute.autovec_copy(
                    cute.recast_tensor(block, heads.element_type), cute.make_tensor(pointer, cute.make_layout(8))
                )
