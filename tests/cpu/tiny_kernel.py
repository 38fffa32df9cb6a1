"""The smallest kernel, and what ptxas and the disassembler make of its faults."""

import os

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from tests.cpu.tiny_spec import TinySpec


class TinyKernel:
    """y = x * alpha. Adds a line with its process id to $TINY_KERNEL_LOG, so that tests can count compilations."""

    def __init__(self, spec: TinySpec) -> None:
        self.width = spec.width
        self.fault = spec.fault
        if log := os.environ.get("TINY_KERNEL_LOG"):
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, alpha: Float32, stream: cuda.CUstream) -> None:
        self._kernel(mX, mY, alpha).launch(grid=[mX.shape[0], 1, 1], block=[self.width, 1, 1], stream=stream)

    @cute.kernel
    def _kernel(self, mX: cute.Tensor, mY: cute.Tensor, alpha: Float32) -> None:
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.fault == "spill"):
            # registers cannot be indexed at run time: a table read and written by an index lies in local memory
            table = cute.make_rmem_tensor(64, Float32)
            for i in cutlass.range(64, unroll=1):
                table[(i * tid) % 64] = mX[row, i] * alpha
            mY[row, tid] = table[tid % 61]
        elif cutlass.const_expr(self.fault == "setmaxnreg"):
            # 32 threads are no warpgroup: ptxas drops the instruction and warns (C7508)
            cute.arch.setmaxregister_decrease(24)
            mY[row, tid] = mX[row, tid] * alpha
        else:
            mY[row, tid] = mX[row, tid] * alpha

    def fake_arguments(self) -> tuple:
        rows = cute.sym_int()
        mX, mY = (
            make_fake_tensor(Float32, (rows, self.width), (cute.sym_int64(divisibility=4), 1), assumed_align=16)
            for _ in range(2)
        )
        return mX, mY, 1.0, make_fake_stream(use_tvm_ffi_env_stream=True)
