"""Loads of key tiles of the latent decode kernel: rows of codes and scales, of one cache or two, by cp.async."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int16, Int32, Int64, Uint8, const_expr

from cute_kernels.mla.kernels.load import CHUNK_BYTES, ROWS_PER_STEP, KeyLoader
from cute_kernels.mla.kernels.scheduler import WorkTable
from cute_kernels.mla.kernels.smem import ROPE_BYTES, WARPS, line_offset
from cute_kernels.mla.latent.kernels import codes
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler, Source, tiles_of
from cute_kernels.mla.latent.kernels.smem import NO_TILE, codes_bytes, stage_kinds
from cute_kernels.mla.latent.spec import LINE_BYTES, LatentDecodeSpec, scale_row
from cute_kernels.mla.spec import TOKENS_PER_TILE

ROWS_PER_WARP = TOKENS_PER_TILE // WARPS


class Entries(NamedTuple):
    """The keys of a work tile in one cache: the address of its index list or block table, and the last position."""

    address: Int64
    last: Int32


class LatentCursor(NamedTuple):
    """What a thread loads next.

    next_work    index of the work tile after that of the next key tile
    tiles_left   key tiles left of the current work tile
    position     of this lane's key in the next key tile; keys of the second cache begin at `extra_begin`
    main, extra  keys of the work tile in each cache; without a second cache extra is that of the first
    extra_begin  a whole number of key tiles
    entry        the entry of this lane's key
    next_length  length of the next work tile
    loaded       key tiles loaded so far, and stages closed after the last one
    unexpanded   a bit for each step so far, the last one in bit 0: 1 if it has loaded a tile that `expand` is to expand
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
    """A key: 1 and where its data row and its scales are; or 0 and two addresses inside of the cache."""

    valid: Int32
    data: Int64
    scales: Int64


