"""Rows of the cache on their way into shared memory, where heads are columns: copied as they are."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int16, Int32, Int64, Uint8

from cute_kernels.device import token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.column_tile_kernel import ROPE_BYTES, WARPS, rope_stages, row_of_rope, stages, swizzle
from cute_kernels.mla.find_kernel import KeyFinder
from cute_kernels.mla.producer_kernel import GROUP, GROUPS, NOPE
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec
from cute_kernels.mla.work_kernel import DIVISORS, INDEX, LENGTH, OWN, WorkItems

ROWS = 4  # of a warp in one step, eight lanes each
CHUNK = 16  # bytes of an asynchronous copy


class RowGatherer:
    """Device code for 128 threads, a warp for 16 rows of a tile: no byte of a row passes through a register.

    Copies are asynchronous, and their end arrives on the barrier of the stage. Each lane finds one row, its entry of
    the index or block table a tile ahead, and tells the lanes that copy it.

    `cursor` says what comes next: (item behind that of the next tile, tiles left of its own, position of this lane's
    key, last position, address of the item's entries, entry, length of the item behind, tiles copied so far). `table`
    is that of WorkItems.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.keys = KeyFinder(spec)
        self.items = WorkItems(spec)
        self.stages, self.ropes = stages(spec.heads), rope_stages(spec.heads)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: tuple, _mSink, _rank, tid: Int32):
        """Rows of all items of this CTA, where a warpgroup does nothing else."""
        cursor = self.start(table, tid)
        while cursor[1] > 0:
            cursor = self.step(smem, table, cursor, tid)

    @cute.jit
    def start(self, table: tuple, tid: Int32):
        """The cursor at the first tile of this CTA."""
        first = table[OWN][0]
        length = self.items.length_of(self.items.locate(first, table), table[LENGTH])
        zero = Int32(0)
        return self.advance(table, (first, zero, zero, zero, Int64(0), zero, length, zero), tid)

    @cute.jit
    def advance(self, table: tuple, cursor: tuple, tid: Int32):
        """Goes on to an item that has keys, if there is none left of this one, and starts to load the next entry."""
        item, left, position, last, address, entry, length, copied = cursor
        _, items, step = table[OWN][:3]
        while left == 0 and item < items:
            work = self.items.locate(item, table)
            begin, limit, left, _ = self.items.keys_of(item, work, length, table)
            address = self.items.entries(work, table[INDEX]).iterator.toint()
            position, last = begin + tid // 32 * 16 + tid % 16, limit - 1
            item += step
            following = self.items.locate(cutlass.min(item, items - 1), table)
            length = self.items.length_of(following, table[LENGTH])  # an item ahead: it takes some 1000 clocks to come
        if left > 0:
            pointer = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)
            entries = cute.make_tensor(pointer, cute.make_layout(1 << 30))  # more than there are
            entry = self.keys.read_entry(entries, position, last, table[DIVISORS][0])
        return item, left, position, last, address, entry, length, copied

    @cute.jit
    def step(self, smem, table: tuple, cursor: tuple, tid: Int32):
        """Starts the copies of the next tile, if there is one, once its stage is free; returns the new cursor."""
        mKV, zero_row, page_divisor = table[0], table[3], table[DIVISORS][0]
        item, left, position, last, entries, entry, length, copied = cursor
        sValid = cute.recast_tensor(smem.valid.get_tensor(cute.make_layout(2 * self.stages)), Int16)
        codes, rope = smem.codes.data_ptr(), cute.recast_ptr(smem.rope.data_ptr(), dtype=Uint8)
        scale = cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
        if left > 0:
            stage, use = copied % self.stages, copied // self.stages
            lane, warp_idx = tid % 32, tid // 32
            first, chunk = 16 * warp_idx, lane % 8
            self.stamp(smem, copied, 0, 0, tid)
            cute.arch.mbarrier_wait(smem.empty.data_ptr() + stage, (use + 1) % 2)
            self.stamp(smem, copied, 0, 1, tid)
            self.stamp(smem, copied, 1, 0, tid)
            valid, row = self.keys.locate(mKV, zero_row, entry, position, last, page_divisor)
            left, position = left - 1, position + TOKENS_PER_TILE
            address = row.toint()
            low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
            bits = cute.arch.vote_ballot_sync(valid != 0)
            if lane == 0:
                sValid[stage * WARPS + warp_idx] = Int16(bits)
            if lane < 16:
                at = cute.assume((stage * TOKENS_PER_TILE + first + lane) * (4 * GROUPS), divby=CHUNK)
                self.copy_or_clear(address + token_cache.SCALE_OFFSET, scale + at, Int32(CHUNK))
            for i in cutlass.range_constexpr(16 // ROWS):
                of_row = ROWS * i + lane // 8
                upper = Int64(cute.arch.shuffle_sync(high, of_row)) << 32
                source = upper | (Int64(cute.arch.shuffle_sync(low, of_row)) & 0xFFFFFFFF)
                source += CHUNK * chunk
                size = (bits >> of_row & 1) * CHUNK  # all masked rows would read one row, which takes its turns in L2
                at = stage * TOKENS_PER_TILE + first + of_row
                target = codes + cute.assume(at * NOPE + (chunk ^ swizzle(of_row)) * CHUNK, divby=CHUNK)
                for j in cutlass.range_constexpr(NOPE // GROUP):
                    self.copy_or_clear(source + GROUP * j, target + GROUP * j, size)
                of_rope = row_of_rope(of_row)
                at = copied % self.ropes * TOKENS_PER_TILE + first + of_rope
                target = rope + cute.assume(at * ROPE_BYTES + (chunk ^ (of_rope % 8)) * CHUNK, divby=CHUNK)
                self.copy_or_clear(source + token_cache.ROPE_OFFSET, target, size)
            cute.arch.cp_async_mbarrier_arrive_noinc(smem.full.data_ptr() + stage)
            cute.arch.mbarrier_arrive(smem.full.data_ptr() + stage)  # which keys are valid
            self.stamp(smem, copied, 1, 1, tid)
            copied += 1
        return self.advance(table, (item, left, position, last, entries, entry, length, copied), tid)

    @cute.jit
    def copy_or_clear(self, source: Int64, target: cute.Pointer, size: Int32):
        """Starts the copy of 16 bytes, or fills them with zeros where `size` is 0 and not 16: nothing is read then."""
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {CHUNK}, {{$r2}};",
            read_only_args=[Int32(target.toint()), source, size],
        )

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """A timestamp of a tile."""
        self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * t + event, edge, tid == 0)
