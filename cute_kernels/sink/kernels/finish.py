"""Last kernel of a fused backward: scales the float32 sums of dq and rounds them.

The sums of 64 rows, 64 x d float32, have the order of the accumulators of m64n64k16. Thread t of a warpgroup has four
values of columns 8j to 8j + 7, which are at (j, t, 0) to (j, t, 3). So rows 16w + g and 16w + g + 8 of these columns
are 64 contiguous bytes.

Roles (256 threads): a CTA has 64 rows of a head. d / 8 lanes write a row, 16 bytes each.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.sink.backward_spec import QUERIES, SinkFinishSpec
from cute_kernels.sink.kernels import views

THREADS = 256


class SinkFinishKernel:
    """The kernel that the module's docstring describes."""

    def __init__(self, spec: SinkFinishSpec):
        self.spec = spec
        self.dtype = views.DTYPES[spec.dtype]

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        d_q = views.fake_rows(self.dtype, spec.packed, tuple(cute.sym_int() for _ in range(3)), spec.d)
        cu_q = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4) if spec.packed else None
        numbers = (Int64(0), Int32(64), Float32(1.0))
        return (d_q, cu_q, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mDQ: cute.Tensor,
        mCuQ: cute.Tensor | None,
        sums: Int64,
        positions: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launches ceil(s_q / 64) x h_q x batch CTAs, or positions / 64 x h_q if packed.

        mDQ        (batch, s_q, h_q, d) or packed (tokens, h_q, d); every row is written
        mCuQ       packed: (batch + 1,) int32; otherwise None
        sums       address of h_q x positions x d float32 that SinkBackwardKernel has added up
        positions  positions of a head in the sums: mStats.shape[2] of the other kernels
        """
        spec = self.spec
        heads = mDQ.shape[1 if const_expr(spec.packed) else 2]
        if const_expr(spec.packed):
            grid = [positions // QUERIES, heads, 1]
        else:
            grid = [cute.ceil_div(mDQ.shape[1], QUERIES), heads, mDQ.shape[0]]
        self.kernel(mDQ, mCuQ, sums, positions, softmax_scale).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mDQ: cute.Tensor,
        mCuQ: cute.Tensor | None,
        sums: Int64,
        positions: Int32,
        softmax_scale: Float32,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        if const_expr(spec.packed):
            assert mCuQ is not None
            batch, block = views.block_at(mCuQ, mDQ.shape[0], block, QUERIES)
            start, s_q = views.span(mCuQ, batch, mDQ.shape[0])
        else:
            start, s_q = Int32(0), mDQ.shape[1]
        first = block * QUERIES
        if (first >= 0) & (first < s_q):
            gDQ = views.head_rows(mDQ, spec.packed, start, batch, head)
            row = Int64(head) * positions + views.position(spec.packed, start, batch, s_q) + first
            tile = sums + row * (4 * spec.d)
            pieces = spec.d // 8  # pieces of 8 columns
            for i in cutlass.range_constexpr(QUERIES // 2 * pieces // THREADS):
                unit = i * THREADS + tidx
                j, pair = unit % pieces, unit // pieces  # pair 8w + g: rows 16w + g and 16w + g + 8
                address = tile + 16 * (128 * j + 4 * pair)
                source = cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=16)
                values = cute.make_rmem_tensor((2, 2, 4), Float32)  # (column of two, row of two, lane)
                cute.autovec_copy(
                    cute.make_tensor(source, cute.make_layout(16)),
                    cute.make_tensor(values.iterator, cute.make_layout(16)),
                )
                for r in cutlass.range_constexpr(2):
                    row_of_pair = first + pair // 8 * 16 + pair % 8 + 8 * r
                    rounded = cute.make_rmem_tensor(8, self.dtype)
                    for c in cutlass.range_constexpr(8):
                        rounded[c] = (values[c % 2, r, c // 2] * softmax_scale).to(self.dtype)
                    if row_of_pair < s_q:
                        cute.autovec_copy(rounded, cute.local_tile(gDQ[row_of_pair, None], (8,), (j,)))
