"""The softmax of the latent decode kernel: P of S."""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.mla.kernels.smem import WARPS
from cute_kernels.mla.kernels.softmax import SoftmaxWarpgroup
from cute_kernels.mla.latent.kernels.load import LatentLoader
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler
from cute_kernels.mla.latent.kernels.value_units import LatentValueUnits
from cute_kernels.mla.latent.spec import LatentDecodeSpec


class LatentSoftmaxWarpgroup(SoftmaxWarpgroup):
    """Device code for 128 threads; see `SoftmaxWarpgroup`."""

    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.units = LatentValueUnits(spec)
        self.loader = LatentLoader(spec)
        self.scheduler = LatentScheduler(spec)

    @cute.jit
    def late_flags(self, smem, stage: Int32, tid: Int32) -> Int32:
        """What QK finds in rope parts: BFLOAT16 where float16 does not hold them, NEEDS_SCALES."""
        flags = Int32(0)
        if const_expr(self.spec.has_rope):
            words = cute.make_rmem_tensor(WARPS, Int32)
            pointer = smem.rope_flags.data_ptr() + cute.assume(WARPS * stage, divby=WARPS)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WARPS)), words)
            flags = words[0] | words[1] | words[2] | words[3]
        return flags
