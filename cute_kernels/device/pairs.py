"""Arithmetic of two 16-bit numbers in a word and of floats by their bits, where it needs one certain instruction."""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def multiply_half(a: Int32, b: Int32) -> Int32:
    """Products of two pairs of float16."""
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def multiply_bfloat16(a: Int32, b: Int32) -> Int32:
    """Products of two pairs of bfloat16."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def half_to_bfloat16(a: Int32) -> Int32:
    """Returns a pair of float16 rounded to bfloat16."""
    return cute.arch.inline_ptx(
        "{\n.reg .b16 l, h;\n.reg .f32 x, y;\nmov.b32 {l, h}, {$r0};\n"
        "cvt.f32.f16 x, l;\ncvt.f32.f16 y, h;\ncvt.rn.bf16x2.f32 {$w0}, y, x;\n}",
        write_only_types=[Int32],
        read_only_args=[a],
    )


@cute.jit
def half_minus_bfloat16(a: Int32, b: Int32) -> Int32:
    """Returns a pair of float16 less a pair of bfloat16, rounded to bfloat16."""
    return cute.arch.inline_ptx(
        "{\n.reg .b16 l, h;\n.reg .b32 i, j;\n.reg .f32 x, y, u, v;\nmov.b32 {l, h}, {$r0};\n"
        "cvt.f32.f16 x, l;\ncvt.f32.f16 y, h;\nshl.b32 i, {$r1}, 16;\nand.b32 j, {$r1}, 0xffff0000;\n"
        "mov.b32 u, i;\nmov.b32 v, j;\nsub.f32 x, x, u;\nsub.f32 y, y, v;\ncvt.rn.bf16x2.f32 {$w0}, y, x;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


@cute.jit
def max_magnitudes(a: Int32, b: Int32) -> Int32:
    """Returns the larger magnitudes of two pairs of bfloat16; `a` has no negative numbers."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 t;\nabs.bf16x2 t, {$r1};\nmax.bf16x2 {$w0}, {$r0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


@cute.jit
def max_unsigned(a: Int32, b: Int32) -> Int32:
    """Returns the larger of two unsigned numbers. By their bits, NaN, Inf and negative floats are the largest."""
    return cute.arch.inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def max_u16x2(a: Int32, b: Int32) -> Int32:
    """Returns the larger of each of two unsigned 16-bit numbers."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def min_u16x2(a: Int32, b: Int32) -> Int32:
    """Returns the smaller of each of two unsigned 16-bit numbers."""
    return cute.arch.inline_ptx("min.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def at_most_unsigned(a: Int32, b: Int32) -> Int32:
    """Returns 1 if a <= b as unsigned numbers, else 0."""
    return cute.arch.inline_ptx(
        "{\n.reg .pred p;\nsetp.le.u32 p, {$r0}, {$r1};\nselp.b32 {$w0}, 1, 0, p;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def float_bits(x: float) -> int:
    """Returns the bits of a float32 constant as a signed number."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def larger_half(pair: Int32) -> Float32:
    """Returns the larger of two nonnegative bfloat16 numbers."""
    return cutlass.max(pair & -0x10000, pair << 16).bitcast(Float32)


def bfloat16_pair(x: Float32) -> Int32:
    """Returns a pair of twice the same number, which bfloat16 must represent exactly."""
    upper = x.bitcast(Int32) & -0x10000
    return upper | ((upper >> 16) & 0xFFFF)
