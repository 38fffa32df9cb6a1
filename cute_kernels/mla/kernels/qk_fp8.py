"""QK of the MLA decode kernel on the FP8 tensor core: S^T = K Q^T, codes as they lie, Q = hi + lo."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import wgmma
from cute_kernels.device.ring import ring_slot
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.convert_q_fp8 import Fp8QConverter
from cute_kernels.mla.kernels.load_q import QTma, prefetch_q, q_layout, start_q
from cute_kernels.mla.kernels.qk import PREFETCH_TILES
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.smem import copy_columns, s_offset, scale_tensor, swap_odd_halves
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import EVENTS, ROLES, TOKENS_PER_TILE, MlaDecodeSpec

K_BLOCKS = QUANT_TILE // 32  # k blocks of 32 columns in a quant tile


def tiled_mmas(heads: int):
    """S^T = K Q^T of e4m3 codes, and of the rope part in bfloat16; both operands from shared memory."""
    k, shared = OperandMajorMode.K, warpgroup.OperandSource.SMEM
    fp8 = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (TOKENS_PER_TILE, heads, 32), shared, k, k)
    bf16 = warpgroup.MmaF16BF16Op(BFloat16, Float32, (TOKENS_PER_TILE, heads, 16), shared, k, k)
    return tuple(cute.make_tiled_mma(cute.make_mma_atom(op)) for op in (fp8, bf16))


class Fp8QkWarpgroup:
    """Device code for 128 threads: S^T of all tiles, a row for a key, a column for a head.

        S = 2^-n (q_rope 2^n k_rope + sum_j scale_j (hi_j code_j + lo_j code_j))      n of each head

    wgmma reads codes, the rope part and Q from shared memory: no number is converted in the loop over tiles. hi and lo
    of a quant tile go into one accumulator G; S += scale_j G in float32. Two G take turns, so that this goes on while
    the next products run. The tensor core keeps 13 bits below the largest of 32 products and G, whose sums are thus off
    by some 1.3e-4 of their rms; bf16 keys would cost 1.7e-3.

    A thread has rows g and g + 8 of 16, not two neighbours: see `smem.key_of_position` for the order of keys in S.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.heads = spec.heads
        self.columns = spec.heads // 4  # of a thread
        self.q = Fp8QConverter(spec)
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, q_tma: QTma, scale_log2: Float32, table: WorkTable, warp_idx: Int32, tidx: Int32):
        """S of all work tiles of this CTA."""
        first_work, end_work, step = table.share.first, table.share.end, table.share.step
        tid = tidx % 128
        work = self.scheduler.locate(first_work, table)
        if warp_idx == 0 and first_work < end_work:
            start_q(smem, *q_tma, work, self.heads)
        done, loads = Int32(0), Int32(0)
        length = self.scheduler.length(work, table.mLength)
        for index in cutlass.range(first_work, end_work, step, unroll=1):
            work = self.scheduler.locate(index, table)
            keys = self.scheduler.keys(index, work, length, table)
            following = index + step
            last = cutlass.min(following, end_work - 1)
            q_scaled = self.q.prepare(smem, scale_log2, loads, tid)
            loads += 1
            next_work = self.scheduler.locate(last, table)
            length = self.scheduler.length(next_work, table.mLength)  # a work tile ahead: it takes some 1000 clocks
            tile, end = done, done + keys.tiles
            prefetched = Int32(0)
            while tile < end:
                stop = end
                if prefetched == 0:
                    stop = cutlass.max(end - PREFETCH_TILES, done)
                hot_stop = stop if q_scaled == 0 else tile
                while tile < hot_stop:
                    self.fast_tile(smem, tile, tid)
                    tile += 1
                while tile < stop:
                    self.slow_tile(smem, scale_log2, tile, tid)
                    tile += 1
                if prefetched == 0:
                    prefetched = Int32(1)
                    if following < end_work and warp_idx == 0:
                        prefetch_q(*q_tma, self.scheduler.locate(last, table), self.heads)
            done = end
            if following < end_work:
                # all have read this Q
                cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=128)
                if warp_idx == 0:
                    start_q(smem, *q_tma, self.scheduler.locate(last, table), self.heads)

    @cute.jit
    def fast_tile(self, smem, tile: Int32, tid: Int32):
        """Computes and stores S^T of a tile; each head of Q has one power of two."""
        stage = self.await_keys(smem, tile, tid)
        total, sums = self.accumulators(2)
        self.issue_rope(smem, total, tile, tid)
        for j in cutlass.range_constexpr(QUANT_TILES):
            self.issue_quant_tile(smem, sums[j % 2], stage, j, tid)
            warpgroup.wait_group(1)
            if const_expr(j > 0):
                self.add(smem, total, sums[(j - 1) % 2], stage, j - 1, tid)
        factors = cute.make_rmem_tensor(self.columns, Float32)
        copy_columns(self.powers(smem), tid, 0, factors)
        s_stage, phase = ring_slot(tile, self.spec.qk_warpgroups)
        cute.arch.mbarrier_wait(smem.s_empty.data_ptr() + s_stage, phase ^ 1)
        warpgroup.wait_group(0)
        self.add(smem, total, sums[(QUANT_TILES - 1) % 2], stage, QUANT_TILES - 1, tid)
        self.stamp(smem, tile, 1, 1, tid, True)
        self.store_s(smem, total, factors, tile, tid)

    @cute.jit
    def slow_tile(self, smem, scale_log2: Float32, tile: Int32, tid: Int32):
        """The same where quant tiles of Q have powers of their own: rare, so without overlap."""
        stage = self.await_keys(smem, tile, tid)
        total, sums = self.accumulators(1)
        power = cute.make_rmem_tensor(self.columns, Float32)
        self.issue_rope(smem, total, tile, tid)
        for j in cutlass.range(QUANT_TILES, unroll=1):
            self.issue_quant_tile(smem, sums[0], stage, j, tid)
            warpgroup.wait_group(0)
            copy_columns(self.powers(smem), tid, j * self.heads, power)
            s, g = wgmma.by_row(total), wgmma.by_row(sums[0])
            for r in cutlass.range_constexpr(2):
                scale = self.scale(smem, stage, j, r, tid)
                for c in cutlass.range_constexpr(self.columns):
                    s[r, c] += g[r, c] * (power[c] * scale)
        power.fill(scale_log2)
        s_stage, phase = ring_slot(tile, self.spec.qk_warpgroups)
        cute.arch.mbarrier_wait(smem.s_empty.data_ptr() + s_stage, phase ^ 1)
        self.stamp(smem, tile, 1, 1, tid, True)
        self.store_s(smem, total, power, tile, tid)

    @cute.jit
    def await_keys(self, smem, tile: Int32, tid: Int32) -> Int32:
        """Waits until a key tile is loaded; returns its stage."""
        self.stamp(smem, tile, 0, 0, tid)
        stage, phase = ring_slot(tile, self.spec.stages)
        cute.arch.mbarrier_wait(smem.full.data_ptr() + stage, phase)
        cute.arch.fence_proxy("async.shared", space="cta")  # rows that cp.async stored, read by wgmma
        self.stamp(smem, tile, 0, 1, tid, True)
        return stage

    def accumulators(self, sums: int) -> tuple[cute.Tensor, list[cute.Tensor]]:
        """S, and `sums` G."""
        shape = tiled_mmas(self.heads)[0].partition_shape_C((TOKENS_PER_TILE, self.heads))
        made = [cute.make_rmem_tensor(shape, Float32) for _ in range(1 + sums)]
        return made[0], made[1:]

    def powers(self, smem) -> cute.Tensor:
        """Factors of S of all heads, quant tile by quant tile."""
        return smem.q_power.get_tensor(cute.make_layout(QUANT_TILES * self.heads))

    @cute.jit
    def issue_rope(self, smem, total: cute.Tensor, tile: Int32, tid: Int32):
        """Starts S^T of the rope part of a tile."""
        mma = tiled_mmas(self.heads)[1]
        mma_slice, q = mma.get_slice(tid), q_layout(self.heads)
        rows = (TOKENS_PER_TILE, self.heads, ROPE)
        rope = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, rows, BFloat16, self.spec.rope_stages)
        pointer = cute.recast_ptr(smem.rope.data_ptr(), rope.inner, BFloat16)
        sRope = cute.make_tensor(pointer, rope.outer)
        rRope = mma.make_fragment_A(mma_slice.partition_A(sRope))
        rQ = mma.make_fragment_B(mma_slice.partition_B(smem.q.get_tensor(q.outer, swizzle=q.inner)))
        stage = cute.arch.make_warp_uniform(ring_slot(tile, self.spec.rope_stages).index)
        warpgroup.fence()
        blocks = [(k, NOPE // 16 + k) for k in range(ROPE // 16)]
        wgmma.issue(mma, total, rRope[None, None, None, stage], rQ[None, None, None, 0], False, blocks)
        warpgroup.commit_group()

    @cute.jit
    def issue_quant_tile(self, smem, acc: cute.Tensor, stage: Int32, j, tid: Int32):
        """Starts G of a quant tile: each 32 columns of codes times hi, then times lo."""
        mma = tiled_mmas(self.heads)[0]
        mma_slice = mma.get_slice(tid)
        codes = self.layout(sm90.make_smem_layout_a, NOPE, self.spec.stages)
        q = self.layout(sm90.make_smem_layout_b, 2 * NOPE, 1)
        sCodes = cute.make_tensor(cute.recast_ptr(smem.codes.data_ptr(), codes.inner, Float8E4M3FN), codes.outer)
        sQ = cute.make_tensor(cute.recast_ptr(smem.q.data_ptr(), q.inner, Float8E4M3FN), q.outer)
        stage = cute.arch.make_warp_uniform(stage)  # descriptors take uniform registers
        rCodes = mma.make_fragment_A(mma_slice.partition_A(sCodes))[None, None, None, stage]
        rQ = mma.make_fragment_B(mma_slice.partition_B(sQ))[None, None, None, 0]
        rCodes = cute.make_tensor(rCodes[None, None, K_BLOCKS * j].iterator, rCodes.layout)
        rQ = cute.make_tensor(rQ[None, None, 2 * K_BLOCKS * j].iterator, rQ.layout)
        blocks = [(k, 2 * k + half) for k in range(K_BLOCKS) for half in range(2)]
        warpgroup.fence()
        wgmma.issue(mma, acc, rCodes, rQ, False, blocks)
        warpgroup.commit_group()

    def layout(self, make, columns: int, stages: int):
        """Shared memory of e4m3 numbers in 128-byte lines."""
        return make(LayoutEnum.ROW_MAJOR, (TOKENS_PER_TILE, self.heads, columns), Float8E4M3FN, stages)

    @cute.jit
    def add(self, smem, total: cute.Tensor, part: cute.Tensor, stage: Int32, j: cutlass.Constexpr, tid: Int32):
        """S += scale G."""
        s, g = wgmma.by_row(total), wgmma.by_row(part)
        for r in cutlass.range_constexpr(2):
            scale = self.scale(smem, stage, j, r, tid)
            for c in cutlass.range_constexpr(self.columns):
                s[r, c] += scale * g[r, c]

    def scale(self, smem, stage: Int32, j: int, r: int, tid: Int32):
        """The scale of a quant tile of a thread's row."""
        return scale_tensor(smem, self.spec.stages)[j, stage * TOKENS_PER_TILE + wgmma.row(tid, r)]

    @cute.jit
    def store_s(self, smem, total: cute.Tensor, factors: cute.Tensor, tile: Int32, tid: Int32):
        """Stores S^T times the factor of each head for the softmax, which has read the stage."""
        s, q = wgmma.by_row(total), tid % 4
        s_stage, _ = ring_slot(tile, self.spec.qk_warpgroups)
        sUnit = smem.unit.get_tensor(cute.make_layout(self.heads))
        if tid < cute.size(sUnit):  # what is stored is the score
            sUnit[tid] = Float32(1.0)
        start = smem.s.data_ptr() + s_stage * (TOKENS_PER_TILE * self.heads)
        key_pair = tid // 32 * 8 + swap_odd_halves(tid % 32 // 4)
        four = cute.make_rmem_tensor((2, 2), Float32)
        for block in cutlass.range_constexpr(self.heads // 8):
            for e in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    four[r, e] = s[r, 2 * block + e] * factors[2 * block + e]
            pointer = start + cute.assume(s_offset(8 * block + 2 * q, key_pair), divby=4)
            cute.autovec_copy(four, cute.make_tensor(pointer, cute.make_layout((2, 2))))
        cute.arch.mbarrier_arrive(smem.s_full.data_ptr() + s_stage)
        if const_expr(self.spec.pv_issues_tma):
            cute.arch.mbarrier_arrive(smem.rope_empty.data_ptr() + ring_slot(tile, self.spec.rope_stages).index)
        self.stamp(smem, tile, 2, 1, tid)

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
        """A timestamp of a key tile."""
        self.tracer.stamp(smem.trace.ptr, 1, len(EVENTS[1]) * tile + event, edge, tid == 0, goes_on)
