"""dq of sink attention on SM90, query-stationary: it is deterministic and needs no scratch memory.

A work tile is 64 query rows for each consumer warpgroup. The load warp, the barriers and the order of tiles are those
of the forward (forward.py, query_load.py). A tile has three products (query_grad_mma.py), so warpgroups take no turns.

Beside the products a score takes FFMA, MUFU.EX2, FADD, FMUL and half an F2FP.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cute_kernels.sink.backward_spec import SinkQueryGradSpec
from cute_kernels.sink.kernels import masks, scheduler, views
from cute_kernels.sink.kernels.pipelines import query_pipelines
from cute_kernels.sink.kernels.query_grad_mma import QueryGrad
from cute_kernels.sink.kernels.query_load import QueryLoad, QueryTmas, query_tmas
from cute_kernels.sink.kernels.smem import query_storage, query_views, start


class SinkQueryGradKernel:
    """The kernel of dq. `spec` holds all that is fixed at compile time.

    Roles (512 threads with three consumer warpgroups, 384 with two)
      warpgroup 0     load: 32 or 40 registers. Its first warp takes work tiles and issues TMA; the others idle
      warpgroup 1..   consumers: 160 or 232 registers. S has 32, dP 32, dS 16, dQ 32 (d 64) or 64 (d 128)

    Barriers (arrivals of a phase, bytes, what is true then) of
    SinkQueryGradSpec("bfloat16", 64):
      work_full[2]       32                 the load warp has written the record of a work tile
      work_empty[2]     384                 consumers have read it for the last time
      q_full[3]           1 + 16,384 bytes  64 rows of Q and dO are loaded
      q_empty[3]        128                 their warpgroup has read them for the last time
      k_full[8]           1 + 8,192 bytes   a tile of K is loaded
      k_empty[8]        384                 every warpgroup has read K or skipped it
      v_full[8]           1 + 8,192 bytes   a tile of V is loaded
      v_empty[8]        384                 every warpgroup has read V or skipped it

    Shared memory holds q_stages x 64 rows of Q and dO, warpgroups x 64 rows of dQ, and 4 (d 128) or 8 (d 64) stages of
    64 keys of K and V.
    """

    def __init__(self, spec: SinkQueryGradSpec):
        self.spec = spec
        self.load = QueryLoad(spec)
        self.consumer = QueryGrad(spec)

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        dtype = views.DTYPES[spec.dtype]
        batch, s_q, s_k, h_q, h_kv = (cute.sym_int() for _ in range(5))
        q, d_out, d_q = (views.fake_rows(dtype, spec.packed, (batch, s_q, h_q), spec.d) for _ in range(3))
        k, v = (views.fake_rows(dtype, spec.packed, (batch, s_k, h_kv), spec.d) for _ in range(2))
        packed = views.fake_packed(spec.packed)
        numbers = (Float32(1.0), *[Int32(1)] * 4, Int64(0))
        stats = views.fake_stats(h_q)
        return (q, k, v, d_out, stats, d_q, *packed, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mDOut: cute.Tensor,
        mStats: cute.Tensor,
        mDQ: cute.Tensor,
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
        """Launches `ctas` CTAs, one for each SM, after SinkPrepareKernel.

        Every size of a tensor is above 0; single sequences of a packed call may be empty.
        mQ, mDOut, mDQ  (batch, s_q, h_q, d) or packed (tokens, h_q, d), strides as in the forward
        mK, mV     (batch, s_k, h_kv, d) or packed (tokens, h_kv, d)
        mStats     (2, h_q, positions) float32, contiguous, of SinkPrepareKernel
        mWork      if packed, the list of SinkWorkListKernel(keys=False) for blocks of spec.rows queries
        the rest   as in SinkForwardKernel; counters are two int32, 0 before and after the launch
        """
        spec = self.spec
        schedule, visible = scheduler.query_work(spec, mQ, mK, window, causal, section, counters)
        tmas = query_tmas(spec, mQ, mDOut, mK, mV, mDQ)
        packed = views.Packed(mCuQ, mCuK, mWork)
        self.kernel(tmas, mStats, packed, softmax_scale, visible, schedule).launch(
            grid=[ctas, 1, 1], block=[spec.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        tmas: QueryTmas,
        mStats: cute.Tensor,
        packed: views.Packed,
        softmax_scale: Float32,
        visible: masks.Visibility,
        schedule: scheduler.QuerySchedule,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(query_storage(spec))
        start(smem, query_pipelines(spec), tmas, warp_idx, tidx)

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(spec.load_registers)
            if warp_idx == 0:
                smem.work_full.data_ptr()  # see `start`
                self.load.run(smem, query_views(smem, spec), tmas, packed, visible, schedule, tidx)
        else:
            cute.arch.setmaxregister_increase(spec.consumer_registers)
            wg, tid = warp_idx // 4 - 1, tidx % 128
            self.consumer.run(smem, tmas.out, mStats, softmax_scale, visible, schedule.ratio.divisor, wg, tid)
