"""Q as float16, in place and in the order in which a thread reads keys."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr

from cute_kernels.device import softmax, wgmma
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.load_q import QTma, start_q
from cute_kernels.mla.kernels.scheduler import WorkTile
from cute_kernels.mla.kernels.smem import WARPS
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, QUANT_TILE, QUANT_TILES
from cute_kernels.mla.spec import MlaDecodeSpec

MIN_PEAK, MAX_PEAK = 2.0**-8, 65504.0  # of 128 numbers, between which float16 holds all of them as well as bf16 does
MAX_EXPONENT = 120  # powers of two up to this size, and their inverses, are normal float32 numbers


class PreparedQ(NamedTuple):
    """q_scaled: 1 if S is to be multiplied by `smem.q_power`; loads: TMA loads of Q so far."""

    q_scaled: Int32
    loads: Int32


def code_chunk(lane, half):
    """Of the eight chunks of 16 codes in a quant tile of a row, the one that lane 0 to 3 of its row has in a half.

    See `line_offset` for the banks that they meet.
    """
    return lane % 2 + lane // 2 * 4 + 2 * half


@cute.jit
def max_magnitudes(a: Int32, b: Int32) -> Int32:
    """The larger magnitudes of two pairs of float16; `a` has no signs."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nabs.f16x2 t, {$r1};\nmax.f16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


