"""The exchange: how each of the two CTAs of a cluster hands the other its half of a key tile."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import cluster, token_cache
from cute_kernels.mla.crossover.kernels.pipelines import NamedBarrier, pipelines
from cute_kernels.mla.crossover.kernels.rows import RowPart, row_targets
from cute_kernels.mla.crossover.kernels.tile import BLOCK, BLOCKS, HALF, ROWS, THREADS, WARP
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE
from cute_kernels.mla.spec import TOKENS_PER_TILE


class Exchange:
    """Device code for the load warpgroup. `rank` is this CTA's rank in its cluster, 1 - rank the other CTA's.

    exchange  how rows reach the other CTA                                 what it does with them
    codes     st.async from registers, each thread's pieces to the         reads them back and converts them like its
              stage of its counterpart there; count on codes_full          own (`take_codes`)
    values    bulk copies of the stored half of the stage, and st.async    nothing; both count on full
              of the rope part from registers

    A stage is written only after PV has left it in both CTAs: each tells the other (`open_stage`).
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.exchange = spec.exchange
        _, self.keys, _, self.peer, self.codes = pipelines(spec)

    @cute.jit
    def open_stage(self, smem, tile: Int32, rank: Int32, tid: Int32):
        """Tells the other CTA that this CTA's stage is empty, and waits until the other CTA's stage is empty.

        The arrival is relaxed: it publishes no data. It also says that the other CTA has used the previous tile of the
        stage, so the copies that brought that tile have ended.
        """
        if tid == 0:
            if const_expr(self.exchange == "codes"):
                self.codes.arrive_and_expect(smem, tile)
            self.peer.arrive(smem, tile, peer=1 - rank)
        self.peer.wait(smem, tile)

    # ---- codes

    def landing(self, smem, stage: Int32, first_row: Int32, block: int) -> cute.Pointer:
        """Returns 2 KB of a stage that receive a piece per thread: rows of the pass from `first_row`, in a block."""
        start = stage * (TOKENS_PER_TILE * NOPE) + block * BLOCK + first_row * BLOCK_COLUMNS
        return smem.nope.data_ptr() + cute.assume(start, divby=1024)

    @cute.jit
    def send_codes(self, smem, raw: cute.Tensor, stage: Int32, row_pass: int, rank: Int32, tid: Int32):
        """Sends this thread's pieces of a row to the other CTA."""
        first_row = HALF * rank + ROWS * row_pass
        barrier = cluster.remote_address(self.codes.full_barrier(smem, stage), 1 - rank)
        words = cute.recast_tensor(raw, Int32)
        target = cluster.remote_address(self.landing(smem, stage, first_row, 0), 1 - rank) + tid * 16
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            four = tuple(words[i, piece] for i in range(4))
            cluster.send_words(target + piece * (2 * BLOCK), four, barrier)

    @cute.jit
    def take_codes(self, smem, part: RowPart, raw: cute.Tensor, stage: Int32, row_pass: int, rank: Int32, tid: Int32):
        """Converts and stores a row that the other CTA has sent; `raw` holds it in between."""
        first_row = HALF * (1 - rank) + ROWS * row_pass
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            start = cute.recast_ptr(self.landing(smem, stage, first_row, piece), dtype=Uint8)
            received = cute.make_tensor(start + cute.assume(tid * 16, divby=16), cute.make_layout(16))
            cute.autovec_copy(received, raw[None, piece])
        # rows are stored over the pieces, which all threads have read by now
        cute.arch.barrier(barrier_id=NamedBarrier.LOAD, number_of_threads=THREADS)
        target = row_targets(smem, part, stage, first_row)
        token_cache.store_and_gather(raw, target.even, target.odd, target.rope, None, Int32(0))

    # ---- values

    @cute.jit
    def send_rope(self, smem, raw: cute.Tensor, rope: cute.Tensor, stage: Int32, rank: Int32):
        """Sends this thread's chunk of the rope part from registers: P overwrites it before a bulk copy would end."""
        words = cute.recast_tensor(raw, Int32)
        four = tuple(words[i, 4] for i in range(4))
        barrier = cluster.remote_address(self.keys.full_barrier(smem, stage), 1 - rank)
        cluster.send_words(cluster.remote_address(rope.iterator, 1 - rank), four, barrier)

    @cute.jit
    def send_values(self, smem, stage: Int32, rank: Int32, tid: Int32):
        """Copies this CTA's half of a stage to the other CTA: 8 bulk copies of 4 KB, one a lane."""
        first_row = HALF * rank
        # a bulk copy counts on the barrier that it names: the receiver's, mapped by hand
        peer_full = cluster.remote_address(self.keys.full_barrier(smem, stage), 1 - rank)
        barrier = cute.make_ptr(Int64, peer_full, AddressSpace.smem, assumed_align=8)
        cute.arch.barrier(barrier_id=NamedBarrier.LOAD, number_of_threads=THREADS)  # the half is stored
        if tid < WARP:
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores before the bulk copies that read them
            if tid < BLOCKS:
                copy = cute.make_copy_atom(cpasync.CopyBulkS2SOp(), Float16)
                start = stage * (TOKENS_PER_TILE * NOPE) + tid * BLOCK + first_row * BLOCK_COLUMNS
                block = smem.nope.data_ptr() + cute.assume(start, divby=HALF * BLOCK_COLUMNS)
                rows = cute.make_tensor(block, cute.make_layout(HALF * BLOCK_COLUMNS))
                cute.copy(copy, rows, rows, mbar_ptr=barrier, cta_rank=1 - rank)
