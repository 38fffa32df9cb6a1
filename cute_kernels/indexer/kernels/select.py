"""Finds the positions of the highest logits of a row, in order, exactly."""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.device import cluster as cluster_shared
from cute_kernels.indexer.kernels import bins
from cute_kernels.indexer.topk_spec import BINS, MAX_TOPK, QUAD, WARP, TopkSpec

BITS_ABOVE = 0x0F0F0F0F
"""Bits of a word of marks for chosen logits, one bit each. The other bits mark logits between two bounds."""
VECTORS = 4  # vectors of a quad and lane
GROUPS = BINS // WARP


class Row(NamedTuple):
    """A row of logits. Its *cells* are float32 numbers from a multiple of 16 bytes on, where the row need not begin.

    base        address of cell 0
    begin, end  the cells that count
    first       the first quad (512 cells) of this warp
    quads       number of quads of this warp
    """

    base: Int64
    begin: Int32
    end: Int32
    first: Int32
    quads: Int32


class Memory(NamedTuple):
    """Shared memory of a CTA, as pointers to 32-bit words.

    histograms  two of 2048 bins, used in turn
    marks       marks of each warp's cells, in order: a byte has four cells' bits, for above `hi`, then between bounds
    keys        keys of the cells between bounds, a list a warp
    places      bit positions of the marks of these cells
    chosen      positions by their place in the result, only this CTA's
    counts      of each warp: number of cells above, and of cells between bounds
    listed      of each warp: length of its list, which may exceed its capacity
    groups      sums of 32 bins, of both histograms
    found       the crossing bin, and the number of keys above it and in it
    range       this CTA's part of the results: (begin, end)
    """

    histograms: cute.Pointer
    marks: cute.Pointer
    keys: cute.Pointer
    places: cute.Pointer
    chosen: cute.Pointer
    counts: cute.Pointer
    listed: cute.Pointer
    groups: cute.Pointer
    found: cute.Pointer
    range: cute.Pointer


