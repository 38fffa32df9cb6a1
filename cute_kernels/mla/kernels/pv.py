"""The two warpgroups of the MLA decode kernel that add up values where heads are columns, 256 of 512 values each."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import registers, softmax, wgmma
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.load import TILE_BYTES, copy_tile
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable, WorkTile
from cute_kernels.mla.kernels.smem import (
    BUFFERS,
    LINE,
    OFFERS,
    RAISED,
    REACHED,
    WARPS,
    column,
    column_layouts,
    column_mmas,
    line_of,
    pairs_of,
    rope_stages,
    scales_of,
    stages,
    turn,
    weights,
)
from cute_kernels.mla.kernels.tile import NOPE
from cute_kernels.mla.spec import COLUMN_WEIGHT, EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec

BLOCKS = 4  # of 64 rows of O^T that a warpgroup has, two of a thread's eight columns each
KEY_BLOCKS = TOKENS_PER_TILE // 16
EXACT_WEIGHT = 2.0**-8  # what takes the place of COLUMN_WEIGHT in bf16: P is up to 2^15, and O is to hold what V does
PAIR_OF_CODES = (0x5140, 0x7362)  # PRMT: two columns of two rows, a pair of rows each


class ColumnValues:
    """Device code for 2 x 128 threads: O^T += V^T P^T, and the result.

    A warp has 64 neighbouring columns of V, so one quantization tile, and a thread eight of them: its rows g and g + 8
    of four blocks of 64 rows of O^T. It reads eight codes of each of four keys at once, and by two permutations of
    bytes and four conversions they are its part of V^T of two blocks. Scales, times COLUMN_WEIGHT, are applied to V:

        O_j += (scale_j code_j) P                            rounded to float16 once more

    where float16 holds that product of any code. From the first tile of an item where it does not, they are applied to
    P, in bf16 (`add_exactly`).
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.heads = spec.heads
        self.columns = spec.heads // 4  # of a thread
        self.stages, self.ropes = stages(spec.heads), rope_stages(spec.heads)
        self.pieces = 2 * BLOCKS if spec.few_heads else 2  # of V in registers: half of them is made beside products
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def add(
        self,
        smem,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        partials: tuple,
        mSink: cute.Tensor,
        done: Int32,
        count: Int32,
        item: Int32,
        whole: Int32,
        table: WorkTable,
        copies: tuple,
        wg: Int32,
        tid: Int32,
    ):
        """Adds up the `count` tiles of an item of work, the first of which is tile `done`, and stores what it gives."""
        mma, mma_exact = column_mmas(self.heads)
        shape = mma.partition_shape_C((TOKENS_PER_TILE, self.heads))
        acc_o = [cute.make_rmem_tensor(shape, Float32) for _ in range(BLOCKS)]
        for m in cutlass.range_constexpr(BLOCKS):
            acc_o[m].fill(0.0)
        exact = Int32(0)
        raw = [cute.make_rmem_tensor((2, 4), Int32) for _ in range(2)]  # codes of a block of keys, and the next one's
        line = self.line(wg, tid)
        for t in cutlass.range(done, done + count, unroll=1):
            stage, phase = turn(t, self.stages)
            buffer, phase_of_p = turn(t, BUFFERS)
            self.stamp(smem, t, 0, 0, wg, tid)
            cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, phase)  # long since
            self.load(smem, raw[0], stage, 0, line)  # loads take some 100 clocks: not behind the wait
            cute.arch.mbarrier_wait(smem.p_full.data_ptr() + buffer, phase_of_p)
            self.stamp(smem, t, 0, 1, wg, tid)
            self.stamp(smem, t, 1, 0, wg, tid)
            state = self.state(smem, buffer)
            if state & RAISED != 0 and t > done:
                self.rescale(smem, acc_o, buffer, tid)
            if exact == 0 and state & REACHED != 0:
                exact = Int32(1)
                for m in cutlass.range_constexpr(BLOCKS):
                    for i in cutlass.range_constexpr(cute.size(acc_o[m])):
                        acc_o[m][i] *= EXACT_WEIGHT / COLUMN_WEIGHT
            if exact != 0:
                self.add_exactly(smem, mma_exact, acc_o, stage, buffer, line, wg, tid)
                cute.arch.mbarrier_arrive(smem.empty.data_ptr() + stage)
                self.accept(smem, copies, t, wg, tid)
            else:
                self.add_tile(smem, mma, acc_o, raw, copies, t, line, wg, tid)
            if t < done + count - 1:
                cute.arch.mbarrier_arrive(smem.p_empty.data_ptr() + buffer)
            self.stamp(smem, t, 1, 1, wg, tid)
        share = cute.make_rmem_tensor(self.columns, Float32)
        share.fill(0.0)
        lse, sLse = -Float32.inf, smem.lse.get_tensor(cute.make_layout((self.heads, 2)))
        if count > 0:
            buffer = (done + count - 1) % 2
            pairs_of(smem.share.get_tensor(cute.make_layout(2 * self.heads)), tid, buffer * self.heads, share)
            if tid < self.heads:
                lse = sLse[tid, buffer]
            cute.arch.mbarrier_arrive(smem.p_empty.data_ptr() + buffer)
        usual = 1.0 if self.spec.split else 1.0 / COLUMN_WEIGHT  # partials are kept times the weight, their unit
        if const_expr(self.spec.balanced):
            usual = cutlass.select_(whole != 0, Float32(1.0 / COLUMN_WEIGHT), Float32(1.0))
        weight = Float32(cutlass.select_(exact != 0, Float32(1.0 / EXACT_WEIGHT), Float32(usual)))
        for c in cutlass.range_constexpr(self.columns):
            share[c] *= weight
        # not before: every register counts beside O
        work = self.scheduler.locate(registers.opaque(item), table)
        h_q = mSink.shape[0]
        if const_expr(self.spec.balanced):
            if whole != 0:
                self.store_result(acc_o, share, lse, mOut, mLse, h_q, work, wg, tid)
            else:
                self.store_partial(acc_o, share, lse, exact, partials, h_q, work, wg, tid)
        elif const_expr(self.spec.split):
            self.store_partial(acc_o, share, lse, exact, partials, h_q, work, wg, tid)
        else:
            self.store_result(acc_o, share, lse, mOut, mLse, h_q, work, wg, tid)

    @cute.jit
    def accept(self, smem, copies: tuple, t: Int32, wg: Int32, tid: Int32):
        """One warp starts the copies of the tile that takes the place of tile t, if it has been offered."""
        if const_expr(self.spec.offers):
            if wg == 0 and tid // 32 == 0:
                self.copy_offered(smem, copies, t)

    @cute.jit
    def copy_offered(self, smem, copies: tuple, t: Int32):
        """Starts the copies, once all have read tile t. Called by one warp."""
        sOffer = smem.offer.get_tensor(cute.make_layout((2, OFFERS)))
        page, place = sOffer[0, t % OFFERS], sOffer[1, t % OFFERS]
        if page >= 0:
            stage, phase = turn(t, self.stages)
            cute.arch.mbarrier_wait(smem.empty.data_ptr() + stage, phase)
            of_rope, phase = turn(t + self.stages, self.ropes)
            cute.arch.mbarrier_wait(smem.rope_empty.data_ptr() + of_rope, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(smem.full.data_ptr() + stage, TILE_BYTES)
            copy_tile(smem, copies, stage, of_rope, page, place)

    @cute.jit
    def rescale(self, smem, acc_o, buffer: Int32, tid: Int32):
        """Makes O relative to the bases of this tile."""
        factor = cute.make_rmem_tensor(self.columns, Float32)
        pairs_of(smem.rescaling.get_tensor(cute.make_layout(2 * self.heads)), tid, buffer * self.heads, factor)
        for m in cutlass.range_constexpr(BLOCKS):
            o = wgmma.by_row(acc_o[m])
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.columns):
                    o[r, c] *= factor[c]

    @cute.jit
    def state(self, smem, buffer: Int32) -> Int32:
        """What the softmax says of a tile."""
        words = cute.make_rmem_tensor(WARPS, Int32)
        pointer = smem.state.data_ptr() + cute.assume(WARPS * buffer, divby=WARPS)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WARPS)), words)
        return words[0] | words[1] | words[2] | words[3]

    @cute.jit
    def line(self, wg: Int32, tid: Int32):
        """Where a thread's codes of the first of its keys are in a stage."""
        warp_idx, g, q = tid // 32, tid % 32 // 4, tid % 4
        group, chunk = 2 * wg + warp_idx // 2, 4 * (warp_idx % 2) + g // 2
        line = group * (TOKENS_PER_TILE * LINE) + line_of(2 * q, chunk) + g % 2 * 8
        # kept: made again behind each wait for a tile, it costs 2% of one
        return registers.opaque(line) if const_expr(self.spec.few_heads) else line

    @cute.jit
    def load(self, smem, raw: cute.Tensor, stage: Int32, block, line: Int32):
        """Codes of a block of 16 keys: of the keys of a thread's four columns of A (4), eight columns each (8)."""
        start = stage * (TOKENS_PER_TILE * NOPE) + block * (16 * LINE)
        for i in cutlass.range_constexpr(4):
            of_key = (line ^ (16 * (i % 2))) + LINE * (i % 2 + 8 * (i // 2))  # a neighbour's chunks are swapped
            pointer = smem.codes.data_ptr() + cute.assume(start + of_key, divby=8)
            source = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(2))
            cute.autovec_copy(source, raw[None, i])

    @cute.jit
    def widen(self, raw: cute.Tensor, m: cutlass.Constexpr, half: cute.Tensor):
        """Eight numbers of A of block m of rows, float16: rows g and g + 8, keys 2 q and on and 2 q + 8 and on."""
        for i in cutlass.range_constexpr(2):
            codes = cute.make_rmem_tensor(4, Float8E4M3FN)
            words = cute.recast_tensor(codes, Int32)
            words[0] = Int32(cute.arch.prmt(raw[m // 2, 2 * i], raw[m // 2, 2 * i + 1], Int32(PAIR_OF_CODES[m % 2])))
            cute.make_tensor(half.iterator + 4 * i, cute.make_layout(4)).store(codes.load().to(Float16))

    def fragments_of_p(self, smem, mma: cute.TiledMma, tid: Int32) -> cute.Tensor:
        """P^T as the second operand: (.., block of 16 keys, buffer)."""
        layout_p = column_layouts(self.heads)[1]
        sP = smem.p.get_tensor(layout_p.outer, swizzle=layout_p.inner)
        return mma.make_fragment_B(mma.get_slice(tid).partition_B(sP))

    @cute.jit
    def add_tile(self, smem, mma: cute.TiledMma, acc_o, raw, copies: tuple, t: Int32, line, wg, tid):
        """O^T += (V weight)^T P^T. The next blocks of rows are made beside the products of these.

        Codes of the first 16 keys are in `raw`.
        """
        (stage, _), (buffer, _) = turn(t, self.stages), turn(t, BUFFERS)
        rP = self.fragments_of_p(smem, mma, tid)[None, None, None, buffer]
        shape = mma.partition_shape_A((TOKENS_PER_TILE, 16))
        values = [mma.make_fragment_A(shape) for _ in range(self.pieces)]
        group = 2 * wg + tid // 64
        for block in cutlass.range_constexpr(KEY_BLOCKS):
            of_keys = cute.make_rmem_tensor(4, Float16)
            start = weights(smem, buffer, group, tid)[None, block // 2].iterator + block % 2 * 4
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(4)), of_keys)
            weight = cute.make_rmem_tensor(8, Float16)
            for e in cutlass.range_constexpr(8):  # as in A: neighbours, rows, then eight keys on
                weight[e] = of_keys[e % 2 + 2 * (e // 4)]
            if const_expr(block + 1 < KEY_BLOCKS):
                self.load(smem, raw[(block + 1) % 2], stage, block + 1, line)
            for m in cutlass.range_constexpr(BLOCKS):
                half = cute.make_rmem_tensor(8, Float16)
                self.widen(raw[block % 2], m, half)
                of_block = values[(BLOCKS * block + m) % self.pieces]
                operand = cute.make_tensor(of_block.iterator, cute.make_layout(8))
                operand.store(half.load() * weight.load())
                warpgroup.fence()
                wgmma.issue(mma, acc_o[m], of_block, rP, True, [(0, block)])
                if const_expr(block + 1 == KEY_BLOCKS and m == 0):  # all codes of the tile are in registers
                    cute.arch.mbarrier_arrive(smem.empty.data_ptr() + stage)
                if const_expr((m + 1) % (self.pieces // 2) == 0):
                    warpgroup.commit_group()
                    if const_expr(block + 1 == KEY_BLOCKS and m + 1 == BLOCKS):
                        self.accept(smem, copies, t, wg, tid)
                        warpgroup.wait_group(0)
                    else:
                        warpgroup.wait_group(1)

    @cute.jit
    def add_exactly(self, smem, mma: cute.TiledMma, acc_o, stage: Int32, buffer: Int32, line: Int32, wg, tid):
        """O^T += V^T (P scale)^T in bf16, whose range is that of float32, for scales that are out of reach of float16.

        Of the two quantization tiles of a warpgroup each is met by its own P, while the other's codes count as zeros.
        """
        layout_few = column_layouts(self.heads)[2]
        sFew = smem.few.get_tensor(layout_few.outer, swizzle=layout_few.inner)
        rFew = mma.make_fragment_B(mma.get_slice(tid).partition_B(sFew))[None, None, None, wg]
        layout_p = column_layouts(self.heads)[1]
        sP = smem.p.get_tensor(layout_p.outer, swizzle=layout_p.inner)
        sScale = scales_of(smem, self.heads)
        shape = mma.partition_shape_A((TOKENS_PER_TILE, 16))
        values = mma.make_fragment_A(shape)
        raw = cute.make_rmem_tensor((2, 4), Int32)
        half = cute.make_rmem_tensor(8, Float16)
        for step in cutlass.range(2 * KEY_BLOCKS, unroll=1):
            block, of_group = step // 2, step % 2
            for item in cutlass.range(tid, 16 * self.heads, 128, unroll=1):
                head, key = item // 16, 16 * block + item % 16
                scale = sScale[2 * wg + of_group, stage * TOKENS_PER_TILE + key] * EXACT_WEIGHT
                sFew[head, item % 16, wg] = (sP[head, key, buffer].to(Float32) * scale).to(BFloat16)
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
            cute.arch.barrier(barrier_id=NamedBarrier.PV + wg, number_of_threads=128)
            self.load(smem, raw, stage, block, line)
            own = Float32(1.0) if tid // 64 == of_group else Float32(0.0)
            for m in cutlass.range_constexpr(BLOCKS):
                self.widen(raw, m, half)
                operand = cute.make_tensor(values.iterator, cute.make_layout(8))
                operand.store((half.load().to(Float32) * own).to(BFloat16))
                warpgroup.fence()
                wgmma.issue(mma, acc_o[m], values, rFew, True, [(0, 0)])
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            cute.arch.barrier(barrier_id=NamedBarrier.PV + wg, number_of_threads=128)

    @cute.jit
    def store_result(
        self, acc_o, share: cute.Tensor, lse: Float32, mOut: cute.Tensor, mLse: cute.Tensor, h_q: Int32, work, wg, tid
    ):
        """Stores the log-sum-exp, and O times each head's share."""
        head_block, _, query_idx, batch_idx = work
        head = head_block * self.heads + tid
        if wg == 0 and tid < self.heads and head < h_q:
            mLse[batch_idx, query_idx, head] = lse
        self.store(acc_o, share, Int32(0), mOut[batch_idx, query_idx, None, None], None, h_q, head_block, wg, tid)

    @cute.jit
    def store_partial(
        self,
        acc_o,
        share: cute.Tensor,
        lse: Float32,
        exact: Int32,
        partials: tuple,
        h_q: Int32,
        work: WorkTile,
        wg,
        tid,
    ):
        """The same for `merge`, with the units of the values.

        Where scales are in reach, what V is multiplied by in float16 is their unit: they are means of such numbers.
        Else 64 of them, which a warp has, get a unit of their own.
        """
        mPartial, mPartialLse, mUnits = partials
        head_block, split_idx, query_idx, batch_idx = work
        head = head_block * self.heads + tid
        if wg == 0 and tid < self.heads and head < h_q:
            mPartialLse[split_idx, batch_idx, query_idx, head] = lse
            if exact == 0:  # below 0: that of all values
                mUnits[split_idx, batch_idx, query_idx, head, 0] = Float32(-1.0 / COLUMN_WEIGHT)
        rows = mPartial[split_idx, batch_idx, query_idx, None, None]
        units = mUnits[split_idx, batch_idx, query_idx, None, 4 * wg + tid // 32]
        self.store(acc_o, share, exact, rows, units, h_q, head_block, wg, tid)

    @cute.jit
    def store(
        self, acc_o, share: cute.Tensor, exact: Int32, rows: cute.Tensor, units, h_q: Int32, head_block: Int32, wg, tid
    ):
        """Stores O times each head's share, eight neighbouring values of it at once; divided by units where exact."""
        first = 256 * wg + 64 * (tid // 32) + 8 * (tid % 32 // 4)
        eight = cute.make_rmem_tensor(8, Float32)
        for c in cutlass.range_constexpr(self.columns):
            head = head_block * self.heads + column(tid, c)
            for m in cutlass.range_constexpr(BLOCKS):
                o = wgmma.by_row(acc_o[m])
                for r in cutlass.range_constexpr(2):
                    eight[2 * m + r] = cutlass.select_(share[c] == 0.0, Float32(0.0), o[r, c] * share[c])
            if const_expr(units is not None):
                if exact != 0:
                    unit = self.divide_by_unit(eight)
                    if tid % 32 < 4 and head < h_q:
                        units[head] = unit
            rounded = cute.make_rmem_tensor(8, rows.element_type)
            rounded.store(eight.load().to(rows.element_type))
            if head < h_q:
                pointer = rows[head, None].iterator + cute.assume(first, divby=8)
                cute.autovec_copy(rounded, cute.make_tensor(pointer, cute.make_layout(8)))

    @cute.jit
    def divide_by_unit(self, eight: cute.Tensor) -> Float32:
        """Divides the 64 numbers of a warp's eight lanes by their unit, which it returns."""
        peak = Float32(0.0)
        for i in cutlass.range_constexpr(8):
            peak = cute.arch.fmax(peak, cute.arch.fmax(eight[i], -eight[i]))
        for step in cutlass.range_constexpr(3):
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 4 << step))
        unit = softmax.block_scale(peak)
        eight.store(eight.load() * (1.0 / unit))
        return unit

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, wg: Int32, tid: Int32):
        """A timestamp of a tile."""
        for w in cutlass.range_constexpr(2):
            self.tracer.stamp(smem.trace.ptr, 2 + w, len(EVENTS[2]) * t + event, edge, wg == w and tid == 0)
