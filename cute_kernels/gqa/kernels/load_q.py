"""Q of a consumer warp: stored to shared memory as fragments of B, scaled into float16's range, with constants."""

import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.gqa.codes import element
from cute_kernels.gqa.kernels import rotation
from cute_kernels.gqa.kernels.arguments import Call, QueryBlock
from cute_kernels.gqa.kernels.fragments import Thread
from cute_kernels.gqa.kernels.scales import load_scale
from cute_kernels.gqa.kernels.smem import O_SCALE, S_SCALE, SINK, column_constants, q_sums
from cute_kernels.gqa.spec import GqaDecodeSpec

Q_EXPONENT = 14  # exponent of the largest value of a row of Q in float16, whose largest exponent is 15


class QueryRows(NamedTuple):
    """A thread's part of a block of query rows, in registers, on its way to shared memory.

    raw      4 neighbours of a row of Q, for each 128 columns and each round
    sink     sink of the row of each round
    k_scale  scale of K of the head; 1 if scales are finer, 1 / d if K and Q are rotated, since H H is d
    v_scale  scale of V of the head; likewise
    """

    raw: cute.Tensor
    sink: cute.Tensor
    k_scale: cute.Tensor
    v_scale: cute.Tensor


class LoadQ:
    """Device code that all consumer warps run for each sequence.

    A sequence of 512 tokens is read in 4 us, and a load that misses the L2 cache waits for 1 to 2 us in the queue of
    the memory. So `fetch` starts the loads of a sequence before the key tiles of the previous sequence.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.dtype = element(spec.k_operand)
        self.scale_dtype = element(spec.scale_dtype)
        self.pieces = max(spec.d // 128, 1)
        self.lanes = min(spec.d // 4, 32)
        self.rounds = max(spec.columns // spec.warps, 1)
        # a rotation makes numbers up to d times as large
        self.exponent = Q_EXPONENT - (spec.d.bit_length() - 1 if spec.k_rotated else 0)

    def registers(self) -> QueryRows:
        """Makes the registers for `fetch`."""
        raw = cute.make_rmem_tensor((4, self.pieces, self.rounds), element(self.spec.q_dtype))
        sink = cute.make_rmem_tensor(self.rounds, Float32)
        k_scale, v_scale = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        k_scale.fill(1.0 / self.spec.d if self.spec.k_rotated else 1.0)
        v_scale.fill(1.0 / self.spec.d if self.spec.rotated else 1.0)
        return QueryRows(raw, sink, k_scale, v_scale)

    @cute.jit
    def fetch(self, rows: QueryRows, call: Call, query: QueryBlock, thread: Thread):
        """Starts loading columns w, w + warps, ... of Q, and the sinks and scales that belong to them.

        Columns past the last row repeat it; nobody stores their results.
        """
        spec = self.spec
        w, lane = thread.warp, thread.lane
        b, kv_head, block, ratio, s_q = query
        k_scales, v_scales = call.k_scales, call.v_scales
        if const_expr(spec.k_scales == "per_head"):
            rows.k_scale[0] = load_scale(self.scale_dtype, k_scales.address, Int64(kv_head) * k_scales.head).to(Float32)
        if const_expr(spec.v_scales == "per_head"):
            rows.v_scale[0] = load_scale(self.scale_dtype, v_scales.address, Int64(kv_head) * v_scales.head).to(Float32)
        for i in cutlass.range_constexpr(self.rounds):
            row = cutlass.min(block * spec.columns + w + spec.warps * i, ratio.divisor * s_q - 1)
            token, r = divmod(row, ratio)
            head = kv_head * ratio.divisor + r
            rows.sink[i] = call.tensors.mSink[head]
            for p in cutlass.range_constexpr(self.pieces):
                four = cute.assume(4 * (lane % self.lanes) + 128 * p, divby=4)
                pointer = call.tensors.mQ[b, token, head, None].iterator + four
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), rows.raw[None, p, i])

    @cute.jit
    def store(self, rows: QueryRows, sQ: cute.Pointer, constants: cute.Pointer, thread: Thread):
        """Stores what `fetch` has loaded into shared memory: Q as fragments of B, and the constants of its columns."""
        spec, lanes = self.spec, self.lanes
        w, lane = thread.warp, thread.lane
        words = cute.make_tensor(cute.recast_ptr(sQ, dtype=Int32), cute.make_layout(spec.columns * spec.d // 2))
        sConstants, sSums = column_constants(spec, constants), q_sums(spec, sQ)
        for i in cutlass.range_constexpr(self.rounds):
            n = w + spec.warps * i
            values = rows.raw[None, None, i].load().to(Float32)
            s_scale = rows.k_scale[0]
            if const_expr(spec.bytes_cache):
                largest = values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
                smallest = values.reduce(cute.ReductionOp.MIN, Float32(0.0), 0)
                largest = cute.arch.warp_reduction(cute.arch.fmax(largest, -smallest), cute.arch.fmax)
                exponent = cutlass.max((largest.bitcast(Int32) >> 23) & 0xFF, self.exponent + 1)
                values = values * ((254 + self.exponent - exponent) << 23).bitcast(Float32)
                s_scale *= ((exponent - self.exponent) << 23).bitcast(Float32)
            q_sum = Float32(0.0)
            if const_expr(spec.k_rotated):
                rotated = cute.make_rmem_tensor((4, self.pieces), Float32)
                rotated.store(values)
                self._rotate(rotated, lane)
                values = rotated.load()
                q_sum = values.reduce(cute.ReductionOp.ADD, q_sum, 0)
                q_sum = cute.arch.warp_reduction(q_sum, operator.add, threads_in_group=lanes)
            terms = [cute.make_rmem_tensor((4, self.pieces), self.dtype) for _ in range(spec.q_terms)]
            terms[0].store(values.to(self.dtype))
            if const_expr(spec.q_terms == 2):
                terms[1].store((values - terms[0].load().to(Float32)).to(self.dtype))
            if n < spec.columns:
                if lane == 0:
                    sConstants[n, S_SCALE] = s_scale
                    sConstants[n, SINK] = rows.sink[i]
                    sConstants[n, O_SCALE] = rows.v_scale[0]
                    if const_expr(spec.k_rotated):
                        sSums[n] = q_sum
                if lane < lanes:
                    for p in cutlass.range_constexpr(self.pieces):
                        if const_expr(spec.k_rotated):
                            for term in cutlass.range_constexpr(spec.q_terms):
                                target = sQ + term * const_expr(spec.columns * spec.d)
                                self._store_rotated(target, terms[term][None, p], n, 4 * (lane % lanes) + 128 * p)
                        else:
                            self._store(words, terms[0][None, p], n, 4 * (lane % lanes) + 128 * p)

    @cute.jit
    def _rotate(self, rows: cute.Tensor, lane: Int32):
        """Multiplies a row of Q by H D; lanes have its pieces of each 128."""
        vector = lane % self.lanes
        for p in cutlass.range_constexpr(self.pieces):
            rotation.flip_signs(rows[None, p], vector + 32 * p, self.spec.d)
            rotation.hadamard(rows[None, p], vector, self.lanes)
        if const_expr(self.pieces == 2):
            for c in cutlass.range_constexpr(4):
                low, high = rows[c, 0], rows[c, 1]
                rows[c, 0], rows[c, 1] = low + high, low - high

    @cute.jit
    def _store_rotated(self, sQ: cute.Pointer, four: cute.Tensor, n: Int32, d: Int32):
        """Stores four neighbours of a row of Q where `QK.scores` meets codes in the order of `codes.Uint4`.

        Elements 8 t to 8 t + 3 of 32 are the low halves of a lane's four words, the next four the high ones.
        """
        numbers = cute.make_tensor(sQ, cute.make_layout(self.spec.columns * self.spec.d))
        block, t, half = d // 32, d % 32 // 8, d % 8 // 4
        base = ((n // 8) * (self.spec.d // 32) + block) * 128 + (n % 8) * 16 + 4 * t
        for i in cutlass.range_constexpr(4):
            numbers[2 * (base + i) + half] = four[i]

    @cute.jit
    def _store(self, words: cute.Tensor, four: cute.Tensor, n: Int32, d: Int32):
        """Stores four neighbours of a row of Q: the words of column n where `QK.scores` reads them."""
        step, t = d // 16, d % 16 // 4
        base = ((n // 8) * (self.spec.d // 32) + step // 2) * 128 + (n % 8) * 16 + 2 * (step % 2)
        w = cute.recast_tensor(four, Int32)
        if const_expr(self.spec.bytes_cache):  # the order of `device.operands`: even ones, then odd ones
            words[base + 4 * t] = Int32(cute.arch.prmt(w[0], w[1], Int32(0x5410)))
            words[base + 4 * t + 1] = Int32(cute.arch.prmt(w[0], w[1], Int32(0x7632)))
        else:
            first = base + 8 * (t % 2) + t // 2
            words[first] = w[0]
            words[first + 4] = w[1]
