"""Epilogues: they round results, stage them in shared memory, and store them by TMA."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from cute_kernels.sink.kernels import views
from cute_kernels.sink.kernels.pipelines import KeyGradNamedBarrier, key_pipelines
from cute_kernels.sink.kernels.smem import key_layouts, key_mmas, query_layouts, query_mmas, view
from cute_kernels.sink.kernels.views import DTYPES, Tma
from cute_kernels.sink.spec import ROWS


class RowStore:
    """Stores O or dQ of a query-stationary kernel; consumer warpgroup w has named barrier `store_barrier` + w."""

    def __init__(self, spec, store_barrier: int):
        self.spec, self.store_barrier = spec, store_barrier

    @cute.jit
    def target(self, out: Tma, first: Int32, head: Int32, work):
        """Returns where 64 rows of a head, from `first` on, go; `work` has s_q, start_q and batch."""
        spec = self.spec
        row, outer = views.origin(spec.packed, work.s_q, work.start_q, work.batch)
        return cute.local_tile(
            cute.domain_offset((row + first, 0, 0, 0), out.tensor), (ROWS, spec.d), (0, 0, head, outer)
        )

    @cute.jit
    def store(self, smem, acc: cute.Tensor, factor, out: Tma, target: cute.Tensor, wg: Int32, tid: Int32):
        """Rounds 64 rows, multiplied by `factor` unless that is None, and stores them."""
        dtype = DTYPES[self.spec.dtype]
        staged = view(smem.out, query_layouts(self.spec).out)
        store_matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        to_smem = cute.make_tiled_copy_C(store_matrix, query_mmas(self.spec).pv)
        thr_copy = to_smem.get_slice(tid)
        rounded = cute.make_rmem_tensor(acc.shape, dtype)
        values = acc.load() if const_expr(factor is None) else acc.load() * factor
        rounded.store(values.to(dtype))
        if tid // 32 == 0:  # the warp that issues the stores waits until the last store has read shared memory
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=self.store_barrier + wg, number_of_threads=128)
        cute.copy(to_smem, thr_copy.retile(rounded), thr_copy.partition_D(staged[None, None, wg]))
        cute.arch.fence_proxy("async.shared", space="cta")  # makes ordinary stores visible to the copy engine
        cute.arch.barrier(barrier_id=self.store_barrier + wg, number_of_threads=128)
        source, to_gmem = views.partition(out, staged, target)
        if tid // 32 == 0:
            cute.copy(out.atom, source[None, wg], to_gmem)
            cute.arch.cp_async_bulk_commit_group()


class KeyStore:
    """Stores dK and dV of the key-stationary kernel."""

    def __init__(self, spec):
        self.spec, self.kv = spec, key_pipelines(spec).kv

    @cute.jit
    def targets(self, d_k: Tma, d_v: Tma, work, rank: Int32) -> Any:
        """Returns where dK and dV of the CTA's keys go; `work` is the record of the work tile."""
        spec = self.spec
        first, head, batch, s_k, start_k = work.first, work.head, work.batch, work.s_k, work.start_k
        row, outer = views.origin(spec.packed, s_k, start_k, batch)
        return tuple(
            cute.local_tile(
                cute.domain_offset((row + first + rank * spec.keys_of_cta, 0, 0, 0), t),
                (spec.keys_of_cta, spec.d),
                (0, 0, head, outer),
            )
            for t in (d_k.tensor, d_v.tensor)
        )

    @cute.jit
    def store(
        self,
        smem,
        acc_dk: tuple,
        acc_dv: tuple,
        softmax_scale: Float32,
        d_k: Tma,
        d_v: Tma,
        targets,
        wg: Int32,
        tid: Int32,
    ):
        """Scales dK, rounds dK and dV of each block of 64 keys, and stores them; called by all consumer warpgroups."""
        spec = self.spec
        dtype, layout = DTYPES[spec.dtype], key_layouts(spec).kv
        store_matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        to_smem = cute.make_tiled_copy_C(store_matrix, key_mmas(spec).kv)
        thr_copy = to_smem.get_slice(tid)
        issues = wg == 0 and tid // 32 == 0  # the warp that issues the stores
        if issues:  # waits until the last stores have read shared memory
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=KeyGradNamedBarrier.STORE, number_of_threads=spec.consumers)
        fields = (smem.k, smem.v) if const_expr(spec.reuses) else (smem.d_k, smem.d_v)
        staged = tuple(view(field, layout) for field in fields)
        results = ((acc_dk, softmax_scale), (acc_dv, Float32(1.0)))
        for i in cutlass.range_constexpr(2):
            acc, factor = results[i]
            for b in cutlass.range_constexpr(spec.key_blocks):
                rounded = cute.make_rmem_tensor(acc[b].shape, dtype)
                rounded.store((acc[b].load() * factor).to(dtype))
                mine = cute.local_tile(staged[i][None, None, 0], (ROWS, spec.d), (wg * spec.key_blocks + b, 0))
                cute.copy(to_smem, thr_copy.retile(rounded), thr_copy.partition_D(mine))
        cute.arch.fence_proxy("async.shared", space="cta")  # makes ordinary stores visible to the copy engine
        cute.arch.barrier(barrier_id=KeyGradNamedBarrier.STORE, number_of_threads=spec.consumers)
        (k_source, k_target), (v_source, v_target) = (
            views.partition(tma, source, target)
            for tma, source, target in zip((d_k, d_v), staged, targets, strict=True)
        )
        if issues:
            cute.copy(d_k.atom, k_source[None, 0], k_target)
            cute.copy(d_v.atom, v_source[None, 0], v_target)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(spec.reuses):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.kv.release(smem, 0)