class LatentLoader(KeyLoader):
    """Device code for 128 threads, a warp for 16 rows of a tile; see `KeyLoader`.

    `page_tma` is the caches' `Source`s, one or two: these rows come without TMA.

    A format whose codes expand: the end of the copies does not arrive on `full`; who expands them does.

    With 8 and 16 heads a warp waits for its own copies and expands them where they lie (`expand`). So each step ends a
    group of copies, empty or not, and those of a tile are complete once no more groups are under way than steps have
    followed. No deadlock: `expand` waits for copies alone, never for another role. A step waits until PV has read the
    tile of `stages` before, and what PV needs for that is there: all but the newest tile are expanded before a step,
    and there are `stages` of them, more than one.

    With 32 and 64 heads PV expands (`ScaledKeyPvWarpgroups.expand`), and copies arrive on `raw`. All tiles do, so PV
    waits for one after the other; those that do not expand arrive there at once. A step without a tile gives PV a stage
    with NO_TILE instead (`close`).
    """

    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.scheduler: LatentScheduler = LatentScheduler(spec)
        self.expanded = [kind for kind in spec.kinds if codes.of(kind).expands]

    @cute.jit
    def run(self, smem, table: WorkTable, page_tma: tuple, tid: Int32):
        """Loads the key tiles of all work tiles of this CTA; expands each once the next one is requested."""
        cursor = self.start(table, tid)
        if const_expr(self.spec.load_expands):
            steps = Int32(0)
            while cursor.tiles_left > 0 or cursor.unexpanded & 1 != 0:
                cursor = self.step(smem, table, page_tma, cursor, tid)
                self.expand(smem, cursor, steps - 1, 1, tid)
                steps += 1
        else:
            while cursor.tiles_left > 0:
                cursor = self.step(smem, table, page_tma, cursor, tid)

    @cute.jit
    def start(self, table: WorkTable, tid: Int32) -> LatentCursor:
        """The cursor at the first key tile of this CTA."""
        first = table.share.first
        length = self.scheduler.length(self.scheduler.locate(first, table), table.mLength)
        zero, none = Int32(0), Entries(Int64(0), Int32(0))
        return self.advance(table, LatentCursor(first, zero, zero, none, none, zero, zero, length, zero, zero), tid)

    @cute.jit
    def advance(self, table: WorkTable, cursor: LatentCursor, tid: Int32) -> LatentCursor:
        """Goes on to the next work tile with keys where none are left of this one; starts to load the next entry."""
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
            length = self.scheduler.length(following, table.mLength)  # a work tile ahead: it takes some 1000 clocks
        if tiles_left > 0:
            local, entries, last = position, main.address, main.last
            if const_expr(self.spec.has_extra):
                if position >= extra_begin:
                    local, entries, last = position - extra_begin, extra.address, extra.last
            pointer = cute.make_ptr(Int32, entries, AddressSpace.gmem, assumed_align=4)
            mEntries = cute.make_tensor(pointer, cute.make_layout(1 << 30))  # more than any list has
            entry = self.finder.read_entry(mEntries, local, last, table.divisors.page_size)
        return LatentCursor(
            next_work, tiles_left, position, main, extra, extra_begin, entry, length, loaded, unexpanded
        )

    @cute.jit
    def step(self, smem, table: WorkTable, page_tma: tuple, cursor: LatentCursor, tid: Int32) -> LatentCursor:
        """Loads the next key tile, if there is one, once its stage is free; returns the new cursor."""
        next_work, tiles_left, position, main, extra, extra_begin, entry, length, loaded, unexpanded = cursor
        if const_expr(self.spec.load_expands):
            unexpanded = unexpanded << 1
        if const_expr(self.spec.pv_expands):
            if tiles_left == 0:
                loaded = self.close(smem, loaded, tid)
        if tiles_left > 0:
            stage = self.edges.keys.index(loaded)
            self.stamp(smem, loaded, 0, 0, tid)
            self.edges.keys.acquire(smem, loaded)
            self.stamp(smem, loaded, 0, 1, tid)
            self.stamp(smem, loaded, 1, 0, tid)
            valid, data, scales = self.find_row(page_tma[0], entry, position, main.last)
            if const_expr(self.spec.has_extra):
                if position >= extra_begin:
                    valid, data, scales = self.find_row(page_tma[1], entry, position - extra_begin, extra.last)
            row, kinds = Row(valid, data, scales), self.spec.kinds
            if const_expr(len(kinds) > 1):
                sKinds = stage_kinds(smem, self.spec)
                kind = Int32(1) if position - self.row(tid) >= extra_begin else Int32(0)
                if tid == 0:
                    sKinds[stage] = kind
                if kind == 0:
                    unexpanded |= self.request(smem, kinds[0], row, loaded, tid)
                else:
                    unexpanded |= self.request(smem, kinds[1], row, loaded, tid)
            else:
                if const_expr(self.spec.pv_expands):
                    sKinds = stage_kinds(smem, self.spec)
                    if tid == 0:
                        sKinds[stage] = Int32(0)
                unexpanded |= self.request(smem, kinds[0], row, loaded, tid)
            self.stamp(smem, loaded, 1, 1, tid)
            tiles_left, position, loaded = tiles_left - 1, position + TOKENS_PER_TILE, loaded + 1
        if const_expr(self.spec.load_expands):
            cute.arch.cp_async_commit_group()
        cursor = LatentCursor(
            next_work, tiles_left, position, main, extra, extra_begin, entry, length, loaded, unexpanded
        )
        return self.advance(table, cursor, tid)

    @cute.jit
    def find_row(self, source: Source, entry: Int32, position: Int32, last: Int32) -> Row:
        """The rows of the key at a position of a cache, from its entry."""
        mKV = source.mKV
        bound = mKV.shape[0]
        if const_expr(self.spec.sparse):
            bound *= mKV.shape[1]
        inside = cutlass.min(cutlass.max(entry, 0), bound - 1)  # one comparison, so one predicate less than two bounds
        valid = Int32(1) if inside == entry and position <= last else Int32(0)
        if const_expr(self.spec.sparse):
            page, offset = divmod(inside, source.page_size)
        else:
            page, offset = inside, position % source.page_size
        begin = mKV.iterator.toint() + Int64(page) * Int64(mKV.stride[0])  # 64 bits: caches of more than 2^31 bytes
        data = begin + Int64(offset) * Int64(source.data_stride)
        return Row(valid, data, begin + (Int64(source.scale_offset) + Int64(offset) * Int64(source.scale_stride)))

    @cute.jit
    def request(self, smem, kind: cutlass.Constexpr, row: Row, loaded: Int32, tid: Int32) -> Int32:
        """Starts the copies of a tile, and arrives on its barriers; returns 1 if `expand` is to arrive, else 0."""
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
        """Gives PV the next stage without a tile, once it is free; returns the number of stages given so far."""
        stage = self.edges.keys.index(loaded)
        self.edges.keys.acquire(smem, loaded)
        sKinds = stage_kinds(smem, self.spec)
        if tid == 0:
            sKinds[stage] = Int32(NO_TILE)
        self.arrive_raw(smem, loaded)
        return loaded + 1

    def arrive_raw(self, smem, tile: Int32):
        """Both arrivals of a thread on `raw` for a tile that PV is not to expand: it need not wait for copies."""
        for _ in range(2):
            self.edges.raw.arrive(smem, tile)

    @cute.jit
    def expand(self, smem, cursor: LatentCursor, tile: Int32, steps: cutlass.Constexpr, tid: Int32):
        """Expands the codes of `tile`, that of `steps` steps before the last one, if they are to be, once copied."""
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
        """Starts the copies of the rows of a tile, some of which may be masked: their bytes become 0."""
        stage = self.edges.keys.index(loaded)
        lane, warp_idx, sMask = tid % 32, tid // 32, self.mask(smem)
        first, chunk = 16 * warp_idx, lane % 8
        low, high = Int32(row.data & 0xFFFFFFFF), Int32(row.data >> 32)
        bits = cute.arch.vote_ballot_sync(row.valid != 0)
        if lane == 0:
            sMask[loaded % self.spec.mask_stages * WARPS + warp_idx] = Int16(bits)
        if lane < 16:
            self.copy_scales(smem, kind, row, (stage * TOKENS_PER_TILE + first + lane) * self.spec.scale_bytes)
        sCodes, rope, rope_slot = smem.codes.data_ptr(), None, Int32(0)
        if const_expr(self.spec.has_rope):
            rope, rope_slot = smem.rope.data_ptr(), self.edges.rope.index(loaded)
        code_bytes = kind.codes.num_bytes
        rest = const_expr(code_bytes % LINE_BYTES // CHUNK_BYTES)  # chunks of an incomplete line
        for i in cutlass.range_constexpr(16 // ROWS_PER_STEP):
            copied = ROWS_PER_STEP * i + lane // 8  # row of the warp's 16
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
    def copy_scales(self, smem, kind: cutlass.Constexpr, row: Row, start: Int32):
        """Starts the copy of a key's scales. Those of a masked key are zeros, as its codes are."""
        size, scales = min(scale_row(kind), CHUNK_BYTES), cute.recast_ptr(smem.scale.data_ptr(), dtype=Uint8)
        for i in cutlass.range_constexpr(scale_row(kind) // size):
            place = scales + cute.assume(start + size * i, divby=size)
            if row.valid != 0:
                operation = "cp.async.cg" if const_expr(size == CHUNK_BYTES) else "cp.async.ca"
                cute.arch.inline_ptx(
                    f"{operation}.shared.global [{{$r0}}], [{{$r1}}], {size};",
                    read_only_args=[Int32(place.toint()), row.scales + size * i],
                )
            else:
                words = cute.make_rmem_tensor(size // 4, Int32)
                words.fill(0)
                cute.autovec_copy(
                    words, cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(size // 4))
                )
