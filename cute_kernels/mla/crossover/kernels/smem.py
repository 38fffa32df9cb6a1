"""Shared memory of the MLA decode kernel, its matrix products, and what its warpgroups agree on."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import wgmma
from cute_kernels.mla.crossover.kernels.load import GROUP, GROUPS, NOPE, ROPE, STAGES
from cute_kernels.mla.spec import TOKENS_PER_TILE, WIDE

QK = NOPE + ROPE
Q_COLUMNS = 64  # of a TMA copy of Q: 128 bytes
Q_CHUNKS = QK // Q_COLUMNS
BAR_OWNER, BAR_STORED = 1, 3  # named barriers
P_SHIFT = 8.0  # P is up to 2^8, so that float16 holds what is above 2^-33 of the largest


def layouts(heads: int = WIDE):
    """Shared memory: codes (64, 512, stages), rope (64, 64, stages), Q (heads, 576, 1)."""
    row, tile = LayoutEnum.ROW_MAJOR, (WIDE, TOKENS_PER_TILE)
    return (
        sm90.make_smem_layout_b(row, (*tile, NOPE), BFloat16, STAGES),
        sm90.make_smem_layout_b(row, (*tile, ROPE), BFloat16, STAGES),
        sm90.make_smem_layout_a(row, (heads, TOKENS_PER_TILE, QK), BFloat16, 1),
    )


def shared_storage():
    """The struct of all that lies in shared memory."""
    layout_nope, layout_rope, layout_q = layouts()
    per_key = STAGES * GROUPS * TOKENS_PER_TILE

    @cute.struct
    class Shared:
        nope: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout_nope)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_rope)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]
        scale: cute.struct.Align[cute.struct.MemRange[Float32, per_key], 128]
        weight: cute.struct.Align[cute.struct.MemRange[Float16, per_key], 128]  # see `weights`
        q_power: cute.struct.MemRange[Float32, GROUPS * WIDE]
        mask: cute.struct.Align[
            cute.struct.MemRange[Float32, STAGES * TOKENS_PER_TILE], 128
        ]  # 0 or -inf, added to the scores
        rescaling: cute.struct.MemRange[Float32, STAGES * WIDE]
        units: cute.struct.MemRange[Float32, GROUPS * WIDE]
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
    """S of codes = Q K^T, S of the rope part, both from shared memory; O += P V of one group with P in registers."""
    k, mn, one = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1)
    registers = warpgroup.OperandSource.RMEM
    tile = (WIDE, TOKENS_PER_TILE)
    return (
        sm90.make_trivial_tiled_mma(Float16, Float16, k, k, Float32, one, tile),
        sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, one, tile),
        sm90.make_trivial_tiled_mma(Float16, Float16, k, mn, Float32, one, (WIDE, GROUP), registers),
    )


def chunks_of_q(heads: int):
    """Shared memory of Q in chunks of 64 columns, each of which a TMA copy brings: (heads, 64, 9)."""
    tile = (heads, TOKENS_PER_TILE, Q_COLUMNS)
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, BFloat16, Q_CHUNKS)


@cute.jit
def prefetch_q(load_q: cute.CopyAtom, tQ: cute.Tensor, work: tuple, heads: cutlass.Constexpr):
    """Starts to bring rows of Q into L2. Called by one warp."""
    sQ = cute.make_tensor(cute.make_ptr(BFloat16, 0, AddressSpace.smem, assumed_align=1024), chunks_of_q(heads))
    _, tQgQ = _copies_of_q(load_q, tQ, work, heads, sQ)
    for c in cutlass.range(Q_CHUNKS, unroll=1):
        cute.prefetch(load_q, tQgQ[None, c])


@cute.jit
def start_q(
    smem,
    load_q: cute.CopyAtom,
    tQ: cute.Tensor,
    work: tuple,
    heads: cutlass.Constexpr,
    unrolled: cutlass.Constexpr = False,
):
    """Starts the load of this CTA's rows of Q. Called by one warp. As a loop it is short, and takes registers."""
    layout = chunks_of_q(heads)
    sQ = smem.q.get_tensor(layout.outer, swizzle=layout.inner)
    tQsQ, tQgQ = _copies_of_q(load_q, tQ, work, heads, sQ)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full.ptr, heads * QK * 2)
    if const_expr(unrolled):
        for c in cutlass.range_constexpr(Q_CHUNKS):
            cute.copy(load_q, tQgQ[None, c], tQsQ[None, c], tma_bar_ptr=smem.q_full.ptr)
    else:
        for c in cutlass.range(Q_CHUNKS, unroll=1):
            cute.copy(load_q, tQgQ[None, c], tQsQ[None, c], tma_bar_ptr=smem.q_full.ptr)


