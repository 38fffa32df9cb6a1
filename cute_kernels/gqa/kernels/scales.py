"""The scale warps of the decode kernel: scales of tokens, from wherever they lie, into shared memory as float32."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float16, Float32, Int32, Int64, const_expr

from cute_kernels.gqa.spec import GqaDecodeSpec

DTYPES = {"float16": Float16, "float32": Float32}
WARP = 32


class ScaleProducer:
    """Fills the scales of the stages of `GqaDecodeKernel`; device code for one warp.

    One warp brings the scales of K, another those of V; a lane has `keys` keys of a tile. While 16 MB of tiles are in
    flight a load waits microseconds in the queue of the memory, so loads are `depth` tiles ahead, in registers, and the
    page numbers that they need `depth` tiles further.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.tile = spec.keys_per_tile
        self.keys = self.tile // WARP
        self.k_groups = spec.scale_groups(spec.k_scales)
        self.v_groups = spec.scale_groups(spec.v_scales)
        self.loads = max(self.k_groups, self.v_groups)
        self.depth = {0: 1, 1: 4, 2: 4, 4: 2, 8: 1}[self.loads]
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
        entries = cute.make_rmem_tensor((self.keys, self.depth), Int32)
        groups = cutlass.select_(of_v, Int32(self.v_groups), Int32(self.k_groups))
        shift = cutlass.select_(of_v, Int32(self.k_groups * self.tile), Int32(0))
        for d in cutlass.range_constexpr(self.depth):
            self.read_entries(entries[None, d], mTable, b, start + d, length, page_shift, lane)
        for d in cutlass.range_constexpr(self.depth):
            self.load(
                raw[None, None, d], entries[None, d], source, start + d, length, page_size, num_pages, groups, lane
            )
            self.read_entries(entries[None, d], mTable, b, start + d + self.depth, length, page_shift, lane)
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
                    self.load(
                        raw[None, None, d], entries[None, d], source, ahead, length, page_size, num_pages, groups, lane
                    )
                    self.read_entries(entries[None, d], mTable, b, ahead + self.depth, length, page_shift, lane)
        return stage, phase

    def _key(self, tile, i: int, length, lane):
        """The lane's i-th key of a tile; behind the last token, that one."""
        return cutlass.max(cutlass.min(tile * self.tile + i * WARP + lane, length - 1), 0)

    @cute.jit
    def read_entries(
        self, entries: cute.Tensor, mTable, b: Int32, tile: Int32, length: Int32, page_shift: Int32, lane: Int32
    ):
        """Starts the loads of the page numbers of this lane's keys; the sequence's where there are no pages."""
        for i in cutlass.range_constexpr(self.keys):
            if const_expr(self.spec.paged):
                entries[i] = mTable[b, self._key(tile, i, length, lane) >> page_shift]
            else:
                entries[i] = b

    @cute.jit
    def load(
        self,
        raw: cute.Tensor,
        entries: cute.Tensor,
        source: tuple,
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
            key, entry = self._key(tile, i, length, lane), entries[i]
            if const_expr(self.spec.paged):
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
