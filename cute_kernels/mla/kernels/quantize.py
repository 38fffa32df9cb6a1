"""Quantization of new tokens in the append kernels: the rules of `fp8_mla.pack`, bit for bit, in registers.

A lane has 16 neighbouring elements of a token. The largest magnitude of a quant tile takes no shared memory: the lanes
that share the tile shuffle. A tile of 16 elements belongs to one lane and needs no shuffle.
"""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint8

from fp8_mla.formats import E8M0_BIAS, FP4_MAX, FP8_MAX, MIN_FP4_SCALE, MIN_SCALE, MIN_SCALE_EXPONENT, TokenFormat

BF16_MAX = 3.3895313892515355e38  # 0x7F7F
BF16_INF = 0x7F80
VALUES_PER_LANE = 16
WORDS = VALUES_PER_LANE // 2  # pairs of bf16

LOP3_OR_AND = 0xF8  # a | (b & c)


def bf16_pair(low: float, high: float | None = None) -> int:
    """Returns the word of two bf16 numbers, or of one twice if only one is given."""
    words = [struct.unpack("<I", struct.pack("<f", x))[0] for x in (low, low if high is None else high)]
    if any(word & 0xFFFF for word in words):
        raise ValueError(f"got {low} and {high}; needs numbers that bf16 holds")
    return words[0] >> 16 | words[1]


def packed(operation: str, *operands: Int32 | int, magnitudes: tuple[int, ...] = ()) -> Int32:
    """Applies `operation` to bf16 pairs, registers or words of constants; `magnitudes` lists those without signs."""
    setup = ""
    names: list[str] = []
    registers: list[Int32] = []
    for i, operand in enumerate(operands):
        name = "{$r" + str(len(registers)) + "}"
        if isinstance(operand, int):
            setup += ".reg .b32 c" + str(i) + ";\nmov.b32 c" + str(i) + ", " + hex(operand) + ";\n"
            name = "c" + str(i)
        else:
            registers.append(operand)
        if i in magnitudes:
            setup += ".reg .b32 m" + str(i) + ";\nabs.bf16x2 m" + str(i) + ", " + name + ";\n"
            name = "m" + str(i)
        names.append(name)
    code = "{\n" + setup + operation + " {$w0}, " + ", ".join(names) + ";\n}"
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=registers)


@cute.jit
def largest_bits(words: cute.Tensor, smallest: cutlass.Constexpr, nan: cutlass.Constexpr) -> Int32:
    """Returns the bits of the largest magnitude in 8 bf16 pairs, `smallest` (bits of a pair) at least.

    A NaN is the largest (0x7FFF) if `nan` is true, else it does not count. Bits of magnitudes have the order of the
    numbers.
    """
    operation = "max.NaN.bf16x2" if nan else "max.bf16x2"
    both = packed(operation, words[0], smallest, magnitudes=(0,))
    for i in cutlass.range_constexpr(1, WORDS):
        both = packed(operation, words[i], both, magnitudes=(0,))
    return cutlass.max(both & 0xFFFF, both >> 16)


@cute.jit
def _e4m3(values: cute.TensorSSA) -> cute.Tensor:
    """Converts 16 float32 values to codes as bytes: nearest even, saturating, 0x7F for NaN."""
    codes = cute.make_rmem_tensor((VALUES_PER_LANE,), Float8E4M3FN)
    codes.store(values.to(Float8E4M3FN).reshape((VALUES_PER_LANE,)))
    return cute.recast_tensor(codes, Uint8)


@cute.jit
def quantize_float32(latent: cute.Tensor, lanes: cutlass.Constexpr):
    """Quantizes 16 bf16 values of a quant tile of `lanes` lanes to (16 e4m3 codes as bytes, the float32 scale)."""
    values = latent.load().to(Float32)
    magnitudes = abs(values)
    absmax = Float32(0.0)
    for i in cutlass.range_constexpr(VALUES_PER_LANE):
        absmax = cute.arch.fmax(absmax, magnitudes[i])  # this ignores NaN
    absmax = cute.arch.warp_reduction(absmax, cute.arch.fmax, threads_in_group=lanes)
    absmax = cute.arch.fmin(absmax, BF16_MAX)  # an Inf counts as the largest finite value
    # IEEE divisions: approximations differ from the oracle in the last bit now and then
    scale = cute.arch.fmax(absmax / Float32(FP8_MAX), MIN_SCALE)
    scale = cutlass.select_(absmax == 0.0, Float32(1.0), scale)
    inverse = Float32(1.0) / scale
    return _e4m3(values * inverse), scale


@cute.jit
def quantize_ue8m0(latent: cute.Tensor, lanes: cutlass.Constexpr):
    """Quantizes 16 bf16 values of a quant tile of `lanes` lanes to (16 e4m3 codes as bytes, the ue8m0 scale).

    448 is 1.75 x 2^8, so the exponent of the scale is the largest magnitude's less 8, and one more if its fraction is
    above 0.75, 0x60 of 0x80. An Inf gives the scale of the largest finite value. Products with a power of two are
    exact, except for those that are so small that they become 0.
    """
    largest = largest_bits(cute.recast_tensor(latent, Int32), 0, False)
    largest = cute.arch.warp_reduction(largest, cutlass.max, threads_in_group=lanes)
    scale = cutlass.max(((largest + 0x1F) >> 7) - 8, MIN_SCALE_EXPONENT + E8M0_BIAS)
    inverse = ((2 * E8M0_BIAS - scale) << 23).bitcast(Float32)
    return _e4m3(latent.load().to(Float32) * inverse), scale


