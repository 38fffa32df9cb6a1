"""Key tiles as a consumer warpgroup of a query-stationary kernel sees them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.sink.kernels.pipelines import query_pipelines


class KeyRing:
    """Device code; `spec` is of a query-stationary kernel. Tiles are counted through all work tiles of a CTA."""

    def __init__(self, spec):
        self.spec = spec
        _, _, self.k, self.v, self.kept = query_pipelines(spec)

    @cute.jit
    def release(self, smem, edge: cutlass.Constexpr[Pipeline], tile, kept):
        """Arrives for a tile of `edge` that has been read; on `self.kept` if more heads need the tile.

        A branch around the arrival would cost more, so the barrier is selected.
        """
        target = edge.empty_barrier(smem, edge.index(tile))
        if const_expr(self.spec.grouped):
            empty = edge.empty_barrier(smem, 0)
            offset = self.kept.empty_barrier(smem, 0).toint() - empty.toint()
            target = empty + cutlass.select_(kept, Int32(offset) // 8, edge.index(tile))
        cute.arch.mbarrier_arrive(target)

    @cute.jit
    def skip(self, smem, tile: Int32):
        """Releases a tile that none of these rows sees. Waiting for it first keeps two uses of a stage apart."""
        self.k.wait(smem, tile)
        self.k.release(smem, tile)
        self.v.wait(smem, tile)
        self.v.release(smem, tile)
