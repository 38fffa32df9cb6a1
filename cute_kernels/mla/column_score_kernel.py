"""The warpgroup of the MLA decode kernel that scores keys where heads are columns: Q, QK and the softmax of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import operands, softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.column_tile_kernel import (
    MAX_GROWTH,
    P_SHIFT,
    WARPS,
    column,
    column_layouts,
    column_mmas,
    pairs_of,
    stages,
    swizzle,
)
from cute_kernels.mla.producer_kernel import COLUMNS, GROUP, GROUPS, NOPE, ROPE
from cute_kernels.mla.score_kernel import EXPONENTS, LARGEST, SMALLEST, max_magnitudes
from cute_kernels.mla.spec import COLUMN_WEIGHT, EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec
from cute_kernels.mla.tile_kernel import BAR_OWNER, place_of_weight, prefetch_q, start_q

PIECES = NOPE // 32  # of 32 columns, which are multiplied while the next ones are made
OPERANDS = 3  # pieces in registers: one is multiplied while one is made, and the one before is waited for
AHEAD = 6  # tiles before the end of an item, when all CTAs at once want 73 KB of Q each, that L2 is asked for them
CHUNKS = NOPE // COLUMNS  # of 64 columns, whose codes a thread has 16 of in a row
SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-5, 2.0**7  # any code times a weight in between is a normal float16 number


class ColumnScores:
    """Device code for 128 threads: S^T = K Q^T and P^T of all tiles, a row for a key and a column for a head.

        S = q_rope k_rope + sum_j scale_j (q_j code_j)      scales in float32, products of float16 numbers

    K is made in registers: a thread reads 16 codes of a row at once, and as the order of columns in a product is free,
    they are its part of four blocks of 16 columns; Q is put into that order as it becomes float16. Codes are exact as
    float16, and so is Q: numbers 2^-16 below the largest of the 128 that meet a scale lose bits, and are too small
    there to matter. Where the largest itself is out of float16's reach, powers of two bring them all into it.

    Scores are relative to the base of their head, 2^7 below the largest score that was met when it was set; the base
    moves only when a score exceeds it by MAX_GROWTH more, because a maximum over rows has to cross warps.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.heads, self.split = spec.heads, spec.split
        self.columns = spec.heads // 4  # of a thread
        self.stages = stages(spec.heads)
        self.tracer = Tracer(spec.trace, len(ROLES))

    # ---- Q

    @cute.jit
    def prepare(
        self,
        smem,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        mSink: cute.Tensor,
        work: tuple,
        loads: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Makes Q float16 but for its rope part, in place; `loads` loads of Q came before. Nothing is scored yet.

        Returns (whether S is to be multiplied by powers of Q, the new number of loads).
        """
        sSink = smem.sink.get_tensor(cute.make_layout(self.heads))
        head = work[0] * self.heads + tid
        sink = mSink[cutlass.min(head, mSink.shape[0] - 1)] * softmax.LOG2_E
        cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
        loads += 1
        fits = Int32(1)
        for item in cutlass.range(tid, self.heads * GROUPS, 128, unroll=1):
            if self.convert(smem, item) == 0:
                fits = Int32(0)
        scaled = Int32(0)
        if wgmma.every_thread(fits, Int32(BAR_OWNER)) == 0:
            scaled = Int32(1)
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, and then those of a copy
            cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)
            if warp_idx == 0:
                start_q(smem, load_q, tQ, work, self.heads)
            cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
            loads += 1
            sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((self.heads, GROUPS)))
            for item in cutlass.range(tid, self.heads * GROUPS, 128, unroll=1):
                exponent = cutlass.min(cutlass.max(self.exponent(smem, item), -EXPONENTS), EXPONENTS)
                self.multiply_row(smem, item, softmax.power_of_two(-exponent))
                self.convert(smem, item)
                sPower[item % self.heads, item // self.heads] = softmax.power_of_two(exponent)
        sBase = smem.head_base.get_tensor(cute.make_layout(self.heads))
        sUnset = smem.unset.get_tensor(cute.make_layout(self.heads))
        if tid < self.heads:
            sBase[tid] = Float32(0.0)
            sUnset[tid] = Int32(1)
            sSink[tid] = sink
            self.order_rope(smem, tid)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)
        return scaled, loads

    def chunk_of_q(self, smem, item: Int32, half, c):
        """Eight numbers of a row of Q, in half of one of its groups: chunk c of 64 columns."""
        row, group = item % self.heads, item // self.heads
        start = (2 * group + half) * (self.heads * COLUMNS) + row * COLUMNS + (c ^ (row % 8)) * 8
        return cute.make_tensor(smem.q.data_ptr() + cute.assume(start, divby=8), cute.make_layout(8))

    @cute.jit
    def convert(self, smem, item: Int32) -> Int32:
        """128 numbers of a row as float16 and in the order of codes; whether float16 holds them.

        Of block i of 16 columns, pairs 2 q and 2 q + 1 of lane q's 16 codes, 4 i and on, are words q and q + 4.
        """
        old, new = cute.make_rmem_tensor((8, 8), BFloat16), cute.make_rmem_tensor((8, 8), Float16)
        for c in cutlass.range_constexpr(8):
            cute.autovec_copy(self.chunk_of_q(smem, item, 0, c), old[None, c])
        fits = Int32(1)
        for half in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(8):
                new[None, c].store(old[None, c].load().to(Float32).to(Float16))
            old_words, words = cute.recast_tensor(old, Int32), cute.recast_tensor(new, Int32)
            largest, seen = words[0, 0] & 0x7FFF7FFF, Int32(0)
            for c in cutlass.range_constexpr(8):
                for q in cutlass.range_constexpr(4):
                    largest = max_magnitudes(largest, words[q, c])
                    seen |= old_words[q, c]
            if const_expr(half == 0):  # beside the stores
                for c in cutlass.range_constexpr(8):
                    cute.autovec_copy(self.chunk_of_q(smem, item, 1, c), old[None, c])
            four = cute.make_rmem_tensor(4, Int32)
            for c in cutlass.range_constexpr(8):
                for q in cutlass.range_constexpr(4):
                    four[q] = words[2 * (c // 2 % 2) + c % 2, 2 * q + c // 4]
                cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk_of_q(smem, item, half, c))
            pair = cute.make_rmem_tensor(1, Int32)
            pair[0] = largest
            found = cute.recast_tensor(pair, Float16)
            peak = cute.arch.fmax(found[0].to(Float32), found[1].to(Float32))
            if seen & 0x7FFF7FFF != 0 and (peak < SMALLEST or peak > LARGEST):
                fits = Int32(0)
        return fits

    @cute.jit
    def order_rope(self, smem, row: Int32):
        """The rope part of a row of Q in the order in which a thread has that of a key: eight numbers, two blocks."""
        old = cute.make_rmem_tensor((8, 8), BFloat16)
        for c in cutlass.range_constexpr(8):
            cute.autovec_copy(self.chunk_of_q(smem, row + GROUPS * self.heads, Int32(0), c), old[None, c])
        old_words, four = cute.recast_tensor(old, Int32), cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(8):
            for q in cutlass.range_constexpr(4):
                four[q] = old_words[2 * (c // 2 % 2) + c % 2, 4 * (c // 4) + q]
            target = self.chunk_of_q(smem, row + GROUPS * self.heads, Int32(0), c)
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), target)

    @cute.jit
    def multiply_row(self, smem, item: Int32, power: Float32):
        """128 numbers of a row times a power of two, which bf16 holds."""
        eight = cute.make_rmem_tensor(8, BFloat16)
        for chunk in cutlass.range(16, unroll=1):
            target = self.chunk_of_q(smem, item, chunk // 8, chunk % 8)
            cute.autovec_copy(target, eight)
            eight.store((eight.load().to(Float32) * power).to(BFloat16))
            cute.autovec_copy(eight, target)

    @cute.jit
    def exponent(self, smem, item: Int32) -> Int32:
        """floor(log2) of the largest of 128 numbers of Q."""
        peak, eight = Float32(0.0), cute.make_rmem_tensor(8, BFloat16)
        for chunk in cutlass.range(16, unroll=1):
            cute.autovec_copy(self.chunk_of_q(smem, item, chunk // 8, chunk % 8), eight)
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
        next_work: tuple,
        scaled: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Scores the `count` tiles of an item of work, the first of which is tile `done`; Q has come.

        As soon as nobody needs its Q any more, the load of the next item's is started.
        """
        nothing = cute.make_rmem_tensor(self.columns, Float32)
        nothing.fill(0.0)
        self.own_sums(smem, tid).store(nothing.load().reshape(self.own_sums(smem, tid).shape))
        if count == 0 and has_next and warp_idx == 0:
            start_q(smem, load_q, tQ, next_work, self.heads)
        fresh = Int32(1)
        for t in cutlass.range(done, done + count, unroll=1):
            last = t == done + count - 1
            stage, buffer = t % self.stages, t % 2
            if has_next and warp_idx == 0 and t == done + cutlass.max(count - AHEAD, 0):
                prefetch_q(load_q, tQ, next_work, self.heads)
            self.stamp(smem, t, 0, 0, tid)
            cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, t // self.stages % 2)
            self.stamp(smem, t, 0, 1, tid)
            self.stamp(smem, t, 1, 0, tid)
            state = (cute.make_rmem_tensor(self.columns, Float32), cute.make_rmem_tensor(2, Float32))
            acc_s = self.multiply(smem, state, stage, buffer, (t // 2 + 1) % 2, scaled, tid)
            self.stamp(smem, t, 1, 1, tid)
            if last and has_next:
                cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)  # nobody needs this Q any more
                if warp_idx == 0:
                    start_q(smem, load_q, tQ, next_work, self.heads)
            self.stamp(smem, t, 2, 0, tid)
            fresh = self.softmax(smem, acc_s, state, scale_log2, buffer, fresh, last, tid)
            if last:
                self.finish(smem, buffer, tid)
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores of P, read by wgmma
            cute.arch.mbarrier_arrive(smem.p_full.data_ptr() + buffer)
            self.stamp(smem, t, 2, 1, tid)

    @cute.jit
    def multiply(self, smem, state: tuple, stage: Int32, buffer: Int32, phase: Int32, scaled: Int32, tid: Int32):
        """S^T of a tile, complete; loads what `softmax` needs into `state` before it waits."""
        mma, mma_rope = column_mmas(self.heads)
        layout_q = column_layouts(self.heads)[0]
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sQ_codes = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner, dtype=Float16)
        rQ = mma.make_fragment_B(mma.get_slice(tid).partition_B(sQ_codes))[None, None, None, 0]
        rQ_rope = mma_rope.make_fragment_B(mma_rope.get_slice(tid).partition_B(sQ))[None, None, None, 0]
        shape = mma.partition_shape_C((TOKENS_PER_TILE, self.heads))
        acc_s, acc = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        of_piece = mma.partition_shape_A((TOKENS_PER_TILE, 32))
        rope = [mma_rope.make_fragment_A(of_piece) for _ in range(2)]
        for half in cutlass.range_constexpr(2):
            self.load_rope(smem, rope[half], stage, half, tid)
        scale = cute.make_rmem_tensor(2, Float32)
        raw = [cute.make_rmem_tensor((16, 2), Float8E4M3FN) for _ in range(2)]
        for c in cutlass.range_constexpr(2):  # loads take some 100 clocks beside all that goes on
            self.load_codes(smem, raw[c], stage, c, tid)
        warpgroup.fence()
        for half in cutlass.range_constexpr(2):
            k_blocks = [(k, NOPE // 16 + 2 * half + k) for k in range(2)]
            wgmma.issue(mma_rope, acc_s, rope[half], rQ_rope, half > 0, k_blocks)
        warpgroup.commit_group()
        if scaled == 0:
            codes = [mma.make_fragment_A(of_piece) for _ in range(OPERANDS)]
            self.widen(raw[0], codes[0], 0)
            for i in cutlass.range_constexpr(PIECES):
                group, begins = i // (PIECES // GROUPS), i % (PIECES // GROUPS) == 0
                if const_expr(begins and group > 0):
                    warpgroup.wait_group(0)
                    self.add_group(acc_s, acc, scale)
                warpgroup.fence()
                wgmma.issue(mma, acc, codes[i % OPERANDS], rQ, not begins, [(k, 2 * i + k) for k in range(2)])
                warpgroup.commit_group()
                if const_expr(begins):
                    self.load_scales(smem, scale, stage, group, tid)
                if const_expr(i + 1 < PIECES):
                    c = (i + 1) // 2
                    self.widen(raw[c % 2], codes[(i + 1) % OPERANDS], (i + 1) % 2)
                    if const_expr(i % 2 == 0 and c + 2 < CHUNKS):
                        self.load_codes(smem, raw[c % 2], stage, c + 2, tid)
                    warpgroup.wait_group(OPERANDS - 2)
            self.prefetch(smem, state, stage, buffer, phase, tid)
            warpgroup.wait_group(0)
            self.add_group(acc_s, acc, scale)
        else:
            self.multiply_by_powers(smem, mma, acc_s, acc, rQ, raw[0], scale, stage, tid)
            self.prefetch(smem, state, stage, buffer, phase, tid)
        return acc_s

    @cute.jit
    def prefetch(self, smem, state: tuple, stage: Int32, buffer: Int32, phase: Int32, tid: Int32):
        """Hands scales on as weights, and loads bases of a thread's columns and masks of its rows."""
        base, bias = state
        pairs_of(smem.head_base.get_tensor(cute.make_layout(self.heads)), tid, 0, base)
        sMask = smem.mask.get_tensor(cute.make_layout((TOKENS_PER_TILE, self.stages)))
        for r in cutlass.range_constexpr(2):
            bias[r] = sMask[wgmma.row(tid, r), stage]
        cute.arch.mbarrier_wait(smem.p_empty.data_ptr() + buffer, phase)
        self.store_weights(smem, stage, buffer, tid)

    @cute.jit
    def multiply_by_powers(
        self, smem, mma, acc_s: cute.Tensor, acc, rQ: cute.Tensor, raw: cute.Tensor, scale, stage: Int32, tid: Int32
    ):
        """What `multiply` does behind the rope part, for a Q with powers of two: rare, so a chunk at a time."""
        s, of_chunk = wgmma.by_row(acc_s), wgmma.by_row(acc)
        codes = mma.make_fragment_A(mma.partition_shape_A((TOKENS_PER_TILE, 32)))
        power = cute.make_rmem_tensor(self.columns, Float32)
        sPower = smem.q_power.get_tensor(cute.make_layout(GROUPS * self.heads))
        warpgroup.wait_group(0)
        for i in cutlass.range(PIECES // 2, unroll=1):
            self.load_codes(smem, raw, stage, i, tid)
            for half in cutlass.range_constexpr(2):
                self.widen(raw, codes, half)
                warpgroup.fence()
                blocks = rQ[None, None, 4 * i + 2 * half], rQ[None, None, 4 * i + 2 * half + 1]
                for k in cutlass.range_constexpr(2):
                    block = cute.make_tensor(blocks[k].iterator, cute.append(blocks[k].layout, cute.make_layout(1), 3))
                    wgmma.issue(mma, acc, codes, block, half + k > 0, [(k, 0)])
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            group = i // 2
            pairs_of(sPower, tid, group * self.heads, power)
            self.load_scales(smem, scale, stage, group, tid)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.columns):
                    s[r, c] += of_chunk[r, c] * power[c] * scale[r]

    @cute.jit
    def load_rope(self, smem, operand: cute.Tensor, stage: Int32, half: cutlass.Constexpr, tid: Int32):
        """Two blocks of 16 columns of A, from eight numbers of the rope part of each of two rows."""
        row, words = wgmma.row(tid, 0), cute.recast_tensor(operand, Int32)
        at = (stage * TOKENS_PER_TILE + row) * ROPE + (((4 * half + tid % 4) ^ swizzle(row)) << 3)
        four = cute.make_rmem_tensor(4, Int32)
        for r in cutlass.range_constexpr(2):
            pointer = smem.rope.data_ptr() + cute.assume(at + 8 * ROPE * r, divby=8)
            cute.autovec_copy(cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(4)), four)
            for k in cutlass.range_constexpr(2):
                words[4 * k + r], words[4 * k + 2 + r] = four[2 * k], four[2 * k + 1]

    @cute.jit
    def load_codes(self, smem, raw: cute.Tensor, stage: Int32, c, tid: Int32):
        """16 codes of each of a thread's two rows, in chunk c of 64 columns."""
        row, q = wgmma.row(tid, 0), tid % 4
        at = (stage * TOKENS_PER_TILE + row) * NOPE + GROUP * (c // 2) + (((4 * (c % 2) + q) ^ swizzle(row)) << 4)
        for r in cutlass.range_constexpr(2):
            pointer = smem.codes.data_ptr() + cute.assume(at + 8 * NOPE * r, divby=16)
            source = cute.make_tensor(cute.recast_ptr(pointer, dtype=Float8E4M3FN), cute.make_layout(16))
            cute.autovec_copy(source, raw[None, r])

    @cute.jit
    def widen(self, raw: cute.Tensor, operand: cute.Tensor, half: cutlass.Constexpr):
        """Two blocks of 16 columns of A, from eight of the 16 codes of each of two rows."""
        words, eight = cute.recast_tensor(operand, Int32), cute.make_rmem_tensor(8, Float16)
        for r in cutlass.range_constexpr(2):
            codes = cute.make_tensor(raw[None, r].iterator + 8 * half, cute.make_layout(8))
            eight.store(codes.load().to(Float16))
            pairs = cute.recast_tensor(eight, Int32)
            for k in cutlass.range_constexpr(2):
                words[4 * k + r], words[4 * k + 2 + r] = pairs[2 * k], pairs[2 * k + 1]

    @cute.jit
    def load_scales(self, smem, scale: cute.Tensor, stage: Int32, group, tid: Int32):
        """A scale of each of a thread's two rows."""
        sScale = smem.scale.get_tensor(cute.make_layout((GROUPS, TOKENS_PER_TILE * self.stages)))
        for r in cutlass.range_constexpr(2):
            scale[r] = sScale[group, stage * TOKENS_PER_TILE + wgmma.row(tid, r)]

    @cute.jit
    def add_group(self, acc_s: cute.Tensor, acc: cute.Tensor, scale: cute.Tensor):
        """S += scale (Q codes) of a group; the rope part is there before."""
        s, of_group = wgmma.by_row(acc_s), wgmma.by_row(acc)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.columns):
                s[r, c] += of_group[r, c] * scale[r]

    @cute.jit
    def store_weights(self, smem, stage: Int32, buffer: Int32, tid: Int32):
        """Scales x COLUMN_WEIGHT as float16, of two keys in one group; -1 where a code times that is out of reach."""
        group, scale = tid % 4, cute.make_rmem_tensor(2, Float32)
        sWeight = smem.weight.get_tensor(cute.make_layout((TOKENS_PER_TILE, 2 * GROUPS)))
        self.load_scales(smem, scale, stage, group, tid)
        for r in cutlass.range_constexpr(2):
            token = wgmma.row(tid, r)
            weight = scale[r] * COLUMN_WEIGHT
            inside = weight == 0.0 or (weight >= SMALLEST_WEIGHT and weight < LARGEST_WEIGHT)
            weight = Float32(cutlass.select_(inside, weight, Float32(-1.0)))
            sWeight[place_of_weight(token), buffer * GROUPS + group] = weight.to(Float16)

    # ---- softmax

    def own_sums(self, smem, tid: Int32) -> cute.Tensor:
        """A thread's part of the sums of its columns, in shared memory of its own: registers are few beside K."""
        width = min(4, self.columns)
        layout = cute.make_layout((width, self.columns // width), stride=(1, 128 * width))
        return cute.make_tensor(smem.sums.data_ptr() + cute.assume(width * tid, divby=width), layout)

    @cute.jit
    def softmax(
        self, smem, acc_s: cute.Tensor, state: tuple, scale_log2: Float32, buffer: Int32, fresh: Int32, last, tid: Int32
    ) -> Int32:
        """P^T of a tile; with the last one also the sums of the item.

        `fresh` as long as no key has been met, and so bases are to be set; returns whether it stays so.
        """
        s = wgmma.by_row(acc_s)
        base, bias = state
        total = cute.make_rmem_tensor(self.columns, Float32)
        own_sums = self.own_sums(smem, tid)
        as_stored = cute.make_tensor(total.iterator, cute.make_layout(own_sums.shape))
        for c in cutlass.range_constexpr(self.columns):
            for r in cutlass.range_constexpr(2):
                s[r, c] = s[r, c] * scale_log2 - base[c]
        if cute.arch.vote_any_sync(bias[0] != 0.0 or bias[1] != 0.0):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.columns):
                    s[r, c] += bias[r]
        excess = [cute.arch.fmax(s[0, c], s[1, c]) for c in range(self.columns)]
        while const_expr(len(excess) > 1):
            excess = [cute.arch.fmax(excess[i], excess[i + len(excess) // 2]) for i in range(len(excess) // 2)]
        grown = fresh
        if excess[0] > P_SHIFT + MAX_GROWTH:
            grown = Int32(1)
        cute.autovec_copy(own_sums, as_stored)
        raised = wgmma.any_thread(grown, Int32(BAR_OWNER))
        if raised == 1:
            fresh = self.raise_bases(smem, s, base, total, buffer, tid)
        sRaised = smem.raised.get_tensor(cute.make_layout(2))
        if tid == 0:
            sRaised[buffer] = raised
        for c in cutlass.range_constexpr(self.columns):
            for r in cutlass.range_constexpr(2):
                s[r, c] = cute.math.exp2(s[r, c], fastmath=True)
            total[c] += s[0, c] + s[1, c]
        cute.autovec_copy(as_stored, own_sums)
        if last:
            sSums = smem.column_max.get_tensor(cute.make_layout((self.heads, WARPS)))
            for c in cutlass.range_constexpr(self.columns):
                for step in cutlass.range_constexpr(3):
                    total[c] += cute.arch.shuffle_sync_bfly(total[c], 4 << step)
                if tid % 32 < 4:
                    sSums[column(tid, c), tid // 32] = total[c]
        self.store_probabilities(smem, s, buffer, tid)
        return fresh

    @cute.jit
    def finish(self, smem, buffer: Int32, tid: Int32):
        """Of each head the log-sum-exp, and 1 / (its sum with the sink), 0 without keys."""
        sSums = smem.column_max.get_tensor(cute.make_layout((self.heads, WARPS)))
        sBase = smem.head_base.get_tensor(cute.make_layout(self.heads))
        sSink = smem.sink.get_tensor(cute.make_layout(self.heads))
        sShare = smem.share.get_tensor(cute.make_layout((self.heads, 2)))
        sLse = smem.lse.get_tensor(cute.make_layout((self.heads, 2)))
        cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)  # sums are there
        if tid < self.heads:
            base, total = sBase[tid], sSums[tid, 0]
            for w in cutlass.range_constexpr(1, WARPS):
                total += sSums[tid, w]
            denominator = total
            if const_expr(not self.split):
                denominator += cute.math.exp2(sSink[tid] - base, fastmath=True)
            sShare[tid, buffer] = Float32(cutlass.select_(total == 0.0, Float32(0.0), 1.0 / denominator))
            sLse[tid, buffer] = softmax.log_sum_exp(base, total)

    @cute.jit
    def raise_bases(self, smem, s: cute.Tensor, base: cute.Tensor, total: cute.Tensor, buffer: Int32, tid: Int32):
        """Sets bases 2^P_SHIFT below the largest scores, if these are above them, and makes scores and sums relative.

        Returns whether no key has been met yet.
        """
        sMax = smem.column_max.get_tensor(cute.make_layout((self.heads, WARPS)))
        sBase = smem.head_base.get_tensor(cute.make_layout(self.heads))
        sUnset = smem.unset.get_tensor(cute.make_layout(self.heads))
        sRescaling = smem.rescaling.get_tensor(cute.make_layout((self.heads, 2)))
        for c in cutlass.range_constexpr(self.columns):
            largest = cute.arch.fmax(s[0, c], s[1, c])
            for step in cutlass.range_constexpr(3):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 4 << step))
            if tid % 32 < 4:
                sMax[column(tid, c), tid // 32] = largest
        cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)
        if tid < self.heads:
            largest = sMax[tid, 0]
            for w in cutlass.range_constexpr(1, WARPS):
                largest = cute.arch.fmax(largest, sMax[tid, w])
            step = cute.arch.fmax(largest - P_SHIFT, Float32(0.0))
            rescaling = cute.math.exp2(-step, fastmath=True)
            if sUnset[tid] != 0:
                rescaling = Float32(1.0)  # of nothing
                if largest != -Float32.inf:
                    step = largest - P_SHIFT
                    sUnset[tid] = Int32(0)
            sRescaling[tid, buffer] = rescaling
            sBase[tid] += step
        cute.arch.barrier(barrier_id=BAR_OWNER, number_of_threads=128)
        factor = cute.make_rmem_tensor(self.columns, Float32)
        pairs_of(smem.rescaling.get_tensor(cute.make_layout(2 * self.heads)), tid, buffer * self.heads, factor)
        for c in cutlass.range_constexpr(self.columns):
            total[c] *= factor[c]
        pairs_of(sBase, tid, 0, factor)
        for c in cutlass.range_constexpr(self.columns):
            for r in cutlass.range_constexpr(2):
                s[r, c] += base[c] - factor[c]
            base[c] = factor[c]
        return sUnset[0]

    @cute.jit
    def store_probabilities(self, smem, s: cute.Tensor, buffer: Int32, tid: Int32):
        """P^T as rows of heads, float16.

        A matrix of 8 keys x 8 heads is stored transposed: the lane that gives the address of its k-th row gives that of
        head k.
        """
        lane, warp_idx = tid % 32, tid // 32
        blocks = self.heads // 8
        at_once = min(2 * blocks, 4)  # matrices of a store: keys 0..7 and 8..15 of a warp, for one or two times 8 heads
        matrix = lane // 8 % at_once
        head, chunk = 8 * (matrix // 2) + lane % 8, 2 * warp_idx + matrix % 2
        start = Int32(smem.p.data_ptr().toint()) + buffer * (self.heads * 128)
        start += head * 128 + ((chunk ^ (lane % 8)) << 4)
        pair = cute.make_rmem_tensor(2, Float16)
        word = cute.recast_tensor(pair, Int32)
        wide = cute.make_rmem_tensor(2, Float32)
        words = cute.make_rmem_tensor(at_once, Int32)
        for first in cutlass.range_constexpr(0, 2 * blocks, at_once):
            for i in cutlass.range_constexpr(at_once):
                block, r = (first + i) // 2, (first + i) % 2
                for e in cutlass.range_constexpr(2):
                    wide[e] = s[r, 2 * block + e]
                pair.store(wide.load().to(Float16))
                words[i] = word[0]
            operands.store_matrices(start + 8 * (first // 2) * 128, [words[i] for i in range(at_once)], True)

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """A timestamp of a tile."""
        self.tracer.stamp(smem.trace.ptr, 1, len(EVENTS[1]) * t + event, edge, tid == 0)
