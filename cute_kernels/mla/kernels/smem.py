"""Shared memory of the MLA decode kernel whose heads are columns, its matrix products, and how its rows lie."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.mla.kernels.load_q import q_layout
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILES
from cute_kernels.mla.spec import FEW, TOKENS_PER_TILE, WIDE, MlaDecodeSpec

SHARED_BYTES = 232_448  # that a CTA may have
LINE = 128  # bytes of a row that lie together, codes of a quantization tile or the rope part: see `line_of`
OFFERS = 2  # of tiles to come: the values take one before they let go of P of the tile whose place that gets
BUFFERS = 2  # of P, and of what goes with it
WARPS = 4  # of a warpgroup
P_SHIFT = 7.0  # P is 2^7 for a key that meets the base of its head, and float16 holds what is above 2^-31 of that
MAX_GROWTH = 8.0  # of a score over the base, in units of log2, before the base moves: P stays below 2^15


RAISED, REACHED = 1, 2  # of a tile: O is to be multiplied by `rescaling`; a scale is out of reach of its weight


def stages(heads: int) -> int:
    """Tiles of codes in shared memory: as many as Q leaves room for, 33,792 bytes each."""
    return 3 if heads == WIDE else 4


def masks(heads: int) -> int:
    """Tiles whose masks are kept: those of tile t + stages - 1 are set when some may still read those of tile t - 1."""
    return 4 if heads == WIDE else 8


def rope_stages(heads: int) -> int:
    """Tiles of rope parts in shared memory, 8,192 bytes each.

    With 32 and 64 heads there are fewer of them than of codes, and copies are as many tiles ahead of the softmax: where
    P of a tile has been made, its S was complete, and its rope part has been read. With fewer heads each tile has both.
    """
    return stages(heads) if heads <= FEW else stages(heads) - 1


def column_layouts(heads: int):
    """Shared memory: Q (heads, 576, 1), P^T (heads, 64 keys, buffers).

    The last one is P^T of 16 keys times scales, (heads, 16 keys, warpgroups of values).
    """
    row = LayoutEnum.ROW_MAJOR
    tile = (TOKENS_PER_TILE, heads, TOKENS_PER_TILE)
    return (
        q_layout(heads),
        sm90.make_smem_layout_b(row, tile, Float16, BUFFERS),
        sm90.make_smem_layout_b(row, (TOKENS_PER_TILE, heads, 16), BFloat16, 2),
    )


def column_storage(spec: MlaDecodeSpec):
    """The struct of all that lies in shared memory."""
    heads, of_scores = spec.heads, spec.score_groups
    layout_q, layout_p, layout_few = column_layouts(heads)
    count = stages(heads)

    @cute.struct
    class Shared:
        codes: cute.struct.Align[cute.struct.MemRange[Uint8, count * TOKENS_PER_TILE * NOPE], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[Uint8, rope_stages(heads) * TOKENS_PER_TILE * LINE], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
        p: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_p)], 1024]
        s: cute.struct.Align[cute.struct.MemRange[Float32, of_scores * TOKENS_PER_TILE * heads], 1024]  # `scores_of`
        few: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_few)], 1024]
        scale: cute.struct.Align[cute.struct.MemRange[Float32, count * TOKENS_PER_TILE * QUANT_TILES], 128]
        weight: cute.struct.Align[cute.struct.MemRange[Float16, BUFFERS * QUANT_TILES * TOKENS_PER_TILE], 128]
        q_power: cute.struct.MemRange[Float32, QUANT_TILES * heads]
        rescaling: cute.struct.MemRange[Float32, BUFFERS * heads]
        share: cute.struct.MemRange[Float32, BUFFERS * heads]  # 1 / sum of an item, there with its last tile
        lse: cute.struct.MemRange[Float32, BUFFERS * heads]
        state: cute.struct.Align[cute.struct.MemRange[Int32, BUFFERS * WARPS], 16]  # of a tile, by each warp
        sink: cute.struct.MemRange[Float32, heads]  # times log2(e)
        valid: cute.struct.MemRange[Int32, 2 * masks(heads)]  # a bit for each key
        offer: cute.struct.MemRange[Int32, 2 * OFFERS]  # page and place in it of tiles that values are to copy
        q_full: Int64
        full: cute.struct.MemRange[Int64, count]
        empty: cute.struct.MemRange[Int64, count]
        rope_empty: cute.struct.MemRange[Int64, rope_stages(heads)]
        s_full: cute.struct.MemRange[Int64, of_scores]
        s_empty: cute.struct.MemRange[Int64, of_scores]
        p_full: cute.struct.MemRange[Int64, BUFFERS]
        p_empty: cute.struct.MemRange[Int64, BUFFERS]
        cuts: cute.struct.MemRange[Int32, 4]  # where this CTA's share begins and ends
        trace: Int64  # address of the timestamps

    size = Shared.size_in_bytes()  # type: ignore[attr-defined]  # of the decorator
    if size > SHARED_BYTES:
        raise ValueError(f"shared memory: {size} bytes, of {SHARED_BYTES} that a CTA may have")
    return Shared


def column_mmas(heads: int):
    """S^T = K Q^T and O^T += V^T P^T, keys in registers, float16 and bf16."""
    k, one, tile = OperandMajorMode.K, (1, 1, 1), (TOKENS_PER_TILE, heads)
    registers = warpgroup.OperandSource.RMEM
    return tuple(sm90.make_trivial_tiled_mma(t, t, k, k, Float32, one, tile, registers) for t in (Float16, BFloat16))


def turn(t: Int32, count: int) -> tuple:
    """(Which of `count` places tile t has, which takes them in turns; the phase in which its barrier completes.)

    Numbers without a sign: the division of one with a sign takes twice the instructions, at the top of each loop.
    """
    use = Uint32(t) // count
    return Int32(Uint32(t) - use * count), Int32(use % 2)


def key(tid: Int32, r: int):
    """Of a tile, that is row r of those of a thread: two neighbours, which have S in one piece."""
    return tid // 32 * 16 + tid % 32 // 4 * 2 + r


def scores_of(head: Int32, pair: Int32) -> Int32:
    """Where S of a head and two neighbouring keys is, behind that of its even neighbour.

    So a thread of the scores stores 16 bytes, where eight lanes have two pairs of keys and four of heads, and one of
    the softmax reads 8, where sixteen lanes have one pair of keys and eight of heads: neither meets a bank twice.
    """
    heads = head // 2
    other = ((heads & 1) << 2) ^ (heads & 2) ^ (heads >> 2 & 1)
    return (heads * (TOKENS_PER_TILE // 2) + (pair ^ other)) * 4 + head % 2 * 2


def scales_of(smem, heads: int) -> cute.Tensor:
    """Scales of the keys of all stages: (quantization tile, key)."""
    return smem.scale.get_tensor(cute.make_layout((QUANT_TILES, TOKENS_PER_TILE * stages(heads))))


def weights(smem, stage: Int32, quant_tile, tid: Int32) -> cute.Tensor:
    """Scales times a weight of a quant tile as float16, of 16 keys: (8, 2), each 8 of 32 keys.

    Keys are ordered by the thread that needs them: 32 x half, 8 x (tid % 4), 4 x (block of 16), 2 x (block of 8), 1.
    """
    start = (stage * QUANT_TILES + quant_tile) * TOKENS_PER_TILE + tid % 4 * 8
    pointer = smem.weight.data_ptr() + cute.assume(start, divby=8)
    return cute.make_tensor(pointer, cute.make_layout((8, 2), stride=(1, TOKENS_PER_TILE // 2)))


def place_of_weight(token):
    """Where `weights` has that of a key of a tile."""
    return token // 32 * 32 + token % 8 // 2 * 8 + token // 16 % 2 * 4 + token // 8 % 2 * 2 + token % 2


def line_of(row: Int32, chunk):
    """Where 16 bytes of a line of a key's row are, behind the first of 64 lines, which follow each other.

    In the order of the 128-byte swizzle, so eight lanes meet all banks where they read the chunks of one line, or
    chunks 0, 1, 4, 5 of a line and of the next but one; and sixteen, that read half a chunk each, where these are two
    neighbouring chunks of four lines, each the next but one.
    """
    return row * LINE + ((chunk ^ (row & 7)) << 4)


def column(tid: Int32, c: int):
    """Head of the c-th column that a thread has."""
    return 8 * (c // 2) + 2 * (tid % 4) + c % 2


def pairs_of(array: cute.Tensor, tid: Int32, start, values: cute.Tensor):
    """Copies a thread's columns, from `start` on in an array of heads, into `values` (columns)."""
    for i in range(cute.size(values) // 2):
        pointer = array.iterator + cute.assume(start + 8 * i + 2 * (tid % 4), divby=2)
        two = cute.make_tensor(pointer, cute.make_layout(2))
        cute.autovec_copy(two, cute.make_tensor(values.iterator + 2 * i, cute.make_layout(2)))
