"""Loads of key tiles: rows of the cache into shared memory, as they are."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.pipelines import MlaPipelines, pipelines
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.smem import CODES_BYTES, LINE_BYTES, ROPE_BYTES, WARPS, line_offset
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILES
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec

ROWS_PER_STEP = 4  # of a warp, eight lanes each
CHUNK_BYTES = 16  # of a cp.async
SCALES_BYTES = 4 * QUANT_TILES  # of a row


class RowPart(NamedTuple):
    """Bytes of a row that one TMA load brings: `lines` of `line_bytes` each."""

    offset: int
    line_bytes: int
    lines: int


PARTS = (
    RowPart(0, LINE_BYTES, NOPE // LINE_BYTES),
    RowPart(token_cache.ROPE_OFFSET, LINE_BYTES, 1),
    RowPart(token_cache.SCALE_OFFSET, SCALES_BYTES, 1),
)


class TmaPart(NamedTuple):
    """The TMA load of one of PARTS: the atom, and a tensor (rows of a page, bytes of a line, lines, pages)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class LoadCursor(NamedTuple):
    """What a thread loads next.

    next_work    index of the work tile after that of the next key tile
    tiles_left   key tiles left of the current work tile
    position     of this lane's key in the next key tile
    last         the last position of the work tile
    entries      address of its index list or block table
    entry        the entry of this lane's key
    next_length  length of the next work tile
    loaded       key tiles loaded so far
    """

    next_work: Int32
    tiles_left: Int32
    position: Int32
    last: Int32
    entries: Int64
    entry: Int32
    next_length: Int32
    loaded: Int32


def part_layout(part: RowPart) -> cute.ComposedLayout:
    """Shared memory of a part of 64 rows: lines in the order of `line_offset`, scales without a swizzle."""
    return cute.make_composed_layout(
        cute.make_swizzle(3 if part.line_bytes == LINE_BYTES else 0, 4, 3),
        0,
        cute.make_ordered_layout((TOKENS_PER_TILE, part.line_bytes, part.lines), order=(1, 0, 2)),
    )


def make_page_tma(mKV: cute.Tensor) -> tuple[TmaPart, ...]:
    """TMA loads of 64 rows of a page. All codes are one load: a warp takes some 100 clocks to issue one."""
    loads = []
    for part in PARTS:
        start = cute.make_ptr(Uint8, mKV.iterator.toint() + part.offset, AddressSpace.gmem, assumed_align=CHUNK_BYTES)
        layout = cute.make_layout(
            (mKV.shape[1], part.line_bytes, part.lines, mKV.shape[0]),
            stride=(mKV.stride[1], mKV.stride[2], part.line_bytes, mKV.stride[0]),
        )
        operation, tile = cpasync.CopyBulkTensorTileG2SOp(), (TOKENS_PER_TILE, part.line_bytes, part.lines)
        source = cute.make_tensor(start, layout)
        atom, tensor = cpasync.make_tiled_tma_atom(operation, source, part_layout(part), tile)
        loads.append(TmaPart(atom, tensor))
    return tuple(loads)


@cute.jit
def issue_tma(
    smem,
    edges: cutlass.Constexpr[MlaPipelines],
    page_tma: tuple,
    tile: Int32,
    page: Int32,
    tile_of_page: Int32,
):
    """Issues the TMA loads of a key tile of a page, whose bytes the stage's barrier expects. Called by one warp."""
    stage = edges.keys.index(tile)
    full = edges.keys.full_barrier(smem, stage)
    codes_start = cute.assume(stage * CODES_BYTES, divby=1024)
    rope_start = cute.assume(edges.rope.index(tile) * ROPE_BYTES, divby=1024)
    scales = cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
    scales += cute.assume(stage * (TOKENS_PER_TILE * SCALES_BYTES), divby=1024)
    targets = (smem.codes.data_ptr() + codes_start, smem.rope.data_ptr() + rope_start, scales)
    for i in cutlass.range_constexpr(len(PARTS)):
        part, tma = PARTS[i], page_tma[i]
        layout = part_layout(part)
        sPart = cute.make_tensor(cute.recast_ptr(targets[i], layout.inner, Uint8), layout.outer)
        gPart = cute.local_tile(tma.tensor, (TOKENS_PER_TILE, part.line_bytes, part.lines), (tile_of_page, 0, 0, page))
        source, target = cute.group_modes(gPart, 0, 3), cute.group_modes(sPart, 0, 3)
        target, source = cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), target, source)
        cute.copy(tma.atom, source, target, tma_bar_ptr=full)


