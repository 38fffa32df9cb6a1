"""The producer warpgroup of the decode kernel: finds keys, gathers their rows and lays them out for wgmma."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float16, Int32, Int64, Uint8, const_expr
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import cluster, token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.barriers import NamedBarrier
from cute_kernels.mla.crossover.spec import EVENTS, ROLES, MlaCrossoverSpec
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE

STAGES = 2
THREADS = 128
WARP = 32
ROWS = token_cache.ROWS_PER_PASS
BLOCK = TOKENS_PER_TILE * BLOCK_COLUMNS  # elements of it
BLOCKS = NOPE // BLOCK_COLUMNS

# What a CTA of a cluster hands to the other one of every tile, in bytes: each thread's pieces of 32 rows, or the rows
# as wgmma reads them. Scales are brought by those who apply them, in both CTAs.
HALF = TOKENS_PER_TILE // 2
CODES_BYTES = HALF // ROWS * THREADS * 16 * token_cache.PIECES
PASSES = HALF // ROWS  # of a CTA over its own rows of a tile
VALUES_BYTES = HALF * 2 * (NOPE + ROPE)


class KeyProducer:
    """Fills the stages of a cluster of `MlaCrossoverKernel`; device code for 128 threads.

    A CTA gathers the rows of a tile from 32 x its rank on, and gets the others:

    exchange  rows of the other CTA come                                      then
    codes     by st.async from its registers, to where they will be stored,   they are read and widened like own ones
              a thread's pieces to its counterpart
    values    by bulk copies of its stage, when that half is done, and        nothing: all counts on the full barrier
              the rope part by st.async from its registers

    A stage may be written to when the consumers of both CTAs have left it: each says so to the other.
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.exchange = spec.exchange
        self.keys = KeyFinder(spec)
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, rank: Int32, tid: Int32):
        """Rows of all items of this CTA; `table` as for Scheduler."""
        mKV, mIndex, mLength, zero_row = table[:4]
        first_item, items, step = table.share[:3]
        done = Int32(0)  # tiles of the items before
        for item in cutlass.range(first_item, items, step, unroll=1):
            work = self.scheduler.locate(item, table)
            length = self.scheduler.length(work, mLength)
            begin, limit, count, _ = self.scheduler.keys(item, work, length, table)
            if count > 0:
                entries = self.scheduler.entries(work, mIndex)
                self.fill(smem, mKV, zero_row, entries, begin, limit, done, count, table.divisors.page_size, rank, tid)
            done += count

    @cute.jit
    def fill(
        self,
        smem,
        mKV: cute.Tensor,
        zero_row: Int64,
        entries: cute.Tensor,
        begin: Int32,
        limit: Int32,
        done: Int32,
        count: Int32,
        page_divisor,
        rank: Int32,
        tidx: Int32,
    ):
        """Fills `count` stages with the keys at positions `begin` and on; those at `limit` and beyond are masked.

        `done` stages have been filled before.

        The rows of the next tile are always in flight: as a pass of 16 is stored, its registers receive the same pass
        of the next tile. Entries of the index or block table come a tile at a time, one a lane, a tile before that.
        """
        place = self.place(tidx)
        row, segment, _, _, _ = place
        first_row = HALF * rank  # of this CTA's rows of a tile
        position = begin + first_row + row
        last = limit - 1
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        # of the passes that are to be loaded while a tile is stored, lane 4 p + r: row r of the warp's four in pass p
        lane, warp_idx = tidx % WARP, tidx // WARP
        entry_position = begin + first_row + 4 * warp_idx + lane % 4 + ROWS * (lane // 4 % PASSES)
        early = self.keys.read_entry(entries, entry_position, last, page_divisor)
        entry_position += TOKENS_PER_TILE
        entry = self.keys.read_entry(entries, entry_position, last, page_divisor)

        raw = cute.make_rmem_tensor((16, token_cache.PIECES, PASSES), Uint8)
        for d in cutlass.range_constexpr(PASSES):
            found = cute.arch.shuffle_sync(early, 4 * d + row % 4)
            _, address = self.keys.locate(mKV, zero_row, found, position + ROWS * d, last, page_divisor)
            token_cache.gather(address, segment, raw[None, None, d])

        for t in cutlass.range(done, done + count, unroll=1):
            stage, use = t % STAGES, t // STAGES
            self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * t, 0, tidx == 0)
            cute.arch.mbarrier_wait(empty + stage, (use + 1) % 2)
            self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * t, 1, tidx == 0)
            self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * t + 1, 0, tidx == 0)
            self.open_stage(smem, stage, use, rank, tidx)
            if const_expr(self.exchange == "codes"):
                for d in cutlass.range_constexpr(PASSES):
                    self.send_codes(smem, raw[None, None, d], stage, d, rank, tidx)
            entry_position += TOKENS_PER_TILE
            for d in cutlass.range_constexpr(PASSES):
                following = None
                if const_expr(self.exchange != "codes"):  # there the registers receive the other CTA's rows first
                    following = self.find(mKV, zero_row, entry, d, row, position, last, page_divisor)
                even, odd, rope = self.targets(smem, place, stage, first_row + ROWS * d)
                if const_expr(self.exchange == "values"):
                    self.send_rope(smem, raw[None, None, d], rope, stage, rank)
                token_cache.store_and_gather(raw[None, None, d], even, odd, rope, following, segment)
            if const_expr(self.exchange == "codes"):
                cute.arch.mbarrier_wait(smem.codes_full.data_ptr() + stage, use % 2)
                for d in cutlass.range_constexpr(PASSES):
                    self.take_codes(smem, place, raw[None, None, d], stage, d, rank, tidx)
                    later = self.find(mKV, zero_row, entry, d, row, position, last, page_divisor)
                    token_cache.gather(later, segment, raw[None, None, d])
            entry = self.keys.read_entry(entries, entry_position, last, page_divisor)
            position += TOKENS_PER_TILE
            # no fence: it would wait for the loads that are on the way. Those who multiply have one
            if const_expr(self.exchange == "values"):
                self.send_values(smem, stage, rank, tidx)
            self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * t + 1, 1, tidx == 0)
            if const_expr(self.exchange == "values"):
                if tidx == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, VALUES_BYTES)
                else:
                    cute.arch.mbarrier_arrive(full + stage)
            else:
                cute.arch.mbarrier_arrive(full + stage)

    @cute.jit
    def find(
        self,
        mKV: cute.Tensor,
        zero_row: Int64,
        entry: Int32,
        d: int,
        row: Int32,
        position: Int32,
        last: Int32,
        page_divisor,
    ) -> cute.Pointer:
        """The row that a thread loads when pass d of the tile before is stored."""
        found = cute.arch.shuffle_sync(entry, 4 * d + row % 4)
        later = position + TOKENS_PER_TILE + ROWS * d
        _, address = self.keys.locate(mKV, zero_row, found, later, last, page_divisor)
        return address

    # ---- a row

    def place(self, tidx: Int32):
        """What a thread has of a pass.

        (row of 16, first of the 16 columns in a quantization tile; where its even and odd chunks and its chunk of the
        rope part go, in elements from the pass's first row on). r % 8 is the same in every pass.
        """
        lane, warp_idx = tidx % 32, tidx // 32
        quarter, odd_row, phase = lane % 4, lane // 4 % 2, lane // 8
        row, half = 4 * warp_idx + 2 * (phase // 2) + odd_row, (phase + odd_row) % 2
        x = row % 8
        start = half * BLOCK + row * BLOCK_COLUMNS
        even, odd = (start + ((2 * quarter + i) ^ x) * 8 for i in range(2))
        return row, 64 * half + 16 * quarter, even, odd, row * BLOCK_COLUMNS + ((4 * half + quarter) ^ x) * 8

    @cute.jit
    def targets(self, smem, place: tuple, stage: Int32, at: Int32):
        """Where a thread's row of the pass that begins at row `at` goes: even and odd chunks (8, 4), rope (8)."""
        _, _, even, odd, rope = place
        nope, chunks = smem.nope.data_ptr(), cute.make_layout((8, QUANT_TILES), stride=(1, 2 * BLOCK))
        start = stage * (TOKENS_PER_TILE * NOPE) + at * BLOCK_COLUMNS
        sEven = cute.make_tensor(nope + cute.assume(start + even, divby=8), chunks)
        sOdd = cute.make_tensor(nope + cute.assume(start + odd, divby=8), chunks)
        start = stage * (TOKENS_PER_TILE * ROPE) + at * BLOCK_COLUMNS
        sRope = cute.make_tensor(smem.rope.data_ptr() + cute.assume(start + rope, divby=8), cute.make_layout(8))
        return sEven, sOdd, sRope

    # ---- what the CTAs of a cluster hand to each other

    @cute.jit
    def open_stage(self, smem, stage: Int32, use: Int32, rank: Int32, tidx: Int32):
        """Tells the other CTA that this one's stage is free, and waits until the same is true there.

        Relaxed: it publishes no data. That the other CTA has used the tile before in this stage also says that copies
        from here have ended.
        """
        peer_free = smem.peer_free.data_ptr() + stage
        if tidx == 0:
            if const_expr(self.exchange == "codes"):
                cute.arch.mbarrier_arrive_and_expect_tx(smem.codes_full.data_ptr() + stage, CODES_BYTES)
            cute.arch.mbarrier_arrive(peer_free, 1 - rank, scope=MemScopeKind.CLUSTER, relaxed=True)
        cute.arch.mbarrier_wait(peer_free, use % 2)

    def landing(self, smem, stage: Int32, at: Int32, block: int) -> cute.Pointer:
        """Where a stage has room for what comes of the pass that begins at row `at`: its own rows in a block, 2 KB."""
        start = stage * (TOKENS_PER_TILE * NOPE) + block * BLOCK + at * BLOCK_COLUMNS
        return smem.nope.data_ptr() + cute.assume(start, divby=1024)

    @cute.jit
    def send_codes(self, smem, raw: cute.Tensor, stage: Int32, d: int, rank: Int32, tidx: Int32):
        """Sends this thread's pieces of a row."""
        at = HALF * rank + ROWS * d
        barrier = cluster.remote_address(smem.codes_full.data_ptr() + stage, 1 - rank)
        words = cute.recast_tensor(raw, Int32)
        to_piece = cluster.remote_address(self.landing(smem, stage, at, 0), 1 - rank) + tidx * 16
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            four = tuple(words[i, piece] for i in range(4))
            cluster.send_words(to_piece + piece * (2 * BLOCK), four, barrier)

    @cute.jit
    def take_codes(self, smem, place: tuple, raw: cute.Tensor, stage: Int32, d: int, rank: Int32, tidx: Int32):
        """Stores a row that the other CTA has sent, by way of `raw`."""
        at = HALF * (1 - rank) + ROWS * d
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            start = cute.recast_ptr(self.landing(smem, stage, at, piece), dtype=Uint8)
            own = cute.make_tensor(start + cute.assume(tidx * 16, divby=16), cute.make_layout(16))
            cute.autovec_copy(own, raw[None, piece])
        # all have read what lies where the rows go
        cute.arch.barrier(barrier_id=NamedBarrier.LOAD, number_of_threads=THREADS)
        even, odd, rope = self.targets(smem, place, stage, at)
        token_cache.store_and_gather(raw, even, odd, rope, None, Int32(0))

    @cute.jit
    def send_rope(self, smem, raw: cute.Tensor, rope: cute.Tensor, stage: Int32, rank: Int32):
        """Sends this thread's chunk of the rope part: from registers, for P takes its place before a copy would end."""
        words = cute.recast_tensor(raw, Int32)
        four = tuple(words[i, 4] for i in range(4))
        barrier = cluster.remote_address(smem.full.data_ptr() + stage, 1 - rank)
        cluster.send_words(cluster.remote_address(rope.iterator, 1 - rank), four, barrier)

    @cute.jit
    def send_values(self, smem, stage: Int32, rank: Int32, tidx: Int32):
        """Copies the own rows of a stage to the other CTA."""
        at = HALF * rank
        # copies count on the barrier that they name, which is to be the receiver's
        there = cluster.remote_address(smem.full.data_ptr() + stage, 1 - rank)
        barrier = cute.make_ptr(Int64, there, AddressSpace.smem, assumed_align=8)
        cute.arch.barrier(barrier_id=NamedBarrier.LOAD, number_of_threads=THREADS)  # all of it is written
        if tidx < WARP:
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by bulk copies
            if tidx < BLOCKS:
                copy = cute.make_copy_atom(cpasync.CopyBulkS2SOp(), Float16)
                start = stage * (TOKENS_PER_TILE * NOPE) + tidx * BLOCK + at * BLOCK_COLUMNS
                block = smem.nope.data_ptr() + cute.assume(start, divby=HALF * BLOCK_COLUMNS)
                rows = cute.make_tensor(block, cute.make_layout(HALF * BLOCK_COLUMNS))
                cute.copy(copy, rows, rows, mbar_ptr=barrier, cta_rank=1 - rank)
