"""The softmax of the latent decode kernel: P of S, and the weights of V."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, const_expr

from cute_kernels.mla.kernels.smem import OUT_OF_RANGE, WARPS, place_of_weight
from cute_kernels.mla.kernels.softmax import SoftmaxWarpgroup
from cute_kernels.mla.latent.kernels import codes
from cute_kernels.mla.latent.kernels.load import LatentLoader
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler
from cute_kernels.mla.latent.kernels.smem import SMALL_SCALE, scale_words
from cute_kernels.mla.latent.spec import LatentDecodeSpec, scale_row
from cute_kernels.mla.spec import TOKENS_PER_TILE


class LatentSoftmaxWarpgroup(SoftmaxWarpgroup):
    """Device code for 128 threads; see `SoftmaxWarpgroup`."""

    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.loader = LatentLoader(spec)
        self.scheduler = LatentScheduler(spec)

    @cute.jit
    def store_weights(self, smem, stage: Int32, p_stage: Int32, tid: Int32) -> Int32:
        """Scales x codes.WEIGHT as float16, half of a key's; which flags hold for one of this warp's keys."""
        kinds = self.spec.kinds
        found = small = Int32(0)
        if const_expr(len(kinds) > 1):
            if smem.kinds.get_tensor(cute.make_layout(self.spec.stages))[stage] == 0:
                found, small = self.store_weights_of(smem, kinds[0], stage, p_stage, tid)
            else:
                found, small = self.store_weights_of(smem, kinds[1], stage, p_stage, tid)
        else:
            found, small = self.store_weights_of(smem, kinds[0], stage, p_stage, tid)
        flags = Int32(OUT_OF_RANGE) if cute.arch.vote_any_sync(found != 0) else Int32(0)
        if const_expr(self.spec.split):  # of partials
            if cute.arch.vote_any_sync(small != 0):
                flags |= SMALL_SCALE
        return flags

    @cute.jit
    def store_weights_of(
        self, smem, kind: cutlass.Constexpr, stage: Int32, p_stage: Int32, tid: Int32
    ) -> tuple[Int32, Int32]:
        """The same for a tile of that format; not 0 where a scale of this thread is out of range, or small."""
        key, count = tid // 2, scale_row(kind) // 2
        first = count * (tid % 2)
        words = cute.make_rmem_tensor(count // 4, Int32)
        scale_words(smem, self.spec, stage, key, first, words)
        layout = cute.make_layout((TOKENS_PER_TILE, self.spec.p_stages * self.spec.scale_bytes))
        sWeight = smem.weight.get_tensor(layout)
        place, own = place_of_weight(key), codes.of(kind)
        found = small = Int32(0)
        for i in cutlass.range_constexpr(count // 4):
            word, masks = words[i], (own.scale_mask(i), own.scale_mask(count // 4 + i))
            counted = Int32(masks[0])
            if const_expr(masks[0] != masks[1]):
                counted = cutlass.select_(tid % 2 == 1, Int32(masks[1]), Int32(masks[0]))
            found |= own.out_of_range(word) & counted
            small |= own.is_small(word) & counted
            at_once = 2 if self.spec.expands else 1  # such a key has 32 scales, not 16 or 8
            for j in cutlass.range_constexpr(0, 4, at_once):
                pair, second = cute.make_rmem_tensor(2, Float16), Int32(j + 1) if at_once == 2 else None
                cute.recast_tensor(pair, Int32)[0] = own.multiplier(word, Int32(j), second)
                for k in cutlass.range_constexpr(at_once):
                    sWeight[place, p_stage * self.spec.scale_bytes + first + 4 * i + j + k] = pair[k]
        return found, small

    def late_flags(self, smem, stage: Int32, tid: Int32) -> Any:
        """OUT_OF_RANGE where float16 does not hold the rope parts of a warp's keys, which QK finds."""
        if not self.spec.has_rope:
            return None
        return smem.rope_flags.get_tensor(cute.make_layout((WARPS, self.spec.stages)))[tid // 32, stage]
