"""Quantization of pieces of 16 values to e4m3, or to rotated 4-bit codes, in registers, bit for bit as
`gqa.reference.quantize_e4m3` and `quantize_rotated`.

Products and sums are single instructions in PTX, because the compiler may fuse separate ones into an FMA.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.gqa.append_spec import VALUES, KvAppendSpec
from cute_kernels.gqa.codes import E4M3_MAX, E4M3_MIN_SCALE, INT4_MAX, INT4_MIN_SCALE, ROTATED_MAX
from cute_kernels.gqa.kernels import rotation
from cute_kernels.gqa.kernels.quantize import LARGEST, Quantizer


class E4m3Quantizer(Quantizer):
    """Device code for one lane."""

    @cute.jit
    def scale(self, absmax: Float32) -> Float32:
        """Returns the stored scale."""
        absmax = cute.arch.fmin(absmax, LARGEST[self.spec.dtype])  # an Inf counts as the largest finite value
        return cute.arch.fmax(self._divide(absmax, Float32(E4M3_MAX), Float32(1.0 / E4M3_MAX)), E4M3_MIN_SCALE)

    @cute.jit
    def codes(self, rX: cute.Tensor, absmax: Float32, scale: Float32, kind: str) -> cute.Tensor:
        """Returns 16 codes in 4 words. The conversion clamps; an infinity is far beyond its limit."""
        inverse = Float32(1.0) / scale
        values = rX.load().to(Float32)
        codes = cute.make_rmem_tensor((VALUES // 4,), Int32)
        for word in cutlass.range_constexpr(VALUES // 4):
            quotients = [product(not_nan(values[4 * word + i]), inverse) for i in range(4)]
            codes[word] = cute.arch.inline_ptx(
                "{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
                "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\nmov.b32 {$w0}, {low, high};\n}",
                write_only_types=[Int32],
                read_only_args=quotients,
            )
        return codes


class RotatedQuantizer(Quantizer):
    """Device code for one lane; the lanes of a head hold its values, 16 each."""

    def __init__(self, spec: KvAppendSpec) -> None:
        super().__init__(spec)
        self.lanes = spec.d // VALUES

    @cute.jit
    def quantize(self, rX: cute.Tensor, part: Int32):
        """Returns (the lane's 16 codes in 2 words, the scale with its zero point) of piece `part` of a head."""
        y = self._rotated(rX, part)
        low, high = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(VALUES):
            low, high = cute.arch.fmin(low, y[i]), cute.arch.fmax(high, y[i])
        low = cute.arch.warp_reduction(low, cute.arch.fmin, threads_in_group=self.lanes)
        high = cute.arch.warp_reduction(high, cute.arch.fmax, threads_in_group=self.lanes)
        scale = self._divide(high - low, Float32(INT4_MAX), Float32(1.0 / INT4_MAX))
        scale = cute.arch.fmax(scale, INT4_MIN_SCALE)
        inverse = Float32(1.0) / scale
        zero_point = rounded_code(self._divide(-low, scale, inverse))
        shift = Float32(zero_point)
        codes = cute.make_rmem_tensor((VALUES // 8,), Int32)
        for word in cutlass.range_constexpr(VALUES // 8):
            codes[word] = 0
            for i in cutlass.range_constexpr(8):
                code = rounded_code(total(product(y[8 * word + i], inverse), shift))
                codes[word] = codes[word] | (code << 4 * i)
        return codes, ((scale.bitcast(Int32) & -16) | zero_point).bitcast(Float32)

    @cute.jit
    def _rotated(self, rX: cute.Tensor, part: Int32) -> cute.Tensor:
        """Returns H D x."""
        values = rX.load().to(Float32)
        y = cute.make_rmem_tensor((VALUES,), Float32)
        for i in cutlass.range_constexpr(VALUES):
            y[i] = cute.arch.fmin(cute.arch.fmax(not_nan(values[i]), -ROTATED_MAX), ROTATED_MAX)
        rotation.flip_signs(y, part, self.spec.d)
        rotation.hadamard(y, part, self.lanes)
        return y


@cute.jit
def not_nan(x: Float32) -> Float32:
    """Returns x, or 0 for NaN."""
    return cutlass.select_(x == x, x, Float32(0.0))


@cute.jit
def product(a: Float32, b: Float32) -> Float32:
    """Returns a b, rounded."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def total(a: Float32, b: Float32) -> Float32:
    """Returns a + b, rounded."""
    return cute.arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def rounded_code(x: Float32) -> Int32:
    """Rounds x half up to an integer from 0 to 15."""
    half_up = total(cute.arch.fmax(x, 0.0), Float32(0.5))
    code = cute.arch.inline_ptx("cvt.rzi.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[half_up])
    return cutlass.min(code, INT4_MAX)
