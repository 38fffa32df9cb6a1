"""The epilogue of the decode kernel: the teams of a CTA add up their results, and the CTA stores a whole sequence."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import softmax
from cute_kernels.gqa.codes import element
from cute_kernels.gqa.kernels import rotation
from cute_kernels.gqa.kernels.arguments import QueryBlock, Tensors
from cute_kernels.gqa.kernels.fragments import Fragments, SoftmaxState, Thread
from cute_kernels.gqa.kernels.pipelines import NamedBarrier
from cute_kernels.gqa.kernels.smem import (
    O_SCALE,
    SINK,
    SmemViews,
    column_constants,
    warp_o_tensor,
    warp_softmax_tensor,
)
from cute_kernels.gqa.spec import GqaDecodeSpec


class Epilogue(Fragments):
    """Device code for all consumer threads; a thread has four neighbours of d (a vector) of some columns."""

    def __init__(self, spec: GqaDecodeSpec):
        super().__init__(spec)
        self.threads = 32 * spec.warps
        self.vectors = spec.d // 4  # vectors of a column
        self.rounds = -(-spec.columns * self.vectors // self.threads)

    @cute.jit
    def gather_warps(self, state: SoftmaxState, smem: SmemViews, thread: Thread):
        """Writes every warp's part of O, and every team's row_max and row_sum, into shared memory."""
        spec = self.spec
        w, lane = thread.team, thread.lane
        acc_o, row_max, row_sum, zeros = state
        g, t = lane // 4, lane % 4
        stores_softmax = g == 0
        if const_expr(spec.d_split > 1):
            stores_softmax = lane + 32 * thread.part < 4
        sSoftmax = warp_softmax_tensor(spec, smem)
        for i in cutlass.range_constexpr(self.thread_columns):
            for step in cutlass.range_constexpr(3):
                row_sum[i] += cute.arch.shuffle_sync_bfly(row_sum[i], 4 << step)
                if const_expr(spec.rotated):
                    zeros[i] += cute.arch.shuffle_sync_bfly(zeros[i], 4 << step)
            if stores_softmax:
                n = 8 * (i // 2) + 2 * t + i % 2
                sSoftmax[n, w, 0] = row_max[i]
                sSoftmax[n, w, 1] = row_sum[i]
        sO = warp_o_tensor(spec, smem)
        for i in cutlass.range_constexpr(self.thread_columns):
            n = 8 * (i // 2) + 2 * t + i % 2
            for m in cutlass.range_constexpr(self.d // 16):
                for e in cutlass.range_constexpr(2):
                    o = acc_o[m][i // 2][2 * e + i % 2]
                    if const_expr(spec.rotated):
                        o -= zeros[i]
                        if const_expr(spec.d == 256):  # the stage of `unrotate` between vectors of two warps
                            other = acc_o[m ^ 8][i // 2][2 * e + i % 2] - zeros[i]
                            o = o + other if const_expr(m < 8) else other - o
                    row = self.row_of_o(m, g, e)
                    if const_expr(spec.d_split > 1):
                        row += self.d * thread.part
                    sO[row, n, w] = o
        self.sync()

    @cute.jit
    def store(self, smem: SmemViews, tensors: Tensors, constants: cute.Pointer, query: QueryBlock, tidx: Int32):
        """Stores the result of a sequence that only this CTA has read."""
        spec = self.spec
        b, kv_head, block, ratio, s_q = query
        mOut, mLse = tensors.mOut, tensors.mLse
        sConstants = column_constants(spec, constants)
        for i in cutlass.range_constexpr(self.rounds):
            n, vector = self.vector_of(tidx, i)
            row = block * spec.columns + n
            if n < spec.columns and row < ratio.divisor * s_q:
                token, r = divmod(row, ratio)
                head = kv_head * ratio.divisor + r
                acc, row_max, row_sum = self.merge_warps(smem, n, vector)
                self.unrotate(acc, vector)
                factor = self.normalization(row_max, row_sum, sConstants[n, SINK]) * sConstants[n, O_SCALE]
                self.write(mOut[b, token, head, None], acc, factor, vector)
                if vector == 0:
                    mLse[b, token, head] = softmax.log_sum_exp(row_max, row_sum)

    # ---- what storing and merging share

    def sync(self):
        """Waits for all consumer threads."""
        cute.arch.barrier(barrier_id=NamedBarrier.CONSUMERS, number_of_threads=self.threads)

    def vector_of(self, tidx, i: int):
        """Returns (column, vector of the column) that a thread has in round i."""
        index = tidx + i * self.threads
        return index // self.vectors, index % self.vectors

    @cute.jit
    def merge_warps(self, smem: SmemViews, n: Int32, vector: Int32):
        """Returns (a vector of O, row_max, row_sum) of a column over all teams."""
        spec = self.spec
        sSoftmax = warp_softmax_tensor(spec, smem)
        row_max, row_sum = sSoftmax[n, 0, 0], Float32(0.0)
        for w in cutlass.range_constexpr(1, spec.teams):
            row_max = cute.arch.fmax(row_max, sSoftmax[n, w, 0])
        acc, other = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        for w in cutlass.range_constexpr(spec.teams):
            weight = softmax.rescaling(sSoftmax[n, w, 0], row_max)
            row_sum += sSoftmax[n, w, 1] * weight
            cute.autovec_copy(self._vector(smem, n, vector, w), other)
            for c in cutlass.range_constexpr(4):
                acc[c] += other[c] * weight
        return acc, row_max, row_sum

    @cute.jit
    def sum_of_warps(self, smem: SmemViews, n: Int32, vector: Int32, warps) -> cute.Tensor:
        """Returns a vector of a column, added up over the O of the first `warps` teams."""
        acc, other = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        for w in cutlass.range(warps, unroll=self.spec.teams):
            cute.autovec_copy(self._vector(smem, n, vector, w), other)
            for c in cutlass.range_constexpr(4):
                acc[c] += other[c]
        return acc

    def _vector(self, smem: SmemViews, n: Int32, vector: Int32, w) -> cute.Tensor:
        """Returns a vector of a column in the O of a team."""
        offset = cute.assume((w * self.spec.columns + n) * self.spec.warp_o_stride + 4 * vector, divby=4)
        return cute.make_tensor(smem.warp_o + offset, cute.make_layout(4))

    @cute.jit
    def unrotate(self, acc: cute.Tensor, vector: Int32):
        """Multiplies a vector, four elements per thread across neighbouring lanes, by D H.

        With d 256 a warp has half of it, and `gather_warps` has added up the halves. Does nothing if V is not rotated.
        """
        if const_expr(self.spec.rotated):
            rotation.hadamard(acc, vector, min(self.vectors, 32))
            rotation.flip_signs(acc, vector, self.spec.d)

    @cute.jit
    def normalization(self, row_max: Float32, row_sum: Float32, sink: Float32) -> Float32:
        """Returns 1 / the denominator, sink included; 0 without keys."""
        denominator = row_sum + cute.math.exp2(sink * softmax.LOG2_E - softmax.finite(row_max), fastmath=True)
        return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(denominator))

    @cute.jit
    def write(self, row: cute.Tensor, acc: cute.Tensor, factor: Float32, vector: Int32):
        """Writes a vector times a factor into a row of the output."""
        dtype = element(self.spec.q_dtype)
        rounded = cute.make_rmem_tensor(4, dtype)
        rounded.store((acc.load() * factor).to(dtype))
        pointer = row.iterator + cute.assume(4 * vector, divby=4)
        cute.autovec_copy(rounded, cute.make_tensor(pointer, cute.make_layout(4)))
