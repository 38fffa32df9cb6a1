"""Q of a consumer warp: into shared memory as fragments of B, scaled into the range of float16, with constants."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.gqa.kernels.arguments import QueryBlock, Scales, Tensors
from cute_kernels.gqa.kernels.fragments import Thread
from cute_kernels.gqa.kernels.scales import load_scale
from cute_kernels.gqa.kernels.smem import DTYPES, O_SCALE, S_SCALE, SINK, column_constants
from cute_kernels.gqa.spec import GqaDecodeSpec

Q_EXPONENT = 14  # of the largest value of a row of Q in float16, whose largest exponent is 15


class LoadQ:
    """Device code that all consumer warps run at the start of a sequence."""

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.dtype = DTYPES[spec.k_operand]
        self.scale_dtype = DTYPES[spec.scale_dtype]

    @cute.jit
    def load(
        self,
        tensors: Tensors,
        k_scales: Scales,
        v_scales: Scales,
        sQ: cute.Pointer,
        constants: cute.Pointer,
        query: QueryBlock,
        thread: Thread,
    ):
        """Columns w, w + warps, ... of Q into shared memory, and the constants of these columns.

        All loads from global memory start together: a launch may find none of it in the L2 cache. Columns past the last
        row repeat it; nobody stores their results.
        """
        spec = self.spec
        w, lane, _ = thread
        b, kv_head, block, ratio, s_q = query
        rows = ratio.divisor * s_q
        pieces, lanes = max(spec.d // 128, 1), min(spec.d // 4, 32)
        rounds = const_expr(max(spec.columns // spec.warps, 1))
        words = cute.make_tensor(cute.recast_ptr(sQ, dtype=Int32), cute.make_layout(spec.columns * spec.d // 2))
        sConstants = column_constants(spec, constants)
        raw = cute.make_rmem_tensor((4, pieces, rounds), tensors.mQ.element_type)
        sink = cute.make_rmem_tensor(rounds, Float32)
        k_head_scale, v_head_scale = Float32(1.0), Float32(1.0)
        if const_expr(spec.k_scales == "head"):
            k_head_scale = load_scale(self.scale_dtype, k_scales.address, Int64(kv_head) * k_scales.head).to(Float32)
        if const_expr(spec.v_scales == "head"):
            v_head_scale = load_scale(self.scale_dtype, v_scales.address, Int64(kv_head) * v_scales.head).to(Float32)
        for i in cutlass.range_constexpr(rounds):
            row = cutlass.min(block * spec.columns + w + spec.warps * i, rows - 1)
            token, r = divmod(row, ratio)
            head = kv_head * ratio.divisor + r
            sink[i] = tensors.mSink[head]
            for p in cutlass.range_constexpr(pieces):
                pointer = tensors.mQ[b, token, head, None].iterator + cute.assume(4 * (lane % lanes) + 128 * p, divby=4)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), raw[None, p, i])
        for i in cutlass.range_constexpr(rounds):
            n = w + spec.warps * i
            values = raw[None, None, i].load().to(Float32)
            s_scale = k_head_scale
            if const_expr(spec.bytes_cache):
                largest = values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
                smallest = values.reduce(cute.ReductionOp.MIN, Float32(0.0), 0)
                largest = cute.arch.warp_reduction(cute.arch.fmax(largest, -smallest), cute.arch.fmax)
                exponent = cutlass.max((largest.bitcast(Int32) >> 23) & 0xFF, Q_EXPONENT + 1)
                values = values * ((254 + Q_EXPONENT - exponent) << 23).bitcast(Float32)
                s_scale *= ((exponent - Q_EXPONENT) << 23).bitcast(Float32)
            rounded = cute.make_rmem_tensor((4, pieces), self.dtype)
            rounded.store(values.to(self.dtype))
            if n < spec.columns:
                if lane == 0:
                    sConstants[n, S_SCALE] = s_scale
                    sConstants[n, SINK] = sink[i]
                    sConstants[n, O_SCALE] = v_head_scale
                if lane < lanes:
                    for p in cutlass.range_constexpr(pieces):
                        self._store(words, rounded[None, p], n, 4 * (lane % lanes) + 128 * p)

    @cute.jit
    def _store(self, words: cute.Tensor, four: cute.Tensor, n: Int32, d: Int32):
        """Four neighbours of a row of Q: the words of column n where `QK.scores` reads them."""
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
