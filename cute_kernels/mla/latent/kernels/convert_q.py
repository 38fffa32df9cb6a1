"""Q in the order in which threads read keys, in place; it stays bfloat16."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.convert_q import PreparedQ, QConverter, code_chunk
from cute_kernels.mla.kernels.load_q import QTma
from cute_kernels.mla.kernels.scheduler import WorkTile
from cute_kernels.mla.kernels.smem import WARPS
from cute_kernels.mla.latent.spec import LatentDecodeSpec

EVEN, ODD = 0x5410, 0x7632  # PRMT: the lower halves of two words, the upper ones
BLOCK = 128  # columns that a thread reorders at once


class QReorderer(QConverter):
    """Device code for all threads of the QK warpgroups; see `QConverter` for the order.

    A word of a thread's keys has codes 0 and 2, or 1 and 3, of four; so have those of Q.
    """

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.spec = spec

    @cute.jit
    def prepare(self, smem, q_tma: QTma, work: WorkTile, loads: Int32, warp_idx: Int32, tid: Int32):
        """Reorders the Q of a work tile, after `loads` loads of Q; no QK is under way."""
        first = tid
        if const_expr(self.warpgroups > 1):
            first += 128 * (warp_idx // WARPS)
        blocks = self.spec.d_qk // BLOCK
        codes = self.spec.token_format.codes.count
        cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
        whole = self.heads * (codes // BLOCK)
        for index in cutlass.range(first, whole, self.threads, unroll=1):
            self.reorder_codes(smem, index % self.heads, index // self.heads * (BLOCK // 8), 2)
        if const_expr(codes % BLOCK != 0):  # half a block of codes, then the rope part
            for row in cutlass.range(first, self.heads, self.threads, unroll=1):
                self.reorder_codes(smem, row, (blocks - 1) * (BLOCK // 8), 1)
                self.reorder_rope(smem, row, codes // 8)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
        return PreparedQ(Int32(0), loads + 1)

    @cute.jit
    def reorder_codes(self, smem, row: Int32, start: Int32, halves: cutlass.Constexpr):
        """Reorders 64 or 128 columns of a row, from chunk `start` of eight on.

        Of block k of 16 columns, words `lane` are codes 4 k and 4 k + 2 of that lane's 16, words `lane` + 4 the others.
        """
        words = cute.make_rmem_tensor((4, 8 * halves), Int32)
        for c in cutlass.range_constexpr(8 * halves):
            cute.autovec_copy(cute.recast_tensor(self.chunk(smem, row, start + c), Int32), words[None, c])
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(8 * halves):
            for lane in cutlass.range_constexpr(4):
                own = code_chunk(lane, c // 8) if const_expr(halves == 2) else lane
                pair, odd = 8 * own + c % 8 // 2 * 2, c % 2
                low, high = words[pair % 4, pair // 4], words[(pair + 1) % 4, (pair + 1) // 4]
                four[lane] = Int32(cute.arch.prmt(low, high, Int32(ODD if odd else EVEN)))
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, start + c))
