"""Forward of sink attention on SM90, query-stationary: persistent CTAs, TMA, wgmma, softmax overlapped with products.

A work tile is 64 query rows of one head for each consumer warpgroup. Key tiles stream past, the last one first. A
warpgroup skips tiles that none of its own rows sees. It masks only tiles with a key that one of its rows does not see.

Beside the products a score takes 4.5 instructions: FMNMX, FFMA, MUFU.EX2, FADD and half an F2FP. At d 64 a 64 x 128
tile takes 512 cycles of the tensor core, 512 of the MUFU (16 a cycle) and 288 issue slots of each scheduler.

With spec.grouped a work tile is 64 rows of all query heads of a KV head, and a warpgroup takes every `warpgroups`-th
head. If the key tiles of a work tile fit into the stages, as with small windows, they are loaded once for all heads,
otherwise once for every `warpgroups` heads. The 64 rows see at most 191 keys with a window of 128: 48 KB of K and V
serve 64 x ratio rows, while three warpgroups of one head read 80 KB for 192 rows. Warpgroups need not keep step: a
block of 64 rows at d 64 is a chain of some 3000 cycles, and other warpgroups fill its gaps.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.device import softmax
from cute_kernels.sink.kernels import masks, scheduler, views
from cute_kernels.sink.kernels.attend import Attend, Results
from cute_kernels.sink.kernels.pipelines import query_pipelines
from cute_kernels.sink.kernels.query_load import QueryLoad, QueryTmas, query_tmas
from cute_kernels.sink.kernels.smem import query_storage, query_views, start
from cute_kernels.sink.spec import SinkForwardSpec


class SinkForwardKernel:
    """The kernel of the forward. `spec` holds all that is fixed at compile time.

    Roles (384 threads with two consumer warpgroups, 512 with three, 640 with four)
      warpgroup 0     load: 40, 32 or 24 registers. Its first warp takes work tiles and issues TMA; the others idle
      warpgroup 1..   consumers: 232, 160 or 112 registers. Each computes QK, softmax, PV and the epilogue of 64 rows. O
                      has 64 registers at d 128 and 32 at d 64, S of 128 keys 64, P 32

    Barriers (arrivals of a phase, bytes, what is true then) of
    SinkForwardSpec("bfloat16", 64, warpgroups=3):
      work_full[2]       32                 the load warp has written the record of a work tile
      work_empty[2]     384                 consumers have read it for the last time
      q_full[3]           1 + 8,192 bytes   64 rows of Q are loaded
      q_empty[3]        128                 their warpgroup has read them for the last time
      k_full[4]           1 + 16,384 bytes  a tile of K is loaded
      k_empty[4]        384                 every warpgroup has read K or skipped it
      v_full[4]           1 + 16,384 bytes  a tile of V is loaded
      v_empty[4]        384                 every warpgroup has read V or skipped it

    Barriers of SinkForwardSpec("bfloat16", 64, window=True, warpgroups=4, tile=64, turns=False,
    grouped=True):
      work_full[2]       32                 the load warp has written the record of a work tile
      work_empty[2]     512                 consumers have read it for the last time
      q_full[8]           1 + 8,192 bytes   64 rows of Q are loaded
      q_empty[8]        128                 their warpgroup has read them for the last time
      k_full[8]           1 + 8,192 bytes   a tile of K is loaded
      k_empty[8]        512                 every warpgroup has read K or skipped it
      v_full[8]           1 + 8,192 bytes   a tile of V is loaded
      v_empty[8]        512                 every warpgroup has read V or skipped it
      kept_empty        512                 nothing: takes the arrivals for tiles kept for more heads

    Shared memory
      q     q_stages x 64 x d x 2          24 KB (d 64, three), 32 KB (d 128, two)
      out   warpgroups x 64 x d x 2        as much as q; if grouped at d 64, half of q
      k, v  stages x tile x d x 2 each     4 stages of 2 x 16 KB (d 64), 2 of 2 x 32 KB (d 128)
    """

    def __init__(self, spec: SinkForwardSpec):
        self.spec = spec
        self.load = QueryLoad(spec)
        self.consumer = Attend(spec)

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        dtype = views.DTYPES[spec.dtype]
        batch, s_q, s_k, h_q, h_kv = (cute.sym_int() for _ in range(5))
        q, out = (views.fake_rows(dtype, spec.packed, (batch, s_q, h_q), spec.d) for _ in range(2))
        k, v = (views.fake_rows(dtype, spec.packed, (batch, s_k, h_kv), spec.d) for _ in range(2))
        sink = make_fake_tensor(Float32, (h_q,), (1,), assumed_align=4)
        lse = views.fake_rows(Float32, spec.packed, (batch, s_q, h_q), None)
        packed = views.fake_packed(spec.packed)
        numbers = (Float32(1.0), *[Int32(1)] * 4, Int64(0))
        return (q, k, v, sink, out, lse, *packed, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mWork: cute.Tensor | None,
        softmax_scale: Float32,
        window: Int32,
        causal: Int32,
        section: Int32,
        ctas: Int32,
        counters: Int64,
        stream: cuda.CUstream,
    ):
        """Launches `ctas` CTAs, one for each SM.

        Every size of a tensor is above 0; single sequences of a packed call may be empty.
        mQ, mOut   (batch, s_q, h_q, d) or packed (tokens, h_q, d); any strides that are multiples of 8, that of d is 1
        mK, mV     (batch, s_k, h_kv, d) or packed (tokens, h_kv, d); h_q is a multiple of h_kv
        mSink      (h_q,) float32, -inf where there is no sink
        mLse       (batch, s_q, h_q) or (tokens, h_q) float32, any strides
        mCuQ, mCuK, mWork   packed: (batch + 1,) int32 each, and the list of SinkWorkListKernel(keys=False) for
                   blocks of spec.rows queries; otherwise None
        softmax_scale  above 0
        window     keys that a query sees at most, below 2^30; not read unless spec.window
        causal     1 or 0
        section    not packed: pairs of a sequence and a head that CTAs work on together, so that their keys stay
                   in L2; a divisor of batch x h_q, with spec.grouped also a multiple of h_q / h_kv. Packed: not read
        counters   address of two int32, 0 before and after the launch; there is no other scratch memory
        """
        spec = self.spec
        schedule, visible = scheduler.query_work(spec, mQ, mK, window, causal, section, counters)
        tmas = query_tmas(spec, mQ, None, mK, mV, mOut)
        packed = views.Packed(mCuQ, mCuK, mWork)
        self.kernel(tmas, mSink, mLse, packed, softmax_scale * softmax.LOG2_E, visible, schedule).launch(
            grid=[ctas, 1, 1], block=[spec.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        tmas: QueryTmas,
        mSink: cute.Tensor,
        mLse: cute.Tensor,
        packed: views.Packed,
        scale_log2: Float32,
        visible: masks.Visibility,
        schedule: scheduler.QuerySchedule,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(query_storage(spec))
        start(smem, query_pipelines(spec), (tmas.q, tmas.k, tmas.v, tmas.out), warp_idx, tidx)

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(spec.load_registers)
            if warp_idx == 0:
                smem.work_full.data_ptr()  # see `start`
                self.load.run(smem, query_views(smem, spec), tmas, packed, visible, schedule, tidx)
        else:
            cute.arch.setmaxregister_increase(spec.consumer_registers)
            results = Results(tmas.out, mLse, mSink)
            ratio = schedule.ratio.divisor
            self.consumer.run(smem, results, scale_log2, visible, ratio, warp_idx // 4 - 1, tidx % 128)
