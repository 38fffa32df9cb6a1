"""The balanced schedule of the decode kernel: which key tiles of which sequences a work tile has, from lengths alone.

The key tiles of all sequences form a line. A sequence without visible keys counts as one tile, since its result must be
written. The line is cut into `ranges` of equal length (to a tile); a CTA decodes one range for one block of query rows:
the end of one sequence, then whole sequences, then the beginning of another. If `splits` > 0 the schedule is uniform
instead: each sequence is cut into that many ranges. A cluster shares one sequence evenly.

The host prepares nothing and the device keeps nothing: each warp reads the lengths when it starts, so a captured launch
follows lengths that change between replays.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.gqa.kernels.arguments import Divisors, Sizes, Work
from cute_kernels.gqa.spec import GqaDecodeSpec

WARP = 32


class WorkList(NamedTuple):
    """The inputs of the schedule."""

    mLengths: cute.Tensor
    mStarts: Any  # a tensor, or None
    sizes: Sizes
    work: Work
    divisors: Divisors


class Given(NamedTuple):
    """A sequence in the caller's arguments: its length, and its first key, 0 if that is the first token."""

    length: Int32
    start: Int32


class Extent(NamedTuple):
    """A sequence: its keys, the first tile that a query sees, the number of tiles from there on, and its first key.

    If the first key is past the last one, there are no keys.
    """

    keys: Int32
    first: Int32
    tiles: Int32
    start: Int32


class Survey(NamedTuple):
    """A lane's view of the line: tiles before its sequences, tiles of its sequences, and all tiles."""

    preceding: Int32
    own: Int32
    total: Int32


class WorkTile(NamedTuple):
    """A range of the line for one block of query rows.

    kv_head     head of the cache
    block       block of its query rows
    head_block  kv_head and block as one number
    range       number of the range; with splits or clusters, sequence x splits + split
    """

    kv_head: Int32
    block: Int32
    head_block: Int32
    range: Int32


class Upcoming(NamedTuple):
    """A key tile ahead of a role's current one, among the tiles with keys of a range, one sequence after the other.

    sequence, tile  number of the sequence, and of its tile
    stop            the sequence's tiles in this range end before that one
    left            later tiles of the range, those of sequences without keys included
    length          keys of the sequence
    """

    sequence: Int32
    tile: Int32
    stop: Int32
    left: Int32
    length: Int32


class Assignment(NamedTuple):
    """The beginning of a range: `offset` tiles into a sequence that begins at tile `line` of the line; `tiles` long."""

    sequence: Int32
    offset: Int32
    tiles: Int32
    line: Int32


class Sharers(NamedTuple):
    """The ranges that share a sequence: the first one, and their number."""

    first: Int32
    count: Int32


