"""Handles NaN and infinity in V or its scales, for keys that some queries of a sequence see and others do not.

Such a key has P = 0 for the queries that do not see it, and 0 x NaN is NaN. Several queries share all but a few keys at
both ends. If values or scales of such a block of 16 keys are not finite, the queries that see them get NaN, and the
products get zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import registers
from cute_kernels.gqa.kernels.pv import PV

LOWEST_BITS = {1: 0x01010101, 2: 0x00010001}  # lowest bits of the numbers in a register, by their bytes


class SpreadNan(PV):
    """Device code for one consumer warp."""

    @cute.jit
    def any_nan(self, raw: cute.Tensor, v_scale: cute.Tensor):
        """Returns whether a value or scale of the warp's keys is not finite."""
        signs, in_scales = Int32(0), False
        if const_expr(self.may_be_nan):
            for i in cutlass.range_constexpr(cute.size(raw)):
                signs |= self._not_finite(raw[i])
        for k in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(self.v_groups):
                in_scales = in_scales or self._is_nan(v_scale[k, group])
        return cute.arch.vote_any_sync(signs != 0 or in_scales)

    @cute.jit
    def spread(self, acc_o: list, raw: cute.Tensor, v_scale: cute.Tensor, sees: Int32):
        """Puts NaN into O if a column sees a value or scale that is not finite, and zeros in place of these.

        An infinity counts as NaN. sees: as `Softmax.mask` returns it.
        """
        if const_expr(self.v_groups > 0):
            self._spread_scales(acc_o, v_scale, sees)
        if const_expr(self.may_be_nan):
            self._spread_values(acc_o, raw, sees)

    @cute.jit
    def _spread_scales(self, acc_o: list, v_scale: cute.Tensor, sees: Int32):
        """Handles a scale that is not finite: NaN in all of its group."""
        blocks = self.d // 16
        for group in cutlass.range_constexpr(self.v_groups):
            nan_keys = [self._is_nan(v_scale[k, group]) for k in range(2)]
            keys = cutlass.select_(nan_keys[0], Int32(1), Int32(0)) | cutlass.select_(nan_keys[1], Int32(2), Int32(0))
            for k in cutlass.range_constexpr(2):
                v_scale[k, group] = cutlass.select_(nan_keys[k], Float32(0.0), v_scale[k, group])
            for i in cutlass.range_constexpr(self.thread_columns):
                found = (sees >> 2 * i) & keys
                for step in cutlass.range_constexpr(3):  # over lanes with other keys and the same columns
                    found |= cute.arch.shuffle_sync_bfly(found, 4 << step)
                for m in cutlass.range_constexpr(
                    group * blocks // self.v_groups, (group + 1) * blocks // self.v_groups
                ):
                    for e in cutlass.range_constexpr(2):
                        o = acc_o[m][i // 2][2 * e + i % 2]
                        acc_o[m][i // 2][2 * e + i % 2] = cutlass.select_(found != 0, Float32(float("nan")), o)

    @cute.jit
    def _spread_values(self, acc_o: list, raw: cute.Tensor, sees: Int32):
        """Handles values that are not finite: one more product, of 2 for each of them and 1 for each key that is seen.

        The product is positive for the numbers of O that see one of them.
        """
        spec = self.spec
        mma = self.mma(self.v_dtype)
        b = [mma.make_fragment_B(mma.partition_shape_B((8, 16))) for _ in range(self.n_tiles)]
        four = cute.make_rmem_tensor(4, Float32)
        for n in cutlass.range_constexpr(self.n_tiles):
            for k in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    is_seen = (sees >> 2 * (2 * n + c) + k) & 1
                    four[2 * k + c] = cutlass.select_(is_seen != 0, Float32(1.0), Float32(0.0))
            self.store_p(four, b[n])
        a = mma.make_fragment_A(mma.partition_shape_A((16, 16)))
        product = mma.make_fragment_C(mma.partition_shape_C((16, 8)))
        zero = Int32(0)
        for m in cutlass.range_constexpr(self.d // 16):
            # Found again for each block: keeping what `any_nan` has found would spill at d 256.
            found = [self._not_finite(registers.opaque(raw[i] + zero)) for i in self.v_registers(m)]
            self.widen_v(a, [(x >> 1) & 0x7FFFFFFF for x in found], m)  # 2.0 in all three types
            for n in cutlass.range_constexpr(self.n_tiles):
                product.fill(0.0)
                cute.gemm(mma, product, a[None, None, 0], b[n][None, None, 0], product)
                for e in cutlass.range_constexpr(4):
                    o = acc_o[m][n][e]
                    acc_o[m][n][e] = cutlass.select_(product[e] > 0.0, Float32(float("nan")), o)
            zero = product[0].bitcast(Int32) >> 31  # 0, since the product is not negative
            for i in cutlass.range_constexpr(len(found)):
                lowest = (found[i] >> (8 * spec.itemsize - 1)) & LOWEST_BITS[spec.itemsize]
                r = self.v_registers(m)[i]
                raw[r] = raw[r] & ((found[i] | (found[i] - lowest)) ^ Int32(-1))

    def _not_finite(self, x: Int32) -> Int32:
        """Returns the sign bits of the numbers in a register of values that are not finite."""
        assert self.codes.not_finite is not None
        bits, last, signs = self.codes.not_finite
        return ((x & Int32(bits)) + Int32(last)) & Int32(signs - (1 << 32))

    def _is_nan(self, scale: Float32):
        """Returns whether a scale is not finite."""
        return (scale.bitcast(Int32) & 0x7F800000) == 0x7F800000
