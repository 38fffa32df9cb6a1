"""The work list of the decode kernel: which tiles of which sequences a range of CTAs reads, from the lengths alone.

The tiles of all sequences form a line; a sequence without visible keys counts one tile, since its result must be
written. The line is cut into `ranges` of equal length (to a tile), each decoded by one CTA per head, so a CTA reads a
part of one sequence, then whole ones, then a part. Where `splits` > 0 each sequence is cut into so many ranges instead.

Nothing is prepared on the host and nothing is kept: a warp reads the lengths when it starts, so a captured launch
follows lengths that change between replays.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARP = 32


@cute.jit
def extent(mLengths: cute.Tensor, b: Int32, limits: tuple):
    """(keys, first tile with a key in a window, tiles from there on) of sequence b.

    limits: (capacity, window, s_q, keys of a tile, a Python number).
    """
    capacity, window, s_q, keys = limits
    length = cutlass.min(cutlass.max(mLengths[b], 0), capacity)
    first = cutlass.max(length - s_q - window + 1, 0) // keys
    tiles = cutlass.max(cute.ceil_div(length, keys) - first, 1)
    return length, first, tiles


@cute.jit
def survey(mLengths: cute.Tensor, limits: tuple, lane: Int32):
    """(tiles before those of this lane's sequences, those of its sequences, all tiles).

    Lane i has the i-th of 32 parts of the batch.
    """
    batch = Int32(mLengths.shape[0])
    part = cute.ceil_div(batch, WARP)
    mine = Int32(0)
    for i in cutlass.range(part, unroll=2):
        b = lane * part + i
        _, _, tiles = extent(mLengths, cutlass.min(b, batch - 1), limits)
        mine += cutlass.select_(b < batch, tiles, Int32(0))
    sum_to_here = mine
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(sum_to_here, 1 << step)
        sum_to_here += cutlass.select_(lane >= (1 << step), other, Int32(0))
    return sum_to_here - mine, mine, cute.arch.shuffle_sync(sum_to_here, WARP - 1)


@cute.jit
def range_start(r: Int32, total: Int32, ranges: Int32, divisor) -> Int32:
    """Where range r begins: r * total // ranges; one tile for each where there are fewer tiles. `divisor` is ranges.

    The host keeps ranges * total below 2^31. A division by what only the device knows takes 100 cycles.
    """
    start, _ = divmod(r * total, divisor)
    return cutlass.select_(total < ranges, cutlass.min(r, total), start)


@cute.jit
def locate(mLengths: cute.Tensor, limits: tuple, known: tuple, position: Int32):
    """(sequence, its first tile in the line) of a tile of the line; `known` is what `survey` said."""
    before, mine, _ = known
    part = cute.ceil_div(Int32(mLengths.shape[0]), WARP)
    owner = cute.arch.popc(cute.arch.vote_ballot_sync(before <= position)) - 1
    start = cute.arch.shuffle_sync(before, owner)
    tiles = cute.arch.shuffle_sync(mine, owner)
    b = owner * part
    if part > 1:
        _, _, tiles = extent(mLengths, b, limits)
    while start + tiles <= position:
        start += tiles
        b += 1
        _, _, tiles = extent(mLengths, b, limits)
    return b, start


@cute.jit
def assignment(mLengths: cute.Tensor, limits: tuple, known: tuple, r: Int32, cut: tuple):
    """(sequence, tile in it, tiles to do, tile of the line at which the sequence begins) of range r.

    0 tiles where there are fewer tiles than ranges.
    """
    ranges, splits, range_divisor, split_divisor = cut
    b, offset, count, line = Int32(0), Int32(0), Int32(0), Int32(0)
    if splits > 0:
        b, part = divmod(r, split_divisor)
        _, _, tiles = extent(mLengths, b, limits)
        offset = range_start(part, tiles, splits, split_divisor)
        count = range_start(part + 1, tiles, splits, split_divisor) - offset
    else:
        _, _, total = known
        begin = range_start(r, total, ranges, range_divisor)
        count = range_start(r + 1, total, ranges, range_divisor) - begin
        if count > 0:
            b, line = locate(mLengths, limits, known, begin)
            offset = begin - line
    return b, offset, count, line


@cute.jit
def sharers(b: Int32, line: Int32, tiles: Int32, total: Int32, cut: tuple):
    """(first range, how many) that share sequence b, whose tiles begin at `line` of the line."""
    ranges, splits, _, _ = cut
    first, count = b * splits, cutlass.min(splits, tiles)
    if splits == 0:
        used = cutlass.min(ranges, total)
        first = ((line + 1) * used - 1) // total
        count = ((line + tiles) * used - 1) // total - first + 1
    return first, count
