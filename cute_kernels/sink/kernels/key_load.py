"""Load warp of the key-stationary kernel: it takes work tiles, loads K and V, and streams Q, dO and statistics."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.sink.kernels import scheduler, views
from cute_kernels.sink.kernels.masks import KeyMasks, Visibility
from cute_kernels.sink.kernels.pipelines import key_pipelines
from cute_kernels.sink.kernels.scheduler import KeySchedule, WorkTile
from cute_kernels.sink.kernels.smem import KeyViews
from cute_kernels.sink.kernels.views import Origin, Packed, Tma


class KeyTmas(NamedTuple):
    """TMA copies of the key-stationary kernel."""

    q: Tma
    d_out: Tma
    k: Tma
    v: Tma
    stats: Tma
    d_k: Tma
    d_v: Tma


class KeyLoad:
    """Device code of the load warp; `spec` is a SinkBackwardSpec."""

    def __init__(self, spec):
        self.spec = spec
        self.masks = KeyMasks(spec)
        self.edges = key_pipelines(spec)

    @cute.jit
    def run(
        self,
        smem,
        staged: KeyViews,
        tmas: KeyTmas,
        peer_k: Tma | None,
        packed: Packed,
        visible: Visibility,
        schedule: KeySchedule,
        rank: Int32,
        lane: Int32,
    ):
        """Loads every work tile of the CTA, then writes the record that ends the kernel.

        In a pair, `peer_k` loads half of the columns of the other CTA's K.
        """
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        work_tiles = schedule.work_tiles
        if const_expr(spec.packed):
            work_tiles = packed.work_list[0, 0] * schedule.divisors.heads.divisor

        number, count, ring_tile = Int32(cta // 2 if const_expr(spec.pair) else cta), Int32(0), Int32(0)
        while number < work_tiles:
            block = scheduler.block_at(number, spec.packed, packed.work_list, schedule.divisors, Int32(0))
            # ascending, because under a causal mask the first key blocks meet the most queries
            work = scheduler.work_tile(block, block.number, spec.keys, spec.packed, packed, schedule)
            following = Int32(0)
            if const_expr(not spec.pair):
                following = scheduler.claim(schedule.counters, lane)  # claimed long before it is needed
            scheduler.publish(smem, self.edges.work, count, work, lane)
            q_origin = views.origin(spec.packed, work.s_q, work.start_q, work.batch)
            self.load_keys(smem, staged, tmas, peer_k, work, count, rank)
            ring_tile = self.load_queries(smem, staged, tmas, work, q_origin, visible, schedule.ratio, ring_tile)
            number = work_tiles if const_expr(spec.pair) else ctas + cute.arch.shuffle_sync(following, 0)
            count += 1

        scheduler.publish_end(smem, self.edges.work, count, not spec.pair, schedule.counters, ctas, lane)

    @cute.jit
    def load_keys(self, smem, staged: KeyViews, tmas: KeyTmas, peer_k: Any, work: WorkTile, count: Int32, rank: Int32):
        """Starts the copies of K and V, in a pair also of the other CTA's K, once their memory is free."""
        spec, edge = self.spec, self.edges.kv
        origin = views.origin(spec.packed, work.s_k, work.start_k, work.batch)
        edge.acquire(smem, count)
        with cute.arch.elect_one():
            edge.arrive_and_expect(smem, count)
        copies = [(tmas.k, staged.k, rank, spec.d, 0), (tmas.v, staged.v, rank, spec.d, 0)]
        if const_expr(spec.pair):
            copies.append((peer_k, staged.peer_k, 1 - rank, spec.columns, rank))
        for x in cutlass.range_constexpr(len(copies)):
            tma, stages, cta, columns, block = copies[x]
            keys = cute.domain_offset((origin.row + work.first + cta * spec.keys_of_cta, 0, 0, 0), tma.tensor)
            tile = cute.local_tile(keys, (spec.keys_of_cta, columns), (0, block, work.head, origin.outer))
            target, source = views.partition(tma, stages, tile)
            cute.copy(tma.atom, source, target[None, 0], tma_bar_ptr=edge.full_barrier(smem, 0))

    @cute.jit
    def load_queries(
        self,
        smem,
        staged: KeyViews,
        tmas: KeyTmas,
        work: WorkTile,
        origin: Origin,
        visible: Visibility,
        ratio: Int32,
        ring_tile: Int32,
    ) -> Int32:
        """Starts the copies of all query tiles of all query heads; returns the next query tile."""
        spec = self.spec
        queries = self.masks.query_range(work.first, work.s_q, work.s_k, visible)
        position = views.position(spec.packed, work.start_q, work.batch, work.s_q) + queries.begin
        for g in cutlass.range(ratio, unroll=1):
            q_head = work.head * ratio + g
            stats = cute.local_tile(
                cute.domain_offset((position, 0, 0), tmas.stats.tensor), (spec.queries, 1, 2), (None, q_head, 0)
            )
            stats_target, stats_source = cute.nvgpu.cpasync.tma_partition(
                tmas.stats.atom, 0, cute.make_layout(1),
                cute.group_modes(staged.stats, 0, 3), cute.group_modes(stats, 0, 3),
            )  # fmt: skip
            for t in cutlass.range(queries.tiles, unroll=1):
                slot = self.edges.q.slot(ring_tile)
                ring_tile += 1
                self.edges.q.acquire(smem, slot)
                with cute.arch.elect_one():
                    self.edges.q.arrive_and_expect(smem, slot)
                full = self.edges.q.full_barrier(smem, slot.index)
                copies = ((tmas.q, staged.q), (tmas.d_out, staged.d_out))
                for x in cutlass.range_constexpr(2):
                    tma, stages = copies[x]
                    rows = cute.domain_offset((origin.row + queries.begin, 0, 0, 0), tma.tensor)
                    tiles = cute.local_tile(rows, (spec.queries, spec.d), (None, 0, q_head, origin.outer))
                    target, source = views.partition(tma, stages, tiles)
                    cute.copy(tma.atom, source[None, t], target[None, slot.index], tma_bar_ptr=full)
                cute.copy(tmas.stats.atom, stats_source[None, t], stats_target[None, slot.index], tma_bar_ptr=full)
        return ring_tile
