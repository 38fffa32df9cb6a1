"""TMA loads of Q: the rows of a work tile into shared memory, or into L2."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import AddressSpace, BFloat16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.mla.kernels.scheduler import WorkTile
from cute_kernels.mla.kernels.tile import QK
from cute_kernels.mla.spec import WGMMA_ROWS

Q_COLUMNS = 64  # columns of a TMA load: 128 bytes


def q_layout(heads: int, columns: int = QK):
    """Returns the layout of Q in shared memory: (heads, columns, 1)."""
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (heads, WGMMA_ROWS, columns), BFloat16, 1)


def q_chunk_layout(heads: int, columns: int):
    """Returns the layout of Q in chunks of 64 columns, one for each TMA load: (heads, 64, chunks)."""
    tile = (heads, WGMMA_ROWS, Q_COLUMNS)
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, BFloat16, columns // Q_COLUMNS)


def q_pipeline(heads: int, columns: int) -> Pipeline:
    """Makes the edge from TMA to Q's readers. Its tiles are loads; readers meet at a named barrier between two."""
    return Pipeline("q", producers=1, bytes=2 * heads * columns, full="Q is loaded")


class QTma(NamedTuple):
    """The TMA load of Q: the atom, and a tensor (heads, columns, queries, requests)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def make_q_tma(mQ: cute.Tensor, heads: int) -> QTma:
    """Makes the TMA load with heads and columns first, so that TMA zero-fills past the last head."""
    mQ_tile = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, mode=[2, 3, 1, 0]))
    chunk = cute.select(q_chunk_layout(heads, mQ.shape[3]), mode=[0, 1])
    operation = cpasync.CopyBulkTensorTileG2SOp()
    return QTma(*cpasync.make_tiled_tma_atom(operation, mQ_tile, chunk, (heads, Q_COLUMNS)))


@cute.jit
def prefetch_q(load_q: cute.CopyAtom, tQ: cute.Tensor, work: WorkTile, heads: cutlass.Constexpr):
    """Starts loading rows of Q into L2. Called by one warp."""
    layout = q_chunk_layout(heads, tQ.shape[1])
    sQ = cute.make_tensor(cute.make_ptr(BFloat16, 0, AddressSpace.smem, assumed_align=1024), layout)
    _, tQgQ = _partition_q(load_q, tQ, work, heads, sQ)
    for c in cutlass.range(tQ.shape[1] // Q_COLUMNS, unroll=1):
        cute.prefetch(load_q, tQgQ[None, c])


@cute.jit
def start_q(
    smem,
    load_q: cute.CopyAtom,
    tQ: cute.Tensor,
    work: WorkTile,
    heads: cutlass.Constexpr,
    unrolled: cutlass.Constexpr = False,
):
    """Starts loading this CTA's rows of Q. Called by one warp. Unrolled it takes more registers."""
    columns = const_expr(tQ.shape[1])
    layout = q_chunk_layout(heads, columns)
    sQ = smem.q.get_tensor(layout.outer, swizzle=layout.inner)
    tQsQ, tQgQ = _partition_q(load_q, tQ, work, heads, sQ)
    edge = q_pipeline(heads, columns)
    full = edge.full_barrier(smem, 0)
    with cute.arch.elect_one():
        edge.arrive_and_expect(smem, Int32(0))
    if const_expr(unrolled):
        for c in cutlass.range_constexpr(columns // Q_COLUMNS):
            cute.copy(load_q, tQgQ[None, c], tQsQ[None, c], tma_bar_ptr=full)
    else:
        for c in cutlass.range(columns // Q_COLUMNS, unroll=1):
            cute.copy(load_q, tQgQ[None, c], tQsQ[None, c], tma_bar_ptr=full)


@cute.jit
def _partition_q(load_q: cute.CopyAtom, tQ: cute.Tensor, work: WorkTile, heads: cutlass.Constexpr, sQ: cute.Tensor):
    """Returns the operands of TMA loads, (load, chunk): `sQ`, and the rows of Q of a work tile in global memory."""
    gQ = cute.local_tile(tQ, (heads, Q_COLUMNS), (work.head_block, None, work.query, work.request))
    return cpasync.tma_partition(load_q, 0, cute.make_layout(1), cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2))
