"""MLA decoding on SM90 over any latent cache format, of one cache or of two in one softmax.

Roles, schedule, splits and merge are those of mla/kernels/decode.py. What differs:

Keys. A ue8m0 scale is a power of two and an fp4 code has few bits, so code x scale is exact in float16, relative to the
largest scale of a row for QK and to a unit of 64 values for PV (codes.py, value_units.py): keys are scaled as operands,
and one accumulator takes all products.
    S_k = 2^n_k sum_i q_i (2^-n_k scale code)_ki        O = unit sum_k P_k (scale code / unit)_k
A tile that these do not fit takes slow paths: S product by product in float32, O with P and V in bfloat16.
A rope part of V4 is a value too: it stays in its stage until PV has read it, and QK leaves it there as float16. Float32
scales have the roles of mla/kernels (float_scales.py).

Rows. A key has a data row and a scale row, which come by cp.async from wherever its page has them (`Source`).

Codes. A stage has e4m3 codes. Rows of other codes are expanded in place, before others see them: by the load
warpgroup with 8 and 16 heads, where it does nothing else; else by PV, two tiles ahead of its products.

Two caches. A query has key tiles of the first cache, then those of the second; no tile has keys of both.

Roles, 64 heads (512 threads, 128 registers each at launch)
  warpgroup 0                 load and softmax, 40 registers: copies rows two tiles ahead, makes P of S
  warpgroup 1                 QK, 120: 32 of S, 32 of K, 8 of codes; Q by TMA
  warpgroups 2, 3             PV, 176: 128 of O, 8 of V, 16 of codes
32 heads: the same roles with 56, 120 and 168 registers, and loads three tiles ahead.
8 and 16 heads (768 threads, 80 registers each at launch)
  warpgroup 0                 load, 32
  warpgroups 1, 5             QK, 112: every second tile each
  warpgroups 2, 3             PV, 96
  warpgroup 4                 softmax, 32

Mbarriers of a call with 64 heads: arrivals and bytes that complete a phase
  q_full              1 + 65,536 bytes  Q is loaded
  keys_full[3]      256                 a key tile is loaded, its mask set
  keys_empty[3]     256                 PV has its codes in registers
  s_full            128                 S is stored
  s_empty           128                 the softmax has read S
  p_full[2]         128                 P, weights, flags and factors are stored
  p_empty[2]        256                 the last wgmma of PV has read P

of V4.1's fp4, which PV expands
  q_full              1 + 65,536 bytes  Q is loaded
  keys_full[3]      256                 a key tile is loaded, its mask set
  keys_empty[3]     256                 PV has its codes in registers
  s_full            128                 S is stored
  s_empty           128                 the softmax has read S
  p_full[2]         128                 P, weights, flags and factors are stored
  p_empty[2]        256                 the last wgmma of PV has read P
  raw_full[3]       256                 rows to expand are copied; or others come, or none do

Shared memory of V4, of 232,448 bytes, with 64 heads
  codes                       3 x 64 x 512 = 98,304: 448 of a key, in three lines and a half of 128
  rope                        3 x 64 x 128 = 24,576
  q                           65,536
  s                           64 x 64 x 4 = 16,384
  p                           2 x 64 x 64 x 2 = 16,384
  scale                       3 x 64 x 8 = 1,536
  rest                        some 4,000: multipliers 2,048, factors, barriers
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.kernels.arguments import (
    Partials,
    Results,
    Sizes,
    balanced_partials,
    fake_keys,
    fake_results,
    fake_strided,
    uniform_partials,
)
from cute_kernels.mla.kernels.decode import MlaDecodeKernel
from cute_kernels.mla.kernels.load_q import QTma, make_q_tma
from cute_kernels.mla.kernels.merge import PartialMerger
from cute_kernels.mla.kernels.pv import PvWarpgroups
from cute_kernels.mla.kernels.qk import QkWarpgroups
from cute_kernels.mla.kernels.scheduler import Divisors, Share, WorkTable
from cute_kernels.mla.kernels.softmax import SoftmaxWarpgroup
from cute_kernels.mla.latent.kernels.float_scales import (
    FloatScalePvWarpgroups,
    FloatScaleQkWarpgroups,
    FloatScaleSoftmaxWarpgroup,
)
from cute_kernels.mla.latent.kernels.load import LatentLoader
from cute_kernels.mla.latent.kernels.pv import ScaledKeyPvWarpgroups
from cute_kernels.mla.latent.kernels.qk import ScaledKeyQkWarpgroups
from cute_kernels.mla.latent.kernels.scheduler import LatentScheduler, Source
from cute_kernels.mla.latent.kernels.smem import shared_storage
from cute_kernels.mla.latent.kernels.softmax import LatentSoftmaxWarpgroup
from cute_kernels.mla.latent.spec import LatentDecodeSpec
from cute_kernels.mla.spec import ROLES


class LatentDecodeKernel(MlaDecodeKernel):
    """See the module's docstring. `spec` holds all that is fixed at compile time."""

    spec: LatentDecodeSpec

    def __init__(self, spec: LatentDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.scheduler = LatentScheduler(spec)
        self.load = LatentLoader(spec)
        self.softmax: SoftmaxWarpgroup
        self.qk: QkWarpgroups
        self.pv: PvWarpgroups
        if spec.float_scales:
            self.softmax = FloatScaleSoftmaxWarpgroup(spec)
            self.qk, self.pv = FloatScaleQkWarpgroups(spec), FloatScalePvWarpgroups(spec)
        else:
            self.softmax = LatentSoftmaxWarpgroup(spec)
            self.qk, self.pv = ScaledKeyQkWarpgroups(spec), ScaledKeyPvWarpgroups(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        if spec.split:
            self.merger = PartialMerger(spec)

    def fake_arguments(self) -> tuple:
        """Shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        sizes = tuple(cute.sym_int() for _ in range(3))
        numbers = (Int32(1), Int32(1), Int32(1))
        caches = []
        for _ in range(2 if self.spec.has_extra else 1):
            # pages are read by address and first stride: a view of a planar page does not say where rows are
            strides = (cute.sym_int64(divisibility=16), cute.sym_int64(), 1)
            kv = make_fake_tensor(Uint8, tuple(cute.sym_int() for _ in range(3)), strides, assumed_align=16)
            caches += [kv, *fake_keys(self.spec.sparse, sizes), *numbers]
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
        """One launch; see `MlaDecodeKernel.__call__` for what is not here.

        mKV           pages: the address, the first stride and the first two sizes count
        data_stride   this and the next two are numbers of a `PageLayout`, in bytes
        mExtraKV      this and the next five are those of a second cache, or None
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
        index, length = mIndex, mLength
        if const_expr(self.spec.has_extra):
            extra = self.source(mExtraKV, extra_data_stride, extra_scale_offset, extra_scale_stride)
            sources, index, length = (*sources, extra), (mIndex, mExtraIndex), (mLength, mExtraLength)
        sizes = (mKV.shape[1], head_blocks, num_splits, s_q, merge_ctas)
        divisors = Divisors(*(cute.fast_divmod_create_divisor_v2(size) for size in sizes))
        groups = batch * s_q * head_blocks
        work_tiles, ctas = groups * num_splits, cutlass.min(groups * num_splits, max_ctas)
        if const_expr(self.spec.balanced):
            work_tiles, ctas = batch * s_q, shares * head_blocks
            groups = cutlass.min(work_tiles, shares - 1) * head_blocks
        self.kernel(
            make_q_tma(mQ, self.spec.heads), sources, index, length, Results(mSink, mOut, mLse, partials), counters,
            softmax_scale * softmax.LOG2_E, Sizes(num_splits, work_tiles, ctas, causal), trace, divisors,
        ).launch(
            grid=[ctas + (groups * merge_ctas if const_expr(self.spec.split) else 0), 1, 1],
            block=[self.spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    def source(self, mKV, data_stride, scale_offset, scale_stride) -> Source:
        """A cache as the load warpgroup takes it."""
        page_size = cute.fast_divmod_create_divisor_v2(mKV.shape[1])
        return Source(mKV, page_size, data_stride, scale_offset, scale_stride)

    @cute.kernel
    def kernel(
        self,
        q_tma: QTma,
        sources: tuple,
        mIndex,
        mLength,
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
        self.start(smem, q_tma, (), trace, warp_idx, tidx)
        zero = Int32(0)
        share = Share(cta, sizes.work_tiles, sizes.decode_ctas, zero, zero, zero, zero)
        table = WorkTable(sources[0].mKV, mIndex, mLength, Int64(0), sizes.num_splits, sizes.causal, divisors, share)
        if const_expr(self.spec.balanced):
            table = table._replace(share=self.find_share(smem, table, warp_idx, tidx))
        count, merges = self.spec.registers, False
        if const_expr(self.spec.split):
            merges = cta >= sizes.decode_ctas
        is_softmax, is_qk = False, warp_idx < 8
        if const_expr(self.spec.few_heads):
            is_softmax, is_qk = warp_idx // 4 == 4, is_qk or warp_idx >= 20
        if merges:
            if const_expr(self.spec.split):
                self.merge(smem, results, counters, sizes, cta, divisors)
        elif warp_idx < 4:
            self.claim_registers(count.load)
            if const_expr(self.spec.few_heads):
                self.load.run(smem, table, sources, self.kept(tidx))
            else:
                self.softmax.run(smem, table, sources, results.mSink, self.kept(tidx))
        elif is_softmax:
            if const_expr(self.spec.few_heads):
                self.claim_registers(count.softmax)
                self.softmax.run(smem, table, sources, results.mSink, self.kept(tidx % 128))
        elif is_qk:
            self.claim_registers(count.qk)
            qk_warp = warp_idx - 4
            if const_expr(self.spec.qk_warpgroups > 1):
                qk_warp = warp_idx % 4 + warp_idx // 20 * 4
            self.qk.run(smem, q_tma, scale_log2, table, qk_warp, tidx)
        else:
            self.claim_registers(count.pv)
            wg, tid = warp_idx // 4 - 2, self.kept(tidx % 128)
            self.pv.run(smem, table, (), results, counters, wg, tidx, tid)
        if tidx == 256:
            self.tracer.anchor(smem.trace.ptr, 1)
