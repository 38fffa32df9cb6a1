"""Codes and scales as float16 numbers, exactly: in registers, two at a time.

A key is code x scale x WEIGHT. float16 holds that for any code where the scale is in range, and the products then need
nothing between them. One conversion makes two numbers of two e4m3 codes; four e2m1 codes are four bytes of a table.

    scale        in range                              that is
    ue8m0        bytes 105 to 126, 2^-22 to 1/2        as small as quantizers write; values up to 224
    e4m3 (fp4)   magnitudes up to 40                   values up to 240

Other scales, NaN among them, take slow paths in float32 and bfloat16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr

from fp8_mla.formats import TokenFormat

WEIGHT = 2.0**8
WEIGHTS = 0x5C005C00  # as two float16 numbers
MIN_BYTE, MAX_BYTE = 105, 126  # ue8m0 scales in range
MAX_FP4_BYTE = 0x62  # the largest e4m3 scale in range, 40
MASKED_FLOAT = (127 - 6) << 23  # MASKED_SCALE of mla.spec, as bits
SMALL_BYTE = 113  # WEIGHT times a smaller ue8m0 scale and a code may be no normal float16 number
NAN_BYTE = 255  # the ue8m0 byte that means NaN
MULTIPLIER = -(104 << 10) * 0x00010001 % 2**32  # exponent field of WEIGHT times a ue8m0 scale, less the byte; twice
LOW_VALUES, HIGH_VALUES = 0x3E3C3800, 0x46444240  # upper bytes of the float16 numbers 0, 0.5, 1, 1.5; 2, 3, 4, 6
TOP_BITS = -0x7F7F7F80  # 0x80808080


def is_fp4(kind: TokenFormat) -> bool:
    """Whether codes are e2m1 and scales e4m3."""
    return kind.codes.bits == 4


def masked_scales(kind: TokenFormat) -> int:
    """A word of scales in range, for a masked key, whose codes are zeros."""
    if kind.scales.dtype == "float32":
        return MASKED_FLOAT
    return 0x38383838 if is_fp4(kind) else 0x76767676


@cute.jit
def multiply(a: Int32, b: Int32) -> Int32:
    """Products of two pairs of float16."""
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def weigh(a: Int32) -> Int32:
    """WEIGHT times a pair of float16. `mul` takes registers alone."""
    return cute.arch.inline_ptx(
        f"{{\n.reg .b32 t;\nmov.b32 t, {WEIGHTS};\nmul.rn.f16x2 {{$w0}}, {{$r0}}, t;\n}}",
        write_only_types=[Int32],
        read_only_args=[a],
    )


# ---- e2m1


def fp4_bytes(nibbles: Int32) -> Int32:
    """Upper bytes of the float16 numbers of the four codes in the lower half of a word; their lower bytes are 0."""
    magnitudes = Int32(cute.arch.prmt(Int32(LOW_VALUES), Int32(HIGH_VALUES), nibbles & 0x7777))
    return magnitudes | Int32(cute.arch.prmt(Int32(0), Int32(TOP_BITS), (nibbles >> 1) & 0x4444))


def fp4_pair(upper: Int32, first: int, second: int) -> Int32:
    """Two of the four numbers of `fp4_bytes`."""
    return Int32(cute.arch.prmt(upper, Int32(0), Int32(second << 12 | 4 << 8 | first << 4 | 4)))


# ---- scales


def byte_pair(word: Int32, byte) -> Int32:
    """A byte of a word as two 16-bit numbers."""
    return Int32(cute.arch.prmt(word, Int32(0), Int32(0x4040) + byte * 0x0101))


def e4m3_pairs(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 numbers as two pairs of float16."""
    numbers, wide = cute.make_rmem_tensor(4, Float8E4M3FN), cute.make_rmem_tensor(4, Float16)
    cute.recast_tensor(numbers, Int32)[0] = word
    wide.store(numbers.load().to(Float16))
    pairs = cute.recast_tensor(wide, Int32)
    return pairs[0], pairs[1]


