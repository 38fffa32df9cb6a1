"""Q of the latent decode kernel as float16, in place and in the order in which a thread reads keys."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from cute_kernels.mla.kernels.convert_q import QConverter
from cute_kernels.mla.kernels.tile import QUANT_TILE
from cute_kernels.mla.latent.spec import LatentDecodeSpec

BLOCK = QUANT_TILE  # columns that one thread converts at once, with a power of two of their own
HALF = BLOCK // 2


class LatentQConverter(QConverter):
    """Device code for all threads of the QK warpgroups; see `QConverter`.

    The last block of V4 is 64 columns of codes and the rope part, which stays bfloat16.
    """

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.spec = spec
        self.blocks = spec.d_qk // BLOCK
        self.ends_in_rope = spec.token_format.codes.count % BLOCK != 0
        self.rope_start = spec.token_format.codes.count // 8 if spec.has_rope else None

    @cute.jit
    def convert(self, smem, index: Int32, power: Int32):
        """Converts the index-th row of 128 numbers, block by block, times a power of two."""
        if const_expr(self.ends_in_rope):
            if index // self.heads == self.blocks - 1:
                self.convert_half(smem, index % self.heads, power)
            else:
                QConverter.convert(self, smem, index, power)
        else:
            QConverter.convert(self, smem, index, power)

    @cute.jit
    def convert_half(self, smem, row: Int32, power: Int32):
        """Converts 64 numbers that meet codes; lane 0 to 3 has 16 of them, in order."""
        start, chunks = (self.blocks - 1) * (BLOCK // 8), HALF // 8
        words = self.float16_words(smem, row, start, chunks, power)
        four = cute.make_rmem_tensor(4, Int32)
        for c in cutlass.range_constexpr(chunks):
            for lane in cutlass.range_constexpr(4):
                four[lane] = words[c % 4, 2 * lane + c // 4]
            cute.autovec_copy(cute.recast_tensor(four, BFloat16), self.chunk(smem, row, start + c))

    def first_rope_row(self, thread: Int32) -> Int32:
        """That of the last threads: they convert half blocks."""
        return self.threads - 1 - thread

    def block_chunks(self, block: Int32):
        """Chunks of eight numbers of a block that meet codes."""
        if self.ends_in_rope:
            return cutlass.select_(block == self.blocks - 1, Int32(HALF // 8), Int32(BLOCK // 8))
        return BLOCK // 8
