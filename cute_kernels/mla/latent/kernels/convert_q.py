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
        cute.arch.mbarrier_wait(smem.q_full.ptr, loads % 2)
        if const_expr(self.spec.few_heads):
            self.reorder_in_parts(smem, first)
        else:
            self.reorder_rows(smem, first)
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)
        return PreparedQ(Int32(0), loads + 1)

    @cute.jit
    def reorder_rows(self, smem, first: Int32):
        """Reorders all of Q, 128 columns of a row at once."""
        codes = self.spec.token_format.codes.count
        for index in cutlass.range(first, self.heads * (codes // BLOCK), self.threads, unroll=1):
            self.reorder_codes(smem, index % self.heads, index // self.heads * (BLOCK // 8), 2)
        if const_expr(codes % BLOCK != 0):  # half a block of codes, then the rope part
            for row in cutlass.range(first, self.heads, self.threads, unroll=1):
                self.reorder_codes(smem, row, codes // BLOCK * (BLOCK // 8), 1)
                self.reorder_rope(smem, row, codes // 8)

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

    @cute.jit
    def reorder_in_parts(self, smem, thread: Int32):
        """The same by four threads for each 128 columns of a row: 16 words of each, where registers are few."""
        index, part = thread // 4, thread % 4
        row, block = index % self.heads, index // self.heads
        blocks, codes = self.spec.d_qk // BLOCK, self.spec.token_format.codes.count
        has_rope = codes % BLOCK != 0  # the last block is half codes, half rope part
        words, four = cute.make_rmem_tensor(16, Int32), cute.make_rmem_tensor(4, Int32)
        start = block * (BLOCK // 8)
        if block < blocks:
            for own in cutlass.range_constexpr(8):
                self.load_words(smem, row, start + 2 * own, part, words, 2 * own)
            if const_expr(has_rope):
                if block == blocks - 1:
                    for c in cutlass.range_constexpr(8):
                        words[8 + c] = cute.recast_tensor(self.chunk(smem, row, start + 8 + c), Int32)[part]
        cute.arch.barrier(barrier_id=NamedBarrier.QK, number_of_threads=self.threads)  # all have loaded
        if block < blocks:
            is_last = False
            if const_expr(has_rope):
                is_last = block == blocks - 1
            for c in cutlass.range_constexpr(4):  # half a block, words of each half of a block of 16 columns
                half, odd = c // 2, c % 2
                for lane in cutlass.range_constexpr(4):
                    own = code_chunk(lane, half)
                    word = Int32(cute.arch.prmt(words[2 * own], words[2 * own + 1], Int32(ODD if odd else EVEN)))
                    if is_last:
                        if const_expr(half == 0):
                            low, high = words[2 * lane], words[2 * lane + 1]
                            word = Int32(cute.arch.prmt(low, high, Int32(ODD if odd else EVEN)))
                        else:
                            word = words[8 + code_chunk(lane, odd)]
                    four[lane] = word
                place = start + 8 * half + 2 * part + odd
                if is_last:
                    if const_expr(half == 1):
                        place = start + 8 + part + 4 * odd
                cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, place))

    @cute.jit
    def load_words(self, smem, row: Int32, c, part: Int32, words: cute.Tensor, first: cutlass.Constexpr):
        """Two neighbouring words of a thread's 16 numbers, chunks `c` and `c` + 1 of eight."""
        chunk = self.chunk(smem, row, c + part // 2)
        pair = cute.make_tensor(
            cute.recast_ptr(chunk.iterator + cute.assume(part % 2 * 4, divby=4), dtype=Int32), cute.make_layout(2)
        )
        two = cute.make_rmem_tensor(2, Int32)
        cute.autovec_copy(pair, two)
        words[first], words[first + 1] = two[0], two[1]
