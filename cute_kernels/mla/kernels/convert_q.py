"""Converts Q to float16, in place and in the order in which a thread reads keys."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr

from cute_kernels.device import pairs, registers, softmax, wgmma
from cute_kernels.mla.kernels.load_q import q_pipeline
from cute_kernels.mla.kernels.pipelines import NamedBarrier
from cute_kernels.mla.kernels.smem import WARPS
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, QUANT_TILE, ROPE
from cute_kernels.mla.spec import MlaDecodeSpec

TOP_EXPONENT = 14  # exponent of a head's largest number in float16: just below 2^15
ROPE_EXPONENT = 60  # exponent of a head's largest rope number in bfloat16, at most
MAX_EXPONENT = 110  # powers of two up to this size, times softmax_scale too, are normal float32 numbers
QUIET_EXPONENT = -8  # a block of peak below 2^-8 in float16 loses bits of bfloat16
HALF = QUANT_TILE // 2
LEAST_UNIT = 2.0**-126  # a unit of 0 would make NaN of a masked score, -inf


def code_chunk(lane, half):
    """Returns which of the eight chunks of 16 codes in a row's quant tile belongs to lane 0 to 3 of the row in a half.

    See `line_offset` for the banks of these chunks.
    """
    return lane % 2 + lane // 2 * 4 + 2 * half


class QConverter:
    """Device code for all threads of the QK warpgroups. `warp_idx` counts through all of them, `tid` within one.

    The order of columns in a product is free. The 16 codes that a thread reads at once are its part of four blocks of
    16 columns, so the conversion to float16 stores Q in that order, and the rope part likewise.

    The last block of V4 has 64 columns of codes, and then the rope part.

    Each head is multiplied by a power of two that brings its largest number to 2^TOP_EXPONENT; the softmax divides by
    it (`smem.q_unit`). So float16 is exact where it matters: numbers 2^-22 below a head's largest lose bits. A whole
    block of 128 columns that small has a power of its own, because scales of keys may make up for it. Slow key tiles
    multiply by all powers themselves, `smem.q_power`, because one power per head may leave float32's range there.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.edge = q_pipeline(spec.heads, spec.d_qk)
        self.heads = spec.heads
        self.warpgroups = spec.qk_warpgroups
        self.threads = 128 * spec.qk_warpgroups
        columns = spec.token_format.codes.count  # columns that meet codes
        self.blocks = -(-columns // QUANT_TILE)  # blocks of 128 columns
        self.ends_in_half = columns % QUANT_TILE != 0  # the other half is the rope part
        self.rope_start = columns // 8 if spec.has_rope else None  # first chunk of eight numbers

    @cute.jit
    def prepare(self, smem, scale_log2: Float32, load: Int32, warp_idx: Int32, tid: Int32) -> Int32:
        """Converts the Q of a work tile, from the load-th load; returns 1 if key tiles take `slow_tile`, else 0.

        They take it if blocks of 128 columns have powers of their own (`smem.q_power`). No QK is running meanwhile.

        It passes twice over shared memory, first for the largest magnitudes: keeping numbers in registers in between
        would take 72 registers for each 144 numbers.
        """
        sPeak = cute.make_tensor(smem.q_peak.data_ptr(), cute.make_layout((self.heads, self.blocks + 1)))
        sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((self.heads, self.blocks)))
        first = tid
        if const_expr(self.warpgroups > 1):
            first += 128 * (warp_idx // WARPS)
        self.edge.wait(smem, load)
        for index in cutlass.range(first, self.heads * self.blocks, self.threads, unroll=1):
            row, block = index % self.heads, index // self.heads
            sPeak[row, block] = self.peak(smem, row, block * (QUANT_TILE // 8), self.block_chunks(block))
        if const_expr(self.rope_start is not None):
            for row in cutlass.range(self.first_rope_row(first), self.heads, self.threads, unroll=1):
                sPeak[row, self.blocks] = self.peak(smem, row, self.rope_start, ROPE // 8)
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
        sign = cutlass.select_(scale_log2 < 0.0, Float32(-1.0), Float32(1.0))  # part of Q: units are positive
        fits = Int32(1)
        for index in cutlass.range(first, self.heads * self.blocks, self.threads, unroll=1):
            row, block = index % self.heads, index // self.heads
            power = self.head_power(sPeak, row)
            own, peak = power, sPeak[row, block]
            is_quiet = peak != 0.0 and softmax.exponent(peak) - power < QUIET_EXPONENT
            if is_quiet:
                own, fits = cutlass.max(softmax.exponent(peak) - TOP_EXPONENT, -MAX_EXPONENT), Int32(0)
            sPower[row, block] = softmax.power_of_two(own)
            self.convert(smem, index, pairs.bfloat16_pair(sign * softmax.power_of_two(-own)))
        if const_expr(self.rope_start is not None):
            for row in cutlass.range(self.first_rope_row(first), self.heads, self.threads, unroll=1):
                power = softmax.power_of_two(-self.head_power(sPeak, row))
                self.reorder_rope(smem, row, self.rope_start, pairs.bfloat16_pair(sign * power))
        head_power = self.head_power(sPeak, first % self.heads)
        unit = sign * scale_log2 * softmax.power_of_two(head_power)
        sUnit = smem.q_unit.get_tensor(cute.make_layout(self.heads))
        sShift = smem.q_shift.get_tensor(cute.make_layout(self.heads))
        if first < cute.size(sUnit):
            sUnit[first] = Float32(cutlass.select_(unit < LEAST_UNIT, Float32(LEAST_UNIT), unit))
            sShift[first] = softmax.power_of_two(head_power)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        return 1 - wgmma.every_thread(fits, Int32(NamedBarrier.QK), self.threads)

    def head_power(self, sPeak: cute.Tensor, row: Int32) -> Int32:
        """Returns the exponent of the power of two that a head is divided by."""
        peak = sPeak[row, 0]
        for block in range(1, self.blocks):
            peak = cute.arch.fmax(peak, sPeak[row, block])
        power = softmax.exponent(peak) - TOP_EXPONENT
        if self.rope_start is not None:
            power = cutlass.max(power, softmax.exponent(sPeak[row, self.blocks]) - ROPE_EXPONENT)
        return cutlass.min(cutlass.max(power, -MAX_EXPONENT), MAX_EXPONENT)

    @cute.jit
    def peak(self, smem, row: Int32, start: Int32, chunks) -> Float32:
        """Returns the largest magnitude of some chunks of eight numbers of a row."""
        four, largest = cute.make_rmem_tensor(4, Int32), registers.opaque(Int32(0))  # `max` takes no immediate number
        for c in cutlass.range(chunks, unroll=4):  # fully unrolled, it takes 64 registers
            cute.autovec_copy(cute.recast_tensor(self.chunk(smem, row, start + c), Int32), four)
            for i in cutlass.range_constexpr(4):
                largest = pairs.max_magnitudes(largest, four[i])
        return pairs.larger_half(largest)

    def first_rope_row(self, thread: Int32) -> Int32:
        """Returns the row whose rope part a thread reorders first, if it exists: the first threads have half blocks."""
        return self.threads - 1 - thread if self.ends_in_half else thread

    def block_chunks(self, block: Int32) -> Any:
        """Returns the number of chunks of eight numbers of a block that meet codes."""
        if self.ends_in_half:
            return cutlass.select_(block == self.blocks - 1, Int32(HALF // 8), Int32(QUANT_TILE // 8))
        return QUANT_TILE // 8

    def chunk(self, smem, row: Int32, c):
        """Returns eight numbers of a row of Q, from number 8 c on."""
        start = c // 8 * (self.heads * BLOCK_COLUMNS) + row * BLOCK_COLUMNS + ((c % 8) ^ (row % 8)) * 8
        return cute.make_tensor(smem.q.data_ptr() + cute.assume(start, divby=8), cute.make_layout(8))

    @cute.jit
    def convert(self, smem, index: Int32, power: Int32):
        """Converts the index-th row of 128 numbers, block by block, times a power of two (given twice, as a pair)."""
        if const_expr(self.ends_in_half):
            if index // self.heads == self.blocks - 1:
                self.convert_half(smem, index % self.heads, power)
            else:
                self.convert_block(smem, index, power)
        else:
            self.convert_block(smem, index, power)

    @cute.jit
    def convert_half(self, smem, row: Int32, power: Int32):
        """Converts the 64 numbers of the last block that meet codes; lanes 0 to 3 have 16 of them each, in order."""
        start, chunks = (self.blocks - 1) * (QUANT_TILE // 8), HALF // 8
        words = self.float16_words(smem, row, start, chunks, power)
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(chunks):
            for lane in cutlass.range_constexpr(4):
                four[lane] = words[c % 4, 2 * lane + c // 4]
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, start + c))

    @cute.jit
    def convert_block(self, smem, index: Int32, power: Int32):
        """Converts a whole block.

        In block i of 16 columns, pairs 2 i and 2 i + 1 of a lane's 16 codes are words lane and lane + 4.
        """
        row, start = index % self.heads, index // self.heads * (QUANT_TILE // 8)
        words = self.float16_words(smem, row, start, QUANT_TILE // 8, power)
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(QUANT_TILE // 8):
            for lane in cutlass.range_constexpr(4):
                four[lane] = words[c % 4, 2 * code_chunk(lane, c // 8) + c % 8 // 4]
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, start + c))

    @cute.jit
    def float16_words(self, smem, row: Int32, start: Int32, chunks: cutlass.Constexpr, power: Int32) -> cute.Tensor:
        """Converts chunks of eight numbers of a row, times a power of two, to float16: (4, chunks) words."""
        words = cute.make_rmem_tensor((4, chunks), Int32)
        for c in cutlass.range_constexpr(chunks):
            cute.autovec_copy(cute.recast_tensor(self.chunk(smem, row, start + c), Int32), words[None, c])
        for c in cutlass.range_constexpr(chunks):
            eight, converted = cute.make_rmem_tensor(8, BFloat16), cute.make_rmem_tensor(8, Float16)
            for i in cutlass.range_constexpr(4):
                cute.recast_tensor(eight, Int32)[i] = pairs.multiply_bfloat16(words[i, c], power)
            converted.store(eight.load().to(Float32).to(Float16))
            for i in cutlass.range_constexpr(4):
                words[i, c] = cute.recast_tensor(converted, Int32)[i]
        return words

    @cute.jit
    def reorder_rope(self, smem, row: Int32, start: cutlass.Constexpr, power: Int32):
        """Multiplies the rope part of a row, bf16, from chunk `start` on, and stores it in the order of keys' lanes.

        In block i of 16 columns of a half, words 2 i and 2 i + 1 of a lane's chunk are words lane and lane + 4.
        """
        words = cute.make_rmem_tensor((4, 8), Int32)
        for c in cutlass.range_constexpr(8):
            source = self.chunk(smem, row, start + c)
            cute.autovec_copy(cute.recast_tensor(source, Int32), words[None, c])
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(8):
            for lane in cutlass.range_constexpr(4):
                four[lane] = pairs.multiply_bfloat16(words[c % 4, code_chunk(lane, c // 4)], power)
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, start + c))
