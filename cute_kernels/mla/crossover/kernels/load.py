"""The load warpgroup of the crossover: finds keys, gathers their rows, lays them out for wgmma and exchanges them."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float16, Int32, Int64, Uint8, const_expr
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import cluster, token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.arguments import KeySource, PassPlace, PassTargets, TileRange
from cute_kernels.mla.crossover.kernels.barriers import NamedBarrier
from cute_kernels.mla.crossover.kernels.tile import (
    BLOCK,
    BLOCKS,
    CODES_BYTES,
    HALF,
    PASSES,
    ROWS,
    STAGES,
    THREADS,
    VALUES_BYTES,
    WARP,
)
from cute_kernels.mla.crossover.spec import EVENTS, ROLES, MlaCrossoverSpec
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, QUANT_TILES, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE


class LoadWarpgroup:
    """Fills the stages of a cluster of `MlaCrossoverKernel`; device code for 128 threads.

    A CTA gathers 32 rows of a tile, from 32 x its rank on, and gets the other 32:

    exchange  rows of the other CTA come                                      then
    codes     by st.async from its registers, to where they will be stored,   they are read and widened like own ones
              a thread's pieces to its counterpart
    values    by bulk copies of its stage, when that half is done, and        nothing: all counts on the full barrier
              the rope part by st.async from its registers

    A stage is free when the PV warpgroups of both CTAs have left it: each CTA tells the other.
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.exchange = spec.exchange
        self.keys = KeyFinder(spec)
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, rank: Int32, tid: Int32):
        """Fills stages with the rows of all work tiles of this CTA."""
        share = table.share
        done = Int32(0)  # key tiles of the work tiles before
        for number in cutlass.range(share.first, share.end, share.step, unroll=1):
            work = self.scheduler.locate(number, table)
            length = self.scheduler.length(work, table.mLength)
            begin, limit, count, _ = self.scheduler.keys(number, work, length, table)
            if count > 0:
                entries = self.scheduler.entries(work, table.mIndex)
                keys = KeySource(table.mKV, table.zero_row, entries, begin, limit, table.divisors.page_size)
                self.fill(smem, keys, TileRange(done, count), rank, tid)
            done += count

    @cute.jit
    def fill(
        self,
        smem,
        source: KeySource,
        tiles: TileRange,
        rank: Int32,
        tidx: Int32,
    ):
        """Fills a stage for each tile of a work tile.

        The rows of the next tile are always in flight: as a pass of 16 is stored, its registers receive the same pass
        of the next tile. Entries of the index or block table come a tile at a time, one a lane, a tile before that.
        """
        mKV, zero_row, entries, begin, limit, page_divisor = source
        place = self.place(tidx)
        row, segment, _, _, _ = place
        first_row = HALF * rank  # of this CTA's rows of a tile
        position = begin + first_row + row
        last = limit - 1
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        # of the passes to load while a tile is stored, lane 4 p + r has row r of the warp's four in pass p
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

        for t in cutlass.range(tiles.first, tiles.first + tiles.count, unroll=1):
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
                    following = self.find(source, entry, d, row, position, last)
                even, odd, rope = self.targets(smem, place, stage, first_row + ROWS * d)
                if const_expr(self.exchange == "values"):
                    self.send_rope(smem, raw[None, None, d], rope, stage, rank)
                token_cache.store_and_gather(raw[None, None, d], even, odd, rope, following, segment)
            if const_expr(self.exchange == "codes"):
                cute.arch.mbarrier_wait(smem.codes_full.data_ptr() + stage, use % 2)
                for d in cutlass.range_constexpr(PASSES):
                    self.take_codes(smem, place, raw[None, None, d], stage, d, rank, tidx)
                    later = self.find(source, entry, d, row, position, last)
                    token_cache.gather(later, segment, raw[None, None, d])
            entry = self.keys.read_entry(entries, entry_position, last, page_divisor)
            position += TOKENS_PER_TILE
            # no fence here: it would wait for the loads in flight. The QK and PV warpgroups have one
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
    def find(self, source: KeySource, entry: Int32, d: int, row: Int32, position: Int32, last: Int32) -> cute.Pointer:
        """The row that a thread loads when pass d of the tile before is stored."""
        found = cute.arch.shuffle_sync(entry, 4 * d + row % 4)
        later = position + TOKENS_PER_TILE + ROWS * d
        _, address = self.keys.locate(source.cache, source.zero_row, found, later, last, source.page_size)
        return address

    # ---- a row

    def place(self, tidx: Int32) -> PassPlace:
        """What a thread has of a pass: r % 8 is the same in every pass, and so is the swizzle."""
        lane, warp_idx = tidx % 32, tidx // 32
        quarter, odd_row, phase = lane % 4, lane // 4 % 2, lane // 8
        row, half = 4 * warp_idx + 2 * (phase // 2) + odd_row, (phase + odd_row) % 2
        x = row % 8
        start = half * BLOCK + row * BLOCK_COLUMNS
        even, odd = (start + ((2 * quarter + i) ^ x) * 8 for i in range(2))
        rope = row * BLOCK_COLUMNS + ((4 * half + quarter) ^ x) * 8
        return PassPlace(row, 64 * half + 16 * quarter, even, odd, rope)

    @cute.jit
    def targets(self, smem, place: PassPlace, stage: Int32, first_row: Int32) -> PassTargets:
        """Where a thread's row of the pass that begins at `first_row` goes."""
        _, _, even, odd, rope = place
        nope, chunks = smem.nope.data_ptr(), cute.make_layout((8, QUANT_TILES), stride=(1, 2 * BLOCK))
        start = stage * (TOKENS_PER_TILE * NOPE) + first_row * BLOCK_COLUMNS
        sEven = cute.make_tensor(nope + cute.assume(start + even, divby=8), chunks)
        sOdd = cute.make_tensor(nope + cute.assume(start + odd, divby=8), chunks)
        start = stage * (TOKENS_PER_TILE * ROPE) + first_row * BLOCK_COLUMNS
        sRope = cute.make_tensor(smem.rope.data_ptr() + cute.assume(start + rope, divby=8), cute.make_layout(8))
        return PassTargets(sEven, sOdd, sRope)

    # ---- what the CTAs of a cluster send each other

    @cute.jit
    def open_stage(self, smem, stage: Int32, use: Int32, rank: Int32, tidx: Int32):
        """Tells the other CTA that this one's stage is free, and waits until the same is true there.

        Relaxed: it publishes no data. When the other CTA has used the tile before in this stage, copies from here have
        ended as well.
        """
        peer_free = smem.peer_free.data_ptr() + stage
        if tidx == 0:
            if const_expr(self.exchange == "codes"):
                cute.arch.mbarrier_arrive_and_expect_tx(smem.codes_full.data_ptr() + stage, CODES_BYTES)
            cute.arch.mbarrier_arrive(peer_free, 1 - rank, scope=MemScopeKind.CLUSTER, relaxed=True)
        cute.arch.mbarrier_wait(peer_free, use % 2)

    def landing(self, smem, stage: Int32, first_row: Int32, block: int) -> cute.Pointer:
        """Where a stage receives the pass that begins at `first_row`: the pass's own rows in a block, 2 KB."""
        start = stage * (TOKENS_PER_TILE * NOPE) + block * BLOCK + first_row * BLOCK_COLUMNS
        return smem.nope.data_ptr() + cute.assume(start, divby=1024)

    @cute.jit
    def send_codes(self, smem, raw: cute.Tensor, stage: Int32, d: int, rank: Int32, tidx: Int32):
        """Sends this thread's pieces of a row."""
        first_row = HALF * rank + ROWS * d
        barrier = cluster.remote_address(smem.codes_full.data_ptr() + stage, 1 - rank)
        words = cute.recast_tensor(raw, Int32)
        to_piece = cluster.remote_address(self.landing(smem, stage, first_row, 0), 1 - rank) + tidx * 16
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            four = tuple(words[i, piece] for i in range(4))
            cluster.send_words(to_piece + piece * (2 * BLOCK), four, barrier)

    @cute.jit
    def take_codes(self, smem, place: PassPlace, raw: cute.Tensor, stage: Int32, d: int, rank: Int32, tidx: Int32):
        """Widens and stores a row that the other CTA has sent, through the registers of `raw`."""
        first_row = HALF * (1 - rank) + ROWS * d
        for piece in cutlass.range_constexpr(token_cache.PIECES):
            start = cute.recast_ptr(self.landing(smem, stage, first_row, piece), dtype=Uint8)
            own = cute.make_tensor(start + cute.assume(tidx * 16, divby=16), cute.make_layout(16))
            cute.autovec_copy(own, raw[None, piece])
        # all have read what lies where the rows go
        cute.arch.barrier(barrier_id=NamedBarrier.LOAD, number_of_threads=THREADS)
        even, odd, rope = self.targets(smem, place, stage, first_row)
        token_cache.store_and_gather(raw, even, odd, rope, None, Int32(0))

    @cute.jit
    def send_rope(self, smem, raw: cute.Tensor, rope: cute.Tensor, stage: Int32, rank: Int32):
        """Sends this thread's chunk of the rope part from registers: P takes its place before a copy would end."""
        words = cute.recast_tensor(raw, Int32)
        four = tuple(words[i, 4] for i in range(4))
        barrier = cluster.remote_address(smem.full.data_ptr() + stage, 1 - rank)
        cluster.send_words(cluster.remote_address(rope.iterator, 1 - rank), four, barrier)

    @cute.jit
    def send_values(self, smem, stage: Int32, rank: Int32, tidx: Int32):
        """Copies the own rows of a stage to the other CTA."""
        # a bulk copy counts on the barrier that it names: the receiver's
        there = cluster.remote_address(smem.full.data_ptr() + stage, 1 - rank)
        barrier = cute.make_ptr(Int64, there, AddressSpace.smem, assumed_align=8)
        cute.arch.barrier(barrier_id=NamedBarrier.LOAD, number_of_threads=THREADS)  # all own rows are written
        if tidx < WARP:
            cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by bulk copies
            if tidx < BLOCKS:
                copy = cute.make_copy_atom(cpasync.CopyBulkS2SOp(), Float16)
                start = stage * (TOKENS_PER_TILE * NOPE) + tidx * BLOCK + HALF * rank * BLOCK_COLUMNS
                block = smem.nope.data_ptr() + cute.assume(start, divby=HALF * BLOCK_COLUMNS)
                rows = cute.make_tensor(block, cute.make_layout(HALF * BLOCK_COLUMNS))
                cute.copy(copy, rows, rows, mbar_ptr=barrier, cta_rank=1 - rank)
