"""The softmax of the latent decode kernel: P of S as bfloat16, and the multipliers of V."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from cute_kernels.mla.kernels.smem import OUT_OF_RANGE, place_of_weight
from cute_kernels.mla.kernels.softmax import SoftmaxWarpgroup
from cute_kernels.mla.latent.kernels import codes
from cute_kernels.mla.latent.kernels.load import LatentLoader
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler
from cute_kernels.mla.latent.kernels.smem import scale_words
from cute_kernels.mla.latent.spec import LatentDecodeSpec
from cute_kernels.mla.spec import TOKENS_PER_TILE


class LatentSoftmaxWarpgroup(SoftmaxWarpgroup):
    """Device code for 128 threads; see `SoftmaxWarpgroup`."""

    p_dtype = BFloat16
    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.loader = LatentLoader(spec)
        self.scheduler = LatentScheduler(spec)

    @cute.jit
    def store_weights(self, smem, stage: Int32, p_stage: Int32, tid: Int32) -> Int32:
        """Multipliers of scales, half of a key's; OUT_OF_RANGE if a scale of this warp's keys needs a second one."""
        key, count = tid // 2, self.spec.scale_bytes // 2
        first = count * (tid % 2)
        words = cute.make_rmem_tensor(count // 4, Int32)
        scale_words(smem, self.spec, stage, key, first, words)
        layout = cute.make_layout((TOKENS_PER_TILE, self.spec.p_stages * self.spec.scale_bytes))
        sWeight = smem.weight.get_tensor(layout)
        place, large = place_of_weight(key), Int32(0)
        for i in cutlass.range_constexpr(count // 4):
            word = words[i]
            if const_expr(self.spec.token_format.num_scales < self.spec.scale_bytes):
                if tid % 2 == 1:
                    word &= 0x00FFFFFF  # the last byte is padding
            large |= codes.large_bytes(word)
            for j in cutlass.range_constexpr(4):
                pair = cute.make_rmem_tensor(1, Int32)
                pair[0] = codes.multiplier(codes.byte_pair(word, codes.selector(j)))
                number = cute.recast_tensor(pair, BFloat16)[0]
                sWeight[place, p_stage * self.spec.scale_bytes + first + 4 * i + j] = number
        return Int32(OUT_OF_RANGE) if cute.arch.vote_any_sync(large != 0) else Int32(0)