def multiplier(kind: TokenFormat, word: Int32, byte) -> Int32:
    """WEIGHT times the scale in a byte of a word, in range, as two float16 numbers."""
    if not is_fp4(kind):
        return byte_pair(word, byte) * 1024 + MULTIPLIER
    return weigh(e4m3_pairs(Int32(cute.arch.prmt(word, Int32(0), byte * 0x1111)))[0])


def out_of_range(kind: TokenFormat, word: Int32) -> Int32:
    """Not 0 if one of the four scales of a word is out of range."""
    low = word & 0x7F7F7F7F
    if is_fp4(kind):
        return (low + 0x01010101 * (127 - MAX_FP4_BYTE)) & TOP_BITS
    above, not_below = low + 0x01010101 * (127 - MAX_BYTE), low + 0x01010101 * (128 - MIN_BYTE)
    return (above | word | (not_below ^ -1)) & TOP_BITS


def is_small(kind: TokenFormat, word: Int32) -> Int32:
    """Not 0 if one of the four scales of a word is so small that a sum of values as float16 needs a scale."""
    if is_fp4(kind):
        return Int32(0)  # the smallest value is 2^-10
    return ((word & 0x7F7F7F7F) + 0x01010101 * (128 - SMALL_BYTE) ^ -1) & TOP_BITS


@cute.jit
def scale_of(kind: cutlass.Constexpr, byte: Int32) -> Float32:
    """The scale that a byte means."""
    word, result = cute.make_rmem_tensor(1, Int32), Float32(0.0)
    if const_expr(is_fp4(kind)):
        numbers = cute.make_rmem_tensor(4, Float8E4M3FN)
        cute.recast_tensor(numbers, Int32)[0] = byte
        result = numbers.load().to(Float32)[0]
    else:
        bits = cutlass.select_(byte == 0, Int32(1 << 22), byte << 23)
        word[0] = Int32(cutlass.select_(byte == NAN_BYTE, Int32(0x7FFFFFFF), bits))
        result = cute.recast_tensor(word, Float32)[0]
    return result


# ---- rope parts


@cute.jit
def max_magnitudes(a: Int32, b: Int32) -> Int32:
    """The larger magnitudes of two pairs of bfloat16; `a` has no signs."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nabs.bf16x2 t, {$r1};\nmax.bf16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


@cute.jit
def weigh_bfloat16(word: Int32) -> Int32:
    """WEIGHT times a pair of bfloat16."""
    return cute.arch.inline_ptx(  # `mul` takes registers alone: 2^8, twice
        "{\n.reg .b32 t;\nmov.b32 t, 0x43804380;\nmul.rn.bf16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[word],
    )


@cute.jit
def rope_to_float16(word: Int32) -> Int32:
    """WEIGHT times a pair of bfloat16, as float16."""
    weighted = weigh_bfloat16(word)
    bits, pair = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Float16)
    bits[0], bits[1] = weighted << 16, weighted & -0x10000
    pair.store(cute.recast_tensor(bits, Float32).load().to(Float16))
    return cute.recast_tensor(pair, Int32)[0]


@cute.jit
def rope_to_bfloat16(word: Int32) -> Int32:
    """The inverse of `rope_to_float16`."""
    pair, numbers = cute.make_rmem_tensor(2, Float16), cute.make_rmem_tensor(2, BFloat16)
    cute.recast_tensor(pair, Int32)[0] = word
    numbers.store((pair.load().to(Float32) * (1.0 / WEIGHT)).to(BFloat16))
    return cute.recast_tensor(numbers, Int32)[0]


@cute.jit
def scale_to_bfloat16(pair: Int32, first: Float32, second: Float32) -> Int32:
    """A pair of float16 times a scale each, as bfloat16: exact for codes and their scales, within its range."""
    codes, numbers = cute.make_rmem_tensor(2, Float16), cute.make_rmem_tensor(2, BFloat16)
    cute.recast_tensor(codes, Int32)[0] = pair
    scaled = cute.make_rmem_tensor(2, Float32)
    scaled[0], scaled[1] = codes[0].to(Float32) * first, codes[1].to(Float32) * second
    numbers.store(scaled.load().to(BFloat16))
    return cute.recast_tensor(numbers, Int32)[0]
