"""The scale warps of GQA decoding: scales of tokens, from wherever they lie, into shared memory as float32."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr

from cute_kernels.gqa.kernels.arguments import KeyRange, PageFacts, ScaleSource
from cute_kernels.gqa.kernels.scheduler import Scheduler, WorkList
from cute_kernels.gqa.kernels.smem import DTYPES, SharedMemory
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32


class HeadScales(NamedTuple):
    """Scales of one head in global memory: address, and strides in elements."""

    address: Int64
    outer: Int64
    row: Int64
    group: Int64


class ScaleWarp:
    """Device code for one warp: one brings the scales of K, another those of V; a lane has `keys` keys of a tile.

    While 16 MB of tiles are in flight a load waits microseconds in the queue of the memory, so loads are `depth` tiles
    ahead, in registers, and the page numbers that they need `depth` tiles further.
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
        self, k_scale: ScaleSource, v_scale: ScaleSource, mTable, work: WorkList, paging: PageFacts, page_shift: Int32,
        smem: SharedMemory, warp_idx: Int32, lane: Int32,
    ):  # fmt: skip
        """Brings the scales of K, or those of V, of all work tiles of this CTA."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        survey = self.scheduler.survey(work, lane)
        is_v = warp_idx > self.spec.warps + const_expr(1 if self.k_groups else 0)
        stage, phase = Int32(0), Int32(0)
        for number in cutlass.range(cta, work.grid.work_tiles, ctas, unroll=1):
            work_tile = self.scheduler.work_tile(number, work)
            source = self.head_scales(k_scale, v_scale, work_tile.kv_head, is_v)
            b, offset, left, _ = self.scheduler.range_start(work, survey, work_tile.range_idx)
            while left > 0:
                length, first, count = self.scheduler.extent(work, b)
                stop = cutlass.min(offset + left, count)
                left -= stop - offset
                if length > 0:
                    keys = KeyRange(first + offset, first + stop, length)
                    stage, phase = self.fill(
                        mTable, source, smem, stage, phase, b, keys, paging, page_shift, is_v, lane
                    )
                offset = Int32(0)
                b += 1

    @cute.jit
    def head_scales(self, k_scale: ScaleSource, v_scale: ScaleSource, head: Int32, is_v) -> HeadScales:
        """Where a head's scales of K or of V are."""
        base, outer, head_stride, row, group = k_scale
        if is_v:
            base, outer, head_stride, row, group = v_scale
        return HeadScales(base + Int64(head) * head_stride * const_expr(self.dtype.width // 8), outer, row, group)

    @cute.jit
    def fill(
        self,
        mTable,
        source: HeadScales,
        smem: SharedMemory,
        stage: Int32,
        phase: Int32,
        b: Int32,
        key_range: KeyRange,
        paging: PageFacts,
        page_shift: Int32,
        is_v,
        lane: Int32,
    ):
        """Fills a stage for each tile of the range; returns the stage and phase after them."""
        spec = self.spec
        start, stop, length = key_range
        raw = cute.make_rmem_tensor((self.keys, self.loads, self.depth), self.dtype)
        entries = cute.make_rmem_tensor((self.keys, self.depth), Int32)
        groups = cutlass.select_(is_v, Int32(self.v_groups), Int32(self.k_groups))
        shift = cutlass.select_(is_v, Int32(self.k_groups * self.tile), Int32(0))
        for d in cutlass.range_constexpr(self.depth):
            self.read_entries(entries[None, d], mTable, b, start + d, length, page_shift, lane)
        for d in cutlass.range_constexpr(self.depth):
            self.load(raw[None, None, d], entries[None, d], source, start + d, length, paging, groups, lane)
            self.read_entries(entries[None, d], mTable, b, start + d + self.depth, length, page_shift, lane)
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
                                sScale[lane, i, g] = raw[i, g, d].to(Float32)
                    cute.arch.mbarrier_arrive(smem.full + stage)
                    phase ^= cutlass.select_(stage + 1 == spec.stages, Int32(1), Int32(0))
                    stage = cutlass.select_(stage + 1 == spec.stages, Int32(0), stage + 1)
                    ahead = tile + self.depth
                    self.load(raw[None, None, d], entries[None, d], source, ahead, length, paging, groups, lane)
                    self.read_entries(entries[None, d], mTable, b, ahead + self.depth, length, page_shift, lane)
        return stage, phase

    def _key(self, tile, i: int, length, lane):
        """The lane's i-th key of a tile; past the last token, that one."""
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
        source: HeadScales,
        tile: Int32,
        length: Int32,
        paging: PageFacts,
        groups: Int32,
        lane: Int32,
    ):
        """Starts the loads of the scales of this lane's keys (key, group)."""
        for i in cutlass.range_constexpr(self.keys):
            key, entry = self._key(tile, i, length, lane), entries[i]
            if const_expr(self.spec.paged):
                entry = cutlass.min(cutlass.max(entry, 0), paging.count - 1)
                key = key & (paging.size - 1)
            offset = Int64(entry) * source.outer + Int64(key) * source.row
            for g in cutlass.range_constexpr(self.loads):
                group = Int64(cutlass.min(Int32(g), groups - 1)) * source.group
                raw[i, g] = load_scale(self.dtype, source.address, offset + group)


@cute.jit
def load_scale(dtype: cutlass.Constexpr, base: Int64, offset: Int64):
    """One scale as it is stored; `offset` in elements."""
    address = base + offset * const_expr(dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
