"""dq of the key-stationary kernel: dQ = dS K of each query tile, which the copy engine adds up in global memory.

Two warpgroups make dQ of query tiles in turn. After its products of a tile, a warpgroup makes dQ of the tile before. So
no warpgroup waits for the other's dS, and the two may be half a tile apart. One's softmax then overlaps with the
other's products. If both made half of each dQ, products of half of the columns would read shared memory at 192 or 128
bytes a cycle, where m64n64k16 reads 128, and products of half of the keys would double the additions.

dQ goes to shared memory, 16 KB. A separate warp has the copy engine add it from there, so no thread that multiplies
waits for a copy. That saves 1.2% (d 64) and 2.3% (d 128) of the time. finish.py describes the layout of the sums.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.device import cluster, wgmma
from cute_kernels.device.pipeline import Slot
from cute_kernels.sink.backward_spec import QUERIES
from cute_kernels.sink.kernels import scheduler, views
from cute_kernels.sink.kernels.masks import KeyMasks, Visibility
from cute_kernels.sink.kernels.pipelines import KeyGradNamedBarrier, key_pipelines
from cute_kernels.sink.kernels.smem import key_layouts, key_mmas, peer_k_layout, view
from cute_kernels.sink.spec import ROWS


class Sums(NamedTuple):
    """Float32 sums of dq in global memory: their address, and the number of positions of a head."""

    address: Int64
    positions: Int32


class QuerySums:
    """Device code of a consumer warpgroup; `spec` is a SinkBackwardSpec that is fused."""

    def __init__(self, spec):
        self.spec = spec
        self.edges = key_pipelines(spec)

    @cute.jit
    def send(self, smem, slot: Slot, rank: Int32, wg: Int32, tid: Int32):
        """Copies this warpgroup's dS to the pair's other CTA, whose `ds_full` gets the bytes; arrives at `ds_full`."""
        spec, edge = self.spec, self.edges.ds
        size = spec.keys_of_cta * QUERIES  # elements of a CTA's dS
        full = edge.full_barrier(smem, slot.index)
        cute.arch.barrier(barrier_id=KeyGradNamedBarrier.SEND + wg, number_of_threads=128)
        if tid == 0:
            part = spec.key_blocks * ROWS * QUERIES
            source = smem.d_s.data_ptr() + cute.assume(2 * slot.index * size + wg * part, divby=part)
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
            edge.arrive_and_expect(smem, slot)  # the bytes that the other CTA sends
        else:
            edge.arrive(smem, slot)

    @cute.jit
    def make_dq(self, smem, read, ring_tile: Int32, rank: Int32, wg: Int32, tid: Int32):
        """Makes dQ of a query tile once its dS has arrived, and stages it for the warp that adds it.

        In a pair, a CTA makes columns 64 `rank` to 64 `rank` + 63. Once the products are complete, those issued before
        the call too, it releases query tile `read`, unless that is None, and dS.
        """
        spec, ds, added = self.spec, self.edges.ds, self.edges.added
        layouts, mma_dq = key_layouts(spec), key_mmas(spec).dq
        thr_dq = mma_dq.get_slice(tid)
        key_blocks = [(k, k) for k in range(spec.keys_of_cta // 16)]
        sK = view(smem.k, layouts.kv)
        sDS = view(smem.d_s, layouts.d_s)
        ds_slot = ds.slot(ring_tile)
        own = 2 * ds_slot.index if const_expr(spec.pair) else ds_slot.index
        rDSt = mma_dq.make_fragment_A(thr_dq.partition_A(wgmma.transposed(sDS)))
        parts = cute.local_tile(wgmma.transposed(sK)[None, None, 0], (spec.columns, spec.keys_of_cta), (None, 0))
        rKt = mma_dq.make_fragment_B(thr_dq.partition_B(parts))
        acc_dq = cute.make_rmem_tensor(mma_dq.partition_shape_C((QUERIES, spec.columns)), Float32)
        ds.wait(smem, ds_slot)
        warpgroup.fence()
        wgmma.issue(mma_dq, acc_dq, rDSt[None, None, None, own], rKt[None, None, None, rank], False, key_blocks)
        if const_expr(spec.pair):
            sPeer = view(smem.peer_k, peer_k_layout(spec))
            rPeer = mma_dq.make_fragment_B(thr_dq.partition_B(wgmma.transposed(sPeer)))
            wgmma.issue(mma_dq, acc_dq, rDSt[None, None, None, own + 1], rPeer[None, None, None, 0], True, key_blocks)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        if const_expr(read is not None):
            self.edges.q.release(smem, read)
        ds.release(smem, ds_slot)
        if const_expr(spec.pair):
            if tid % 32 == 0:
                ds.release(smem, ds_slot, peer=1 - rank)
        added.acquire(smem, ring_tile)
        self.stage(smem, acc_dq, added.index(ring_tile), tid)
        added.arrive(smem, ring_tile)

    @cute.jit
    def stage(self, smem, acc_dq: cute.Tensor, place: Int32, tid: Int32):
        """Stores dQ of a tile in shared memory: element 4j + i of a thread goes to (128 j + thread, i)."""
        size = QUERIES * self.spec.columns
        staged = smem.added.data_ptr() + cute.assume(place * size, divby=size)
        for j in cutlass.range_constexpr(cute.size(acc_dq) // 4):
            four = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(4):
                four[i] = acc_dq[4 * j + i]
            chunk = staged + cute.assume(512 * j + 4 * tid, divby=4)
            cute.autovec_copy(four, cute.make_tensor(chunk, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")  # makes ordinary stores visible to the copy engine


class Adder:
    """Device code of a warp that has the copy engine add dQ; `spec` is a SinkBackwardSpec that is fused."""

    def __init__(self, spec):
        self.spec = spec
        self.masks = KeyMasks(spec)
        self.edges = key_pipelines(spec)

    @cute.jit
    def run(self, smem, sums: Sums, visible: Visibility, ratio: Int32, rank: Int32, place: Int32, lane: Int32):
        """Has the copy engine add dQ from stage `place` to the sums, for every work tile of the CTA."""
        spec = self.spec
        size = 4 * QUERIES * spec.columns  # bytes
        source = Int32(smem.added.data_ptr().toint()) + place * size
        count, ring_tile, running = Int32(0), Int32(0), Int32(1)
        while running == 1:
            record = scheduler.await_record(smem, self.edges.work, count)
            work = scheduler.read(record)
            if work.first < 0:
                running = Int32(0)
            else:
                self.edges.work.release(smem, record.slot)
                queries = self.masks.query_range(work.first, work.s_q, work.s_k, visible)
                position = views.position(spec.packed, work.start_q, work.batch, work.s_q) + queries.begin
                for g in cutlass.range(ratio, unroll=1):
                    row = Int64(work.head * ratio + g) * sums.positions + position
                    target = sums.address + row * (4 * spec.d) + rank * size
                    for _ in cutlass.range(queries.tiles, unroll=1):
                        if self.edges.added.index(ring_tile) == place:
                            self.edges.added.wait(smem, ring_tile)
                            if lane == 0:
                                cute.arch.inline_ptx(
                                    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                                    "[{$r0}], [{$r1}], {$r2};",
                                    read_only_args=[target, source, Int32(size)],
                                )
                                cute.arch.cp_async_bulk_commit_group()
                                cute.arch.cp_async_bulk_wait_group(0, read=True)
                                self.edges.added.release(smem, ring_tile)
                        ring_tile += 1
                        target += 4 * QUERIES * spec.d
                count += 1
