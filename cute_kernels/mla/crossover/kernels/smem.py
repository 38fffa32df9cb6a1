"""Shared memory of the crossover kernel, its matrix products, and what its warpgroups agree on."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import wgmma
from cute_kernels.mla.crossover.kernels.arguments import RowStates
from cute_kernels.mla.crossover.kernels.tile import STAGES
from cute_kernels.mla.kernels.load_q import q_layout
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE

P_SHIFT = 8.0  # P is up to 2^8, so that float16 holds what is above 2^-33 of the largest


def layouts():
    """Shared memory: codes (64, 512, stages), rope (64, 64, stages), Q (64, 576, 1)."""
    row, tile = LayoutEnum.ROW_MAJOR, (WIDE, TOKENS_PER_TILE)
    return (
        sm90.make_smem_layout_b(row, (*tile, NOPE), BFloat16, STAGES),
        sm90.make_smem_layout_b(row, (*tile, ROPE), BFloat16, STAGES),
        q_layout(WIDE),
    )


def shared_storage():
    """The struct of a CTA's shared memory."""
    layout_nope, layout_rope, layout_q = layouts()
    per_key = STAGES * QUANT_TILES * TOKENS_PER_TILE

    @cute.struct
    class Shared:
        nope: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_nope)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_rope)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
        scale: cute.struct.Align[cute.struct.MemRange[Float32, per_key], 128]
        weight: cute.struct.Align[cute.struct.MemRange[Float16, per_key], 128]  # see mla/kernels/smem.py
        q_power: cute.struct.MemRange[Float32, QUANT_TILES * WIDE]
        mask: cute.struct.Align[
            cute.struct.MemRange[Float32, STAGES * TOKENS_PER_TILE], 128
        ]  # 0 or -inf, added to the scores
        rescaling: cute.struct.MemRange[Float32, STAGES * WIDE]
        row_scales: cute.struct.MemRange[Float32, QUANT_TILES * WIDE]
        row_max: cute.struct.MemRange[Float32, STAGES * WIDE]
        row_sum: cute.struct.MemRange[Float32, STAGES * WIDE]
        q_full: Int64
        p_full: cute.struct.MemRange[Int64, STAGES]
        full: cute.struct.MemRange[Int64, STAGES]
        empty: cute.struct.MemRange[Int64, STAGES]
        peer_free: cute.struct.MemRange[Int64, STAGES]
        codes_full: cute.struct.MemRange[Int64, STAGES]
        trace: Int64  # address of the timestamps

    return Shared


def tiled_mmas():
    """S of codes = Q K^T, S of the rope part, both from shared memory; O += P V of a quant tile with P in registers."""
    k, mn, one = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1)
    registers = warpgroup.OperandSource.RMEM
    tile = (WIDE, TOKENS_PER_TILE)
    return (
        sm90.make_trivial_tiled_mma(Float16, Float16, k, k, Float32, one, tile),
        sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, one, tile),
        sm90.make_trivial_tiled_mma(Float16, Float16, k, mn, Float32, one, (WIDE, QUANT_TILE), registers),
    )


@cute.jit
def scales(smem, thr_qk, stage: Int32):
    """Scales of the keys of a thread's fragment of S: (fragment, QUANT_TILES)."""
    layout = cute.make_layout((WIDE, TOKENS_PER_TILE, QUANT_TILES), stride=(0, 1, TOKENS_PER_TILE))
    start = cute.assume(stage * (QUANT_TILES * TOKENS_PER_TILE), divby=QUANT_TILES * TOKENS_PER_TILE)
    return thr_qk.partition_C(cute.make_tensor(smem.scale.data_ptr() + start, layout))


def p_fragment(smem, stage: Int32, tid: Int32) -> cute.Tensor:
    """A thread's fragment of P of the tile in a stage, in place of its rope block: (8, 64 / 16) float16.

    Columns 16 k to 16 k + 15 are piece k of 16 bytes.
    """
    start = cute.assume(tid * 8 + stage * (TOKENS_PER_TILE * ROPE), divby=8)
    pointer = cute.recast_ptr(smem.rope.data_ptr(), dtype=Float16) + start
    return cute.make_tensor(pointer, cute.make_layout((8, TOKENS_PER_TILE // 16), stride=(1, 128 * 8)))


def row_states(smem, stage: Int32, tid: Int32) -> RowStates:
    """A thread's two rows with the tile in a stage; row_max and row_sum are those of the work tile."""
    start, two = wgmma.row(tid, 0) + stage * WIDE, cute.make_layout(2, stride=8)
    arrays = (smem.rescaling, smem.row_max, smem.row_sum)
    return RowStates(*(cute.make_tensor(array.data_ptr() + start, two) for array in arrays))


def row_scales(smem, half, wg: Int32, tid: Int32) -> cute.Tensor:
    """The power of two that O of a thread's two rows (2) is kept times, where weights do not hold the scales."""
    start, two = wgmma.row(tid, 0) + (2 * wg + half) * WIDE, cute.make_layout(2, stride=8)
    return cute.make_tensor(smem.row_scales.data_ptr() + start, two)
