"""Merges sequences that several CTAs share: by partials in global memory, or within a cluster.

A partial is columns x d values of O, then (row_max, row_sum) of each column, all float32; O is relative to row_max, in
units of log2. The CTA that counts itself as the last of a sequence merges its partials, in the order of the line: no
CTA waits, and the order of additions is fixed.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr

from cute_kernels.device import cluster as cluster_shared
from cute_kernels.device import softmax
from cute_kernels.gqa.kernels.arguments import QueryBlock, Tensors
from cute_kernels.gqa.kernels.epilogue import Epilogue
from cute_kernels.gqa.kernels.smem import (
    O_SCALE,
    SINK,
    SmemViews,
    column_constants,
    warp_o_tensor,
    warp_softmax_tensor,
)
from cute_kernels.gqa.spec import GqaDecodeSpec

PARTIALS_IN_FLIGHT = 8  # partials that a thread loads at a time while it merges


class SharedSequence(NamedTuple):
    """Partials of a sequence: the one with its first tile is in slot first + 1, the i-th other in first + i * stride.

    address  address of slot 0
    count    number of the partials
    """

    address: Int64
    first: Int32
    stride: Int32
    count: Int32


class Merge(Epilogue):
    """Device code for all consumer threads."""

    def __init__(self, spec: GqaDecodeSpec):
        super().__init__(spec)
        self.partial_floats = spec.columns * (spec.d + 2)
        self.per_lane = max(self.vectors // 32, 1)  # vectors of a column that a lane adds up

    @cute.jit
    def store_partial(self, smem: SmemViews, address: Int64, slot: Int32, query: QueryBlock, tidx: Int32):
        """Stores the partial of this CTA into a slot of the scratch memory at `address`."""
        spec = self.spec
        _, _, block, ratio, s_q = query
        values, stats = self._partial(address, slot)
        for i in cutlass.range_constexpr(self.rounds):
            n, vector = self.vector_of(tidx, i)
            if n < spec.columns and block * spec.columns + n < ratio.divisor * s_q:
                acc, row_max, row_sum = self.merge_warps(smem, n, vector)
                cute.autovec_copy(acc, values[None, vector, n, 0])
                if vector == 0:
                    stats[0, n, 0] = row_max
                    stats[1, n, 0] = row_sum

    @cute.jit
    def count(self, counter: Int64, sharers: Int32, arrived: cute.Pointer, tidx: Int32):
        """Counts this CTA's partial as written. Returns True to the last of `sharers`, which then sees all partials.

        acq_rel: stores before the barrier are visible before the count, and other CTAs' stores after it.
        """
        sArrived = cute.make_tensor(arrived, cute.make_layout(1))
        self.sync()
        if tidx == 0:
            pointer = cute.make_ptr(Int32, counter, AddressSpace.gmem, assumed_align=4)
            earlier = cute.arch.atomic_add(pointer, Int32(1), sem="acq_rel", scope="gpu")
            sArrived[0] = earlier
            if earlier == sharers - 1:
                cute.arch.store(pointer, Int32(0))
        self.sync()
        return sArrived[0] == sharers - 1

    @cute.jit
    def merge(
        self,
        smem: SmemViews,
        shared: SharedSequence,
        tensors: Tensors,
        constants: cute.Pointer,
        query: QueryBlock,
        tidx: Int32,
    ):
        """Merges the partials of a sequence.

        Warp i of a column takes every (warps of a column)-th partial from the i-th on; with few columns several warps
        share each. All loads of a round start before the first wait. Then the sums of these warps are added in shared
        memory.
        """
        spec = self.spec
        b, kv_head, block, ratio, s_q = query
        w = tidx // 32
        rows = cutlass.min(ratio.divisor * s_q - block * spec.columns, spec.columns)
        columns_at_once = cutlass.min(rows, spec.warps)
        column_warps = spec.warps // columns_at_once
        if const_expr(spec.d_split > 1):  # each warp leaves its sum in the O of a team
            column_warps = cutlass.min(column_warps, spec.teams)
        rank = w // columns_at_once  # number of this warp among those of a column
        for i_round in cutlass.range_constexpr(max(spec.columns // spec.warps, 1)):
            n = w % columns_at_once + i_round * spec.warps
            if n < rows and rank < column_warps:
                self._merge_column(smem, shared, tensors.mLse, constants, query, n, rank, column_warps, tidx % 32)
        self.sync()
        # ---- the sums of the warps of each column
        for i_round in cutlass.range_constexpr(self.rounds):
            n, vector = self.vector_of(tidx, i_round)
            if n < rows:
                token, r = divmod(block * spec.columns + n, ratio)
                acc = self.sum_of_warps(smem, n, vector, column_warps)
                self.unrotate(acc, vector)
                self.write(tensors.mOut[b, token, kv_head * ratio.divisor + r, None], acc, Float32(1.0), vector)

    @cute.jit
    def _merge_column(
        self,
        smem: SmemViews,
        shared: SharedSequence,
        mLse: cute.Tensor,
        constants: cute.Pointer,
        query: QueryBlock,
        n: Int32,
        rank: Int32,
        column_warps: Int32,
        lane: Int32,
    ):
        """Stores this warp's share of a column, the sum of its partials relative to all, and the log-sum-exp."""
        spec = self.spec
        sConstants, sO = column_constants(spec, constants), warp_o_tensor(spec, smem)
        raw = cute.make_rmem_tensor((4, self.per_lane, PARTIALS_IN_FLIGHT), Float32)
        maxima = cute.make_rmem_tensor(PARTIALS_IN_FLIGHT, Float32)
        others = cute.make_rmem_tensor((2, 2), Float32)
        acc = cute.make_rmem_tensor((4, self.per_lane), Float32)
        # acc_max: maximum of this warp's partials, which acc is relative to
        # row_max, row_sum: over all partials; each lane has some of them
        acc_max, row_max, row_sum = -Float32.inf, -Float32.inf, Float32(0.0)
        acc.fill(0.0)
        step = PARTIALS_IN_FLIGHT * column_warps  # up to 64 partials, so two in each lane
        for i in cutlass.range(0, shared.count, step, unroll=1):
            self._load_partials(shared, raw, maxima, others, n, i + rank, column_warps, i + lane, lane)
            row_max, row_sum = self._add_stats(others, row_max, row_sum, lane, step, shared.count - i)
            acc_max = self._add_partials(acc, raw, maxima, acc_max, i + rank, column_warps, shared.count)
        final_max = cute.arch.warp_reduction(row_max, cute.arch.fmax)
        row_sum = cute.arch.warp_reduction_sum(row_sum * softmax.rescaling(row_max, final_max))
        factor = self.normalization(final_max, row_sum, sConstants[n, SINK]) * sConstants[n, O_SCALE]
        factor *= softmax.rescaling(acc_max, final_max)
        if rank == 0 and lane == 0:
            token, r = divmod(query.block * spec.columns + n, query.ratio)
            mLse[query.sequence, token, query.kv_head * query.ratio.divisor + r] = softmax.log_sum_exp(
                final_max, row_sum
            )
        for v in cutlass.range_constexpr(self.per_lane):
            vector = lane + 32 * v
            if vector < self.vectors:
                for c in cutlass.range_constexpr(4):
                    sO[4 * vector + c, n, rank] = acc[c, v] * factor

    @cute.jit
    def _load_partials(
        self,
        shared: SharedSequence,
        raw,
        maxima,
        others,
        n: Int32,
        first: Int32,
        step: Int32,
        other: Int32,
        lane: Int32,
    ):
        """Starts the loads of a round: this warp's partials first, first + step, ..., and the stats of two per lane."""
        last = shared.count - 1
        for j in cutlass.range_constexpr(PARTIALS_IN_FLIGHT):
            slot = slot_of_partial(shared, cutlass.min(first + j * step, last))
            values, stats = self._partial(shared.address, slot)
            maxima[j] = stats[0, n, 0]
            for v in cutlass.range_constexpr(self.per_lane):
                vector = cutlass.min(lane + 32 * v, self.vectors - 1)
                cute.autovec_copy(values[None, vector, n, 0], raw[None, v, j])
        for j in cutlass.range_constexpr(2):
            _, stats = self._partial(shared.address, slot_of_partial(shared, cutlass.min(other + 32 * j, last)))
            cute.autovec_copy(stats[None, n, 0], others[None, j])

    @cute.jit
    def _add_stats(self, others, row_max: Float32, row_sum: Float32, lane: Int32, step: Int32, left: Int32):
        """Returns (row_max, row_sum) with two more partials added, of `step` in a round and `left` in all."""
        for j in cutlass.range_constexpr(2):
            is_partial = lane + 32 * j < step and lane + 32 * j < left
            new_max = cute.arch.fmax(row_max, cutlass.select_(is_partial, others[0, j], -Float32.inf))
            weight = softmax.rescaling(others[0, j], new_max)
            row_sum = row_sum * softmax.rescaling(row_max, new_max)
            row_sum += cutlass.select_(is_partial, weight * others[1, j], Float32(0.0))
            row_max = new_max
        return row_max, row_sum

    @cute.jit
    def _add_partials(self, acc, raw, maxima, acc_max: Float32, first: Int32, step: Int32, count: Int32) -> Float32:
        """Adds a round of partials to `acc`; returns the maximum that `acc` is relative to then."""
        new_max = acc_max
        for j in cutlass.range_constexpr(PARTIALS_IN_FLIGHT):
            new_max = cute.arch.fmax(new_max, maxima[j])
        for c in cutlass.range_constexpr(4 * self.per_lane):
            acc[c] *= softmax.rescaling(acc_max, new_max)
        for j in cutlass.range_constexpr(PARTIALS_IN_FLIGHT):
            is_partial = first + j * step < count
            weight = cutlass.select_(is_partial, softmax.rescaling(maxima[j], new_max), Float32(0.0))
            for v in cutlass.range_constexpr(self.per_lane):
                for c in cutlass.range_constexpr(4):
                    acc[c, v] += weight * raw[c, v, j]
        return new_max

    @cute.jit
    def merge_cluster(self, smem: SmemViews, tensors: Tensors, constants: cute.Pointer, query: QueryBlock, tidx: Int32):
        """Merges the results of a cluster's CTAs: each leaves its own in shared memory and merges a part of the values.

        As many neighbouring threads as CTAs read the same vector, each from one CTA, and add them up by shuffles.
        """
        spec = self.spec
        cluster = spec.cluster
        b, kv_head, block, ratio, s_q = query
        mOut, mLse = tensors.mOut, tensors.mLse
        sSoftmax, sO, sConstants = (
            warp_softmax_tensor(spec, smem),
            warp_o_tensor(spec, smem),
            column_constants(spec, constants),
        )
        for i in cutlass.range_constexpr(self.rounds):
            n, vector = self.vector_of(tidx, i)
            if n < spec.columns:
                acc, row_max, row_sum = self.merge_warps(smem, n, vector)
                self.unrotate(acc, vector)
                for c in cutlass.range_constexpr(4):
                    sO[4 * vector + c, n, 0] = acc[c]
                if vector == 0:
                    sSoftmax[n, spec.teams, 0] = row_max
                    sSoftmax[n, spec.teams, 1] = row_sum
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cta_vectors = const_expr(spec.columns * self.vectors // cluster)  # vectors that this CTA merges
        vectors_per_pass = const_expr(self.threads // cluster)
        rank, other = cute.arch.block_idx_in_cluster(), tidx % cluster
        for i in cutlass.range_constexpr(-(-cta_vectors // vectors_per_pass)):
            own = i * vectors_per_pass + tidx // cluster
            index = rank * cta_vectors + cutlass.min(own, cta_vectors - 1)
            n, vector = index // self.vectors, index % self.vectors
            values = cluster_shared.remote_vector(smem.warp_o + n * spec.warp_o_stride + 4 * vector, other)
            stats = smem.warp_softmax + n + spec.columns * spec.teams
            row_max = cluster_shared.remote_value(stats, other)
            row_sum = cluster_shared.remote_value(stats + spec.columns * (spec.teams + 1), other)
            final_max = cute.arch.warp_reduction(row_max, cute.arch.fmax, threads_in_group=cluster)
            weight = softmax.rescaling(row_max, final_max)
            row_sum = cute.arch.warp_reduction_sum(row_sum * weight, threads_in_group=cluster)
            acc = cute.make_rmem_tensor(4, Float32)
            for c in cutlass.range_constexpr(4):
                acc[c] = cute.arch.warp_reduction_sum(values[c] * weight, threads_in_group=cluster)
            row = block * spec.columns + n
            if other == 0 and own < cta_vectors and row < ratio.divisor * s_q:
                token, r = divmod(row, ratio)
                head = kv_head * ratio.divisor + r
                factor = self.normalization(final_max, row_sum, sConstants[n, SINK]) * sConstants[n, O_SCALE]
                self.write(mOut[b, token, head, None], acc, factor, vector)
                if vector == 0:
                    mLse[b, token, head] = softmax.log_sum_exp(final_max, row_sum)
        # no CTA may leave while another reads its shared memory
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _partial(self, address: Int64, slot: Int32):
        """Views O (4, vector, column, 1) and (row_max or row_sum, column, 1) of the partial in a slot."""
        spec = self.spec
        start = address + Int64(slot) * (4 * self.partial_floats)
        pointer = cute.make_ptr(Float32, start, AddressSpace.gmem, assumed_align=16)
        shape = (4, self.vectors, spec.columns, 1)
        values = cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))
        shape = cute.make_layout((2, spec.columns, 1), stride=(1, 2, 2 * spec.columns))
        return values, cute.make_tensor(pointer + spec.columns * spec.d, shape)


def slot_of_partial(shared: SharedSequence, i):
    """Returns the slot of the i-th partial of a sequence."""
    return shared.first + i * shared.stride + cutlass.select_(i == 0, Int32(1), Int32(0))
