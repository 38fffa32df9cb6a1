"""Reads 656-byte tokens: rows into registers, and their codes as 16-bit numbers into tiles that wgmma reads.

One warpgroup handles 16 rows a pass, 4 a warp, 8 lanes a row. A lane holds 16 codes of each of the four quant tiles of
its row and 8 bf16 values of the rope part: five 16-byte loads, 20 registers.

Codes are stored exactly, as float16; scales are applied to products.

Store map. In the 128-byte swizzle the 16-byte chunk c of row r lies at c ^ (r % 8), and 16 codes become an even and an
odd chunk. The 8 lanes of a store phase hold four pieces of an even row and four of an odd row, so their chunks fall
into all eight bank groups: no conflict. r % 8 is the same in each pass, so a lane has three base addresses, and all
other offsets are immediates.
"""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp

from fp8_mla.formats import V3_2

ROW_BYTES = V3_2.token_bytes
SCALE_OFFSET = V3_2.scales.offset
ROPE_OFFSET = V3_2.field("rope").offset
ROWS_PER_PASS = 16
PIECES = V3_2.num_scales + 1  # 16-byte loads of a lane and row: one per quant tile, one for the rope part


@cute.jit
def row_pointer(mKV: cute.Tensor, zero_row: Int64, valid, page: Int32, offset: Int32) -> cute.Pointer:
    """Returns the address of a token's row, or `zero_row`, of zeros: a masked slot may hold NaN, and 0 x NaN is NaN."""
    # 64 bits: a cache may have more than 2^31 bytes
    row = Int64(page) * Int64(mKV.stride[0]) + Int64(offset) * Int64(mKV.stride[1])
    address = cutlass.select_(valid, mKV.iterator.toint() + row, zero_row)
    return cute.make_ptr(Uint8, address, AddressSpace.gmem, assumed_align=16)


@cute.jit
def gather(row: cute.Pointer, segment: Int32, raw: cute.Tensor):
    """Starts the loads of this lane's pieces of a row into raw (16, PIECES)."""
    for piece in cutlass.range_constexpr(PIECES):
        _load_piece(row, segment, raw, piece)


@cute.jit
def store_and_gather(
    raw: cute.Tensor,
    even: cute.Tensor,
    odd: cute.Tensor,
    rope: cute.Tensor,
    row: cute.Pointer | None,
    segment: Int32,
):
    """Stores the row in `raw`, and loads another `row`, if any, into the registers as they become free.

    Codes go as float16 into the even and odd chunks (8, 4); the rope part goes into its chunk (8).
    """
    cute.autovec_copy(cute.recast_tensor(raw[None, PIECES - 1], BFloat16), rope)
    if const_expr(row is not None):
        _load_piece(row, segment, raw, PIECES - 1)
    for j in cutlass.range_constexpr(PIECES - 1):
        out = cute.make_rmem_tensor((8, 2), Float16)
        codes = cute.recast_tensor(raw[None, j], Float8E4M3FN)
        for half in cutlass.range_constexpr(2):  # eight at a time: with sixteen live, ptxas spills
            eight = cute.make_tensor(codes.iterator + 8 * half, cute.make_layout(8))
            out[None, half].store(eight.load().to(Float16))
        cute.autovec_copy(out[None, 0], even[None, j])
        cute.autovec_copy(out[None, 1], odd[None, j])
        if const_expr(row is not None):
            _load_piece(row, segment, raw, j)


@cute.jit
def _load_piece(row: cute.Pointer, segment: Int32, raw: cute.Tensor, piece: cutlass.Constexpr):
    """Loads piece `piece` of a row: the codes of that quant tile; the last piece is in the rope part."""
    load = cute.make_copy_atom(CopyG2ROp(), Uint8, num_bits_per_copy=128)
    start = V3_2.quant_tile * piece if const_expr(piece < PIECES - 1) else ROPE_OFFSET
    source = cute.make_tensor(row + cute.assume(segment + start, divby=16), cute.make_layout(16))
    cute.copy(load, source, raw[None, piece])


@cute.jit
def load_scales(row: cute.Pointer, pair: Int32, scales: cute.Tensor):
    """Starts the load of two scales (2) of the row, the first or the second pair."""
    load = cute.make_copy_atom(CopyG2ROp(), Float32, num_bits_per_copy=64)
    address = (row + cute.assume(SCALE_OFFSET + 8 * pair, divby=8)).toint()
    source = cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=8)
    cute.copy(load, cute.make_tensor(source, cute.make_layout(2)), scales)
