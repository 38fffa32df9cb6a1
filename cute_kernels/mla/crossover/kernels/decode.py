"""FP8 MLA decoding on SM90 with an exchange: two CTAs of a cluster gather half of the keys each and hand them over.

One CTA serves 64 heads of one query token over a range of its keys, in tiles of 64 keys. S = Q K^T and O += P V from
shared memory, where codes lie as float16. The QK warpgroup makes P.

Scales. Codes go to the tensor core as they are: e4m3 is exact in float16. Scales are float32 and applied there:
    S = q_rope k_rope + sum_j scale_j (q_j code_j)     in float32, between products of quantization tiles j
    O_j += (P scale_j) code_j                          P scale_j rounded to float16
Ranges that float16 does not hold are found and handled: of Q (`prepare` of the scores) and of P scale_j
(`add_by_units`).

Splits and their merge are those of mla/kernels/decode.py.

Roles (512 threads)
  warpgroup 0                 keys, 72: gathers codes two passes of 16 rows ahead, stores them as float16
  warpgroup 1                 scores, 104: 32 of S, 32 of a group's, 16 scales; Q by TMA, scales a tile ahead
  warpgroups 2, 3             values, 168: 128 of O

Barriers                      arrivals per phase
  q_full                      1 + 1152 bytes a head of TMA
  full[stage]                 128, and 36,864 bytes of the other CTA where values are exchanged
  empty[stage]                256: values, after their last wgmma
  p_full[2]                   128: scores: P, what rows have with the tile
  peer_free[stage]            1: the other CTA has this stage free
  codes_full[stage]           1 + 20,480 bytes: codes of the other CTA
  named 1, 3, 4               barriers.py
All threads arrive, not one for a warp: it costs nothing measurable, and racecheck can follow it.

Shared memory, of 232,448
  rows, in lines of 128       2 x 64 x 1152 = 147,456; P takes the place of the tile's rope part
  q                           73,728: bf16 as it comes, then float16 but for the rope part
  scale                       2 x 64 x 16 = 2,048
  rest                        6,144: weights, powers of Q, masks, maxima, sums and units of rows, barriers
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.load import STAGES, KeyProducer
from cute_kernels.mla.crossover.kernels.pv import ValueWarpgroups
from cute_kernels.mla.crossover.kernels.qk import ScoreWarpgroup
from cute_kernels.mla.crossover.kernels.smem import shared_storage
from cute_kernels.mla.crossover.spec import ROLES, MlaCrossoverSpec
from cute_kernels.mla.kernels.arguments import Partials, Results, fake_arguments, uniform_partials
from cute_kernels.mla.kernels.load_q import make_q_tma, start_q
from cute_kernels.mla.kernels.merge import MergeTask, PartialMerger
from cute_kernels.mla.kernels.scheduler import Divisors, Scheduler, Share, WorkTable


class MlaCrossoverKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: MlaCrossoverSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.producer = KeyProducer(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        self.scores = ScoreWarpgroup(spec)
        self.values = ValueWarpgroups(spec)
        if spec.split:
            self.merger = PartialMerger(spec)

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        return fake_arguments(self.spec.sparse)

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
        num_splits * batch * s_q * h_q rows of 512 float16, as many of 8 block scales, and as many log-sum-exps.
        `counters` has a word for each block of heads of each query, 0 before and after the launch; `zero_row` is a row
        of zeros whose scales are `MASKED_SCALE`. merge_ctas CTAs merge a block of heads. max_ctas CTAs decode at most,
        each every max_ctas-th work tile. `trace` is where timestamps go.
        """
        batch, s_q, h_q, _ = mQ.shape
        cluster = const_expr(self.spec.cluster)
        head_blocks = cute.ceil_div(h_q, self.spec.heads * cluster) * cluster
        partials = Partials()
        if const_expr(self.spec.split):
            partials = uniform_partials(scratch, num_splits, batch, s_q, h_q)
        load_q, tQ = make_q_tma(mQ, self.spec.heads)
        sizes = (mKV.shape[1], head_blocks, num_splits, s_q, merge_ctas)
        divisors = tuple(cute.fast_divmod_create_divisor_v2(size) for size in sizes)
        groups = batch * s_q * head_blocks
        items, ctas = groups * num_splits, cutlass.min(groups * num_splits, max_ctas)
        self.kernel(
            load_q, tQ, mKV, mIndex, mLength, mSink, mOut, mLse, *partials, counters, zero_row,
            softmax_scale * softmax.LOG2_E, num_splits, items, ctas, causal, trace, divisors,
        ).launch(
            grid=[ctas + (groups * merge_ctas if const_expr(self.spec.split) else 0), 1, 1],
            block=[self.spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[cluster, 1, 1],
            use_pdl=True,
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
        mUnits: cute.Tensor | None,
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

        smem = SmemAllocator().allocate(shared_storage())
        if tidx == 0:
            self.tracer.start(smem.trace.ptr, trace)
            self.init_barriers(smem)
        if warp_idx == 1:
            cpasync.prefetch_descriptor(load_q)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The next launch may begin where a CTA of this one has ended: all of them have been started by then, so those
        # that merge find whom they wait for. It does not read, nor write, before all of this one is complete.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # what kernels before this one write: q, keys, lengths, the counters
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

        zero = Int32(0)
        share = Share(block, items, decode_ctas, zero, zero, zero, zero)
        table = WorkTable(mKV, mIndex, mLength, zero_row, num_splits, causal, Divisors(*divisors[:4]), share)
        first_item, end, step = share[:3]

        of_producer, of_scores, of_values = self.spec.registers
        merges = False
        if const_expr(self.spec.split):
            merges = block >= decode_ctas
        is_qk = warp_idx < 8  # compared here, not in the branch: ptxas lays out other code then
        if merges:
            if const_expr(self.spec.split):
                group, part = divmod(block - decode_ctas, merge_divisor)
                query, head_block = divmod(group, head_divisor)
                first_partial, count = Int32(0), num_splits
                if count > 0:
                    request, query_of_request = divmod(query, query_divisor)
                    head_group = query * head_divisor.divisor + head_block
                    place = (query, request, query_of_request, head_block)
                    task = MergeTask(*place, first_partial, count, part, merge_divisor.divisor)
                    merged = Results(mSink, mOut, mLse, Partials(mPartial, mPartialLse, mUnits))
                    self.merger.run(smem.nope, merged, counters, head_group, task)
        elif warp_idx < 4:
            cute.arch.setmaxregister_decrease(of_producer)
            self.producer.run(smem, table, rank, tidx)
        elif is_qk:
            cute.arch.setmaxregister_decrease(of_scores)
            warp = warp_idx - 4
            work = self.scheduler.locate(first_item, table)
            if warp == 0 and first_item < end:
                start_q(smem, load_q, tQ, work, self.spec.heads, unrolled=True)
            done, loads = Int32(0), Int32(0)
            length = self.scheduler.length(work, mLength)
            for item in cutlass.range(first_item, end, step, unroll=1):
                work = self.scheduler.locate(item, table)
                begin, limit, count, _ = self.scheduler.keys(item, work, length, table)
                following = item + step
                has_next = following < end
                last = cutlass.min(following, end - 1)
                next_work = self.scheduler.locate(last, table)
                scaled, loads = self.scores.prepare(smem, load_q, tQ, work, loads, warp, tidx % 128)
                length = self.scheduler.length(next_work, mLength)  # an item ahead: it takes some 1000 clocks to come
                ahead = (has_next, next_work, scaled, warp, tidx % 128)
                of_keys = (mKV, zero_row, self.scheduler.entries(work, mIndex), begin, limit, page_divisor)
                self.scores.score(smem, load_q, tQ, of_keys, scale_log2, done, count, *ahead)
                done += count
        else:
            cute.arch.setmaxregister_increase(of_values)
            done, of_wg = Int32(0), tidx % 128
            for item in cutlass.range(first_item, end, step, unroll=1):
                work = self.scheduler.locate(item, table)
                length = self.scheduler.length(work, mLength)
                _, _, count, _ = self.scheduler.keys(item, work, length, table)
                results = (mOut, mLse, (mPartial, mPartialLse, mUnits), mSink)
                self.values.add(smem, *results, done, count, item, table, warp_idx // 4 - 2, of_wg)
                if const_expr(self.spec.split):
                    rest, head_block = divmod(item, head_divisor)
                    group = rest // split_divisor * head_divisor.divisor + head_block
                    self.merger.count_partial(counters, group, tidx)
                done += count
        if tidx == 256:
            self.tracer.anchor(smem.trace.ptr, 1)
        cute.arch.cluster_arrive_relaxed()  # nobody leaves while the other one reads or writes here
        cute.arch.cluster_wait()

    def init_barriers(self, smem):
        """Called by one thread; see the table for the counts."""
        counts = {"full": 128, "empty": 256, "p_full": 128, "peer_free": 1, "codes_full": 1}
        cute.arch.mbarrier_init(smem.q_full.ptr, 1)
        for name, count in counts.items():
            for i in range(STAGES):
                cute.arch.mbarrier_init(getattr(smem, name).data_ptr() + i, count)
