"""Reading the 656-byte token format: find a row, gather it into registers, dequantize it into a wgmma-readable tile.

One warpgroup handles 16 rows a pass, 4 a warp, 8 lanes a row. A lane holds a sixteenth of each 128-value quantization tile of
its row (16 fp8 values, four times), an eighth of the rope part (8 bf16 values) and all four scales: six 16-byte loads,
24 registers.

Store map. In the 128-byte swizzle the 16-byte chunk c of row r sits at c ^ (r % 8), and 16 fp8 values become an even and an odd
chunk. The 8 lanes of one store phase hold four pieces of an even row and four of an odd row, so their chunks fall into all
eight bank groups: no conflict. r % 8 does not depend on the pass, so a lane has three base addresses and all else is an immediate.
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp

ROW_BYTES = 656
SCALE_OFFSET = 512
ROPE_OFFSET = 528
ROWS_PER_PASS = 16
PIECES = 6  # 16-byte loads per lane and row: four of fp8, one of bf16, one of scales

# Bits of the float32 scales between which fp8 x scale fits float16 with bf16's accuracy or better: 448 * 2^7 < 65504, and at
# 2^-20 float16's spacing of 2^-24 is still 2^-13 of a tile's largest value.
SCALE_BITS_MIN = 0x35800000  # 2^-20
SCALE_BITS_MAX = 0x43000000  # 2^7
FLOAT16_MAX = 65504.0


@cute.jit
def row_pointer(mKV: cute.Tensor, mZero: cute.Tensor, valid, page: Int32, offset: Int32) -> cute.Pointer:
    """Address of one token's row, or of a row of zeros: a masked slot may hold NaN, which no probability of 0 would cancel."""
    # 64-bit products: page * stride passes 2^31 bytes in a cache of 2 GiB
    row = Int64(page) * Int64(mKV.stride[0]) + Int64(offset) * Int64(mKV.stride[1])
    address = cutlass.select_(valid, mKV.iterator.toint() + row, mZero.iterator.toint())
    return cute.make_ptr(Uint8, address, AddressSpace.gmem, assumed_align=16)


@cute.jit
def gather(row: cute.Pointer, segment: Int32, raw: cute.Tensor):
    """This lane's six 16-byte pieces of a row, into raw (16, PIECES)."""
    for j in cutlass.range_constexpr(PIECES):
        _load_piece(row, segment, raw, j)


@cute.jit
def dequantize_and_gather(
    operand: cutlass.Constexpr,
    raw: cute.Tensor,
    even: cute.Tensor,
    odd: cute.Tensor,
    rope: cute.Tensor,
    row: cute.Pointer,
    segment: Int32,
):
    """Stores the row in `raw`, dequantized, and starts the loads of another `row` into the registers that come free.

    fp8 x scale in float32, rounded once to `operand`, goes into the even and odd chunks (8, 4) and the rope chunk (8).
    """
    scale = cute.recast_tensor(raw[None, 5], Float32)
    rope_bf16 = cute.recast_tensor(raw[None, 4], BFloat16)
    if const_expr(operand is BFloat16):
        cute.autovec_copy(rope_bf16, rope)
    else:
        out = cute.make_rmem_tensor((8,), operand)
        out.store(rope_bf16.load().to(Float32).to(operand))
        cute.autovec_copy(out, rope)
    _load_piece(row, segment, raw, 4)
    for j in cutlass.range_constexpr(4):
        values = cute.recast_tensor(raw[None, j], Float8E4M3FN).load().to(Float32) * scale[j]
        out = cute.make_rmem_tensor((8, 2), operand)
        out.store(values.to(operand).reshape((8, 2)))
        cute.autovec_copy(out[None, 0], even[None, j])
        cute.autovec_copy(out[None, 1], odd[None, j])
        _load_piece(row, segment, raw, j)
    _load_piece(row, segment, raw, 5)


@cute.jit
def _load_piece(row: cute.Pointer, segment: Int32, raw: cute.Tensor, piece: cutlass.Constexpr):
    """Piece 0 to 3: fp8 of that quantization tile; 4: rope; 5: the scales."""
    load = cute.make_copy_atom(CopyG2ROp(), Uint8, num_bits_per_copy=128)
    if const_expr(piece < 4):
        cute.copy(load, _bytes16(row, segment + 128 * piece), raw[None, piece])
    elif const_expr(piece == 4):
        cute.copy(load, _bytes16(row, segment + ROPE_OFFSET), raw[None, piece])
    else:
        cute.copy(load, _bytes16(row, SCALE_OFFSET), raw[None, piece])


@cute.jit
def exceeds_float16(raw: cute.Tensor) -> Int32:
    """1 if this lane's piece of a row leaves the range in which float16 operands are as good as bf16 ones, else 0."""
    result = Int32(0)
    scale_bits = cute.recast_tensor(raw[None, 5], Int32)
    for j in cutlass.range_constexpr(4):  # NaN, infinite, zero and negative scales fall outside as well
        if scale_bits[j] < SCALE_BITS_MIN or scale_bits[j] > SCALE_BITS_MAX:
            result = Int32(1)
    rope = cute.recast_tensor(raw[None, 4], BFloat16).load().to(Float32)
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(8):
        largest = cute.arch.fmax(largest, cute.arch.fmax(rope[i], -rope[i]))
    if largest > FLOAT16_MAX:
        result = Int32(1)
    return result


@cute.jit
def normalized_exponents(largest: Float32):
    """(factor, inverse): the power of two that brings `largest` (>= 0) into [256, 512), and its inverse; 1 where there is none."""
    exponent = (largest.bitcast(Int32) >> 23) & 0xFF  # biased; 255 for Inf and NaN
    shift = cutlass.min(Int32(135) - exponent, 100)  # |x| below 2^-92 stays small: it is 0 in any sum
    factor = ((shift + 127) << 23).bitcast(Float32)
    inverse = ((Int32(127) - shift) << 23).bitcast(Float32)
    plain = exponent == 255 or largest == 0.0
    return cutlass.select_(plain, Float32(1.0), factor), cutlass.select_(plain, Float32(1.0), inverse)


@cute.jit
def _bytes16(pointer: cute.Pointer, offset) -> cute.Tensor:
    return cute.make_tensor(pointer + cute.assume(offset, divby=16), cute.make_layout(16))
