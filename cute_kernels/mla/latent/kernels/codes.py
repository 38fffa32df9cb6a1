"""e4m3 codes and ue8m0 scales as 16-bit numbers, exactly: in registers, two at a time.

A scale byte e means 2^(e - 127).

*float16*, the fast way: one conversion makes two numbers of two codes, and code x 2^8 scale is exact in float16 for
bytes 105 to 126, that is for tiles whose largest value is up to 224. 105 is the smallest byte that quantizers write.

*bfloat16*, for any scale: moved four bits right, below its sign, the upper byte of a 16-bit word with a code becomes a
bfloat16 number that is 2^120 too small, subnormal codes included. Two multiplications by powers of two bring it to code
x scale, which has 4 significant bits: bfloat16 holds it for bytes 3 to 246. A NaN code becomes 480 instead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

WEIGHT = 2.0**8  # of float16 keys
MIN_BYTE, MAX_BYTE = 105, 126  # scale bytes for which float16 holds any code times WEIGHT times the scale
NAN_BYTE = 255  # the scale byte that means NaN
MASKED_BYTES = 0x76767676  # scales of a masked key, in range
MULTIPLIER = -(104 << 10) * 0x00010001 % 2**32  # exponent field of WEIGHT times a scale, less the byte; twice
MAGNITUDES = 0x07F007F0  # the seven bits of two codes, as bfloat16
SIGNS = -0x7FFF8000  # 0x80008000


@cute.jit
def multiply(a: Int32, b: Int32) -> Int32:
    """Products of two pairs of float16."""
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def selector(byte) -> Int32:
    """Of `byte_pair`: which byte of a word."""
    return Int32(0x4040) + byte * 0x0101


def byte_pair(word: Int32, chosen: Int32) -> Int32:
    """A byte of a word as two 16-bit numbers."""
    return Int32(cute.arch.prmt(word, Int32(0), chosen))


def multiplier(pair: Int32) -> Int32:
    """WEIGHT times a scale as two float16 numbers, from the `byte_pair` of a byte in range."""
    return pair * 1024 + MULTIPLIER


def out_of_range(word: Int32) -> Int32:
    """Not 0 if one of the four bytes of a word is not in MIN_BYTE to MAX_BYTE."""
    low = word & 0x7F7F7F7F
    above, not_below = low + 0x01010101 * (127 - MAX_BYTE), low + 0x01010101 * (128 - MIN_BYTE)
    return (above | word | (not_below ^ -1)) & -0x7F7F7F80


def scale_of(byte: Int32) -> Float32:
    """The scale that a byte means: NaN for 255."""
    bits = cutlass.select_(byte == 0, Int32(1 << 22), byte << 23)
    word = cute.make_rmem_tensor(1, Int32)
    word[0] = Int32(cutlass.select_(byte == NAN_BYTE, Int32(0x7FFFFFFF), bits))
    return cute.recast_tensor(word, Float32)[0]


# ---- bfloat16


def widen_even(word: Int32) -> Int32:
    """Codes 0 and 2 of a word of four, as bfloat16, 2^120 too small."""
    return ((word << 4) & MAGNITUDES) | ((word << 8) & SIGNS)


def widen_odd(word: Int32) -> Int32:
    """Codes 1 and 3 of a word of four, as bfloat16, 2^120 too small."""
    return ((word >> 4) & MAGNITUDES) | (word & SIGNS)


@cute.jit
def multiply_bf16(a: Int32, b: Int32) -> Int32:
    """Products of two pairs of bfloat16, subnormal numbers included."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def multiplier_pair(byte: Int32) -> tuple[Int32, Int32]:
    """Two bfloat16 numbers whose product is 2^120 times a scale, the second NaN for 0xFF; each twice in a word."""
    first = (cutlass.min(byte, 134) + 120) * 0x00800080
    exponent = cutlass.select_(byte > 134, (byte - 7) * 0x00800080, Int32(127 * 0x00800080))
    return first, Int32(cutlass.select_(byte == NAN_BYTE, Int32(0x7FFF7FFF), exponent))


@cute.jit
def weigh_rope(word: Int32) -> Int32:
    """WEIGHT times a pair of bfloat16. A constant operand: `mul` takes registers alone."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nmov.b32 t, 0x43804380;\nmul.rn.bf16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[word],
    )
