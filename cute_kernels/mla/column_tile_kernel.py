"""Shared memory of the MLA decode kernel whose heads are columns, its matrix products, and how its rows lie."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.mla.producer_kernel import GROUPS, NOPE, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE
from cute_kernels.mla.tile_kernel import layouts

ROPE_BYTES = 2 * ROPE
BUFFERS = 2  # of P, and of what goes with it
WARPS = 4  # of a warpgroup
P_SHIFT = 7.0  # P is 2^7 for a key that meets the base of its head, and float16 holds what is above 2^-31 of that
MAX_GROWTH = 8.0  # of a score over the base, in units of log2, before the base moves: P stays below 2^15


def stages(heads: int) -> int:
    """Tiles of rows in shared memory: as many as Q leaves room for, 41,984 bytes each."""
    return 3 if heads == WIDE else 4


def slots(heads: int) -> int:
    """How many times P of 16 keys fits where a tile has its rope part, which QK alone reads."""
    return TOKENS_PER_TILE * ROPE // (16 * heads)


def column_layouts(heads: int):
    """Shared memory: Q (heads, 576, 1), P^T (heads, 64 keys, buffers).

    The last one is P^T of 16 keys in place of rope parts, (heads, 16 keys, stages x slots).
    """
    row = LayoutEnum.ROW_MAJOR
    tile = (TOKENS_PER_TILE, heads, TOKENS_PER_TILE)
    return (
        layouts(heads)[2],
        sm90.make_smem_layout_b(row, tile, Float16, BUFFERS),
        sm90.make_smem_layout_b(row, (TOKENS_PER_TILE, heads, 16), BFloat16, stages(heads) * slots(heads)),
    )


def column_storage(heads: int):
    """The struct of all that lies in shared memory."""
    layout_q, layout_p, _ = column_layouts(heads)
    count = stages(heads)

    @cute.struct
    class Shared:
        codes: cute.struct.Align[cute.struct.MemRange[Uint8, count * TOKENS_PER_TILE * NOPE], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[BFloat16, count * TOKENS_PER_TILE * ROPE], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
        p: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_p)], 1024]
        scale: cute.struct.Align[cute.struct.MemRange[Float32, count * TOKENS_PER_TILE * GROUPS], 128]
        weight: cute.struct.Align[cute.struct.MemRange[Float16, BUFFERS * GROUPS * TOKENS_PER_TILE], 128]
        sums: cute.struct.Align[cute.struct.MemRange[Float32, 128 * heads // 4], 128]  # each thread's own part
        mask: cute.struct.MemRange[Float32, count * TOKENS_PER_TILE]  # 0 or -inf, added to the scores
        q_power: cute.struct.MemRange[Float32, GROUPS * heads]
        head_base: cute.struct.MemRange[Float32, heads]  # what scores are relative to
        unset: cute.struct.MemRange[Int32, heads]  # 1: no key has been met, and the base is 0
        rescaling: cute.struct.MemRange[Float32, BUFFERS * heads]
        share: cute.struct.MemRange[Float32, BUFFERS * heads]  # 1 / sum of an item, there with its last tile
        lse: cute.struct.MemRange[Float32, BUFFERS * heads]
        sink: cute.struct.MemRange[Float32, heads]  # times log2(e)
        column_max: cute.struct.MemRange[Float32, heads * WARPS]  # of each warp; in the end its sums
        raised: cute.struct.MemRange[Int32, BUFFERS]  # 1: O is to be multiplied by `rescaling`
        q_full: Int64
        full: cute.struct.MemRange[Int64, count]
        empty: cute.struct.MemRange[Int64, count]
        p_full: cute.struct.MemRange[Int64, BUFFERS]
        p_empty: cute.struct.MemRange[Int64, BUFFERS]
        trace: Int64  # address of the timestamps

    return Shared


def column_mmas(heads: int):
    """S^T = K Q^T and O^T += V^T P^T, keys in registers: of codes as float16, of the rope part and of codes as bf16."""
    k, one, tile = OperandMajorMode.K, (1, 1, 1), (TOKENS_PER_TILE, heads)
    registers = warpgroup.OperandSource.RMEM
    return tuple(sm90.make_trivial_tiled_mma(t, t, k, k, Float32, one, tile, registers) for t in (Float16, BFloat16))


def swizzle(row: Int32) -> Int32:
    """What the number of a 16-byte chunk is xored with in a row.

    Two neighbouring rows differ by half a line of 128 bytes, so eight lanes that read four chunks of each meet all
    banks; so do sixteen that read two chunks of every second row.
    """
    return (row & 6) ^ ((row & 1) << 2)


def column(tid: Int32, c: int):
    """Head of the c-th column that a thread has."""
    return 8 * (c // 2) + 2 * (tid % 4) + c % 2


def pairs_of(array: cute.Tensor, tid: Int32, start, values: cute.Tensor):
    """Copies a thread's columns, from `start` on in an array of heads, into `values` (columns)."""
    for i in range(cute.size(values) // 2):
        pointer = array.iterator + cute.assume(start + 8 * i + 2 * (tid % 4), divby=2)
        two = cute.make_tensor(pointer, cute.make_layout(2))
        cute.autovec_copy(two, cute.make_tensor(values.iterator + 2 * i, cute.make_layout(2)))
