"""P as two bfloat16 numbers: key tiles of the latent decode kernel whose scales are far apart."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import pairs
from cute_kernels.mla.kernels.pipelines import NamedBarrier
from cute_kernels.mla.kernels.pv import PvWarpgroups
from cute_kernels.mla.kernels.smem import HALVES


class HalvesPvWarpgroups(PvWarpgroups):
    """Device code for 2 x 128 threads; see `PvWarpgroups`."""

    @cute.jit
    def add_bfloat16(
        self, smem, mma: cute.TiledMma, acc_o, flags: Int32, stage: Int32, p_stage: Int32, line: Int32, wg, tid
    ):
        """As `PvWarpgroups.add_bfloat16`; with HALVES P is two numbers of bfloat16, which takes twice as long."""
        words = self.words_of_p(smem, p_stage, wg, tid)
        p = cute.make_rmem_tensor(cute.size(words), Int32)
        cute.autovec_copy(words, p)
        halves = Int32(2) if flags & HALVES != 0 else Int32(1)
        for half in cutlass.range(halves, unroll=1):
            cute.arch.barrier(
                barrier_id=NamedBarrier.PV, number_of_threads=256
            )  # all have multiplied by the other half
            for i in cutlass.range_constexpr(cute.size(words)):
                rounded = pairs.half_to_bfloat16(p[i])
                if half != 0:
                    rounded = pairs.half_minus_bfloat16(p[i], rounded)
                words[i] = rounded
            self.share_p()
            self.add_rounded(smem, mma, acc_o, stage, p_stage, line, wg, tid)
