"""Clocks to convert a token: codes, scales and rope part from shared memory, bf16 in the layout of wgmma back to it."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from bench.units import tile_map
from bench.units.spec import NOPE, QK, ROPE, ROW_BYTES, TILE, ConvertSpec

STAGES, PASSES = 2, 4
ROPE_AT, SCALE_AT, RAW_BYTES = TILE * NOPE, TILE * (NOPE + 2 * ROPE), TILE * ROW_BYTES


def _storage():
    layout = tile_map.tile_layout(TILE, STAGES)

    @cute.struct
    class Shared:
        tile: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024]
        raw: cute.struct.Align[cute.struct.MemRange[Uint8, RAW_BYTES], 128]

    return Shared


class ConvertKernel:
    """One warpgroup a CTA, one CTA an SM. bf16 tiles have two stages, taken in turn, and threads meet after each tile:
    so no turn's loads or stores can be left out or moved. Reading the raw tile takes 5 clocks a token of the port of
    shared memory, in addition to the conversion.
    """

    def __init__(self, spec: ConvertSpec):
        """The spec leaves nothing to choose."""

    def fake_arguments(self) -> tuple:
        """The tile's rows; per CTA what the last turn left, and clocks; turns."""
        ctas = cute.sym_int()
        raw = make_fake_tensor(Uint8, (TILE, ROW_BYTES), (ROW_BYTES, 1), assumed_align=16)
        out = make_fake_tensor(BFloat16, (ctas, TILE, QK), (TILE * QK, QK, 1), assumed_align=16)
        cycles = make_fake_tensor(Int64, (ctas,), (1,), assumed_align=8)
        return raw, out, cycles, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, mRaw: cute.Tensor, mOut: cute.Tensor, mCycles: cute.Tensor, turns: Int32, stream: cuda.CUstream):
        self.kernel(mRaw, mOut, mCycles, turns).launch(
            grid=[mOut.shape[0], 1, 1],
            block=[128, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            max_number_threads=[384, 1, 1],  # 168 registers: without a cap ptxas hoists until it spills
        )

    @cute.kernel
    def kernel(self, mRaw: cute.Tensor, mOut: cute.Tensor, mCycles: cute.Tensor, turns: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = SmemAllocator().allocate(_storage())
        sRaw = cute.make_tensor(smem.raw.data_ptr(), cute.make_layout(RAW_BYTES))
        for i in cutlass.range(tidx, TILE * ROW_BYTES, 128):
            row, byte = i // ROW_BYTES, i % ROW_BYTES
            # codes, rope parts and scales of all rows apart: pitches that are multiples of all banks
            place = row * NOPE + byte
            if byte >= NOPE:
                place = SCALE_AT + row * 16 + byte - NOPE
            if byte >= NOPE + 16:
                place = ROPE_AT + row * 2 * ROPE + byte - NOPE - 16
            sRaw[place] = mRaw[row, byte]
        cute.arch.sync_threads()

        row, half, quarter = tile_map.lanes(tidx)
        segment = 64 * half + 16 * quarter
        even, odd, rope = tile_map.targets(smem.tile.data_ptr(), tidx, TILE, PASSES, STAGES)
        raw = cute.make_rmem_tensor((16, 6), Uint8)
        start = cute.arch.clock64()
        for t in cutlass.range(turns, unroll=1):
            stage = t % STAGES
            for p in cutlass.range_constexpr(PASSES):
                r = row + 16 * p
                places = (*(r * NOPE + segment + 128 * j for j in range(4)), ROPE_AT + r * 2 * ROPE + segment)
                for j in cutlass.range_constexpr(5):
                    cute.autovec_copy(self.bytes16(smem.raw.data_ptr(), places[j]), raw[None, j])
                cute.autovec_copy(self.bytes16(smem.raw.data_ptr(), SCALE_AT + r * 16), raw[None, 5])
                parts = [target[None, None, p, stage] for target in (even, odd, rope)]
                tile_map.convert(raw, parts[0], parts[1], parts[2][None, 0])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
        if tidx == 0:
            mCycles[cta] = cute.arch.clock64() - start

        layout = tile_map.tile_layout(TILE, STAGES)
        sTile = smem.tile.get_tensor(layout.outer, swizzle=layout.inner)
        for i in cutlass.range(tidx, TILE * QK, 128):
            mOut[cta, i // QK, i % QK] = sTile[i // QK, i % QK, (turns + STAGES - 1) % STAGES]

    def bytes16(self, pointer: cute.Pointer, offset) -> cute.Tensor:
        """16 bytes of a raw tile."""
        return cute.make_tensor(pointer + cute.assume(offset, divby=16), cute.make_layout(16))
