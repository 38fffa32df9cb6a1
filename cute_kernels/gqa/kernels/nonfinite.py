"""Values and scales that are not finite, of keys that some queries see and others do not.

A key that a query does not see has P = 0 for it, and 0 x NaN is NaN. Several queries share all but a few keys at both
ends: where values or scales of such a block of 16 keys are not finite, the query rows that see them get NaN here, and
the product gets zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import registers
from cute_kernels.gqa.kernels.pv import ValueMma

# In a register of values: the bits that are all ones where a number is not finite (of e4m3: is NaN), the last of them,
# which when added to them meets the sign, and the signs
NOT_FINITE = {
    "float8_e4m3fn": (0x7F7F7F7F, 0x01010101, 0x80808080),
    "bfloat16": (0x7F807F80, 0x00800080, 0x80008000),
    "float16": (0x7C007C00, 0x04000400, 0x80008000),
}
LOWEST_BITS = {1: 0x01010101, 2: 0x00010001}  # of the numbers in a register, by their bytes


class NonFinite(ValueMma):
    """Device code for a consumer warp."""

    @cute.jit
    def any(self, raw: cute.Tensor, v_scale: cute.Tensor):
        """Whether a value or scale of the warp's keys is not finite."""
        seen, outside = Int32(0), False
        if const_expr(not self.is_int8):
            for i in cutlass.range_constexpr(cute.size(raw)):
                seen |= self.signs_of_nonfinite(raw[i])
        for k in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(self.v_groups):
                outside = outside or self.is_nonfinite(v_scale[k, group])
        return cute.arch.vote_any_sync(seen != 0 or outside)

    @cute.jit
    def spread(self, acc_o, raw: cute.Tensor, v_scale: cute.Tensor, sees: Int32):
        """Puts NaN into O where a query row sees a value or scale that is not finite, and zeros in place of these.

        An infinity counts as NaN. Which numbers of a row become NaN: a product finds out, of what is not finite and of
        what is seen. `sees` has bit 2 i + k where the i-th query row of this thread sees its key k.
        """
        spec = self.spec
        blocks = spec.d // 16
        for group in cutlass.range_constexpr(self.v_groups):
            nan_keys = [self.is_nonfinite(v_scale[k, group]) for k in range(2)]
            keys = cutlass.select_(nan_keys[0], Int32(1), Int32(0)) | cutlass.select_(nan_keys[1], Int32(2), Int32(0))
            for k in cutlass.range_constexpr(2):
                v_scale[k, group] = cutlass.select_(nan_keys[k], Float32(0.0), v_scale[k, group])
            for i in cutlass.range_constexpr(self.thread_rows):
                found = (sees >> 2 * i) & keys
                for step in cutlass.range_constexpr(3):  # lanes with other keys, and the same query rows
                    found |= cute.arch.shuffle_sync_bfly(found, 4 << step)
                for m in cutlass.range_constexpr(
                    group * blocks // self.v_groups, (group + 1) * blocks // self.v_groups
                ):
                    for e in cutlass.range_constexpr(2):
                        o = acc_o[m][i // 2][2 * e + i % 2]
                        acc_o[m][i // 2][2 * e + i % 2] = cutlass.select_(found != 0, Float32(float("nan")), o)
        if const_expr(not self.is_int8):
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
            nothing = Int32(0)
            for m in cutlass.range_constexpr(blocks):
                # after the block before, instead of what `any` has found: all at once, d 256 would spill
                found = [self.signs_of_nonfinite(registers.anew(raw[i] + nothing)) for i in self.registers_of_block(m)]
                self.widen(a, [(x >> 1) & 0x7FFFFFFF for x in found])  # 2.0 in all three types
                for n in cutlass.range_constexpr(self.n_tiles):
                    product.fill(0.0)
                    cute.gemm(mma, product, a[None, None, 0], b[n][None, None, 0], product)
                    for e in cutlass.range_constexpr(4):
                        o = acc_o[m][n][e]
                        acc_o[m][n][e] = cutlass.select_(product[e] > 0.0, Float32(float("nan")), o)
                nothing = product[0].bitcast(Int32) >> 31  # 0, for it is no negative number
                for i in cutlass.range_constexpr(len(found)):
                    lowest = (found[i] >> (8 * spec.itemsize - 1)) & LOWEST_BITS[spec.itemsize]
                    r = self.registers_of_block(m)[i]
                    raw[r] = raw[r] & ((found[i] | (found[i] - lowest)) ^ Int32(-1))

    def signs_of_nonfinite(self, x: Int32) -> Int32:
        """The sign bits of the numbers in a register of values that are not finite."""
        bits, last, signs = NOT_FINITE[self.spec.kv_dtype]
        return ((x & Int32(bits)) + Int32(last)) & Int32(signs - (1 << 32))

    def is_nonfinite(self, scale: Float32):
        """Whether a scale is not finite."""
        return (scale.bitcast(Int32) & 0x7F800000) == 0x7F800000
