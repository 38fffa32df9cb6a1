"""The merge CTAs of the MLA decode kernels: they wait for the partials of a query's heads and combine them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr

from cute_kernels.merge.kernels.merge import MergeKernel, MergeRow, Strided, row_address
from cute_kernels.merge.spec import VECTOR_BYTES, MergeSpec
from cute_kernels.mla.kernels.arguments import Partials, Results, Sizes
from cute_kernels.mla.kernels.pipelines import NamedBarrier
from cute_kernels.mla.kernels.scheduler import Divisors
from cute_kernels.mla.kernels.tile import NOPE
from cute_kernels.mla.spec import NARROW


class MergeTask(NamedTuple):
    """The task of one merge CTA: part `part` of `parts` of the merge of a block of heads of a query.

    query             counted through all requests; request and query_of_request name the same query
    first_partial     the first split, or the first place of a balanced schedule
    partials          number of partials
    """

    query: Int32
    request: Int32
    query_of_request: Int32
    head_block: Int32
    first_partial: Int32
    partials: Int32
    part: Int32
    parts: Int32


class PartialMerger:
    """Device code for all threads of a CTA, `merge_lanes` of them for a row; `spec` is as in `Scheduler`.

    A group is a query's block of heads. Its counter holds how many of its partials are in global memory, then how many
    of its merge CTAs have seen that. The last CTA resets it to 0 for the next launch.
    """

    def __init__(self, spec):
        self.spec = spec
        lanes = min(spec.merge_lanes, NOPE // 8)  # each has 16 bytes of a row
        self.rows = MergeKernel(
            MergeSpec(
                NOPE,
                "float16",
                "bfloat16",
                has_sink=True,
                has_lse=True,
                lanes=lanes,
                groups=spec.merge_lanes // lanes,
                loads=self.loads(lanes),
                block_scales=True,
                eager=True,
                inf_if_empty=spec.inf_if_empty,
            )
        )

    def loads(self, lanes: int) -> int:
        """Returns the loads that registers at launch hold, 80 or 128. With lanes > 32, 16 loads are 2% slower."""
        if lanes > 32:
            return 8
        if not self.spec.few_heads:
            return 16
        return 2 if self.spec.balanced and self.spec.heads == min(NARROW) else 4  # 4 would spill 8 bytes

    @cute.jit
    def count_partial(self, counters: Int64, group: Int32, tidx: Int32):
        """Counts a partial of this CTA, once it is in global memory; called by both PV warpgroups."""
        cute.arch.barrier(barrier_id=NamedBarrier.PV, number_of_threads=256)
        if tidx == 128 * self.spec.roles.pv[0]:
            cute.arch.atomic_add(self.counter(counters, group), Int32(1), sem="acq_rel", scope="gpu")

    def counter(self, counters: Int64, group: Int32) -> cute.Pointer:
        """Returns the address of a group's counter."""
        return cute.make_ptr(Int32, counters + 4 * Int64(group), AddressSpace.gmem, assumed_align=4)

    @cute.jit
    def run(self, smem, free, results: Results, counters: Int64, sizes: Sizes, divisors: Divisors, cta: Int32):
        """Finds what this merge CTA merges, and merges it. `free` is unused shared memory."""
        group, part = divmod(cta - sizes.decode_ctas, divisors.merge_ctas)
        query, head_block = divmod(group, divisors.head_blocks)
        first_partial, partials = Int32(0), sizes.num_splits
        if const_expr(self.spec.balanced):
            query, first_share, partials = (cute.arch.make_warp_uniform(smem.cuts[i]) for i in range(3))
            first_partial = first_share + query
        if partials > 0:
            request, query_of_request = divmod(query, divisors.s_q)
            head_group = query * divisors.head_blocks.divisor + head_block
            parts = divisors.merge_ctas.divisor
            task = MergeTask(query, request, query_of_request, head_block, first_partial, partials, part, parts)
            self.merge(free, results, counters, head_group, task)

    @cute.jit
    def merge(self, free, results: Results, counters: Int64, group: Int32, task: MergeTask):
        """Waits for the partials of a group and merges some rows of it. `free` is unused shared memory.

        The CTAs that it waits for have lower numbers, so they started before this one and need nothing from it.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lanes, rows = self.spec.merge_lanes, self.spec.threads // self.spec.merge_lanes
        row_in_cta = cute.arch.make_warp_uniform(tidx // lanes)  # values that follow from it take uniform registers
        sums = cute.recast_ptr(free.data_ptr(), dtype=Float32)
        mSink = results.mSink
        heads = cutlass.min(mSink.shape[0] - task.head_block * self.spec.heads, self.spec.heads)
        begin = task.part * rows
        # at least one round, because all parts count
        for first in cutlass.range(begin, cutlass.max(heads, begin + 1), task.parts * rows, unroll=1):
            valid, tid = first + row_in_cta < heads, tidx % lanes
            head = task.head_block * self.spec.heads + cutlass.min(first + row_in_cta, heads - 1)
            out_row = row_address(results.mOut, task.request, task.query_of_request, head)
            lse_row = row_address(results.mLse, task.request, task.query_of_request, head)
            partials = self.partial_rows(results.partials, task.first_partial, task.query, head, tid)
            row = MergeRow(*partials, mSink[head], out_row, lse_row)
            if first == begin:  # after the addresses, which take some 1000 clocks in a CTA that has just begun
                self.await_partials(self.counter(counters, group), task.partials, task.parts, tidx)
            self.rows.merge_row(row, sums, task.partials, valid, tid, row_in_cta)

    def partial_rows(
        self, partials: Partials, first: Int32, query: Int32, head: Int32, tid: Int32
    ) -> tuple[Strided, Strided, Strided]:
        """Returns where the partials of a row lie: values, LSE and block scales, each a `Strided`."""
        rows_apart, heads = Int32(partials.lse.stride[0]), partials.lse.shape[3]
        row = Int64(first * rows_apart + head + (0 if self.spec.balanced else query * heads))
        arrays = []
        for tensor in (partials.out, partials.lse, partials.scales):
            size = (tensor.shape[4] if cute.rank(tensor) > 4 else 1) * tensor.element_type.width // 8
            arrays.append(Strided(tensor.iterator.toint() + row * size, Int64(rows_apart) * size))
        (address, stride), lses, scales = arrays
        return Strided(address + Int64(tid % self.rows.spec.lanes) * VECTOR_BYTES, stride), lses, scales

    @cute.jit
    def await_partials(self, counter: cute.Pointer, partials: Int32, parts: Int32, tidx: Int32):
        """Waits until `partials` partials are in global memory; called by all threads of `parts` CTAs."""
        if tidx == 0:
            while cute.arch.load(counter, Int32, sem="acquire", scope="gpu") < partials:
                pass
            # counts this part; the last part resets the counter: all have seen the partials by then
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.inc.u32 [{$r0}], {$r1};",
                read_only_args=[Int64(counter.toint()), partials + parts - 1],
            )
        cute.arch.sync_threads()