class Scheduler:
    """Device code that every role of `GqaDecodeKernel` runs by itself, so that all agree without communication."""

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec

    @cute.jit
    def work_tile(self, work_list: WorkList, index: Int32) -> WorkTile:
        """Returns the index-th work tile.

        Neighbouring CTAs read the heads of the same tokens, or are the cluster that shares a sequence and head.
        """
        divisors = work_list.divisors
        if const_expr(self.spec.cluster > 1):
            b, head_block = divmod(index // self.spec.cluster, divisors.head_blocks)
            r = b * self.spec.cluster + index % self.spec.cluster
        else:
            r, head_block = divmod(index, divisors.head_blocks)
        kv_head, block = divmod(head_block, divisors.blocks)
        return WorkTile(kv_head, block, head_block, r)

    def extent(self, work_list: WorkList, b: Int32) -> Extent:
        """Returns the extent of sequence b."""
        return self.extent_of(work_list, self.given(work_list, b))

    def given(self, work_list: WorkList, b: Int32) -> Given:
        """Starts loading the caller's length and first key of sequence b."""
        start = work_list.mStarts[b] if self.spec.starts else Int32(0)
        return Given(work_list.mLengths[b], start)

    @cute.jit
    def extent_of(self, work_list: WorkList, given: Given) -> Extent:
        """Returns the extent of a sequence from its loaded length and first key."""
        sizes, keys = work_list.sizes, self.spec.keys_per_tile
        start = cutlass.max(given.start, 0)
        length = cutlass.min(cutlass.max(given.length, 0), sizes.capacity)
        if const_expr(self.spec.starts):
            length = cutlass.select_(start < length, length, Int32(0))
            start = cutlass.min(start, length)
        first = cutlass.max(length - sizes.s_q - sizes.window + 1, start) // keys
        tiles = cutlass.max(cute.ceil_div(length, keys) - first, 1)
        return Extent(length, first, tiles, start)

    @cute.jit
    def survey(self, work_list: WorkList, lane: Int32) -> Survey:
        """Adds up all sequences, lane i the i-th of 32 parts of the batch. Clusters need no sums and get zeros."""
        if const_expr(self.spec.cluster > 1):
            return Survey(Int32(0), Int32(0), Int32(0))
        batch = Int32(work_list.mLengths.shape[0])
        per_lane = cute.ceil_div(batch, WARP)
        own = Int32(0)
        for i in cutlass.range(per_lane, unroll=2):
            b = lane * per_lane + i
            _, _, tiles, _ = self.extent(work_list, cutlass.min(b, batch - 1))
            own += cutlass.select_(b < batch, tiles, Int32(0))
        prefix_sum = own
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(prefix_sum, 1 << step)
            prefix_sum += cutlass.select_(lane >= (1 << step), other, Int32(0))
        return Survey(prefix_sum - own, own, cute.arch.shuffle_sync(prefix_sum, WARP - 1))

    @cute.jit
    def assignment(self, work_list: WorkList, survey: Survey, r: Int32) -> Assignment:
        """Returns range r; it has 0 tiles if there are fewer tiles than ranges."""
        if const_expr(self.spec.cluster > 1):
            b, rank = r // self.spec.cluster, r % self.spec.cluster
            _, _, tiles, _ = self.extent(work_list, b)
            offset = tiles * rank // self.spec.cluster
            return Assignment(b, offset, tiles * (rank + 1) // self.spec.cluster - offset, Int32(0))
        return self._range_of_line(work_list, survey, r)

    @cute.jit
    def first_upcoming(self, work_list: WorkList, assigned: Assignment) -> Upcoming:
        """Returns the first tile with keys of a range; past `stop` if there is none."""
        b, offset, left, _ = assigned
        length, first, tiles, _ = self.extent(work_list, b)
        stop = cutlass.min(offset + left, tiles)
        left -= stop - offset
        tile, stop = first + offset, first + stop
        if length == 0:
            stop = tile
        return self.skip_ended(work_list, Upcoming(b, tile, stop, left, length))

    @cute.jit
    def skip_ended(self, work_list: WorkList, upcoming: Upcoming) -> Upcoming:
        """Moves on to the next sequences if this one has ended; at the end of the range `tile` stays past `stop`."""
        b, tile, stop, left, length = upcoming
        while tile >= stop and left > 0:
            b += 1
            past = tile - stop
            length, first, tiles, _ = self.extent(work_list, b)
            count = cutlass.min(left, tiles)
            left -= count
            tile, stop = first + past, first + cutlass.select_(length > 0, count, Int32(0))
        return Upcoming(b, tile, stop, left, length)

    @cute.jit
    def _range_of_line(self, work_list: WorkList, survey: Survey, r: Int32) -> Assignment:
        """Does what `assignment` does, without clusters."""
        work, divisors = work_list.work, work_list.divisors
        b, offset, count, line = Int32(0), Int32(0), Int32(0), Int32(0)
        if work.splits > 0:
            b, split = divmod(r, divisors.splits)
            _, _, tiles, _ = self.extent(work_list, b)
            offset = range_start(split, tiles, work.splits, divisors.splits)
            count = range_start(split + 1, tiles, work.splits, divisors.splits) - offset
        else:
            begin = range_start(r, survey.total, work.ranges, divisors.ranges)
            count = range_start(r + 1, survey.total, work.ranges, divisors.ranges) - begin
            if count > 0:
                b, line = self._locate(work_list, survey, begin)
                offset = begin - line
        return Assignment(b, offset, count, line)

    @cute.jit
    def _locate(self, work_list: WorkList, survey: Survey, position: Int32):
        """Returns (sequence, its first tile in the line) of a tile of the line."""
        per_lane = cute.ceil_div(Int32(work_list.mLengths.shape[0]), WARP)
        owner = cute.arch.popc(cute.arch.vote_ballot_sync(survey.preceding <= position)) - 1
        start = cute.arch.shuffle_sync(survey.preceding, owner)
        tiles = cute.arch.shuffle_sync(survey.own, owner)
        b = owner * per_lane
        if per_lane > 1:
            _, _, tiles, _ = self.extent(work_list, b)
        while start + tiles <= position:
            start += tiles
            b += 1
            _, _, tiles, _ = self.extent(work_list, b)
        return b, start

    @cute.jit
    def sharers(self, work_list: WorkList, b: Int32, line: Int32, tiles: Int32, total: Int32) -> Sharers:
        """Returns the ranges that share sequence b, whose `tiles` of `total` tiles begin at tile `line` of the line."""
        ranges, splits = work_list.work.ranges, work_list.work.splits
        first, count = b * splits, cutlass.min(splits, tiles)
        if splits == 0:
            used = cutlass.min(ranges, total)
            first = ((line + 1) * used - 1) // total
            count = ((line + tiles) * used - 1) // total - first + 1
        return Sharers(first, count)


@cute.jit
def range_start(r: Int32, total: Int32, ranges: Int32, divisor) -> Int32:
    """Returns r * total // ranges, where range r begins; with fewer tiles than ranges, one tile for each range.

    `divisor` divides by ranges: dividing by a number that only the device knows takes 100 cycles. The host keeps ranges
    * total below 2^31.
    """
    start, _ = divmod(r * total, divisor)
    return cutlass.select_(total < ranges, cutlass.min(r, total), start)
