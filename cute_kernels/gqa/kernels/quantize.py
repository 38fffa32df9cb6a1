"""Quantization of pieces of 16 values to INT8, in registers: the rule of `gqa.reference.quantize`, bit for bit."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from cute_kernels.gqa.append_spec import GIVEN, VALUES, KvAppendSpec
from cute_kernels.gqa.codes import element

LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0}  # 0x7F7F, 0x7BFF
MIN_SCALE = {"float16": 2.0**-14, "float32": 2.0**-126}
CODE_MAX = 127.0
FAR = 2.0**64  # dividing by a scale above it, or below its inverse, takes another power of two


class Quantizer:
    """Device code for one lane.

    The codes equal an IEEE division x / scale, rounded half to even; it takes three instructions a value (`_divide`).
    With a computed scale a value takes 13 instructions.
    """

    def __init__(self, spec: KvAppendSpec) -> None:
        self.spec = spec
        self.dtype = element(spec.dtype)
        self.ptx_type = "bf16x2" if spec.dtype == "bfloat16" else "f16x2"

    @cute.jit
    def absmax(self, rX: cute.Tensor) -> Float32:
        """Returns the largest magnitude of a piece, ignoring NaN."""
        kind = const_expr(self.ptx_type)
        words = cute.recast_tensor(rX, Int32)
        packed = cute.arch.inline_ptx(
            "abs." + kind + " {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[words[0]]
        )
        for i in cutlass.range_constexpr(1, VALUES // 2):
            packed = cute.arch.inline_ptx(
                "{\n.reg .b32 t;\nabs." + kind + " t, {$r0};\nmax." + kind + " {$w0}, t, {$r1};\n}",
                write_only_types=[Int32],
                read_only_args=[words[i], packed],
            )
        pair = cute.make_rmem_tensor((2,), self.dtype)
        cute.recast_tensor(pair, Int32)[0] = packed
        both = pair.load().to(Float32)
        return cute.arch.fmax(cute.arch.fmax(both[0], both[1]), 0.0)  # 0 if all are NaN

    @cute.jit
    def scale(self, absmax: Float32) -> Float32:
        """Returns the stored scale, as float32."""
        spec = self.spec
        absmax = cute.arch.fmin(absmax, LARGEST[spec.dtype])  # an Inf counts as the largest finite value
        scale = self._divide(absmax, Float32(CODE_MAX), Float32(1.0 / CODE_MAX))
        scale = cute.arch.fmax(scale, MIN_SCALE[spec.scale_dtype])
        scale = cutlass.select_(absmax == 0.0, Float32(1.0), scale)
        if const_expr(spec.scale_dtype == "float16"):
            scale = Float32(Float16(cute.arch.fmin(scale, LARGEST["float16"])))
        return scale

    @cute.jit
    def codes(self, rX: cute.Tensor, absmax: Float32, scale: Float32, kind: str) -> cute.Tensor:
        """Returns 16 codes in 4 words.

        A value that overflows or underflows in the division is clamped, or multiplied by a power of two together with
        its scale. With a computed scale that is rare and happens in the packed values; a given scale may be anything.
        """
        spec = self.spec
        bound, power = Float32(LARGEST[spec.dtype]), Float32(1.0)
        if const_expr(kind == GIVEN or (spec.dtype == "bfloat16" and spec.scale_dtype == "float32")):
            size = abs(scale)
            bound = cute.arch.fmin(CODE_MAX * size, bound)
            power = cutlass.select_(size > FAR, Float32(1.0 / FAR), power)
            power = cutlass.select_(size < 1.0 / FAR, Float32(FAR), power)
            scale = scale * power
            if const_expr(kind != GIVEN):
                if power != 1.0:  # also if there is an Inf
                    self._packed(rX, "min.NaN", 0x7F7F)
                    self._packed(rX, "max.NaN", 0xFF7F)
                    if power > 1.0:
                        self._packed(rX, "mul.rn", 0x5F80)
                    else:
                        self._packed(rX, "mul.rn", 0x1F80)
        else:
            # only Inf is beyond 127 scales, or a value with the largest scale of float16: 127 * 65536 in bfloat16
            most = const_expr(0x7BFF if spec.dtype == "float16" else 0x4AFE)
            if absmax > const_expr(LARGEST["float16"] if spec.dtype == "float16" else CODE_MAX * 65536):
                self._packed(rX, "min.NaN", most)
                self._packed(rX, "max.NaN", most | 0x8000)
        inverse = Float32(1.0) / scale
        values = rX.load().to(Float32)
        codes = cute.make_rmem_tensor((VALUES // 4,), Int32)
        for word in cutlass.range_constexpr(VALUES // 4):
            quotients = []
            for i in cutlass.range_constexpr(4 * word, 4 * word + 4):
                x = values[i]
                if const_expr(kind == GIVEN):
                    x = cute.arch.fmin(cute.arch.fmax(x, -bound, nan=True), bound, nan=True) * power
                quotients.append(self._divide(x, scale, inverse))
            # rounds half to even, NaN becomes 0; two conversions and a packing are one instruction
            codes[word] = cute.arch.inline_ptx(
                "{\n.reg .s32 a, b, c, d;\n.reg .b32 t;\n"
                "cvt.rni.s32.f32 a, {$r0};\ncvt.rni.s32.f32 b, {$r1};\n"
                "cvt.rni.s32.f32 c, {$r2};\ncvt.rni.s32.f32 d, {$r3};\n"
                "cvt.pack.sat.s8.s32.b32 t, d, c, 0;\ncvt.pack.sat.s8.s32.b32 {$w0}, b, a, t;\n}",
                write_only_types=[Int32],
                read_only_args=quotients,
            )
        return codes

    @cute.jit
    def _packed(self, rX: cute.Tensor, operation: str, constant: int):
        """Applies operation(value, constant) to each value; the constant has the bits of a number of the same type."""
        kind, bits = const_expr(self.ptx_type), const_expr(hex(constant << 16 | constant))
        words = cute.recast_tensor(rX, Int32)
        for i in cutlass.range_constexpr(VALUES // 2):
            words[i] = cute.arch.inline_ptx(
                "{\n.reg .b32 t;\nmov.b32 t, " + bits + ";\n" + operation + "." + kind + " {$w0}, {$r0}, t;\n}",
                write_only_types=[Int32],
                read_only_args=[words[i]],
            )

    @cute.jit
    def _divide(self, x: Float32, scale: Float32, inverse: Float32) -> Float32:
        """Returns the quotient of x and scale, given RN(1 / scale).

        The product with the inverse is off by less than 2 units in the last place; its remainder, which an FMA gives,
        corrects it. For every x of 11 significant bits the result rounds to the same integer as the IEEE quotient:
        tests/cpu/test_gqa_append.py tries all pairs that are near a tie, and all others are far enough from one.
        """
        quotient = x * inverse
        rest = self._fma(-scale, quotient, x)
        return self._fma(rest, inverse, quotient)

    @cute.jit
    def _fma(self, a: Float32, b: Float32, c: Float32) -> Float32:
        return cute.arch.inline_ptx(
            "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
        )