class KeyLoader:
    """Device code for 128 threads, a warp for 16 rows of a tile: no byte of a row passes through a register.

    cp.async copies 16 bytes each, and their end arrives on the barrier of the stage. Each lane finds one row, reads its
    entry of the index or block table a tile ahead, and hands the address to the lanes that copy the row. Where a page
    holds all keys of a tile, which happens with dense keys, one thread issues three TMA loads of 64 rows instead.

    `page_tma` is what `make_page_tma` makes, or () where keys are sparse.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.finder = KeyFinder(spec)
        self.scheduler = Scheduler(spec)
        self.edges = pipelines(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, page_tma: tuple, tid: Int32):
        """Loads the key tiles of all work tiles of this CTA: a warpgroup that does nothing else."""
        cursor = self.start(table, tid)
        while cursor.tiles_left > 0:
            cursor = self.step(smem, table, page_tma, cursor, tid)

    @cute.jit
    def start(self, table: WorkTable, tid: Int32) -> LoadCursor:
        """The cursor at the first key tile of this CTA."""
        first = table.share.first
        length = self.scheduler.length(self.scheduler.locate(first, table), table.mLength)
        zero = Int32(0)
        return self.advance(table, LoadCursor(first, zero, zero, zero, Int64(0), zero, length, zero), tid)

    @cute.jit
    def advance(self, table: WorkTable, cursor: LoadCursor, tid: Int32) -> LoadCursor:
        """Goes on to the next work tile with keys where none are left of this one; starts to load the next entry."""
        next_work, tiles_left, position, last, entries, entry, length, loaded = cursor
        share = table.share
        while tiles_left == 0 and next_work < share.end:
            work = self.scheduler.locate(next_work, table)
            begin, limit, tiles_left, _ = self.scheduler.keys(next_work, work, length, table)
            entries = self.scheduler.entries(work, table.mIndex).iterator.toint()
            position, last = begin + self.row(tid), limit - 1
            next_work += share.step
            following = self.scheduler.locate(cutlass.min(next_work, share.end - 1), table)
            length = self.scheduler.length(following, table.mLength)  # a work tile ahead: it takes some 1000 clocks
        if tiles_left > 0:
            pointer = cute.make_ptr(Int32, entries, AddressSpace.gmem, assumed_align=4)
            mEntries = cute.make_tensor(pointer, cute.make_layout(1 << 30))  # more than any list has
            entry = self.finder.read_entry(mEntries, position, last, table.divisors.page_size)
        return LoadCursor(next_work, tiles_left, position, last, entries, entry, length, loaded)

    @cute.jit
    def step(self, smem, table: WorkTable, page_tma: tuple, cursor: LoadCursor, tid: Int32) -> LoadCursor:
        """Loads the next key tile, if there is one, once its stage is free; returns the new cursor."""
        next_work, tiles_left, position, last, entries, entry, length, loaded = cursor
        if tiles_left > 0:
            self.stamp(smem, loaded, 0, 0, tid)
            self.await_room(smem, loaded, tid)
            self.stamp(smem, loaded, 0, 1, tid)
            self.stamp(smem, loaded, 1, 0, tid)
            if const_expr(self.spec.sparse):
                self.copy_rows(smem, table, position, last, entry, loaded, tid)
            elif self.is_whole(table, position, last, entry, tid):
                self.clear_mask(smem, loaded, tid)
                if tid // 32 == 0:
                    tile_of_page = self.tile_of_page(table, position, tid)
                    with cute.arch.elect_one():
                        self.edges.keys.expect(smem, loaded)
                    issue_tma(smem, self.edges, page_tma, loaded, entry, tile_of_page)
            else:
                self.copy_rows(smem, table, position, last, entry, loaded, tid)
            self.arrive(smem, loaded)
            if const_expr(self.spec.pv_issues_tma):
                if tid == 0:
                    self.edges.keys.arrive(smem, loaded)
            self.stamp(smem, loaded, 1, 1, tid)
            tiles_left, position, loaded = tiles_left - 1, position + TOKENS_PER_TILE, loaded + 1
        return self.advance(
            table, LoadCursor(next_work, tiles_left, position, last, entries, entry, length, loaded), tid
        )

    @cute.jit
    def await_room(self, smem, loaded: Int32, tid: Int32):
        """Waits until the stage of the next key tile is free."""
        self.edges.keys.acquire(smem, loaded)
        if const_expr(self.spec.pv_issues_tma):
            self.edges.rope.acquire(smem, loaded)

    @cute.jit
    def announce(self, smem, table: WorkTable, cursor: LoadCursor, tile: Int32, tid: Int32) -> LoadCursor:
        """Tells PV which key tile to load by TMA once it has read `tile`; returns the new cursor.

        Only a whole tile of a page: `clear_mask` follows. Else PV is told -1, and `step` loads the tile.
        """
        next_work, tiles_left, position, last, entries, entry, length, loaded = cursor
        sAnnounced = smem.announced.get_tensor(cute.make_layout((2, self.spec.p_stages)))
        page, tile_of_page = Int32(-1), Int32(0)
        if tiles_left > 0:
            if self.is_whole(table, position, last, entry, tid):
                page, tile_of_page = entry, self.tile_of_page(table, position, tid)
                self.arrive(smem, loaded)
                tiles_left, position, loaded = tiles_left - 1, position + TOKENS_PER_TILE, loaded + 1
        if tid == 0:
            p_stage = self.edges.p.index(tile)
            sAnnounced[0, p_stage] = page
            sAnnounced[1, p_stage] = tile_of_page
        return self.advance(
            table, LoadCursor(next_work, tiles_left, position, last, entries, entry, length, loaded), tid
        )

    @cute.jit
    def is_whole(self, table: WorkTable, position: Int32, last: Int32, entry: Int32, tid: Int32):
        """Whether the next tile has 64 keys of one page; the same in all threads."""
        page_size = table.divisors.page_size.divisor
        last_of_tile = position + (TOKENS_PER_TILE - 1 - self.row(tid))
        in_page = page_size % TOKENS_PER_TILE == 0 and last_of_tile <= last
        return cute.arch.vote_all_sync(in_page and entry >= 0 and entry < table.mKV.shape[0])

    def tile_of_page(self, table: WorkTable, position: Int32, tid: Int32):
        """Index of the next key tile in its page."""
        _, offset = divmod(position - self.row(tid), table.divisors.page_size)
        return offset // TOKENS_PER_TILE

    def arrive(self, smem, tile: Int32):
        """Arrivals of a thread: its own copies of a key tile, and the mask."""
        self.edges.keys.arrive_copies(smem, tile)
        self.edges.keys.arrive(smem, tile)

    @cute.jit
    def clear_mask(self, smem, tile: Int32, tid: Int32):
        """All keys of a tile count."""
        sMask = self.mask(smem)
        if tid % 32 == 0:
            sMask[tile % self.spec.mask_stages * WARPS + tid // 32] = Int16(-1)

    def row(self, tid: Int32) -> Int32:
        """The row of a tile that a lane finds; the other 16 lanes of its warp find the same ones."""
        return tid // 32 * 16 + tid % 16

    def mask(self, smem) -> cute.Tensor:
        """A bit for each key, by warp."""
        return cute.recast_tensor(smem.mask.get_tensor(cute.make_layout(2 * self.spec.mask_stages)), Int16)

    @cute.jit
    def copy_rows(self, smem, table: WorkTable, position: Int32, last: Int32, entry: Int32, loaded: Int32, tid: Int32):
        """Starts the copies of the rows of a tile, some of which may be masked."""
        stage, rope_stage = self.edges.keys.index(loaded), self.edges.rope.index(loaded)
        lane, warp_idx, sMask = tid % 32, tid // 32, self.mask(smem)
        first, chunk = 16 * warp_idx, lane % 8
        counts, row = self.finder.locate(table.mKV, table.zero_row, entry, position, last, table.divisors.page_size)
        address = row.toint()
        low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
        bits = cute.arch.vote_ballot_sync(counts != 0)
        if lane == 0:
            sMask[loaded % self.spec.mask_stages * WARPS + warp_idx] = Int16(bits)
        codes, rope = smem.codes.data_ptr(), smem.rope.data_ptr()
        if lane < 16:
            scale = cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
            start = cute.assume((stage * TOKENS_PER_TILE + first + lane) * SCALES_BYTES, divby=CHUNK_BYTES)
            size = Int32(cutlass.select_(counts != 0, Int32(CHUNK_BYTES), Int32(0)))  # scales of masked keys are 0
            self.copy_or_clear(address + token_cache.SCALE_OFFSET, scale + start, size)
        for i in cutlass.range_constexpr(16 // ROWS_PER_STEP):
            copied = ROWS_PER_STEP * i + lane // 8  # row of the warp's 16
            upper = Int64(cute.arch.shuffle_sync(high, copied)) << 32
            source = upper | (Int64(cute.arch.shuffle_sync(low, copied)) & 0xFFFFFFFF)
            source += CHUNK_BYTES * chunk
            # a masked row is cleared, not read: all would read the same zero_row, one L2 request at a time
            size = (bits >> copied & 1) * CHUNK_BYTES
            line = line_offset(first + copied, chunk)
            target = codes + cute.assume(stage * CODES_BYTES + line, divby=CHUNK_BYTES)
            for j in cutlass.range_constexpr(NOPE // LINE_BYTES):
                self.copy_or_clear(source + LINE_BYTES * j, target + TOKENS_PER_TILE * LINE_BYTES * j, size)
            target = rope + cute.assume(rope_stage * ROPE_BYTES + line, divby=CHUNK_BYTES)
            self.copy_or_clear(source + token_cache.ROPE_OFFSET, target, size)

    @cute.jit
    def copy_or_clear(self, source: Int64, target: cute.Pointer, size: Int32):
        """Starts the copy of 16 bytes; with size 0 instead of 16 it stores zeros and reads nothing."""
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {CHUNK_BYTES}, {{$r2}};",
            read_only_args=[Int32(target.toint()), source, size],
        )

    @cute.jit
    def stamp(self, smem, tile: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """A timestamp of a key tile."""
        self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * tile + event, edge, tid == 0)
