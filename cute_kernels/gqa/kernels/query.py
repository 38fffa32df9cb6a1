"""Q of GQA decoding: from global memory into fragments of B in shared memory, with the terms of its rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.gqa.kernels.arguments import RowBlock, ScaleSource, Tensors
from cute_kernels.gqa.kernels.fragments import Fragments
from cute_kernels.gqa.kernels.scales import load_scale
from cute_kernels.gqa.kernels.smem import OUT_FACTOR, QK_FACTOR, SINK, row_terms_tensor

Q_EXPONENT = 14  # of the largest value of a row of Q in float16, whose largest is 15


class QueryLoader(Fragments):
    """Device code for all consumer warps: warp w has the query rows w, w + warps, ... of a block."""

    @cute.jit
    def load(
        self,
        tensors: Tensors,
        sQ: cute.Pointer,
        row_terms: cute.Pointer,
        k_scale: ScaleSource,
        v_scale: ScaleSource,
        rows: RowBlock,
        s_q: Int32,
        w: Int32,
        lane: Int32,
    ):
        """Stores the warp's query rows as fragments of B, and the terms of these rows.

        All that comes from global memory is asked for at once: a launch may find none of it in the L2 cache. Rows past
        the last one repeat it; nobody stores their results.
        """
        spec = self.spec
        b, kv_head, block, ratio = rows
        num_rows = ratio.divisor * s_q
        pieces, lanes = max(spec.d // 128, 1), min(spec.d // 4, 32)
        turns = const_expr(max(spec.columns // spec.warps, 1))
        words = cute.make_tensor(cute.recast_ptr(sQ, dtype=Int32), cute.make_layout(spec.columns * spec.d // 2))
        sTerms = row_terms_tensor(spec, row_terms)
        raw = cute.make_rmem_tensor((4, pieces, turns), tensors.q.element_type)
        sink = cute.make_rmem_tensor(turns, Float32)
        k_factor, v_factor = Float32(1.0), Float32(1.0)
        if const_expr(spec.k_scales == "head"):
            k_factor = load_scale(self.scale_dtype, k_scale.address, Int64(kv_head) * k_scale.head).to(Float32)
        if const_expr(spec.v_scales == "head"):
            v_factor = load_scale(self.scale_dtype, v_scale.address, Int64(kv_head) * v_scale.head).to(Float32)
        for turn in cutlass.range_constexpr(turns):
            row = cutlass.min(block * spec.columns + w + spec.warps * turn, num_rows - 1)
            token, r = divmod(row, ratio)
            head = kv_head * ratio.divisor + r
            sink[turn] = tensors.sink[head]
            for p in cutlass.range_constexpr(pieces):
                pointer = tensors.q[b, token, head, None].iterator + cute.assume(4 * (lane % lanes) + 128 * p, divby=4)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), raw[None, p, turn])
        for turn in cutlass.range_constexpr(turns):
            n = w + spec.warps * turn
            values = raw[None, None, turn].load().to(Float32)
            factor = k_factor
            if const_expr(spec.bytes_cache):
                largest = values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
                smallest = values.reduce(cute.ReductionOp.MIN, Float32(0.0), 0)
                largest = cute.arch.warp_reduction(cute.arch.fmax(largest, -smallest), cute.arch.fmax)
                exponent = cutlass.max((largest.bitcast(Int32) >> 23) & 0xFF, Q_EXPONENT + 1)
                values = values * ((254 + Q_EXPONENT - exponent) << 23).bitcast(Float32)
                factor *= ((exponent - Q_EXPONENT) << 23).bitcast(Float32)
            rounded = cute.make_rmem_tensor((4, pieces), self.k_dtype)
            rounded.store(values.to(self.k_dtype))
            if n < spec.columns:
                if lane == 0:
                    sTerms[n, QK_FACTOR] = factor
                    sTerms[n, SINK] = sink[turn]
                    sTerms[n, OUT_FACTOR] = v_factor
                if lane < lanes:
                    for p in cutlass.range_constexpr(pieces):
                        self.store(words, rounded[None, p], n, 4 * (lane % lanes) + 128 * p)

    @cute.jit
    def store(self, words: cute.Tensor, four: cute.Tensor, n: Int32, d: Int32):
        """Stores four neighbours of query row n where `ScoreMma` reads its fragments of B."""
        step, t = d // 16, d % 16 // 4
        base = ((n // 8) * (self.spec.d // 32) + step // 2) * 128 + (n % 8) * 16 + 2 * (step % 2)
        w = cute.recast_tensor(four, Int32)
        if const_expr(self.spec.bytes_cache):  # the order of `device.operands`: even ones, odd ones
            words[base + 4 * t] = Int32(cute.arch.prmt(w[0], w[1], Int32(0x5410)))
            words[base + 4 * t + 1] = Int32(cute.arch.prmt(w[0], w[1], Int32(0x7632)))
        else:
            first = base + 8 * (t % 2) + t // 2
            words[first] = w[0]
            words[first + 4] = w[1]
