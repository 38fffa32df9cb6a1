"""dq where keys stay: dQ = dS K of a tile of queries, added up in global memory.

See backward.py for the barriers and for what a helper and a pair are.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import cluster, wgmma
from cute_kernels.sink.backward_spec import QUERIES
from cute_kernels.sink.kernels import schedule as schedule
from cute_kernels.sink.kernels.key_blocks import KeyBlocks
from cute_kernels.sink.kernels.key_tiles import KeyTiles
from cute_kernels.sink.spec import ROWS

BAR_ADD = 4


class QuerySums:
    """Device code; `spec` is a SinkBackwardSpec that is fused."""

    def __init__(self, spec):
        self.spec = spec
        self.blocks = KeyBlocks(spec)
        self.tiles = KeyTiles(spec)

    @cute.jit
    def send(self, smem, buffer: Int32, rank: Int32, wg: Int32, tid: Int32):
        """Copies this warpgroup's dS to the other CTA of the pair, and says here that it is stored."""
        spec = self.spec
        size = spec.keys_of_cta * QUERIES  # of dS of a CTA
        full = smem.ds_full.data_ptr() + buffer
        cute.arch.barrier(barrier_id=BAR_ADD + wg, number_of_threads=128)
        if tid == 0:
            part = spec.key_blocks * ROWS * QUERIES
            source = smem.d_s.data_ptr() + cute.assume(2 * buffer * size + wg * part, divby=part)
            target = cluster.remote_address(source + size, 1 - rank)
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[
                    target,
                    Int32(source.toint()),
                    Int32(2 * part),
                    cluster.remote_address(full, 1 - rank),
                ],
            )
        if wg == 0 and tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * size)  # what comes from the other one
        else:
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def add_dq(self, smem, target: Int64, acc, stage, buffer: Int32, place: Int32, rank: Int32, tid: Int32):
        """Makes dQ of the tile whose dS is in `buffer`, and adds it to the sums at `target`.

        `acc` are registers for dQ, or None; `place` says where it is staged: the number of the warpgroup, or, of a
        helper, 0 and 1 in turn. Of a pair, a CTA makes columns 64 `rank` to 64 `rank` + 63.
        Gives back `stage`, unless None, when products issued before are complete, and arrives at ds_empty when dS has
        been read.
        """
        spec = self.spec
        layout_kv, _, layout_ds, _ = self.tiles.layouts()
        _, _, mma_dq = self.tiles.tiled_mmas()
        thr_dq = mma_dq.get_slice(tid)
        of_keys = [(k, k) for k in range(spec.keys_of_cta // 16)]
        sK = smem.k.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
        sDS = smem.d_s.get_tensor(layout_ds.outer, swizzle=layout_ds.inner)
        own = 2 * buffer if const_expr(spec.pair) else buffer
        rDSt = mma_dq.make_fragment_A(thr_dq.partition_A(wgmma.transposed(sDS)))
        parts = cute.local_tile(wgmma.transposed(sK)[None, None, 0], (spec.columns, spec.keys_of_cta), (None, 0))
        rKt = mma_dq.make_fragment_B(thr_dq.partition_B(parts))
        for i in cutlass.range_constexpr(1 if spec.pair else spec.d // spec.columns):
            part = rank if const_expr(spec.pair) else i
            acc_dq = acc
            if const_expr(acc is None):
                acc_dq = cute.make_rmem_tensor(mma_dq.partition_shape_C((QUERIES, spec.columns)), Float32)
            warpgroup.fence()
            wgmma.issue(mma_dq, acc_dq, rDSt[None, None, None, own], rKt[None, None, None, part], False, of_keys)
            if const_expr(spec.pair):
                layout = self.tiles.layout_others()
                sOthers = smem.others.get_tensor(layout.outer, swizzle=layout.inner)
                rOthers = mma_dq.make_fragment_B(thr_dq.partition_B(wgmma.transposed(sOthers)))
                wgmma.issue(
                    mma_dq, acc_dq, rDSt[None, None, None, own + 1], rOthers[None, None, None, 0], True, of_keys
                )
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if const_expr(i == 0 and stage is not None):
                self.tiles.give_back(smem, stage, rank, tid)
            if const_expr(spec.pair or i == spec.d // spec.columns - 1):
                ds_empty = smem.ds_empty.data_ptr() + buffer
                cute.arch.mbarrier_arrive(ds_empty)
                if const_expr(spec.pair):
                    if tid % 32 == 0:
                        cute.arch.mbarrier_arrive(ds_empty, 1 - rank, scope=MemScopeKind.CLUSTER, relaxed=True)
            at = target + part * (4 * QUERIES * spec.columns)
            if const_expr(spec.pair):
                cute.arch.mbarrier_wait(smem.added_empty.ptr, buffer ^ 1)  # tiles are even and odd in turn
                self.add(smem, acc_dq, at, Int32(0), place, tid)
            else:
                self.add(smem, acc_dq, at, place * (spec.d // spec.columns) + i, place, tid)

    @cute.jit
    def add(self, smem, acc_dq: cute.Tensor, target: Int64, part: Int32, place: Int32, tid: Int32):
        """Adds dQ of a tile, or `part` of it, to the sums by one copy from shared memory.

        Element 4j + i of a thread is added at (128 j + thread, i).
        """
        spec = self.spec
        barrier = BAR_ADD + place
        staged = smem.added.data_ptr() + cute.assume(part * (QUERIES * spec.columns), divby=QUERIES * spec.columns)
        if const_expr(not spec.pair):
            if tid == 0:  # who issues the copies: that before from this place has been read
                cute.arch.cp_async_bulk_wait_group(spec.d // spec.columns - 1, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        for j in cutlass.range_constexpr(cute.size(acc_dq) // 4):
            four = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(4):
                four[i] = acc_dq[4 * j + i]
            to = staged + cute.assume(512 * j + 4 * tid, divby=4)
            cute.autovec_copy(four, cute.make_tensor(to, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by the copy engine
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        if tid == 0:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=[target, Int32(staged.toint()), Int32(4 * QUERIES * spec.columns)],
            )
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(spec.pair):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(spec.pair):  # the other warpgroup is next to use the place
            cute.arch.mbarrier_arrive(smem.added_empty.ptr)
