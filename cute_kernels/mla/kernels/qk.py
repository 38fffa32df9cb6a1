"""The warpgroups of the MLA decode kernel that score keys where heads are columns: Q, and S of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.convert_q import MAX_EXPONENT, MAX_PEAK, MIN_PEAK, max_magnitudes
from cute_kernels.mla.kernels.load_q import prefetch_q, start_q
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable, WorkTile
from cute_kernels.mla.kernels.smem import (
    LINE,
    WARPS,
    column_layouts,
    column_mmas,
    key,
    line_of,
    pairs_of,
    rope_stages,
    scales_of,
    scores_of,
    stages,
    turn,
)
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec

AHEAD = 6  # tiles before the end of an item, when all CTAs at once want 73 KB of Q each, that L2 is asked for them
CHUNKS = NOPE // BLOCK_COLUMNS  # of 64 columns: of each of a thread's rows 16 codes
USUAL = 2.0**40  # scales between 1 over this and this are usual: their ratios leave float32 room for what they multiply


def chunk_of_codes(q, half):
    """Of eight chunks of 16 codes, which one lane q of a row has in a half of a quantization tile.

    See `line_of` for the banks that they meet.
    """
    return q % 2 + q // 2 * 4 + 2 * half


class ColumnScores:
    """Device code for 128 threads, or twice as many: S^T = K Q^T of all tiles, a row for a key, a column for a head.

        S = q_rope k_rope + sum_j scale_j (q_j code_j)      scales in float32, products of float16 numbers

    K is made in registers: a thread reads 16 codes of a row at once, and as the order of columns in a product is free,
    they are its part of four blocks of 16 columns; Q is put into that order as it becomes float16, and its rope part
    likewise. Codes are exact as float16, and so is Q: numbers 2^-16 below the largest of the 128 that meet a scale lose
    bits, and are too small there to matter. Where the largest itself is out of float16's reach, powers of two bring
    them all into it.

    Two accumulators take the quantization tiles in turn. Before its second one each is multiplied by the ratio of their
    scales, beside products that go into the other, and in the end by the last of them. 64 columns of K are held twice,
    so that 8 products of 16 columns follow each other while the next codes are converted. Scales that have no such
    ratio, 0 among them, are found in time, and the tile is made again (`multiply_apart`).

    With few heads QK of a tile is a chain of waits, not work: two warpgroups score, each every second tile, and store S
    in a place of its own. They share Q, prepare it together, and meet where the next item's takes its place.
    `warp_idx` counts from 0 through all of them, `tid` through the threads of one.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.heads = spec.heads
        self.columns = spec.heads // 4  # of a thread
        self.stages, self.ropes = stages(spec.heads), rope_stages(spec.heads)
        self.groups = spec.score_groups
        self.offers = spec.offers
        self.threads = 128 * spec.score_groups
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    # ---- Q

    @cute.jit
    def prepare(
        self,
        smem,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        work: WorkTile,
        loads: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Makes Q float16 but for its rope part, in place; `loads` loads of Q came before. Nothing is scored yet.

        Returns (whether S is to be multiplied by powers of Q, the new number of loads).
        """
        sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((self.heads, QUANT_TILES)))
        first = tid
        if const_expr(self.groups > 1):
            first += 128 * (warp_idx // WARPS)
        scaled, ready = Int32(0), Int32(0)
        while ready == 0:  # once or twice. Written once: with a second copy ptxas gave up uniform registers everywhere
            cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
            loads += 1
            fits = Int32(1)
            for item in cutlass.range(first, self.heads * QUANT_TILES, self.threads, unroll=1):
                power = Float32(1.0)
                if scaled != 0:
                    exponent = cutlass.min(cutlass.max(self.exponent(smem, item), -MAX_EXPONENT), MAX_EXPONENT)
                    self.multiply_row(smem, item, softmax.power_of_two(-exponent))
                    power = softmax.power_of_two(exponent)
                sPower[item % self.heads, item // self.heads] = power
                if self.convert(smem, item) == 0:
                    fits = Int32(0)
            for row in cutlass.range(first, self.heads, self.threads, unroll=1):
                self.convert_rope(smem, row)
            ready = scaled | wgmma.every_thread(fits, Int32(NamedBarrier.QK), self.threads)
            if ready == 0:
                scaled = Int32(1)
                cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, and then those of a copy
                cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
                if warp_idx == 0:
                    start_q(smem, load_q, tQ, work, self.heads)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
        return scaled, loads

    def chunk_of_q(self, smem, row: Int32, c):
        """Eight numbers of a row of Q, 8 c and on."""
        start = c // 8 * (self.heads * BLOCK_COLUMNS) + row * BLOCK_COLUMNS + ((c % 8) ^ (row % 8)) * 8
        return cute.make_tensor(smem.q.data_ptr() + cute.assume(start, divby=8), cute.make_layout(8))

    @cute.jit
    def convert(self, smem, item: Int32) -> Int32:
        """128 numbers of a row as float16 and in the order of codes; whether float16 holds them.

        Of block i of 16 columns, pairs 2 i and 2 i + 1 of lane q's 16 codes are words q and q + 4.
        """
        row, start = item % self.heads, item // self.heads * (QUANT_TILE // 8)
        numbers = cute.make_rmem_tensor((8, QUANT_TILE // 8), BFloat16)
        for c in cutlass.range_constexpr(QUANT_TILE // 8):
            cute.autovec_copy(self.chunk_of_q(smem, row, start + c), numbers[None, c])
        words, fits = cute.recast_tensor(numbers, Int32), Int32(1)
        for half in cutlass.range_constexpr(2):
            largest, seen = Int32(0), Int32(0)
            for c in cutlass.range_constexpr(8 * half, 8 * half + 8):
                new = cute.make_rmem_tensor(8, Float16)
                new.store(numbers[None, c].load().to(Float32).to(Float16))
                for i in cutlass.range_constexpr(4):
                    seen |= words[i, c]
                    words[i, c] = cute.recast_tensor(new, Int32)[i]
                    if const_expr(i == 0 and c == 8 * half):
                        largest = words[i, c] & 0x7FFF7FFF
                    else:
                        largest = max_magnitudes(largest, words[i, c])
            pair = cute.make_rmem_tensor(1, Int32)
            pair[0] = largest
            found = cute.recast_tensor(pair, Float16)
            peak = cute.arch.fmax(found[0].to(Float32), found[1].to(Float32))
            if seen & 0x7FFF7FFF != 0 and (peak < MIN_PEAK or peak > MAX_PEAK):
                fits = Int32(0)
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(QUANT_TILE // 8):
            for q in cutlass.range_constexpr(4):
                four[q] = words[c % 4, 2 * chunk_of_codes(q, c // 8) + c % 8 // 4]
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk_of_q(smem, row, start + c))
        return fits

    @cute.jit
    def convert_rope(self, smem, row: Int32):
        """The rope part of a row in the order in which lanes have keys: chunks of eight numbers as they have of codes.

        Of block i of 16 columns in a half, words 2 i and 2 i + 1 of lane q's chunk are words q and q + 4.
        """
        words = cute.make_rmem_tensor((4, 8), Int32)
        for c in cutlass.range_constexpr(8):
            old = self.chunk_of_q(smem, row, NOPE // 8 + c)
            cute.autovec_copy(cute.recast_tensor(old, Int32), words[None, c])
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(8):
            for q in cutlass.range_constexpr(4):
                four[q] = words[c % 4, chunk_of_codes(q, c // 4)]
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk_of_q(smem, row, NOPE // 8 + c))

    @cute.jit
    def multiply_row(self, smem, item: Int32, power: Float32):
        """128 numbers of a row times a power of two, which bf16 holds."""
        eight = cute.make_rmem_tensor(8, BFloat16)
        for chunk in cutlass.range(16, unroll=1):
            target = self.chunk_of_q(smem, item % self.heads, item // self.heads * (QUANT_TILE // 8) + chunk)
            cute.autovec_copy(target, eight)
            eight.store((eight.load().to(Float32) * power).to(BFloat16))
            cute.autovec_copy(eight, target)

    @cute.jit
    def exponent(self, smem, item: Int32) -> Int32:
        """floor(log2) of the largest of 128 numbers of Q."""
        peak, eight = Float32(0.0), cute.make_rmem_tensor(8, BFloat16)
        for chunk in cutlass.range(16, unroll=1):
            source = self.chunk_of_q(smem, item % self.heads, item // self.heads * (QUANT_TILE // 8) + chunk)
            cute.autovec_copy(source, eight)
            for i in cutlass.range_constexpr(8):
                number = eight[i].to(Float32)
                peak = cute.arch.fmax(peak, cute.arch.fmax(number, -number))
        return softmax.exponent(peak)

    # ---- tiles

    @cute.jit
    def score(
        self,
        smem,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        scale_log2: Float32,
        done: Int32,
        count: Int32,
        has_next,
        next_item: Int32,
        table: WorkTable,
        scaled: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Scores the `count` tiles of an item of work, the first of which is tile `done`; Q has come.

        Then nobody needs its Q any more, and the load of the next item's is started. L2 is asked for it AHEAD tiles
        before.
        """
        shape = column_mmas(self.heads)[0].partition_shape_C((TOKENS_PER_TILE, self.heads))
        acc = tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        raw = cute.make_rmem_tensor((16, 2), Float8E4M3FN)
        tile = (smem, acc, raw, scale_log2, scaled)
        t, end = done, done + count
        if const_expr(self.groups > 1):
            t += (done + warp_idx // WARPS) % self.groups
        asked = Int32(0)
        while t < end:
            # What is rare stands behind the loop over usual tiles, which then has its instructions in a row: a jump
            # over others waits some 40 clocks for what comes behind them, and there were eight.
            apart, stop = Int32(0), end
            if asked == 0:
                stop = cutlass.max(end - AHEAD, done)
            while apart == 0 and t < stop:
                apart = self.score_tile(*tile, t, tid)
                if apart == 0:
                    t += self.groups
            if apart != 0:
                self.multiply_apart(smem, acc[0], raw, t, tid)
                acc[1].fill(0.0)
                self.hand_over(smem, acc, scale_log2, t, tid)
                t += self.groups
            elif asked == 0:
                asked = Int32(1)
                if has_next and warp_idx == 0:
                    prefetch_q(load_q, tQ, self.scheduler.locate(next_item, table), self.heads)
        if has_next:
            # nobody needs this Q any more
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
            if warp_idx == 0:
                start_q(smem, load_q, tQ, self.scheduler.locate(next_item, table), self.heads)

    @cute.jit
    def score_tile(
        self,
        smem,
        acc: tuple,
        raw: cute.Tensor,
        scale_log2: Float32,
        scaled: Int32,
        t: Int32,
        tid: Int32,
    ):
        """Makes S^T of a tile, and hands it over unless it is to be made apart.

        Returns 1 if scales are not usual, or Q has powers, and S is to be made by `multiply_apart`.

        Two accumulators take quantization tiles in turn, so one is multiplied while products go into the other one.
        What it holds is relative to the scale of its quantization tile, s_j (.. + q_j code_j), and so is multiplied by
        the ratio of two scales before the next but one. The rope part comes last, so the first products wait for
        nothing but codes.
        """
        self.stamp(smem, t, 0, 0, tid)
        stage, phase = turn(t, self.stages)
        cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, phase)
        self.stamp(smem, t, 0, 1, tid, True)
        mma = column_mmas(self.heads)[0]
        rQ = self.operands_of_q(smem, mma, tid, Float16)
        codes = [mma.make_fragment_A(mma.partition_shape_A((TOKENS_PER_TILE, BLOCK_COLUMNS))) for _ in range(2)]
        self.load_codes(smem, raw, stage, 0, tid)
        factors = ()
        for c in cutlass.range_constexpr(CHUNKS):
            group = c // 2
            if const_expr(c % 2 == 0 and group > 1):
                self.rescale(acc[group % 2], factors)
            if const_expr(c > 1):
                warpgroup.wait_group(1)  # products of the chunk before the last have read what is made here
            self.widen(raw, codes[c % 2])
            if const_expr(c + 1 < CHUNKS):
                self.load_codes(smem, raw, stage, c + 1, tid)
            warpgroup.fence()
            blocks = [(k, 4 * c + k) for k in range(BLOCK_COLUMNS // 16)]
            wgmma.issue(mma, acc[group % 2], codes[c % 2], rQ, c % 2 == 1 or group > 1, blocks)
            warpgroup.commit_group()
            if const_expr(c % 2 == 1 and group > 0):
                factors = self.ratios(smem, stage, group - 1, tid)
        self.rescale(acc[0], factors)
        warpgroup.wait_group(0)
        rope = self.operand_of_rope()
        self.load_rope(smem, rope, t, tid)
        self.rope_product(smem, acc[0], rope, True, tid)
        # beside it
        factors = self.ratios(smem, stage, QUANT_TILES - 1, tid)
        self.rescale(acc[1], tuple(factor * scale_log2 for factor in factors))
        apart = Int32(0)
        if scaled != 0 or not self.usual_scales(smem, stage, tid):
            apart = Int32(1)
        of_scores, phase = turn(t, self.groups)  # the softmax has read S of the tile that was there before
        cute.arch.mbarrier_wait(smem.s_empty.data_ptr() + of_scores, phase ^ 1)
        warpgroup.wait_group(0)
        self.stamp(smem, t, 1, 1, tid, True)
        if apart == 0:
            self.hand_over(smem, acc, scale_log2, t, tid)
        return apart

    def operands_of_q(self, smem, mma: cute.TiledMma, tid: Int32, dtype) -> cute.Tensor:
        """Q as the second operand: (.., block of 16 columns)."""
        layout_q = column_layouts(self.heads)[0]
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner, dtype=dtype)
        return mma.make_fragment_B(mma.get_slice(tid).partition_B(sQ))[None, None, None, 0]

    @cute.jit
    def rope_product(self, smem, acc: cute.Tensor, rope: cute.Tensor, accumulate: cutlass.Constexpr, tid: Int32):
        """Starts S^T of the rope part of a tile."""
        mma = column_mmas(self.heads)[1]
        rQ = self.operands_of_q(smem, mma, tid, BFloat16)
        warpgroup.fence()
        wgmma.issue(mma, acc, rope, rQ, accumulate, [(k, NOPE // 16 + k) for k in range(ROPE // 16)])
        warpgroup.commit_group()

    @cute.jit
    def ratios(self, smem, stage: Int32, group: cutlass.Constexpr, tid: Int32):
        """The scale of a quantization tile over that of the next but one, or 1, of a thread's two rows."""
        sScale = scales_of(smem, self.heads)
        factors = []
        for r in cutlass.range_constexpr(2):
            token = stage * TOKENS_PER_TILE + key(tid, r)
            factor = sScale[group, token]
            if const_expr(group + 2 < QUANT_TILES):
                factor = factor * cute.arch.rcp_approx(sScale[group + 2, token])
            factors.append(factor)
        return tuple(factors)

    @cute.jit
    def rescale(self, acc: cute.Tensor, factors: tuple):
        """What an accumulator holds, of each of two rows times a factor."""
        s = wgmma.by_row(acc)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.columns):
                s[r, c] *= factors[r]

    @cute.jit
    def usual_scales(self, smem, stage: Int32, tid: Int32):
        """Whether the ratios of all scales of a tile are far from the ends of float32; the same in all threads."""
        lane, four = tid % 32, cute.make_rmem_tensor((QUANT_TILES, 2), Float32)
        for i in cutlass.range_constexpr(2):
            self.load_four(smem, four[None, i], stage, lane + 32 * i)
        least, most = four[0], four[0]
        for i in cutlass.range_constexpr(1, 2 * QUANT_TILES):
            least, most = cute.arch.fmin(least, four[i]), cute.arch.fmax(most, four[i])
        return cute.arch.vote_all_sync(least >= 1.0 / USUAL and most <= USUAL)

    @cute.jit
    def multiply_apart(self, smem, acc: cute.Tensor, raw: cute.Tensor, t: Int32, tid: Int32):
        """S^T of a tile, each chunk times its scale and the power of Q in float32: rare, so one after the other."""
        stage, mma = t % self.stages, column_mmas(self.heads)[0]
        rQ = self.operands_of_q(smem, mma, tid, Float16)
        result = cute.make_rmem_tensor_like(acc)
        total, of_chunk = wgmma.by_row(result), wgmma.by_row(acc)
        codes = mma.make_fragment_A(mma.partition_shape_A((TOKENS_PER_TILE, BLOCK_COLUMNS)))
        power = cute.make_rmem_tensor(self.columns, Float32)
        sPower = smem.q_power.get_tensor(cute.make_layout(QUANT_TILES * self.heads))
        sScale = scales_of(smem, self.heads)
        rope = self.operand_of_rope()
        self.load_rope(smem, rope, t, tid)
        self.rope_product(smem, acc, rope, False, tid)
        warpgroup.wait_group(0)
        result.store(acc.load())
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
            group = c // 2
            pairs_of(sPower, tid, group * self.heads, power)
            for r in cutlass.range_constexpr(2):
                factor = sScale[group, stage * TOKENS_PER_TILE + key(tid, r)]
                for i in cutlass.range_constexpr(self.columns):
                    total[r, i] += of_chunk[r, i] * power[i] * factor
        acc.store(result.load())

    def line(self, tid: Int32) -> Int32:
        """Where a thread's first 16 bytes of its first row are, in codes of the even chunks and in rope parts."""
        return line_of(key(tid, 0), chunk_of_codes(tid % 4, 0))

    @cute.jit
    def load_codes(self, smem, raw: cute.Tensor, stage: Int32, c, tid: Int32):
        """16 codes of each of a thread's two rows, in chunk c of 64 columns."""
        line, start = self.line(tid), stage * (TOKENS_PER_TILE * NOPE) + c // 2 * (TOKENS_PER_TILE * LINE)
        for r in cutlass.range_constexpr(2):
            of_row = (line ^ (32 * (c % 2)) ^ (16 * r)) + LINE * r
            pointer = smem.codes.data_ptr() + cute.assume(start + of_row, divby=16)
            source = cute.make_tensor(cute.recast_ptr(pointer, dtype=Float8E4M3FN), cute.make_layout(16))
            cute.autovec_copy(source, raw[None, r])

    def operand_of_rope(self) -> cute.Tensor:
        """Registers of the rope part of a thread's two rows."""
        mma = column_mmas(self.heads)[1]
        return mma.make_fragment_A(mma.partition_shape_A((TOKENS_PER_TILE, ROPE)))

    @cute.jit
    def load_rope(self, smem, rope: cute.Tensor, t: Int32, tid: Int32):
        """A quarter of the rope part of each of a thread's two rows, eight numbers of either half of it.

        In registers, for rows lie as keys do, and the tensor core would take them in another order.
        """
        words, four = cute.recast_tensor(rope, Int32), cute.make_rmem_tensor(4, Int32)
        line, start = self.line(tid), turn(t, self.ropes)[0] * (TOKENS_PER_TILE * LINE)
        for r in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                of_row = (line ^ (32 * half) ^ (16 * r)) + LINE * r
                pointer = cute.recast_ptr(smem.rope.data_ptr() + cute.assume(start + of_row, divby=16), dtype=Int32)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), four)
                for i in cutlass.range_constexpr(4):
                    words[8 * half + 4 * (i // 2) + 2 * (i % 2) + r] = four[i]

    @cute.jit
    def widen(self, raw: cute.Tensor, operand: cute.Tensor):
        """Four blocks of 16 columns of A, from 16 codes of each of two rows."""
        words = cute.recast_tensor(operand, Int32)
        for r in cutlass.range_constexpr(2):
            wide = cute.make_rmem_tensor(16, Float16)
            wide.store(raw[None, r].load().to(Float16))
            pairs = cute.recast_tensor(wide, Int32)
            for k in cutlass.range_constexpr(4):
                words[4 * k + r], words[4 * k + 2 + r] = pairs[2 * k], pairs[2 * k + 1]

    @cute.jit
    def load_four(self, smem, scale: cute.Tensor, stage: Int32, row: Int32):
        """The scales of a row."""
        pointer = smem.scale.data_ptr() + cute.assume((stage * TOKENS_PER_TILE + row) * QUANT_TILES, divby=QUANT_TILES)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(QUANT_TILES)), scale)

    @cute.jit
    def hand_over(self, smem, acc: tuple, scale_log2: Float32, t: Int32, tid: Int32):
        """S^T times `scale_log2` for the softmax, which has read what was there; the second accumulator has it."""
        s, rest, q = wgmma.by_row(acc[0]), wgmma.by_row(acc[1]), tid % 4
        of_scores, _ = turn(t, self.groups)  # its place
        start = smem.s.data_ptr() + of_scores * (TOKENS_PER_TILE * self.heads)
        four = cute.make_rmem_tensor((2, 2), Float32)
        for block in cutlass.range_constexpr(self.heads // 8):
            for e in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    four[r, e] = s[r, 2 * block + e] * scale_log2 + rest[r, 2 * block + e]
            pointer = start + cute.assume(scores_of(8 * block + 2 * q, key(tid, 0) // 2), divby=4)
            cute.autovec_copy(four, cute.make_tensor(pointer, cute.make_layout((2, 2))))
        cute.arch.mbarrier_arrive(smem.s_full.data_ptr() + of_scores)
        if const_expr(self.offers):
            cute.arch.mbarrier_arrive(smem.rope_empty.data_ptr() + turn(t, self.ropes)[0])
        self.stamp(smem, t, 2, 1, tid)

    @cute.jit
    def stamp(
        self,
        smem,
        t: Int32,
        event: cutlass.Constexpr,
        edge: cutlass.Constexpr,
        tid: Int32,
        goes_on: cutlass.Constexpr = False,
    ):
        """A timestamp of a tile."""
        self.tracer.stamp(smem.trace.ptr, 1, len(EVENTS[1]) * t + event, edge, tid == 0, goes_on)
