"""A plain reader: bytes stream by bulk copies of the TMA into shared memory, and every word is added up.

Its speed is one of the ceilings that reads of a kernel are compared with.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from bench.ceilings import STREAM_STAGES, STREAM_WORDS, StreamSpec

CONSUMERS = 128  # threads
PIECES = STREAM_WORDS // (4 * CONSUMERS)  # 16-byte pieces of a thread in a tile


@cute.struct
class _Shared:
    full: cute.struct.MemRange[Int64, STREAM_STAGES]
    empty: cute.struct.MemRange[Int64, STREAM_STAGES]
    tiles: cute.struct.Align[cute.struct.MemRange[Int32, STREAM_STAGES * STREAM_WORDS], 128]


class StreamKernel:
    """Warps 0 to 3 add up the words that warp 4 copies; neighbouring CTAs read neighbouring tiles.

    Barriers, per stage
      full   1 arrival of the copying warp, which announces the bytes that complete it
      empty  128 arrivals of the threads that add
    """

    def __init__(self, spec: StreamSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))

    def fake_arguments(self) -> tuple:
        """Returns fake arguments: tiles of words, and the sum of each thread that adds."""
        tiles = make_fake_tensor(Int32, (cute.sym_int(), STREAM_WORDS), (STREAM_WORDS, 1), assumed_align=128)
        sums = make_fake_tensor(Int32, (cute.sym_int(), CONSUMERS), (CONSUMERS, 1), assumed_align=16)
        return tiles, sums, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, mTiles: cute.Tensor, mSums: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mTiles, mSums).launch(
            grid=[mSums.shape[0], 1, 1], block=[CONSUMERS + 32, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mTiles: cute.Tensor, mSums: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(_Shared)
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        if tidx == 0:
            for s in cutlass.range_constexpr(STREAM_STAGES):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, CONSUMERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        turns = (mTiles.shape[0] - cta + ctas - 1) // ctas
        if warp_idx == CONSUMERS // 32:
            copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
            for t in cutlass.range(turns, unroll=1):
                s, use = t % STREAM_STAGES, t // STREAM_STAGES
                cute.arch.mbarrier_wait(empty + s, (use + 1) % 2)
                if tidx == CONSUMERS:
                    cute.arch.mbarrier_arrive_and_expect_tx(full + s, 4 * STREAM_WORDS)
                    place = cute.assume(s * STREAM_WORDS, divby=STREAM_WORDS)
                    target = cute.make_tensor(smem.tiles.data_ptr() + place, cute.make_layout(STREAM_WORDS))
                    cute.copy(copy, mTiles[cta + t * ctas, None], target, mbar_ptr=full + s)
                cute.arch.sync_warp()
        else:
            total = Int32(0)
            pieces = cute.make_layout((4, PIECES), stride=(1, 4 * CONSUMERS))
            words = cute.make_rmem_tensor((4, PIECES), Int32)
            for t in cutlass.range(turns, unroll=1):
                s, use = t % STREAM_STAGES, t // STREAM_STAGES
                cute.arch.mbarrier_wait(full + s, use % 2)
                place = cute.assume(s * STREAM_WORDS + 4 * tidx, divby=4)
                cute.autovec_copy(cute.make_tensor(smem.tiles.data_ptr() + place, pieces), words)
                cute.arch.mbarrier_arrive(empty + s)
                total += words.load().reduce(cute.ReductionOp.ADD, Int32(0), 0)
            mSums[cta, tidx] = total
