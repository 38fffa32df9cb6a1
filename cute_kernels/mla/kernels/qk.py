"""The QK warpgroups of the MLA decode kernel: S^T = K Q^T of all key tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import pairs, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.codes import row_numbers
from cute_kernels.mla.kernels.convert_q import QConverter, code_chunk
from cute_kernels.mla.kernels.load_q import QTma, prefetch_q, q_layout, start_q
from cute_kernels.mla.kernels.pipelines import NamedBarrier, pipelines
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.smem import (
    CODES_BYTES,
    LINE_BYTES,
    ROPE_BYTES,
    WARPS,
    copy_columns,
    key_of_row,
    line_offset,
    s_offset,
    scale_tensor,
    tiled_mmas,
)
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, WGMMA_ROWS, MlaDecodeSpec

PREFETCH_TILES = 6  # key tiles before the next work tile at which L2 is asked for its Q: all CTAs want 73 KB at once
CHUNKS = NOPE // BLOCK_COLUMNS  # chunks of 64 columns: 16 codes of each of a thread's rows
CHUNKS_PER_SCALE = QUANT_TILE // BLOCK_COLUMNS
MAX_SCALE = 2.0**40
MIN_SCALE = 2.0**-50  # divides in place of a smaller scale, which changes a score by less than 2^-34 of a head's peak


class QkWarpgroups:
    """Device code for 128 threads, or 256: S^T = K Q^T of all tiles, a row for a key, a column for a head.

        S = q_rope k_rope + sum_j scale_j (q_j code_j)      scales in float32, products of float16 numbers

    K is made in registers: a thread reads 16 codes of a row at once and converts them, exactly.

    Two accumulators take the quant tiles in turn. Before its second tile, each is multiplied by the ratio of their
    scales while wgmma writes the other one, and at the end by the last scale. 64 columns of K are held twice, so that 8
    products of 16 columns follow each other while the next codes are converted. A scale below MIN_SCALE counts as
    MIN_SCALE. A tile with a scale above MAX_SCALE, whose ratios float32 may not hold, is found in time and computed by
    `slow_tile`. S is stored unscaled; `unit`, which turns it into a score, is stored with each key tile.

    With few heads, QK of a tile is a chain of waits rather than work: two warpgroups take every second tile each and
    have their own stage of S. They share Q, convert it together, and meet before the Q of the next work tile replaces
    it. `warp_idx` counts through both, `tid` within one.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.heads = spec.heads
        self.columns = spec.heads // 4  # columns of a thread
        self.accumulators = 2
        self.warpgroups = spec.qk_warpgroups
        self.threads = 128 * spec.qk_warpgroups
        self.has_rope = spec.has_rope
        self.q = QConverter(spec)
        self.scheduler = Scheduler(spec)
        self.edges = pipelines(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, q_tma: QTma, scale_log2: Float32, table: WorkTable, warp_idx: Int32, tidx: Int32):
        """Computes S of all work tiles of this CTA."""
        first_work, end_work, step = table.share.first, table.share.end, table.share.step
        work = self.scheduler.locate(first_work, table)
        if warp_idx == 0 and first_work < end_work:
            start_q(smem, *q_tma, work, self.heads)
        done, loads = Int32(0), Int32(0)
        length = self.scheduler.length(work, table.mLength)
        for index in cutlass.range(first_work, end_work, step, unroll=1):
            work = self.scheduler.locate(index, table)
            keys = self.scheduler.keys(index, work, length, table)
            following = index + step
            has_next = following < end_work
            last = cutlass.min(following, end_work - 1)
            next_work = self.scheduler.locate(last, table)
            tid = tidx % 128  # inside the loop: ptxas generates other code for 32 heads if it is computed before
            has_powers = self.q.prepare(smem, scale_log2, loads, warp_idx, tid)
            loads += 1
            length = self.scheduler.length(next_work, table.mLength)  # a work tile ahead: it takes about 1000 clocks
            self.qk_work_tile(smem, q_tma, done, keys.tiles, has_next, last, table, has_powers, warp_idx, tid)
            done += keys.tiles

    @cute.jit
    def qk_work_tile(
        self,
        smem,
        q_tma: QTma,
        done: Int32,
        tiles: Int32,
        has_next,
        next_work: Int32,
        table: WorkTable,
        has_powers: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Computes S of the key tiles done, done + 1, ... of a work tile, whose Q is ready; starts loading the next Q.

        L2 is asked for the next Q PREFETCH_TILES earlier.
        """
        shape = tiled_mmas(self.heads)[0].partition_shape_C((WGMMA_ROWS, self.heads))
        acc = tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        raw = cute.make_rmem_tensor((16, 2), Float8E4M3FN)
        tile, end = done, done + tiles
        if const_expr(self.warpgroups > 1):
            tile += (done + warp_idx // WARPS) % self.warpgroups
        prefetched = Int32(0)
        while tile < end:
            # Keep the slow path out of the hot loop: each of eight jumps over it stalled instruction fetch by about 40
            # cycles.
            is_slow, stop = Int32(0), end
            if prefetched == 0:
                stop = cutlass.max(end - PREFETCH_TILES, done)
            while is_slow == 0 and tile < stop:
                is_slow = self.fast_tile(smem, acc, raw, has_powers, tile, tid)
                if is_slow == 0:
                    tile += self.warpgroups
            if is_slow != 0:
                self.slow_tile(smem, acc[0], raw, tile, tid)
                acc[1].fill(0.0)
                self.store_s(smem, acc, tile, tid, True)
                tile += self.warpgroups
            elif prefetched == 0:
                prefetched = Int32(1)
                if has_next and warp_idx == 0:
                    prefetch_q(*q_tma, self.scheduler.locate(next_work, table), self.heads)
        if has_next:
            # all threads have read this Q
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
            if warp_idx == 0:
                start_q(smem, *q_tma, self.scheduler.locate(next_work, table), self.heads)

    @cute.jit
    def fast_tile(
        self,
        smem,
        acc: tuple,
        raw: cute.Tensor,
        has_powers: Int32,
        tile: Int32,
        tid: Int32,
    ):
        """Computes and stores S^T of a tile; returns 1, and stores nothing, if the tile has to take `slow_tile`.

        That is so if a scale is out of range or blocks of Q have powers of their own.

        Each accumulator holds its sum relative to the scale of its last quant tile. The rope part comes last, so that
        the first products wait only for codes.
        """
        self.stamp(smem, tile, 0, 0, tid)
        stage = self.edges.keys.index(tile)
        self.edges.keys.wait(smem, tile)
        self.stamp(smem, tile, 0, 1, tid, True)
        mma = tiled_mmas(self.heads)[0]
        rQ = self.q_operands(smem, mma, tid, Float16)
        codes = [mma.make_fragment_A(mma.partition_shape_A((WGMMA_ROWS, BLOCK_COLUMNS))) for _ in range(2)]
        self.load_codes(smem, raw, stage, 0, tid)
        factors = ()
        for c in cutlass.range_constexpr(CHUNKS):
            quant_tile, starts_quant_tile = c // CHUNKS_PER_SCALE, c % CHUNKS_PER_SCALE == 0
            if const_expr(starts_quant_tile and quant_tile > 1):
                self.multiply_rows(acc[quant_tile % 2], factors)
            if const_expr(c > 1):
                warpgroup.wait_group(1)  # products of chunk c - 2 have read the registers that are written here
            self.widen(raw, codes[c % 2])
            if const_expr(c + 1 < CHUNKS):
                self.load_codes(smem, raw, stage, c + 1, tid)
            warpgroup.fence()
            blocks = [(k, 4 * c + k) for k in range(BLOCK_COLUMNS // 16)]
            wgmma.issue(mma, acc[quant_tile % 2], codes[c % 2], rQ, not starts_quant_tile or quant_tile > 1, blocks)
            warpgroup.commit_group()
            if const_expr(not starts_quant_tile and quant_tile > 0):
                factors = self.scale_ratios(smem, stage, quant_tile - 1, tid)
        self.multiply_rows(acc[0], factors)
        warpgroup.wait_group(0)
        if const_expr(self.has_rope):
            rope = self.rope_operand()
            self.load_rope(smem, rope, tile, tid)
            self.issue_rope(smem, acc[0], rope, True, tid)
        # overlapped with wgmma
        factors = self.scale_ratios(smem, stage, QUANT_TILES - 1, tid)
        self.multiply_rows(acc[1], factors)
        is_slow = Int32(0)
        if has_powers != 0 or not self.scales_in_range(smem, stage, tid):
            is_slow = Int32(1)
        self.edges.s.acquire(smem, tile)
        warpgroup.wait_group(0)
        self.stamp(smem, tile, 1, 1, tid, True)
        if is_slow == 0:
            self.store_s(smem, acc, tile, tid)
        return is_slow

    def q_operands(self, smem, mma: cute.TiledMma, tid: Int32, dtype) -> cute.Tensor:
        """Returns Q as the second operand: (.., block of 16 columns)."""
        layout = q_layout(self.heads, self.spec.d_qk)
        sQ = smem.q.get_tensor(layout.outer, swizzle=layout.inner, dtype=dtype)
        return mma.make_fragment_B(mma.get_slice(tid).partition_B(sQ))[None, None, None, 0]

    @cute.jit
    def issue_rope(self, smem, acc: cute.Tensor, rope: cute.Tensor, accumulate: cutlass.Constexpr, tid: Int32):
        """Starts S^T of the rope part of a tile."""
        mma = tiled_mmas(self.heads)[1]
        rQ = self.q_operands(smem, mma, tid, BFloat16)
        warpgroup.fence()
        first = (self.spec.d_qk - ROPE) // 16
        wgmma.issue(mma, acc, rope, rQ, accumulate, [(k, first + k) for k in range(ROPE // 16)])
        warpgroup.commit_group()

    @cute.jit
    def scale_ratios(self, smem, stage: Int32, quant_tile: cutlass.Constexpr, tid: Int32):
        """Returns a quant tile's scale over that of the next but one, or over 1, for each of a thread's two rows."""
        sScale = scale_tensor(smem, self.spec.stages)
        factors = []
        for r in cutlass.range_constexpr(2):
            token = stage * TOKENS_PER_TILE + key_of_row(tid, r)
            factor = sScale[quant_tile, token]
            if const_expr(quant_tile >= 2):  # this scale was a divisor before
                factor = cute.arch.fmax(factor, Float32(MIN_SCALE))
            if const_expr(quant_tile + 2 < QUANT_TILES):
                divisor = cute.arch.fmax(sScale[quant_tile + 2, token], Float32(MIN_SCALE))
                factor = factor * cute.arch.rcp_approx(divisor)
            factors.append(factor)
        return tuple(factors)

    @cute.jit
    def multiply_rows(self, acc: cute.Tensor, factors: tuple):
        """Multiplies each of a thread's two rows of an accumulator by a factor."""
        s = wgmma.by_row(acc)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.columns):
                s[r, c] *= factors[r]

    @cute.jit
    def scales_in_range(self, smem, stage: Int32, tid: Int32):
        """Returns whether no scale of a tile is above MAX_SCALE, NaN or negative; the same in all threads."""
        lane, scales = tid % 32, cute.make_rmem_tensor((QUANT_TILES, 2), Float32)
        for i in cutlass.range_constexpr(2):
            self.load_scales(smem, scales[None, i], stage, lane + 32 * i)
        bits = cute.recast_tensor(scales, Int32)
        most = bits[0]
        for i in cutlass.range_constexpr(1, 2 * QUANT_TILES):
            most = pairs.max_unsigned(most, bits[i])
        in_range = pairs.at_most_unsigned(most, Int32(pairs.float_bits(MAX_SCALE)))
        return cute.arch.vote_all_sync(in_range != 0)

    @cute.jit
    def slow_tile(self, smem, acc: cute.Tensor, raw: cute.Tensor, tile: Int32, tid: Int32):
        """Computes S^T of a tile, each chunk times its scale and its power of Q, in float32: rare, so one by one."""
        stage, mma = self.edges.keys.index(tile), tiled_mmas(self.heads)[0]
        rQ = self.q_operands(smem, mma, tid, Float16)
        result = cute.make_rmem_tensor_like(acc)
        total, chunk = wgmma.by_row(result), wgmma.by_row(acc)
        codes = mma.make_fragment_A(mma.partition_shape_A((WGMMA_ROWS, BLOCK_COLUMNS)))
        power = cute.make_rmem_tensor(self.columns, Float32)
        sPower = smem.q_power.get_tensor(cute.make_layout(QUANT_TILES * self.heads))
        sScale = scale_tensor(smem, self.spec.stages)
        if const_expr(self.has_rope):
            rope = self.rope_operand()
            self.load_rope(smem, rope, tile, tid)
            self.issue_rope(smem, acc, rope, False, tid)
            warpgroup.wait_group(0)
            result.store(acc.load())
            self.shift_columns(smem, total, tid)
        else:
            result.fill(0.0)
        for c in cutlass.range(CHUNKS, unroll=1):
            self.load_codes(smem, raw, stage, c, tid)
            self.widen(raw, codes)
            warpgroup.fence()
            for k in cutlass.range_constexpr(BLOCK_COLUMNS // 16):
                block = rQ[None, None, 4 * c + k]
                one = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1), 3))
                wgmma.issue(mma, acc, codes, one, k > 0, [(k, 0)])
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            quant_tile = c // CHUNKS_PER_SCALE
            copy_columns(sPower, tid, quant_tile * self.heads, power)
            for r in cutlass.range_constexpr(2):
                factor = sScale[quant_tile, stage * TOKENS_PER_TILE + key_of_row(tid, r)]
                for i in cutlass.range_constexpr(self.columns):
                    total[r, i] += chunk[r, i] * (power[i] * factor)
        acc.store(result.load())

    @cute.jit
    def shift_columns(self, smem, s: cute.Tensor, tid: Int32):
        """Multiplies S^T of the rope parts of a slow key tile by the powers of its heads."""
        shift = cute.make_rmem_tensor(self.columns, Float32)
        copy_columns(smem.q_shift.get_tensor(cute.make_layout(self.heads)), tid, 0, shift)
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(self.columns):
                s[r, i] *= shift[i]

    def line(self, tid: Int32) -> Int32:
        """Returns the offset of a thread's first 16 bytes of its first row, in codes of even chunks and rope parts."""
        return line_offset(key_of_row(tid, 0), code_chunk(tid % 4, 0))

    @cute.jit
    def load_codes(self, smem, raw: cute.Tensor, stage: Int32, c, tid: Int32):
        """Loads 16 codes of each of a thread's two rows, in chunk c of 64 columns."""
        line = self.line(tid)
        start = stage * CODES_BYTES + c // CHUNKS_PER_SCALE * (TOKENS_PER_TILE * LINE_BYTES)
        for r in cutlass.range_constexpr(2):
            row = (line ^ (32 * (c % 2)) ^ (16 * r)) + LINE_BYTES * r
            pointer = smem.codes.data_ptr() + cute.assume(start + row, divby=16)
            source = cute.make_tensor(cute.recast_ptr(pointer, dtype=Float8E4M3FN), cute.make_layout(16))
            cute.autovec_copy(source, raw[None, r])

    def rope_operand(self) -> cute.Tensor:
        """Makes registers for the rope part of a thread's two rows."""
        mma = tiled_mmas(self.heads)[1]
        return mma.make_fragment_A(mma.partition_shape_A((WGMMA_ROWS, ROPE)))

    def rope_stage(self, tile: Int32) -> Int32:
        """Returns the stage of a tile's rope part."""
        return self.edges.rope.index(tile)

    @cute.jit
    def load_rope(self, smem, rope: cute.Tensor, tile: Int32, tid: Int32):
        """Loads a quarter of the rope part of each of a thread's two rows, eight numbers of either half of it.

        It goes into registers: wgmma would read rows from shared memory in another order than `key_of_row`.
        """
        words, four = cute.recast_tensor(rope, Int32), cute.make_rmem_tensor(4, Int32)
        line, start = self.line(tid), self.rope_stage(tile) * ROPE_BYTES
        for r in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                row = (line ^ (32 * half) ^ (16 * r)) + LINE_BYTES * r
                pointer = cute.recast_ptr(smem.rope.data_ptr() + cute.assume(start + row, divby=16), dtype=Int32)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), four)
                for i in cutlass.range_constexpr(4):
                    words[8 * half + 4 * (i // 2) + 2 * (i % 2) + r] = four[i]

    @cute.jit
    def widen(self, raw: cute.Tensor, operand: cute.Tensor):
        """Converts 16 codes of each of two rows to four blocks of 16 columns of A."""
        words = cute.recast_tensor(operand, Int32)
        for r in cutlass.range_constexpr(2):
            numbers = row_numbers(raw, r)
            for k in cutlass.range_constexpr(4):
                words[4 * k + r], words[4 * k + 2 + r] = numbers[2 * k], numbers[2 * k + 1]

    @cute.jit
    def load_scales(self, smem, scales: cute.Tensor, stage: Int32, row: Int32):
        """Loads the scales of a row."""
        pointer = smem.scale.data_ptr() + cute.assume((stage * TOKENS_PER_TILE + row) * QUANT_TILES, divby=QUANT_TILES)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(QUANT_TILES)), scales)

    @cute.jit
    def store_s(self, smem, acc: tuple, tile: Int32, tid: Int32, is_shifted: cutlass.Constexpr = False):
        """Stores S^T, the sum of the accumulators, for the softmax, once it has emptied the stage."""
        s, q = [wgmma.by_row(acc[i]) for i in range(self.accumulators)], tid % 4
        s_stage = self.edges.s.index(tile)
        self.store_unit(smem, s_stage, tid, is_shifted)
        start = smem.s.data_ptr() + s_stage * (TOKENS_PER_TILE * self.heads)
        four = cute.make_rmem_tensor((2, 2), Float32)
        for block in cutlass.range_constexpr(self.heads // 8):
            for e in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    four[r, e] = sum((t[r, 2 * block + e] for t in s[1:]), s[0][r, 2 * block + e])
            pointer = start + cute.assume(s_offset(8 * block + 2 * q, key_of_row(tid, 0) // 2), divby=4)
            cute.autovec_copy(four, cute.make_tensor(pointer, cute.make_layout((2, 2))))
        self.edges.s.arrive(smem, tile)
        if const_expr(self.spec.pv_issues_tma):
            self.edges.rope.release(smem, tile)
        self.stamp(smem, tile, 2, 1, tid)

    @cute.jit
    def store_unit(self, smem, s_stage: Int32, tid: Int32, is_shifted: cutlass.Constexpr):
        """Stores the units of heads with S of each key tile: they change with Q, and Q is ahead of the softmax."""
        sSource = smem.q_unit.get_tensor(cute.make_layout(self.heads))
        sShift = smem.q_shift.get_tensor(cute.make_layout(self.heads))
        sUnit = smem.unit.get_tensor(cute.make_layout((self.heads, self.warpgroups)))
        if tid < sUnit.shape[0]:
            sUnit[tid, s_stage] = sSource[tid] / sShift[tid] if const_expr(is_shifted) else sSource[tid]

    @cute.jit
    def stamp(
        self,
        smem,
        tile: Int32,
        event: cutlass.Constexpr,
        edge: cutlass.Constexpr,
        tid: Int32,
        goes_on: cutlass.Constexpr = False,
    ):
        """Stores a timestamp of a key tile."""
        self.tracer.stamp(smem.trace.ptr, 1, len(EVENTS[1]) * tile + event, edge, tid == 0, goes_on)
