"""FP8 MLA decoding on SM90 with an exchange: two CTAs of a cluster gather half of each key tile and hand it over.

A CTA has work tiles: 64 heads of a query token times a range of its keys, in key tiles of 64. Heads are the M side of
both products, S = Q K^T and O += P V, and keys and values lie in shared memory as float16. The QK warpgroup makes P.

Scales. Codes go to the tensor core unscaled: e4m3 is exact in float16. Scales are float32, applied as follows:
    S = q_rope k_rope + sum_j scale_j (q_j code_j)     in float32, between the products of quant tiles j
    O_j += (P scale_j) code_j                          P scale_j rounded to float16
Values out of float16's range are found and handled: Q (`QConverter.prepare`), P scale_j (`PvWarpgroups.add_by_powers`).

Splits and their merge are as in mla/kernels/decode.py.

Roles (512 threads, 128 registers each at launch)
  warpgroup 0                 load, 72 registers: gathers codes of the next key tile in two passes of 16 rows, stores
                              them as float16, exchanges them (load.py, rows.py, exchange.py)
  warpgroup 1                 QK and softmax, 104: 32 of S, 32 of a quant tile's products, 16 scales; Q by TMA, scales a
                              key tile ahead (qk.py, convert_q.py, softmax.py)
  warpgroups 2, 3             PV, 168: 128 of O (pv.py, epilogue.py)

Mbarriers of a call with exchange="values": arrivals and bytes that complete a phase
  q_full              1 + 73,728 bytes  Q is loaded
  keys_full[2]      128 + 36,864 bytes  all 64 rows of a key tile are stored
  keys_empty[2]     256                 the last wgmma of PV has read the stage
  p_full[2]         128                 P, rescaling factors and weights are stored
  peer_full[2]        1                 the other CTA's stage is empty
  codes_full[2]       1                 the other CTA's codes have come
With exchange="codes" keys_full has no bytes and codes_full has 20,480. These bytes come from the other CTA.
Named barriers are in pipelines.py.

Shared memory, of 232,448 bytes
  nope, rope                  2 x 64 x 1152 = 147,456, in rows of 128 bytes; P overwrites the rope part of its key tile
  q                           73,728: bf16 as it comes, then float16 but for the rope part
  scale                       2 x 64 x 16 = 2,048
  rest                        6,144: weights, powers of Q and O, masks, row_max, row_sum, rescaling factors, barriers
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax, token_cache
from cute_kernels.device.pipeline import initialize
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.arguments import KeyTensors
from cute_kernels.mla.crossover.kernels.load import LoadWarpgroup
from cute_kernels.mla.crossover.kernels.pipelines import pipelines
from cute_kernels.mla.crossover.kernels.pv import PvWarpgroups
from cute_kernels.mla.crossover.kernels.qk import QkWarpgroup
from cute_kernels.mla.crossover.kernels.smem import shared_storage
from cute_kernels.mla.crossover.spec import ROLES, MlaCrossoverSpec
from cute_kernels.mla.kernels.arguments import (
    Partials,
    Results,
    Sizes,
    fake_keys,
    fake_results,
    fake_strided,
    uniform_partials,
)
from cute_kernels.mla.kernels.load_q import QTma, make_q_tma
from cute_kernels.mla.kernels.merge import PartialMerger
from cute_kernels.mla.kernels.scheduler import Divisors, Share, WorkTable
from cute_kernels.mla.kernels.smem import WARPS
from cute_kernels.mla.kernels.tile import QK


class MlaCrossoverKernel:
    """The kernel that the module's docstring describes. `spec` holds everything that is fixed at compile time."""

    def __init__(self, spec: MlaCrossoverSpec):
        self.spec = spec
        self.roles = spec.roles
        self.load = LoadWarpgroup(spec)
        self.qk = QkWarpgroup(spec)
        self.pv = PvWarpgroups(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))
        if spec.split:
            self.merger = PartialMerger(spec)

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        sizes = tuple(cute.sym_int() for _ in range(3))
        q = fake_strided(BFloat16, (*sizes, QK), 16)
        kv = fake_strided(Uint8, (cute.sym_int(), cute.sym_int(), token_cache.ROW_BYTES), 16)
        tensors = (q, kv, *fake_keys(self.spec.sparse, sizes), *fake_results(sizes))
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
        """Launches decode CTAs; if the spec is split, also merge CTAs with higher numbers, which merge the partials.

        Memory that no caller sees comes as addresses, which cost the host less than tensors. `scratch` has room for
        num_splits * batch * s_q * h_q partials: 512 float16, 8 block scales and an LSE each. `counters` has a word for
        each block of heads of each query, 0 before and after the launch; `zero_row` is a row of zeros whose scales are
        `MASKED_SCALE`. merge_ctas CTAs merge a block of heads. At most max_ctas CTAs decode, each every max_ctas-th
        work tile. Timestamps go to `trace`.
        """
        batch, s_q, h_q, _ = mQ.shape
        cluster = const_expr(self.spec.cluster)
        head_blocks = cute.ceil_div(h_q, self.spec.heads * cluster) * cluster
        partials = Partials()
        if const_expr(self.spec.split):
            partials = uniform_partials(scratch, num_splits, batch, s_q, h_q)
        q = make_q_tma(mQ, self.spec.heads)
        sizes = (mKV.shape[1], head_blocks, num_splits, s_q, merge_ctas)
        divisors = Divisors(*(cute.fast_divmod_create_divisor_v2(size) for size in sizes))
        head_groups = batch * s_q * head_blocks
        work_tiles, ctas = head_groups * num_splits, cutlass.min(head_groups * num_splits, max_ctas)
        self.kernel(
            q,
            KeyTensors(mKV, mIndex, mLength),
            Results(mSink, mOut, mLse, partials),
            counters,
            zero_row,
            softmax_scale * softmax.LOG2_E,
            Sizes(num_splits, work_tiles, ctas, causal),
            trace,
            divisors,
        ).launch(
            grid=[ctas + (head_groups * merge_ctas if const_expr(self.spec.split) else 0), 1, 1],
            block=[self.spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[cluster, 1, 1],
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: QTma,
        keys: KeyTensors,
        results: Results,
        counters: Int64,
        zero_row: Int64,
        scale_log2: Float32,
        sizes: Sizes,
        trace: Int64,
        divisors: Divisors,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = SmemAllocator().allocate(shared_storage())
        if tidx == 0:
            self.tracer.start(smem.trace.ptr, trace)
            initialize(smem, pipelines(self.spec))
        if warp_idx == 1:
            cpasync.prefetch_descriptor(q.atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The next launch may begin once a CTA of this one has ended: by then all CTAs of this one have started, so
        # merge CTAs find those they wait for. The next launch uses no memory before all of this one is complete.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # waits for what earlier kernels write: q, keys, lengths, the counters
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

        zero = Int32(0)
        share = Share(block, sizes.work_tiles, sizes.decode_ctas, zero, zero, zero, zero)
        table = WorkTable(*keys, sizes.num_splits, sizes.causal, divisors, share, zero_row)

        registers = self.spec.registers
        is_merge = False
        if const_expr(self.spec.split):
            is_merge = block >= sizes.decode_ctas
        # compared before the branch: inside of it ptxas lays out the code differently
        is_qk = warp_idx < WARPS * (self.roles.qk[0] + 1)
        if is_merge:
            if const_expr(self.spec.split):
                self.merger.run(smem, smem.nope, results, counters, sizes, divisors, block)
        elif warp_idx < WARPS * (self.roles.load[0] + 1):
            cute.arch.setmaxregister_decrease(registers.load)
            self.load.run(smem, table, rank, tidx)
        elif is_qk:
            cute.arch.setmaxregister_decrease(registers.qk)
            self.qk.run(smem, q, table, scale_log2, warp_idx - WARPS * self.roles.qk[0], tidx)
        else:
            cute.arch.setmaxregister_increase(registers.pv)
            self.pv.run(smem, results, counters, table, warp_idx // WARPS - self.roles.pv[0], tidx)
        if tidx == 128 * self.roles.pv[0]:
            self.tracer.anchor(smem.trace.ptr, 1)
        cute.arch.cluster_arrive_relaxed()  # neither CTA leaves while the other one may read or write its shared memory
        cute.arch.cluster_wait()
