"""Q of the crossover kernel as float16, in place, row by row as wgmma reads it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32

from cute_kernels.device import softmax, wgmma
from cute_kernels.mla.crossover.kernels.pipelines import NamedBarrier
from cute_kernels.mla.crossover.kernels.tile import BLOCK, THREADS
from cute_kernels.mla.kernels.load_q import QTma, q_pipeline, start_q
from cute_kernels.mla.kernels.scheduler import WorkTile
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, QK, QUANT_TILE, QUANT_TILES
from cute_kernels.mla.spec import WIDE

CHUNKS = 8  # chunks of eight numbers of Q that a thread converts together
MIN_PEAK, MAX_PEAK = 2.0**-8, 65504.0  # range of a peak of 128 numbers in which float16 holds all as well as bf16
MAX_EXPONENT = 120  # powers of two up to this size, and their inverses, are normal float32 numbers


@cute.jit
def max_magnitudes(a: Int32, b: Int32) -> Int32:
    """Returns the larger magnitudes of two pairs of float16; `a` has no negative numbers."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nabs.f16x2 t, {$r1};\nmax.f16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


class QChunk(NamedTuple):
    """Eight neighbouring numbers of Q: the same memory viewed as bf16 and as float16."""

    bf16: cute.Tensor
    fp16: cute.Tensor


class QConverter:
    """Device code for the QK warpgroup. A thread converts two quant tiles of one row; the rope part stays bf16.

    Numbers 2^-16 below the largest of the 128 that share a scale lose bits; they are too small to matter. If the
    largest itself is out of float16's range, Q is loaded again and a power of two brings each row of a quant tile into
    range; `smem.q_power` has the inverse, which multiplies S.
    """

    edge = q_pipeline(WIDE, QK)

    @cute.jit
    def prepare(self, smem, q: QTma, work: WorkTile, loads: Int32, warp_idx: Int32, tid: Int32):
        """Converts the Q of a work tile; `loads` loads of Q precede it.

        Returns (1 if S has to be multiplied by `smem.q_power`, number of loads so far).
        """
        self.edge.wait(smem, loads)
        loads += 1
        fits = self.convert(smem, tid)
        q_scaled = Int32(0)
        if wgmma.every_thread(fits, Int32(NamedBarrier.QK)) == 0:
            q_scaled = Int32(1)
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores before those of TMA
            cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=THREADS)
            if warp_idx == 0:
                start_q(smem, q.atom, q.tensor, work, WIDE, unrolled=True)
            self.edge.wait(smem, loads)
            loads += 1
            self.convert_by_powers(smem, tid)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=THREADS)
        return q_scaled, loads

    def chunk(self, smem, tid: Int32, j: Int32, c: Int32) -> QChunk:
        """Returns chunk c of 16 in the j-th of the two quant tiles that a thread converts."""
        row, quant_tile = tid % WIDE, tid // WIDE * (QUANT_TILES // 2) + j
        start = (
            (quant_tile * (QUANT_TILE // BLOCK_COLUMNS) + c // 8) * BLOCK
            + row * BLOCK_COLUMNS
            + ((c % 8) ^ (row % 8)) * 8
        )
        pointer = smem.q.data_ptr() + cute.assume(start, divby=8)
        eight = cute.make_layout(8)
        return QChunk(
            cute.make_tensor(pointer, eight), cute.make_tensor(cute.recast_ptr(pointer, dtype=Float16), eight)
        )

    @cute.jit
    def convert(self, smem, tid: Int32) -> Int32:
        """Converts a thread's part of Q; returns 1 if float16 holds it."""
        fits = Int32(1)
        for j in cutlass.range(QUANT_TILES // 2, unroll=1):
            largest = cute.make_rmem_tensor(4, Int32)
            largest.fill(0)
            seen = Int32(0)
            for first in cutlass.range(0, QUANT_TILE // 8, CHUNKS, unroll=1):
                chunks = cute.make_rmem_tensor((8, CHUNKS), BFloat16)  # these loads are in flight together
                for i in cutlass.range_constexpr(CHUNKS):
                    source = self.chunk(smem, tid, j, first + i)
                    cute.autovec_copy(source.bf16, chunks[None, i])
                bf16_words = cute.recast_tensor(chunks, Int32)
                for i in cutlass.range_constexpr(CHUNKS):
                    target = self.chunk(smem, tid, j, first + i)
                    converted = cute.make_rmem_tensor(8, Float16)
                    converted.store(chunks[None, i].load().to(Float32).to(Float16))
                    words = cute.recast_tensor(converted, Int32)
                    for w in cutlass.range_constexpr(4):
                        largest[w] = max_magnitudes(largest[w], words[w])
                        seen |= bf16_words[w, i]
                    cute.autovec_copy(converted, target.fp16)
            pair = cute.make_rmem_tensor(1, Int32)
            pair[0] = max_magnitudes(max_magnitudes(largest[0], largest[1]), max_magnitudes(largest[2], largest[3]))
            magnitudes = cute.recast_tensor(pair, Float16)
            peak = cute.arch.fmax(magnitudes[0].to(Float32), magnitudes[1].to(Float32))
            if seen & 0x7FFF7FFF != 0 and (peak < MIN_PEAK or peak > MAX_PEAK):
                fits = Int32(0)
        return fits

    @cute.jit
    def convert_by_powers(self, smem, tid: Int32):
        """Multiplies each row of a quant tile by a power of two and converts it; stores the inverse powers."""
        sPower = cute.make_tensor(smem.q_power.data_ptr(), cute.make_layout((WIDE, QUANT_TILES)))
        eight, converted = cute.make_rmem_tensor(8, BFloat16), cute.make_rmem_tensor(8, Float16)
        for j in cutlass.range(QUANT_TILES // 2, unroll=1):
            peak = Float32(0.0)
            for c in cutlass.range(QUANT_TILE // 8, unroll=1):
                source = self.chunk(smem, tid, j, c)
                cute.autovec_copy(source.bf16, eight)
                for i in cutlass.range_constexpr(8):
                    number = eight[i].to(Float32)
                    peak = cute.arch.fmax(peak, cute.arch.fmax(number, -number))
            exponent = cutlass.min(cutlass.max(softmax.exponent(peak), -MAX_EXPONENT), MAX_EXPONENT)
            power = softmax.power_of_two(-exponent)
            for c in cutlass.range(QUANT_TILE // 8, unroll=1):
                chunk = self.chunk(smem, tid, j, c)
                cute.autovec_copy(chunk.bf16, eight)
                converted.store((eight.load().to(Float32) * power).to(Float16))
                cute.autovec_copy(converted, chunk.fp16)
            sPower[tid % WIDE, tid // WIDE * (QUANT_TILES // 2) + j] = softmax.power_of_two(exponent)
