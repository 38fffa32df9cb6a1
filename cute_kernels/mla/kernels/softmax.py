"""The warpgroup of the MLA decode kernel that makes P of S, and may copy rows, where heads are columns."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float16, Float32, Int32, const_expr

from cute_kernels.device import registers, softmax
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.load import RowGatherer
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.smem import (
    BUFFERS,
    MAX_GROWTH,
    P_SHIFT,
    RAISED,
    REACHED,
    WARPS,
    masks,
    place_of_weight,
    rope_stages,
    scales_of,
    scores_of,
    stages,
    turn,
)
from cute_kernels.mla.kernels.tile import QUANT_TILES
from cute_kernels.mla.spec import COLUMN_WEIGHT, EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec

SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-5, 2.0**7  # any code times a weight in between is a normal float16 number

UNSET = -3.0e38  # the base before a key has been met: any score is far above it, and -inf below


class ColumnSoftmax:
    """Device code for 128 threads: P^T = exp2(S^T - base) of all tiles, and but with few heads copies of later rows.

    A thread has a head and 32, 16, 8 or 4 keys of a tile, and the lanes of a head are neighbours, so that no warp waits
    for another. Scores are relative to the base of their head, 2^7 below the largest score that was met when it was
    set; the base moves only when a score exceeds it by MAX_GROWTH more, because O moves with it.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.heads, self.split, self.balanced = spec.heads, spec.split, spec.balanced
        self.keys = spec.heads // 2  # of a thread
        self.parts = TOKENS_PER_TILE // self.keys  # lanes of a head
        self.stages = stages(spec.heads)
        self.ahead = rope_stages(spec.heads)  # tiles, of copies that are made here
        self.gathers, self.offers = not spec.few_heads, spec.offers
        self.score_groups = spec.score_groups
        self.gatherer = RowGatherer(spec)
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, copies: tuple, mSink: cute.Tensor, tid: Int32):
        """All items of this CTA; `table` as for Scheduler.

        Where this warpgroup copies rows as well, those of a tile start when P of one `ahead` of it has left: that their
        stage is free, so that the tile before has been multiplied, is then waited for while P of this one is. Where it
        offers tiles to the values, which start their copies some 2,000 clocks earlier, it does so before S is there,
        and copies what they cannot: tiles with masked keys or from several pages, and the first ones.
        """
        if const_expr(self.gathers):
            cursor = self.gatherer.start(table, tid)
            for _ in cutlass.range(self.ahead, unroll=1):
                cursor = self.gatherer.step(smem, table, copies, cursor, tid)
        done = Int32(0)
        sSink = smem.sink.get_tensor(cute.make_layout(self.heads))
        first_item, items, step = table.share[:3]
        for item in cutlass.range(first_item, items, step, unroll=1):
            work = self.scheduler.locate(item, table)
            length = self.scheduler.length(work, table.mLength)
            _, _, count, whole = self.scheduler.keys(item, work, length, table)
            head = work[0] * self.heads + self.head(tid)
            if tid % 32 < 32 // self.parts:  # for want of a register; who has written it reads it
                sSink[head - work[0] * self.heads] = mSink[cutlass.min(head, mSink.shape[0] - 1)] * softmax.LOG2_E
            base, total = Float32(UNSET), Float32(0.0)
            places = self.places(smem, tid)
            for t in cutlass.range(done, done + count, unroll=1):
                if const_expr(self.offers):
                    last = t + self.stages - 1  # of the tiles that have a stage
                    has_been_offered = Int32(1) if cursor[-1] > last else Int32(0)
                    if has_been_offered == 0:
                        cursor = self.gatherer.step(smem, table, copies, cursor, tid)
                    self.await_room(smem, t)
                    if has_been_offered != 0:  # and all have read what was there: P of tile t - 2 has been multiplied
                        self.gatherer.set_valid(smem, last, tid)
                    cursor = self.gatherer.offer(smem, table, cursor, t, tid)
                else:
                    self.await_room(smem, t)
                base, total = self.tile(smem, base, total, places, t, tid)
                if t == done + count - 1:
                    self.finish(smem, base, total, whole, t % 2, tid)
                cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores of P, read by wgmma
                cute.arch.mbarrier_arrive(smem.p_full.data_ptr() + t % 2)
                self.stamp(smem, t, 1, tid)
                if const_expr(self.gathers and not self.offers):
                    cursor = self.gatherer.step(smem, table, copies, cursor, tid)
            done += count

    def head(self, tid: Int32):
        """Of a thread: neighbouring lanes have neighbouring heads, and the same keys."""
        return tid // 32 * (32 // self.parts) + tid % (32 // self.parts)

    def places(self, smem, tid: Int32) -> tuple:
        """Addresses in shared memory of a thread's first scores, and of its first probabilities, in the first places.

        What is 16 bytes on, of either, differs in one bit of the address: the order of `scores_of`, and the swizzle.
        """
        head, first = self.head(tid), self.keys * (tid % 32 // (32 // self.parts))
        chunk = (first // 8) ^ (head % 8)
        scores, p = smem.s.data_ptr() + scores_of(head, first // 2), smem.p.data_ptr() + head * TOKENS_PER_TILE
        # kept, or ptxas makes them again behind each wait for S, from the number of the thread
        return registers.opaque(Int32(scores.toint())), registers.opaque(Int32((p + chunk * 8 + first % 8).toint()))

    @cute.jit
    def await_room(self, smem, t: Int32):
        """Waits for what a tile needs but for S: each wait takes some 100 clocks."""
        stage, phase = turn(t, self.stages)
        cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, phase)
        buffer, phase = turn(t, BUFFERS)
        cute.arch.mbarrier_wait(smem.p_empty.data_ptr() + buffer, phase ^ 1)

    @cute.jit
    def tile(self, smem, base: Float32, total: Float32, places: tuple, t: Int32, tid: Int32):
        """P^T of a tile, and what goes with it; (base, sum of this thread) after it."""
        (stage, _), (buffer, _) = turn(t, self.stages), turn(t, BUFFERS)
        lane, part, head = tid % 32, tid % 32 // (32 // self.parts), self.head(tid)
        sValid = smem.valid.get_tensor(cute.make_layout(2 * masks(self.heads)))
        of_scores, phase = turn(t, self.score_groups)  # where S is
        pointer = smem.s.data_ptr() + cute.assume(of_scores * (TOKENS_PER_TILE * self.heads), divby=TOKENS_PER_TILE)
        sScores = cute.make_tensor(pointer, cute.make_layout(TOKENS_PER_TILE * self.heads))
        first = self.keys * part
        everything = Int32(-1 if self.keys == 32 else (1 << self.keys) - 1)
        valid = (sValid[2 * (t % masks(self.heads)) + first // 32] >> (first % 32)) & everything
        sState = smem.state.get_tensor(cute.make_layout((WARPS, 2)))
        state = self.store_weights(smem, stage, buffer, tid)  # needs no S
        if lane == 0:
            sState[tid // 32, buffer] = state
        cute.arch.mbarrier_wait(smem.s_full.data_ptr() + of_scores, phase)
        self.stamp(smem, t, 0, tid)
        if cute.arch.vote_any_sync(valid != everything):
            for k in cutlass.range(self.keys, unroll=1):
                if (valid >> k) & 1 == 0:
                    sScores[scores_of(head, (first + k) // 2) + k % 2] = -Float32.inf
        factor = Float32(1.0)  # of what was added before
        places = (
            places[0] + of_scores * (4 * TOKENS_PER_TILE * self.heads),
            places[1] + buffer * (2 * TOKENS_PER_TILE * self.heads),
        )
        largest, added = self.probabilities(base, places, True)
        if cute.arch.vote_any_sync(largest > base + (P_SHIFT + MAX_GROWTH)):
            # with the first tile of an item, and hardly later
            if largest > base + (P_SHIFT + MAX_GROWTH):
                factor = cute.math.exp2(base - (largest - P_SHIFT), fastmath=True)
                base = largest - P_SHIFT
            _, added = self.probabilities(base, places, False)
        cute.arch.mbarrier_arrive(smem.s_empty.data_ptr() + of_scores)
        total = total * factor + added

        sRescaling = smem.rescaling.get_tensor(cute.make_layout((self.heads, 2)))
        if part == 0:
            sRescaling[head, buffer] = factor
        if cute.arch.vote_any_sync(factor != 1.0):
            if lane == 0:
                sState[tid // 32, buffer] |= RAISED
        return base, total

    @cute.jit
    def probabilities(self, base: Float32, places: tuple, usual: cutlass.Constexpr):
        """P^T of this thread; (the largest score of its head, the sum of its own probabilities).

        Where it is not the `usual` way its loop stays one: who passes it by has less to pass.
        """
        tops, sums = cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(1, Float32)
        tops.fill(-Float32.inf)
        sums.fill(0.0)
        at_once = min(8, self.keys)
        if const_expr(usual):
            following = self.scores(places, 0)
            for i in cutlass.range_constexpr(self.keys // at_once):
                s = following
                if const_expr(i + 1 < self.keys // at_once):
                    following = self.scores(places, i + 1)  # before P is stored: it might be there, for all ptxas knows
                self.some(base, places, s, i, tops, sums)
        else:
            for i in cutlass.range(self.keys // at_once, unroll=1):
                self.some(base, places, self.scores(places, i), i, tops, sums)
        largest = tops[0]
        for step in cutlass.range_constexpr(self.parts.bit_length() - 1):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 32 // self.parts << step))
        return largest, sums[0]

    @cute.jit
    def scores(self, places: tuple, i) -> cute.Tensor:
        """Those of a thread's i-th keys, eight or fewer."""
        pairs = min(8, self.keys) // 2
        s = cute.make_rmem_tensor((2, pairs), Float32)
        for j in cutlass.range_constexpr(pairs):
            pair = cute.make_ptr(Float32, places[0] ^ 16 * (pairs * i + j), AddressSpace.smem, assumed_align=8)
            cute.autovec_copy(cute.make_tensor(pair, cute.make_layout(2)), s[None, j])
        return s

    @cute.jit
    def some(self, base: Float32, places: tuple, s: cute.Tensor, i, tops, sums):
        """P^T of their keys, which counts in a thread's largest score (1) and in its sum (1)."""
        at_once = min(8, self.keys)
        rounded = cute.make_rmem_tensor(at_once, Float16)
        for j in cutlass.range_constexpr(at_once // 2):
            for k in cutlass.range_constexpr(2):
                tops[0] = cute.arch.fmax(tops[0], s[k, j])
                s[k, j] = cute.math.exp2(s[k, j] - base, fastmath=True)
                sums[0] += s[k, j]
        rounded.store(s.load().to(Float16).reshape(rounded.shape))
        chunk = cute.make_ptr(Float16, places[1] ^ 16 * i, AddressSpace.smem, assumed_align=2 * at_once)
        cute.autovec_copy(rounded, cute.make_tensor(chunk, cute.make_layout(at_once)))

    @cute.jit
    def store_weights(self, smem, stage: Int32, buffer: Int32, tid: Int32) -> Int32:
        """Scales x COLUMN_WEIGHT as float16, two of a key; REACHED if a code of this warp's keys times that is not."""
        token, group = tid // 2, 2 * (tid % 2)
        scale = cute.make_rmem_tensor(2, Float32)
        sWeight = smem.weight.get_tensor(cute.make_layout((TOKENS_PER_TILE, 2 * QUANT_TILES)))
        at = (stage * TOKENS_PER_TILE + token) * QUANT_TILES + group
        pointer = scales_of(smem, self.heads).iterator + cute.assume(at, divby=2)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), scale)
        outside = False
        for i in cutlass.range_constexpr(2):
            weight = scale[i] * COLUMN_WEIGHT
            sWeight[place_of_weight(token), buffer * QUANT_TILES + group + i] = weight.to(Float16)
            inside = weight == 0.0 or (weight >= SMALLEST_WEIGHT and weight < LARGEST_WEIGHT)
            outside = outside or not inside
        return Int32(REACHED) if cute.arch.vote_any_sync(outside) else Int32(0)

    @cute.jit
    def finish(self, smem, base: Float32, total: Float32, whole: Int32, buffer: Int32, tid: Int32):
        """Of each head the log-sum-exp, and 1 / (its sum, of a whole query with the sink), 0 without keys."""
        for step in cutlass.range_constexpr(self.parts.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 32 // self.parts << step)
        sShare = smem.share.get_tensor(cute.make_layout((self.heads, 2)))
        sLse = smem.lse.get_tensor(cute.make_layout((self.heads, 2)))
        sSink = smem.sink.get_tensor(cute.make_layout(self.heads))
        if tid % 32 < 32 // self.parts:
            denominator, head = total, self.head(tid)
            if const_expr(self.balanced):
                if whole != 0:
                    denominator += cute.math.exp2(sSink[head] - base, fastmath=True)
            elif const_expr(not self.split):
                denominator += cute.math.exp2(sSink[head] - base, fastmath=True)
            sShare[head, buffer] = Float32(cutlass.select_(total == 0.0, Float32(0.0), 1.0 / denominator))
            sLse[head, buffer] = softmax.log_sum_exp(base, total)

    @cute.jit
    def stamp(self, smem, t: Int32, edge: cutlass.Constexpr, tid: Int32):
        """A timestamp of a tile."""
        self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * t + 2, edge, tid == 0)
