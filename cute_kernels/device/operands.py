"""Bytes of a tile in shared memory -> 16-bit operands of mma.sync m16n8k16, in registers.

In a fragment of A (16 x 16), with g = lane / 4 and t = lane % 4, a lane's four registers are pairs
    (row g, k 2t)   (row g + 8, k 2t)   (row g, k 2t + 8)   (row g + 8, k 2t + 8)      each with the next k.

ldmatrix moves 16-bit units, so a lane gets four neighbouring bytes, x = b0 b1 b2 b3. Masks alone split them into two
registers, (b0, b2) and (b1, b3):
 * rows are rows of A (K, or V stored transposed): b0..b3 are columns 4t .. 4t + 3. Since the order of k is free,
   (b0, b2) stand at k = 2t and (b1, b3) at 2t + 8. The other operand is permuted alike: even k of 16 first.
 * rows are columns of A (V, with .trans): b0, b1 are neighbours of token 2t, b2, b3 those of token 2t + 1. (b0, b2) is
   a pair of tokens of row 2g, (b1, b3) of row 2g + 1: rows of A are permuted, even ones first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, const_expr

LOP3_AND_XOR, LOP3_AND_OR = 0x6A, 0xEA
EVEN_THEN_ODD = 0x3120  # PRMT: b0 b2 b1 b3
UINT4_CENTER = 8  # `widen_uint4` subtracts this from a code, so that sums of codes stay small


@cute.jit
def load_matrices(address: Int32, transposed: cutlass.Constexpr):
    """Loads four 8 x 8 matrices of 16-bit units, ldmatrix.x4. Lanes 8i to 8i + 7 have row addresses of matrix i."""
    kind = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4" + kind + ".shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_word(address: Int32):
    """Loads four bytes of shared memory."""
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


@cute.jit
def transpose(x: Int32):
    """Transposes an 8 x 8 matrix of 16-bit units: from the layout of C to that of B, or back."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )


@cute.jit
def widen_int8(a: cute.Tensor, x0: Int32, x1: Int32, x2: Int32, x3: Int32):
    """Converts bytes 0 and 2 of each register to a pair of 16-bit numbers, exactly; `a` is one fragment of A.

    float16: 0x64 above the byte with its sign bit flipped reads as 1024 + 128 + x; subtract 1152. bfloat16 has 7 bits
    of fraction: (128 + low 7 bits) - (128, or 256 if x < 0).
    """
    source = (x0, x1, x2, x3)
    r = cute.recast_tensor(a, Int32)
    if const_expr(a.element_type is Float16):
        for i in cutlass.range_constexpr(4):
            r[i] = cute.arch.lop3(source[i], Int32(0x00FF00FF), Int32(0x64806480), LOP3_AND_XOR)
        a.store(a.load() - Float16(1152.0))
    else:
        signs = cute.make_rmem_tensor_like(a)
        s = cute.recast_tensor(signs, Int32)
        for i in cutlass.range_constexpr(4):
            r[i] = cute.arch.lop3(source[i], Int32(0x007F007F), Int32(0x43004300), LOP3_AND_OR)
            s[i] = cute.arch.lop3(source[i], Int32(0x00800080), Int32(0x43004300), LOP3_AND_OR)
        a.store(a.load() - signs.load())


@cute.jit
def widen_uint4(a: cute.Tensor, x0: Int32, x1: Int32, x2: Int32, x3: Int32):
    """Converts bits 0..3 and 16..19 of each register, less UINT4_CENTER, to a pair of bfloat16: a fragment of A.

    0x4300 above four bits reads as 128 + x.
    """
    source = (x0, x1, x2, x3)
    r = cute.recast_tensor(a, Int32)
    for i in cutlass.range_constexpr(4):
        r[i] = cute.arch.lop3(source[i], Int32(0x000F000F), Int32(0x43004300), LOP3_AND_OR)
    a.store(a.load() - BFloat16(128.0 + UINT4_CENTER))


@cute.jit
def widen_uint4_rows(a: cute.Tensor, x0: Int32, x1: Int32):
    """Converts bits 0..7 and 16..23 of both registers, less UINT4_CENTER, to float16: rows g (x0) and g + 8 of A.

    0x6400 above four bits reads as 1024 + x. If the bits lie further left, it reads as 1024 + 16 x: an FMA corrects
    that, where a shift would go through the busier pipe.
    """
    source = (x0, x1)
    r = cute.recast_tensor(a, Int32)
    for i in cutlass.range_constexpr(2):
        low = cute.arch.lop3(source[i], Int32(0x000F000F), Int32(0x64006400), LOP3_AND_OR)
        high = cute.arch.lop3(source[i], Int32(0x00F000F0), Int32(0x64006400), LOP3_AND_OR)
        r[i] = _fma_pair(low, 0x3C003C00, 0xE408E408)  # x 1 - 1032
        r[i + 2] = _fma_pair(high, 0x2C002C00, 0xD480D480)  # x 1 / 16 - 72


@cute.jit
def _fma_pair(x: Int32, factor: cutlass.Constexpr, term: cutlass.Constexpr) -> Int32:
    """Multiplies a pair of float16 by a pair and adds a pair."""
    constants = f"mov.b32 f, {factor:#x};\nmov.b32 t, {term:#x};\n"
    return cute.arch.inline_ptx(
        "{\n.reg .b32 f, t;\n" + constants + "fma.rn.f16x2 {$w0}, {$r0}, f, t;\n}",
        write_only_types=[Int32],
        read_only_args=[x],
    )


@cute.jit
def widen_e4m3(a: cute.Tensor, i: cutlass.Constexpr, j: cutlass.Constexpr, x: Int32):
    """Converts bytes (0, 2) of x to register i of the fragment `a`, bytes (1, 3) to register j, exactly."""
    ordered = Int32(cute.arch.prmt(x, Int32(0), Int32(EVEN_THEN_ODD)))
    codes, pair = cute.make_rmem_tensor(4, Float8E4M3FN), cute.make_rmem_tensor(4, Float16)
    words = cute.recast_tensor(codes, Int32)
    words[0] = ordered
    pair.store(codes.load().to(Float16))
    p = cute.recast_tensor(pair, Int32)
    r = cute.recast_tensor(a, Int32)
    if const_expr(a.element_type is BFloat16):
        wide = cute.make_rmem_tensor(4, BFloat16)
        wide.store(pair.load().to(Float32).to(BFloat16))
        w = cute.recast_tensor(wide, Int32)
        r[i], r[j] = w[0], w[1]
    else:
        r[i], r[j] = p[0], p[1]


@cute.jit
def take(a: cute.Tensor, x0: Int32, x1: Int32, x2: Int32, x3: Int32):
    """Makes a fragment of A from registers that hold 16-bit numbers."""
    r = cute.recast_tensor(a, Int32)
    r[0], r[1], r[2], r[3] = x0, x1, x2, x3