@cute.jit
def _copies_of_q(load_q: cute.CopyAtom, tQ: cute.Tensor, work: tuple, heads: cutlass.Constexpr, sQ: cute.Tensor):
    """What TMA copies take, (copy, chunk): `sQ`, and an item's rows of Q in global memory."""
    head_block, _, query_idx, batch_idx = work
    gQ = cute.local_tile(tQ, (heads, Q_COLUMNS), (head_block, None, query_idx, batch_idx))
    return cpasync.tma_partition(load_q, 0, cute.make_layout(1), cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2))


@cute.jit
def scales(smem, thr_qk, stage: Int32):
    """The scales of the columns of a thread's fragment of S: (fragment, GROUPS)."""
    layout = cute.make_layout((WIDE, TOKENS_PER_TILE, GROUPS), stride=(0, 1, TOKENS_PER_TILE))
    start = cute.assume(stage * (GROUPS * TOKENS_PER_TILE), divby=GROUPS * TOKENS_PER_TILE)
    return thr_qk.partition_C(cute.make_tensor(smem.scale.data_ptr() + start, layout))


def weights(smem, stage: Int32, group, tid: Int32) -> cute.Tensor:
    """Scales x WEIGHT of a group as float16, of the 16 columns that a thread has in S: (8, 2), each 8 of 32 keys.

    Keys are ordered by the thread that needs them: 32 x half, 8 x (tid % 4), 4 x (block of 16), 2 x (block of 8), 1.
    """
    start = (stage * GROUPS + group) * TOKENS_PER_TILE + tid % 4 * 8
    pointer = smem.weight.data_ptr() + cute.assume(start, divby=8)
    return cute.make_tensor(pointer, cute.make_layout((8, 2), stride=(1, TOKENS_PER_TILE // 2)))


def place_of_weight(token):
    """Where `weights` has that of a key of a tile."""
    return token // 32 * 32 + token % 8 // 2 * 8 + token // 16 % 2 * 4 + token // 8 % 2 * 2 + token % 2


def handed_over(smem, stage: Int32, tid: Int32) -> cute.Tensor:
    """A thread's fragment of P of the tile in a stage, over its rope block: (8, 64 / 16) float16.

    Columns 16 k and on are piece k of 16 bytes.
    """
    start = cute.assume(tid * 8 + stage * (TOKENS_PER_TILE * ROPE), divby=8)
    pointer = cute.recast_ptr(smem.rope.data_ptr(), dtype=Float16) + start
    return cute.make_tensor(pointer, cute.make_layout((8, TOKENS_PER_TILE // 16), stride=(1, 128 * 8)))


def row_states(smem, stage: Int32, tid: Int32):
    """What a thread's two rows (2) have with the tile in a stage: the factor of what came before, maxima, sums.

    Maxima and sums are those of the item, there with its last tile.
    """
    start, two = wgmma.row(tid, 0) + stage * WIDE, cute.make_layout(2, stride=8)
    arrays = (smem.rescaling, smem.row_max, smem.row_sum)
    return tuple(cute.make_tensor(array.data_ptr() + start, two) for array in arrays)


def units(smem, half, wg: Int32, tid: Int32) -> cute.Tensor:
    """What O of a thread's two rows (2) is kept times where weights do not do."""
    start, two = wgmma.row(tid, 0) + (2 * wg + half) * WIDE, cute.make_layout(2, stride=8)
    return cute.make_tensor(smem.units.data_ptr() + start, two)
