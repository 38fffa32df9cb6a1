"""The ring of key tiles as a consumer warpgroup of a query-stationary kernel sees it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device.pipeline import Slot


class KeyRing:
    """Device code; `spec` is of a query-stationary kernel."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def release(self, smem, empty: cute.Pointer, stage: Int32, kept):
        """Arrives for a tile that has been read; at barrier `kept`, which means nothing, if more heads need the tile.

        A branch around the arrival would cost more.
        """
        target = empty + stage
        if const_expr(self.spec.grouped):
            offset = smem.kept.ptr.toint() - empty.toint()
            target = empty + cutlass.select_(kept, Int32(offset) // 8, stage)
        cute.arch.mbarrier_arrive(target)

    @cute.jit
    def skip(self, smem, slot: Slot):
        """Releases a tile that none of these rows sees. Waiting for it first keeps two uses of a stage apart."""
        stage, phase = slot
        cute.arch.mbarrier_wait(smem.k_full.data_ptr() + stage, phase)
        cute.arch.mbarrier_arrive(smem.k_empty.data_ptr() + stage)
        cute.arch.mbarrier_wait(smem.v_full.data_ptr() + stage, phase)
        cute.arch.mbarrier_arrive(smem.v_empty.data_ptr() + stage)
