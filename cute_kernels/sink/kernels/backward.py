"""Backward of sink attention on SM90, key-stationary: dk and dv in registers, dq (fused) added in global memory.

A work tile is a block of keys of one KV head, 64 or 2 x 64 for each of two consumer warpgroups. Query tiles stream
past, head by head of the group, so registers sum dk and dv over the group. S and dP are computed transposed: rows are
keys, columns are queries, so the accumulators P^T and dS^T are operands as they are. The products of a tile are in
key_grad_mma.py, those of a kernel without dq in key_grad_separate.py; query_sums.py makes dq.

Products of 128 keys and 64 queries take 5 x 256 cycles (d 64) or 5 x 512 (d 128). Shared memory moves K, Q, V and dO
for S and dP, 64 KB (128 KB); dO and Q for dV and dK, 32 KB (64 KB); dS and K for dQ, 32 KB (64 KB); stores of dS,
16 KB; dQ, 32 KB (64 KB); TMA, 16 KB (32 KB). The sum is 192 KB in 1540 cycles (368 KB in 2940). For 256 keys at d 64
it is 336 KB in 2690 cycles, with products of 5 x 512. Beside the products a score takes FFMA, MUFU.EX2, FADD, FMUL and
one F2FP, 5 instructions, and 2 more for masks at edges.

In a pair, two CTAs of a cluster have neighbouring blocks of 128 keys and the same query tiles. Each copies its dS to
the other, 16 KB a tile, and makes half of the columns of dQ over the keys of both: as many products, half of the
additions. It also keeps these columns of the other's K. Each possible work tile has a cluster, so counters are unused.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cute_kernels.sink.backward_spec import SinkBackwardSpec
from cute_kernels.sink.kernels import masks, views
from cute_kernels.sink.kernels.key_grad_mma import FusedKeyGrad
from cute_kernels.sink.kernels.key_grad_separate import SeparateKeyGrad
from cute_kernels.sink.kernels.key_load import KeyLoad, KeyTmas
from cute_kernels.sink.kernels.pipelines import key_pipelines
from cute_kernels.sink.kernels.query_sums import Adder, Sums
from cute_kernels.sink.kernels.scheduler import Divisors, KeySchedule
from cute_kernels.sink.kernels.smem import key_layouts, key_storage, key_views, peer_k_layout, start


class SinkBackwardKernel:
    """The key-stationary kernel of the backward. `spec` holds all that is fixed at compile time.

    Roles (384 threads)
      warpgroup 0     load: 24 or 40 registers. Warp 0 takes work tiles and issues TMA. If fused, warp 1, and warp 2 at
                      d 64, have the copy engine add dQ. The others idle
      warpgroup 1, 2  consumers: 240 or 232 registers. At d 128, or with two key blocks, dK and dV have 64 each, S and
                      dP 32 each, later dQ 32, the operands P and dS 16 each, L or delta 16

    Barriers (arrivals of a phase, bytes, what is true then) of
    SinkBackwardSpec("bfloat16", 64):
      work_full[2]       32                 the load warp has written the record of a work tile
      work_empty[2]     320                 consumers have read it for the last time
      kv_full             1 + 65,536 bytes  K and V are loaded
      kv_empty           32                 the warp that stores dK and dV from their place is done
      ds_full[2]        256                 dS of a query tile is stored, by the pair's other CTA too
      ds_empty[2]       128                 whoever made dQ of it has read dS, in both CTAs of a pair
      added_full[2]     128                 dQ of a query tile is staged
      added_empty[2]      1                 the copy engine has read it
      q_full[4]           1 + 16,896 bytes  Q, dO and the statistics of a query tile are loaded
      q_empty[4]        256                 the last products that read the query tile are complete

    Barriers of SinkBackwardSpec("bfloat16", 128), a pair:
      work_full[2]       32                 the load warp has written the record of a work tile
      work_empty[2]     288                 consumers have read it for the last time
      kv_full             1 + 81,920 bytes  K and V are loaded
      kv_empty           32                 the warp that stores dK and dV from their place is done
      ds_full[2]        256 + 16,384 bytes  dS of a query tile is stored, by the pair's other CTA too
      ds_empty[2]       132                 whoever made dQ of it has read dS, in both CTAs of a pair
      added_full        128                 dQ of a query tile is staged
      added_empty         1                 the copy engine has read it
      q_full[2]           1 + 33,280 bytes  Q, dO and the statistics of a query tile are loaded
      q_empty[2]        256                 the last products that read the query tile are complete

    Shared memory holds K and V of keys x d, and 4 (d 64) or 2 (d 128) stages of Q, dO, L and delta of a query tile. If
    fused, it also holds, at d 64, 2 x dS of keys x 64 and 2 x dQ of 64 x d float32, and in a pair (d 128) 4 x dS, 16 KB
    of the other CTA's K and 16 KB of dQ. That is 226 KB (d 64) and 225 KB (d 128) of 227 KB, so dK and dV are staged in
    the memory of K and V. If not fused, they have their own, and the next K and V arrive while they are stored.
    """

    def __init__(self, spec: SinkBackwardSpec):
        self.spec = spec
        self.load = KeyLoad(spec)
        self.consumer = FusedKeyGrad(spec) if spec.fused else SeparateKeyGrad(spec)
        self.adder = Adder(spec)

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        dtype = views.DTYPES[spec.dtype]
        batch, s_q, s_k, h_q, h_kv = (cute.sym_int() for _ in range(5))
        q, d_out = (views.fake_rows(dtype, spec.packed, (batch, s_q, h_q), spec.d) for _ in range(2))
        k, v, d_k, d_v = (views.fake_rows(dtype, spec.packed, (batch, s_k, h_kv), spec.d) for _ in range(4))
        packed = views.fake_packed(spec.packed)
        numbers = (Int64(0), Float32(1.0), *[Int32(1)] * 4, Int64(0))
        stats = views.fake_stats(h_q)
        return (q, k, v, d_out, stats, d_k, d_v, *packed, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mDOut: cute.Tensor,
        mStats: cute.Tensor,
        mDK: cute.Tensor,
        mDV: cute.Tensor,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
        mWork: cute.Tensor | None,
        sums: Int64,
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
        mQ, mDOut  (batch, s_q, h_q, d) or packed (tokens, h_q, d), strides as in the forward
        mK, mV, mDK, mDV  (batch, s_k, h_kv, d) or packed (tokens, h_kv, d); every row of dk and dv is written
        mStats     (2, h_q, positions) float32, contiguous, of SinkPrepareKernel
        mCuQ, mCuK, mWork   packed: (batch + 1,) int32 each, and the list of SinkWorkListKernel(keys=True) for blocks
                   of 128 keys; otherwise None
        sums       fused: address of h_q x positions x d float32, set to 0 by SinkPrepareKernel, which receive dq /
                   softmax_scale for SinkFinishKernel; otherwise not read
        softmax_scale, window, causal, ctas, counters   as in SinkForwardKernel
        section    not packed: pairs of a sequence and a KV head that CTAs work on together; a divisor of batch x h_kv
        """
        spec = self.spec
        heads = mK.shape[1 if const_expr(spec.packed) else 2]
        ratio = mQ.shape[1 if const_expr(spec.packed) else 2] // heads
        blocks, work_tiles, pairs = Int32(1), Int32(0), Int32(1)
        max_q, max_k = (Int32(t.shape[0 if const_expr(spec.packed) else 1]) for t in (mQ, mK))
        if const_expr(not spec.packed):
            blocks = cute.ceil_div(max_k, spec.keys)
            pairs = section
            work_tiles = blocks * heads * mK.shape[0]
        if const_expr(spec.pair):  # two CTAs for each possible work tile
            ctas = 2 * work_tiles
            if const_expr(spec.packed):
                assert mWork is not None
                ctas = 2 * (mWork.shape[0] - 1) * heads
        visible = masks.visibility(window, causal)
        divisors = Divisors(*(cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (pairs * blocks, pairs, heads)))
        schedule = KeySchedule(max_q, max_k, ratio, work_tiles, counters, divisors)

        layouts = key_layouts(spec)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        box_q, box_kv = (spec.queries, spec.d), (spec.keys_of_cta, spec.d)
        q, d_out = (views.tma(load, t, spec.packed, layouts.q, box_q) for t in (mQ, mDOut))
        k, v = (views.tma(load, t, spec.packed, layouts.kv, box_kv) for t in (mK, mV))
        d_k, d_v = (views.tma(store, t, spec.packed, layouts.kv, box_kv) for t in (mDK, mDV))
        peer_k = None
        if const_expr(spec.pair):
            peer_k = views.tma(load, mK, spec.packed, peer_k_layout(spec), (spec.keys_of_cta, spec.columns))
        by_position = cute.make_tensor(mStats.iterator, cute.select(mStats.layout, mode=[2, 1, 0]))
        box_stats = (spec.queries, 1, 2)
        stats = views.Tma(
            *cpasync.make_tiled_tma_atom(load, by_position, cute.select(layouts.stats, mode=[0, 1, 2]), box_stats)
        )
        tmas = KeyTmas(q, d_out, k, v, stats, d_k, d_v)
        packed = views.Packed(mCuQ, mCuK, mWork)
        self.kernel(tmas, packed, Sums(sums, mStats.shape[2]), softmax_scale, visible, schedule, peer_k).launch(
            grid=[ctas, 1, 1],
            block=[spec.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[2, 1, 1] if const_expr(spec.pair) else None,
        )

    @cute.kernel
    def kernel(
        self,
        tmas: KeyTmas,
        packed: views.Packed,
        sums: Sums,
        softmax_scale: Float32,
        visible: masks.Visibility,
        schedule: KeySchedule,
        peer_k: views.Tma | None,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(key_storage(spec))
        start(smem, key_pipelines(spec), tmas, warp_idx, tidx)
        rank = Int32(0)
        if const_expr(spec.pair):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(spec.load_registers)
            if warp_idx == 0:
                smem.work_full.data_ptr()  # see `start`
                self.load.run(smem, key_views(smem, spec), tmas, peer_k, packed, visible, schedule, rank, tidx)
            if const_expr(spec.fused):
                if warp_idx > 0 and warp_idx <= spec.adders:
                    self.adder.run(smem, sums, visible, schedule.ratio, rank, warp_idx - 1, tidx % 32)
        else:
            wg, tid = warp_idx // 4 - 1, tidx % 128
            cute.arch.setmaxregister_increase(spec.consumer_registers)
            self.consumer.run(smem, tmas.d_k, tmas.d_v, softmax_scale, visible, schedule.ratio, rank, wg, tid)
        if const_expr(spec.pair):  # no CTA ends while the other one reads or writes its shared memory
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