@cute.jit
def quantize_e2m1(latent: cute.Tensor):
    """Quantizes 16 bf16 values, a quant tile, to (16 e2m1 codes in two words, the e4m3 scale).

    No value is divided. The lower bound of a code is a product of the scale, 4 significant bits, and 0.25 to 5, 3 bits:
    bf16 holds it, so comparing |x| with it decides as comparing the exact quotient does. Three comparisons find the
    three bits of a magnitude, for two elements at a time:

        b2: |x| >= 1.75         b1: |x| >= 0.75 + 2.75 b2         b0: |x| > 0.25 + 2.25 b2 + (1 + 1.5 b2) b1

    (times the scale; a tie goes to the even code: >= below an even code, > below an odd one). The sum 128 + 4 b2 +
    2 b1 + b0 has the code in the last bits of a bf16 number; that of the odd element is 16 times as large, which moves
    it to the high nibble.
    """
    words = cute.recast_tensor(latent, Int32)
    largest = largest_bits(words, bf16_pair(FP4_MAX * MIN_FP4_SCALE), True)
    is_finite = largest < BF16_INF
    # the product rounds where the quotient rounds: a tie is exact in both, anything else is 2^-15 away from a tie
    ratio = (largest << 16).bitcast(Float32) * Float32(1.0 / FP4_MAX)
    ratio = cutlass.select_(is_finite, ratio, Float32.nan)
    scale, s100 = cute.arch.inline_ptx(
        "{\n.reg .b16 code, half, other;\n.reg .b32 both;\n.reg .f32 wide;\n"
        "cvt.rn.satfinite.e4m3x2.f32 code, {$r0}, {$r0};\n"
        "cvt.u32.u16 {$w0}, code;\n"
        "cvt.rn.f16x2.e4m3x2 both, code;\n"
        "mov.b32 {half, other}, both;\n"
        "cvt.f32.f16 wide, half;\n"
        "cvt.rn.bf16x2.f32 {$w1}, wide, wide;\n}",
        write_only_types=[Int32, Int32],
        read_only_args=[ratio],
    )
    multiples = (0.25, 0.75, 1.5, 1.75, 2.25, 2.75)
    s025, s075, s150, s175, s225, s275 = (packed("mul.rn.bf16x2", s100, bf16_pair(x)) for x in multiples)
    at_least, above, fma = "set.ge.bf16x2.bf16x2", "set.gt.bf16x2.bf16x2", "fma.rn.bf16x2"
    bytes_of = cute.make_rmem_tensor((WORDS,), Int32)
    for i in cutlass.range_constexpr(WORDS):
        x = words[i]
        b2 = packed(at_least, x, s175, magnitudes=(0,))
        b1 = packed(at_least, x, packed(fma, b2, s275, s075), magnitudes=(0,))
        limit = packed(fma, b1, packed(fma, b2, s150, s100), packed(fma, b2, s225, s025))
        b0 = packed(above, x, limit, magnitudes=(0,))
        code = packed(fma, b0, bf16_pair(1.0, 16.0), bf16_pair(128.0))
        code = packed(fma, b1, bf16_pair(2.0, 32.0), code)
        bytes_of[i] = packed(fma, b2, bf16_pair(4.0, 64.0), code)
    codes = cute.make_rmem_tensor((2,), Int32)
    for half in cutlass.range_constexpr(2):
        pairs = cute.make_rmem_tensor((2,), Int32)
        for i in cutlass.range_constexpr(2):
            w = 4 * half + 2 * i
            # the low bytes of both words, then their third bytes; the same bytes of `signs` are all ones where x < 0
            low = Int32(cute.arch.prmt(bytes_of[w], bytes_of[w + 1], 0x6240))
            signs = Int32(cute.arch.prmt(words[w], words[w + 1], 0xFBD9))
            pairs[i] = cute.arch.lop3(low, signs, Int32(0x80800808 - 2**32), LOP3_OR_AND)
        even = Int32(cute.arch.prmt(pairs[0], pairs[1], 0x5410))
        odd = Int32(cute.arch.prmt(pairs[0], pairs[1], 0x7632))
        codes[half] = cutlass.select_(is_finite, even | odd, Int32(0))
    return codes, scale & 0xFF


def quantize(token_format: TokenFormat, latent: cute.Tensor):
    """Quantizes 16 bf16 values of a lane for a format; returns (their codes, the scale of their quant tile).

    Raises:
        ValueError: no rule exists for the format's codes and scales.
    """
    types, lanes = (token_format.codes.dtype, token_format.scales.dtype), token_format.quant_tile // VALUES_PER_LANE
    if types == ("float8_e4m3fn", "float32"):
        return quantize_float32(latent, lanes)
    if types == ("float8_e4m3fn", "float8_e8m0fnu"):
        return quantize_ue8m0(latent, lanes)
    if types == ("float4_e2m1fn_x2", "float8_e4m3fn"):
        return quantize_e2m1(latent)
    raise ValueError(f"codes and scales: got {types} of {token_format.name}; needs types that have a rule")
