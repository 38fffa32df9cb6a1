"""Rows of the cache on their way into shared memory, where heads are columns: copied as they are."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.smem import LINE, OFFERS, WARPS, line_of, masks, rope_stages, stages, turn
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILES
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec

ROWS = 4  # of a warp in one step, eight lanes each
CHUNK = 16  # bytes of an asynchronous copy
TILE_BYTES = TOKENS_PER_TILE * (NOPE + 4 * QUANT_TILES + LINE)
# of a row, as tensor copies bring them: first byte, bytes of a line, lines
PARTS = ((0, LINE, NOPE // LINE), (token_cache.ROPE_OFFSET, LINE, 1), (token_cache.SCALE_OFFSET, 4 * QUANT_TILES, 1))


def tile_layout(columns: int, lines: int) -> cute.ComposedLayout:
    """Shared memory of 64 rows of a tensor copy: lines in the order of `line_of`, or scales one behind the other."""
    return cute.make_composed_layout(
        cute.make_swizzle(3 if columns == LINE else 0, 4, 3),
        0,
        cute.make_ordered_layout((TOKENS_PER_TILE, columns, lines), order=(1, 0, 2)),
    )


def parts_of_pages(mKV: cute.Tensor) -> tuple:
    """Tensor copies of 64 rows of a page, for each of PARTS: (how, (rows of a page, bytes of a line, lines, pages)).

    A warp takes some 100 clocks to start one, so all lines of codes are one copy.
    """
    copies = []
    for first, columns, lines in PARTS:
        start = cute.make_ptr(Uint8, mKV.iterator.toint() + first, AddressSpace.gmem, assumed_align=CHUNK)
        layout = cute.make_layout(
            (mKV.shape[1], columns, lines, mKV.shape[0]),
            stride=(mKV.stride[1], mKV.stride[2], columns, mKV.stride[0]),
        )
        how, tile = cpasync.CopyBulkTensorTileG2SOp(), (TOKENS_PER_TILE, columns, lines)
        source = cute.make_tensor(start, layout)
        load, tPart = cpasync.make_tiled_tma_atom(how, source, tile_layout(columns, lines), tile)
        copies.append((load, tPart))
    return tuple(copies)


@cute.jit
def copy_tile(smem, copies: tuple, stage: Int32, of_rope: Int32, page: Int32, place: Int32):
    """Starts the copies of tile `place` of a page, whose bytes the stage's barrier expects. Called by one warp."""
    full = smem.full.data_ptr() + stage
    of_codes = cute.assume(stage * (TOKENS_PER_TILE * NOPE), divby=1024)
    at = cute.assume(of_rope * (TOKENS_PER_TILE * LINE), divby=1024)
    of_scales = cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
    of_scales += cute.assume(stage * (TOKENS_PER_TILE * 4 * QUANT_TILES), divby=1024)
    starts = (smem.codes.data_ptr() + of_codes, smem.rope.data_ptr() + at, of_scales)
    for i in cutlass.range_constexpr(len(PARTS)):
        _, columns, lines = PARTS[i]
        load, tPart = copies[i]
        layout = tile_layout(columns, lines)
        sPart = cute.make_tensor(cute.recast_ptr(starts[i], layout.inner, Uint8), layout.outer)
        gPart = cute.local_tile(tPart, (TOKENS_PER_TILE, columns, lines), (place, 0, 0, page))
        source, target = cute.group_modes(gPart, 0, 3), cute.group_modes(sPart, 0, 3)
        target, source = cpasync.tma_partition(load, 0, cute.make_layout(1), target, source)
        cute.copy(load, source, target, tma_bar_ptr=full)


