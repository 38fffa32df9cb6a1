"""MLA decoding on SM90: split-KV flash decoding, up to 64 query heads a CTA, one latent cache or two, of any format.

A CTA has work tiles: 8, 16, 32 or 64 heads of a query token times a range of its keys, in key tiles of 64. With
`swap_ab` keys are the M side of both products: S^T = K Q^T and O^T += V^T P^T. Keys and values become wgmma operands
in registers, by the warpgroups that multiply, from raw rows in shared memory; few heads waste no padding. Rows come by
cp.async, or by TMA if a dense key tile is a part of one page, and are read twice. S goes as float32 through shared
memory to the softmax, and P from there as float16 to PV. QK of a tile does not depend on PV of the tile before.

Float32 scales (V3.2). Codes go to the tensor core unscaled: e4m3 is exact in float16, and one conversion makes two.
Scales are applied as follows:
    S = q_rope k_rope + sum_j scale_j (q_j code_j)     in float32, between the products of quant tiles j
    O_j += P (scale_j code_j)                          scale_j code_j rounded to float16
So scores are as exact as float32 sums, whatever the scales. Powers of two keep other numbers in range of float16: one
for each head of Q (`QConverter.prepare`) and one for each quant tile of V (`ValueUnits`). Key tiles that these powers
do not fit are found, and computed slowly: S by `QkWarpgroups.slow_tile`, O by `PvWarpgroups.add_bfloat16`.

Other scales (codes.py). A ue8m0 scale is a power of two and an fp4 code has few bits, so code x scale is exact in
float16, relative to the largest scale of a row for QK and to a unit of 64 values for PV (`ScaledValueUnits`). Keys are
scaled as operands, and one accumulator takes all products:
    S_k = 2^n_k sum_i q_i (2^-n_k scale code)_ki        O = unit sum_k P_k (scale code / unit)_k
In V4 a rope part is a value too: it stays in its stage until PV has read it, and QK leaves it there as float16.

Rows. A key has a data row and a scale row, whose places its page decides (`Source`). A stage holds e4m3 codes. Rows of
other codes are expanded in place, before QK and PV see them: with 8 and 16 heads by the load warpgroup, which does
nothing else; otherwise by PV, two tiles ahead of its products. With two caches a query has key tiles of the first, then
those of the second; no tile has keys of both.

Splits. Several CTAs may share the keys of a query. Each leaves a partial in global memory and counts it; merge CTAs,
with higher numbers in the same launch, wait for the count and merge with the code of `merge_states`. They wait only for
CTAs that have started before them, so there is no deadlock however few run at a time. Partials are float16, which
halves what is written and read (float32 took 2 to 9 us more, batch 2 to 16); 64 neighbouring values share a float32
block scale, so what is lost is below 2^-38 of the largest of them. Queries are cut into equal parts; or, balanced, CTAs
have equal shares of the key tiles of all queries (scheduler.py), and a query has as many partials as shares meet in it,
often one, which is the result.

Roles, 64 heads (512 threads, 128 registers each at launch)
  warpgroup 0                 load and softmax, 32 registers: copies rows two tiles ahead, or announces tiles of pages;
                              makes P of S
  warpgroup 1                 QK, 128: 64 of S, 32 of K, 8 of codes; Q by TMA
  warpgroups 2, 3             PV, 176: 128 of O, 8 of V, 16 of codes; issue the TMA of announced tiles, three ahead
32 heads: the same roles with 48, 144 and 160 registers, and loads three tiles ahead, announced ones four. Other formats
move some registers between roles (`MlaDecodeSpec.registers`).
8 and 16 heads (768 threads, 80 registers each at launch)
  warpgroup 0                 load, 32: copies rows up to four tiles ahead, waits for nothing but room
  warpgroups 1, 5             QK, 112: every second tile each, counted through all work tiles of a CTA. A tile takes one
                              of them 3,400 clocks, most of them waits, and memory 2,300. They share Q
  warpgroups 2, 3             PV, 96: 32 of O, or 16; V of 16 keys twice, 32, so it waits once for 16 keys, not four
                              times
  warpgroup 4                 softmax, 32

Mbarriers of a dense call with 64 heads: arrivals and bytes that complete a phase
  q_full              1 + 73,728 bytes  Q is loaded
  keys_full[3]      257 + 41,984 bytes  a key tile is loaded, its mask set
  keys_empty[3]     256                 PV has its codes in registers
  s_full            128                 S is stored
  s_empty           128                 the softmax has read S
  p_full[2]         128                 P, weights, flags and factors are stored
  p_empty[2]        256                 the last wgmma of PV has read P
  rope_empty[2]     128                 QK has read the rope part
keys_full counts 128 threads and their cp.async, and one arrival that announces the bytes of TMA, if any. If the load
warpgroup issues all loads (sparse keys, or up to 16 heads) it has 256 arrivals, and there is no rope_empty.

Mbarriers of a sparse call with 16 heads
  q_full              1 + 18,432 bytes  Q is loaded
  keys_full[4]      256                 a key tile is loaded, its mask set
  keys_empty[4]     256                 PV has its codes in registers
  s_full[2]         128                 S is stored
  s_empty[2]        128                 the softmax has read S
  p_full[2]         128                 P, weights, flags and factors are stored
  p_empty[2]        256                 the last wgmma of PV has read P

of a call over V4.1's fp4 with 64 heads, which PV expands
  q_full              1 + 65,536 bytes  Q is loaded
  keys_full[3]      256                 a key tile is loaded, its mask set
  keys_empty[3]     256                 PV has its codes in registers
  s_full            128                 S is stored
  s_empty           128                 the softmax has read S
  p_full[2]         128                 P, weights, flags and factors are stored
  p_empty[2]        256                 the last wgmma of PV has read P
  raw_full[3]       256                 the stage is ready to expand, needs no expansion, or is empty (NO_TILE)
Named barriers are in pipelines.py.

Shared memory, of 232,448 bytes, with 64 heads
  codes                       3 x 64 x 512 = 98,304
  rope                        2 x 64 x 128 = 16,384
  q                           73,728: bf16 as it comes, then float16 but for the rope part
  s                           64 x 64 x 4 = 16,384
  p                           2 x 64 x 64 x 2 = 16,384
  scale                       3 x 64 x 16 = 3,072
  rest                        some 6,000: weights, peaks and powers of Q, factors, barriers
A rope part stays until S of its tile is complete, codes until PV has read them. With 8 and 16 heads there are four
stages of both, which are free once PV has read the codes, and two stages of S. 16 heads: codes 131,072, rope 32,768, q
18,432, s 8,192, p 4,096. 32 heads have four stages of codes and three of rope parts: 131,072 and 24,576, q 36,864, s
and p 8,192 each.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.device import registers, softmax
from cute_kernels.device.pipeline import initialize
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.arguments import (
    Caches,
    Partials,
    Results,
    Sizes,
    Source,
    balanced_partials,
    fake_keys,
    fake_results,
    fake_strided,
    uniform_partials,
)
from cute_kernels.mla.kernels.load import KeyLoader, make_page_tma
from cute_kernels.mla.kernels.load_q import QTma, make_q_tma
from cute_kernels.mla.kernels.merge import PartialMerger
from cute_kernels.mla.kernels.pipelines import pipelines
from cute_kernels.mla.kernels.pv import PvWarpgroups
from cute_kernels.mla.kernels.qk import QkWarpgroups
from cute_kernels.mla.kernels.scaled_pv import ScaledKeyPvWarpgroups
from cute_kernels.mla.kernels.scaled_qk import ScaledKeyQkWarpgroups
from cute_kernels.mla.kernels.scheduler import Divisors, Scheduler, Share, WorkTable
from cute_kernels.mla.kernels.smem import WARPS, shared_storage
from cute_kernels.mla.kernels.softmax import SoftmaxWarpgroup
from cute_kernels.mla.spec import ROLES, MlaDecodeSpec


class MlaDecodeKernel:
    """The kernel that the module's docstring describes. `spec` holds everything that is fixed at compile time."""

    def __init__(self, spec: MlaDecodeSpec):
        self.spec = spec
        self.roles = spec.roles
        self.scheduler = Scheduler(spec)
        self.load = KeyLoader(spec)
        self.softmax = SoftmaxWarpgroup(spec)
        self.qk: QkWarpgroups
        self.pv: PvWarpgroups
        if spec.float_scales:
            self.qk, self.pv = QkWarpgroups(spec), PvWarpgroups(spec)
        else:
            self.qk, self.pv = ScaledKeyQkWarpgroups(spec), ScaledKeyPvWarpgroups(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        if spec.split:
            self.merger = PartialMerger(spec)

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        sizes = tuple(cute.sym_int() for _ in range(3))
        caches = []
        for _ in range(2 if self.spec.has_extra else 1):
            # rows are read by address and first stride: a view of a planar page does not say where its rows are
            is_planar = len(self.spec.token_format.row_bytes) > 1
            row_stride = cute.sym_int64() if is_planar else cute.sym_int64(divisibility=16)
            strides = (cute.sym_int64(divisibility=16), row_stride, 1)
            kv = make_fake_tensor(Uint8, tuple(cute.sym_int() for _ in range(3)), strides, assumed_align=16)
            caches += [kv, *fake_keys(self.spec.sparse, sizes), Int32(1), Int32(1), Int32(1)]
        if not self.spec.has_extra:
            caches += [None] * 6
        launch = (Int64(0), Int64(0), Float32(1.0), Int32(1), Int32(1), Int32(1), Int32(1), Int64(0))
        q = fake_strided(BFloat16, (*sizes, self.spec.d_qk), 16)
        return (q, *caches, *fake_results(sizes), *launch, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mKV: cute.Tensor,
        mIndex: cute.Tensor,
        mLength: cute.Tensor,
        data_stride: Int32,
        scale_offset: Int32,
        scale_stride: Int32,
        mExtraKV: cute.Tensor | None,
        mExtraIndex: cute.Tensor | None,
        mExtraLength: cute.Tensor | None,
        extra_data_stride: Int32 | None,
        extra_scale_offset: Int32 | None,
        extra_scale_stride: Int32 | None,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        scratch: Int64,
        counters: Int64,
        softmax_scale: Float32,
        num_splits: Int32,
        merge_ctas: Int32,
        max_ctas: Int32,
        causal: Int32,
        trace: Int64,
        stream: cuda.CUstream,
    ):
        """Launches decode CTAs, then merge CTAs if the spec splits.

        Memory that no caller sees comes as addresses, which cost the host less than tensors.

        mKV         pages: the address, the first stride and two sizes count; for TMA of pages all strides
        data_stride   this and the next two are numbers of a `PageLayout`, in bytes
        mExtraKV    this and the next five describe a second cache, or are None
        scratch     partials: num_splits * batch * s_q * h_q rows of 512 float16, as many of 8 block scales, and as many
                    log-sum-exps; balanced (shares + batch * s_q) * h_q of them
        counters    a word for each block of heads of each query, 0 before and after the launch
        merge_ctas  CTAs that merge a block of heads
        max_ctas    CTAs that decode, at most: each has every max_ctas-th work tile, or a share
        trace       address of the timestamps
        """
        batch, s_q, h_q, _ = mQ.shape
        head_blocks = cute.ceil_div(h_q, self.spec.heads)
        shares = max_ctas // head_blocks
        partials = Partials()
        if const_expr(self.spec.balanced):
            num_splits, partials = balanced_partials(scratch, shares, batch, s_q, h_q)
        elif const_expr(self.spec.split):
            partials = uniform_partials(scratch, num_splits, batch, s_q, h_q)
        sources: tuple = (self.source(mKV, data_stride, scale_offset, scale_stride),)
        pages: tuple = ()
        index, length = mIndex, mLength
        if const_expr(self.spec.has_extra):
            extra = self.source(mExtraKV, extra_data_stride, extra_scale_offset, extra_scale_stride)
            sources, index, length = (*sources, extra), (mIndex, mExtraIndex), (mLength, mExtraLength)
        if const_expr(self.spec.page_tma):
            pages = make_page_tma(mKV)
        sizes = (mKV.shape[1], head_blocks, num_splits, s_q, merge_ctas)
        divisors = Divisors(*(cute.fast_divmod_create_divisor_v2(size) for size in sizes))
        groups = batch * s_q * head_blocks
        work_tiles, ctas = groups * num_splits, cutlass.min(groups * num_splits, max_ctas)
        if const_expr(self.spec.balanced):
            work_tiles, ctas = batch * s_q, shares * head_blocks
            groups = cutlass.min(work_tiles, shares - 1) * head_blocks
        self.kernel(
            make_q_tma(mQ, self.spec.heads), Caches(sources, pages), index, length,
            Results(mSink, mOut, mLse, partials), counters, softmax_scale * softmax.LOG2_E,
            Sizes(num_splits, work_tiles, ctas, causal), trace, divisors,
        ).launch(
            grid=[ctas + (groups * merge_ctas if const_expr(self.spec.split) else 0), 1, 1],
            block=[self.spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    def source(self, mKV: cute.Tensor, data_stride: Int32, scale_offset: Int32, scale_stride: Int32) -> Source:
        """Returns a cache in the form that the load role takes."""
        page_size = cute.fast_divmod_create_divisor_v2(mKV.shape[1])
        return Source(mKV, page_size, data_stride, scale_offset, scale_stride)

    @cute.kernel
    def kernel(
        self,
        q_tma: QTma,
        caches: Caches,
        mIndex: Any,
        mLength: Any,
        results: Results,
        counters: Int64,
        scale_log2: Float32,
        sizes: Sizes,
        trace: Int64,
        divisors: Divisors,
    ):
        """Hands each warpgroup its role."""
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(shared_storage(self.spec))
        self.start(smem, q_tma, caches.pages, trace, warp_idx, tidx)
        zero, mKV = Int32(0), caches.sources[0].mKV
        share = Share(cta, sizes.work_tiles, sizes.decode_ctas, zero, zero, zero, zero)
        table = WorkTable(mKV, mIndex, mLength, sizes.num_splits, sizes.causal, divisors, share)
        if const_expr(self.spec.balanced):
            table = table._replace(share=self.find_share(smem, table, warp_idx, tidx))
        count, merges = self.spec.registers, False
        if const_expr(self.spec.split):
            merges = cta >= sizes.decode_ctas
        # warpgroups have the order of `Roles`; a second QK warpgroup is the last: one comparison a role
        is_softmax, is_qk = False, warp_idx < WARPS * (self.roles.qk[0] + 1)
        if const_expr(self.roles.softmax):
            is_softmax = warp_idx // WARPS == self.roles.softmax[0]
            is_qk = is_qk or warp_idx >= WARPS * self.roles.qk[-1]
        if merges:
            if const_expr(self.spec.split):
                self.merger.run(smem, smem.codes, results, counters, sizes, divisors, cta)
        elif warp_idx < WARPS * (self.roles.load[0] + 1):
            self.claim_registers(count.load)
            if const_expr(self.roles.softmax):
                self.load.run(smem, table, caches, self.kept(tidx))
            else:
                self.softmax.run(smem, table, caches, results.mSink, self.kept(tidx))
        elif is_softmax:
            if const_expr(self.roles.softmax):
                self.claim_registers(count.softmax)
                self.softmax.run(smem, table, caches, results.mSink, self.kept(tidx % 128))
        elif is_qk:
            self.claim_registers(count.qk)
            qk_warp = warp_idx - WARPS * self.roles.qk[0]
            if const_expr(self.spec.qk_warpgroups > 1):
                qk_warp = warp_idx % WARPS + warp_idx // (WARPS * self.roles.qk[-1]) * WARPS
            self.qk.run(smem, q_tma, scale_log2, table, qk_warp, tidx)
        else:
            self.claim_registers(count.pv)
            wg, tid = warp_idx // WARPS - self.roles.pv[0], self.kept(tidx % 128)
            self.pv.run(smem, table, caches.pages, results, counters, wg, tidx, tid)
        if tidx == 128 * self.roles.pv[0]:
            self.tracer.anchor(smem.trace.ptr, 1)

    @cute.jit
    def start(self, smem, q_tma: QTma, pages: tuple, trace: Int64, warp_idx: Int32, tidx: Int32):
        """Initializes barriers, and waits for the kernels before this one."""
        if tidx == 0:
            self.tracer.start(smem.trace.ptr, trace)
            initialize(smem, pipelines(self.spec))
        if warp_idx == 1:
            cpasync.prefetch_descriptor(q_tma.atom)
            for tma in pages:
                cpasync.prefetch_descriptor(tma.atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The next launch may begin once a CTA of this one has ended: all of them have started by then, so merge CTAs
        # find those that they wait for. The next launch uses no memory before all of this one is complete.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # waits for what earlier kernels write: q, keys, lengths, the counters

    @cute.jit
    def find_share(self, smem, table: WorkTable, warp_idx: Int32, tidx: Int32) -> Share:
        """Finds a CTA's share of a balanced schedule. A merge CTA leaves in `smem.cuts` what it merges."""
        # before shares are found, the table is that of a uniform schedule: work tiles cta, cta + decode_ctas, ...
        cta, queries, decode_ctas = table.share.first, table.share.end, table.share.step
        divisors = table.divisors
        shares = decode_ctas // divisors.head_blocks.divisor
        number, head_block = divmod(cta, divisors.head_blocks)
        cuts, lane = smem.cuts.data_ptr(), tidx % 32
        if cta >= decode_ctas:
            if warp_idx == 0:
                head_group, _ = divmod(cta - decode_ctas, divisors.merge_ctas)
                group, _ = divmod(head_group, divisors.head_blocks)
                self.scheduler.find_merge(cuts, group, shares, queries, table, lane)
        elif warp_idx < 2:
            self.scheduler.find_cut(cuts + 2 * warp_idx, number + warp_idx, shares, queries, table, lane)
        cute.arch.sync_threads()
        return self.scheduler.share_between(cuts, number, head_block)

    def claim_registers(self, count: int) -> None:
        """Takes or releases registers of each thread; called by a whole warpgroup."""
        at_launch = self.spec.launch_registers[self.spec.threads]
        if count < at_launch:
            cute.arch.setmaxregister_decrease(count)
        elif count > at_launch:
            cute.arch.setmaxregister_increase(count)

    def kept(self, tid: Int32) -> Int32:
        """Returns the number of a thread, below 128, kept in a register if there are enough of them.

        Addresses follow from it. Computing them again after each wait, from the hardware's register, costs dense
        decoding with 16 heads 4%.
        """
        return registers.opaque(tid) & 127 if self.spec.few_heads else tid
