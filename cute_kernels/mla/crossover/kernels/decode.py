"""FP8 MLA decoding on SM90 with an exchange: two CTAs of a cluster gather half of the keys each and hand them over.

One CTA serves 64 heads of one query token over a range of its keys, in key tiles of 64. S = Q K^T and O += P V from
shared memory, where codes lie as float16. The QK warpgroup makes P.

Scales. Codes go to the tensor core as they are: e4m3 is exact in float16. Scales are float32 and applied so:
    S = q_rope k_rope + sum_j scale_j (q_j code_j)     in float32, between products of quant tiles j
    O_j += (P scale_j) code_j                          P scale_j rounded to float16
Ranges that float16 does not hold are found and handled: of Q (`QkWarpgroup.prepare`) and of P scale_j
(`PvWarpgroups.multiply_row_scaled`).

Splits and their merge are those of mla/kernels/decode.py.

Roles (512 threads), registers of a thread
  warpgroup 0      load, 72: gathers codes two passes of 16 rows ahead, stores them as float16, exchanges them (load.py)
  warpgroup 1      QK, 104: 32 of S, 32 of a quant tile's S, 16 scales; Q by TMA, scales a tile ahead (qk.py)
  warpgroups 2, 3  PV, 168: 128 of O (pv.py)

Mbarriers: name[copies], arrivals of a phase. exchange "values":
  q_full              1 + 73,728 bytes  TMA: Q
  full[2]           128 + 36,864 bytes  load warpgroup, and the other CTA's rows
  empty[2]          256                 PV warpgroups, after their last wgmma
  p_full[2]         128                 QK warpgroup: P, and the rows' rescaling, row_max, row_sum
  peer_free[2]        1                 the other CTA has this stage free
  codes_full[2]       1                 codes of the other CTA
exchange "codes": full has no bytes, codes_full 20,480.
Named barriers: 1 QK, 3 STORED, 4 LOAD (barriers.py). All threads arrive, not one for a warp: it costs nothing
measurable, and racecheck can follow it.

Shared memory, of 232,448
  rows, in lines of 128       2 x 64 x 1152 = 147,456; P takes the place of the tile's rope part
  q                           73,728: bf16 as it comes, then float16 but for the rope part
  scale                       2 x 64 x 16 = 2,048
  rest                        6,144: weights, powers of Q, masks, row_max, row_sum and scales of rows, barriers
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax
from cute_kernels.device.barriers import initialize
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.arguments import KeySource, QueryLoad, TileRange
from cute_kernels.mla.crossover.kernels.barriers import barriers
from cute_kernels.mla.crossover.kernels.load import LoadWarpgroup
from cute_kernels.mla.crossover.kernels.pv import PvWarpgroups
from cute_kernels.mla.crossover.kernels.qk import QkWarpgroup
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
        self.load = LoadWarpgroup(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        self.qk = QkWarpgroup(spec)
        self.pv = PvWarpgroups(spec)
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
        """One launch. Split specs have CTAs after the others that merge what those leave in the scratch memory.

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
        work_tiles, ctas = groups * num_splits, cutlass.min(groups * num_splits, max_ctas)
        self.kernel(
            load_q, tQ, mKV, mIndex, mLength, mSink, mOut, mLse, partials, counters, zero_row,
            softmax_scale * softmax.LOG2_E, num_splits, work_tiles, ctas, causal, trace, divisors,
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
        partials: Partials,
        counters: Int64,
        zero_row: Int64,
        scale_log2: Float32,
        num_splits: Int32,
        work_tiles: Int32,
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
            initialize(smem, barriers(self.spec))
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
        share = Share(block, work_tiles, decode_ctas, zero, zero, zero, zero)
        table = WorkTable(mKV, mIndex, mLength, zero_row, num_splits, causal, Divisors(*divisors[:4]), share)
        q_load = QueryLoad(load_q, tQ)

        load_registers, qk_registers, pv_registers = self.spec.registers
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
                    merged = Results(mSink, mOut, mLse, partials)
                    self.merger.run(smem.nope, merged, counters, head_group, task)
        elif warp_idx < 4:
            cute.arch.setmaxregister_decrease(load_registers)
            self.load.run(smem, table, rank, tidx)
        elif is_qk:
            cute.arch.setmaxregister_decrease(qk_registers)
            self.run_qk(smem, q_load, scale_log2, table, warp_idx - 4, tidx % 128)
        else:
            cute.arch.setmaxregister_increase(pv_registers)
            results = Results(mSink, mOut, mLse, partials)
            self.run_pv(smem, results, table, counters, warp_idx, tidx)
        if tidx == 256:
            self.tracer.anchor(smem.trace.ptr, 1)
        cute.arch.cluster_arrive_relaxed()  # nobody leaves while the other one reads or writes here
        cute.arch.cluster_wait()

    @cute.jit
    def run_qk(self, smem, q_load: QueryLoad, scale_log2: Float32, table: WorkTable, warp: Int32, tid: Int32):
        """The QK warpgroup: all work tiles of this CTA, the next one's Q and length on the way."""
        first, end, step = table.share.first, table.share.end, table.share.step
        work = self.scheduler.locate(first, table)
        if warp == 0 and first < end:
            start_q(smem, *q_load, work, self.spec.heads, unrolled=True)
        done, loads = Int32(0), Int32(0)
        length = self.scheduler.length(work, table.mLength)
        for number in cutlass.range(first, end, step, unroll=1):
            work = self.scheduler.locate(number, table)
            begin, limit, count, _ = self.scheduler.keys(number, work, length, table)
            following = number + step
            has_next = following < end
            last = cutlass.min(following, end - 1)
            next_work = self.scheduler.locate(last, table)
            scaled, loads = self.qk.prepare(smem, q_load, work, loads, warp, tid)
            length = self.scheduler.length(next_work, table.mLength)  # a work tile ahead: it takes some 1000 clocks
            entries = self.scheduler.entries(work, table.mIndex)
            source = KeySource(table.mKV, table.zero_row, entries, begin, limit, table.divisors.page_size)
            tiles = TileRange(done, count)
            self.qk.run(smem, q_load, source, scale_log2, tiles, has_next, next_work, scaled, warp, tid)
            done += count

    @cute.jit
    def run_pv(self, smem, results: Results, table: WorkTable, counters: Int64, warp_idx: Int32, tidx: Int32):
        """A PV warpgroup: all work tiles of this CTA."""
        divisors = table.divisors
        done, tid = Int32(0), tidx % 128
        for number in cutlass.range(table.share.first, table.share.end, table.share.step, unroll=1):
            work = self.scheduler.locate(number, table)
            length = self.scheduler.length(work, table.mLength)
            _, _, count, _ = self.scheduler.keys(number, work, length, table)
            self.pv.run(smem, results, TileRange(done, count), number, table, warp_idx // 4 - 2, tid)
            if const_expr(self.spec.split):
                rest, head_block = divmod(number, divisors.head_blocks)
                group = rest // divisors.splits * divisors.head_blocks.divisor + head_block
                self.merger.count_partial(counters, group, tidx)
            done += count
