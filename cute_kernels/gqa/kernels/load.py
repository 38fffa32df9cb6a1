"""The load warp of the decode kernel: streams key tiles of K and V into shared memory by TMA."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.device.pipeline import Slot
from cute_kernels.gqa.kernels.arguments import PageTable, Tma
from cute_kernels.gqa.kernels.cache_tiles import partition
from cute_kernels.gqa.kernels.pipelines import pipelines
from cute_kernels.gqa.kernels.scheduler import Scheduler, Upcoming, WorkList
from cute_kernels.gqa.kernels.smem import SmemViews
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32
LINE_ENTRIES = 32  # page numbers in a line of the L2 cache


class TileCopy(NamedTuple):
    """The TMA copies of K or of V.

    gTile  (box, row, row segment, head, outer) in global memory
    sTile  (box, box of the tile, row segment, stage) in shared memory
    """

    load: cute.CopyAtom
    gTile: cute.Tensor
    sTile: cute.Tensor


class TileBox(NamedTuple):
    """The place of a tile in global memory: KV head, sequence, key tile, and its number in a batch of page numbers."""

    kv_head: Int32
    sequence: Int32
    tile: Int32
    in_batch: Int32


class LoadWarp:
    """Fills the stages of :class:`cute_kernels.gqa.kernels.decode.GqaDecodeKernel`; device code for one warp.

    A tile is `boxes` TMA copies for each 128 bytes of a row, all on the barrier of its stage. Page numbers are read 32
    at a time, one a lane, a batch ahead of the tiles that need them, also across sequences: with 16 MB of tiles in
    flight on the card such a load takes 5 us, longer than some sequences.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.kv = pipelines(spec).kv
        self.keys = spec.keys_per_tile
        self.boxes = self.keys // spec.box_rows
        self.batch = max(WARP // self.boxes, 1)  # tiles whose page numbers are read together
        self.entries = max(self.boxes // WARP, 1)  # page numbers of a batch in a lane

    @cute.jit
    def run(self, k_tma: Tma, v_tma: Tma, work_list: WorkList, page_table: PageTable, smem: SmemViews, lane: Int32):
        """Loads the tiles of all work tiles of this CTA, in order."""
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        survey = self.scheduler.survey(work_list, lane)
        gK, sK = partition(spec, "k", k_tma, smem.tiles)
        gV, sV = partition(spec, "v", v_tma, smem.tiles + spec.tile("k").size // spec.itemsize)
        copies = (TileCopy(k_tma.atom, gK, sK), TileCopy(v_tma.atom, gV, sV))
        pages = cute.make_rmem_tensor(self.entries, Int32)
        pages_next = cute.make_rmem_tensor(self.entries, Int32)
        exists = cute.make_rmem_tensor(self.entries, Int32)
        batch = const_expr(self.batch)
        sExists = cute.make_tensor(smem.page_exists, cute.make_layout((spec.page_words, spec.stages)))
        slot = Slot(Int32(0), Int32(0))
        for index in cutlass.range(cta, work_list.work.num_work_tiles, ctas, unroll=1):
            work_tile = self.scheduler.work_tile(work_list, index)
            if const_expr(spec.cluster > 1 and spec.paged):
                self.prefetch_pages(page_table, work_tile.range // spec.cluster, lane)
            assigned = self.scheduler.assignment(work_list, survey, work_tile.range)
            if const_expr(spec.paged):
                ahead = self.scheduler.first_upcoming(work_list, assigned)  # the next batch of page numbers
                self.read_pages(pages_next, page_table, ahead, lane)
            b, offset, left, _ = assigned
            while left > 0:
                length, first, tiles, _ = self.scheduler.extent(work_list, b)
                stop = cutlass.min(offset + left, tiles)
                left -= stop - offset
                if length > 0:
                    in_batch = Int32(0)  # number of a tile in its batch of page numbers
                    for tile in cutlass.range(first + offset, first + stop, unroll=1):
                        if const_expr(spec.paged):
                            if in_batch == 0:
                                for e in cutlass.range_constexpr(self.entries):
                                    pages[e] = pages_next[e]
                                    clamped = cutlass.min(cutlass.max(pages[e], 0), page_table.num_pages - 1)
                                    exists[e] = cute.arch.vote_ballot_sync(clamped == pages[e])
                                following = cutlass.min(ahead.tile + batch, ahead.stop)  # no batch has two sequences
                                ahead = self.scheduler.skip_ended(work_list, ahead._replace(tile=following))
                                self.read_pages(pages_next, page_table, ahead, lane)
                        self.kv.acquire(smem, slot)
                        with cute.arch.elect_one():
                            if const_expr(spec.paged):
                                for e in cutlass.range_constexpr(self.entries):
                                    sExists[e, slot.index] = exists[e] >> (in_batch * self.boxes % 32)
                            self.kv.arrive_and_expect(smem, slot)
                        box = TileBox(work_tile.kv_head, b, tile, in_batch)
                        self.copy_tile(copies, page_table, pages, smem, slot.index, box)
                        in_batch = cutlass.select_(in_batch + 1 == batch, Int32(0), in_batch + 1)
                        slot = self.kv.following(slot)
                offset = Int32(0)
                b += 1

    @cute.jit
    def prefetch_pages(self, page_table: PageTable, b: Int32, lane: Int32):
        """Brings the first 1024 page numbers of a sequence into the L2 cache while its length is being loaded."""
        mTable = page_table.mTable
        entry = cutlass.min(lane * LINE_ENTRIES, Int32(mTable.shape[1]) - 1)
        address = mTable[b, None].iterator.toint() + 4 * Int64(entry)
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])

    @cute.jit
    def read_pages(self, pages: cute.Tensor, page_table: PageTable, ahead: Upcoming, lane: Int32):
        """Loads the page of box l % boxes of tile l / boxes, from `ahead` on, into lane l; boxes > 32: several each.

        Boxes past the last token repeat its page, so no later entry is read; nor any entry of a sequence without tiles.
        """
        if ahead.tile < ahead.stop:
            for e in cutlass.range_constexpr(self.entries):
                box = (lane % self.boxes + e * WARP) * self.spec.box_rows
                key = cutlass.min((ahead.tile + lane // self.boxes) * self.keys + box, ahead.length - 1)
                pages[e] = page_table.mTable[ahead.sequence, key >> page_table.shift]

    @cute.jit
    def copy_tile(
        self,
        copies: tuple[TileCopy, TileCopy],
        page_table: PageTable,
        pages: cute.Tensor,
        smem: SmemViews,
        stage: Int32,
        box: TileBox,
    ):
        """Starts all copies of one tile."""
        head, b, tile, in_batch = box
        row, outer = tile, b
        if const_expr(self.spec.paged):
            # which part of a page that is as large as a tile or larger; a smaller page is one box
            row = Int32(0)
            if const_expr(self.boxes == 1):
                row = tile & ((Int32(1) << (page_table.shift - self.keys.bit_length() + 1)) - 1)
        full = self.kv.full_barrier(smem, stage)
        unroll = 4 if const_expr(self.spec.d < 256) else 1  # otherwise ptxas spills an address with d 256
        for i in cutlass.range(self.boxes, unroll=min(self.boxes, unroll)):
            if const_expr(self.spec.paged):
                entry = pages[0]
                for e in cutlass.range_constexpr(1, self.entries):
                    entry = cutlass.select_(i >= e * WARP, pages[e], entry)
                outer = cute.arch.shuffle_sync(entry, (in_batch * self.boxes + i) % WARP)
            segments = const_expr(cute.size(copies[0].sTile, mode=[2]))
            if const_expr(self.spec.d > 256 and self.boxes > 1):  # ptxas spills an address if these are unrolled
                for c in cutlass.range(segments, unroll=1):
                    for load, gTile, sTile in copies:
                        cute.copy(load, gTile[None, row, c, head, outer], sTile[None, i, c, stage], tma_bar_ptr=full)
            else:
                for c in cutlass.range_constexpr(segments):
                    for load, gTile, sTile in copies:
                        if const_expr(c < cute.size(sTile, mode=[2])):  # V may have fewer row segments than K
                            cute.copy(
                                load, gTile[None, row, c, head, outer], sTile[None, i, c, stage], tma_bar_ptr=full
                            )
