"""Loads of key tiles: copies rows of one cache or two into shared memory, unconverted."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels import codes
from cute_kernels.mla.kernels.arguments import Caches, Source
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.pipelines import MlaPipelines, pipelines
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable, tiles_of
from cute_kernels.mla.kernels.smem import (
    CODES_BYTES,
    NO_TILE,
    ROPE_BYTES,
    WARPS,
    codes_bytes,
    line_offset,
    stage_kinds,
)
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILES
from cute_kernels.mla.spec import EVENTS, LINE_BYTES, ROLES, TOKENS_PER_TILE, MlaDecodeSpec, scale_row

ROWS_PER_STEP = 4  # rows of a warp, eight lanes each
ROWS_PER_WARP = TOKENS_PER_TILE // WARPS
CHUNK_BYTES = 16  # bytes of a cp.async
SCALES_BYTES = 4 * QUANT_TILES  # bytes of the scales of a row of V3.2


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


class Entries(NamedTuple):
    """The keys of a work tile in one cache: the address of its index list or block table, and the last position."""

    address: Int64
    last: Int32


class LoadCursor(NamedTuple):
    """State of a thread before its next load.

    next_work    index of the work tile after the next key tile's
    tiles_left   key tiles left of the current work tile
    position     of this lane's key in the next key tile; keys of the second cache begin at `extra_begin`
    main, extra  keys of the work tile in each cache; without a second cache extra equals main
    extra_begin  a whole number of key tiles
    entry        the entry of this lane's key
    next_length  length of the next work tile
    loaded       key tiles loaded so far, and stages closed after the last one
    unexpanded   a bit for each step so far, the last one in bit 0: 1 if it loaded a tile that `expand` has to expand
    """

    next_work: Int32
    tiles_left: Int32
    position: Int32
    main: Entries
    extra: Entries
    extra_begin: Int32
    entry: Int32
    next_length: Any
    loaded: Int32
    unexpanded: Int32


class Row(NamedTuple):
    """A key: (1, addresses of its data row and its scales), or (0, two addresses inside of the cache)."""

    valid: Int32
    data: Int64
    scales: Int64


def part_layout(part: RowPart) -> cute.ComposedLayout:
    """Returns the shared memory of a part of 64 rows: lines in the order of `line_offset`, scales without a swizzle."""
    return cute.make_composed_layout(
        cute.make_swizzle(3 if part.line_bytes == LINE_BYTES else 0, 4, 3),
        0,
        cute.make_ordered_layout((TOKENS_PER_TILE, part.line_bytes, part.lines), order=(1, 0, 2)),
    )


def make_page_tma(mKV: cute.Tensor) -> tuple[TmaPart, ...]:
    """Makes the TMA loads of 64 rows of a page. All codes are one load: a warp takes some 100 clocks to issue one."""
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
    pages: tuple,
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
        part, tma = PARTS[i], pages[i]
        layout = part_layout(part)
        sPart = cute.make_tensor(cute.recast_ptr(targets[i], layout.inner, Uint8), layout.outer)
        gPart = cute.local_tile(tma.tensor, (TOKENS_PER_TILE, part.line_bytes, part.lines), (tile_of_page, 0, 0, page))
        source, target = cute.group_modes(gPart, 0, 3), cute.group_modes(sPart, 0, 3)
        target, source = cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), target, source)
        cute.copy(tma.atom, source, target, tma_bar_ptr=full)


class KeyLoader:
    """Device code for 128 threads, a warp for 16 rows of a tile: no byte of a row passes through a register.

    Each cp.async copies 16 bytes; a thread arrives on the stage's barrier when its copies end. Each lane finds one row,
    reads its entry of the index list or block table a tile ahead, and hands the address to the lanes that copy the row.
    If one page holds all keys of a tile, which happens with dense keys, and the spec has `page_tma`, one thread issues
    three TMA loads of 64 rows instead.

    If a format's codes are expanded, the end of the copies does not arrive on `keys`; the expanding role arrives.

    With 8 and 16 heads a warp waits for its own copies and expands them in place (`expand`). Every step commits one
    cp.async group, even an empty one, so a wait for all but the last n groups completes the tile of n steps before.
    There is no deadlock. `expand` waits only for copies, never for another role. A step waits until PV has read the
    tile of `stages` before, and PV has what it needs for that: all but the newest tile are expanded before a step, and
    there is more than one stage.

    With 32 and 64 heads PV expands (`ScaledKeyPvWarpgroups.expand`), and copies arrive on `raw`. PV waits there for
    every tile in turn; tiles that are not expanded arrive at once. A step without a tile gives PV a stage with NO_TILE
    instead (`close`).
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.finder = KeyFinder(spec.sparse)
        self.scheduler = Scheduler(spec)
        self.edges = pipelines(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        self.expanded = [kind for kind in spec.kinds if codes.of(kind).expands]

    @cute.jit
    def run(self, smem, table: WorkTable, caches: Caches, tid: Int32):
        """Loads the key tiles of all work tiles of this CTA; expands each once the next one is requested."""
        cursor = self.start(table, tid)
        if const_expr(self.spec.load_expands):
            steps = Int32(0)
            while cursor.tiles_left > 0 or cursor.unexpanded & 1 != 0:
                cursor = self.step(smem, table, caches, cursor, tid)
                self.expand(smem, cursor, steps - 1, 1, tid)
                steps += 1
        else:
            while cursor.tiles_left > 0:
                cursor = self.step(smem, table, caches, cursor, tid)

    @cute.jit
    def start(self, table: WorkTable, tid: Int32) -> LoadCursor:
        """Returns the cursor at the first key tile of this CTA."""
        first = table.share.first
        length = self.scheduler.length(self.scheduler.locate(first, table), table.mLength)
        zero, none = Int32(0), Entries(Int64(0), Int32(0))
        return self.advance(table, LoadCursor(first, zero, zero, none, none, zero, zero, length, zero, zero), tid)

    @cute.jit
    def advance(self, table: WorkTable, cursor: LoadCursor, tid: Int32) -> LoadCursor:
        """Moves on to the next work tile with keys if none are left of this one; starts loading the next entry."""
        next_work, tiles_left, position, main, extra, extra_begin, entry, length, loaded, unexpanded = cursor
        share = table.share
        while tiles_left == 0 and next_work < share.end:
            work = self.scheduler.locate(next_work, table)
            begin, _, tiles_left, _ = self.scheduler.keys(next_work, work, length, table)
            limits = self.scheduler.limits(work, length, table)
            position = begin + self.row(tid)
            if const_expr(self.spec.has_extra):
                mIndex, mExtraIndex = table.mIndex
                main = Entries(self.scheduler.entries(work, mIndex).iterator.toint(), limits.main - 1)
                extra = Entries(self.scheduler.entries(work, mExtraIndex).iterator.toint(), limits.extra - 1)
                extra_begin = tiles_of(limits.main) * TOKENS_PER_TILE
            else:
                main = Entries(self.scheduler.entries(work, table.mIndex).iterator.toint(), limits.main - 1)
            next_work += share.step
            following = self.scheduler.locate(cutlass.min(next_work, share.end - 1), table)
            length = self.scheduler.length(following, table.mLength)  # a work tile ahead: it takes about 1000 clocks
        if tiles_left > 0:
            local, entries, last = position, main.address, main.last
            if const_expr(self.spec.has_extra):
                if position >= extra_begin:
                    local, entries, last = position - extra_begin, extra.address, extra.last
            pointer = cute.make_ptr(Int32, entries, AddressSpace.gmem, assumed_align=4)
            mEntries = cute.make_tensor(pointer, cute.make_layout(1 << 30))  # larger than any list
            entry = self.finder.read_entry(mEntries, local, last, table.divisors.page_size)
        return LoadCursor(next_work, tiles_left, position, main, extra, extra_begin, entry, length, loaded, unexpanded)

    @cute.jit
    def step(self, smem, table: WorkTable, caches: Caches, cursor: LoadCursor, tid: Int32) -> LoadCursor:
        """Loads the next key tile, if any, once its stage is free; returns the new cursor."""
        _, tiles_left, position, main, _, _, entry, _, loaded, unexpanded = cursor
        if const_expr(self.spec.load_expands):
            unexpanded = unexpanded << 1
        if const_expr(self.spec.pv_expands):
            if tiles_left == 0:
                loaded = self.close(smem, loaded, tid)
        if tiles_left > 0:
            self.stamp(smem, loaded, 0, 0, tid)
            self.await_room(smem, loaded, tid)
            self.stamp(smem, loaded, 0, 1, tid)
            self.stamp(smem, loaded, 1, 0, tid)
            if const_expr(self.spec.page_tma):
                if self.is_whole(table, position, main.last, entry, tid):
                    self.load_page(smem, table, caches.pages, position, entry, loaded, tid)
                else:
                    unexpanded |= self.load_rows(smem, caches.sources, cursor, loaded, tid)
            else:
                unexpanded |= self.load_rows(smem, caches.sources, cursor, loaded, tid)
            self.stamp(smem, loaded, 1, 1, tid)
            tiles_left, position, loaded = tiles_left - 1, position + TOKENS_PER_TILE, loaded + 1
        if const_expr(self.spec.load_expands):
            cute.arch.cp_async_commit_group()
        cursor = cursor._replace(tiles_left=tiles_left, position=position, loaded=loaded, unexpanded=unexpanded)
        return self.advance(table, cursor, tid)

    @cute.jit
    def load_rows(self, smem, sources: tuple, cursor: LoadCursor, tile: Int32, tid: Int32) -> Int32:
        """Starts the copies of the rows of the next key tile; returns 1 if `expand` has to arrive, else 0."""
        position, extra_begin, entry, kinds = cursor.position, cursor.extra_begin, cursor.entry, self.spec.kinds
        unexpanded = Int32(0)
        valid, data, scales = self.find_row(sources[0], kinds[0], entry, position, cursor.main.last)
        if const_expr(self.spec.has_extra):
            if position >= extra_begin:
                local, last = position - extra_begin, cursor.extra.last
                valid, data, scales = self.find_row(sources[1], kinds[-1], entry, local, last)
        row, kind = Row(valid, data, scales), Int32(0)
        if const_expr(len(kinds) > 1):
            kind = Int32(1) if position - self.row(tid) >= extra_begin else Int32(0)
        if const_expr(len(kinds) > 1 or self.spec.pv_expands):
            sKinds = stage_kinds(smem, self.spec)
            if tid == 0:
                sKinds[self.edges.keys.index(tile)] = kind
        if const_expr(len(kinds) > 1):
            if kind == 0:
                unexpanded = self.request(smem, kinds[0], row, tile, tid)
            else:
                unexpanded = self.request(smem, kinds[1], row, tile, tid)
        else:
            unexpanded = self.request(smem, kinds[0], row, tile, tid)
        if const_expr(self.spec.pv_issues_tma):  # the arrival that announces the bytes of TMA, here none
            if tid == 0:
                self.edges.keys.arrive(smem, tile)
        return unexpanded

    @cute.jit
    def load_page(self, smem, table: WorkTable, pages: tuple, position: Int32, page: Int32, tile: Int32, tid: Int32):
        """Starts the TMA loads of a key tile of one page; all its keys count."""
        self.clear_mask(smem, tile, tid)
        if tid // 32 == 0:
            with cute.arch.elect_one():
                self.edges.keys.expect(smem, tile)
            issue_tma(smem, self.edges, pages, tile, page, self.tile_of_page(table, position, tid))
        self.arrive(smem, tile)
        if const_expr(self.spec.pv_issues_tma):
            if tid == 0:
                self.edges.keys.arrive(smem, tile)

    @cute.jit
    def await_room(self, smem, loaded: Int32, tid: Int32):
        """Waits until the stage of the next key tile is free."""
        self.edges.keys.acquire(smem, loaded)
        if const_expr(self.spec.pv_issues_tma):
            self.edges.rope.acquire(smem, loaded)

    @cute.jit
    def announce(self, smem, table: WorkTable, cursor: LoadCursor, tile: Int32, tid: Int32) -> LoadCursor:
        """Tells PV which key tile to load by TMA once it has read `tile`; returns the new cursor.

        This is only for a whole tile of a page; `clear_mask` follows. Else PV is told -1, and `step` loads the tile.
        """
        _, tiles_left, position, main, _, _, entry, _, loaded, _ = cursor
        sAnnounced = smem.announced.get_tensor(cute.make_layout((2, self.spec.p_stages)))
        page, tile_of_page = Int32(-1), Int32(0)
        if tiles_left > 0:
            if self.is_whole(table, position, main.last, entry, tid):
                page, tile_of_page = entry, self.tile_of_page(table, position, tid)
                self.arrive(smem, loaded)
                tiles_left, position, loaded = tiles_left - 1, position + TOKENS_PER_TILE, loaded + 1
        if tid == 0:
            p_stage = self.edges.p.index(tile)
            sAnnounced[0, p_stage] = page
            sAnnounced[1, p_stage] = tile_of_page
        cursor = cursor._replace(tiles_left=tiles_left, position=position, loaded=loaded)
        return self.advance(table, cursor, tid)

    @cute.jit
    def is_whole(self, table: WorkTable, position: Int32, last: Int32, entry: Int32, tid: Int32):
        """Returns whether the next tile has 64 keys of one page; the same in all threads."""
        page_size = table.divisors.page_size.divisor
        last_of_tile = position + (TOKENS_PER_TILE - 1 - self.row(tid))
        in_page = page_size % TOKENS_PER_TILE == 0 and last_of_tile <= last
        return cute.arch.vote_all_sync(in_page and entry >= 0 and entry < table.mKV.shape[0])

    def tile_of_page(self, table: WorkTable, position: Int32, tid: Int32):
        """Returns the index of the next key tile in its page."""
        _, offset = divmod(position - self.row(tid), table.divisors.page_size)
        return offset // TOKENS_PER_TILE

    def arrive(self, smem, tile: Int32):
        """Makes a thread's arrivals for a key tile: of its own copies, and of the mask."""
        self.edges.keys.arrive_copies(smem, tile)
        self.edges.keys.arrive(smem, tile)

    @cute.jit
    def clear_mask(self, smem, tile: Int32, tid: Int32):
        """Marks all keys of a tile as counting."""
        sMask = self.mask(smem)
        if tid % 32 == 0:
            sMask[tile % self.spec.mask_stages * WARPS + tid // 32] = Int16(-1)

    def row(self, tid: Int32) -> Int32:
        """Returns the row of a tile that a lane finds; the other 16 lanes of its warp find the same rows."""
        return tid // 32 * ROWS_PER_WARP + tid % ROWS_PER_WARP

    def mask(self, smem) -> cute.Tensor:
        """Returns the mask, a bit for each key, by warp."""
        return cute.recast_tensor(smem.mask.get_tensor(cute.make_layout(2 * self.spec.mask_stages)), Int16)

    @cute.jit
    def find_row(self, source: Source, kind: cutlass.Constexpr, entry: Int32, position: Int32, last: Int32) -> Row:
        """Returns the rows of the key at a position of a cache, from its entry."""
        mKV = source.mKV
        valid, page, offset = self.finder.place(mKV, entry, position, last, source.page_size)
        begin = mKV.iterator.toint() + Int64(page) * Int64(mKV.stride[0])  # 64 bits: caches of more than 2^31 bytes
        data = begin + Int64(offset) * Int64(source.data_stride)
        if const_expr(len(kind.row_bytes) == 1):  # a second address would be computed from the entry again
            scales = data + kind.scales.offset
        else:
            scales = begin + (Int64(source.scale_offset) + Int64(offset) * Int64(source.scale_stride))
        return Row(Int32(1) if valid else Int32(0), data, scales)

    @cute.jit
    def request(self, smem, kind: cutlass.Constexpr, row: Row, loaded: Int32, tid: Int32) -> Int32:
        """Starts the copies of a tile, and arrives on its barriers; returns 1 if `expand` has to arrive, else 0."""
        self.copy_tile(smem, kind, row, loaded, tid)
        if const_expr(self.spec.pv_expands):
            if const_expr(codes.of(kind).expands):
                self.edges.raw.arrive_copies(smem, loaded)
                self.edges.raw.arrive(smem, loaded)
            else:
                self.arrive(smem, loaded)
                self.arrive_raw(smem, loaded)
        elif const_expr(codes.of(kind).expands):
            self.edges.keys.arrive(smem, loaded)
        else:
            self.arrive(smem, loaded)
        return Int32(self.spec.load_expands and codes.of(kind).expands)

    @cute.jit
    def close(self, smem, loaded: Int32, tid: Int32) -> Int32:
        """Gives PV the next stage without a tile, once the stage is free; returns the number of stages given so far."""
        stage = self.edges.keys.index(loaded)
        self.edges.keys.acquire(smem, loaded)
        sKinds = stage_kinds(smem, self.spec)
        if tid == 0:
            sKinds[stage] = Int32(NO_TILE)
        self.arrive_raw(smem, loaded)
        return loaded + 1

    def arrive_raw(self, smem, tile: Int32):
        """Makes both arrivals of a thread on `raw` for a tile that PV does not expand: it need not wait for copies."""
        for _ in range(2):
            self.edges.raw.arrive(smem, tile)

    @cute.jit
    def expand(self, smem, cursor: LoadCursor, tile: Int32, steps: cutlass.Constexpr, tid: Int32):
        """Expands `tile`, loaded `steps` steps before the last one, once its copies have ended, if it needs that."""
        if const_expr(self.spec.load_expands):
            if cursor.unexpanded >> steps & 1 != 0:
                stage = self.edges.keys.index(tile)
                cute.arch.cp_async_wait_group(steps)
                cute.arch.sync_warp()
                start = Int32(smem.codes.data_ptr().toint()) + stage * codes_bytes(self.spec)
                codes.of(self.expanded[0]).expand(start, ROWS_PER_WARP, tid)
                self.edges.keys.arrive(smem, tile)

    @cute.jit
    def copy_tile(self, smem, kind: cutlass.Constexpr, row: Row, loaded: Int32, tid: Int32):
        """Starts the copies of the rows of a tile; the bytes of masked rows become 0."""
        stage = self.edges.keys.index(loaded)
        lane, warp_idx, sMask = tid % 32, tid // 32, self.mask(smem)
        first, chunk = ROWS_PER_WARP * warp_idx, lane % 8
        low, high = Int32(row.data & 0xFFFFFFFF), Int32(row.data >> 32)
        bits = cute.arch.vote_ballot_sync(row.valid != 0)
        if lane == 0:
            sMask[loaded % self.spec.mask_stages * WARPS + warp_idx] = Int16(bits)
        valid = cutlass.select_(lane < ROWS_PER_WARP, bits >> lane & 1, Int32(-1))  # the other lanes have the same rows
        self.copy_scales(smem, kind, row, valid, (stage * TOKENS_PER_TILE + first + lane) * self.spec.scale_bytes)
        sCodes, rope, rope_slot = smem.codes.data_ptr(), None, Int32(0)
        if const_expr(self.spec.has_rope):
            rope, rope_slot = smem.rope.data_ptr(), self.edges.rope.index(loaded)
        code_bytes = kind.codes.num_bytes
        rest = const_expr(code_bytes % LINE_BYTES // CHUNK_BYTES)  # chunks of an incomplete line
        for i in cutlass.range_constexpr(ROWS_PER_WARP // ROWS_PER_STEP):
            copied = ROWS_PER_STEP * i + lane // 8  # row of the warp's 16 rows
            upper = Int64(cute.arch.shuffle_sync(high, copied)) << 32
            source = upper | (Int64(cute.arch.shuffle_sync(low, copied)) & 0xFFFFFFFF)
            source += CHUNK_BYTES * chunk
            size = (bits >> copied & 1) * CHUNK_BYTES
            line = line_offset(first + copied, chunk)
            start = stage * codes_bytes(self.spec) + codes.of(kind).first_line * (TOKENS_PER_TILE * LINE_BYTES)
            target = sCodes + cute.assume(start + line, divby=CHUNK_BYTES)
            for j in cutlass.range_constexpr(code_bytes // LINE_BYTES):
                self.copy_or_clear(source + LINE_BYTES * j, target + TOKENS_PER_TILE * LINE_BYTES * j, size)
            if const_expr(rest > 0):
                if chunk < rest:
                    begin = start + TOKENS_PER_TILE * LINE_BYTES * (code_bytes // LINE_BYTES)
                    offset = line_offset(first + copied, codes.of(kind).rest_chunk(chunk))
                    place = sCodes + cute.assume(begin + offset, divby=CHUNK_BYTES)
                    self.copy_or_clear(source + code_bytes // LINE_BYTES * LINE_BYTES, place, size)
            if const_expr(kind.rope is not None):
                place = rope + cute.assume(rope_slot * ROPE_BYTES + line, divby=CHUNK_BYTES)
                self.copy_or_clear(source + kind.field("rope").offset, place, size)

    @cute.jit
    def copy_scales(self, smem, kind: cutlass.Constexpr, row: Row, valid: Int32, start: Int32):
        """Starts the copy of a key's scales if `valid` is 1, or stores the scales of a masked key if it is 0.

        Both use predicates: around a branch ptxas computes the addresses of a row twice, which costs 16 heads 3%.
        """
        size, scales = min(scale_row(kind), CHUNK_BYTES), cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
        copy = "cp.async.cg" if const_expr(size == CHUNK_BYTES) else "cp.async.ca"
        words = ", ".join(["{$r3}"] * (size // 4))
        store = {4: "st.shared.b32", 8: "st.shared.v2.b32", 16: "st.shared.v4.b32"}[size]
        for i in cutlass.range_constexpr(scale_row(kind) // size):
            place = scales + cute.assume(start + size * i, divby=size)
            cute.arch.inline_ptx(
                "{\n.reg .pred copied, masked;\nsetp.eq.s32 copied, {$r2}, 1;\nsetp.eq.s32 masked, {$r2}, 0;\n"
                f"@copied {copy}.shared.global [{{$r0}}], [{{$r1}}], {size};\n"
                f"@masked {store} [{{$r0}}], " + "{" + words + "};\n}",
                read_only_args=[
                    Int32(place.toint()),
                    row.scales + size * i,
                    valid,
                    Int32(codes.of(kind).masked_scales),
                ],
            )

    @cute.jit
    def copy_or_clear(self, source: Int64, target: cute.Pointer, size: Int32):
        """Starts the copy of 16 bytes; with size 0 instead of 16 it stores zeros and reads nothing."""
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {CHUNK_BYTES}, {{$r2}};",
            read_only_args=[Int32(target.toint()), source, size],
        )

    @cute.jit
    def stamp(self, smem, tile: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """Stores a timestamp of a key tile."""
        self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * tile + event, edge, tid == 0)
