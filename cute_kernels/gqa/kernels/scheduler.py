"""The work list of GQA decoding: which tiles of which sequences a range reads, from the lengths alone.

The tiles of all sequences form a line; a sequence without visible keys counts one tile, since its result must be
written. The line is cut into `ranges` of equal length (to a tile), each decoded by one CTA per head and block of query
rows, so a CTA reads a part of one sequence, then whole ones, then a part. Where `splits` > 0 each sequence is cut into
so many ranges instead. A cluster shares one sequence evenly.

Nothing is prepared on the host and nothing is kept: a warp reads the lengths when it starts, so a captured launch
follows lengths that change between replays.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.gqa.kernels.arguments import GridFacts
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32


class WorkList(NamedTuple):
    """What the scheduler needs of a launch.

    lengths      (batch,) int32, any value: clamped before it is used
    capacity     tokens that a sequence can have
    window, s_q  of the call
    grid         how the line is cut
    head_blocks, blocks, ranges, splits   fast divisors, see `Divisors`
    """

    lengths: cute.Tensor
    capacity: Int32
    window: Int32
    s_q: Int32
    grid: GridFacts
    head_blocks: Any
    blocks: Any
    ranges: Any
    splits: Any


class WorkTile(NamedTuple):
    """A head of the cache, a block of its query rows, both as one number, and a range of the line."""

    kv_head: Int32
    block: Int32
    head_block: Int32
    range_idx: Int32


class Extent(NamedTuple):
    """Of a sequence: keys, the first tile with a key in a window, tiles from there on."""

    length: Int32
    first_tile: Int32
    tiles: Int32


class Survey(NamedTuple):
    """What a lane knows of the line: tiles before its sequences, tiles of its sequences, all tiles."""

    tiles_before: Int32
    own_tiles: Int32
    all_tiles: Int32


class RangeStart(NamedTuple):
    """Where a range begins: sequence, tile in it, tiles to do, and the sequence's first tile in the line."""

    batch_idx: Int32
    offset: Int32
    tiles: Int32
    line: Int32


class Sharers(NamedTuple):
    """The ranges that share a sequence: the first, and how many."""

    first_range: Int32
    count: Int32


class Scheduler:
    """Device code for any warp."""

    def __init__(self, spec: GqaDecodeSpec):
        self.tile_keys = spec.keys_per_tile
        self.cluster = spec.cluster

    @cute.jit
    def work_tile(self, number: Int32, work: WorkList) -> WorkTile:
        """Work tile `number`.

        Neighbouring CTAs read the heads of the same tokens, or are the cluster that shares a sequence and head.
        """
        if const_expr(self.cluster > 1):
            b, head_block = divmod(number // self.cluster, work.head_blocks)
            range_idx = b * self.cluster + number % self.cluster
        else:
            range_idx, head_block = divmod(number, work.head_blocks)
        kv_head, block = divmod(head_block, work.blocks)
        return WorkTile(kv_head, block, head_block, range_idx)

    @cute.jit
    def extent(self, work: WorkList, b: Int32) -> Extent:
        """Which tiles of sequence b are read."""
        length = cutlass.min(cutlass.max(work.lengths[b], 0), work.capacity)
        first = cutlass.max(length - work.s_q - work.window + 1, 0) // self.tile_keys
        tiles = cutlass.max(cute.ceil_div(length, self.tile_keys) - first, 1)
        return Extent(length, first, tiles)

    @cute.jit
    def survey(self, work: WorkList, lane: Int32) -> Survey:
        """Sums up the line, lane i the i-th of 32 parts of the batch. A cluster has one sequence and needs no sum."""
        if const_expr(self.cluster > 1):
            return Survey(Int32(0), Int32(0), Int32(0))
        batch = Int32(work.lengths.shape[0])
        part = cute.ceil_div(batch, WARP)
        mine = Int32(0)
        for i in cutlass.range(part, unroll=2):
            b = lane * part + i
            tiles = self.extent(work, cutlass.min(b, batch - 1)).tiles
            mine += cutlass.select_(b < batch, tiles, Int32(0))
        sum_to_here = mine
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(sum_to_here, 1 << step)
            sum_to_here += cutlass.select_(lane >= (1 << step), other, Int32(0))
        return Survey(sum_to_here - mine, mine, cute.arch.shuffle_sync(sum_to_here, WARP - 1))

    @cute.jit
    def start_of_part(self, part: Int32, total: Int32, parts: Int32, divisor) -> Int32:
        """Where a part of `total` tiles begins: part * total // parts; one tile for each where there are fewer tiles.

        `divisor` is that of `parts`. The host keeps parts * total below 2^31.
        """
        start, _ = divmod(part * total, divisor)
        return cutlass.select_(total < parts, cutlass.min(part, total), start)

    @cute.jit
    def locate(self, work: WorkList, survey: Survey, position: Int32):
        """The sequence that has a tile of the line, and the sequence's first tile in the line."""
        part = cute.ceil_div(Int32(work.lengths.shape[0]), WARP)
        owner = cute.arch.popc(cute.arch.vote_ballot_sync(survey.tiles_before <= position)) - 1
        start = cute.arch.shuffle_sync(survey.tiles_before, owner)
        tiles = cute.arch.shuffle_sync(survey.own_tiles, owner)
        b = owner * part
        if part > 1:
            tiles = self.extent(work, b).tiles
        while start + tiles <= position:
            start += tiles
            b += 1
            tiles = self.extent(work, b).tiles
        return b, start

    @cute.jit
    def range_start(self, work: WorkList, survey: Survey, range_idx: Int32) -> RangeStart:
        """Where a range begins and how many tiles it has: 0 where there are fewer tiles than ranges."""
        if const_expr(self.cluster > 1):
            sequence, rank = range_idx // self.cluster, range_idx % self.cluster
            all_tiles = self.extent(work, sequence).tiles
            first = all_tiles * rank // self.cluster
            return RangeStart(sequence, first, all_tiles * (rank + 1) // self.cluster - first, Int32(0))
        grid = work.grid
        b, offset, count, line = Int32(0), Int32(0), Int32(0), Int32(0)
        if grid.splits > 0:
            b, part = divmod(range_idx, work.splits)
            tiles = self.extent(work, b).tiles
            offset = self.start_of_part(part, tiles, grid.splits, work.splits)
            count = self.start_of_part(part + 1, tiles, grid.splits, work.splits) - offset
        else:
            begin = self.start_of_part(range_idx, survey.all_tiles, grid.ranges, work.ranges)
            count = self.start_of_part(range_idx + 1, survey.all_tiles, grid.ranges, work.ranges) - begin
            if count > 0:
                b, line = self.locate(work, survey, begin)
                offset = begin - line
        return RangeStart(b, offset, count, line)

    @cute.jit
    def sharers(self, work: WorkList, survey: Survey, b: Int32, line: Int32, tiles: Int32) -> Sharers:
        """The ranges that share sequence b, whose tiles begin at `line` of the line."""
        grid = work.grid
        first, count = b * grid.splits, cutlass.min(grid.splits, tiles)
        if grid.splits == 0:
            used = cutlass.min(grid.ranges, survey.all_tiles)
            first = ((line + 1) * used - 1) // survey.all_tiles
            count = ((line + tiles) * used - 1) // survey.all_tiles - first + 1
        return Sharers(first, count)
