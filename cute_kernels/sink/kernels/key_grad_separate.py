"""Consumer warpgroups of the key-stationary kernel without dq: each computes dK and dV of 64 keys.

A query tile, 128 queries at d 64, begins with S^T = K Q^T in flight. "Wait n" leaves n wgmma groups in flight.
    wait 0: S^T is complete       issue dP^T = V dO^T; P^T = exp2(S^T scale - L), masked, rounded
    issue dV += P^T dO            wait 1: dP^T is complete: dS^T = P^T (dP^T - delta), rounded
    issue dK += dS^T Q            wait 1: dV is complete, so P^T is no operand any more
    issue S^T of the next tile    wait 1: dK is complete: release the tile

Only S^T is in flight from one iteration of the loop to the next: with dP^T as well, ptxas serializes the products. It
also serializes them (C7512) if P^T is still an operand when S^T of the next tile is issued.

If the spec `skips`, tiles have 64 queries, S^T is issued with dP^T, and a warpgroup skips tiles whose queries see none
of its keys.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import wgmma
from cute_kernels.sink.kernels.key_grad_mma import KeyBlocks, KeyGrad, Place, QueryTiles, column_stats


class SeparateKeyGrad(KeyGrad):
    """Device code of a consumer warpgroup, which has one block of 64 keys; see the module's docstring."""

    @cute.jit
    def add_tiles(
        self, smem, acc_s: cute.Tensor, keys: KeyBlocks, tiles: QueryTiles, ring_tile: Int32, place: Place
    ) -> Int32:
        """Does what `KeyGrad.add_tiles` does."""
        spec = self.spec
        queries, ratio, scale_log2 = tiles
        tid = place.tid
        total, t = ratio * queries.tiles, Int32(0)
        if const_expr(spec.skips):
            for _ in cutlass.range(total, unroll=1):
                query = queries.begin + spec.queries * t
                if query + spec.queries > keys.seen.begin and query < keys.seen.end:
                    self.issue_scores(smem, acc_s, keys.k[0], ring_tile, tid)
                    self.differentiate(smem, acc_s, keys, scale_log2, query, ring_tile, tid)
                    warpgroup.wait_group(0)
                else:  # without this wait, two releases of the stage could fall into one phase
                    smem.q_full.data_ptr()  # see `start`
                    self.edges.q.wait(smem, ring_tile)
                self.edges.q.release(smem, ring_tile)
                ring_tile += 1
                t = cutlass.select_(t == queries.tiles - 1, Int32(0), t + 1)
        elif total > 0:
            self.issue_scores(smem, acc_s, keys.k[0], ring_tile, tid)
            for i in cutlass.range(total, unroll=1):
                query = queries.begin + spec.queries * t
                self.differentiate(smem, acc_s, keys, scale_log2, query, ring_tile, tid)
                # after the last tile S^T is issued again, for nothing: a branch would serialize the products
                following = cutlass.select_(i == total - 1, ring_tile, ring_tile + 1)
                self.issue_scores(smem, acc_s, keys.k[0], following, tid)
                warpgroup.wait_group(1)
                self.edges.q.release(smem, ring_tile)
                ring_tile += 1
                t = cutlass.select_(t == queries.tiles - 1, Int32(0), t + 1)
            warpgroup.wait_group(0)
        return ring_tile

    @cute.jit
    def differentiate(
        self, smem, acc_s: cute.Tensor, keys: KeyBlocks, scale_log2: Float32, query: Int32, ring_tile: Int32, tid: Int32
    ):
        """Adds the query tile from `query` on to dK / softmax_scale and to dV.

        The tile's S^T is in flight at the beginning, its dK at the end.
        """
        spec = self.spec
        acc_dp = cute.make_rmem_tensor(acc_s.shape, Float32)
        s, dp = wgmma.by_row(acc_s), wgmma.by_row(acc_dp)
        stage = self.edges.q.index(ring_tile)
        # L and delta of this thread's columns: column 8j + 2 (lane % 4) + c is element c of pair j
        thread_stats = smem.stats.data_ptr() + cute.assume(stage * 2 * spec.queries + 2 * (tid % 4), divby=2)
        if const_expr(not spec.skips):
            warpgroup.wait_group(0)
            warpgroup.fence()
        self.issue_transposed(keys.v[0], smem.d_out, acc_dp, stage, tid)
        if const_expr(spec.skips):
            warpgroup.wait_group(1)
        self.masks.mask(acc_s, query, keys.limits[0])
        for j in cutlass.range_constexpr(spec.queries // 8):  # pair by pair: all pairs together take too many registers
            values = column_stats(thread_stats + 8 * j, 8)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    s[r, 2 * j + c] = cute.math.exp2(s[r, 2 * j + c] * scale_log2 - values[c], fastmath=True)
        self.issue_gradient(keys.d_v[0], self.rounded(acc_s), smem.d_out, stage, tid)

        warpgroup.wait_group(1)
        for j in cutlass.range_constexpr(spec.queries // 8):
            values = column_stats(thread_stats + spec.queries + 8 * j, 8)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    s[r, 2 * j + c] *= dp[r, 2 * j + c] - values[c]
        self.issue_gradient(keys.d_k[0], self.rounded(acc_s), smem.q, stage, tid)
        warpgroup.wait_group(1)
