"""FP8 MLA decoding on SM90: split-KV flash decoding of up to 64 query heads over 656-byte tokens.

One CTA serves 8, 16 or 64 heads of one query token over a range of its keys, in tiles of 64 keys, and stays for several
such items of work. One warpgroup scores (S, softmax, P), two add up values, 256 of the 512 columns each, so QK of a
tile needs nothing of PV of the tile before. Between them goes P as float16, through shared memory. There are two forms:

Heads as columns (no exchange): S^T = K Q^T and O^T += V^T P^T, keys and values being made in registers from raw rows,
    by those who multiply. Rows come by asynchronous copies and are read twice; nothing of them is written again, so a
    stage holds 656 bytes a key and three or four of them fit. (gather_kernel.py, column_*_kernel.py)
Heads as rows (with an exchange): S = Q K^T and O += P V from shared memory, where codes lie as float16. Two CTAs of a
    cluster each gather half of the keys and hand it over. (producer_kernel.py, score_kernel.py, value_kernel.py)

Scales. Codes go to the tensor core as they are: e4m3 is exact in float16, and one conversion makes two of them. Scales
are float32 and applied there:
    S = q_rope k_rope + sum_j scale_j (q_j code_j)     an accumulator for each quantization tile j, added in float32
    O_j += P (scale_j code_j)   as columns             scale_j code_j rounded to float16
    O_j += (P scale_j) code_j   as rows                P scale_j rounded to float16
So scores are as exact as float32 sums are, whatever the scales. Ranges that float16 does not hold are found and
handled: of Q (`prepare` of the scores) and of scale_j (`add_exactly`, `add_by_units`).

Splits. Several CTAs may share the keys of a query. Each leaves a float32 partial in global memory and counts itself;
CTAs with higher numbers wait for the count and merge with the code of `merge_states`, in the same launch. They wait
only for CTAs that were started before them, so nobody waits in vain however few run at a time.

Roles (512 threads)           64 heads as columns                          64 heads as rows
  warpgroup 0                 producer, 24 registers: copies rows          producer, 72: gathers codes two passes of 16
                                                                           rows ahead, stores them as float16
  warpgroup 1                 scores, 136: 32 of S, 32 of a group's,       scores, 104: 32 of S, 32 of a group's,
                              24 of K, 16 codes; Q by TMA                  16 scales; Q by TMA, scales a tile ahead
  warpgroups 2, 3             values, 176: 128 of O, 8 of V, 16 codes      values, 168: 128 of O
With 8 and 16 heads 40, 152 and 160 registers.

Barriers                      arrivals per phase: columns                  rows
  q_full                      1 + 1152 bytes a head of TMA                 the same
  full[stage]                 256: producer threads, and their copies      128, and 36,864 bytes of the other CTA
                                                                           where values are exchanged
  empty[stage]                256: values, codes are in registers          256: values, after their last wgmma
  p_full[2]                   128: scores: P, weights, bases               128: scores: P, what rows have with the tile
  p_empty[2]                  256: values, after their last wgmma          -
  peer_free[stage]            -                                            1: the other CTA has this stage free
  codes_full[stage]           -                                            1 + 20,480 bytes: codes of the other CTA
  named 1     BAR_OWNER       128: votes and hand-overs of scores          128: QK is done, P may overwrite its rope
  named 3     BAR_STORED      256: this CTA's partial is in global memory
  named 4     BAR_PRODUCER    -                                            128: own or the other CTA's rows are complete
  named 5, 6  BAR_VALUES      128: P x scale of 16 keys, out of reach      -
All threads arrive, not one for a warp: it costs nothing measurable, and racecheck can follow it.

Shared memory, of 232,448     64 heads as columns                          64 heads as rows
  rows                        3 x 64 x (512 + 128) = 122,880, raw          2 x 64 x 1152 = 147,456; P takes the place of
                                                                           the tile's rope part
  q                           73,728: bf16 as it comes, then float16 but for the rope part
  p                           2 x 64 x 64 x 2 = 16,384                     -
  scale                       3 x 64 x 16 = 3,072                          2 x 64 x 16 = 2,048
  rest                        15,360: sums of each thread 8,192, weights,  6,144: weights, powers of Q, masks, maxima,
                              bases, powers of Q, masks, barriers          sums and units of rows, barriers
With 16 heads there are four stages, and with 8.
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
from cute_kernels.mla.producer_kernel import NOPE, STAGES, KeyProducer
from cute_kernels.mla.score_kernel import ScoreWarpgroup
from cute_kernels.mla.spec import ROLES, TOKENS_PER_TILE, MlaDecodeSpec
from cute_kernels.mla.tile_kernel import BAR_STORED, QK, layouts, shared_storage, start_q
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
            cute.arch.setmaxregister_decrease(of_producer)
            done = Int32(0)  # tiles of the items before
            for item in cutlass.range(block, items, decode_ctas, unroll=1):
                work = self.locate(item, head_divisor, split_divisor, query_divisor)
                _, _, query_idx, batch_idx = work
                length = self.length_of(work, mLength)
                begin, limit, count = self.keys_of(work, length, mIndex, mKV, num_splits, causal, query_divisor)
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
            if const_expr(of_scores < 128):
                cute.arch.setmaxregister_decrease(of_scores)
            if const_expr(of_scores > 128):
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
                    of_keys = (mKV, zero_row, entries, begin, limit, page_divisor)
                    self.scores.score(smem, load_q, tQ, of_keys, scale_log2, done, count, *ahead)
                done += count
        else:
            cute.arch.setmaxregister_increase(of_values)
            done = Int32(0)
            for item in cutlass.range(block, items, decode_ctas, unroll=1):
                work = self.locate(item, head_divisor, split_divisor, query_divisor)
                head_block, _, query_idx, batch_idx = work
                length = self.length_of(work, mLength)
                _, _, count = self.keys_of(work, length, mIndex, mKV, num_splits, causal, query_divisor)
                results = (mOut, mLse, mPartial, mPartialLse, mSink)
                of_item = (done, count, work, warp_idx // 4 - 2, tidx % 128)
                if const_expr(columns):
                    self.values.add(smem, mOut, mLse, mPartial, mPartialLse, mSink.shape[0], *of_item)
                else:
                    self.values.add(smem, *results, *of_item)
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
            number = dict.fromkeys(counts, STAGES)
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
