"""Clocks to gather and convert a row of a tile, with so many rows in flight."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from bench.units import tile_map
from bench.units.spec import QK, ROW_BYTES, TILE, GatherSpec
from cute_kernels.device.pipeline import Pipeline, initialize
from fp8_mla.formats import V3_2

STAGES = 2


def _storage(rows: int):
    layout = tile_map.tile_layout(rows, STAGES)

    @cute.struct
    class Shared:
        tile: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout)], 1024]
        tile_full: cute.struct.MemRange[Int64, STAGES]
        tile_empty: cute.struct.MemRange[Int64, STAGES]

    return Shared


class GatherKernel:
    """Warpgroup 0 produces, warpgroup 1 takes tiles and does nothing with them. One CTA an SM.

    As a piece of a row is converted, its registers receive the same piece of the next tile: so many rows are always in
    flight. With 32 rows the CTAs 2i and 2i + 1 make one half each of the same tiles, and exchange nothing.
    """

    def __init__(self, spec: GatherSpec):
        self.rows = spec.rows
        self.tiles = Pipeline("tile", STAGES, producers=128, consumers=128)  # each producer fences first

    def fake_arguments(self) -> tuple:
        """Rows to gather; the list of each pair of CTAs, two tiles longer than the turns; what the last turn left,
        and clocks of each CTA; turns.
        """
        ctas = cute.sym_int()
        cache = make_fake_tensor(Uint8, (cute.sym_int(), ROW_BYTES), (ROW_BYTES, 1), assumed_align=16)
        index = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
        shape = (self.rows, QK)
        out = make_fake_tensor(BFloat16, (ctas, *shape), (self.rows * QK, QK, 1), assumed_align=16)
        cycles = make_fake_tensor(Int64, (ctas,), (1,), assumed_align=8)
        return cache, index, out, cycles, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mIndex: cute.Tensor,
        mOut: cute.Tensor,
        mCycles: cute.Tensor,
        turns: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(mX, mIndex, mOut, mCycles, turns).launch(
            grid=[mOut.shape[0], 1, 1],
            block=[256, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            max_number_threads=[384, 1, 1],  # 168 registers: without a cap ptxas hoists until it spills
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mIndex: cute.Tensor,
        mOut: cute.Tensor,
        mCycles: cute.Tensor,
        turns: Int32,
    ):
        rows = self.rows
        passes = const_expr(rows // 16)
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(_storage(rows))
        if tidx == 0:
            initialize(smem, (self.tiles,))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp_idx < 4:
            row, half, quarter = tile_map.lanes(tidx)
            segment = 64 * half + 16 * quarter
            first = row + (cta % 2 * 32 if const_expr(rows == 32) else 0)
            entries = mIndex[cta // 2, None]
            even, odd, rope = tile_map.targets(smem.tile.data_ptr(), tidx, rows, passes, STAGES)
            raw = cute.make_rmem_tensor((16, 6, passes), Uint8)
            index = cute.make_rmem_tensor(passes, Int32)  # of the rows to gather next
            for p in cutlass.range_constexpr(passes):
                self.gather(mX, entries[first + 16 * p], segment, raw[None, None, p])
                index[p] = entries[TILE + first + 16 * p]
            start = cute.arch.clock64()
            for t in cutlass.range(turns, unroll=1):
                self.tiles.acquire(smem, t)
                stage = self.tiles.index(t)
                for p in cutlass.range_constexpr(passes):
                    parts = [target[None, None, p, stage] for target in (even, odd, rope)]
                    tile_map.convert(raw[None, None, p], parts[0], parts[1], parts[2][None, 0])
                    self.gather(mX, index[p], segment, raw[None, None, p])
                    index[p] = entries[(t + 2) * TILE + first + 16 * p]
                cute.arch.fence_proxy("async.shared", space="cta")  # as for wgmma
                self.tiles.arrive(smem, t)
            if tidx == 0:
                mCycles[cta] = cute.arch.clock64() - start
        else:
            tid = tidx - 128
            layout = tile_map.tile_layout(rows, STAGES)
            sTile = smem.tile.get_tensor(layout.outer, swizzle=layout.inner)
            for t in cutlass.range(turns, unroll=1):
                self.tiles.wait(smem, t)
                if t == turns - 1:
                    for i in cutlass.range(tid, rows * QK, 128):
                        mOut[cta, i // QK, i % QK] = sTile[i // QK, i % QK, self.tiles.index(t)]
                self.tiles.release(smem, t)

    @cute.jit
    def gather(self, mX: cute.Tensor, row: Int32, segment: Int32, raw: cute.Tensor):
        """Starts the loads of a thread's pieces of a row: four of codes, one of the rope part, the scales."""
        load = cute.make_copy_atom(CopyG2ROp(), Uint8, num_bits_per_copy=128)
        # 64-bit: row x 656 passes 2^31
        address = mX.iterator.toint() + Int64(row) * ROW_BYTES
        pointer = cute.make_ptr(Uint8, address, AddressSpace.gmem, assumed_align=16)
        codes = [segment + V3_2.quant_tile * tile for tile in range(V3_2.num_scales)]
        places = (*codes, segment + V3_2.field("rope").offset, Int32(V3_2.scales.offset))
        for j in cutlass.range_constexpr(6):
            piece = cute.make_tensor(pointer + cute.assume(places[j], divby=16), cute.make_layout(16))
            cute.copy(load, piece, raw[None, j])
