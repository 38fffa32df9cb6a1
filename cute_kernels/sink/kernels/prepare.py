"""First kernel of a backward: it computes statistics of rows, and gradients of the sinks.

A row has L = log2(sum of 2^(score) and 2^(sink)), with scores and sinks in units of log2. Then
    P = 2^(score - L), O = P V, dP = dO V^T, delta = sum_j P_j dP_j = dO . O, dS = P (dP - delta)
The sink enters L alone, with p = 2^(sink - L). So dO . (dO / dsink) = - p delta, and d(sink) = - sum of p delta.
A row that sees no key, or whose sink or log-sum-exp is +inf, has L = +inf here: its P are 0, as its O was. L is also
+inf at positions between the last row of a sequence and the end of its last tile of 128 (views.py defines positions).

Roles (256 threads): a CTA has 128 rows of a head. d / 8 lanes read a row, 16 bytes each. If the caller gives delta,
neither O nor dO is read.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax
from cute_kernels.sink.backward_spec import SinkPrepareSpec
from cute_kernels.sink.kernels import views

THREADS = 256
ROWS = SinkPrepareSpec.rows
TOGETHER = 4  # rows that a thread reads before it uses the first


class SinkPrepareKernel:
    """The kernel that the module's docstring describes."""

    def __init__(self, spec: SinkPrepareSpec):
        self.spec = spec
        self.dtype = views.DTYPES[spec.dtype]

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        sizes = batch, s_q, h_q = tuple(cute.sym_int() for _ in range(3))
        out, d_out = (views.fake_rows(self.dtype, spec.packed, sizes, spec.d) for _ in range(2))
        lse = views.fake_rows(Float32, spec.packed, (batch, s_q, h_q), None)
        sink = make_fake_tensor(Float32, (h_q,), (1,), assumed_align=4)
        parts = make_fake_tensor(Float32, (h_q, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
        cu_q = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4) if spec.packed else None
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        delta = views.fake_rows(Float32, spec.packed, (batch, s_q, h_q), None) if spec.given else None
        return (out, d_out, lse, delta, sink, views.fake_stats(h_q), parts, cu_q, Int64(0), stream)

    @cute.jit
    def __call__(
        self,
        mOut: cute.Tensor,
        mDOut: cute.Tensor,
        mLse: cute.Tensor,
        mDelta: cute.Tensor | None,
        mSink: cute.Tensor,
        mStats: cute.Tensor,
        mParts: cute.Tensor,
        mCuQ: cute.Tensor | None,
        sums: Int64,
        stream: cuda.CUstream,
    ):
        """Launches ceil(s_q / 128) x h_q x batch CTAs, or ceil(positions / 128) x h_q if packed.

        mOut, mDOut  (batch, s_q, h_q, d) or packed (tokens, h_q, d), strides as in the forward
        mLse     (batch, s_q, h_q) or (tokens, h_q) float32 of the forward, without the sink
        mDelta   delta, with the shape and dtype of mLse, or None to compute it
        mSink    (h_q,) float32
        mStats   (2, h_q, positions) float32, contiguous, 128-byte aligned: receives L and delta
        mParts   (h_q, ceil(s_q / 128) x batch), packed (h_q, ceil(positions / 128)) float32: the sum over the last mode
                 is the gradient of mSink
        mCuQ     packed: (batch + 1,) int32; otherwise None
        sums     if fused, address of h_q x positions x d float32, which are set to 0; otherwise not read
        """
        spec = self.spec
        heads = mOut.shape[1 if const_expr(spec.packed) else 2]
        if const_expr(spec.packed):
            grid = [mParts.shape[1], heads, 1]
        else:
            grid = [cute.ceil_div(mOut.shape[1], ROWS), heads, mOut.shape[0]]
        self.kernel(mOut, mDOut, mLse, mDelta, mSink, mStats, mParts, mCuQ, sums).launch(
            grid=grid, block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mOut: cute.Tensor,
        mDOut: cute.Tensor,
        mLse: cute.Tensor,
        mDelta: cute.Tensor | None,
        mSink: cute.Tensor,
        mStats: cute.Tensor,
        mParts: cute.Tensor,
        mCuQ: cute.Tensor | None,
        sums: Int64,
    ):
        spec = self.spec
        lanes = spec.d // 8
        tidx, _, _ = cute.arch.thread_idx()
        index, head, batch = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        part_index = batch * blocks + index
        sPart = SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS // 32))
        if const_expr(spec.packed):
            assert mCuQ is not None
            batch, block = views.block_at(mCuQ, mOut.shape[0], index, ROWS)
            start, s_q = views.span(mCuQ, batch, mOut.shape[0])
        else:
            block, start, s_q = index, Int32(0), mOut.shape[1]
        place = views.position(spec.packed, start, batch, s_q)
        first = block * ROWS
        padded = (s_q + ROWS - 1) & -ROWS
        part = Float32(0.0)
        if (first >= 0) & (first < padded):
            gOut, gDOut, gLse = (views.head_rows(t, spec.packed, start, batch, head) for t in (mOut, mDOut, mLse))
            if const_expr(spec.given):
                assert mDelta is not None
                gDelta = views.head_rows(mDelta, spec.packed, start, batch, head)
            sink = mSink[head] * softmax.LOG2_E
            for group in cutlass.range_constexpr(ROWS * lanes // THREADS // TOGETHER):
                rows = [first + (group * TOGETHER + i) * (THREADS // lanes) + tidx // lanes for i in range(TOGETHER)]
                o, d_o = (cute.make_rmem_tensor((8, TOGETHER), self.dtype) for _ in range(2))
                for i in cutlass.range_constexpr(0 if spec.given else TOGETHER):
                    source = cutlass.min(rows[i], s_q - 1)
                    cute.autovec_copy(cute.local_tile(gOut[source, None], (8,), (tidx % lanes,)), o[None, i])
                    cute.autovec_copy(cute.local_tile(gDOut[source, None], (8,), (tidx % lanes,)), d_o[None, i])
                for i in cutlass.range_constexpr(TOGETHER):
                    delta = Float32(0.0)
                    row = rows[i]
                    if const_expr(spec.given):
                        delta = gDelta[cutlass.min(row, s_q - 1)]
                    else:
                        for c in cutlass.range_constexpr(8):
                            delta += o[c, i].to(Float32) * d_o[c, i].to(Float32)
                        delta = cute.arch.warp_reduction_sum(delta, threads_in_group=lanes)
                    if tidx % lanes == 0 and row < padded:
                        total = Float32.inf
                        if row < s_q:
                            total = self.joined(gLse[row] * softmax.LOG2_E, sink)
                            share = cute.math.exp2(sink - total, fastmath=True)
                            if total == Float32.inf:  # the share may be NaN, and a given delta may be anything
                                share = Float32(0.0)
                                delta = Float32(0.0)
                            part -= share * delta
                        else:
                            delta = Float32(0.0)
                        mStats[0, head, place + row] = total
                        mStats[1, head, place + row] = delta
            if const_expr(spec.fused):
                self.clear(sums, Int64(head) * mStats.shape[2] + place, first, padded, tidx)

        part = cute.arch.warp_reduction_sum(part)
        if tidx % 32 == 0:
            sPart[tidx // 32] = part
        cute.arch.sync_threads()
        if tidx == 0:
            sum_of_block = Float32(0.0)
            for i in cutlass.range_constexpr(THREADS // 32):
                sum_of_block += sPart[i]
            mParts[head, part_index] = sum_of_block

    @cute.jit
    def joined(self, lse: Float32, sink: Float32) -> Float32:
        """Returns log2(2^lse + 2^sink), or +inf if the row sees no key or either argument is +inf."""
        top = cute.arch.fmax(lse, sink)
        total = top + cute.math.log2(
            cute.math.exp2(lse - top, fastmath=True) + cute.math.exp2(sink - top, fastmath=True), fastmath=True
        )
        if lse == -Float32.inf or lse == Float32.inf or sink == Float32.inf:
            total = Float32.inf
        return total

    @cute.jit
    def clear(self, sums: Int64, row: Int64, first: Int32, padded: Int32, tidx: Int32):
        """Sets the sums of dq of rows `first` to `first` + 127, but only below `padded`, to 0."""
        d = self.spec.d
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        begin = sums + (row + first) * (4 * d)
        pieces = cutlass.min(padded - first, ROWS) * (d // 4)
        for i in cutlass.range(tidx, pieces, THREADS, unroll=1):
            target = cute.make_ptr(Float32, begin + 16 * Int64(i), AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))
