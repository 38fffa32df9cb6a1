"""The end of a sequence in the decode kernel: warps of a CTA meet, and CTAs that share a sequence are merged."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int32, Int64, const_expr

from cute_kernels.device import cluster as cluster_shared
from cute_kernels.device import softmax
from cute_kernels.gqa.kernels.attend import SINK, UNIT, column_facts
from cute_kernels.gqa.spec import GqaDecodeSpec

BAR_CONSUMERS = 1
OUTPUTS = {"bfloat16": BFloat16, "float16": Float16}
AT_ONCE = 8  # states that a thread reads at a time while it merges


class Finisher:
    """Device code for the consumer threads of :class:`cute_kernels.gqa.kernels.decode.GqaDecodeKernel`.

    A thread has four neighbours of d of some columns. A state in scratch memory is columns x d values of O, then
    (maximum, sum) of each column, all float32; values are relative to the maximum, in units of log2.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.threads = 32 * spec.warps
        self.vectors = spec.d // 4  # of a column
        self.turns = -(-spec.columns * self.vectors // self.threads)
        self.state = spec.columns * (spec.d + 2)
        self.interleaved_d = spec.bytes_cache and not spec.packed

    @cute.jit
    def meet(
        self,
        acc_o,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        sums: cute.Pointer,
        stats: cute.Pointer,
        w: Int32,
        lane: Int32,
    ):
        """Every warp's O, relative to the maxima of all, into shared memory; its own maxima and sums into `stats`."""
        spec = self.spec
        g, t = lane // 4, lane % 4
        sStats = self._stats(stats)
        for i in cutlass.range_constexpr(spec.columns // 4):
            for step in cutlass.range_constexpr(3):
                row_sum[i] += cute.arch.shuffle_sync_bfly(row_sum[i], 4 << step)
            if g == 0:
                n = 8 * (i // 2) + 2 * t + i % 2
                sStats[n, w, 0] = row_max[i]
                sStats[n, w, 1] = row_sum[i]
        self._sync()
        sSums = self._sums(sums)
        for i in cutlass.range_constexpr(spec.columns // 4):
            n = 8 * (i // 2) + 2 * t + i % 2
            factor = softmax.rescaling(row_max[i], self._peak(sStats, n))
            for m in cutlass.range_constexpr(spec.d // 16):
                for e in cutlass.range_constexpr(2):
                    d = 16 * m + (2 * g + e if const_expr(self.interleaved_d) else g + 8 * e)
                    sSums[d, n, w] = acc_o[m][i // 2][2 * e + i % 2] * factor
        self._sync()

    @cute.jit
    def store(
        self,
        sums: cute.Pointer,
        stats: cute.Pointer,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        facts: cute.Pointer,
        place,
        s_q: Int32,
        tidx: Int32,
    ):
        """The result of a sequence that this CTA has read alone."""
        spec = self.spec
        b, kv_head, block, ratio = place
        sStats = self._stats(stats)
        sFacts = column_facts(spec, facts)
        for turn in cutlass.range_constexpr(self.turns):
            n, vector = self._item(tidx, turn)
            row = block * spec.columns + n
            if n < spec.columns and row < ratio.divisor * s_q:
                token, r = divmod(row, ratio)
                head = kv_head * ratio.divisor + r
                peak, total = self._totals(sStats, n)
                acc = self._added(sums, n, vector, spec.warps)
                share = self._share(peak, total, sFacts[n, SINK]) * sFacts[n, UNIT]
                self._write(mOut[b, token, head, None], acc, share, vector)
                if vector == 0:
                    mLse[b, token, head] = softmax.log_sum_exp(peak, total)

    @cute.jit
    def store_partial(
        self, sums: cute.Pointer, stats: cute.Pointer, scratch: Int64, slot: Int32, place, s_q: Int32, tidx: Int32
    ):
        """The state of a part of a sequence into scratch memory."""
        spec = self.spec
        _, _, block, ratio = place
        sStats = self._stats(stats)
        values, totals = self._states(scratch, slot)
        for turn in cutlass.range_constexpr(self.turns):
            n, vector = self._item(tidx, turn)
            if n < spec.columns and block * spec.columns + n < ratio.divisor * s_q:
                acc = self._added(sums, n, vector, spec.warps)
                cute.autovec_copy(acc, values[None, vector, n, 0])
                if vector == 0:
                    peak, total = self._totals(sStats, n)
                    totals[0, n, 0] = peak
                    totals[1, n, 0] = total

    @cute.jit
    def count(self, counter: Int64, sharing: Int32, arrived: cute.Pointer, tidx: Int32):
        """Counts this CTA's part as written. True for the last of `sharing`, which then sees all parts.

        acq_rel: what the barrier has collected is visible before the count, and what others counted after it.
        """
        sArrived = cute.make_tensor(arrived, cute.make_layout(1))
        self._sync()
        if tidx == 0:
            pointer = cute.make_ptr(Int32, counter, AddressSpace.gmem, assumed_align=4)
            before = cute.arch.atomic_add(pointer, Int32(1), sem="acq_rel", scope="gpu")
            sArrived[0] = before
            if before == sharing - 1:
                cute.arch.store(pointer, Int32(0))
        self._sync()
        return sArrived[0] == sharing - 1

    @cute.jit
    def merge(
        self,
        sums: cute.Pointer,
        scratch: Int64,
        first: Int32,
        distance: Int32,
        sharing: Int32,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        facts: cute.Pointer,
        place,
        s_q: Int32,
        tidx: Int32,
    ):
        """Merges `sharing` states: the opening one in slot first + 1, the i-th of the others in first + i * distance.

        A warp takes the i-th, (i + parts)-th, ... states of a column; few columns leave several warps to each. All
        loads of a turn are started before the first is waited for, then the parts are added in shared memory.
        """
        spec = self.spec
        b, kv_head, block, ratio = place
        w, lane = tidx // 32, tidx % 32
        sFacts = column_facts(spec, facts)
        rows = cutlass.min(ratio.divisor * s_q - block * spec.columns, spec.columns)
        shared = cutlass.min(rows, spec.warps)  # columns at a time
        parts = spec.warps // shared
        part = w // shared
        per_lane = const_expr(max(self.vectors // 32, 1))
        raw = cute.make_rmem_tensor((4, per_lane, AT_ONCE), Float32)
        peaks = cute.make_rmem_tensor(AT_ONCE, Float32)
        others = cute.make_rmem_tensor((2, 2), Float32)
        acc = cute.make_rmem_tensor((4, per_lane), Float32)
        sSums = self._sums(sums)
        for turn in cutlass.range_constexpr(max(spec.columns // spec.warps, 1)):
            n = w % shared + turn * spec.warps
            if n < rows and part < parts:
                # of this warp's states: `running`, the maximum that acc is relative to; of all states, a part of them
                # in each lane: maximum and sum
                running, peak, total = -Float32.inf, -Float32.inf, Float32(0.0)
                acc.fill(0.0)
                step = AT_ONCE * parts  # up to 64 states, so two in each lane
                for i in cutlass.range(0, sharing, step, unroll=1):
                    for j in cutlass.range_constexpr(AT_ONCE):
                        state = i + part + j * parts
                        values, totals = self._states(
                            scratch, self._slot(first, distance, cutlass.min(state, sharing - 1))
                        )
                        peaks[j] = totals[0, n, 0]
                        for v in cutlass.range_constexpr(per_lane):
                            vector = cutlass.min(lane + 32 * v, self.vectors - 1)
                            cute.autovec_copy(values[None, vector, n, 0], raw[None, v, j])
                    for j in cutlass.range_constexpr(2):
                        state = cutlass.min(i + lane + 32 * j, sharing - 1)
                        _, totals = self._states(scratch, self._slot(first, distance, state))
                        cute.autovec_copy(totals[None, n, 0], others[None, j])
                    for j in cutlass.range_constexpr(2):
                        inside = lane + 32 * j < step and i + lane + 32 * j < sharing
                        new_peak = cute.arch.fmax(peak, cutlass.select_(inside, others[0, j], -Float32.inf))
                        weight = softmax.rescaling(others[0, j], new_peak)
                        total = total * softmax.rescaling(peak, new_peak)
                        total += cutlass.select_(inside, weight * others[1, j], Float32(0.0))
                        peak = new_peak
                    new_running = running
                    for j in cutlass.range_constexpr(AT_ONCE):
                        new_running = cute.arch.fmax(new_running, peaks[j])
                    for c in cutlass.range_constexpr(4 * per_lane):
                        acc[c] *= softmax.rescaling(running, new_running)
                    running = new_running
                    for j in cutlass.range_constexpr(AT_ONCE):
                        inside = i + part + j * parts < sharing
                        weight = cutlass.select_(inside, softmax.rescaling(peaks[j], running), Float32(0.0))
                        for v in cutlass.range_constexpr(per_lane):
                            for c in cutlass.range_constexpr(4):
                                acc[c, v] += weight * raw[c, v, j]
                all_peak = cute.arch.warp_reduction(peak, cute.arch.fmax)
                total = cute.arch.warp_reduction_sum(total * softmax.rescaling(peak, all_peak))
                share = self._share(all_peak, total, sFacts[n, SINK]) * sFacts[n, UNIT]
                share *= softmax.rescaling(running, all_peak)
                if part == 0 and lane == 0:
                    token, r = divmod(block * spec.columns + n, ratio)
                    mLse[b, token, kv_head * ratio.divisor + r] = softmax.log_sum_exp(all_peak, total)
                for v in cutlass.range_constexpr(per_lane):
                    vector = lane + 32 * v
                    if vector < self.vectors:
                        for c in cutlass.range_constexpr(4):
                            sSums[4 * vector + c, n, part] = acc[c, v] * share
        self._sync()
        # ---- the parts of each column
        for turn in cutlass.range_constexpr(self.turns):
            n, vector = self._item(tidx, turn)
            if n < rows:
                token, r = divmod(block * spec.columns + n, ratio)
                self._write(
                    mOut[b, token, kv_head * ratio.divisor + r, None],
                    self._added(sums, n, vector, parts),
                    Float32(1.0),
                    vector,
                )

    @cute.jit
    def merge_cluster(
        self, sums: cute.Pointer, stats: cute.Pointer, mOut: cute.Tensor, mLse: cute.Tensor, facts: cute.Pointer, place,
        s_q: Int32, tidx: Int32,
    ):  # fmt: skip
        """Merges the states of a cluster: every CTA leaves its own in shared memory and merges an eighth of the values.

        Eight neighbouring threads read the same four values of the eight CTAs and add them up by shuffles.
        """
        spec = self.spec
        cluster = spec.cluster
        b, kv_head, block, ratio = place
        sStats, sSums, sFacts = self._stats(stats), self._sums(sums), column_facts(spec, facts)
        for turn in cutlass.range_constexpr(self.turns):
            n, vector = self._item(tidx, turn)
            if n < spec.columns:
                acc = self._added(sums, n, vector, spec.warps)
                for c in cutlass.range_constexpr(4):
                    sSums[4 * vector + c, n, 0] = acc[c]
                if vector == 0:
                    peak, total = self._totals(sStats, n)
                    sStats[n, 0, 0] = peak
                    sStats[n, 0, 1] = total
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        items = const_expr(spec.columns * self.vectors // cluster)  # of this CTA
        at_once = const_expr(self.threads // cluster)
        rank, other = cute.arch.block_idx_in_cluster(), tidx % cluster
        for turn in cutlass.range_constexpr(-(-items // at_once)):
            own = turn * at_once + tidx // cluster
            item = rank * items + cutlass.min(own, items - 1)
            n, vector = item // self.vectors, item % self.vectors
            values = cluster_shared.remote_vector(sums + n * spec.sums_stride + 4 * vector, other)
            peak = cluster_shared.remote_value(stats + n, other)
            total = cluster_shared.remote_value(stats + n + spec.columns * spec.warps, other)
            all_peak = cute.arch.warp_reduction(peak, cute.arch.fmax, threads_in_group=cluster)
            weight = softmax.rescaling(peak, all_peak)
            total = cute.arch.warp_reduction_sum(total * weight, threads_in_group=cluster)
            acc = cute.make_rmem_tensor(4, Float32)
            for c in cutlass.range_constexpr(4):
                acc[c] = cute.arch.warp_reduction_sum(values[c] * weight, threads_in_group=cluster)
            row = block * spec.columns + n
            if other == 0 and own < items and row < ratio.divisor * s_q:
                token, r = divmod(row, ratio)
                head = kv_head * ratio.divisor + r
                share = self._share(all_peak, total, sFacts[n, SINK]) * sFacts[n, UNIT]
                self._write(mOut[b, token, head, None], acc, share, vector)
                if vector == 0:
                    mLse[b, token, head] = softmax.log_sum_exp(all_peak, total)
        # no CTA may leave while another reads its shared memory
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # ---- parts

    def _sync(self):
        cute.arch.barrier(barrier_id=BAR_CONSUMERS, number_of_threads=self.threads)

    def _stats(self, stats: cute.Pointer) -> cute.Tensor:
        """(column, warp, maximum or sum)."""
        return cute.make_tensor(stats, cute.make_layout((self.spec.columns, self.spec.warps, 2)))

    def _sums(self, sums: cute.Pointer) -> cute.Tensor:
        """(d, column, warp)."""
        spec = self.spec
        stride = (1, spec.sums_stride, spec.sums_stride * spec.columns)
        return cute.make_tensor(sums, cute.make_layout((spec.d, spec.columns, self.spec.warps), stride=stride))

    def _item(self, tidx, turn: int):
        """(column, vector of four in it) of a thread."""
        item = tidx + turn * self.threads
        return item // self.vectors, item % self.vectors

    def _slot(self, first, distance, i):
        return first + i * distance + cutlass.select_(i == 0, Int32(1), Int32(0))

    def _states(self, scratch: Int64, slot: Int32):
        """O (4, vector, column, 1) and (maximum or sum, column, 1) of the state in a slot."""
        spec = self.spec
        address = scratch + Int64(slot) * (4 * self.state)
        pointer = cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=16)
        shape = (4, self.vectors, spec.columns, 1)
        values = cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=(0, 1, 2, 3)))
        shape = cute.make_layout((2, spec.columns, 1), stride=(1, 2, 2 * spec.columns))
        return values, cute.make_tensor(pointer + spec.columns * spec.d, shape)

    @cute.jit
    def _peak(self, sStats: cute.Tensor, n: Int32) -> Float32:
        peak = sStats[n, 0, 0]
        for w in cutlass.range_constexpr(1, self.spec.warps):
            peak = cute.arch.fmax(peak, sStats[n, w, 0])
        return peak

    @cute.jit
    def _totals(self, sStats: cute.Tensor, n: Int32):
        """(maximum, sum) of a column over all warps."""
        peak, total = self._peak(sStats, n), Float32(0.0)
        for w in cutlass.range_constexpr(self.spec.warps):
            total += sStats[n, w, 1] * softmax.rescaling(sStats[n, w, 0], peak)
        return peak, total

    @cute.jit
    def _added(self, sums: cute.Pointer, n: Int32, vector: Int32, parts) -> cute.Tensor:
        """Four values of O of a column, added up over the first `parts` warps."""
        spec = self.spec
        acc, other = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        for w in cutlass.range(parts, unroll=spec.warps):
            at = sums + cute.assume((w * spec.columns + n) * spec.sums_stride + 4 * vector, divby=4)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), other)
            for c in cutlass.range_constexpr(4):
                acc[c] += other[c]
        return acc

    @cute.jit
    def _share(self, peak: Float32, total: Float32, sink: Float32) -> Float32:
        """1 / the denominator, sink included; 0 without keys."""
        joined = total + cute.math.exp2(sink * softmax.LOG2_E - softmax.finite(peak), fastmath=True)
        return cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(joined))

    @cute.jit
    def _write(self, row: cute.Tensor, acc: cute.Tensor, factor: Float32, vector: Int32):
        rounded = cute.make_rmem_tensor(4, OUTPUTS[self.spec.q_dtype])
        rounded.store((acc.load() * factor).to(OUTPUTS[self.spec.q_dtype]))
        pointer = row.iterator + cute.assume(4 * vector, divby=4)
        cute.autovec_copy(rounded, cute.make_tensor(pointer, cute.make_layout(4)))
