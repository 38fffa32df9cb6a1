"""What kernels that hold blocks of queries share: which keys a block needs, their masks, and the producer warp.

A CTA has 64 rows of queries for each consumer warpgroup; tiles of K and V stream past, from the last to the first. See
forward.py for the barriers; `smem` is a struct with work, work_full, work_empty, q_full, q_empty, k_full,
k_empty, v_full and v_empty.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import wgmma
from cute_kernels.sink.kernels import schedule as schedule
from cute_kernels.sink.spec import ROWS


class QueryBlocks:
    """Device code; `spec` has d, packed, window, warpgroups, rows, tile, stages, slots and grouped."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def init_barriers(self, smem, tidx: Int32):
        """Called by all threads of the CTA."""
        spec = self.spec
        if tidx == 0:
            for i in cutlass.range_constexpr(schedule.SLOTS):
                cute.arch.mbarrier_init(smem.work_full.data_ptr() + i, 32)
                cute.arch.mbarrier_init(smem.work_empty.data_ptr() + i, 128 * spec.warpgroups)
            for i in cutlass.range_constexpr(spec.q_stages):
                cute.arch.mbarrier_init(smem.q_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(smem.q_empty.data_ptr() + i, 128)
            for i in cutlass.range_constexpr(spec.stages):
                cute.arch.mbarrier_init(smem.k_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(smem.v_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(smem.k_empty.data_ptr() + i, 128 * spec.warpgroups)
                cute.arch.mbarrier_init(smem.v_empty.data_ptr() + i, 128 * spec.warpgroups)
            if const_expr(spec.grouped):  # takes the arrivals for tiles that are kept
                cute.arch.mbarrier_init(smem.kept.ptr, 128 * spec.warpgroups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def extent(self, first: Int32, s_q: Int32, s_k: Int32, window: Int32, reach: Int32):
        """(first key, tiles) of the CTA's block of rows from `first`; one tile of zeros where no row sees a key."""
        shift = s_k - s_q
        begin, end = Int32(0), cutlass.min(s_k, cutlass.min(first + self.spec.rows, s_q) + shift + reach)
        if const_expr(self.spec.window):
            begin = cutlass.max(0, first + shift - window + 1)
        if end <= begin:
            begin = s_k  # behind the last key, where TMA fills with zeros
        tiles = cutlass.max((end - begin + self.spec.tile - 1) // self.spec.tile, 1)
        return begin, tiles

    @cute.jit
    def produce(
        self,
        smem,
        queries: tuple,
        load_k: cute.CopyAtom,
        tK: cute.Tensor,
        sK: cute.Tensor,
        load_v: cute.CopyAtom,
        tV: cute.Tensor,
        sV: cute.Tensor,
        mCuQ,
        mCuK,
        mWork,
        window: Int32,
        reach: Int32,
        max_q: Int32,
        max_k: Int32,
        blocks: Int32,
        items: Int32,
        counters: Int64,
        divisors: tuple,
        lane: Int32,
    ):
        """The producer warp: records, then the tiles of each item.

        `queries` has (copy, tensor, shared memory (64, d, slots)) of each operand that is loaded once a block of rows.
        """
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        *item_divisors, ratio = divisors
        one = cute.make_layout(1)
        sWork = smem.work.get_tensor(cute.make_layout((schedule.RECORD, schedule.SLOTS)))
        k_full, k_empty = smem.k_full.data_ptr(), smem.k_empty.data_ptr()
        if const_expr(spec.packed):
            items = mWork[0, 0] * item_divisors[2].divisor

        item, turn, use = Int32(cta), Int32(0), Int32(0)
        while item < items:
            batch, block, head = schedule.item_of(item, spec.packed, mWork, tuple(item_divisors), blocks)
            start_q, start_k, s_q, s_k = Int32(0), Int32(0), max_q, max_k
            if const_expr(spec.packed):
                start_q, s_q = schedule.span(mCuQ, batch, max_q)
                start_k, s_k = schedule.span(mCuK, batch, max_k)
            else:
                block = blocks - 1 - block  # a later block of rows sees more keys
            first = block * spec.rows
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
            cute.arch.mbarrier_arrive(smem.work_full.data_ptr() + slot)

            begin, tiles = self.extent(first, s_q, s_k, window, reach)
            row0, outer_q = schedule.place(spec.packed, s_q, start_q, batch)
            key0, outer_k = schedule.place(spec.packed, s_k, start_k, batch)
            kv_head = head if const_expr(spec.grouped) else head // ratio
            gK, gV = (
                cute.local_tile(
                    cute.domain_offset((key0 + begin, 0, 0, 0), t), (spec.tile, spec.d), (None, 0, kv_head, outer_k)
                )
                for t in (tK, tV)
            )
            tKsK, tKgK = cpasync.tma_partition(load_k, 0, one, cute.group_modes(sK, 0, 2), cute.group_modes(gK, 0, 2))
            tVsV, tVgV = cpasync.tma_partition(load_v, 0, one, cute.group_modes(sV, 0, 2), cute.group_modes(gV, 0, 2))

            rows = row0 + first, outer_q
            # K of the first tile does not wait for the rows before; then K always one tile ahead of V
            if const_expr(spec.grouped):
                for number in cutlass.range(0, ratio.divisor, spec.warpgroups, unroll=1):
                    fresh = number == 0 or tiles > spec.stages
                    if fresh:
                        self.load_tile(load_k, tKgK, tKsK, k_full, k_empty, tiles - 1, use)
                    for w in cutlass.range_constexpr(spec.warpgroups):
                        if number + w < ratio.divisor:
                            nth = turn * ratio.divisor + number + w
                            q_head = head * ratio.divisor + number + w
                            self.load_rows(
                                smem, queries, rows, 0, q_head, nth % spec.q_stages, nth // spec.q_stages % 2
                            )
                    if fresh:
                        self.load_others(load_k, tKgK, tKsK, load_v, tVgV, tVsV, smem, tiles, use)
                        use += tiles
            else:
                self.load_tile(load_k, tKgK, tKsK, k_full, k_empty, tiles - 1, use)
                for w in cutlass.range_constexpr(spec.warpgroups):
                    self.load_rows(smem, queries, rows, w, head, w, turn % 2)
                self.load_others(load_k, tKgK, tKsK, load_v, tVgV, tVsV, smem, tiles, use)
                use += tiles
            item = ctas + cute.arch.shuffle_sync(following, 0)
            turn += 1

        slot = turn % schedule.SLOTS
        cute.arch.mbarrier_wait(smem.work_empty.data_ptr() + slot, (turn // schedule.SLOTS + 1) % 2)
        if lane == 0:
            sWork[0, slot] = Int32(-1)
            schedule.finish(counters, ctas)
        cute.arch.mbarrier_arrive(smem.work_full.data_ptr() + slot)

    @cute.jit
    def load_rows(self, smem, queries: tuple, rows: tuple, block: cutlass.Constexpr, head: Int32, slot, phase: Int32):
        """Starts the copies of a block of 64 rows of a head when its slot is free."""
        spec = self.spec
        row, outer = rows
        full = smem.q_full.data_ptr() + slot
        cute.arch.mbarrier_wait(smem.q_empty.data_ptr() + slot, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, len(queries) * ROWS * spec.d * 2)
        for x in cutlass.range_constexpr(len(queries)):
            load, t, staged = queries[x]
            gQ = cute.local_tile(cute.domain_offset((row, 0, 0, 0), t), (ROWS, spec.d), (None, 0, head, outer))
            tQsQ, tQgQ = cpasync.tma_partition(
                load, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(gQ, 0, 2)
            )
            cute.copy(load, tQgQ[None, block], tQsQ[None, slot], tma_bar_ptr=full)

    @cute.jit
    def load_others(
        self,
        load_k: cute.CopyAtom,
        tKgK: cute.Tensor,
        tKsK: cute.Tensor,
        load_v: cute.CopyAtom,
        tVgV: cute.Tensor,
        tVsV: cute.Tensor,
        smem,
        tiles: Int32,
        use: Int32,
    ):
        """Starts the copies of K of all tiles but the first, and of V of all."""
        k_full, k_empty = smem.k_full.data_ptr(), smem.k_empty.data_ptr()
        v_full, v_empty = smem.v_full.data_ptr(), smem.v_empty.data_ptr()
        for i in cutlass.range(1, tiles, unroll=1):
            self.load_tile(load_k, tKgK, tKsK, k_full, k_empty, tiles - 1 - i, use + i)
            self.load_tile(load_v, tVgV, tVsV, v_full, v_empty, tiles - i, use + i - 1)
        self.load_tile(load_v, tVgV, tVsV, v_full, v_empty, Int32(0), use + tiles - 1)

    @cute.jit
    def load_tile(
        self,
        load: cute.CopyAtom,
        source: cute.Tensor,
        target: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        tile: Int32,
        use: Int32,
    ):
        """Starts the copy of one tile when its stage is free. Called by one warp."""
        stage, phase = schedule.stage_of(use, self.spec.stages)
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.spec.tile * self.spec.d * 2)
        cute.copy(load, source[None, tile], target[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def give_back(self, smem, empty: cute.Pointer, stage: Int32, kept):
        """Arrives for a tile that has been read, at a barrier of no meaning if it is kept: a branch would cost more."""
        target = empty + stage
        if const_expr(self.spec.grouped):
            offset = smem.kept.ptr.toint() - empty.toint()
            target = empty + cutlass.select_(kept, Int32(offset) // 8, stage)
        cute.arch.mbarrier_arrive(target)

    @cute.jit
    def edges(
        self,
        mine: Int32,
        s_q: Int32,
        s_k: Int32,
        begin: Int32,
        tiles: Int32,
        window: Int32,
        reach: Int32,
        tid: Int32,
    ):
        """(first tile, one behind the last) of rows `mine` .. `mine` + 63, and what `mask` has to know.

        There is always one tile, which may be masked altogether. Numbers of keys are relative to the first of the CTA.
        """
        spec = self.spec
        shift = s_k - s_q - begin
        count = s_k - begin
        end = cutlass.min(count, cutlass.min(mine + ROWS, s_q) + shift + reach)
        high = cutlass.max(cutlass.min((end + spec.tile - 1) // spec.tile, tiles), 1)
        low, left = Int32(0), Int32(0)
        if const_expr(spec.window):
            low = cutlass.min(cutlass.max(mine + shift - window + 1, 0) // spec.tile, high - 1)
            # tiles from `left` on start at a key that the last row sees
            left = (cutlass.max(mine + ROWS + shift - window, 0) + spec.tile - 1) // spec.tile
        # tiles below `right` end at a key that the first row sees
        right = cutlass.max(cutlass.min(count, mine + shift + 1 + reach), 0) // spec.tile
        column = 2 * (tid % 4)  # of this thread's element 0
        behind = [
            cutlass.min(count, mine + wgmma.row(tid, r) + shift + 1 + reach) - column for r in range(2)
        ]  # its row r sees keys below
        start = mine + wgmma.row(tid, 0) + shift + 1 - window - column  # its row 0 sees keys from
        return low, high, (left, right, behind[0], behind[1], start)

    @cute.jit
    def mask(self, acc_s: cute.Tensor, tile: Int32, edges: tuple):
        """-inf where a row does not see a key, in a tile that holds the edge of some row's keys."""
        spec = self.spec
        left, right, behind0, behind1, start0 = edges
        s = wgmma.by_row(acc_s)
        if tile >= right:
            for r in cutlass.range_constexpr(2):
                limit = (behind1 if const_expr(r == 1) else behind0) - tile * spec.tile
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 < limit, s[r, c], -Float32.inf)
        if const_expr(spec.window):
            if tile < left:
                for r in cutlass.range_constexpr(2):
                    start = start0 + 8 * r - tile * spec.tile
                    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                        s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 >= start, s[r, c], -Float32.inf)
