"""The scale warps of the decode kernel: scales of tokens, from wherever they lie, into shared memory as float32."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float16, Float32, Int32, Int64, const_expr

from cute_kernels.gqa.spec import GqaDecodeSpec

DTYPES = {"float16": Float16, "float32": Float32}
WARP = 32
DEPTH = 8  # tiles that scales of tokens are ahead: 8 us where a tile takes one


class ScaleProducer:
    """Fills the scales of the stages of :class:`cute_kernels.gqa.kernel.GqaDecodeKernel`; device code for one warp.

    One warp brings the scales of K, another those of V; a lane has `keys` keys of a tile. While 16 MB of tiles are in
    flight a load waits microseconds in the queue of the memory, so loads are `depth` tiles ahead, in registers. The
    page numbers that they need come 32 at a time, one a lane, for `batch` tiles, and the next 32 with them.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.tile = spec.keys_per_tile
        self.keys = self.tile // WARP
        self.k_groups = spec.scale_groups(spec.k_scales)
        self.v_groups = spec.scale_groups(spec.v_scales)
        self.loads = max(self.k_groups, self.v_groups)
        self.boxes = self.tile // spec.box_rows  # page numbers of a tile
        self.batch = max(WARP // self.boxes, 1)
        self.entries = max(self.boxes // WARP, 1)  # of them in a lane
        of_tokens = DEPTH if self.entries == 1 else 4  # more page numbers take the registers
        self.depth = {0: 1, 1: of_tokens, 2: 4, 4: 2, 8: 1}[self.loads]
        self.dtype = DTYPES[spec.scale_dtype]

    @cute.jit
    def source(self, k_scale: Int64, k_strides: tuple, v_scale: Int64, v_strides: tuple, head: Int32, of_v):
        """(address of a head's scales, strides of outer, row and group in elements) of K or of V."""
        base, outer, of_head, row, group = k_scale, k_strides[0], k_strides[1], k_strides[2], k_strides[3]
        if of_v:
            base, outer, of_head, row, group = v_scale, v_strides[0], v_strides[1], v_strides[2], v_strides[3]
        return base + Int64(head) * of_head * const_expr(self.dtype.width // 8), outer, row, group

    @cute.jit
    def fill(
        self,
        mTable,
        source: tuple,
        scales: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        stage: Int32,
        phase: Int32,
        b: Int32,
        start: Int32,
        stop: Int32,
        length: Int32,
        page_shift: Int32,
        page_size: Int32,
        num_pages: Int32,
        of_v,
        lane: Int32,
    ):
        """Fills a stage for each tile from `start` to `stop`; returns the stage and phase after them."""
        spec = self.spec
        raw = cute.make_rmem_tensor((self.keys, self.loads, self.depth), self.dtype)
        pages = cute.make_rmem_tensor(self.entries, Int32)
        pages_next = cute.make_rmem_tensor(self.entries, Int32)
        groups = cutlass.select_(of_v, Int32(self.v_groups), Int32(self.k_groups))
        shift = cutlass.select_(of_v, Int32(self.k_groups * self.tile), Int32(0))
        self.read_pages(pages_next, mTable, b, start, length, page_shift, lane)
        slot = Int32(0)
        for d in cutlass.range_constexpr(self.depth):
            slot = self.turn_page(pages, pages_next, mTable, b, start + d, slot, length, page_shift, lane)
            self.load(raw[None, None, d], pages, slot, source, b, start + d, length, page_size, num_pages, groups, lane)
            slot += 1
        for first in cutlass.range(start, stop, self.depth, unroll=1):
            for d in cutlass.range_constexpr(self.depth):
                tile = first + d
                if tile < stop:
                    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                    sScale = cute.make_tensor(
                        scales + stage * spec.scale_values + shift,
                        cute.make_layout((WARP, self.keys, self.loads), stride=(1, WARP, self.tile)),
                    )
                    for g in cutlass.range_constexpr(self.loads):
                        if g < groups:
                            for i in cutlass.range_constexpr(self.keys):
                                sScale[lane, i, g] = raw[i, g, d].to(Float32)
                    cute.arch.mbarrier_arrive(full + stage)
                    phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                    stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
                    ahead = tile + self.depth
                    slot = self.turn_page(pages, pages_next, mTable, b, ahead, slot, length, page_shift, lane)
                    self.load(
                        raw[None, None, d], pages, slot, source, b, ahead, length, page_size, num_pages, groups, lane
                    )
                    slot += 1
        return stage, phase

    def _key(self, tile, i: int, length, lane):
        """The lane's i-th key of a tile; behind the last token, that one."""
        return cutlass.max(cutlass.min(tile * self.tile + i * WARP + lane, length - 1), 0)

    @cute.jit
    def turn_page(
        self,
        pages: cute.Tensor,
        pages_next: cute.Tensor,
        mTable,
        b: Int32,
        tile: Int32,
        slot: Int32,
        length: Int32,
        page_shift: Int32,
        lane: Int32,
    ):
        """The slot of `tile` among the page numbers in `pages`; after the last one the next batch takes their place."""
        if const_expr(self.spec.paged):
            if slot == self.batch or self.batch == 1:
                slot = Int32(0)
            if slot == 0:
                for e in cutlass.range_constexpr(self.entries):
                    pages[e] = pages_next[e]
                self.read_pages(pages_next, mTable, b, tile + self.batch, length, page_shift, lane)
        return slot

    @cute.jit
    def read_pages(
        self, pages: cute.Tensor, mTable, b: Int32, tile: Int32, length: Int32, page_shift: Int32, lane: Int32
    ):
        """Starts the loads of the page numbers of a batch of tiles, as `TileProducer.read_pages`."""
        if const_expr(self.spec.paged):
            for e in cutlass.range_constexpr(self.entries):
                first = (tile + lane // self.boxes) * self.tile
                key = first + (lane % self.boxes + e * WARP) * self.spec.box_rows
                pages[e] = mTable[b, cutlass.max(cutlass.min(key, length - 1), 0) >> page_shift]

    @cute.jit
    def load(
        self,
        raw: cute.Tensor,
        pages: cute.Tensor,
        slot: Int32,
        source: tuple,
        b: Int32,
        tile: Int32,
        length: Int32,
        page_size: Int32,
        num_pages: Int32,
        groups: Int32,
        lane: Int32,
    ):
        """Starts the loads of the scales of this lane's keys (key, group)."""
        base, outer, row, group = source
        for i in cutlass.range_constexpr(self.keys):
            key, entry = self._key(tile, i, length, lane), b
            if const_expr(self.spec.paged):
                box = (i * WARP + lane) // self.spec.box_rows
                entry = cute.arch.shuffle_sync(pages[0], (slot * self.boxes + box) % WARP)
                for e in cutlass.range_constexpr(1, self.entries):
                    other = cute.arch.shuffle_sync(pages[e], box % WARP)
                    entry = cutlass.select_(box >= e * WARP, other, entry)
                entry = cutlass.min(cutlass.max(entry, 0), num_pages - 1)
                key = key & (page_size - 1)
            offset = Int64(entry) * outer + Int64(key) * row
            for g in cutlass.range_constexpr(self.loads):
                at = offset + Int64(cutlass.min(Int32(g), groups - 1)) * group
                raw[i, g] = load_scale(self.dtype, base, at)


@cute.jit
def load_scale(dtype: cutlass.Constexpr, base: Int64, offset: Int64):
    """One scale as it is stored; `offset` in elements."""
    address = base + offset * const_expr(dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
