"""The load warpgroup of the crossover kernel: gathers half of the rows of each key tile and stores them as float16."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, const_expr

from cute_kernels.device import token_cache
from cute_kernels.device.trace import Tracer
from cute_kernels.mla.crossover.kernels.arguments import KeySource
from cute_kernels.mla.crossover.kernels.exchange import Exchange
from cute_kernels.mla.crossover.kernels.pipelines import pipelines
from cute_kernels.mla.crossover.kernels.rows import row_part, row_targets
from cute_kernels.mla.crossover.kernels.tile import HALF, PASSES, ROWS, WARP
from cute_kernels.mla.crossover.spec import EVENTS, ROLES, MlaCrossoverSpec
from cute_kernels.mla.kernels.key_finder import KeyFinder
from cute_kernels.mla.kernels.scheduler import Scheduler, WorkTable
from cute_kernels.mla.spec import TOKENS_PER_TILE


class LoadWarpgroup:
    """Device code for 128 threads. The CTA of rank r gathers rows 32 r to 32 r + 31 of each key tile.

    The other 32 rows come from the other CTA of the cluster (exchange.py).
    """

    def __init__(self, spec: MlaCrossoverSpec):
        self.exchange = spec.exchange
        self.peer = Exchange(spec)
        self.finder = KeyFinder(spec.sparse)
        _, self.keys, _, _, self.codes = pipelines(spec)
        self.scheduler = Scheduler(spec)
        self.tracer = Tracer(spec.trace, len(ROLES))

    @cute.jit
    def run(self, smem, table: WorkTable, rank: Int32, tid: Int32):
        """Loads the key tiles of all work tiles of this CTA."""
        first_work, end_work, step = table.share.first, table.share.end, table.share.step
        done = Int32(0)  # key tiles of earlier work tiles
        for index in cutlass.range(first_work, end_work, step, unroll=1):
            work = self.scheduler.locate(index, table)
            length = self.scheduler.length(work, table.mLength)
            keys = self.scheduler.keys(index, work, length, table)
            if keys.tiles > 0:
                entries = self.scheduler.entries(work, table.mIndex)
                page_size = table.divisors.page_size
                source = KeySource(table.mKV, table.zero_row, entries, keys.begin, keys.limit, page_size)
                self.load_work_tile(smem, source, done, keys.tiles, rank, tid)
            done += keys.tiles

    @cute.jit
    def load_work_tile(self, smem, keys: KeySource, done: Int32, tiles: Int32, rank: Int32, tid: Int32):
        """Loads the key tiles done, done + 1, ... of a work tile.

        The rows of the next key tile are always in flight: once a pass of 16 rows is stored, its registers receive the
        same pass of the next tile. Entries of the index list or block table come one tile earlier still, one a lane.
        """
        part = row_part(tid)
        first_row = HALF * rank  # first row of this CTA's half
        position = keys.begin + first_row + part.row
        last = keys.limit - 1
        # lane 4 p + r has the entry of row r of the warp's four rows in pass p
        lane, warp_idx = tid % WARP, tid // WARP
        entry_position = keys.begin + first_row + 4 * warp_idx + lane % 4 + ROWS * (lane // 4 % PASSES)
        first_entry = self.finder.read_entry(keys.entries, entry_position, last, keys.page_size)
        entry_position += TOKENS_PER_TILE
        entry = self.finder.read_entry(keys.entries, entry_position, last, keys.page_size)

        raw = cute.make_rmem_tensor((16, token_cache.PIECES, PASSES), Uint8)
        for p in cutlass.range_constexpr(PASSES):
            own_entry = cute.arch.shuffle_sync(first_entry, 4 * p + part.row % 4)
            row_position = position + ROWS * p
            _, row = self.finder.locate(keys.mKV, keys.zero_row, own_entry, row_position, last, keys.page_size)
            token_cache.gather(row, part.column, raw[None, None, p])

        for t in cutlass.range(done, done + tiles, unroll=1):
            stage = self.keys.index(t)
            self.stamp(smem, t, 0, 0, tid)
            self.keys.acquire(smem, t)
            self.stamp(smem, t, 0, 1, tid)
            self.stamp(smem, t, 1, 0, tid)
            self.peer.open_stage(smem, t, rank, tid)
            if const_expr(self.exchange == "codes"):
                for p in cutlass.range_constexpr(PASSES):
                    self.peer.send_codes(smem, raw[None, None, p], stage, p, rank, tid)
            entry_position += TOKENS_PER_TILE
            for p in cutlass.range_constexpr(PASSES):
                next_row = None
                if const_expr(self.exchange != "codes"):  # with codes the registers receive the other CTA's rows first
                    next_row = self.next_row(keys, entry, p, part.row, position, last)
                target = row_targets(smem, part, stage, first_row + ROWS * p)
                if const_expr(self.exchange == "values"):
                    self.peer.send_rope(smem, raw[None, None, p], target.rope, stage, rank)
                token_cache.store_and_gather(
                    raw[None, None, p], target.even, target.odd, target.rope, next_row, part.column
                )
            if const_expr(self.exchange == "codes"):
                self.codes.wait(smem, t)
                for p in cutlass.range_constexpr(PASSES):
                    self.peer.take_codes(smem, part, raw[None, None, p], stage, p, rank, tid)
                    row = self.next_row(keys, entry, p, part.row, position, last)
                    token_cache.gather(row, part.column, raw[None, None, p])
            entry = self.finder.read_entry(keys.entries, entry_position, last, keys.page_size)
            position += TOKENS_PER_TILE
            # no fence here: it would wait for the loads in flight. QK and PV have a fence
            if const_expr(self.exchange == "values"):
                self.peer.send_values(smem, stage, rank, tid)
            self.stamp(smem, t, 1, 1, tid)
            if const_expr(self.exchange == "values"):
                if tid == 0:
                    self.keys.arrive_and_expect(smem, t)
                else:
                    self.keys.arrive(smem, t)
            else:
                self.keys.arrive(smem, t)

    @cute.jit
    def next_row(
        self, keys: KeySource, entry: Int32, row_pass: int, row: Int32, position: Int32, last: Int32
    ) -> cute.Pointer:
        """Returns the row of the next key tile that a thread loads; `position` is the pass's first row in this tile."""
        own_entry = cute.arch.shuffle_sync(entry, 4 * row_pass + row % 4)
        row_position = position + TOKENS_PER_TILE + ROWS * row_pass
        _, address = self.finder.locate(keys.mKV, keys.zero_row, own_entry, row_position, last, keys.page_size)
        return address

    @cute.jit
    def stamp(self, smem, t: Int32, event: cutlass.Constexpr, edge: cutlass.Constexpr, tid: Int32):
        """Stores a timestamp of a key tile."""
        self.tracer.stamp(smem.trace.ptr, 0, len(EVENTS[0]) * t + event, edge, tid == 0)
