"""dq where keys stay: dQ = dS K of a query tile, added up in global memory by the copy engine.

Warpgroups make dQ of query tiles in turn, each that of the tile before. So no warpgroup waits for the dS of another,
and they may be half a tile apart: one's softmax then overlaps with another's products. In turns, because half of the
columns each would read shared memory at 192 or 128 bytes a cycle where m64n64k16 reads 128, and half of the keys each
would add twice as much. dQ goes to shared memory, 16 KB at a time, from where one thread has the copy engine add it.

Sums of dq are laid out as accumulators are: see finish.py.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import cluster, wgmma
from cute_kernels.sink.backward_spec import QUERIES
from cute_kernels.sink.kernels.barriers import KeyGradNamedBarrier
from cute_kernels.sink.kernels.smem import key_layouts, key_mmas, peer_k_layout, view
from cute_kernels.sink.spec import ROWS


class Sums(NamedTuple):
    """Float32 sums of dq in global memory, and the positions of a head in them."""

    address: Int64
    positions: Int32


class QuerySums:
    """Device code; `spec` is a SinkBackwardSpec that is fused."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def send(self, smem, buffer: Int32, rank: Int32, wg: Int32, tid: Int32):
        """Copies this warpgroup's dS to the other CTA of the pair, and arrives at ds_full of both."""
        spec = self.spec
        size = spec.keys_of_cta * QUERIES  # elements of a CTA's dS
        full = smem.ds_full.data_ptr() + buffer
        cute.arch.barrier(barrier_id=KeyGradNamedBarrier.ADD + wg, number_of_threads=128)
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
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * size)  # what the other CTA sends
        else:
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def add_dq(self, smem, target: Int64, stage, buffer: Int32, rank: Int32, wg: Int32, tid: Int32):
        """Makes dQ of the query tile whose dS is in `buffer`, and adds it to the sums at `target`.

        In a pair, a CTA makes columns 64 `rank` to 64 `rank` + 63. Releases `stage`, unless None, when products issued
        before are complete, and arrives at ds_empty when dS has been read.
        """
        spec = self.spec
        layouts, mma_dq = key_layouts(spec), key_mmas(spec).dq
        thr_dq = mma_dq.get_slice(tid)
        key_blocks = [(k, k) for k in range(spec.keys_of_cta // 16)]
        sK = view(smem.k, layouts.kv)
        sDS = view(smem.d_s, layouts.d_s)
        own = 2 * buffer if const_expr(spec.pair) else buffer
        rDSt = mma_dq.make_fragment_A(thr_dq.partition_A(wgmma.transposed(sDS)))
        parts = cute.local_tile(wgmma.transposed(sK)[None, None, 0], (spec.columns, spec.keys_of_cta), (None, 0))
        rKt = mma_dq.make_fragment_B(thr_dq.partition_B(parts))
        for i in cutlass.range_constexpr(1 if spec.pair else spec.d // spec.columns):
            part = rank if const_expr(spec.pair) else i
            acc_dq = cute.make_rmem_tensor(mma_dq.partition_shape_C((QUERIES, spec.columns)), Float32)
            warpgroup.fence()
            wgmma.issue(mma_dq, acc_dq, rDSt[None, None, None, own], rKt[None, None, None, part], False, key_blocks)
            if const_expr(spec.pair):
                sPeer = view(smem.peer_k, peer_k_layout(spec))
                rPeer = mma_dq.make_fragment_B(thr_dq.partition_B(wgmma.transposed(sPeer)))
                wgmma.issue(
                    mma_dq, acc_dq, rDSt[None, None, None, own + 1], rPeer[None, None, None, 0], True, key_blocks
                )
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if const_expr(i == 0 and stage is not None):
                cute.arch.mbarrier_arrive(smem.q_empty.data_ptr() + stage)
            if const_expr(spec.pair or i == spec.d // spec.columns - 1):
                ds_empty = smem.ds_empty.data_ptr() + buffer
                cute.arch.mbarrier_arrive(ds_empty)
                if const_expr(spec.pair):
                    if tid % 32 == 0:
                        cute.arch.mbarrier_arrive(ds_empty, 1 - rank, scope=MemScopeKind.CLUSTER, relaxed=True)
            part_target = target + part * (4 * QUERIES * spec.columns)
            if const_expr(spec.pair):
                cute.arch.mbarrier_wait(smem.added_empty.ptr, buffer ^ 1)  # tiles alternate between even and odd
                self.add(smem, acc_dq, part_target, Int32(0), wg, tid)
            else:
                self.add(smem, acc_dq, part_target, wg * (spec.d // spec.columns) + i, wg, tid)

    @cute.jit
    def add(self, smem, acc_dq: cute.Tensor, target: Int64, part: Int32, wg: Int32, tid: Int32):
        """Adds dQ of a tile, or `part` of it, to the sums by one copy from shared memory.

        Element 4j + i of a thread is added at (128 j + thread, i).
        """
        spec = self.spec
        barrier = KeyGradNamedBarrier.ADD + wg
        staged = smem.added.data_ptr() + cute.assume(part * (QUERIES * spec.columns), divby=QUERIES * spec.columns)
        if const_expr(not spec.pair):
            if tid == 0:  # the thread that issues the copies waits until the one before from here is read
                cute.arch.cp_async_bulk_wait_group(spec.d // spec.columns - 1, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        for j in cutlass.range_constexpr(cute.size(acc_dq) // 4):
            four = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(4):
                four[i] = acc_dq[4 * j + i]
            chunk = staged + cute.assume(512 * j + 4 * tid, divby=4)
            cute.autovec_copy(four, cute.make_tensor(chunk, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")  # makes ordinary stores visible to the copy engine
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        if tid == 0:
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                read_only_args=[target, Int32(staged.toint()), Int32(4 * QUERIES * spec.columns)],
            )
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(spec.pair):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(spec.pair):  # the other warpgroup uses the place next
            cute.arch.mbarrier_arrive(smem.added_empty.ptr)
