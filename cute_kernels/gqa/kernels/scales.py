"""The scale warps of the decode kernel: scales of tokens, from wherever they lie, into shared memory as float32."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr

from cute_kernels.device.ring import RingSlot, advance
from cute_kernels.gqa.kernels.arguments import PageTable, Scales
from cute_kernels.gqa.kernels.scheduler import Assignment, Scheduler, Upcoming, WorkList
from cute_kernels.gqa.kernels.smem import DTYPES, SmemViews
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32


class ScaleWarp:
    """Fills the scales of the stages of `GqaDecodeKernel`; device code for one warp.

    One warp loads the scales of K, another those of V; a lane has `keys` keys of a tile. With 16 MB of tiles in flight
    on the card a load waits 5 us in the queue of the memory. So loads are `depth` tiles ahead, in registers, and the
    page numbers that they need another `depth` tiles ahead, also from one sequence to the next.
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
            assigned = self.scheduler.assignment(work_list, survey, work_tile.range)
            slot = self.load_range(source, work_list, page_table, smem, slot, assigned, is_v, lane)

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
        work_list: WorkList,
        page_table: PageTable,
        smem: SmemViews,
        slot: RingSlot,
        assigned: Assignment,
        is_v,
        lane: Int32,
    ) -> RingSlot:
        """Fills the scales of a stage for each tile with keys of a range; returns the slot after them."""
        spec = self.spec
        stage, phase = slot
        raw = cute.make_rmem_tensor((self.keys, self.loads, self.depth), self.dtype)
        entries, rows = (cute.make_rmem_tensor((self.keys, self.depth), Int32) for _ in range(2))
        groups = cutlass.select_(is_v, Int32(self.v_groups), Int32(self.k_groups))
        shift = cutlass.select_(is_v, Int32(self.k_groups * self.tile), Int32(0))  # scales of V follow those of K
        ahead = self.scheduler.first_upcoming(work_list, assigned)
        found, loaded, stored, turn = Int32(0), Int32(0), Int32(0), Int32(0)  # tiles; turns of `depth` tiles
        while turn < 2 or stored < found:
            for d in cutlass.range_constexpr(self.depth):
                if turn >= 2 and stored < found:
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
                    stored += 1
                if turn >= 1 and loaded < found:
                    self.load(raw[None, None, d], entries[None, d], rows[None, d], source, page_table, groups)
                    loaded += 1
                if ahead.tile < ahead.stop:
                    ahead = self.find_rows(entries[None, d], rows[None, d], work_list, page_table, ahead, lane)
                    found += 1
            turn += 1
        return RingSlot(stage, phase)

    @cute.jit
    def find_rows(
        self,
        entries: cute.Tensor,
        rows: cute.Tensor,
        work_list: WorkList,
        page_table: PageTable,
        ahead: Upcoming,
        lane: Int32,
    ) -> Upcoming:
        """Starts the loads of the page numbers of this lane's keys of the tile ahead, and says which rows of the pages.

        Past the last token: the last token. Without pages an entry is the number of the sequence. Returns the tile
        after it.
        """
        for i in cutlass.range_constexpr(self.keys):
            key = cutlass.min(ahead.tile * self.tile + i * WARP + lane, ahead.length - 1)
            entries[i], rows[i] = ahead.sequence, key
            if const_expr(self.spec.paged):
                entries[i] = page_table.mTable[ahead.sequence, key >> page_table.shift]
                rows[i] = key & (page_table.page_size - 1)
        return self.scheduler.skip_ended(work_list, ahead._replace(tile=ahead.tile + 1))

    @cute.jit
    def load(
        self,
        raw: cute.Tensor,
        entries: cute.Tensor,
        rows: cute.Tensor,
        source: Scales,
        page_table: PageTable,
        groups: Int32,
    ):
        """Starts the loads of the scales of this lane's keys: (key, group)."""
        for i in cutlass.range_constexpr(self.keys):
            entry = entries[i]
            if const_expr(self.spec.paged):
                entry = cutlass.min(cutlass.max(entry, 0), page_table.num_pages - 1)
            offset = Int64(entry) * source.outer + Int64(rows[i]) * source.row
            for g in cutlass.range_constexpr(self.loads):
                element = offset + Int64(cutlass.min(Int32(g), groups - 1)) * source.group
                raw[i, g] = load_scale(self.dtype, source.address, element)


@cute.jit
def load_scale(dtype: cutlass.Constexpr, base: Int64, offset: Int64):
    """One scale as it is stored; `offset` in elements."""
    address = base + offset * const_expr(dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
