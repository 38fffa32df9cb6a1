"""The producer warpgroup where heads are columns: copies rows of the cache into shared memory as they are."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.column_tile_kernel import ROPE_BYTES, stages, swizzle
from cute_kernels.mla.find_kernel import KeyFinder
from cute_kernels.mla.producer_kernel import GROUP, GROUPS, NOPE
from cute_kernels.mla.spec import ROLES, TOKENS_PER_TILE, MlaDecodeSpec

ROWS = 4  # of a warp in one step, eight lanes each
CHUNK = 16  # bytes of an asynchronous copy


class RowGatherer:
    """Device code for 128 threads, a warp for 16 rows of a tile: no byte of a row passes through a register.

    Copies are asynchronous, and their end arrives on the barrier of the stage, so all free stages are on their way.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.keys = KeyFinder(spec)
        self.stages = stages(spec.heads)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def fill(
        self,
        smem,
        mKV: cute.Tensor,
        zero_row: Int64,
        entries: cute.Tensor,
        begin: Int32,
        limit: Int32,
        done: Int32,
        count: Int32,
        page_divisor,
        tidx: Int32,
    ):
        """Fills `count` stages with the keys at positions `begin` and on; those at `limit` and beyond are masked.

        `done` stages have been filled before. Each lane finds one row, its entry of the index or block table a tile
        ahead, and tells the lanes that copy it.
        """
        copy = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Uint8, num_bits_per_copy=8 * CHUNK
        )
        lane, warp_idx = tidx % 32, tidx // 32
        first, chunk = 16 * warp_idx, lane % 8
        own = first + lane % 16
        position, last = begin + own, limit - 1
        entry = self.keys.read_entry(entries, position, last, page_divisor)
        sMask = cute.make_tensor(smem.mask.data_ptr(), cute.make_layout((TOKENS_PER_TILE, self.stages)))
        codes, rope = smem.codes.data_ptr(), cute.recast_ptr(smem.rope.data_ptr(), dtype=Uint8)
        scale = cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
        for t in cutlass.range(done, done + count, unroll=1):
            stage, use = t % self.stages, t // self.stages
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t, 0, tidx == 0)
            cute.arch.mbarrier_wait(smem.empty.data_ptr() + stage, (use + 1) % 2)
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t, 1, tidx == 0)
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t + 1, 0, tidx == 0)
            valid, row = self.keys.locate(mKV, zero_row, entry, position, last, page_divisor)
            position += TOKENS_PER_TILE
            entry = self.keys.read_entry(entries, position, last, page_divisor)
            address = row.toint()
            low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
            if lane < 16:
                sMask[own, stage] = Float32(0.0) if valid != 0 else -Float32.inf
                at = cute.assume((stage * TOKENS_PER_TILE + own) * (4 * GROUPS), divby=CHUNK)
                self.copy_chunk(copy, address + token_cache.SCALE_OFFSET, scale + at)
            for i in cutlass.range_constexpr(16 // ROWS):
                of_row = ROWS * i + lane // 8
                upper = Int64(cute.arch.shuffle_sync(high, of_row)) << 32
                source = upper | (Int64(cute.arch.shuffle_sync(low, of_row)) & 0xFFFFFFFF)
                source += CHUNK * chunk
                at = stage * TOKENS_PER_TILE + first + of_row
                target = codes + cute.assume(at * NOPE + (chunk ^ swizzle(of_row)) * CHUNK, divby=CHUNK)
                for j in cutlass.range_constexpr(NOPE // GROUP):
                    self.copy_chunk(copy, source + GROUP * j, target + GROUP * j)
                target = rope + cute.assume(at * ROPE_BYTES + (chunk ^ swizzle(of_row)) * CHUNK, divby=CHUNK)
                self.copy_chunk(copy, source + token_cache.ROPE_OFFSET, target)
            cute.arch.cp_async_mbarrier_arrive_noinc(smem.full.data_ptr() + stage)
            cute.arch.mbarrier_arrive(smem.full.data_ptr() + stage)  # the mask
            self.tracer.stamp(smem.trace.ptr, 0, 2 * t + 1, 1, tidx == 0)

    @cute.jit
    def copy_chunk(self, copy: cute.CopyAtom, source: Int64, target: cute.Pointer):
        """Starts the copy of 16 bytes."""
        layout = cute.make_layout(CHUNK)
        pointer = cute.make_ptr(Uint8, source, AddressSpace.gmem, assumed_align=CHUNK)
        cute.copy(copy, cute.make_tensor(pointer, layout), cute.make_tensor(target, layout))
