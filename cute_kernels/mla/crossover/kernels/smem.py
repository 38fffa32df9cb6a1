"""Shared memory of the crossover kernel, its matrix products, and views of what its warpgroups share."""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import wgmma
from cute_kernels.mla.crossover.kernels.tile import STAGES
from cute_kernels.mla.kernels.load_q import q_layout
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE

P_SHIFT = 8.0  # P is at most 2^8, so float16 holds P above 2^-33 of the largest


class Layouts(NamedTuple):
    """Layouts in shared memory: codes (64, 512, stages), rope part (64, 64, stages), Q (64, 576, 1)."""

    nope: cute.ComposedLayout
    rope: cute.ComposedLayout
    q: cute.ComposedLayout


class TiledMmas(NamedTuple):
    """S += Q K^T of codes, S = Q K^T of the rope part, O += P V of one quant tile with P in registers."""

    qk: cute.TiledMma
    qk_rope: cute.TiledMma
    pv: cute.TiledMma


class RowState(NamedTuple):
    """row_max (2, in units of log2) and row_sum (2) of the two rows of a thread, in registers."""

    row_max: cute.Tensor
    row_sum: cute.Tensor


class SharedRowState(NamedTuple):
    """The QK warpgroup's message about a thread's two rows, with each key tile.

    rescaling  factor for the O accumulated so far
    row_max    of the work tile, valid with its last key tile
    row_sum    of the work tile, valid with its last key tile
    """

    rescaling: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


def layouts() -> Layouts:
    """Returns the layouts of wgmma's operands in shared memory."""
    row, tile = LayoutEnum.ROW_MAJOR, (WIDE, TOKENS_PER_TILE)
    return Layouts(
        sm90.make_smem_layout_b(row, (*tile, NOPE), BFloat16, STAGES),
        sm90.make_smem_layout_b(row, (*tile, ROPE), BFloat16, STAGES),
        q_layout(WIDE),
    )


def shared_storage():
    """Makes the struct of all shared memory."""
    layout = layouts()
    scales = STAGES * QUANT_TILES * TOKENS_PER_TILE

    @cute.struct
    class Shared:
        nope: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout.nope)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout.rope)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout.q)], 1024]
        scale: cute.struct.Align[cute.struct.MemRange[Float32, scales], 128]
        weight: cute.struct.Align[cute.struct.MemRange[Float16, scales], 128]  # see `weights` in mla/kernels/smem.py
        q_power: cute.struct.MemRange[Float32, QUANT_TILES * WIDE]  # factor of S if Q was out of float16's range
        mask: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * TOKENS_PER_TILE], 128]  # 0 or -inf, added to S
        rescaling: cute.struct.MemRange[Float32, STAGES * WIDE]
        o_power: cute.struct.MemRange[Float32, QUANT_TILES * WIDE]  # see `o_powers`
        row_max: cute.struct.MemRange[Float32, STAGES * WIDE]
        row_sum: cute.struct.MemRange[Float32, STAGES * WIDE]
        q_full: Int64
        p_full: cute.struct.MemRange[Int64, STAGES]
        keys_full: cute.struct.MemRange[Int64, STAGES]
        keys_empty: cute.struct.MemRange[Int64, STAGES]
        peer_full: cute.struct.MemRange[Int64, STAGES]
        codes_full: cute.struct.MemRange[Int64, STAGES]
        trace: Int64  # address of the timestamps

    return Shared


def tiled_mmas() -> TiledMmas:
    """Makes the three products of a key tile."""
    k, mn, one = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1)
    registers = warpgroup.OperandSource.RMEM
    tile = (WIDE, TOKENS_PER_TILE)
    return TiledMmas(
        sm90.make_trivial_tiled_mma(Float16, Float16, k, k, Float32, one, tile),
        sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, one, tile),
        sm90.make_trivial_tiled_mma(Float16, Float16, k, mn, Float32, one, (WIDE, QUANT_TILE), registers),
    )


@cute.jit
def key_scales(smem, thr_qk, stage: Int32):
    """Scales of the keys in the columns of a thread's fragment of S: (fragment, quant tiles)."""
    layout = cute.make_layout((WIDE, TOKENS_PER_TILE, QUANT_TILES), stride=(0, 1, TOKENS_PER_TILE))
    start = cute.assume(stage * (QUANT_TILES * TOKENS_PER_TILE), divby=QUANT_TILES * TOKENS_PER_TILE)
    return thr_qk.partition_C(cute.make_tensor(smem.scale.data_ptr() + start, layout))


def p_fragment(smem, stage: Int32, tid: Int32) -> cute.Tensor:
    """Returns a thread's fragment of P of a stage's key tile, over its rope part: (8, 64 / 16) float16.

    Piece k of 16 bytes has columns 16 k to 16 k + 15.
    """
    start = cute.assume(tid * 8 + stage * (TOKENS_PER_TILE * ROPE), divby=8)
    pointer = cute.recast_ptr(smem.rope.data_ptr(), dtype=Float16) + start
    return cute.make_tensor(pointer, cute.make_layout((8, TOKENS_PER_TILE // 16), stride=(1, 128 * 8)))


def shared_row_state(smem, stage: Int32, tid: Int32) -> SharedRowState:
    """Returns the state of a thread's two rows with the key tile in a stage, (2) each."""
    start, two = wgmma.row(tid, 0) + stage * WIDE, cute.make_layout(2, stride=8)
    arrays = (smem.rescaling, smem.row_max, smem.row_sum)
    return SharedRowState(*(cute.make_tensor(array.data_ptr() + start, two) for array in arrays))


def o_powers(smem, half, wg: Int32, tid: Int32) -> cute.Tensor:
    """Returns the powers of two in O of a thread's two rows (2), for a half of PV warpgroup `wg`'s columns.

    It is used if weights are out of range; otherwise that factor is WEIGHT.
    """
    start, two = wgmma.row(tid, 0) + (2 * wg + half) * WIDE, cute.make_layout(2, stride=8)
    return cute.make_tensor(smem.o_power.data_ptr() + start, two)
