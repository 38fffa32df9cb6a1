"""The scale warps of the decode kernel: scales of tokens, from wherever they lie, into shared memory as float32."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr

from cute_kernels.device.ring import RingSlot, advance
from cute_kernels.gqa.kernels.arguments import KeyRange, PageTable, Scales
from cute_kernels.gqa.kernels.scheduler import Scheduler, WorkList
from cute_kernels.gqa.kernels.smem import DTYPES, SmemViews
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32


class ScaleWarp:
    """Fills the scales of the stages of `GqaDecodeKernel`; device code for one warp.

    One warp loads the scales of K, another those of V; a lane has `keys` keys of a tile. With 16 MB of tiles in flight
    on the card a load waits microseconds in the queue of the memory. So loads are `depth` tiles ahead, in registers,
    and the page numbers that they need another `depth` tiles ahead.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.tile = spec.keys_per_tile
        self.keys = self.tile // WARP
        self.k_groups = spec.scale_groups(spec.k_scales)
        self.v_groups = spec.scale_groups(spec.v_scales)
        self.loads = max(self.k_groups, self.v_groups)
        self.depth = {0: 1, 1: 4, 2: 4, 4: 2, 8: 1}[self.loads]
        self.dtype = DTYPES[spec.scale_dtype]

    @cute.jit
    def run(
        self,
        k_scales: Scales,
        v_scales: Scales,
        work_list: WorkList,
        page_table: PageTable,
        smem: SmemViews,
        warp_idx: Int32,
        lane: Int32,
    ):
        """Loads the scales of K, or those of V, of all work tiles of this CTA."""
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        survey = self.scheduler.survey(work_list, lane)
        is_v = warp_idx > spec.warps + const_expr(1 if self.k_groups else 0)
        slot = RingSlot(Int32(0), Int32(0))
        for index in cutlass.range(cta, work_list.work.num_work_tiles, ctas, unroll=1):
            work_tile = self.scheduler.work_tile(work_list, index)
            source = self.source(k_scales, v_scales, work_tile.kv_head, is_v)
            b, offset, left, _ = self.scheduler.assignment(work_list, survey, work_tile.range)
            while left > 0:
                length, first, tiles = self.scheduler.extent(work_list, b)
                stop = cutlass.min(offset + left, tiles)
                left -= stop - offset
                if length > 0:
                    key_range = KeyRange(first + offset, first + stop, length)
                    slot = self.load_range(source, page_table, smem, slot, b, key_range, is_v, lane)
                offset = Int32(0)
                b += 1

    @cute.jit
    def source(self, k_scales: Scales, v_scales: Scales, kv_head: Int32, is_v) -> Scales:
        """Scales of K or of V, with the address of a head's first one."""
        source = k_scales
        if is_v:
            source = v_scales
        address = source.address + Int64(kv_head) * source.head * const_expr(self.dtype.width // 8)
        return Scales(address, source.outer, source.head, source.row, source.group)

    @cute.jit
    def load_range(
        self,
        source: Scales,
        page_table: PageTable,
        smem: SmemViews,
        slot: RingSlot,
        b: Int32,
        key_range: KeyRange,
        is_v,
        lane: Int32,
    ) -> RingSlot:
        """Fills the scales of a stage for each tile of a range of sequence b; returns the slot after them."""
        spec = self.spec
        stage, phase = slot
        start, stop, length = key_range
        raw = cute.make_rmem_tensor((self.keys, self.loads, self.depth), self.dtype)
        entries = cute.make_rmem_tensor((self.keys, self.depth), Int32)
        groups = cutlass.select_(is_v, Int32(self.v_groups), Int32(self.k_groups))
        shift = cutlass.select_(is_v, Int32(self.k_groups * self.tile), Int32(0))  # scales of V follow those of K
        for d in cutlass.range_constexpr(self.depth):
            self.read_entries(entries[None, d], page_table, b, start + d, length, lane)
        for d in cutlass.range_constexpr(self.depth):
            self.load(raw[None, None, d], entries[None, d], source, page_table, start + d, length, groups, lane)
            self.read_entries(entries[None, d], page_table, b, start + d + self.depth, length, lane)
        for first in cutlass.range(start, stop, self.depth, unroll=1):
            for d in cutlass.range_constexpr(self.depth):
                tile = first + d
                if tile < stop:
                    cute.arch.mbarrier_wait(smem.empty + stage, phase ^ 1)
                    sScale = cute.make_tensor(
                        smem.scales + stage * spec.scale_values + shift,
                        cute.make_layout((WARP, self.keys, self.loads), stride=(1, WARP, self.tile)),
                    )
                    for g in cutlass.range_constexpr(self.loads):
                        if g < groups:
                            for i in cutlass.range_constexpr(self.keys):
                                sScale[lane, i, g] = raw[i, g, d].to(cutlass.Float32)
                    cute.arch.mbarrier_arrive(smem.full + stage)
                    phase, stage = advance(phase, stage, spec.stages)
                    ahead = tile + self.depth
                    self.load(raw[None, None, d], entries[None, d], source, page_table, ahead, length, groups, lane)
                    self.read_entries(entries[None, d], page_table, b, ahead + self.depth, length, lane)
        return RingSlot(stage, phase)

    def _key(self, tile, i: int, length, lane):
        """The lane's i-th key of a tile; past the last token, the last token."""
        return cutlass.max(cutlass.min(tile * self.tile + i * WARP + lane, length - 1), 0)

    @cute.jit
    def read_entries(
        self, entries: cute.Tensor, page_table: PageTable, b: Int32, tile: Int32, length: Int32, lane: Int32
    ):
        """Starts the loads of the page numbers of this lane's keys; without pages, the number of the sequence."""
        for i in cutlass.range_constexpr(self.keys):
            if const_expr(self.spec.paged):
                entries[i] = page_table.mTable[b, self._key(tile, i, length, lane) >> page_table.shift]
            else:
                entries[i] = b

    @cute.jit
    def load(
        self,
        raw: cute.Tensor,
        entries: cute.Tensor,
        source: Scales,
        page_table: PageTable,
        tile: Int32,
        length: Int32,
        groups: Int32,
        lane: Int32,
    ):
        """Starts the loads of the scales of this lane's keys: (key, group)."""
        for i in cutlass.range_constexpr(self.keys):
            key, entry = self._key(tile, i, length, lane), entries[i]
            if const_expr(self.spec.paged):
                entry = cutlass.min(cutlass.max(entry, 0), page_table.num_pages - 1)
                key = key & (page_table.page_size - 1)
            offset = Int64(entry) * source.outer + Int64(key) * source.row
            for g in cutlass.range_constexpr(self.loads):
                element = offset + Int64(cutlass.min(Int32(g), groups - 1)) * source.group
                raw[i, g] = load_scale(self.dtype, source.address, element)


@cute.jit
def load_scale(dtype: cutlass.Constexpr, base: Int64, offset: Int64):
    """One scale as it is stored; `offset` in elements."""
    address = base + offset * const_expr(dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
