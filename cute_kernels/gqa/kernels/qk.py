"""QK of a consumer warp: S^T = K Q^T for 16 keys of a tile; the warps of a team add up their parts of S.

With d 512 a team of four warps has 16 keys, and each warp a quarter of d. Each stores its part of S in shared memory,
and after a barrier of the team all four read all parts and add them in the same order. So they hold the same bits, and
none waits for another in softmax and PV. Two buffers of parts alternate: a warp that stores its next part has passed
the barrier of the tile between, which the other warps reach only after they have read this part.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import operands
from cute_kernels.gqa.kernels.fragments import Fragments, Thread
from cute_kernels.gqa.kernels.pipelines import NamedBarrier
from cute_kernels.gqa.kernels.smem import q_sums
from cute_kernels.gqa.spec import KEYS_PER_TEAM as KEYS


class QK(Fragments):
    """Device code for one consumer warp."""

    @cute.jit
    def scores(self, k_scales: list, sQ: cute.Pointer, address: Int32, thread: Thread):
        """Returns S^T of the warp's keys and part of d, scales and zero points included.

        k_scales: scales of each 16 keys. address: address of K of the tile in shared memory. Returns, for each 16 keys,
        a fragment for each 8 columns.
        """
        spec, keys = self.spec, len(k_scales)
        lane, part = thread.lane, thread.part
        address = self.part_address("k", address, part)
        mma = self.mma(self.k_dtype)
        shape = mma.partition_shape_C((16, 8))
        # There are two sums for each 8 columns, or one for each term of Q while registers suffice: in a chain of
        # products each waits 33 cycles for the one before it. A warp with 32 keys has twice as many chains anyway.
        num_chains = const_expr(2 * spec.q_terms if keys * spec.columns * spec.d <= 1024 else 2)
        chains = [
            [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(num_chains)] for _ in range(keys)
        ]
        acc_s = [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(keys)]
        steps = self.d // 16
        group_steps = steps // max(self.k_groups, 1)
        first = cute.recast_ptr(sQ, dtype=Int32)
        if const_expr(spec.d_split > 1):
            first += cute.assume(part * (64 * steps), divby=64 * steps)
        words = cute.make_tensor(
            first,
            cute.make_layout(
                (4, 32, steps // 2, self.n_tiles, spec.q_terms),
                stride=(1, 4, 128, 4 * spec.d, spec.columns * spec.d // 2),
            ),
        )
        a = [mma.make_fragment_A(mma.partition_shape_A((16, 32))) for _ in range(keys)]
        b = mma.make_fragment_B(mma.partition_shape_B((8, 32)))
        b_words = cute.make_tensor(cute.recast_ptr(b.iterator, dtype=Int32), cute.make_layout(4))
        row = thread.team * KEYS + self.key_row(lane % 16)
        addresses = [self.block_address("k", address, block) for block in range(keys)]
        half = lane // 16
        raw: list = [None] * keys
        for pair in cutlass.range_constexpr(steps // 2):
            for block in cutlass.range_constexpr(keys):
                if const_expr(spec.bytes_cache):
                    values = const_expr(self.codes.values)
                    if const_expr(pair % values == 0):
                        chunk = const_expr(2 * pair // values)
                        at = self.chunk_address("k", addresses[block], row, chunk, half)
                        raw[block] = operands.load_matrices(at, False)
                    x = raw[block]
                    for i in cutlass.range_constexpr(2):
                        step = const_expr(2 * (pair % values) + i)  # which of the steps in these registers
                        register, shift = const_expr(step // values * 2), const_expr(8 * (step % values))
                        self.codes.widen_rows(a[block][None, 0, i], x[register] >> shift, x[register + 1] >> shift)
                else:
                    for i in cutlass.range_constexpr(2):
                        at = self.chunk_address("k", addresses[block], row, 4 * pair + 2 * i, half)
                        operands.take(a[block][None, 0, i], *operands.load_matrices(at, False))
            for n in cutlass.range_constexpr(self.n_tiles):
                for term in cutlass.range_constexpr(spec.q_terms):
                    cute.autovec_copy(words[None, lane, pair, n, term], b_words)
                    for i in cutlass.range_constexpr(2):
                        chain = const_expr((2 * term + i) % num_chains)
                        for block in cutlass.range_constexpr(keys):
                            sums = chains[block][chain][n]
                            if const_expr(2 * pair % group_steps == 0 and 2 * term + i == chain):
                                sums.fill(0.0)
                            cute.gemm(mma, sums, a[block][None, None, i], b[None, None, i], sums)
            if const_expr(2 * (pair + 1) % group_steps == 0):
                group = const_expr(2 * pair // group_steps)
                for block in cutlass.range_constexpr(keys):
                    k_scale, sums = k_scales[block], chains[block]
                    for n in cutlass.range_constexpr(self.n_tiles):
                        for e in cutlass.range_constexpr(4):
                            s = sums[0][n][e] + sums[1][n][e]
                            if const_expr(num_chains == 4):
                                s += sums[2][n][e] + sums[3][n][e]
                            if const_expr(spec.k_rotated):
                                q_sum = q_sums(spec, sQ)[self.column(2 * n + e % 2, lane)]
                                s -= self.centered_zero_point(k_scale[e // 2, group]) * q_sum
                                s *= self.scale_of(k_scale[e // 2, group])
                            elif const_expr(self.k_groups > 0):
                                s *= k_scale[e // 2, group]
                            acc_s[block][n][e] = s if const_expr(group == 0) else acc_s[block][n][e] + s
        return acc_s

    @cute.jit
    def store_part(self, acc_s: list, parts: cute.Pointer, thread: Thread):
        """Stores this warp's part of S where the other warps of its team read it."""
        for n in cutlass.range_constexpr(self.n_tiles):
            target = self._part(parts, thread.warp, n, thread.lane)
            for e in cutlass.range_constexpr(4):
                target[e] = acc_s[n][e]

    @cute.jit
    def sum_of_parts(self, acc_s: list, parts: cute.Pointer, thread: Thread):
        """Sums S of the whole team into `acc_s`; waits for the team's warps."""
        split = self.spec.d_split
        cute.arch.barrier(barrier_id=NamedBarrier.TEAM + thread.team, number_of_threads=32 * split)
        other = cute.make_rmem_tensor(4, Float32)
        for n in cutlass.range_constexpr(self.n_tiles):
            for part in cutlass.range_constexpr(split):
                cute.autovec_copy(self._part(parts, thread.team * split + part, n, thread.lane), other)
                for e in cutlass.range_constexpr(4):
                    acc_s[n][e] = other[e] if const_expr(part == 0) else acc_s[n][e] + other[e]

    def _part(self, parts: cute.Pointer, warp: Int32, n: int, lane: Int32) -> cute.Tensor:
        """Returns a lane's values of a warp's fragment of S for 8 columns."""
        offset = cute.assume(((warp * self.n_tiles + n) * 32 + lane) * 4, divby=4)
        return cute.make_tensor(parts + offset, cute.make_layout(4))
