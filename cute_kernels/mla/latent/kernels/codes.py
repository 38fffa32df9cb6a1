"""e4m3 codes and ue8m0 scales as bfloat16 numbers, exactly: in registers, two at a time.

Moved four bits right, below its sign, the upper byte of a 16-bit word with an e4m3 code becomes a bfloat16 number that
is 2^120 too small, subnormal codes included. A scale byte e means 2^(e - 127), so code times scale is that number times
2^(e - 7): one multiplication for bytes up to 134 (values up to 57,344), else two. The product has 4 significant bits;
bfloat16 holds it for bytes 3 to 246.

A NaN code, 0x7F or 0xFF, becomes 480 times 2^-120, which no other code does.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

MAGNITUDES = 0x07F007F0  # the seven bits of two codes
SIGNS = -0x7FFF8000  # 0x80008000
MAX_BYTE = 134  # largest scale byte that one multiplication holds
MULTIPLIER = 120 * 0x00800080  # exponent field of the multiplier of a scale byte, less the byte; twice
NAN_BYTE = 255  # the scale byte that means NaN


def widen_even(word: Int32) -> Int32:
    """Codes 0 and 2 of a word of four."""
    return ((word << 4) & MAGNITUDES) | ((word << 8) & SIGNS)


def widen_odd(word: Int32) -> Int32:
    """Codes 1 and 3 of a word of four."""
    return ((word >> 4) & MAGNITUDES) | (word & SIGNS)


@cute.jit
def multiply(a: Int32, b: Int32) -> Int32:
    """Products of two pairs of bfloat16, subnormal numbers included."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def max_magnitudes(a: Int32, b: Int32) -> Int32:
    """The larger magnitudes of two pairs of bfloat16; `a` has no signs."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nabs.bf16x2 t, {$r1};\nmax.bf16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def has_nan_code(peak: Int32) -> Int32:
    """Not 0 if one of two largest magnitudes is that of a NaN code."""
    return (peak + 0x00100010) & 0x08000800


def selector(byte) -> Int32:
    """Of `byte_pair`: which byte of a word."""
    return Int32(0x4040) + byte * 0x0101


def byte_pair(word: Int32, chosen: Int32) -> Int32:
    """A byte of a word as two 16-bit numbers."""
    return Int32(cute.arch.prmt(word, Int32(0), chosen))


def multiplier(pair: Int32) -> Int32:
    """The multiplier of two scale bytes of at most MAX_BYTE, from `byte_pair`."""
    return pair * 128 + MULTIPLIER


def large_bytes(word: Int32) -> Int32:
    """Not 0 if one of the four bytes of a word is above MAX_BYTE."""
    return ((word & 0x7F7F7F7F) + 0x01010101 * (255 - MAX_BYTE)) & word & -0x7F7F7F80


def multiplier_pair(byte: Int32) -> tuple[Int32, Int32]:
    """Two multipliers whose product is that of any scale byte, the second one NaN for 0xFF; each twice in a word."""
    first = (cutlass.min(byte, MAX_BYTE) + 120) * 0x00800080
    exponent = cutlass.select_(byte > MAX_BYTE, (byte - 7) * 0x00800080, Int32(127 * 0x00800080))
    return first, Int32(cutlass.select_(byte == NAN_BYTE, Int32(0x7FFF7FFF), exponent))