class RowGatherer:
    """Device code for 128 threads, a warp for 16 rows of a tile: no byte of a row passes through a register.

    Copies are asynchronous, and their end arrives on the barrier of the stage. Each lane finds one row, its entry of
    the index or block table a tile ahead, and tells the lanes that copy it. Where a page holds all keys of a tile,
    which is known of dense ones, one thread starts three tensor copies of 64 rows instead.

    `cursor` says what comes next: (item behind that of the next tile, tiles left of its own, position of this lane's
    key, last position, address of the item's entries, entry, length of the item behind, tiles copied so far). `table`
    is that of Scheduler, and `copies` what `parts_of_pages` made, or (), where keys are sparse.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.keys = KeyFinder(spec)
        self.sparse, self.offers = spec.sparse, spec.offers
        self.scheduler = Scheduler(spec)
        self.stages, self.ropes, self.masks = stages(spec.heads), rope_stages(spec.heads), masks(spec.heads)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, copies: tuple, _mSink, tid: Int32):
        """Rows of all items of this CTA, where a warpgroup does nothing else."""
        cursor = self.start(table, tid)
        while cursor[1] > 0:
            cursor = self.step(smem, table, copies, cursor, tid)

    @cute.jit
    def start(self, table: WorkTable, tid: Int32):
        """The cursor at the first tile of this CTA."""
        first = table.share.first
        length = self.scheduler.length(self.scheduler.locate(first, table), table.mLength)
        zero = Int32(0)
        return self.advance(table, (first, zero, zero, zero, Int64(0), zero, length, zero), tid)

    @cute.jit
    def advance(self, table: WorkTable, cursor: tuple, tid: Int32):
        """Goes on to an item that has keys, if there is none left of this one, and starts to load the next entry."""
        item, left, position, last, address, entry, length, copied = cursor
        _, items, step = table.share[:3]
        while left == 0 and item < items:
            work = self.scheduler.locate(item, table)
            begin, limit, left, _ = self.scheduler.keys(item, work, length, table)
            address = self.scheduler.entries(work, table.mIndex).iterator.toint()
            position, last = begin + self.row(tid), limit - 1
            item += step
            following = self.scheduler.locate(cutlass.min(item, items - 1), table)
            length = self.scheduler.length(following, table.mLength)  # an item ahead: it takes some 1000 clocks to come
        if left > 0:
            pointer = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)
            entries = cute.make_tensor(pointer, cute.make_layout(1 << 30))  # more than there are
            entry = self.keys.read_entry(entries, position, last, table.divisors.page_size)
        return item, left, position, last, address, entry, length, copied

    @cute.jit
    def step(self, smem, table: WorkTable, copies: tuple, cursor: tuple, tid: Int32):
        """Starts the copies of the next tile, if there is one, once its place is free; returns the new cursor."""
        item, left, position, last, entries, entry, length, copied = cursor
        if left > 0:
            stage, phase = turn(copied, self.stages)
            self.stamp(smem, copied, 0, 0, tid)
            cute.arch.mbarrier_wait(smem.empty.data_ptr() + stage, phase ^ 1)
            if const_expr(self.offers):
                of_rope, phase = turn(copied, self.ropes)
                cute.arch.mbarrier_wait(smem.rope_empty.data_ptr() + of_rope, phase ^ 1)
            self.stamp(smem, copied, 0, 1, tid)
            self.stamp(smem, copied, 1, 0, tid)
            if const_expr(self.sparse):
                self.copy_rows(smem, table, position, last, entry, copied, tid)
            elif self.is_whole(table, position, last, entry, tid):
                self.set_valid(smem, copied, tid)
                if tid // 32 == 0:
                    place = self.place(table, position, tid)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_expect_tx(smem.full.data_ptr() + stage, TILE_BYTES)
                    copy_tile(smem, copies, stage, turn(copied, self.ropes)[0], entry, place)
            else:
                self.copy_rows(smem, table, position, last, entry, copied, tid)
            self.arrive(smem, stage)
            if const_expr(self.offers):
                if tid == 0:
                    cute.arch.mbarrier_arrive(smem.full.data_ptr() + stage)
            self.stamp(smem, copied, 1, 1, tid)
            left, position, copied = left - 1, position + TOKENS_PER_TILE, copied + 1
        return self.advance(table, (item, left, position, last, entries, entry, length, copied), tid)

    @cute.jit
    def offer(self, smem, table: WorkTable, cursor: tuple, t: Int32, tid: Int32):
        """Tells the values which tile takes the place of tile t as soon as they have read that; the new cursor.

        If it is a part of a page; `set_valid` follows. Else, and where there is none, they are told -1, and it is left
        to `step`.
        """
        item, left, position, last, entries, entry, length, copied = cursor
        sOffer = smem.offer.get_tensor(cute.make_layout((2, OFFERS)))
        page, place = Int32(-1), Int32(0)
        if left > 0:
            if self.is_whole(table, position, last, entry, tid):
                page, place = entry, self.place(table, position, tid)
                self.arrive(smem, turn(copied, self.stages)[0])
                left, position, copied = left - 1, position + TOKENS_PER_TILE, copied + 1
        if tid == 0:
            sOffer[0, t % OFFERS] = page
            sOffer[1, t % OFFERS] = place
        return self.advance(table, (item, left, position, last, entries, entry, length, copied), tid)

    @cute.jit
    def is_whole(self, table: WorkTable, position: Int32, last: Int32, entry: Int32, tid: Int32):
        """Whether the next tile has 64 keys of one page; the same in all threads."""
        page_size = table.divisors.page_size.divisor
        last_of_tile = position + (TOKENS_PER_TILE - 1 - self.row(tid))
        in_page = page_size % TOKENS_PER_TILE == 0 and last_of_tile <= last
        return cute.arch.vote_all_sync(in_page and entry >= 0 and entry < table.mKV.shape[0])

    def place(self, table: WorkTable, position: Int32, tid: Int32):
        """Of the next tile in its page, in tiles."""
        _, offset = divmod(position - self.row(tid), table.divisors.page_size)
        return offset // TOKENS_PER_TILE

    def arrive(self, smem, stage: Int32):
        """Of a thread: its own copies to a stage, and which keys are valid."""
        cute.arch.cp_async_mbarrier_arrive_noinc(smem.full.data_ptr() + stage)
        cute.arch.mbarrier_arrive(smem.full.data_ptr() + stage)

    @cute.jit
    def set_valid(self, smem, copied: Int32, tid: Int32):
        """No key of a tile is masked."""
        sValid = self.valid(smem)
        if tid % 32 == 0:
            sValid[copied % self.masks * WARPS + tid // 32] = Int16(-1)

    def row(self, tid: Int32) -> Int32:
        """Of a tile, which a lane finds; the other 16 lanes of a warp find the same ones."""
        return tid // 32 * 16 + tid % 16

    def valid(self, smem) -> cute.Tensor:
        """A bit for each key, as many as a warp has."""
        return cute.recast_tensor(smem.valid.get_tensor(cute.make_layout(2 * self.masks)), Int16)

    @cute.jit
    def copy_rows(self, smem, table: WorkTable, position: Int32, last: Int32, entry: Int32, copied: Int32, tid: Int32):
        """Starts the copies of rows of a tile, of which some may be masked."""
        mKV, zero_row, page_divisor = table.mKV, table.zero_row, table.divisors.page_size
        (stage, _), (of_rope, _) = turn(copied, self.stages), turn(copied, self.ropes)
        lane, warp_idx, sValid = tid % 32, tid // 32, self.valid(smem)
        first, chunk = 16 * warp_idx, lane % 8
        valid, row = self.keys.locate(mKV, zero_row, entry, position, last, page_divisor)
        address = row.toint()
        low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
        bits = cute.arch.vote_ballot_sync(valid != 0)
        if lane == 0:
            sValid[copied % self.masks * WARPS + warp_idx] = Int16(bits)
        codes, rope = smem.codes.data_ptr(), smem.rope.data_ptr()
        if lane < 16:
            scale = cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
            at = cute.assume((stage * TOKENS_PER_TILE + first + lane) * (4 * QUANT_TILES), divby=CHUNK)
            self.copy_or_clear(address + token_cache.SCALE_OFFSET, scale + at, Int32(CHUNK))
        for i in cutlass.range_constexpr(16 // ROWS):
            of_row = ROWS * i + lane // 8
            upper = Int64(cute.arch.shuffle_sync(high, of_row)) << 32
            source = upper | (Int64(cute.arch.shuffle_sync(low, of_row)) & 0xFFFFFFFF)
            source += CHUNK * chunk
            size = (bits >> of_row & 1) * CHUNK  # all masked rows would read one row, which takes its turns in L2
            line = line_of(first + of_row, chunk)
            target = codes + cute.assume(stage * (TOKENS_PER_TILE * NOPE) + line, divby=CHUNK)
            for j in cutlass.range_constexpr(NOPE // LINE):
                self.copy_or_clear(source + LINE * j, target + TOKENS_PER_TILE * LINE * j, size)
            target = rope + cute.assume(of_rope * (TOKENS_PER_TILE * LINE) + line, divby=CHUNK)
            self.copy_or_clear(source + token_cache.ROPE_OFFSET, target, size)

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
