"""QK of a consumer warp: S^T = K Q^T for 16 keys of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device import operands
from cute_kernels.gqa.kernels.fragments import Fragments, Thread
from cute_kernels.gqa.spec import KEYS_PER_WARP as KEYS


class QK(Fragments):
    """Device code for one consumer warp."""

    @cute.jit
    def scores(self, k_scale: cute.Tensor, sQ: cute.Pointer, address: Int32, thread: Thread):
        """S^T of the warp's keys, scales of tokens and groups included: a fragment for each 8 columns.

        address: of K of the tile in shared memory.
        """
        spec = self.spec
        w, lane, _ = thread
        mma = self.mma(self.k_dtype)
        shape = mma.partition_shape_C((16, 8))
        # Two sums for each 8 columns: in a chain of products each waits 33 cycles for the one before it.
        chains = [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(2)]
        acc_s = [mma.make_fragment_C(shape) for _ in range(self.n_tiles)]
        steps = spec.d // 16
        group_steps = steps // max(self.k_groups, 1)
        words = cute.make_tensor(
            cute.recast_ptr(sQ, dtype=Int32),
            cute.make_ordered_layout((4, 32, steps // 2, self.n_tiles), order=(0, 1, 2, 3)),
        )
        a = mma.make_fragment_A(mma.partition_shape_A((16, 32)))
        b = mma.make_fragment_B(mma.partition_shape_B((8, 32)))
        b_words = cute.make_tensor(cute.recast_ptr(b.iterator, dtype=Int32), cute.make_layout(4))
        row = w * KEYS + self.key_row(lane % 16)
        half = lane // 16
        for pair in cutlass.range_constexpr(steps // 2):
            if const_expr(spec.bytes_cache):
                x = operands.load_matrices(self.chunk_address("k", address, row, 2 * pair, half), False)
                self.codes.widen_rows(a[None, 0, 0], x[0], x[1])
                self.codes.widen_rows(a[None, 0, 1], x[2], x[3])
            else:
                for i in cutlass.range_constexpr(2):
                    x = operands.load_matrices(self.chunk_address("k", address, row, 4 * pair + 2 * i, half), False)
                    operands.take(a[None, 0, i], x[0], x[1], x[2], x[3])
            for n in cutlass.range_constexpr(self.n_tiles):
                cute.autovec_copy(words[None, lane, pair, n], b_words)
                for i in cutlass.range_constexpr(2):
                    if const_expr(2 * pair % group_steps == 0):
                        chains[i][n].fill(0.0)
                    cute.gemm(mma, chains[i][n], a[None, None, i], b[None, None, i], chains[i][n])
            if const_expr(2 * (pair + 1) % group_steps == 0):
                group = const_expr(2 * pair // group_steps)
                for n in cutlass.range_constexpr(self.n_tiles):
                    for e in cutlass.range_constexpr(4):
                        x = chains[0][n][e] + chains[1][n][e]
                        if const_expr(self.k_groups > 0):
                            x *= k_scale[e // 2, group]
                        acc_s[n][e] = x if const_expr(group == 0) else acc_s[n][e] + x
        return acc_s
