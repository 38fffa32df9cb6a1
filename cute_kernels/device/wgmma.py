"""Warpgroup matrix multiply: issue helpers and views of its register fragments."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def issue(tiled_mma: cute.TiledMma, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate, k_blocks):
    """Issues acc = A B^T, or acc += A B^T, for pairs of k blocks: of tA (MMA, M, K) and of tB (MMA, N, K).

    It is asynchronous: the caller fences first, commits and waits afterwards.
    """
    # the atom is made where it is used: .set() on an atom from outside a dynamic branch does not dominate its use
    mma = cute.make_mma_atom(tiled_mma.op)
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for i in cutlass.range_constexpr(len(k_blocks)):
        a, b = k_blocks[i]
        cute.gemm(mma, acc, tA[None, None, a], tB[None, None, b], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)


@cute.jit
def every_thread(value: Int32, barrier_id: Int32, threads: cutlass.Constexpr = 128) -> Int32:
    """Returns 1 if `value` is nonzero in all calling `threads`, else 0: uniform, as wgmma in a branch requires."""
    return cute.arch.inline_ptx(
        f"{{\n.reg .pred p, q;\nsetp.ne.b32 p, {{$r0}}, 0;\nbarrier.cta.red.and.pred q, {{$r1}}, {threads}, p;\n"
        "selp.b32 {$w0}, 1, 0, q;\n}",
        write_only_types=[Int32],
        read_only_args=[value, barrier_id],
    )


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """Returns the m64nN accumulator of one thread as (2 rows, N / 4 columns).

    Element (r, c) is row 16 * warp + lane / 4 + 8 * r and column 8 * (c / 2) + 2 * (lane % 4) + c % 2 of the tile.
    """
    layout = cute.make_layout((2, (2, cute.size(acc) // 4)), stride=(2, (1, 4)))
    return cute.make_tensor(acc.iterator, cute.composition(acc.layout, layout))


def row(tid, r: int):
    """Returns which of the tile's 64 rows is the r-th of the two rows that thread `tid` of a warpgroup holds."""
    return tid // 32 * 16 + tid % 32 // 4 + 8 * r


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """Swaps the first two modes of a view of shared memory: a K-major (keys, d) tile as an MN-major (d, keys) one."""
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0, 2]))
