"""Sums of e4m3 products on the tensor core, as they leave it: A B^T of 64 x 64 in four k-steps of 32 columns."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from bench.units.spec import ACC_COLUMNS, ACC_STEP, TILE, AccumulatorSpec
from cute_kernels.device import wgmma
from cute_kernels.mla.kernels.smem import line_offset

THREADS = 128
CHUNK = 16  # bytes that stay together in the swizzle
CHUNKS = ACC_COLUMNS // CHUNK


def _layouts():
    row, tile = LayoutEnum.ROW_MAJOR, (TILE, TILE, ACC_COLUMNS)
    return sm90.make_smem_layout_a(row, tile, Float8E4M3FN, 1), sm90.make_smem_layout_b(row, tile, Float8E4M3FN, 1)


def _storage():
    layout_a, layout_b = _layouts()

    @cute.struct
    class Shared:
        a: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(layout_a)], 1024]
        b: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(layout_b)], 1024]

    return Shared


class AccumulatorKernel:
    """One warpgroup, one tile: its accumulator starts at zero and is stored after the last k-step."""

    def __init__(self, spec: AccumulatorSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))

    def fake_arguments(self) -> tuple:
        """Bytes of A and B; the sums."""
        a, b = (make_fake_tensor(Uint8, (TILE, ACC_COLUMNS), (ACC_COLUMNS, 1), assumed_align=16) for _ in range(2))
        sums = make_fake_tensor(Float32, (TILE, TILE), (TILE, 1), assumed_align=16)
        return a, b, sums, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mSums: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mA, mB, mSums).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mSums: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator().allocate(_storage())
        layout_a, layout_b = _layouts()
        self.fill(mA, smem.a.data_ptr(), tidx)
        self.fill(mB, smem.b.data_ptr(), tidx)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.sync_threads()
        k, shared = OperandMajorMode.K, warpgroup.OperandSource.SMEM
        operation = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (TILE, TILE, ACC_STEP), shared, k, k)
        mma = cute.make_tiled_mma(operation)
        thread = mma.get_slice(tidx)
        sA = smem.a.get_tensor(layout_a.outer, swizzle=layout_a.inner, dtype=Float8E4M3FN)
        sB = smem.b.get_tensor(layout_b.outer, swizzle=layout_b.inner, dtype=Float8E4M3FN)
        rA = mma.make_fragment_A(thread.partition_A(sA))[None, None, None, 0]
        rB = mma.make_fragment_B(thread.partition_B(sB))[None, None, None, 0]
        acc = cute.make_rmem_tensor(mma.partition_shape_C((TILE, TILE)), Float32)
        acc.fill(0.0)
        warpgroup.fence()
        wgmma.issue(mma, acc, rA, rB, False, [(step, step) for step in range(ACC_COLUMNS // ACC_STEP)])
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.autovec_copy(acc, thread.partition_C(mSums))

    @cute.jit
    def fill(self, codes: cute.Tensor, pointer: cute.Pointer, tidx: Int32):
        """Copies rows of 128 bytes; their 16-byte chunks change places, as the 128-byte swizzle of wgmma has them.

        A tensor of e4m3 that is recast to bytes has no swizzle any more: chunk c of row i would be read as c ^ (i % 8).
        """
        chunk = cute.make_rmem_tensor(CHUNK, Uint8)
        for i in cutlass.range(tidx, TILE * ACC_COLUMNS // CHUNK, THREADS):
            row, column = i // CHUNKS, i % CHUNKS
            place = cute.assume(ACC_COLUMNS * row + CHUNK * column, divby=CHUNK)
            target = cute.assume(line_offset(row, column), divby=CHUNK)
            cute.autovec_copy(cute.make_tensor(codes.iterator + place, cute.make_layout(CHUNK)), chunk)
            cute.autovec_copy(chunk, cute.make_tensor(pointer + target, cute.make_layout(CHUNK)))
