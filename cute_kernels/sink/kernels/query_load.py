"""Load warp of the query-stationary kernels: it takes work tiles, loads rows of Q (and dO), and streams K and V.

Key tiles come from the last to the first. K is always one tile ahead of V, as its product is, and the first K does not
wait for the rows. Tiles start at multiples of their size (masks.py). So with a window of 128 and tiles of 64, 64 rows
need 3 tiles if s_k - s_q is a multiple of 64, otherwise up to 4.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.pipeline import Pipeline, Slot
from cute_kernels.sink.kernels import scheduler, views
from cute_kernels.sink.kernels.masks import QueryMasks, Visibility
from cute_kernels.sink.kernels.pipelines import query_pipelines
from cute_kernels.sink.kernels.scheduler import QuerySchedule, WorkTile
from cute_kernels.sink.kernels.smem import QueryViews, query_layouts
from cute_kernels.sink.kernels.views import Origin, Packed, Tma
from cute_kernels.sink.spec import ROWS, SinkQuerySpec


class QueryTmas(NamedTuple):
    """TMA copies of a query-stationary kernel; d_out is None in the forward."""

    q: Tma
    d_out: Any  # Tma, or None
    k: Tma
    v: Tma
    out: Tma  # O or dQ


def query_tmas(
    spec: SinkQuerySpec, mQ: cute.Tensor, mDOut: cute.Tensor | None, mK: cute.Tensor, mV: cute.Tensor, mOut: cute.Tensor
) -> QueryTmas:
    """Makes the TMA copies of a launch; `mOut` is O or dQ."""
    layouts, load, store = query_layouts(spec), cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    box_q, box_kv = (ROWS, spec.d), (spec.tile, spec.d)
    return QueryTmas(
        views.tma(load, mQ, spec.packed, layouts.q, box_q),
        None if mDOut is None else views.tma(load, mDOut, spec.packed, layouts.q, box_q),
        views.tma(load, mK, spec.packed, layouts.kv, box_kv),
        views.tma(load, mV, spec.packed, layouts.kv, box_kv),
        views.tma(store, mOut, spec.packed, layouts.out, box_q),
    )


class TileCopy(NamedTuple):
    """Copies of the tiles of K, or of V, of a work tile into the stages of their pipeline."""

    edge: Pipeline
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor


class QueryLoad:
    """Device code of the load warp; `spec` is of a query-stationary kernel."""

    def __init__(self, spec):
        self.spec = spec
        self.masks = QueryMasks(spec)
        self.edges = query_pipelines(spec)

    @cute.jit
    def run(
        self,
        smem,
        staged: QueryViews,
        tmas: QueryTmas,
        packed: Packed,
        visible: Visibility,
        schedule: QuerySchedule,
        lane: Int32,
    ):
        """Loads every work tile of the CTA, then writes the record that ends the kernel."""
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        work_tiles = schedule.work_tiles
        if const_expr(spec.packed):
            work_tiles = packed.work_list[0, 0] * schedule.divisors.heads.divisor

        number, count, ring_tile = Int32(cta), Int32(0), Int32(0)
        while number < work_tiles:
            block = scheduler.block_at(number, spec.packed, packed.work_list, schedule.divisors, schedule.blocks)
            index = block.number
            if const_expr(not spec.packed):
                index = schedule.blocks - 1 - index  # a later block of rows sees more keys
            work = scheduler.work_tile(block, index, spec.rows, spec.packed, packed, schedule)
            following = scheduler.claim(schedule.counters, lane)  # claimed long before it is needed
            scheduler.publish(smem, self.edges.work, count, work[:6], lane)
            ring_tile = self.load(smem, staged, tmas, work, visible, schedule.ratio, count, ring_tile)
            number = ctas + cute.arch.shuffle_sync(following, 0)
            count += 1

        scheduler.publish_end(smem, self.edges.work, count, True, schedule.counters, ctas, lane)

    @cute.jit
    def load(
        self,
        smem,
        staged: QueryViews,
        tmas: QueryTmas,
        work: WorkTile,
        visible: Visibility,
        ratio,
        count: Int32,
        ring_tile: Int32,
    ) -> Int32:
        """Starts all copies of a work tile; returns the next key tile."""
        spec = self.spec
        keys = self.masks.key_range(work.first, work.s_q, work.s_k, visible)
        tiles = keys.tiles
        q_origin = views.origin(spec.packed, work.s_q, work.start_q, work.batch)
        k_origin = views.origin(spec.packed, work.s_k, work.start_k, work.batch)
        kv_head = work.head if const_expr(spec.grouped) else work.head // ratio
        k, v = self.tile_copies(staged, tmas, keys.begin, kv_head, k_origin)
        rows = Origin(q_origin.row + work.first, q_origin.outer)
        if const_expr(spec.grouped):
            for number in cutlass.range(0, ratio.divisor, spec.warpgroups, unroll=1):
                fresh = number == 0 or tiles > spec.stages
                if fresh:
                    self.load_tile(smem, k, tiles - 1, ring_tile)
                for w in cutlass.range_constexpr(spec.warpgroups):
                    if number + w < ratio.divisor:
                        slot = self.edges.q.slot(count * ratio.divisor + number + w)
                        self.load_rows(smem, staged, tmas, rows, 0, work.head * ratio.divisor + number + w, slot)
                if fresh:
                    self.load_remaining_tiles(smem, k, v, tiles, ring_tile)
                    ring_tile += tiles
        else:
            self.load_tile(smem, k, tiles - 1, ring_tile)
            for w in cutlass.range_constexpr(spec.warpgroups):
                self.load_rows(smem, staged, tmas, rows, w, work.head, Slot(w, count % 2))
            self.load_remaining_tiles(smem, k, v, tiles, ring_tile)
            ring_tile += tiles
        return ring_tile

    @cute.jit
    def tile_copies(self, staged: QueryViews, tmas: QueryTmas, begin: Int32, kv_head: Int32, origin: Origin):
        """Returns the copies of K and of V, with tile 0 at key `begin`."""
        spec = self.spec
        tiles = [
            cute.local_tile(
                cute.domain_offset((origin.row + begin, 0, 0, 0), tma.tensor),
                (spec.tile, spec.d),
                (None, 0, kv_head, origin.outer),
            )
            for tma in (tmas.k, tmas.v)
        ]
        k_target, k_source = views.partition(tmas.k, staged.k, tiles[0])
        v_target, v_source = views.partition(tmas.v, staged.v, tiles[1])
        return (
            TileCopy(self.edges.k, tmas.k.atom, k_source, k_target),
            TileCopy(self.edges.v, tmas.v.atom, v_source, v_target),
        )

    @cute.jit
    def load_rows(
        self,
        smem,
        staged: QueryViews,
        tmas: QueryTmas,
        rows: Origin,
        block: cutlass.Constexpr,
        head: Int32,
        slot: Slot,
    ):
        """Starts the copies of a block of 64 rows of a head once its stage is free."""
        spec, edge = self.spec, self.edges.q
        full = edge.full_barrier(smem, slot.index)
        edge.acquire(smem, slot)
        with cute.arch.elect_one():
            edge.arrive_and_expect(smem, slot)
        operands = ((tmas.q, staged.q), (tmas.d_out, staged.d_out))
        for x in cutlass.range_constexpr(spec.row_operands):
            tma, stages = operands[x]
            blocks = cute.local_tile(
                cute.domain_offset((rows.row, 0, 0, 0), tma.tensor), (ROWS, spec.d), (None, 0, head, rows.outer)
            )
            target, source = views.partition(tma, stages, blocks)
            cute.copy(tma.atom, source[None, block], target[None, slot.index], tma_bar_ptr=full)

    @cute.jit
    def load_remaining_tiles(self, smem, k: TileCopy, v: TileCopy, tiles: Int32, ring_tile: Int32):
        """Starts the copies of K of all tiles but the first one, and of V of all tiles."""
        for i in cutlass.range(1, tiles, unroll=1):
            self.load_tile(smem, k, tiles - 1 - i, ring_tile + i)
            self.load_tile(smem, v, tiles - i, ring_tile + i - 1)
        self.load_tile(smem, v, Int32(0), ring_tile + tiles - 1)

    @cute.jit
    def load_tile(self, smem, copy: TileCopy, tile: Int32, ring_tile: Int32):
        """Starts the copy of a key tile once its stage is free."""
        edge, slot = copy.edge, copy.edge.slot(ring_tile)
        edge.acquire(smem, slot)
        with cute.arch.elect_one():
            edge.arrive_and_expect(smem, slot)
        source, target = copy.source[None, tile], copy.target[None, slot.index]
        cute.copy(copy.atom, source, target, tma_bar_ptr=edge.full_barrier(smem, slot.index))
