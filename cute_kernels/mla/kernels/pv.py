"""The two PV warpgroups of the MLA decode kernel: O^T += V^T P^T for 256 of 512 values each, and the epilogue."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import pairs, registers, softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.arguments import Results
from cute_kernels.mla.kernels.codes import widen_values
from cute_kernels.mla.kernels.load import issue_tma
from cute_kernels.mla.kernels.merge import PartialMerger
from cute_kernels.mla.kernels.pipelines import NamedBarrier, pipelines
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable, WorkTile
from cute_kernels.mla.kernels.smem import (
    BFLOAT16,
    CODES_BYTES,
    HALVES,
    LINE_BYTES,
    NEEDS_SCALES,
    NEW_UNIT,
    RESCALE_O,
    V_UNIT,
    WARPS,
    copy_columns,
    head_of_column,
    line_offset,
    p_layout,
    scale_tensor,
    tiled_mmas,
    weights,
)
from cute_kernels.mla.kernels.tile import QUANT_TILES
from cute_kernels.mla.kernels.value_units import inverse_power, v_moves, v_units
from cute_kernels.mla.spec import EVENTS, NARROW, ROLES, TOKENS_PER_TILE, WGMMA_ROWS, MlaDecodeSpec

ROW_BLOCKS = 4  # a warpgroup's blocks of 64 rows of O^T: two of a thread's eight values each
KEY_BLOCKS = TOKENS_PER_TILE // 16


class Epilogue(NamedTuple):
    """Arguments of the stores of a work tile: O^T times `factor` of each column, and the log-sum-exp of head `tid`.

    has_scales  1 if a partial has block scales of its own: O is not in units of V_UNIT, or V was not float16
    """

    acc_o: list
    factor: cute.Tensor
    lse: Float32
    has_scales: Int32


class PvWarpgroups:
    """Device code for 2 x 128 threads: O^T += V^T P^T, and the result.

    A warp has 64 neighbouring values of V, which lie in one quant tile, and a thread eight of them: its rows g and g +
    8 of four blocks of 64 rows of O^T. It reads eight codes of each of four keys at once; two byte permutations and
    four conversions make its part of V^T of two blocks. Scales are applied to V, relative to the unit of O_j:

        O_j += (weight_j code_j) P                           rounded to float16 once more

    A key tile whose weights float16 does not hold is multiplied in bfloat16, in the same units (`add_bfloat16`).
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.heads = spec.heads
        self.columns = spec.heads // 4  # columns of a thread
        self.v_fragments = 2 * ROW_BLOCKS if spec.few_heads else 2  # half of them is made while wgmma reads the others
        self.scheduler = Scheduler(spec)
        self.edges = pipelines(spec)
        self.units = self.moving_units = QUANT_TILES  # units of O; the last ones may be fixed
        self.slow_flags = BFLOAT16 | HALVES if spec.splits_p else BFLOAT16  # flags of tiles for `add_bfloat16`
        if spec.split:
            self.merger = PartialMerger(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, pages: tuple, results: Results, counters: Int64, wg: Int32, tidx: Int32, tid):
        """Computes all work tiles of this CTA. `wg` is 0 or 1; `tidx` counts threads of the CTA, `tid` of the group."""
        first_work, end_work, step = table.share.first, table.share.end, table.share.step
        divisors = table.divisors
        done = Int32(0)
        if const_expr(self.spec.pv_expands):
            for tile in cutlass.range(self.spec.expanded_ahead, unroll=1):
                self.expand(smem, tile, wg, tid)
        for index in cutlass.range(first_work, end_work, step, unroll=1):
            work = self.scheduler.locate(index, table)
            length = self.scheduler.length(work, table.mLength)
            keys = self.scheduler.keys(index, work, length, table)
            self.pv_work_tile(smem, table, pages, results, done, keys.tiles, index, keys.is_whole, wg, tid)
            if const_expr(self.spec.balanced):
                if keys.is_whole == 0:
                    group = index * divisors.head_blocks.divisor + table.share.head_block
                    self.merger.count_partial(counters, group, tidx)
            elif const_expr(self.spec.split):
                rest, head_block = divmod(index, divisors.head_blocks)
                group = rest // divisors.splits * divisors.head_blocks.divisor + head_block
                self.merger.count_partial(counters, group, tidx)
            done += keys.tiles

    @cute.jit
    def pv_work_tile(
        self,
        smem,
        table: WorkTable,
        pages: tuple,
        results: Results,
        done: Int32,
        tiles: Int32,
        index: Int32,
        is_whole: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Computes O of the key tiles done, done + 1, ... of a work tile, and runs its epilogue."""
        mma, mma_bfloat16 = tiled_mmas(self.heads)
        shape = mma.partition_shape_C((WGMMA_ROWS, self.heads))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(ROW_BLOCKS)]
        for m in cutlass.range_constexpr(ROW_BLOCKS):
            acc_o[m].fill(0.0)
        raw = [cute.make_rmem_tensor((2, 4), Int32) for _ in range(2)]  # codes of a block of keys, and of the next one
        line, seen = self.line(wg, tid), Int32(0)
        for tile in cutlass.range(done, done + tiles, unroll=1):
            stage, p_stage = self.edges.keys.index(tile), self.edges.p.index(tile)
            self.stamp(smem, tile, 0, 0, wg, tid)
            self.edges.keys.wait(smem, tile)  # complete long ago
            self.load_first(smem, raw[0], stage, line, wg, tid)  # some 100 clocks, overlapped with the wait for P
            self.edges.p.wait(smem, tile)
            self.load_late(smem, raw[0], stage, line, wg, tid)
            self.stamp(smem, tile, 0, 1, wg, tid)
            self.stamp(smem, tile, 1, 0, wg, tid)
            flags = self.flags(smem, p_stage)
            if const_expr(self.spec.split):
                seen |= flags
            if flags & (RESCALE_O | NEW_UNIT) != 0 and tile > done:
                self.rescale(smem, acc_o, flags, p_stage, wg, tid)
            if flags & self.slow_flags != 0:
                self.add_bfloat16(smem, mma_bfloat16, acc_o, flags, stage, p_stage, line, wg, tid)
                self.edges.keys.release(smem, tile)
                self.load_announced(smem, pages, tile, wg, tid)
            else:
                self.add_tile(smem, mma, acc_o, raw, pages, tile, line, wg, tid)
            if tile < done + tiles - 1:
                self.edges.p.release(smem, tile)
            self.stamp(smem, tile, 1, 1, wg, tid)
            if const_expr(self.spec.pv_expands):
                self.expand(smem, tile + self.spec.expanded_ahead, wg, tid)
        has_scales = Int32(1) if seen & (self.slow_flags | NEEDS_SCALES) != 0 else Int32(0)
        self.end_work_tile(smem, table, results, acc_o, done + tiles, tiles, index, is_whole, has_scales, wg, tid)

    @cute.jit
    def end_work_tile(
        self,
        smem,
        table: WorkTable,
        results: Results,
        acc_o: list,
        done: Int32,
        tiles: Int32,
        index: Int32,
        is_whole: Int32,
        has_scales: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """Stores O of a work tile, whose last key tile is done - 1, as a result or a partial."""
        factor = cute.make_rmem_tensor(self.columns, Float32)
        factor.fill(0.0)
        lse, sLse = -Float32.inf, smem.lse.get_tensor(cute.make_layout((self.heads, 2)))
        unit = Float32(V_UNIT)
        if tiles > 0:
            p_stage = self.edges.p.index(done - 1)
            inverse_sums = smem.inverse_sum.get_tensor(cute.make_layout(2 * self.heads))
            copy_columns(inverse_sums, tid, p_stage * self.heads, factor)
            if tid < self.heads:
                lse = sLse[tid, p_stage]
            units = v_units(smem, self.units)
            unit = units[self.unit_index(wg, tid), p_stage]
            for j in cutlass.range_constexpr(self.moving_units):
                if units[j, p_stage] != V_UNIT:
                    has_scales = Int32(1)
            self.edges.p.release(smem, done - 1)
        # a partial without block scales is relative to V_UNIT, which is the scale of all its values
        if const_expr(self.spec.balanced):
            unit *= cutlass.select_(is_whole | has_scales != 0, Float32(1.0), Float32(1.0 / V_UNIT))
        elif const_expr(self.spec.split):
            unit *= cutlass.select_(has_scales != 0, Float32(1.0), Float32(1.0 / V_UNIT))
        for c in cutlass.range_constexpr(self.columns):
            factor[c] *= unit
        # located again instead of kept: each register counts while O is held
        work = self.scheduler.locate(registers.opaque(index), table)
        epilogue = Epilogue(acc_o, factor, lse, has_scales)
        if const_expr(self.spec.balanced):
            if is_whole != 0:
                self.store_result(epilogue, results, work, wg, tid)
            else:
                self.store_partial(epilogue, results, work, wg, tid)
        elif const_expr(self.spec.split):
            self.store_partial(epilogue, results, work, wg, tid)
        else:
            self.store_result(epilogue, results, work, wg, tid)

    @cute.jit
    def load_announced(self, smem, pages: tuple, tile: Int32, wg: Int32, tid: Int32):
        """Makes one warp issue the TMA of the key tile that replaces `tile`, if the load warpgroup has announced it."""
        if const_expr(self.spec.pv_issues_tma):
            if wg == 0 and tid // 32 == 0:
                self.issue_announced(smem, pages, tile)

    @cute.jit
    def issue_announced(self, smem, pages: tuple, tile: Int32):
        """Issues the TMA of the announced key tile once all threads have read `tile`. Called by one warp."""
        following = tile + self.spec.stages
        p_stage = self.edges.p.index(tile)
        sAnnounced = smem.announced.get_tensor(cute.make_layout((2, self.spec.p_stages)))
        page, tile_of_page = sAnnounced[0, p_stage], sAnnounced[1, p_stage]
        if page >= 0:
            self.edges.keys.acquire(smem, following)
            self.edges.rope.acquire(smem, following)
            with cute.arch.elect_one():
                self.edges.keys.arrive_and_expect(smem, following)
            issue_tma(smem, self.edges, pages, following, page, tile_of_page)

    @cute.jit
    def rescale(self, smem, acc_o, flags: Int32, p_stage: Int32, wg: Int32, tid: Int32):
        """Makes O relative to the row_max and the units of this tile."""
        factor = cute.make_rmem_tensor(self.columns, Float32)
        copy_columns(smem.rescaling.get_tensor(cute.make_layout(2 * self.heads)), tid, p_stage * self.heads, factor)
        if flags & NEW_UNIT != 0:
            move = v_moves(smem, self.units)[self.unit_index(wg, tid), p_stage]
            for c in cutlass.range_constexpr(self.columns):
                factor[c] *= move
        for m in cutlass.range_constexpr(ROW_BLOCKS):
            o = wgmma.by_row(acc_o[m])
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.columns):
                    o[r, c] *= factor[c]

    def unit_index(self, wg: Int32, tid: Int32) -> Int32:
        """Returns the index of the unit that a thread's values have: of their quant tile."""
        return 2 * wg + tid // 64

    @cute.jit
    def flags(self, smem, p_stage: Int32) -> Int32:
        """Returns the flags of a tile, from all warps of the softmax."""
        words = cute.make_rmem_tensor(WARPS, Int32)
        pointer = smem.flags.data_ptr() + cute.assume(WARPS * p_stage, divby=WARPS)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WARPS)), words)
        return words[0] | words[1] | words[2] | words[3]

    @cute.jit
    def line(self, wg: Int32, tid: Int32):
        """Returns the offset of a thread's codes of its first key in a stage."""
        warp_idx, g, q = tid // 32, tid % 32 // 4, tid % 4
        quant_tile, chunk = 2 * wg + warp_idx // 2, 4 * (warp_idx % 2) + g // 2
        line = quant_tile * (TOKENS_PER_TILE * LINE_BYTES) + line_offset(2 * q, chunk) + g % 2 * 8
        # kept in a register: computed again after each wait for a tile, it costs 2% of the tile
        return registers.opaque(line) if const_expr(self.spec.few_heads) else line

    @cute.jit
    def expand(self, smem, tile: Int32, wg: Int32, tid: Int32):
        """Expands the codes of a key tile, once they are copied, if PV has to."""
        raise NotImplementedError

    @cute.jit
    def load_first(self, smem, raw: cute.Tensor, stage: Int32, line: Int32, wg: Int32, tid: Int32):
        """Starts loading the first values of a tile before P is there."""
        self.load_codes(smem, raw, stage, 0, line)

    @cute.jit
    def load_late(self, smem, raw: cute.Tensor, stage: Int32, line: Int32, wg: Int32, tid: Int32):
        """Starts loading the first values that may not be loaded before P is there; here there are none."""

    @cute.jit
    def load_codes(self, smem, raw: cute.Tensor, stage: Int32, block, line: Int32):
        """Loads codes of a block of 16 keys: of the keys of a thread's four columns of A (4), eight values each (8)."""
        start = stage * CODES_BYTES + block * (16 * LINE_BYTES)
        for i in cutlass.range_constexpr(4):
            key = (line ^ (16 * (i % 2))) + LINE_BYTES * (i % 2 + 8 * (i // 2))  # the odd key's chunks are swapped
            pointer = smem.codes.data_ptr() + cute.assume(start + key, divby=8)
            source = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(2))
            cute.autovec_copy(source, raw[None, i])

    def p_operands(self, smem, mma: cute.TiledMma, tid: Int32, dtype: Any = Float16) -> cute.Tensor:
        """Returns P^T as the second operand: (.., block of 16 keys, stage)."""
        layout = p_layout(self.heads)
        sP = smem.p.get_tensor(layout.outer, swizzle=layout.inner, dtype=dtype)
        return mma.make_fragment_B(mma.get_slice(tid).partition_B(sP))

    @cute.jit
    def add_tile(self, smem, mma: cute.TiledMma, acc_o, raw, pages: tuple, tile: Int32, line, wg, tid):
        """Adds (V weight)^T P^T to O^T. Converts the next row blocks while wgmma reads the current ones.

        `raw` has the codes of the first 16 keys.
        """
        stage, p_stage = self.edges.keys.index(tile), self.edges.p.index(tile)
        rP = self.p_operands(smem, mma, tid)[None, None, None, p_stage]
        shape = mma.partition_shape_A((WGMMA_ROWS, 16))
        fragments = [mma.make_fragment_A(shape) for _ in range(self.v_fragments)]
        quant_tile = self.unit_index(wg, tid)
        for block in cutlass.range_constexpr(KEY_BLOCKS):
            key_weights = cute.make_rmem_tensor(4, Float16)
            start = weights(smem, p_stage, quant_tile, tid)[None, block // 2].iterator + block % 2 * 4
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(4)), key_weights)
            weight = cute.make_rmem_tensor(8, Float16)
            for e in cutlass.range_constexpr(8):  # as in A: neighbours, rows, then keys 8 further
                weight[e] = key_weights[e % 2 + 2 * (e // 4)]
            if const_expr(block + 1 < KEY_BLOCKS):
                self.load_codes(smem, raw[(block + 1) % 2], stage, block + 1, line)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                half = cute.make_rmem_tensor(8, Float16)
                widen_values(raw[block % 2], m, half)
                fragment = fragments[(ROW_BLOCKS * block + m) % self.v_fragments]
                operand = cute.make_tensor(fragment.iterator, cute.make_layout(8))
                operand.store(half.load() * weight.load())
                warpgroup.fence()
                wgmma.issue(mma, acc_o[m], fragment, rP, True, [(0, block)])
                if const_expr(block + 1 == KEY_BLOCKS and m == 0):  # all codes of the tile are in registers
                    self.edges.keys.release(smem, tile)
                if const_expr((m + 1) % (self.v_fragments // 2) == 0):
                    warpgroup.commit_group()
                    if const_expr(block + 1 == KEY_BLOCKS and m + 1 == ROW_BLOCKS):
                        self.load_announced(smem, pages, tile, wg, tid)
                        warpgroup.wait_group(0)
                    else:
                        warpgroup.wait_group(1)

    @cute.jit
    def add_bfloat16(
        self, smem, mma: cute.TiledMma, acc_o, flags: Int32, stage: Int32, p_stage: Int32, line: Int32, wg, tid
    ):
        """Adds V^T P^T to O^T in bfloat16, whose range is that of float32: rare, so blocks of keys are a loop.

        P is bfloat16 already, unless HALVES is set. Then P is float16, and is split into two bfloat16 numbers in turn,
        which takes twice as long: one key outweighs all others there, so the rounding error of P does not average out.
        V is code times scale in float32, in units of O, rounded once.
        """
        if const_expr(self.spec.splits_p):
            self.add_halves(smem, mma, acc_o, flags, stage, p_stage, line, wg, tid)
        else:
            self.add_rounded(smem, mma, acc_o, stage, p_stage, line, wg, tid)

    @cute.jit
    def add_halves(
        self, smem, mma: cute.TiledMma, acc_o, flags: Int32, stage: Int32, p_stage: Int32, line: Int32, wg, tid
    ):
        """Calls `add_rounded` once with P as bfloat16, or twice with the halves that `store_half_of_p` makes of P."""
        halves, p = Int32(1), cute.make_rmem_tensor(self.heads // 8, Int32)
        p.fill(0)
        is_float16 = flags & (BFLOAT16 | HALVES) == HALVES
        if is_float16:
            halves = Int32(2)
            cute.autovec_copy(self.words_of_p(smem, p_stage, wg, tid), p)
        for half in cutlass.range(halves, unroll=1):
            if is_float16:
                self.store_half_of_p(smem, p, half, p_stage, wg, tid)
            self.add_rounded(smem, mma, acc_o, stage, p_stage, line, wg, tid)

    @cute.jit
    def store_half_of_p(self, smem, p: cute.Tensor, half: Int32, p_stage: Int32, wg: Int32, tid: Int32):
        """Replaces a thread's share of P by P rounded to bfloat16 or, with half = 1, by the rest of that rounding."""
        words = self.words_of_p(smem, p_stage, wg, tid)
        cute.arch.barrier(barrier_id=NamedBarrier.PV, number_of_threads=256)  # all have multiplied by the other half
        for i in cutlass.range_constexpr(cute.size(words)):
            rounded = pairs.half_to_bfloat16(p[i])
            if half != 0:
                rounded = pairs.half_minus_bfloat16(p[i], rounded)
            words[i] = rounded
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.PV, number_of_threads=256)

    def words_of_p(self, smem, p_stage: Int32, wg: Int32, tid: Int32) -> cute.Tensor:
        """Returns a thread's share of a tile's P in shared memory, pairs of neighbours: a 256th, of whichever keys."""
        words = self.heads // 8
        start = p_stage * (TOKENS_PER_TILE * self.heads // 2) + (128 * wg + tid) * words
        pointer = cute.recast_ptr(smem.p.data_ptr(), dtype=Int32) + cute.assume(start, divby=words)
        return cute.make_tensor(pointer, cute.make_layout(words))

    @cute.jit
    def add_rounded(self, smem, mma: cute.TiledMma, acc_o, stage: Int32, p_stage: Int32, line: Int32, wg, tid):
        """Adds V^T P^T to O^T, P being bfloat16 in shared memory."""
        rP = self.p_operands(smem, mma, tid, BFloat16)[None, None, None, p_stage]
        fragments = [mma.make_fragment_A(mma.partition_shape_A((WGMMA_ROWS, 16))) for _ in range(2)]
        raw, half = cute.make_rmem_tensor((2, 4), Int32), cute.make_rmem_tensor(8, Float16)
        weight, sScale = cute.make_rmem_tensor(4, Float32), scale_tensor(smem, self.spec.stages)
        quant_tile = self.unit_index(wg, tid)
        power = inverse_power(v_units(smem)[quant_tile, p_stage])
        for block in cutlass.range(KEY_BLOCKS, unroll=1):
            self.load_codes(smem, raw, stage, block, line)
            for i in cutlass.range_constexpr(4):
                key = stage * TOKENS_PER_TILE + 16 * block + 2 * (tid % 4) + i % 2 + 8 * (i // 2)
                weight[i] = sScale[quant_tile, key] * power
            b = cute.make_tensor(rP[None, None, block].iterator, rP.layout)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                widen_values(raw, m, half)
                scaled = cute.make_rmem_tensor(8, Float32)
                for e in cutlass.range_constexpr(8):  # as in A: neighbours, rows, then keys 8 further
                    scaled[e] = half[e].to(Float32) * weight[e % 2 + 2 * (e // 4)]
                fragment = fragments[m % 2]
                cute.make_tensor(fragment.iterator, cute.make_layout(8)).store(scaled.load().to(BFloat16))
                warpgroup.fence()
                wgmma.issue(mma, acc_o[m], fragment, b, True, [(0, 0)])
                warpgroup.commit_group()
                warpgroup.wait_group(0 if m + 1 == ROW_BLOCKS else 1)

    # ---- epilogue

    @cute.jit
    def store_result(self, epilogue: Epilogue, results: Results, work: WorkTile, wg: Int32, tid: Int32):
        """Stores the final O and its log-sum-exp."""
        h_q, mLse = results.mSink.shape[0], results.mLse
        head = work.head_block * self.heads + tid
        if wg == 0 and tid < self.heads and head < h_q:
            mLse[work.request, work.query, head] = softmax.result_lse(epilogue.lse, self.spec.inf_if_empty)
        rows = results.mOut[work.request, work.query, None, None]
        self.store(epilogue, rows, None, h_q, work.head_block, wg, tid)

    @cute.jit
    def store_partial(self, epilogue: Epilogue, results: Results, work: WorkTile, wg: Int32, tid: Int32):
        """Stores a partial: O as float16, its log-sum-exp, and block scales.

        In units of V_UNIT O is a mean of numbers that float16 held as V, so V_UNIT is the block scale of all. Otherwise
        each warp's 64 values have a scale of their own.
        """
        mPartial, mPartialLse, mScales = results.partials
        h_q = results.mSink.shape[0]
        head_block, split, query, request = work
        head = head_block * self.heads + tid
        if wg == 0 and tid < self.heads and head < h_q:
            mPartialLse[split, request, query, head] = epilogue.lse
            if epilogue.has_scales == 0:  # negative: the common block scale
                mScales[split, request, query, head, 0] = Float32(-V_UNIT)
        rows = mPartial[split, request, query, None, None]
        scales = mScales[split, request, query, None, 4 * wg + tid // 32]
        self.store(epilogue, rows, scales, h_q, head_block, wg, tid)

    @cute.jit
    def store(
        self, epilogue: Epilogue, rows: cute.Tensor, scales, h_q: Int32, head_block: Int32, wg: Int32, tid: Int32
    ):
        """Stores O times the factor of each head, eight neighbouring values at once; divided by block scales if any.

        One branch covers all heads: one each leaves gaps in code that runs once, which cost a short call 2 to 16%. With
        8 heads and block tables each has one: ptxas would keep PV's loop counters in registers of each thread (10%).
        """
        one_branch = const_expr(self.spec.sparse or self.heads > min(NARROW))
        if const_expr(scales is not None and one_branch):
            if epilogue.has_scales != 0:
                self.store_columns(epilogue, rows, scales, h_q, head_block, wg, tid, True)
            else:
                self.store_columns(epilogue, rows, None, h_q, head_block, wg, tid, True)
        else:
            self.store_columns(epilogue, rows, scales, h_q, head_block, wg, tid, False)

    @cute.jit
    def store_columns(
        self, epilogue: Epilogue, rows: cute.Tensor, scales, h_q: Int32, head_block: Int32, wg: Int32, tid: Int32,
        is_known: cutlass.Constexpr,
    ):  # fmt: skip
        """Does what `store` does. If `is_known`, `scales` tells whether there are block scales; else each head asks."""
        first = 256 * wg + 64 * (tid // 32) + 8 * (tid % 32 // 4)
        eight, factor = cute.make_rmem_tensor(8, Float32), epilogue.factor
        for c in cutlass.range_constexpr(self.columns):
            head = head_block * self.heads + head_of_column(tid, c)
            for m in cutlass.range_constexpr(ROW_BLOCKS):
                o = wgmma.by_row(epilogue.acc_o[m])
                for r in cutlass.range_constexpr(2):
                    eight[2 * m + r] = cutlass.select_(factor[c] == 0.0, Float32(0.0), o[r, c] * factor[c])
            if const_expr(scales is not None):
                if const_expr(is_known):
                    self.store_scale(eight, scales, head, h_q, tid)
                else:
                    if epilogue.has_scales != 0:
                        self.store_scale(eight, scales, head, h_q, tid)
            rounded = cute.make_rmem_tensor(8, rows.element_type)
            rounded.store(eight.load().to(rows.element_type))
            if head < h_q:
                pointer = rows[head, None].iterator + cute.assume(first, divby=8)
                cute.autovec_copy(rounded, cute.make_tensor(pointer, cute.make_layout(8)))

    @cute.jit
    def store_scale(self, eight: cute.Tensor, scales: cute.Tensor, head: Int32, h_q: Int32, tid: Int32):
        """Divides eight numbers by the block scale that they share with other lanes' numbers, and stores the scale."""
        scale = self.divide_by_scale(eight)
        if tid % 32 < 4 and head < h_q:
            scales[head] = scale

    @cute.jit
    def divide_by_scale(self, eight: cute.Tensor) -> Float32:
        """Divides 64 numbers, held by eight lanes, by their block scale, and returns the scale."""
        peak = Float32(0.0)
        for i in cutlass.range_constexpr(8):
            peak = cute.arch.fmax(peak, cute.arch.fmax(eight[i], -eight[i]))
        for step in cutlass.range_constexpr(3):
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 4 << step))
        scale = softmax.block_scale(peak)
        eight.store(eight.load() * (1.0 / scale))
        return scale

    @cute.jit
    def stamp(self, smem, tile: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, wg: Int32, tid: Int32):
        """Stores a timestamp of a key tile."""
        for w in cutlass.range_constexpr(2):
            self.tracer.stamp(smem.trace.ptr, 2 + w, len(EVENTS[2]) * tile + event, edge, wg == w and tid == 0)
