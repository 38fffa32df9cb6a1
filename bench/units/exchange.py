"""Bytes per clock that a CTA sends into the shared memory of the other one of its cluster, both sending."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from bench.units.spec import HALF_BYTES, ExchangeSpec
from cute_kernels.device.pipeline import Pipeline, initialize

STAGES = 4
VALUES = HALF_BYTES // 2  # bf16 values of half a tile
PIECES = HALF_BYTES // (16 * 128)  # 16-byte pieces of a thread
COPIES, COPY_VALUES = HALF_BYTES // 4096, 2048  # bulk copies of 4 KB


@cute.struct
class _Shared:
    slot_full: cute.struct.MemRange[Int64, STAGES]
    slot_empty: cute.struct.MemRange[Int64, STAGES]
    source: cute.struct.Align[cute.struct.MemRange[BFloat16, VALUES], 128]
    slots: cute.struct.Align[cute.struct.MemRange[BFloat16, STAGES * VALUES], 128]


class ExchangeKernel:
    """Warps 0 to 3 send (warp 0 alone where it copies), warp 4 receives and frees, in both CTAs of a cluster.

    The receiver names the 36,864 bytes that fill a slot: they may land before it does. Who sends waits for the slot in
    the *other* CTA, whose receiver frees it here. Both CTAs have initialized their barriers before either sends, and
    neither leaves while the other may still write.
    """

    def __init__(self, spec: ExchangeSpec):
        self.bulk = spec.how == "bulk"
        self.slots = Pipeline("slot", STAGES, producers=1, consumers=1, bytes=HALF_BYTES)

    def fake_arguments(self) -> tuple:
        """What each CTA sends; what each has received in the last turn, and clocks; turns."""
        ctas = cute.sym_int()
        sent, received = (make_fake_tensor(BFloat16, (ctas, VALUES), (VALUES, 1), assumed_align=16) for _ in range(2))
        cycles = make_fake_tensor(Int64, (ctas,), (1,), assumed_align=8)
        return sent, received, cycles, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self, mSent: cute.Tensor, mReceived: cute.Tensor, mCycles: cute.Tensor, turns: Int32, stream: cuda.CUstream
    ):
        self.kernel(mSent, mReceived, mCycles, turns).launch(
            grid=[mSent.shape[0], 1, 1], block=[160, 1, 1], cluster=[2, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mSent: cute.Tensor, mReceived: cute.Tensor, mCycles: cute.Tensor, turns: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        peer = 1 - cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(_Shared)
        if tidx == 0:
            initialize(smem, (self.slots,))
        sSource = cute.make_tensor(smem.source.data_ptr(), cute.make_layout(VALUES))
        for i in cutlass.range(tidx, VALUES, 160):
            sSource[i] = mSent[cta, i]
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by the copy engine
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        # one warp where it copies: warps that send nothing could lag by two uses of a slot, and wait forever
        if warp_idx < const_expr(1 if self.bulk else 4):
            pieces = cute.make_layout((8, PIECES), stride=(1, 8 * 128))
            own = cute.assume(8 * tidx, divby=8)
            raw = cute.make_rmem_tensor((8, PIECES), BFloat16)
            cute.autovec_copy(cute.make_tensor(smem.source.data_ptr() + own, pieces), raw)
            words = cute.recast_tensor(raw, Int32)
            start = cute.arch.clock64()
            for t in cutlass.range(turns, unroll=1):
                self.slots.acquire(smem, t)
                stage = self.slots.index(t)
                full = self.slots.full_barrier(smem, stage)
                slot = smem.slots.data_ptr() + cute.assume(stage * VALUES, divby=2048)
                if const_expr(self.bulk):
                    if tidx < COPIES:
                        copy = cute.make_copy_atom(cpasync.CopyBulkS2SOp(), BFloat16)
                        element = cute.assume(tidx * COPY_VALUES, divby=2048)
                        chunk = cute.make_layout(COPY_VALUES)
                        source = cute.make_tensor(smem.source.data_ptr() + element, chunk)
                        target = cute.make_tensor(slot + element, chunk)
                        cute.copy(copy, source, target, mbar_ptr=full, cta_rank=peer)
                    cute.arch.sync_warp()
                else:
                    target = cute.make_tensor(slot + own, pieces)
                    for i in cutlass.range_constexpr(PIECES):
                        four = tuple(words[j, i] for j in range(4))
                        cute.arch.store_async_dsmem(target[None, i].iterator, four, full, peer)
            for i in cutlass.range_constexpr(STAGES):  # all slots are free once the peer has received the last turns
                self.slots.acquire(smem, turns + i)
            if tidx == 0:
                mCycles[cta] = cute.arch.clock64() - start
        elif warp_idx == 4:
            for t in cutlass.range(turns, unroll=1):
                if tidx == 128:
                    self.slots.arrive_and_expect(smem, t)
                self.slots.wait(smem, t)
                cute.arch.sync_warp()  # no lane may lag by a use of the slot after the one that frees it
                if tidx == 128:
                    self.slots.release(smem, t, peer)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        sLast = cute.make_tensor(
            smem.slots.data_ptr() + cute.assume((turns + STAGES - 1) % STAGES * VALUES, divby=2048),
            cute.make_layout(VALUES),
        )
        for i in cutlass.range(tidx, VALUES, 160):
            mReceived[cta, i] = sLast[i]