class TopkKernel:
    """logits (rows, width) -> out (rows, topk): positions or slots of the highest, ascending, in one launch.

    A cluster of CTAs shares a row. Each warp has a range of neighbouring quads of 512 logits; it reads the first of
    them once and keeps their keys. No atomic decides anything: they add to counters, and the result is a function of
    the logits alone.

    1. Count all keys in a histogram of 2048 bins (32 a binade). Each CTA reads what it needs of the cluster's
       histograms through distributed shared memory, and finds the *crossing bin*, where the wanted count is reached.
    2. Mark each logit, in order: above the crossing bin, within, or neither. Logits within are listed, and counted in
       2048 parts of their bin, which gives a narrower crossing bin.
    3. Go through the list again: move logits above the new bin, drop those below, count the rest, until a bin is taken
       as a whole or is one key wide. A warp whose list overflowed marks its range again instead.
    4. Add up marks over warps and CTAs. Logits above the last bin are taken, and in it the lowest positions.
    5. Each CTA writes its part of the result: positions in shared memory first, then all slots at once.

    Rows of at most topk logits are listed from 0 on. Marks are private to a warp until step 4. Barriers: for each
    histogram one of the cluster and two of the CTA, and two at the end.

    | shared memory        | bytes                 | 160 quads      |
    |----------------------|-----------------------|----------------|
    | histograms           | 2 x 8192              | 16384          |
    | marks                | 128 x quads           | 20480          |
    | keys, places         | 2 x 8192              | 16384          |
    | chosen               | 8192                  | 8192           |
    | counts, groups       |                       | 720            |
    """

    def __init__(self, spec: TopkSpec) -> None:
        reasons = spec.can_implement()
        if reasons:
            raise ValueError(f"{spec}: " + "; ".join(reasons))
        self.spec = spec
        self.cluster, self.held = spec.cluster, spec.held

    @cute.jit
    def __call__(
        self,
        mLogits: cute.Tensor,
        mLengths: cute.Tensor,
        mStarts: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mOut: cute.Tensor,
        page_size: Int32,
        num_slots: Int64,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        mLogits (rows, width) float32, rows contiguous and any distance apart; mLengths and mStarts (rows,) int32;
        mTable (batch, pages) int32, rows a multiple of batch; mOut (rows, topk) int32. A slot of
        `num_slots` or more becomes -1. mStarts and mTable are None exactly if the spec says so.
        """
        if const_expr((mTable is not None) != self.spec.has_table or (mStarts is not None) != self.spec.has_starts):
            raise TypeError(f"{self.spec} was given a table {mTable} and starts {mStarts}")
        rows = Int32(mLogits.shape[0])
        divisors = (
            cute.fast_divmod_create_divisor_v2(self._rows_a_table(rows, mTable)),
            cute.fast_divmod_create_divisor_v2(page_size),
        )
        self._kernel(mLogits, mLengths, mStarts, mTable, mOut, (page_size, num_slots), divisors).launch(
            grid=[rows * self.cluster, 1, 1],
            block=[self.spec.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
            stream=stream,
            use_pdl=True,
        )

    def _rows_a_table(self, rows: Int32, mTable: Any) -> Int32:
        """Returns how many rows of logits share a row of the table."""
        return rows // Int32(mTable.shape[0]) if self.spec.has_table else Int32(1)

    @cute.kernel
    def _kernel(
        self,
        mLogits: cute.Tensor,
        mLengths: cute.Tensor,
        mStarts,  # None if rows begin at their first logit
        mTable,  # None if positions are wanted
        mOut: cute.Tensor,
        slots: tuple,
        divisors: tuple,
    ) -> None:
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        memory = self._allocate()
        words = const_expr(2 * BINS // spec.threads)
        cute.make_tensor(memory.histograms + words * tid, cute.make_layout(words)).fill(0)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # waits for what earlier kernels write: logits, lengths, tables

        row_index, rank = cta // self.cluster, cta % self.cluster
        width, topk = Int32(mLogits.shape[1]), Int32(mOut.shape[1])
        start = Int32(0)
        if const_expr(spec.has_starts):
            start = cutlass.min(cutlass.max(mStarts[row_index], 0), width)
        length = cutlass.min(cutlass.max(mLengths[row_index], 0), width - start)
        if length <= topk:
            for i in cutlass.range(rank * spec.threads + tid, topk, self.cluster * spec.threads, unroll=1):
                value = Int32(-1)
                if i < length:
                    value = self._result(mTable, row_index, i, slots, divisors)
                mOut[row_index, i] = value
        else:
            address = mLogits.iterator.toint() + 4 * (Int64(row_index) * Int64(mLogits.stride[0]) + Int64(start))
            begin = Int32(address & 15) // 4
            quads = (begin + length + (QUAD - 1)) // QUAD
            warps = const_expr(self.cluster * spec.warps)
            share = (quads + (warps - 1)) // warps
            warp = rank * spec.warps + cute.arch.make_warp_uniform(tid // WARP)
            own = cutlass.max(cutlass.min(quads - warp * share, share), 0)
            row = Row(address - 4 * Int64(begin), begin, begin + length, warp * share, own)
            begin_of_cta, end_of_cta = self._choose(row, memory, topk, rank, tid)
            for i in cutlass.range(begin_of_cta + tid, end_of_cta, spec.threads, unroll=1):
                position = (memory.chosen + i).load()
                mOut[row_index, i] = self._result(mTable, row_index, position, slots, divisors)
            if const_expr(self.cluster > 1):
                cute.arch.cluster_wait()  # no CTA leaves while others read its shared memory

    def _allocate(self) -> Memory:
        spec, smem = self.spec, SmemAllocator()
        words = {
            "histograms": 2 * BINS,
            "marks": spec.warps * spec.mark_words,
            "keys": spec.warps * spec.listed,
            "places": spec.warps * spec.listed,
            "chosen": MAX_TOPK,
            "counts": 2 * spec.warps,
            "listed": spec.warps,
            "groups": 2 * GROUPS,
            "found": 4,
            "range": 2,
        }
        return Memory(**{name: smem.allocate_array(Int32, size, byte_alignment=16) for name, size in words.items()})

    @cute.jit
    def _choose(self, row: Row, memory: Memory, topk: Int32, rank: Int32, tid: Int32):
        """Leaves the chosen positions of this CTA in shared memory; returns (begin, end) of their places."""
        spec = self.spec
        warp, lane = cute.arch.make_warp_uniform(tid // WARP), tid % WARP
        listed = memory.listed + warp
        cute.arch.sync_threads()  # histograms are 0
        held = cute.make_rmem_tensor((4, VECTORS, max(self.held, 1)), Int32)  # keys of this warp's first quads
        self._count(row, held, Int32(memory.histograms.toint()), lane)
        crossing, above, inside = self._cross(memory, Int32(0), topk, tid)
        low, high = bins.keys_of_bin(crossing)
        need = topk - above
        length_of_list = Int32(spec.listed + 1)  # over capacity: the first turn marks all
        histogram = Int32(1)
        running = Int32(1)
        while running != 0:
            refine = Int32(0)
            if inside != need and high - low > 1:
                refine = Int32(1)
            shift = bins.shift_for(high - low)
            counters = Int32(memory.histograms.toint()) + 4 * BINS * histogram
            if length_of_list > spec.listed:
                cute.arch.sync_warp()  # all lanes have read the length
                if lane == 0:
                    listed.store(Int32(0))
                cute.arch.sync_warp()
                self._mark(row, held, memory, (low, high, shift, refine), counters, warp, lane)
            else:
                self._settle(memory, (low, high, shift, refine), counters, length_of_list, warp, lane)
            running = refine
            if refine != 0:
                crossing, above, inside = self._cross(memory, histogram, need, tid)
                low = low + (crossing << shift)
                high = cutlass.min(low + (Int32(1) << shift), high)
                need -= above
                length_of_list = listed.load()
                histogram = 1 - histogram
        return self._list(row, memory, need, rank, tid)

    @cute.jit
    def _load(self, row: Row, index: Int32, lane: Int32, raw: cute.Tensor):
        """Starts loading a lane's cells in a quad of this warp, (4, VECTORS) float32.

        The quad in which the row ends is loaded cell by cell: memory after the last cell need not be initialized.
        """
        first = (row.first + index) * QUAD
        if first + QUAD <= row.end:
            vectors = cute.make_copy_atom(CopyG2ROp(), Float32, num_bits_per_copy=128)
            for v in cutlass.range_constexpr(VECTORS):
                cell = first + 4 * (WARP * v + lane)
                source = cute.make_ptr(Float32, row.base + 4 * Int64(cell), AddressSpace.gmem, assumed_align=16)
                cute.copy(vectors, cute.make_tensor(source, cute.make_layout(4)), raw[None, v])
        else:
            for v in cutlass.range_constexpr(VECTORS):
                for j in cutlass.range_constexpr(4):
                    cell = cutlass.min(first + 4 * (WARP * v + lane) + j, row.end - 1)
                    source = cute.make_ptr(Float32, row.base + 4 * Int64(cell), AddressSpace.gmem, assumed_align=4)
                    raw[j, v] = source.load()

    @cute.jit
    def _keys(self, row: Row, index: Int32, lane: Int32, raw: cute.Tensor, keys: cute.Tensor):
        """Makes keys (4, VECTORS) of a quad's cells; `ABSENT` where there is no logit."""
        quad = row.first + index
        for v in cutlass.range_constexpr(VECTORS):
            for j in cutlass.range_constexpr(4):
                keys[j, v] = bins.ordered(raw[j, v])
        if quad * QUAD < row.begin or (quad + 1) * QUAD > row.end:
            for v in cutlass.range_constexpr(VECTORS):
                for j in cutlass.range_constexpr(4):
                    cell = quad * QUAD + 4 * (WARP * v + lane) + j
                    exists = cell >= row.begin and cell < row.end
                    keys[j, v] = cutlass.select_(exists, keys[j, v], Int32(bins.ABSENT))

    @cute.jit
    def _next_keys(self, row: Row, index: Int32, lane: Int32, raw: cute.Tensor, keys: cute.Tensor):
        """Makes keys of a quad from its cells; then starts loading the quad after it."""
        self._keys(row, index, lane, raw, keys)
        if index + 1 < row.quads:
            self._load(row, index + 1, lane, raw)

    @cute.jit
    def _count(self, row: Row, held: cute.Tensor, histogram: Int32, lane: Int32):
        """Counts the keys of this warp's range in the histogram; keys of its first quads stay in registers.

        Absent keys count too, in the lowest bin. There are more keys than wanted, so that changes neither the count
        above a bin nor the crossing bin. If the lowest bin is the crossing bin, another turn counts the marked keys.
        """
        first = cute.make_rmem_tensor((4, VECTORS, max(self.held, 1)), Float32)
        for i in cutlass.range_constexpr(self.held):
            if i < row.quads:
                self._load(row, Int32(i), lane, first[None, None, i])
        for i in cutlass.range_constexpr(self.held):
            if i < row.quads:
                self._keys(row, Int32(i), lane, first[None, None, i], held[None, None, i])
                self._count_quad(held[None, None, i], histogram)
        raw = cute.make_rmem_tensor((4, VECTORS), Float32)
        if row.quads > self.held:
            self._load(row, Int32(self.held), lane, raw)
        for i in cutlass.range(self.held, row.quads, unroll=1):
            keys = cute.make_rmem_tensor((4, VECTORS), Int32)
            self._next_keys(row, i, lane, raw, keys)
            self._count_quad(keys, histogram)

    @cute.jit
    def _count_quad(self, keys: cute.Tensor, histogram: Int32):
        """Counts the keys of a quad."""
        for v in cutlass.range_constexpr(VECTORS):
            for j in cutlass.range_constexpr(4):
                bins.count(histogram, bins.bin_of(keys[j, v]))

    @cute.jit
    def _cross(self, memory: Memory, histogram: Int32, wanted: Int32, tid: Int32):
        """Returns the bin, from the last one down, where the cluster's keys reach `wanted`, and counts above and in it.

        One warp finds the group of 32 bins first, so that it reads 64 + 32 numbers of each CTA instead of 2048. The
        other histogram is 0 afterwards.
        """
        warp, lane = cute.arch.make_warp_uniform(tid // WARP), tid % WARP
        counters, groups = memory.histograms + histogram * BINS, memory.groups + histogram * GROUPS
        cute.arch.sync_threads()  # all threads of this CTA have counted
        own_bins = const_expr(BINS // self.spec.threads)
        words = cute.make_tensor(counters + own_bins * tid, cute.make_layout(own_bins)).load()
        group_sum = words[0]
        for i in cutlass.range_constexpr(1, own_bins):
            group_sum += words[i]
        lanes = const_expr(WARP // own_bins)  # lanes of a group
        group_sum = cute.arch.warp_reduction_sum(group_sum, threads_in_group=lanes)
        if lane % lanes == 0:
            (groups + tid // lanes).store(group_sum)
        self._sync_cluster()
        other = memory.histograms + (1 - histogram) * BINS + own_bins * tid
        cute.make_tensor(other, cute.make_layout(own_bins)).fill(0)
        if warp == 0:
            lower, upper = Int32(0), Int32(0)  # sums of groups 2 lane and 2 lane + 1
            for rank in cutlass.range_constexpr(self.cluster):
                pair = self._pair(groups + 2 * lane, Int32(rank))
                lower, upper = lower + pair[0], upper + pair[1]
            above = self._sum_from(lower + upper, lane) - lower - upper
            hit = cute.arch.vote_ballot_sync(above < wanted and above + lower + upper >= wanted)
            group, above_group = 2 * lane, above + upper
            if above + upper >= wanted:
                group, above_group = group + 1, above
            owner = 31 - Int32(cute.arch.clz(hit))
            group, above_group = cute.arch.shuffle_sync(group, owner), cute.arch.shuffle_sync(above_group, owner)
            total = Int32(0)
            for rank in cutlass.range_constexpr(self.cluster):
                total += self._word(counters + WARP * group + lane, Int32(rank))
            above = above_group + self._sum_from(total, lane) - total
            if above < wanted and above + total >= wanted:
                (memory.found + 0).store(WARP * group + lane)
                (memory.found + 1).store(above)
                (memory.found + 2).store(total)
        cute.arch.sync_threads()
        return (memory.found + 0).load(), (memory.found + 1).load(), (memory.found + 2).load()

    @cute.jit
    def _sum_from(self, value: Int32, lane: Int32) -> Int32:
        """Returns the sum of a value over this lane and higher lanes."""
        for step in (1, 2, 4, 8, 16):
            more = cute.arch.shuffle_sync_down(value, step)
            value += cutlass.select_(lane + step < WARP, more, Int32(0))
        return value

    def _word(self, pointer: cute.Pointer, rank: Int32) -> Any:
        """Reads a word of shared memory of a CTA of the cluster."""
        return cluster_shared.remote_value(pointer, rank, Int32) if self.cluster > 1 else pointer.load()

    def _pair(self, pointer: cute.Pointer, rank: Int32) -> Any:
        """Reads two words of shared memory of a CTA of the cluster."""
        if self.cluster > 1:
            return cluster_shared.remote_vector(pointer, rank, Int32, 2)
        return pointer.load(), (pointer + 1).load()

    @cute.jit
    def _sync_cluster(self):
        """Waits until all threads of the cluster see what they wrote to shared memory."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _mark(
        self, row: Row, held: cute.Tensor, memory: Memory, bounds: tuple, counters: Int32, warp: Int32, lane: Int32
    ):
        """Marks this warp's cells; lists and counts the cells between bounds if wanted."""
        raw = cute.make_rmem_tensor((4, VECTORS), Float32)
        if row.quads > self.held:
            self._load(row, Int32(self.held), lane, raw)
        for i in cutlass.range_constexpr(self.held):
            if i < row.quads:
                self._mark_quad(held[None, None, i], memory, bounds, counters, warp, Int32(i), lane)
        for i in cutlass.range(self.held, row.quads, unroll=1):
            keys = cute.make_rmem_tensor((4, VECTORS), Int32)
            self._next_keys(row, i, lane, raw, keys)
            self._mark_quad(keys, memory, bounds, counters, warp, i, lane)
        cute.arch.sync_warp()

    @cute.jit
    def _mark_quad(
        self, keys: cute.Tensor, memory: Memory, bounds: tuple, counters: Int32, warp: Int32, index: Int32, lane: Int32
    ):
        """Marks the cells of this warp's quad `index`: four of a lane are a byte."""
        spec = self.spec
        low, high, shift, refine = bounds
        marks = cute.recast_ptr(memory.marks + warp * spec.mark_words, dtype=Uint8)
        for v in cutlass.range_constexpr(VECTORS):
            byte = (index * VECTORS + v) * WARP + lane
            above, reached = Int32(0), Int32(0)
            for j in cutlass.range_constexpr(4):
                above = above | cutlass.select_(keys[j, v] >= high, Int32(1 << j), Int32(0))
                reached = reached | cutlass.select_(keys[j, v] >= low, Int32(1 << j), Int32(0))
            inside = above ^ reached
            (marks + byte).store(Uint8(above | (inside << 4)))
            if inside != 0 and refine != 0:
                place = cute.arch.atomic_add(memory.listed + warp, Int32(cute.arch.popc(inside)))
                for j in cutlass.range_constexpr(4):
                    if (inside >> j) & 1 != 0:
                        if place < spec.listed:
                            (memory.keys + warp * spec.listed + place).store(keys[j, v])
                            (memory.places + warp * spec.listed + place).store(8 * byte + j)
                        place += 1
                        bins.count(counters, (keys[j, v] - low) >> shift)

    @cute.jit
    def _settle(self, memory: Memory, bounds: tuple, counters: Int32, length_of_list: Int32, warp: Int32, lane: Int32):
        """Marks the cells of this warp's list anew; counts those still between bounds if wanted."""
        spec = self.spec
        low, high, shift, refine = bounds
        for i in cutlass.range(lane, length_of_list, WARP, unroll=1):
            key = (memory.keys + warp * spec.listed + i).load()
            place = (memory.places + warp * spec.listed + i).load()
            word = memory.marks + warp * spec.mark_words + place // 32
            if key >= high:
                cute.arch.atomic_or(word, Int32(1) << place % 32)
            if key >= high or key < low:
                cute.arch.atomic_and(word, ~(Int32(16) << place % 32))
            elif refine != 0:
                bins.count(counters, (key - low) >> shift)
        cute.arch.sync_warp()

    @cute.jit
    def _list(self, row: Row, memory: Memory, need: Int32, rank: Int32, tid: Int32):
        """Lists positions of marked cells in order: all above, and the first `need` of those between bounds."""
        spec = self.spec
        warp, lane = cute.arch.make_warp_uniform(tid // WARP), tid % WARP
        marks = memory.marks + warp * spec.mark_words
        above, inside = Int32(0), Int32(0)
        for i in cutlass.range(row.quads, unroll=1):
            word = (marks + WARP * i + lane).load()
            above += Int32(cute.arch.popc(word & BITS_ABOVE))
            inside += Int32(cute.arch.popc(word & ~BITS_ABOVE))
        above, inside = cute.arch.warp_redux_sync(above, "add"), cute.arch.warp_redux_sync(inside, "add")
        if lane == 0:
            (memory.counts + 2 * warp).store(above)
            (memory.counts + 2 * warp + 1).store(inside)
        self._sync_cluster()
        above_before, inside_before = self._counted_before(memory, rank * spec.warps + warp, lane)
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()  # this thread reads no more of other CTAs
        if lane == 0:
            if warp == 0:
                (memory.range + 0).store(above_before + cutlass.min(inside_before, need))
            if warp == spec.warps - 1:
                end = above_before + above + cutlass.min(inside_before + inside, need)
                (memory.range + 1).store(end)
        for i in cutlass.range(row.quads, unroll=1):
            word = (marks + WARP * i + lane).load()
            if inside_before >= need:
                word = word & BITS_ABOVE
            if cute.arch.vote_any_sync(word != 0):
                both = Int32(cute.arch.popc(word & BITS_ABOVE)) + (Int32(cute.arch.popc(word & ~BITS_ABOVE)) << 16)
                until = both  # sum over this lane and lower lanes
                for step in (1, 2, 4, 8, 16):
                    more = cute.arch.shuffle_sync_up(until, step)
                    until += cutlass.select_(lane >= step, more, Int32(0))
                before = until - both
                above_rank, inside_rank = above_before + (before & 0xFFFF), inside_before + (before >> 16)
                first = (row.first + i) * QUAD + 16 * lane - row.begin
                left = (word | (word >> 4)) & BITS_ABOVE
                while left != 0:
                    bit = 31 - Int32(cute.arch.clz(left & -left))
                    is_above = (word >> bit) & 1
                    if is_above != 0 or inside_rank < need:
                        position = first + (bit // 8) * 4 + bit % 8
                        (memory.chosen + above_rank + cutlass.min(inside_rank, need)).store(position)
                    above_rank += is_above
                    inside_rank += 1 - is_above
                    left = left & (left - 1)
                all_lanes = cute.arch.shuffle_sync(until, WARP - 1)
                above_before += all_lanes & 0xFFFF
                inside_before += all_lanes >> 16
        cute.arch.sync_threads()
        return (memory.range + 0).load(), (memory.range + 1).load()

    @cute.jit
    def _counted_before(self, memory: Memory, warp: Int32, lane: Int32):
        """Returns the marks above and between bounds in the warps of the cluster before this one."""
        spec = self.spec
        above, inside = Int32(0), Int32(0)
        for other in cutlass.range_constexpr(-(-self.cluster * spec.warps // WARP)):
            earlier = other * WARP + lane
            if earlier < warp:
                pair = self._pair(memory.counts + 2 * (earlier % spec.warps), earlier // spec.warps)
                above, inside = above + pair[0], inside + pair[1]
        return cute.arch.warp_redux_sync(above, "add"), cute.arch.warp_redux_sync(inside, "add")

    @cute.jit
    def _result(self, mTable, row_index: Int32, position: Int32, slots: tuple, divisors: tuple):
        """Returns the result for a position: itself, or its slot, -1 if the table has none."""
        value = position
        if const_expr(self.spec.has_table):
            by_rows, by_page_size = divisors
            page_size, num_slots = slots
            batch, _ = divmod(row_index, by_rows)
            page, offset = divmod(position, by_page_size)
            value = Int32(-1)
            if page < Int32(mTable.shape[1]):
                entry = mTable[batch, page]
                slot = Int64(entry) * Int64(page_size) + Int64(offset)
                if entry >= 0 and slot < num_slots:
                    value = Int32(slot)
        return value

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: contiguous rows, any distance apart."""
        spec = self.spec
        rows, width, topk = cute.sym_int(), cute.sym_int(), cute.sym_int()
        logits = make_fake_tensor(Float32, (rows, width), (cute.sym_int64(), 1), assumed_align=4)
        lengths = make_fake_tensor(Int32, (rows,), (cute.sym_int64(),), assumed_align=4)
        starts = make_fake_tensor(Int32, (rows,), (cute.sym_int64(),), assumed_align=4)
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
        out = make_fake_tensor(Int32, (rows, topk), (cute.sym_int64(), 1), assumed_align=4)
        return (
            logits,
            lengths,
            starts if spec.has_starts else None,
            table if spec.has_table else None,
            out,
            Int32(1),
            Int64(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )
