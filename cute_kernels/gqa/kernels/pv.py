"""PV of a consumer warp: O^T += V^T P^T for 16 keys of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import operands, registers
from cute_kernels.gqa.kernels.fragments import Fragments


class PV(Fragments):
    """Device code for one consumer warp. `raw` are registers with V in the cache's form."""

    @cute.jit
    def accumulate(self, acc_o: list, zeros: cute.Tensor, p: cute.Tensor, v_scale: cute.Tensor, raw: cute.Tensor):
        """Adds V^T P^T over the warp's keys to O^T; scales of V multiply P before it is rounded.

        Zero points add their part to `zeros`, times the same rounded numbers.
        """
        spec = self.spec
        mma = self.mma(self.v_dtype)
        groups = max(self.v_groups, 1)
        blocks = self.d // 16
        shape_b, shape_a = mma.partition_shape_B((8, 16)), mma.partition_shape_A((16, 16))
        b = [[mma.make_fragment_B(shape_b) for _ in range(groups)] for _ in range(self.n_tiles)]
        scaled_p = cute.make_rmem_tensor(4, Float32)
        zero_point = cute.make_rmem_tensor(2, Float32)
        if const_expr(spec.rotated):
            for k in cutlass.range_constexpr(2):
                zero_point[k] = self.centered_zero_point(v_scale[k, 0])
                v_scale[k, 0] = self.scale_of(v_scale[k, 0])
        for n in cutlass.range_constexpr(self.n_tiles):
            for group in cutlass.range_constexpr(groups):
                for k in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        scaled_p[2 * k + c] = p[k, 2 * n + c]
                        if const_expr(self.v_groups > 0):
                            scaled_p[2 * k + c] *= v_scale[k, group]
                rounded = self.store_p(scaled_p, b[n][group])
                if const_expr(spec.rotated):
                    for k in cutlass.range_constexpr(2):
                        # as bits, or the compiler would round each number alone, by an instruction of 1/16 the rate
                        pair = registers.opaque(rounded[k])
                        zeros[2 * n] += (pair << 16).bitcast(Float32) * zero_point[k]
                        zeros[2 * n + 1] += (pair & -65536).bitcast(Float32) * zero_point[k]
        a = mma.make_fragment_A(shape_a)
        for m in cutlass.range_constexpr(blocks):
            self.widen_v(a, [raw[i] for i in self.v_registers(m)], m)
            group = const_expr(m * groups // blocks)
            for n in cutlass.range_constexpr(self.n_tiles):
                acc = acc_o[m][n]
                cute.gemm(mma, acc, a[None, None, 0], b[n][group][None, None, 0], acc)

    @cute.jit
    def store_p(self, four: cute.Tensor, b: cute.Tensor) -> cute.Tensor:
        """Makes a fragment of B of a thread's P^T for 8 columns: keys g and g + 8 of two columns.

        Returns the two rounded pairs.
        """
        rounded = cute.make_rmem_tensor(4, self.v_dtype)
        rounded.store(four.load().to(self.v_dtype))
        r, target = cute.recast_tensor(rounded, Int32), cute.recast_tensor(b, Int32)
        target[0] = operands.transpose(r[0])
        target[1] = operands.transpose(r[1])
        return r
