"""The producer warp of the decode kernel: streams tiles of K and V into shared memory by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32
LINE_ENTRIES = 32  # page numbers in a line of the L2 cache


class TileProducer:
    """Fills the stages of :class:`cute_kernels.gqa.kernels.decode.GqaDecodeKernel`; device code for one warp.

    A tile is `boxes` TMA copies for each 128 bytes of a row, all on the barrier of its stage. Page numbers
    come 32 at a time, one a lane, a batch ahead of the tiles that need them: a load that is waited for in every tile
    would take longer than the tile.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.keys = spec.keys_per_tile
        self.boxes = self.keys // spec.box_rows
        self.batch = max(WARP // self.boxes, 1)  # tiles whose page numbers are read together
        self.entries = max(self.boxes // WARP, 1)  # of them in a lane

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
        """The page of box l % boxes of tile l / boxes, counted from `tile`, into lane l; boxes > 32: several each.

        Boxes behind the last token repeat its page, so no entry behind it is read.
        """
        for e in cutlass.range_constexpr(self.entries):
            key = (tile + lane // self.boxes) * self.keys + (lane % self.boxes + e * WARP) * self.spec.box_rows
            pages[e] = mTable[b, cutlass.max(cutlass.min(key, length - 1), 0) >> page_shift]

    @cute.jit
    def fill_tile(
        self,
        load_k: cute.CopyAtom,
        load_v: cute.CopyAtom,
        sources: tuple,
        targets: tuple,
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
        gK, gV = sources
        sK, sV = targets
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
            for c in cutlass.range_constexpr(cute.size(sK, mode=[2])):
                cute.copy(load_k, gK[None, row, c, head, outer], sK[None, i, c, stage], tma_bar_ptr=full + stage)
                cute.copy(load_v, gV[None, row, c, head, outer], sV[None, i, c, stage], tma_bar_ptr=full + stage)


def tile_layout(spec: GqaDecodeSpec):
    """Shared memory of one box: (rows, columns), swizzled unless the bytes come as vLLM packs them."""
    shape = box_shape(spec)
    plain = cute.make_ordered_layout(shape, order=(1, 0))
    if spec.packed:
        return plain
    bits = 3 if shape[1] * spec.itemsize == 128 else 2
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, plain)


def box_shape(spec: GqaDecodeSpec) -> tuple[int, int]:
    """(rows, columns) of one TMA copy. The bytes of a vLLM page and head are contiguous: rows of 128 of them."""
    if spec.packed:
        columns = 128 // spec.itemsize
        return spec.d * spec.box_rows // columns, columns
    return spec.box_rows, spec.row_bytes // spec.itemsize


def partition(spec: GqaDecodeSpec, load: cute.CopyAtom, tensor: cute.Tensor, smem: cute.Pointer, dtype):
    """(source (box, row, column block, head, outer), target (box, box of the tile, column block, stage)) of a copy."""
    box = box_shape(spec)
    blocks = 1 if spec.packed else spec.d // box[1]
    boxes = spec.keys_per_tile // spec.box_rows
    # column blocks outermost, so that the rows of a block are those of the tile
    of_box = box[0] * box[1] if spec.packed else box[0] * spec.row_pitch // spec.itemsize
    stage = 2 * spec.tile_bytes // spec.itemsize
    stride = (box[1], 1, of_box, boxes * of_box, stage)
    shape = cute.make_layout((*box, boxes, blocks, spec.stages), stride=stride)
    pointer = smem
    if not spec.packed:
        pointer = cute.recast_ptr(smem, tile_layout(spec).inner, dtype)
    sTile = cute.make_tensor(pointer, shape)
    gTile = cute.local_tile(tensor, box, (None, None, None, None))
    target, source = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(sTile, 0, 2), cute.group_modes(gTile, 0, 2)
    )
    return source, target
