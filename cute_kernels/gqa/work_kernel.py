"""The work list of the decode kernel: which tiles of which sequences a range of CTAs reads, from the lengths alone.

The tiles of all sequences form a line; a sequence without visible keys counts one tile, since its result must be
written. The line is cut into `ranges` of equal length (to a tile), each decoded by one CTA per head, so a CTA reads a
part of one sequence, then whole ones, then a part. Where `splits` > 0 each sequence is cut into so many ranges instead.

Nothing is prepared on the host and nothing is kept: a warp reads the lengths when it starts, so a captured launch
follows lengths that change between replays.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gqa.spec import KEYS_PER_TILE

WARP = 32


@cute.jit
def extent(mLengths: cute.Tensor, b: Int32, limits: tuple):
    """(keys, first tile with a key in a window, tiles from there on) of sequence b.

    limits: (capacity, window, s_q).
    """
    capacity, window, s_q = limits
    length = cutlass.min(cutlass.max(mLengths[b], 0), capacity)
    first = cutlass.max(length - s_q - window + 1, 0) // KEYS_PER_TILE
    tiles = cutlass.max(cute.ceil_div(length, KEYS_PER_TILE) - first, 1)
    return length, first, tiles


@cute.jit
def survey(mLengths: cute.Tensor, limits: tuple, lane: Int32):
    """(tiles before those of this lane's sequences, all tiles); lane i has the i-th of 32 parts of the batch."""
    batch = Int32(mLengths.shape[0])
    part = cute.ceil_div(batch, WARP)
    mine = Int32(0)
    for i in cutlass.range(part, unroll=4):
        b = lane * part + i
        _, _, tiles = extent(mLengths, cutlass.min(b, batch - 1), limits)
        mine += cutlass.select_(b < batch, tiles, Int32(0))
    sum_to_here = mine
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(sum_to_here, 1 << step)
        sum_to_here += cutlass.select_(lane >= (1 << step), other, Int32(0))
    return sum_to_here - mine, cute.arch.shuffle_sync(sum_to_here, WARP - 1)


@cute.jit
def range_start(r: Int32, total: Int32, ranges: Int32) -> Int32:
    """Where range r of the line begins: r * total // ranges, without its 32-bit overflow."""
    return r * (total // ranges) + r * (total % ranges) // ranges


@cute.jit
def range_of(position: Int32, total: Int32, ranges: Int32) -> Int32:
    """The range that a tile of the line is in."""
    return Int32(((Int64(position) + 1) * Int64(ranges) - 1) // Int64(total))


@cute.jit
def locate(mLengths: cute.Tensor, limits: tuple, before: Int32, position: Int32):
    """(sequence, tile in it) of a tile of the line; `before` is what `survey` said."""
    part = cute.ceil_div(Int32(mLengths.shape[0]), WARP)
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(before <= position)) - 1
    start = cute.arch.shuffle_sync(before, owner)
    b = owner * part
    _, _, tiles = extent(mLengths, b, limits)
    while start + tiles <= position:
        start += tiles
        b += 1
        _, _, tiles = extent(mLengths, b, limits)
    return b, position - start


@cute.jit
def assignment(
    mLengths: cute.Tensor, limits: tuple, before: Int32, total: Int32, r: Int32, ranges: Int32, splits: Int32
):
    """(sequence, tile in it, tiles to do) at the start of range r; 0 tiles where there are fewer tiles than ranges."""
    b, offset, count = Int32(0), Int32(0), Int32(0)
    if splits > 0:
        b = r // splits
        _, _, tiles = extent(mLengths, b, limits)
        used = cutlass.min(splits, tiles)
        part = r % splits
        if part < used:
            offset = range_start(part, tiles, used)
            count = range_start(part + 1, tiles, used) - offset
    else:
        used = cutlass.min(ranges, total)
        if r < used:
            begin = range_start(r, total, used)
            count = range_start(r + 1, total, used) - begin
            b, offset = locate(mLengths, limits, before, begin)
    return b, offset, count


@cute.jit
def sharers(b: Int32, line: Int32, tiles: Int32, total: Int32, ranges: Int32, splits: Int32):
    """(first range, how many) that share sequence b, whose tiles begin at `line` of the line."""
    first, count = b * splits, cutlass.min(splits, tiles)
    if splits == 0:
        used = cutlass.min(ranges, total)
        first = range_of(line, total, used)
        count = range_of(line + tiles - 1, total, used) - first + 1
    return first, count
