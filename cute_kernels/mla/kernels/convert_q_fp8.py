"""Q as two e4m3 numbers each, hi + lo, in place of its bf16 form."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32

from cute_kernels.device import softmax, wgmma
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import MlaDecodeSpec

MAX_SPREAD = 6  # log2 of the ratio of two quant tiles' largest magnitudes up to which a head has one power of two
MAX_POWER = 64  # log2 of that power, up or down, so that S times it stays far from the ends of float32
MAX_ROPE = 112  # log2 of how much larger the rope part may be: bf16 holds it times the power
MAX_EXPONENT = 120  # of the power of a quant tile that has its own
K_COLUMNS = 32  # of a k block of wgmma
ROPE_CHUNKS = ROPE // 8 // QUANT_TILES  # of eight numbers of the rope part, for each quant tile


@cute.jit
def shift_to_448(peak: Float32) -> Int32:
    """The largest n with peak * 2^n <= 448 = 1.75 * 2^8, the largest e4m3 number: 135 for 0, -120 for Inf."""
    # what exceeds 1.75 counts to the next exponent
    return 8 - softmax.exponent((peak.bitcast(Int32) + 0x1FFFFF).bitcast(Float32))


class Fp8QConverter:
    """Device code for the 128 threads of the QK warpgroup.

        q 2^n = hi + lo     hi = e4m3(q 2^n), lo = e4m3(q 2^n - hi)

    with the largest n that brings the largest of the head's |q 2^n| to at most 448. A bf16 number has eight bits, each
    of hi and lo has four, so nothing is lost of numbers above 2^-10 of the largest, and below it less than 2^-18 of the
    largest. The rope part stays bf16 and is multiplied by 2^n too: S is 2^n times too large as a whole, and
    `smem.q_power` takes that back.

    If a head's quant tiles differ in range by more than MAX_SPREAD, or n is far from 0, small numbers would lose what
    their keys might make up for. All heads of the work tile then have a power for each quant tile, and S is multiplied
    by it while it is summed (`Fp8QkWarpgroup.slow_tile`).

    e4m3 saturates where bf16 is Inf: the power of such a head is NaN. A NaN stays one in hi and lo.

    In place: hi of 32 columns takes the first 32 of their 64 bytes, lo the others.
    smem.q_power, (heads, quant tile), has the factors of S: 2^-n of each quant tile; or, where a head has one n,
    scale_log2 2^-n in place of the first. A thread converts one head: its quant tiles tid / heads, and on.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.heads = spec.heads
        self.threads = 128 * spec.qk_warpgroups
        self.step = self.threads // spec.heads  # from a quant tile of a thread to the next
        self.rounds = QUANT_TILES // self.step  # quant tiles of a thread

    @cute.jit
    def prepare(self, smem, scale_log2: Float32, load: Int32, tid: Int32) -> Int32:
        """Converts the Q of a work tile, that of the load-th load; returns 1 if quant tiles have powers of their own.

        No QK is under way.
        """
        head, first = tid % self.heads, tid // self.heads
        sPower = smem.q_power.get_tensor(cute.make_layout((self.heads, QUANT_TILES)))
        cute.arch.mbarrier_wait(smem.q_full.ptr, load % 2)
        rope_peak = Float32(0.0)
        for i in cutlass.range(self.rounds, unroll=1):
            j = first + i * self.step
            sPower[head, j] = self.peak(smem, head, j * (QUANT_TILE // 8), QUANT_TILE // 8)
            rope_part = self.peak(smem, head, NOPE // 8 + ROPE_CHUNKS * j, ROPE_CHUNKS)
            rope_peak = cute.arch.fmax(rope_peak, rope_part)
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
        largest, fits = Float32(0.0), Int32(1)
        for j in cutlass.range_constexpr(QUANT_TILES):
            largest = cute.arch.fmax(largest, sPower[head, j])
        shift = shift_to_448(largest)
        for j in cutlass.range_constexpr(QUANT_TILES):
            peak = sPower[head, j]
            if peak != 0.0 and shift_to_448(peak) - shift > MAX_SPREAD:
                fits = Int32(0)
        if largest == 0.0:
            shift = Int32(0)
        if shift > MAX_POWER or shift < -MAX_POWER or shift - shift_to_448(rope_peak) > MAX_ROPE:
            fits = Int32(0)
        fits = wgmma.every_thread(fits, Int32(NamedBarrier.QK), self.threads)  # and all have read the peaks
        power = softmax.power_of_two(shift)
        for i in cutlass.range(self.rounds, unroll=1):
            j = first + i * self.step
            if fits == 0:
                peak = sPower[head, j]
                shift = cutlass.min(cutlass.max(shift_to_448(peak), -MAX_EXPONENT), MAX_EXPONENT)
                power = softmax.power_of_two(shift)
                sPower[head, j] = softmax.power_of_two(-shift) + (peak - peak)  # NaN after Inf
            else:
                self.multiply_rope(smem, head, NOPE // 8 + ROPE_CHUNKS * j, power)
            self.split(smem, head, j, power)
        if fits != 0 and first == 0:
            sPower[head, 0] = scale_log2 * (softmax.power_of_two(-shift) + (largest - largest))
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
        return 1 - fits

    def chunk(self, smem, row: Int32, c):
        """16 bytes of a row of Q, the c-th: columns 8 c and on of its bf16 form."""
        start = c // 8 * (self.heads * 64) + row * 64 + ((c % 8) ^ (row % 8)) * 8
        return cute.make_tensor(smem.q.data_ptr() + cute.assume(start, divby=8), cute.make_layout(8))

    @cute.jit
    def peak(self, smem, row: Int32, first: Int32, chunks: cutlass.Constexpr) -> Float32:
        """The largest magnitude in some chunks of a row, NaN aside."""
        peak, eight = Float32(0.0), cute.make_rmem_tensor(8, BFloat16)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(self.chunk(smem, row, first + c), eight)
            for i in cutlass.range_constexpr(8):
                number = eight[i].to(Float32)
                peak = cute.arch.fmax(peak, cute.arch.fmax(number, -number))
        return peak

    @cute.jit
    def split(self, smem, row: Int32, quant_tile: Int32, power: Float32):
        """Stores hi and lo of 128 numbers, times a power of two, where they are."""
        x, part = cute.make_rmem_tensor(K_COLUMNS, Float32), cute.make_rmem_tensor(K_COLUMNS, Float8E4M3FN)
        numbers = cute.make_rmem_tensor((8, K_COLUMNS // 8), BFloat16)
        for k in cutlass.range(QUANT_TILE // K_COLUMNS, unroll=1):  # unrolled, ptxas gives up uniform registers
            first = (quant_tile * (QUANT_TILE // K_COLUMNS) + k) * (K_COLUMNS // 8)
            for c in cutlass.range_constexpr(K_COLUMNS // 8):
                cute.autovec_copy(self.chunk(smem, row, first + c), numbers[None, c])
            x.store(numbers.load().to(Float32).reshape(x.shape) * power)
            for half in cutlass.range_constexpr(2):
                part.store(x.load().to(Float8E4M3FN))
                for c in cutlass.range_constexpr(K_COLUMNS // 16):
                    sixteen = cute.make_tensor(part.iterator + 16 * c, cute.make_layout(16))
                    target = self.chunk(smem, row, first + half * (K_COLUMNS // 16) + c)
                    cute.autovec_copy(cute.recast_tensor(sixteen, BFloat16), target)
                x.store(x.load() - part.load().to(Float32))  # exact: at most four bits are left

    @cute.jit
    def multiply_rope(self, smem, row: Int32, first: Int32, power: Float32):
        """Multiplies ROPE_CHUNKS chunks of the rope part by a power of two, which bf16 holds."""
        eight = cute.make_rmem_tensor(8, BFloat16)
        for c in cutlass.range_constexpr(ROPE_CHUNKS):
            target = self.chunk(smem, row, first + c)
            cute.autovec_copy(target, eight)
            eight.store((eight.load().to(Float32) * power).to(BFloat16))
            cute.autovec_copy(eight, target)
