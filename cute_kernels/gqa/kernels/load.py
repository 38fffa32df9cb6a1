"""The load warp of GQA decoding: streams tiles of K and V into shared memory by TMA."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.gqa.kernels.arguments import PageFacts, TmaCopies
from cute_kernels.gqa.kernels.scheduler import Scheduler, WorkList
from cute_kernels.gqa.kernels.smem import DTYPES, SharedMemory
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32
LINE_ENTRIES = 32  # page numbers in a line of the L2 cache


class TilePartition(NamedTuple):
    """The copies of K and V cut into boxes.

    k, v    source (box, row, column block, head, outer)
    sK, sV  target (box, box of the tile, column block, stage)
    """

    k: cute.Tensor
    sK: cute.Tensor
    v: cute.Tensor
    sV: cute.Tensor


class PageCursor(NamedTuple):
    """Page numbers in registers, `entries` a lane: of the tiles at hand, of the next ones, and which of them exist."""

    pages: cute.Tensor
    pages_next: cute.Tensor
    exists: cute.Tensor


class LoadWarp:
    """Device code for one warp.

    A tile is `boxes` TMA copies for each 128 bytes of a row, all on the barrier of its stage. Page numbers come 32 at a
    time, one a lane, a batch ahead of the tiles that need them: waiting for a page number in every tile would take
    longer than the tile.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.keys = spec.keys_per_tile
        self.boxes = self.keys // spec.box_rows
        self.batch = max(WARP // self.boxes, 1)  # tiles whose page numbers are read together
        self.entries = max(self.boxes // WARP, 1)  # of them in a lane

    @cute.jit
    def run(
        self, copies: TmaCopies, mTable, work: WorkList, paging: PageFacts, page_shift: Int32, smem: SharedMemory,
        lane: Int32,
    ):  # fmt: skip
        """Copies the tiles of all work tiles of this CTA, in order."""
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        survey = self.scheduler.survey(work, lane)
        tiles = self.partition_tiles(copies, smem)
        cursor = PageCursor(*(cute.make_rmem_tensor(self.entries, Int32) for _ in range(3)))
        sValid = cute.make_tensor(smem.valid, cute.make_layout((spec.valid_words, spec.stages)))
        stage, phase = Int32(0), Int32(0)
        for number in cutlass.range(cta, work.grid.work_tiles, ctas, unroll=1):
            work_tile = self.scheduler.work_tile(number, work)
            if const_expr(spec.cluster > 1 and spec.paged):
                self.prefetch_pages(mTable, work_tile.range_idx // spec.cluster, lane)
            b, offset, left, _ = self.scheduler.range_start(work, survey, work_tile.range_idx)
            while left > 0:
                length, first, count = self.scheduler.extent(work, b)
                stop = cutlass.min(offset + left, count)
                left -= stop - offset
                if length > 0:
                    slot = Int32(0)
                    if const_expr(spec.paged):
                        self.read_pages(cursor.pages_next, mTable, b, first + offset, length, page_shift, lane)
                    for tile in cutlass.range(first + offset, first + stop, unroll=1):
                        if const_expr(spec.paged):
                            if slot == 0:
                                self.turn_pages(cursor, paging)
                                ahead = tile + self.batch
                                self.read_pages(cursor.pages_next, mTable, b, ahead, length, page_shift, lane)
                        cute.arch.mbarrier_wait(smem.empty + stage, phase ^ 1)
                        with cute.arch.elect_one():
                            if const_expr(spec.paged):
                                for e in cutlass.range_constexpr(self.entries):
                                    sValid[e, stage] = cursor.exists[e] >> (slot * self.boxes % 32)
                            cute.arch.mbarrier_arrive_and_expect_tx(smem.full + stage, spec.copied_bytes)
                        self.fill_tile(
                            copies, tiles, smem.full, stage, work_tile.kv_head, b, tile, slot, cursor.pages, page_shift
                        )
                        slot = cutlass.select_(slot + 1 == self.batch, Int32(0), slot + 1)
                        phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                        stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
                offset = Int32(0)
                b += 1

    # ---- page numbers

    @cute.jit
    def prefetch_pages(self, mTable, b: Int32, lane: Int32):
        """Brings the first 1024 page numbers of a sequence into the L2 cache, while its length is still on the way."""
        entry = cutlass.min(lane * LINE_ENTRIES, Int32(mTable.shape[1]) - 1)
        address = mTable[b, None].iterator.toint() + 4 * Int64(entry)
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])

    @cute.jit
    def read_pages(
        self,
        pages: cute.Tensor,
        mTable: cute.Tensor,
        b: Int32,
        tile: Int32,
        length: Int32,
        page_shift: Int32,
        lane: Int32,
    ):
        """Puts the page of box l % boxes of tile l / boxes, counted from `tile`, into lane l; boxes > 32: several each.

        Boxes past the last token repeat its page, so no entry past it is read.
        """
        for e in cutlass.range_constexpr(self.entries):
            key = (tile + lane // self.boxes) * self.keys + (lane % self.boxes + e * WARP) * self.spec.box_rows
            pages[e] = mTable[b, cutlass.max(cutlass.min(key, length - 1), 0) >> page_shift]

    @cute.jit
    def turn_pages(self, cursor: PageCursor, paging: PageFacts):
        """Makes the next page numbers those at hand, and finds out which of them exist."""
        for e in cutlass.range_constexpr(self.entries):
            cursor.pages[e] = cursor.pages_next[e]
            inside = cutlass.min(cutlass.max(cursor.pages[e], 0), paging.count - 1)
            cursor.exists[e] = cute.arch.vote_ballot_sync(inside == cursor.pages[e])

    # ---- a tile

    @cute.jit
    def fill_tile(
        self,
        copies: TmaCopies,
        tiles: TilePartition,
        full: cute.Pointer,
        stage: Int32,
        head: Int32,
        b: Int32,
        tile: Int32,
        slot: Int32,
        pages: cute.Tensor,
        page_shift: Int32,
    ):
        """Starts all copies of one tile; `slot` is its number in the batch of page numbers."""
        row, outer = tile, b
        if const_expr(self.spec.paged):
            # which part of a page as large as a tile or larger; smaller ones have one box
            row = Int32(0)
            if const_expr(self.boxes == 1):
                row = tile & ((Int32(1) << (page_shift - self.keys.bit_length() + 1)) - 1)
        unroll = 4 if const_expr(self.spec.d < 256) else 1  # ptxas spills an address of d 256 otherwise
        for i in cutlass.range(self.boxes, unroll=min(self.boxes, unroll)):
            if const_expr(self.spec.paged):
                entry = pages[0]
                for e in cutlass.range_constexpr(1, self.entries):
                    entry = cutlass.select_(i >= e * WARP, pages[e], entry)
                outer = cute.arch.shuffle_sync(entry, (slot * self.boxes + i) % WARP)
            for c in cutlass.range_constexpr(cute.size(tiles.sK, mode=[2])):
                source, target = (None, row, c, head, outer), (None, i, c, stage)
                cute.copy(copies.k_atom, tiles.k[source], tiles.sK[target], tma_bar_ptr=full + stage)
                cute.copy(copies.v_atom, tiles.v[source], tiles.sV[target], tma_bar_ptr=full + stage)

    def partition_tiles(self, copies: TmaCopies, smem: SharedMemory) -> TilePartition:
        """K and V of the cache and of the stages, cut into boxes."""
        spec = self.spec
        k, sK = partition(spec, copies.k_atom, copies.k, smem.tiles)
        v, sV = partition(spec, copies.v_atom, copies.v, smem.tiles + spec.tile_bytes // spec.itemsize)
        return TilePartition(k, sK, v, sV)


def tile_layout(spec: GqaDecodeSpec):
    """Shared memory of one box: (rows, columns), swizzled unless the bytes come as vLLM packs them."""
    shape = box_shape(spec)
    plain = cute.make_ordered_layout(shape, order=(1, 0))
    if spec.layout == "vllm":
        return plain
    bits = 3 if shape[1] * spec.itemsize == 128 else 2
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, plain)


def box_shape(spec: GqaDecodeSpec) -> tuple[int, int]:
    """(rows, columns) of one TMA copy. The bytes of a vLLM page and head are contiguous: rows of 128 of them."""
    if spec.layout == "vllm":
        columns = 128 // spec.itemsize
        return spec.d * spec.box_rows // columns, columns
    return spec.box_rows, spec.row_bytes // spec.itemsize


def partition(spec: GqaDecodeSpec, load: cute.CopyAtom, tensor: cute.Tensor, smem: cute.Pointer):
    """(source (box, row, column block, head, outer), target (box, box of the tile, column block, stage)) of a copy."""
    box = box_shape(spec)
    blocks = 1 if spec.layout == "vllm" else spec.d // box[1]
    boxes = spec.keys_per_tile // spec.box_rows
    # column blocks outermost, so that the rows of a block are those of the tile
    box_stride = box[0] * box[1] if spec.layout == "vllm" else box[0] * spec.row_pitch // spec.itemsize
    stage = 2 * spec.tile_bytes // spec.itemsize
    stride = (box[1], 1, box_stride, boxes * box_stride, stage)
    shape = cute.make_layout((*box, boxes, blocks, spec.stages), stride=stride)
    pointer = smem
    if spec.layout != "vllm":
        pointer = cute.recast_ptr(smem, tile_layout(spec).inner, DTYPES[spec.kv_dtype])
    sTile = cute.make_tensor(pointer, shape)
    gTile = cute.local_tile(tensor, box, (None, None, None, None))
    target, source = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(sTile, 0, 2), cute.group_modes(gTile, 0, 2)
    )
    return source, target
