"""The scale warps of the decode kernel: convert scales of tokens, wherever they lie, to float32 in shared memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64, const_expr

from cute_kernels.gqa.codes import element
from cute_kernels.gqa.kernels.arguments import PageTable, Scales
from cute_kernels.gqa.kernels.pipelines import pipelines
from cute_kernels.gqa.kernels.scheduler import Assignment, Scheduler, Upcoming, WorkList
from cute_kernels.gqa.kernels.smem import SmemViews
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32


class Part(NamedTuple):
    """The scales that a lane has of each of its keys.

    source  scales of K or V, with the address of a head's first scale
    count   number of the scales
    first   place of the first among the scales of a stage
    """

    source: Scales
    count: Int32
    first: Int32


class ScaleWarp:
    """Fills the scales of the stages of `GqaDecodeKernel`; device code for one warp of `scale_warps`.

    Warps take tiles in turn, or one has the scales of K and one those of V; a lane has `keys` keys of a tile. With 16
    MB of tiles in flight on the card a load waits 5 us in the queue of the memory. So loads run `depth` of the warp's
    tiles ahead, in registers, and the page numbers that they need run another `depth` ahead, also across sequences.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.kv = pipelines(spec).kv
        self.tile = spec.keys_per_tile
        self.keys = self.tile // WARP
        groups = spec.scale_groups(spec.k_scales), spec.scale_groups(spec.v_scales)
        self.in_turn = spec.scale_warps_take_turns
        self.step = spec.scale_warps if self.in_turn else 1  # from a tile of the warp to its next tile
        self.groups = groups if self.in_turn else (max(groups),)  # scales of each part, at most
        self.k_groups, self.v_groups = groups
        # six tiles of 128 keys, or three of 256: 12 tiles took 197 us instead of 193 at 64 x 8192, 4-bit
        self.depth = 2 if self.keys <= 4 and sum(self.groups) <= 4 else 1
        self.dtype = element(spec.scale_dtype)

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
        """Loads the scales of this warp's tiles of all work tiles of this CTA."""
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        survey = self.scheduler.survey(work_list, lane)
        rank, begun = warp_idx - (spec.warps + 1), Int32(0)
        for index in cutlass.range(cta, work_list.work.num_work_tiles, ctas, unroll=1):
            work_tile = self.scheduler.work_tile(work_list, index)
            k = Part(self.of_head(k_scales, work_tile.kv_head), Int32(self.k_groups), Int32(0))
            v = Part(self.of_head(v_scales, work_tile.kv_head), Int32(self.v_groups), Int32(self.k_groups))
            parts: tuple[Part, ...] = (k, v)
            if const_expr(not self.in_turn):
                own = k
                if rank == 1:
                    own = v
                parts = (own,)
            assigned = self.scheduler.assignment(work_list, survey, work_tile.range)
            turn = Int32(0)
            if const_expr(self.in_turn):  # every `step`-th tile since the launch: see `scale_warps`
                turn = (rank + self.step - begun % self.step) % self.step
            begun += self.load_range(parts, work_list, page_table, smem, assigned, begun, turn, lane)

    @cute.jit
    def of_head(self, scales: Scales, kv_head: Int32) -> Scales:
        """Returns the scales with the address of a head's first scale."""
        address = scales.address + Int64(kv_head) * scales.head * const_expr(self.dtype.width // 8)
        return Scales(address, scales.outer, scales.head, scales.row, scales.group)

    @cute.jit
    def load_range(
        self,
        parts: tuple[Part, ...],
        work_list: WorkList,
        page_table: PageTable,
        smem: SmemViews,
        assigned: Assignment,
        begun: Int32,
        turn: Int32,
        lane: Int32,
    ) -> Int32:
        """Fills the scales of a stage for this warp's tiles of a range; returns the range's number of tiles with keys.

        begun: tiles before this range. turn: the first tile of this warp, counted from there.
        """
        raw = [cute.make_rmem_tensor((self.keys, max(groups, 1), self.depth), self.dtype) for groups in self.groups]
        entries, rows = (cute.make_rmem_tensor((self.keys, self.depth), Int32) for _ in range(2))
        ahead = self.scheduler.first_upcoming(work_list, assigned)
        ahead = self.scheduler.skip_ended(work_list, ahead._replace(tile=ahead.tile + turn))
        found, loaded, stored, passes = Int32(0), Int32(0), Int32(0), Int32(0)  # of this warp; of all `depth`
        while passes < 2 or stored < found:
            for d in cutlass.range_constexpr(self.depth):
                if passes >= 2 and stored < found:
                    slot = self.kv.slot(begun + turn + stored * self.step)
                    self.kv.acquire(smem, slot)
                    for part in cutlass.range_constexpr(len(self.groups)):
                        self.store(raw[part][None, None, d], parts[part], self.groups[part], smem, slot.index, lane)
                    self.kv.arrive(smem, slot)
                    stored += 1
                if passes >= 1 and loaded < found:
                    for part in cutlass.range_constexpr(len(self.groups)):
                        own = (entries[None, d], rows[None, d])
                        self.load(raw[part][None, None, d], *own, parts[part], self.groups[part], page_table)
                    loaded += 1
                if ahead.tile < ahead.stop:
                    ahead = self.find_rows(entries[None, d], rows[None, d], work_list, page_table, ahead, lane)
                    found += 1
            passes += 1
        return turn + found * self.step - (ahead.tile - ahead.stop)

    @cute.jit
    def store(
        self, raw: cute.Tensor, part: Part, groups: cutlass.Constexpr, smem: SmemViews, stage: Int32, lane: Int32
    ):
        """Stores scales of this lane's keys into a stage, as float32."""
        layout = cute.make_layout((WARP, self.keys, max(groups, 1)), stride=(1, WARP, self.tile))
        sScale = cute.make_tensor(smem.scales + stage * self.spec.scale_values + part.first * self.tile, layout)
        for g in cutlass.range_constexpr(groups):
            if const_expr(self.in_turn) or g < part.count:
                for i in cutlass.range_constexpr(self.keys):
                    sScale[lane, i, g] = raw[i, g].to(cutlass.Float32)

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
        """Starts loading the page numbers of this lane's keys in the tile ahead, and finds the rows in their pages.

        Keys past the last token repeat it. Without pages an entry is the number of the sequence. Returns the warp's
        next tile.
        """
        for i in cutlass.range_constexpr(self.keys):
            key = cutlass.min(ahead.tile * self.tile + i * WARP + lane, ahead.length - 1)
            entries[i], rows[i] = ahead.sequence, key
            if const_expr(self.spec.paged):
                entries[i] = page_table.mTable[ahead.sequence, key >> page_table.shift]
                rows[i] = key & (page_table.page_size - 1)
        return self.scheduler.skip_ended(work_list, ahead._replace(tile=ahead.tile + self.step))

    @cute.jit
    def load(
        self,
        raw: cute.Tensor,
        entries: cute.Tensor,
        rows: cute.Tensor,
        part: Part,
        groups: cutlass.Constexpr,
        page_table: PageTable,
    ):
        """Starts loading the scales of this lane's keys: (key, group)."""
        source = part.source
        for i in cutlass.range_constexpr(self.keys):
            entry = entries[i]
            if const_expr(self.spec.paged):
                entry = cutlass.min(cutlass.max(entry, 0), page_table.num_pages - 1)
            offset = Int64(entry) * source.outer + Int64(rows[i]) * source.row
            for g in cutlass.range_constexpr(groups):
                group = Int64(g) if const_expr(self.in_turn) else Int64(cutlass.min(Int32(g), part.count - 1))
                raw[i, g] = load_scale(self.dtype, source.address, offset + group * source.group)


@cute.jit
def load_scale(dtype: cutlass.Constexpr, base: Int64, offset: Int64):
    """Loads one stored scale; `offset` in elements."""
    address = base + offset * const_expr(dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
