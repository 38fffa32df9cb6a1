"""Blocks of keys in the backward: which queries a block meets, masks of transposed tiles, and the producer warp.

See backward.py for the barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import wgmma
from cute_kernels.sink.backward_spec import QUERIES
from cute_kernels.sink.kernels import schedule as schedule
from cute_kernels.sink.spec import ROWS

NEVER = 1 << 30


class KeyBlocks:
    """Device code; `spec` has d, packed, window, keys and stages."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def extent(self, first: Int32, s_q: Int32, s_k: Int32, window: Int32, reach: Int32):
        """(first query, a multiple of 64, and tiles of 64 queries) that the block of keys from `first` on meets."""
        shift = s_k - s_q  # query i stands at key i + shift
        begin = cutlass.max(first - shift - reach, 0) & -QUERIES
        end = s_q
        if const_expr(self.spec.window):
            end = cutlass.min(s_q, cutlass.min(first + self.spec.keys, s_k) - 1 - shift + window)
        tiles = (cutlass.max(end - begin, 0) + QUERIES - 1) // QUERIES
        return begin, tiles

    @cute.jit
    def edges(self, mine: Int32, s_q: Int32, s_k: Int32, window: Int32, reach: Int32, tid: Int32):
        """What `mask` has to know of keys `mine` .. `mine` + 63."""
        shift = s_k - s_q
        column = 2 * (tid % 4)  # of this thread's element 0
        # keys behind the last are seen by no query: their P would be exp2(-L), which may be infinite
        keys = [mine + wgmma.row(tid, r) for r in range(2)]
        starts = [cutlass.select_(key < s_k, key - shift - reach - column, Int32(NEVER)) for key in keys]
        behind = keys[0] - shift + window - column  # queries from there on do not see row 0
        whole = cutlass.select_(mine + ROWS <= s_k, mine + ROWS - 1 - shift - reach, Int32(NEVER))
        return starts[0], starts[1], behind, whole, mine - shift + window

    @cute.jit
    def seeing(self, mine: Int32, s_q: Int32, s_k: Int32, window: Int32, reach: Int32):
        """(first query, one behind the last) that sees any of the keys `mine` .. `mine` + 63; there may be none."""
        shift = s_k - s_q
        end = Int32(NEVER)
        if const_expr(self.spec.window):
            end = cutlass.min(mine + ROWS, s_k) - 1 - shift + window
        return cutlass.select_(mine < s_k, mine - shift - reach, Int32(NEVER)), end

    @cute.jit
    def mask(self, acc_s: cute.Tensor, query: Int32, edges: tuple):
        """-inf where a query does not see a key, in a tile of queries from `query` on."""
        start0, start1, behind0, whole_from, whole_to = edges
        s = wgmma.by_row(acc_s)
        if query < whole_from:
            for r in cutlass.range_constexpr(2):
                start = (start1 if const_expr(r == 1) else start0) - query
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 >= start, s[r, c], -Float32.inf)
        if const_expr(self.spec.window):
            if query + QUERIES > whole_to:
                for r in cutlass.range_constexpr(2):
                    end = behind0 + 8 * r - query
                    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                        s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 < end, s[r, c], -Float32.inf)

    @cute.jit
    def produce(
        self,
        smem,
        keys: tuple,
        queries: tuple,
        load_stats: cute.CopyAtom,
        tStats: cute.Tensor,
        sStats: cute.Tensor,
        mCuQ,
        mCuK,
        mWork,
        window: Int32,
        reach: Int32,
        max_q: Int32,
        max_k: Int32,
        ratio: Int32,
        items: Int32,
        counters: Int64,
        divisors: tuple,
        others,
        rank: Int32,
        lane: Int32,
    ):
        """The producer warp: records, then K and V, then the tiles of Q and dO with L and delta.

        `keys` and `queries` have (copy, tensor, shared memory) of two operands each. Of a pair, `others` has those of
        the other CTA's K, of which this one takes half of the columns.
        """
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        one = cute.make_layout(1)
        sWork = smem.work.get_tensor(cute.make_layout((schedule.RECORD, schedule.SLOTS)))
        full, empty = smem.q_full.data_ptr(), smem.q_empty.data_ptr()
        if const_expr(spec.packed):
            items = mWork[0, 0] * divisors[2].divisor

        item, turn, use = Int32(cta // 2 if const_expr(spec.pair) else cta), Int32(0), Int32(0)
        while item < items:
            batch, block, head = schedule.item_of(item, spec.packed, mWork, divisors, Int32(0))
            start_q, start_k, s_q, s_k = Int32(0), Int32(0), max_q, max_k
            if const_expr(spec.packed):
                start_q, s_q = schedule.span(mCuQ, batch, max_q)
                start_k, s_k = schedule.span(mCuK, batch, max_k)
            first = block * spec.keys  # of causal items the first blocks meet the most queries
            following = Int32(0)
            if const_expr(not spec.pair):
                following = schedule.take(counters, lane)  # long before it is needed

            slot = turn % schedule.SLOTS
            # a wait for the phase before the first returns at once: so do the first waits for what is empty
            cute.arch.mbarrier_wait(smem.work_empty.data_ptr() + slot, (turn // schedule.SLOTS + 1) % 2)
            if lane == 0:
                sWork[0, slot] = first
                sWork[1, slot] = head
                sWork[2, slot] = batch
                sWork[3, slot] = s_q
                sWork[4, slot] = s_k
                sWork[5, slot] = start_q
                sWork[6, slot] = start_k
            cute.arch.mbarrier_arrive(smem.work_full.data_ptr() + slot)

            row0, outer_q = schedule.place(spec.packed, s_q, start_q, batch)
            key0, outer_k = schedule.place(spec.packed, s_k, start_k, batch)
            cute.arch.mbarrier_wait(smem.kv_empty.ptr, (turn + 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(smem.kv_full.ptr, spec.bytes_of_keys)
            for x in cutlass.range_constexpr(2):
                load_k, tK, sK = keys[x]
                gK = cute.local_tile(
                    cute.domain_offset((key0 + first + rank * spec.keys_of_cta, 0, 0, 0), tK),
                    (spec.keys_of_cta, spec.d),
                    (0, 0, head, outer_k),
                )
                tKsK, tKgK = cpasync.tma_partition(
                    load_k, 0, one, cute.group_modes(sK, 0, 2), cute.group_modes(gK, 0, 2)
                )
                cute.copy(load_k, tKgK, tKsK[None, 0], tma_bar_ptr=smem.kv_full.ptr)
            if const_expr(spec.pair):
                load_k, tK, sK = others
                gK = cute.local_tile(
                    cute.domain_offset((key0 + first + (1 - rank) * spec.keys_of_cta, 0, 0, 0), tK),
                    (spec.keys_of_cta, spec.columns),
                    (0, rank, head, outer_k),
                )
                tKsK, tKgK = cpasync.tma_partition(
                    load_k, 0, one, cute.group_modes(sK, 0, 2), cute.group_modes(gK, 0, 2)
                )
                cute.copy(load_k, tKgK, tKsK[None, 0], tma_bar_ptr=smem.kv_full.ptr)

            begin, tiles = self.extent(first, s_q, s_k, window, reach)
            position = schedule.position(spec.packed, start_q, batch, s_q) + begin
            for g in cutlass.range(ratio, unroll=1):
                q_head = head * ratio + g
                gStats = cute.local_tile(
                    cute.domain_offset((position, 0, 0), tStats), (QUERIES, 1, 2), (None, q_head, 0)
                )
                tXsX, tXgX = cpasync.tma_partition(
                    load_stats, 0, one, cute.group_modes(sStats, 0, 3), cute.group_modes(gStats, 0, 3)
                )
                for t in cutlass.range(tiles, unroll=1):
                    stage, phase = schedule.stage_of(use, spec.stages)
                    use += 1
                    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(
                            full + stage, 2 * QUERIES * spec.d * 2 + 2 * QUERIES * 4
                        )
                    for x in cutlass.range_constexpr(2):
                        load_q, tQ, sQ = queries[x]
                        gQ = cute.local_tile(
                            cute.domain_offset((row0 + begin, 0, 0, 0), tQ),
                            (QUERIES, spec.d),
                            (None, 0, q_head, outer_q),
                        )
                        whole = cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2)
                        tQsQ, tQgQ = cpasync.tma_partition(load_q, 0, one, *whole)
                        cute.copy(load_q, tQgQ[None, t], tQsQ[None, stage], tma_bar_ptr=full + stage)
                    cute.copy(load_stats, tXgX[None, t], tXsX[None, stage], tma_bar_ptr=full + stage)
            item = items if const_expr(spec.pair) else ctas + cute.arch.shuffle_sync(following, 0)
            turn += 1

        slot = turn % schedule.SLOTS
        cute.arch.mbarrier_wait(smem.work_empty.data_ptr() + slot, (turn // schedule.SLOTS + 1) % 2)
        if lane == 0:
            sWork[0, slot] = Int32(-1)
            if const_expr(not spec.pair):
                schedule.finish(counters, ctas)
        cute.arch.mbarrier_arrive(smem.work_full.data_ptr() + slot)
