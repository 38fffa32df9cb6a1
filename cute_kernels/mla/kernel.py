"""FP8 MLA decoding on SM90: split-KV flash decoding of 64 query heads over 656-byte tokens.

One CTA serves 64 heads of one query token over a range of its keys, in tiles of 64 keys that alternate between two
shared-memory stages, and stays for several such items of work. One warpgroup scores (S, softmax, P), two add up values,
256 of the 512 columns each, so QK of a tile needs nothing of PV of the tile before. Between them goes P, each thread's
own fragment as float16: thread t of all three warpgroups holds the same rows and columns. With more than 64 heads two
CTAs of a cluster may each gather half of the keys and hand it over (producer_kernel.py); 8 or 16 heads are columns of
the products instead of rows (narrow_kernel.py).

Scales. Codes go to the tensor core as they are: e4m3 is exact in float16, and one conversion makes two of them. Scales
are float32 and applied there:
    S = q_rope k_rope + sum_j scale_j (q_j code_j)     an accumulator for each quantization tile j, added in float32
    O_j += (P scale_j) code_j                          P scale_j rounded to float16 once
So scores are as exact as float32 sums are, whatever the scales. Ranges that float16 does not hold are found and
handled: of Q (score_kernel.py) and of P scale_j (value_kernel.py).

Splits. Several CTAs may share the keys of a query. Each leaves a float32 partial in global memory and counts itself;
CTAs with higher numbers wait for the count and merge with the code of `merge_states`, in the same launch. They wait
only for CTAs that were started before them, so nobody waits in vain however few run at a time.

Roles (512 threads)           64 heads                                               8 or 16 heads
  warpgroup 0                 producer, 72 registers: gathers codes two passes       producer, 128 registers
                              (32 rows) ahead, stores them as float16
  warpgroup 1                 scores, 104 registers: 32 of S, 32 of a group's,       producer
                              16 scales; loads Q by TMA, scales a tile ahead
  warpgroups 2, 3             values, 168 registers: 128 of O                        S, P and O of every second tile

Barriers                      arrivals per phase
  q_full                      1 + 73,728 bytes of TMA
  full[stage]                 128: producer threads; + 36,864 bytes of the other CTA where values are exchanged
  empty[stage][part]          256: threads of values, after their last wgmma on half of the keys
  p_full[stage]               128: threads of scores: P, and what rows have with the tile
  peer_free[stage]            1: the other CTA of the cluster has this stage free
  codes_full[stage]           1 + 20,480 bytes: codes of the other CTA
  named 1     BAR_OWNER       128: all of scores have finished QK, P may overwrite the rope block; scales are there
  named 3     BAR_STORED      256: this CTA's partial is in global memory
  named 4     BAR_PRODUCER    128: own rows are complete, or those of the other CTA have been read
All threads arrive, not one for a warp: it costs nothing measurable, and racecheck can follow it.

Shared memory (228,736 of 232,448 bytes)
  nope    2 x 64 x 512 x 2    131,072   codes as float16, 128-byte swizzle
  rope    2 x 64 x 64 x 2      16,384   P of a tile overwrites its rope block, which only QK reads
  q       64 x 576 x 2         73,728   bf16 as it comes, then float16 but for the rope part
  scale   2 x 4 x 64 x 4        2,048   of each key and quantization tile
  weight  2 x 4 x 64 x 2        1,024   the same x 8 as float16, NaN where that does not hold it
  rest                                  powers of Q, masks, maxima, sums and units of rows, barriers
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax, token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.merge.kernel import MergeKernel
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.mla.column_score_kernel import ColumnScores
from cute_kernels.mla.column_tile_kernel import BUFFERS, column_storage, stages
from cute_kernels.mla.column_value_kernel import ColumnValues
from cute_kernels.mla.gather_kernel import RowGatherer
from cute_kernels.mla.producer_kernel import NOPE, PARTS, STAGES, KeyProducer
from cute_kernels.mla.score_kernel import ScoreWarpgroup
from cute_kernels.mla.spec import ROLES, TOKENS_PER_TILE, WIDE, MlaDecodeSpec
from cute_kernels.mla.tile_kernel import BAR_STORED, QK, layouts, prefetch_q, shared_storage, start_q
from cute_kernels.mla.value_kernel import ValueWarpgroups

THREADS = 512


class MlaDecodeKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: MlaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.producer = RowGatherer(spec) if spec.columns else KeyProducer(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        self.scores = ColumnScores(spec) if spec.columns else ScoreWarpgroup(spec)
        self.values = ColumnValues(spec) if spec.columns else ValueWarpgroups(spec)
        if spec.split:
            merge = MergeSpec(
                NOPE, "float32", "bfloat16", has_sink=True, has_lse=True, lanes=spec.merge_lanes, loads=16
            )
            self.merger = MergeKernel(merge)

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        batch, s_q, h_q = (cute.sym_int() for _ in range(3))

        def strided(dtype, shape, inner, align):
            strides = [cute.sym_int64(divisibility=align // (dtype.width // 8)) for _ in shape[:-1]]
            return make_fake_tensor(dtype, shape, (*strides, inner), assumed_align=align)

        q = strided(BFloat16, (batch, s_q, h_q, QK), 1, 16)
        kv = strided(Uint8, (cute.sym_int(), cute.sym_int(), token_cache.ROW_BYTES), 1, 16)
        if self.spec.sparse:
            index = strided(cutlass.Int32, (batch, s_q, cute.sym_int()), 1, 4)
            length = make_fake_tensor(
                cutlass.Int32, (batch, s_q), (cute.sym_int64(), cute.sym_int64()), assumed_align=4
            )
        else:
            index = strided(cutlass.Int32, (batch, cute.sym_int()), 1, 4)
            length = make_fake_tensor(cutlass.Int32, (batch,), (cute.sym_int64(),), assumed_align=4)
        sink = make_fake_tensor(Float32, (h_q,), (1,), assumed_align=4)
        out = strided(BFloat16, (batch, s_q, h_q, NOPE), 1, 16)
        lse = make_fake_tensor(Float32, (batch, s_q, h_q), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4)
        tensors = (q, kv, index, length, sink, out, lse)
        numbers = (Int64(0), Int64(0), Int64(0), Float32(1.0), Int32(1), Int32(1), Int32(1), Int32(1), Int64(0))
        return (*tensors, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mKV: cute.Tensor,
        mIndex: cute.Tensor,
        mLength: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        scratch: Int64,
        counters: Int64,
        zero_row: Int64,
        softmax_scale: Float32,
        num_splits: Int32,
        merge_ctas: Int32,
        max_ctas: Int32,
        causal: Int32,
        trace: Int64,
        stream: cuda.CUstream,
    ):
        """One launch. Split specs have CTAs behind the others that merge what those leave in the scratch memory.

        Memory that no caller sees comes as addresses, which cost the host less than tensors. `scratch` has room for
        num_splits * batch * s_q * h_q rows of 512 float32, then as many log-sum-exps; `counters` has a word for each 64
        heads of each query, 0 before and after the launch; `zero_row` is 656 zeros. merge_ctas CTAs merge 64 heads.
        max_ctas CTAs decode at most, each every max_ctas-th item of work. `trace` is where timestamps go.
        """
        batch, s_q, h_q, _ = mQ.shape
        mPartial = mPartialLse = None
        if const_expr(self.spec.split):
            shape, per_query, per_request = (num_splits, batch, s_q, h_q), Int64(h_q), Int64(h_q) * s_q
            rows = (per_request * batch, per_request, per_query, Int64(1))  # strides: a partial may exceed 2^31 values
            values = tuple(cute.assume(stride * NOPE, divby=NOPE) for stride in rows)
            end = cute.assume(rows[0] * num_splits * NOPE, divby=NOPE)
            first = cute.make_ptr(Float32, scratch, AddressSpace.gmem, assumed_align=16)
            mPartial = cute.make_tensor(first, cute.make_layout((*shape, NOPE), stride=(*values, 1)))
            mPartialLse = cute.make_tensor(first + end, cute.make_layout(shape, stride=rows))
        cluster = const_expr(self.spec.cluster)
        head_blocks = cute.ceil_div(h_q, self.spec.heads * cluster) * cluster
        _, _, layout_q = layouts(self.spec.heads)
        # heads and columns first: TMA fills what lies beyond the last head
        mQ_tile = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, mode=[2, 3, 1, 0]))
        load_q, tQ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), mQ_tile, cute.select(layout_q, mode=[0, 1]), (self.spec.heads, QK)
        )
        sizes = (mKV.shape[1], head_blocks, num_splits, s_q, merge_ctas)
        divisors = tuple(cute.fast_divmod_create_divisor_v2(size) for size in sizes)
        groups = batch * s_q * head_blocks
        ctas = cutlass.min(groups * num_splits, max_ctas)
        self.kernel(
            load_q, tQ, mKV, mIndex, mLength, mSink, mOut, mLse, mPartial, mPartialLse, counters,
            zero_row, softmax_scale * softmax.LOG2_E, num_splits, groups * num_splits, ctas, causal, trace, divisors,
        ).launch(
            grid=[ctas + (groups * merge_ctas if const_expr(self.spec.split) else 0), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        mKV: cute.Tensor,
        mIndex: cute.Tensor,
        mLength: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartial: cute.Tensor | None,
        mPartialLse: cute.Tensor | None,
        counters: Int64,
        zero_row: Int64,
        scale_log2: Float32,
        num_splits: Int32,
        items: Int32,
        decode_ctas: Int32,
        causal: Int32,
        trace: Int64,
        divisors: tuple,
    ):
        page_divisor, head_divisor, split_divisor, query_divisor, merge_divisor = divisors
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        columns = const_expr(self.spec.columns)
        storage = column_storage(self.spec.heads) if columns else shared_storage()
        smem = SmemAllocator().allocate(storage)
        if tidx == 0:
            if const_expr(self.spec.trace):
                smem.trace.ptr.store(trace)
                self.tracer.anchor(smem.trace.ptr, 0)
            self.init_barriers(smem)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        rank = Int32(0)
        if const_expr(self.spec.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

        moves = const_expr(self.spec.heads == WIDE)  # registers from one warpgroup to another
        of_producer, of_scores, of_values = self.spec.registers
        merges = False
        if const_expr(self.spec.split):
            merges = block >= decode_ctas
        if merges:
            if const_expr(self.spec.split):
                group, part = divmod(block - decode_ctas, merge_divisor)
                rest, head_block = divmod(group, head_divisor)
                batch_idx, query_idx = divmod(rest, query_divisor)
                place = (batch_idx, query_idx, head_block)
                counter = self.counter(counters, group)
                merge_ctas = merge_divisor.divisor
                self.merge(smem, mPartial, mPartialLse, mSink, mOut, mLse, counter, place, part, merge_ctas, num_splits)
        elif warp_idx < 4:
            if const_expr(moves):
                cute.arch.setmaxregister_decrease(of_producer)
            done = Int32(0)  # tiles of the items before
            for item in cutlass.range(block, items, decode_ctas, unroll=1):
                work = self.locate(item, head_divisor, split_divisor, query_divisor)
                _, _, query_idx, batch_idx = work
                length = self.length_of(work, mLength)
                begin, limit, count = self.keys_of(work, length, mIndex, mKV, num_splits, causal, query_divisor)
                following = item + decode_ctas
                if const_expr(columns):
                    if warp_idx == 0 and following < items:
                        next_work = self.locate(following, head_divisor, split_divisor, query_divisor)
                        prefetch_q(load_q, tQ, next_work, self.spec.heads)
                if count > 0:
                    if const_expr(self.spec.sparse):
                        entries = mIndex[batch_idx, query_idx, None]
                    else:
                        entries = mIndex[batch_idx, None]
                    keys = (mKV, zero_row, entries, begin, limit)
                    if const_expr(columns):
                        self.producer.fill(smem, *keys, done, count, page_divisor, tidx)
                    else:
                        self.producer.fill(smem, *keys, done, count, page_divisor, rank, tidx)
                done += count
        elif warp_idx < 8:
            if const_expr(moves and of_scores < 128):
                cute.arch.setmaxregister_decrease(of_scores)
            if const_expr(moves and of_scores > 128):
                cute.arch.setmaxregister_increase(of_scores)
            warp = warp_idx - 4
            if warp == 0:
                work = self.locate(block, head_divisor, split_divisor, query_divisor)
                start_q(smem, load_q, tQ, work, self.spec.heads)
            done, loads = Int32(0), Int32(0)
            length = self.length_of(self.locate(block, head_divisor, split_divisor, query_divisor), mLength)
            for item in cutlass.range(block, items, decode_ctas, unroll=1):
                work = self.locate(item, head_divisor, split_divisor, query_divisor)
                _, _, query_idx, batch_idx = work
                begin, limit, count = self.keys_of(work, length, mIndex, mKV, num_splits, causal, query_divisor)
                if const_expr(self.spec.sparse):
                    entries = mIndex[batch_idx, query_idx, None]
                else:
                    entries = mIndex[batch_idx, None]
                following = item + decode_ctas
                has_next = following < items
                last = cutlass.min(following, items - 1)
                next_work = self.locate(last, head_divisor, split_divisor, query_divisor)
                sinks = (mSink,) if const_expr(columns) else ()
                scaled, loads = self.scores.prepare(smem, load_q, tQ, *sinks, work, loads, warp, tidx % 128)
                length = self.length_of(next_work, mLength)  # an item ahead: it takes some 1000 clocks to come
                ahead = (has_next, next_work, scaled, warp, tidx % 128)
                if const_expr(columns):
                    self.scores.score(smem, load_q, tQ, scale_log2, done, count, *ahead)
                else:
                    keys = (mKV, zero_row, entries, begin, limit, page_divisor)
                    self.scores.score(smem, load_q, tQ, keys, scale_log2, done, count, *ahead)
                done += count
        else:
            if const_expr(moves):
                cute.arch.setmaxregister_increase(of_values)
            done = Int32(0)
            for item in cutlass.range(block, items, decode_ctas, unroll=1):
                work = self.locate(item, head_divisor, split_divisor, query_divisor)
                head_block, _, query_idx, batch_idx = work
                length = self.length_of(work, mLength)
                _, _, count = self.keys_of(work, length, mIndex, mKV, num_splits, causal, query_divisor)
                results = (mOut, mLse, mPartial, mPartialLse, mSink)
                place = (done, count, work, warp_idx // 4 - 2, tidx % 128)
                if const_expr(columns):
                    self.values.add(smem, mOut, mLse, mPartial, mPartialLse, mSink.shape[0], *place)
                else:
                    self.values.add(smem, *results, *place)
                if const_expr(self.spec.split):
                    cute.arch.barrier(barrier_id=BAR_STORED, number_of_threads=256)
                    if tidx == 256:
                        group = (batch_idx * query_divisor.divisor + query_idx) * head_divisor.divisor + head_block
                        cute.arch.atomic_add(self.counter(counters, group), Int32(1), sem="acq_rel", scope="gpu")
                done += count
        if tidx == 256:
            self.tracer.anchor(smem.trace.ptr, 1)
        if const_expr(self.spec.cluster > 1):  # nobody leaves while the other one reads or writes here
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    def init_barriers(self, smem):
        """Called by one thread; see the table for the counts."""
        counts = {"full": 256, "empty": 256, "p_full": 128, "p_empty": 256}
        number = dict.fromkeys(counts, stages(self.spec.heads)) | {"p_full": BUFFERS, "p_empty": BUFFERS}
        if not self.spec.columns:
            counts = {"full": 128, "empty": 256, "p_full": 128, "peer_free": 1, "codes_full": 1}
            number = dict.fromkeys(counts, STAGES) | {"empty": STAGES * PARTS}
        cute.arch.mbarrier_init(smem.q_full.ptr, 1)
        for name, count in counts.items():
            for i in range(number[name]):
                cute.arch.mbarrier_init(getattr(smem, name).data_ptr() + i, count)

    def locate(self, item: Int32, head_divisor, split_divisor, query_divisor):
        """(block of heads, split, query, request) of an item of work.

        Neighbouring CTAs read the same rows: the second one finds them in L2, or is the other one of a cluster.
        """
        rest, head_block = divmod(item, head_divisor)
        rest, split_idx = divmod(rest, split_divisor)
        batch_idx, query_idx = divmod(rest, query_divisor)
        return head_block, split_idx, query_idx, batch_idx

    @cute.jit
    def length_of(self, work: tuple, mLength: cute.Tensor) -> Int32:
        """How many keys a query (sparse) or a request (dense) has."""
        _, _, query_idx, batch_idx = work
        if const_expr(self.spec.sparse):
            return mLength[batch_idx, query_idx]
        return mLength[batch_idx]

    @cute.jit
    def keys_of(
        self,
        work: tuple,
        length: Int32,
        mIndex: cute.Tensor,
        mKV: cute.Tensor,
        num_splits: Int32,
        causal: Int32,
        query_divisor,
    ):
        """(first key, key at which all end, tiles) of an item of work."""
        _, split_idx, query_idx, _ = work
        if const_expr(self.spec.sparse):
            limit = cutlass.min(length, mIndex.shape[2])
        else:
            limit = length - causal * (query_divisor.divisor - 1 - query_idx)
            limit = cutlass.min(limit, mIndex.shape[1] * mKV.shape[1])
        tiles = cute.ceil_div(cutlass.max(limit, 0), TOKENS_PER_TILE)
        tiles_per_split = cute.ceil_div(tiles, num_splits)
        first_tile = split_idx * tiles_per_split
        count = cutlass.max(cutlass.min(tiles_per_split, tiles - first_tile), 0)
        return first_tile * TOKENS_PER_TILE, limit, count

    def counter(self, counters: Int64, group: Int32) -> cute.Pointer:
        """The counter of 64 heads of a query: how many of its splits are in global memory, then of its merges."""
        return cute.make_ptr(Int32, counters + 4 * Int64(group), AddressSpace.gmem, assumed_align=4)

    @cute.jit
    def merge(
        self,
        smem,
        mPartial: cute.Tensor,
        mPartialLse: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        counter: cute.Pointer,
        place,
        part: Int32,
        merge_ctas: Int32,
        num_splits: Int32,
    ):
        """Merges one of `merge_ctas` parts of the 64 heads at `place`, merge_lanes threads a row.

        Waits for the CTAs that decode these heads. They have lower numbers, so they have been started before this one
        and need nothing from it. The last of the parts leaves the counter at 0 for the next launch.
        """
        batch_idx, query_idx, head_block = place
        tidx, _, _ = cute.arch.thread_idx()
        lanes, rows = self.spec.merge_lanes, THREADS // self.spec.merge_lanes
        row_in_cta = tidx // lanes
        if tidx == 0:
            while cute.arch.load(counter, Int32, sem="acquire", scope="gpu") < num_splits:
                pass
        cute.arch.sync_threads()
        free = smem.codes if const_expr(self.spec.columns) else smem.nope
        rows_of_merge = cute.recast_ptr(free.data_ptr(), dtype=Float32)
        heads = cutlass.min(mSink.shape[0] - head_block * self.spec.heads, self.spec.heads)
        for first in cutlass.range(part * rows, heads, merge_ctas * rows, unroll=1):
            valid = first + row_in_cta < heads
            head = head_block * self.spec.heads + cutlass.min(first + row_in_cta, heads - 1)
            self.merger.merge_row(
                mPartial,
                mPartialLse,
                mSink,
                mOut,
                mLse,
                rows_of_merge,
                None,
                (batch_idx, query_idx, head),
                valid,
                tidx % lanes,
                row_in_cta,
            )
        if tidx == 0:
            done = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu") + 1
            if done == num_splits + merge_ctas:
                cute.arch.store(counter, Int32(0))