class QConverter:
    """Device code for all threads of the QK warpgroups. `warp_idx` counts through all of them, `tid` within one.

    The order of columns in a product is free: the 16 codes that a thread reads at once are its part of four blocks of
    16 columns, so Q is stored in that order as it becomes float16, and its rope part likewise.

    Float16 is exact where it matters: numbers 2^-16 below the largest of the 128 that meet a scale lose bits, and are
    too small there to count. Where the largest itself is out of range, Q is loaded again and a power of two brings each
    row of a quant tile into range.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.heads = spec.heads
        self.warpgroups = spec.qk_warpgroups
        self.threads = 128 * spec.qk_warpgroups
        self.blocks = QUANT_TILES  # of 128 columns

    @cute.jit
    def prepare(
        self,
        smem,
        q_tma: QTma,
        work: WorkTile,
        loads: Int32,
        warp_idx: Int32,
        tid: Int32,
    ):
        """Converts the Q of a work tile, after `loads` loads of Q; no QK is under way."""
        sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((self.heads, self.blocks)))
        first = tid
        if const_expr(self.warpgroups > 1):
            first += 128 * (warp_idx // WARPS)
        q_scaled, ready = Int32(0), Int32(0)
        while ready == 0:  # once or twice. With a second copy of this code ptxas gives up uniform registers everywhere
            cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
            loads += 1
            fits = Int32(1)
            for index in cutlass.range(first, self.heads * self.blocks, self.threads, unroll=1):
                power = Float32(1.0)
                if q_scaled != 0:
                    exponent = cutlass.min(cutlass.max(self.exponent(smem, index), -MAX_EXPONENT), MAX_EXPONENT)
                    self.multiply(smem, index, softmax.power_of_two(-exponent))
                    power = softmax.power_of_two(exponent)
                sPower[index % self.heads, index // self.heads] = power
                if self.convert(smem, index) == 0:
                    fits = Int32(0)
            for row in cutlass.range(self.first_rope_row(first), self.heads, self.threads, unroll=1):
                self.reorder_rope(smem, row, NOPE // 8)
            ready = q_scaled | wgmma.every_thread(fits, Int32(NamedBarrier.QK), self.threads)
            if ready == 0:
                q_scaled = Int32(1)
                cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, then those of TMA
                cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
                if warp_idx == 0:
                    start_q(smem, *q_tma, work, self.heads)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
        return PreparedQ(q_scaled, loads)

    def first_rope_row(self, thread: Int32) -> Int32:
        """The row whose rope part a thread reorders first, if there are as many."""
        return thread

    def block_chunks(self, block: Int32) -> Any:
        """Chunks of eight numbers of a block of 128 columns."""
        return QUANT_TILE // 8

    def chunk(self, smem, row: Int32, c):
        """Eight numbers of a row of Q, 8 c and on."""
        start = c // 8 * (self.heads * BLOCK_COLUMNS) + row * BLOCK_COLUMNS + ((c % 8) ^ (row % 8)) * 8
        return cute.make_tensor(smem.q.data_ptr() + cute.assume(start, divby=8), cute.make_layout(8))

    @cute.jit
    def convert(self, smem, index: Int32) -> Int32:
        """Converts the index-th row of 128 numbers, quant tile by quant tile; returns whether float16 holds them.

        Of block i of 16 columns, pairs 2 i and 2 i + 1 of a lane's 16 codes are words lane and lane + 4.
        """
        row, start = index % self.heads, index // self.heads * (QUANT_TILE // 8)
        numbers = cute.make_rmem_tensor((8, QUANT_TILE // 8), BFloat16)
        for c in cutlass.range_constexpr(QUANT_TILE // 8):
            cute.autovec_copy(self.chunk(smem, row, start + c), numbers[None, c])
        words = cute.recast_tensor(numbers, Int32)
        fits = self.to_float16(numbers, words)
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(QUANT_TILE // 8):
            for lane in cutlass.range_constexpr(4):
                four[lane] = words[c % 4, 2 * code_chunk(lane, c // 8) + c % 8 // 4]
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, start + c))
        return fits

    @cute.jit
    def to_float16(self, numbers: cute.Tensor, words: cute.Tensor) -> Int32:
        """Converts 64 or 128 numbers, in `words`; returns whether float16 holds them as well as bfloat16 does."""
        fits = Int32(1)
        for half in cutlass.range_constexpr(cute.size(numbers) // 64):
            largest, seen = Int32(0), Int32(0)
            for c in cutlass.range_constexpr(8 * half, 8 * half + 8):
                converted = cute.make_rmem_tensor(8, Float16)
                converted.store(numbers[None, c].load().to(Float32).to(Float16))
                for i in cutlass.range_constexpr(4):
                    seen |= words[i, c]
                    words[i, c] = cute.recast_tensor(converted, Int32)[i]
                    if const_expr(i == 0 and c == 8 * half):
                        largest = words[i, c] & 0x7FFF7FFF
                    else:
                        largest = max_magnitudes(largest, words[i, c])
            pair = cute.make_rmem_tensor(1, Int32)
            pair[0] = largest
            magnitudes = cute.recast_tensor(pair, Float16)
            peak = cute.arch.fmax(magnitudes[0].to(Float32), magnitudes[1].to(Float32))
            if seen & 0x7FFF7FFF != 0 and (peak < MIN_PEAK or peak > MAX_PEAK):
                fits = Int32(0)
        return fits

    @cute.jit
    def reorder_rope(self, smem, row: Int32, start: cutlass.Constexpr):
        """Puts the rope part of a row, bf16, from chunk `start` of eight on, into the order in which lanes read keys.

        Of block i of 16 columns in a half, words 2 i and 2 i + 1 of a lane's chunk are words lane and lane + 4.
        """
        words = cute.make_rmem_tensor((4, 8), Int32)
        for c in cutlass.range_constexpr(8):
            source = self.chunk(smem, row, start + c)
            cute.autovec_copy(cute.recast_tensor(source, Int32), words[None, c])
        self.weigh_rope(words)
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(8):
            for lane in cutlass.range_constexpr(4):
                four[lane] = words[c % 4, code_chunk(lane, c // 4)]
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, start + c))

    def weigh_rope(self, words: cute.Tensor) -> None:
        """The rope part of a row, two numbers in a word, is multiplied by nothing here."""

    @cute.jit
    def multiply(self, smem, index: Int32, power: Float32):
        """Multiplies the index-th row of 128 numbers by a power of two, which bf16 holds."""
        eight = cute.make_rmem_tensor(8, BFloat16)
        for c in cutlass.range(self.block_chunks(index // self.heads), unroll=1):
            target = self.chunk(smem, index % self.heads, index // self.heads * (QUANT_TILE // 8) + c)
            cute.autovec_copy(target, eight)
            eight.store((eight.load().to(Float32) * power).to(BFloat16))
            cute.autovec_copy(eight, target)

    @cute.jit
    def exponent(self, smem, index: Int32) -> Int32:
        """floor(log2) of the largest magnitude in the index-th row of 128 numbers."""
        peak, eight = Float32(0.0), cute.make_rmem_tensor(8, BFloat16)
        for c in cutlass.range(self.block_chunks(index // self.heads), unroll=1):
            source = self.chunk(smem, index % self.heads, index // self.heads * (QUANT_TILE // 8) + c)
            cute.autovec_copy(source, eight)
            for i in cutlass.range_constexpr(8):
                number = eight[i].to(Float32)
                peak = cute.arch.fmax(peak, cute.arch.fmax(number, -number))
        return softmax.exponent(peak)
