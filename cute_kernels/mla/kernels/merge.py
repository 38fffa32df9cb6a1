"""The CTAs of the MLA decode kernel that merge what splits and shares leave, and the counters that they wait for."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64

from cute_kernels.merge.kernels.merge import MergeKernel, row_address
from cute_kernels.merge.spec import VECTOR_BYTES, MergeSpec
from cute_kernels.mla.kernels.barriers import NamedBarrier
from cute_kernels.mla.kernels.tile import NOPE
from cute_kernels.mla.spec import NARROW


class PartialMerger:
    """Device code for all threads of a CTA, `merge_lanes` of them a row, of either kernel.

    The heads of a query's block share a counter: how many of its partial results are in global memory, then of its
    merges. The last of those leaves it at 0 for the next launch.
    """

    def __init__(self, spec):
        self.spec = spec
        lanes = min(spec.merge_lanes, NOPE // 8)  # 16 bytes of a row each
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
                units=True,
                eager=True,
            )
        )

    def loads(self, lanes: int) -> int:
        """As many as registers at launch hold, 80 or 128; with more lanes than a warp has 16 are slower by 2%."""
        if lanes > 32:
            return 8
        if not self.spec.few_heads:
            return 16
        return 2 if self.spec.balanced and self.spec.heads == min(NARROW) else 4  # 4 would spill 8 bytes

    @cute.jit
    def count_partial(self, counters: Int64, group: Int32, tidx: Int32):
        """Says that a partial result of this CTA is in global memory; called by both warpgroups of values."""
        cute.arch.barrier(barrier_id=NamedBarrier.STORED, number_of_threads=256)
        if tidx == 256:
            cute.arch.atomic_add(self.counter(counters, group), Int32(1), sem="acq_rel", scope="gpu")

    def counter(self, counters: Int64, group: Int32) -> cute.Pointer:
        """That of a `group`: a block of heads of a query."""
        return cute.make_ptr(Int32, counters + 4 * Int64(group), AddressSpace.gmem, assumed_align=4)

    @cute.jit
    def run(
        self,
        free,
        tensors: tuple,
        counters: Int64,
        group: Int32,
        states: tuple,
        place: tuple,
        parts: tuple,
    ):
        """Merges one of the `parts`, (which, how many), of a group, the heads at `place`.

        That is (query, request, query of it, block of heads). `free` is shared memory that nothing else needs.

        Waits for the CTAs that leave the `states`, (the first, how many). They have lower numbers, so they have been
        started before this one and need nothing from it.
        """
        partials, mSink, mOut, mLse = tensors
        query, batch_idx, query_idx, head_block = place
        part, num_parts = parts
        first_state, count = states
        tidx, _, _ = cute.arch.thread_idx()
        lanes, rows = self.spec.merge_lanes, self.spec.threads // self.spec.merge_lanes
        row_in_cta = cute.arch.make_warp_uniform(tidx // lanes)  # what follows from it takes no register of a thread
        sums = cute.recast_ptr(free.data_ptr(), dtype=Float32)
        heads = cutlass.min(mSink.shape[0] - head_block * self.spec.heads, self.spec.heads)
        begin = part * rows
        for first in cutlass.range(begin, cutlass.max(heads, begin + 1), num_parts * rows, unroll=1):  # all parts count
            valid, tid = first + row_in_cta < heads, tidx % lanes
            head = head_block * self.spec.heads + cutlass.min(first + row_in_cta, heads - 1)
            of_result = (row_address(mOut, batch_idx, query_idx, head), row_address(mLse, batch_idx, query_idx, head))
            row = (*self.states_of(partials, first_state, query, head, tid), mSink[head], *of_result)
            if first == begin:  # addresses take some 1000 clocks of a CTA that has just begun
                self.await_partials(self.counter(counters, group), count, num_parts, tidx)
            self.rows.merge_row(row, sums, count, valid, tid, row_in_cta)

    def states_of(self, partials: tuple, first_state: Int32, query: Int32, head: Int32, tid: Int32) -> tuple:
        """Where partial results of a row are, and their log-sum-exps and units: as `merge_row` takes them.

        Rows of all of them are one behind the other: of a query, or of all queries, those of a state.
        """
        mPartial, mUnits, mPartialLse = partials
        of_state, heads = Int32(mPartialLse.stride[0]), mPartialLse.shape[3]
        row = Int64(first_state * of_state + head + (0 if self.spec.balanced else query * heads))
        places = []
        for tensor in (mPartial, mPartialLse, mUnits):
            size = (tensor.shape[4] if cute.rank(tensor) > 4 else 1) * tensor.element_type.width // 8
            places.append((tensor.iterator.toint() + row * size, Int64(of_state) * size))
        (address, stride), of_lses, of_units = places
        return (address + Int64(tid % self.rows.spec.lanes) * VECTOR_BYTES, stride), of_lses, of_units

    @cute.jit
    def await_partials(self, counter: cute.Pointer, count: Int32, num_parts: Int32, tidx: Int32):
        """Waits until `count` partial results are in global memory; called by all threads of `num_parts` CTAs."""
        if tidx == 0:
            while cute.arch.load(counter, Int32, sem="acquire", scope="gpu") < count:
                pass
            # counts this part; the last one leaves 0, as all have seen `count` by then
            cute.arch.inline_ptx(
                "red.relaxed.gpu.global.inc.u32 [{$r0}], {$r1};",
                read_only_args=[Int64(counter.toint()), count + num_parts - 1],
            )
        cute.arch.sync_threads()
