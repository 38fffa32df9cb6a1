"""FP8 MLA decoding on SM90: split-KV flash decoding of up to 64 query heads over 656-byte tokens.

One CTA serves 8, 16, 32 or 64 heads of one query token over a range of its keys, in tiles of 64 keys, and stays for
several such items of work. One warpgroup scores, or two in turn, and two add up values, 256 of the 512 columns each, so
QK of a tile needs nothing of PV of the tile before. There are two forms:

Heads as columns (no exchange): S^T = K Q^T and O^T += V^T P^T, keys and values being made in registers from raw rows,
    by those who multiply. Rows come by asynchronous copies, or by tensor copies where 64 dense keys are a part of a
    page, and are read twice; nothing of them is written again. S goes as float32 through shared memory to the
    warpgroup that makes P, and from there as P, float16, to the values.
    (load.py, qk.py, softmax.py, pv.py)
Heads as rows (with an exchange): S = Q K^T and O += P V from shared memory, where codes lie as float16. Two CTAs of a
    cluster each gather half of the keys and hand it over. Who scores makes P. (crossover/)

Scales. Codes go to the tensor core as they are: e4m3 is exact in float16, and one conversion makes two of them. Scales
are float32 and applied there:
    S = q_rope k_rope + sum_j scale_j (q_j code_j)     in float32, between products of quantization tiles j
    O_j += P (scale_j code_j)   as columns             scale_j code_j rounded to float16
    O_j += (P scale_j) code_j   as rows                P scale_j rounded to float16
So scores are as exact as float32 sums are, whatever the scales. Ranges that float16 does not hold are found and
handled: of Q (`prepare` of the scores) and of scale_j (`add_exactly`, `add_by_units`).

Splits. Several CTAs may share the keys of a query. Each leaves a partial result in global memory and counts itself;
CTAs with higher numbers wait for the count and merge with the code of `merge_states`, in the same launch. They wait
only for CTAs that were started before them, so nobody waits in vain however few run at a time. Partial results are
float16, which halves what is written and read again (float32 took 2 to 9 us more, batch 2 to 16); 64 neighbouring
values share a float32, their unit, so what is lost is below 2^-38 of the largest of them. Queries are cut into equal
parts; or, balanced, CTAs have equal shares of the tiles of all queries, which each of them finds in the lengths
(scheduler.py), and a query has as many parts as shares meet in it, often one, which is the result.

Roles (512 threads)           64 heads as columns                          64 heads as rows
  warpgroup 0                 keys, 32 registers: copies rows two tiles    keys, 72: gathers codes two passes of 16 rows
                              ahead, or offers tiles of pages, makes P     ahead, stores them as float16
                              of S
  warpgroup 1                 scores, 128: 64 of S, 32 of K, 8 codes; Q    scores, 104: 32 of S, 32 of a group's,
                              by TMA                                       16 scales; Q by TMA, scales a tile ahead
  warpgroups 2, 3             values, 176: 128 of O, 8 of V, 16 codes;     values, 168: 128 of O
                              copy tiles that are offered, three ahead
With 8 and 16 heads there are 768 threads, and 80 registers of each at launch:
  warpgroup 0                 keys, 32: copies rows up to four tiles ahead, waits for nothing but room
  warpgroups 1, 5             scores, 112: even and odd tiles, counted through all items of a CTA. A tile takes one of
                              them 3,400 clocks, which are waits for the most part, and memory 2,300. They share Q
  warpgroups 2, 3             values, 96: 32 of O, or 16; V of 16 keys twice, 32, so they wait once for 16 keys, not
                              four times
  warpgroup 4                 softmax, 32: makes P of S
With 32 heads there are the roles of 64, with 48, 144 and 160 registers, and copies are three tiles ahead, or four.

Barriers                      arrivals per phase: columns                  rows
  q_full                      1 + 1152 bytes a head of TMA                 the same
  full[stage]                 256: threads that copy, and their copies;    128, and 36,864 bytes of the other CTA
                              1 more where values may: of 41,984 bytes     where values are exchanged
  rope_empty[place]           128: scores, S of a dense tile has left      -
  empty[stage]                256: values, codes are in registers          256: values, after their last wgmma
  s_full[1 or 2]              128: scores of this tile: S                  -
  s_empty[1 or 2]             128: P has been made of it                   -
  p_full[2]                   128: P, weights, what heads have with it     128: scores: P, what rows have with the tile
  p_empty[2]                  256: values, after their last wgmma          -
  peer_free[stage]            -                                            1: the other CTA has this stage free
  codes_full[stage]           -                                            1 + 20,480 bytes: codes of the other CTA
  named 1     BAR_OWNER       128, or 256 where two groups score: votes    128: QK is done, P may overwrite its rope
                              and hand-overs of Q
  named 3     BAR_STORED      256: this CTA's partial is in global memory
  named 4     BAR_PRODUCER    -                                            128: own or the other CTA's rows are complete
  named 5, 6  BAR_VALUES      128: P x scale of 16 keys, out of reach      -
All threads arrive, not one for a warp: it costs nothing measurable, and racecheck can follow it.

Shared memory, of 232,448     64 heads as columns                          64 heads as rows
  rows, in lines of 128       3 x 64 x 512 = 98,304 raw codes, 2 x 64 x    2 x 64 x 1152 = 147,456; P takes the place of
                              128 = 16,384 rope parts                      the tile's rope part
  q                           73,728: bf16 as it comes, then float16 but for the rope part
  s                           64 x 64 x 4 = 16,384                         -
  p                           2 x 64 x 64 x 2 = 16,384                     -
  scale                       3 x 64 x 16 = 3,072                          2 x 64 x 16 = 2,048
  rest                        8,192: P x scale out of reach 4,096,         6,144: weights, powers of Q, masks, maxima,
                              weights, powers of Q, results, barriers      sums and units of rows, barriers
A rope part has a place until S of its tile is complete, codes until PV has read them. With 8 and 16 heads there are
four stages of codes and as many of rope parts, which both have a place until PV has read the codes, and two places of
S: of 16 heads 131,072 and 32,768, q 18,432, s 8,192, p 4,096. With 32 heads there are four stages of codes and three of
rope parts: 131,072 and 24,576, q 36,864, s and p 8,192 each.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.device import registers, softmax
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.arguments import Partials, balanced_partials, fake_arguments, uniform_partials
from cute_kernels.mla.kernels.load import RowGatherer, parts_of_pages
from cute_kernels.mla.kernels.load_q import make_q_tma, start_q
from cute_kernels.mla.kernels.merge import PartialMerger
from cute_kernels.mla.kernels.pv import ColumnValues
from cute_kernels.mla.kernels.qk import ColumnScores
from cute_kernels.mla.kernels.scheduler import Divisors, Scheduler, Share, WorkTable
from cute_kernels.mla.kernels.smem import BUFFERS, column_storage, rope_stages, stages
from cute_kernels.mla.kernels.softmax import ColumnSoftmax
from cute_kernels.mla.spec import ROLES, MlaDecodeSpec


class MlaDecodeKernel:
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    def __init__(self, spec: MlaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self.softmax = ColumnSoftmax(spec)
        self.producer: ColumnSoftmax | RowGatherer = RowGatherer(spec) if spec.few_heads else self.softmax
        self.tracer = Tracer(spec.trace, len(ROLES))
        self.scores = ColumnScores(spec)
        self.values = ColumnValues(spec)
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
        num_splits * batch * s_q * h_q rows of 512 float16, as many of 8 units, and as many log-sum-exps; balanced for
        (shares + batch * s_q) * h_q of them. `counters` has a word for each block of heads of each query, 0 before and
        after the launch; `zero_row` is a row of zeros whose scales are `MASKED_SCALE`. merge_ctas CTAs merge a block of
        heads. max_ctas CTAs decode at most, each every max_ctas-th item of work, or a share. `trace` is where
        timestamps go.
        """
        batch, s_q, h_q, _ = mQ.shape
        head_blocks = cute.ceil_div(h_q, self.spec.heads) * self.spec.cluster
        shares = max_ctas // head_blocks
        partials = Partials()
        if const_expr(self.spec.balanced):
            num_splits, partials = balanced_partials(scratch, shares, batch, s_q, h_q)
        elif const_expr(self.spec.split):
            partials = uniform_partials(scratch, num_splits, batch, s_q, h_q)
        load_q, tQ = make_q_tma(mQ, self.spec.heads)
        load_rows = ()
        if const_expr(not self.spec.sparse):
            load_rows = parts_of_pages(mKV)
        sizes = (mKV.shape[1], head_blocks, num_splits, s_q, merge_ctas)
        divisors = tuple(cute.fast_divmod_create_divisor_v2(size) for size in sizes)
        groups = batch * s_q * head_blocks
        items, ctas = groups * num_splits, cutlass.min(groups * num_splits, max_ctas)
        if const_expr(self.spec.balanced):
            items, ctas = batch * s_q, shares * head_blocks
            groups = cutlass.min(items, shares - 1) * head_blocks
        self.kernel(
            load_q, tQ, load_rows, mKV, mIndex, mLength, mSink, mOut, mLse, *partials, counters,
            zero_row, softmax_scale * softmax.LOG2_E, num_splits, items, ctas, causal, trace, divisors,
        ).launch(
            grid=[ctas + (groups * merge_ctas if const_expr(self.spec.split) else 0), 1, 1],
            block=[self.spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        tQ: cute.Tensor,
        load_rows: tuple,
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
        _, head_divisor, split_divisor, query_divisor, merge_divisor = divisors
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = SmemAllocator().allocate(column_storage(self.spec))
        if tidx == 0:
            self.tracer.start(smem.trace.ptr, trace)
            self.init_barriers(smem)
        if warp_idx == 1:
            cpasync.prefetch_descriptor(load_q)
            for load, _ in load_rows:
                cpasync.prefetch_descriptor(load)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The next launch may begin where a CTA of this one has ended: all of them have been started by then, so those
        # that merge find whom they wait for. It does not read, nor write, before all of this one is complete.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # what kernels before this one write: q, keys, lengths, the counters

        zero, shares = Int32(0), decode_ctas // head_divisor.divisor
        own = Share(block, items, decode_ctas, zero, zero, zero, zero)
        table = WorkTable(mKV, mIndex, mLength, zero_row, num_splits, causal, Divisors(*divisors[:4]), own)
        if const_expr(self.spec.balanced):
            share, own_block = divmod(block, head_divisor)
            cuts, of_all = smem.cuts.data_ptr(), (shares, items, table, tidx % 32)
            if block >= decode_ctas:
                if warp_idx == 0:
                    group, _ = divmod(block - decode_ctas, merge_divisor)
                    number, _ = divmod(group, head_divisor)
                    self.scheduler.find_merge(cuts, number, *of_all)
            elif warp_idx < 2:
                self.scheduler.find_cut(cuts + 2 * warp_idx, share + warp_idx, *of_all)
            cute.arch.sync_threads()
            own = self.scheduler.share_between(cuts, share, own_block)
            table = table._replace(share=own)
        first_item, end, step = own[:3]

        of_producer, of_scores, of_values, of_softmax = self.spec.registers
        merges = False
        if const_expr(self.spec.split):
            merges = block >= decode_ctas
        makes_p, scores = False, warp_idx < 8
        if const_expr(self.spec.few_heads):
            makes_p, scores = warp_idx // 4 == 4, scores or warp_idx >= 20
        if merges:
            if const_expr(self.spec.split):
                group, part = divmod(block - decode_ctas, merge_divisor)
                query, head_block = divmod(group, head_divisor)
                first_state, count = Int32(0), num_splits
                if const_expr(self.spec.balanced):
                    query, first, count = (cute.arch.make_warp_uniform(smem.cuts[i]) for i in range(3))
                    first_state = first + query
                if count > 0:
                    place = (query, *divmod(query, query_divisor), head_block)
                    of_block = query * head_divisor.divisor + head_block
                    parts, states = (part, merge_divisor.divisor), (first_state, count)
                    tensors = ((mPartial, mUnits, mPartialLse), mSink, mOut, mLse)
                    self.merger.run(smem.codes, tensors, counters, of_block, states, place, parts)
        elif warp_idx < 4:
            cute.arch.setmaxregister_decrease(of_producer)
            self.producer.run(smem, table, load_rows, mSink, self.kept(tidx))
        elif makes_p:
            if const_expr(self.spec.few_heads):
                cute.arch.setmaxregister_decrease(of_softmax)
                self.softmax.run(smem, table, load_rows, mSink, self.kept(tidx % 128))
        elif scores:
            at_launch = self.spec.expected["registers"]
            if const_expr(of_scores < at_launch):
                cute.arch.setmaxregister_decrease(of_scores)
            if const_expr(of_scores > at_launch):
                cute.arch.setmaxregister_increase(of_scores)
            warp = warp_idx - 4
            if const_expr(self.spec.score_groups > 1):
                warp = warp_idx % 4 + warp_idx // 20 * 4
            work = self.scheduler.locate(first_item, table)
            if warp == 0 and first_item < end:
                start_q(smem, load_q, tQ, work, self.spec.heads)
            done, loads = Int32(0), Int32(0)
            length = self.scheduler.length(work, mLength)
            for item in cutlass.range(first_item, end, step, unroll=1):
                work = self.scheduler.locate(item, table)
                _, _, count, _ = self.scheduler.keys(item, work, length, table)
                following = item + step
                has_next = following < end
                last = cutlass.min(following, end - 1)
                next_work = self.scheduler.locate(last, table)
                scaled, loads = self.scores.prepare(smem, load_q, tQ, work, loads, warp, tidx % 128)
                length = self.scheduler.length(next_work, mLength)  # an item ahead: it takes some 1000 clocks to come
                following_item = (has_next, last, table)
                self.scores.score(smem, load_q, tQ, scale_log2, done, count, *following_item, scaled, warp, tidx % 128)
                done += count
        else:
            cute.arch.setmaxregister_increase(of_values)
            done, of_wg = Int32(0), self.kept(tidx % 128)
            for item in cutlass.range(first_item, end, step, unroll=1):
                work = self.scheduler.locate(item, table)
                length = self.scheduler.length(work, mLength)
                _, _, count, whole = self.scheduler.keys(item, work, length, table)
                results = (mOut, mLse, (mPartial, mPartialLse, mUnits), mSink)
                self.values.add(smem, *results, done, count, item, whole, table, load_rows, warp_idx // 4 - 2, of_wg)
                if const_expr(self.spec.balanced):
                    if whole == 0:
                        self.merger.count_partial(counters, item * head_divisor.divisor + own.head_block, tidx)
                elif const_expr(self.spec.split):
                    rest, head_block = divmod(item, head_divisor)
                    group = rest // split_divisor * head_divisor.divisor + head_block
                    self.merger.count_partial(counters, group, tidx)
                done += count
        if tidx == 256:
            self.tracer.anchor(smem.trace.ptr, 1)

    def kept(self, tid: Int32) -> Int32:
        """The number of a thread, below 128, in a register where there are enough of them.

        Addresses follow from it. Made again behind each wait, from the register of the hardware, they cost dense
        decoding with 16 heads 4%.
        """
        return registers.opaque(tid) & 127 if self.spec.few_heads else tid

    def init_barriers(self, smem):
        """Called by one thread; see the table for the counts."""
        counts = {"full": 257 if self.spec.offers else 256, "empty": 256}
        counts |= {"s_full": 128, "s_empty": 128, "p_full": 128, "p_empty": 256}
        number = dict.fromkeys(("full", "empty"), stages(self.spec.heads))
        if self.spec.offers:
            counts["rope_empty"], number["rope_empty"] = 128, rope_stages(self.spec.heads)
        number |= dict.fromkeys(("s_full", "s_empty"), self.spec.score_groups)
        number |= dict.fromkeys(("p_full", "p_empty"), BUFFERS)
        cute.arch.mbarrier_init(smem.q_full.ptr, 1)
        for name, count in counts.items():
            for i in range(number[name]):
                cute.arch.mbarrier_init(getattr(smem, name).data_ptr() + i, count)
