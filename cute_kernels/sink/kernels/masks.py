"""Which keys a query sees: key ranges of blocks of queries, query ranges of blocks of keys, and masks of tiles.

Query i of a sequence has position i + s_k - s_q among the keys. It sees keys up to its position + `reach`. With a
window it sees only keys above its position - `window`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import wgmma
from cute_kernels.sink.spec import ROWS

UNLIMITED = 1 << 30  # the reach where attention is not causal
NEVER = 1 << 30  # above every query and every key


class Visibility(NamedTuple):
    """The mask of a call: how many keys a query sees at most, its own included, and how far past its position."""

    window: Int32
    reach: Int32


@cute.jit
def visibility(window: Int32, causal: Int32) -> Visibility:
    """Makes the visibility from the arguments of a launch."""
    return Visibility(window, Int32(0) if causal != 0 else Int32(UNLIMITED))


class TileRange(NamedTuple):
    """Tiles of keys (or queries) from `begin` on that a work tile meets."""

    begin: Int32
    tiles: Int32


class QueryLimits(NamedTuple):
    """The key tiles that 64 query rows see, and the mask of this thread's rows 0 and 1.

    first_tile, end_tile  range of tiles that any row sees; it has at least one tile, which may be masked altogether
    full_from, full_to    range of tiles that every row sees as a whole; these need no mask
    end0, end1, start0    row r sees keys from start_r to below end_r, relative to this thread's first column; start1 is
                          start0 + 8
    """

    first_tile: Int32
    end_tile: Int32
    full_from: Int32
    full_to: Int32
    end0: Int32
    end1: Int32
    start0: Int32


class QueryMasks:
    """Masks of query blocks in a query-stationary kernel. Limits count keys from the beginning of the key range."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def key_range(self, first: Int32, s_q: Int32, s_k: Int32, visible: Visibility) -> TileRange:
        """Returns the key tiles that a CTA's rows from `first` on see; if they see no key, it is one tile of zeros.

        Tiles begin at multiples of their size, also with a window, so that a row's bits do not depend on the block.
        """
        shift = s_k - s_q
        begin, end = Int32(0), cutlass.min(s_k, cutlass.min(first + self.spec.rows, s_q) + shift + visible.reach)
        if const_expr(self.spec.window):
            begin = cutlass.max(0, first + shift - visible.window + 1) // self.spec.tile * self.spec.tile
        if end <= begin:
            begin = s_k  # past the last key, where TMA fills with zeros
        tiles = cutlass.max((end - begin + self.spec.tile - 1) // self.spec.tile, 1)
        return TileRange(begin, tiles)

    @cute.jit
    def limits(
        self, first: Int32, s_q: Int32, s_k: Int32, keys: TileRange, visible: Visibility, tid: Int32
    ) -> QueryLimits:
        """Returns the limits of rows `first` to `first` + 63."""
        spec = self.spec
        shift = s_k - s_q - keys.begin
        count = s_k - keys.begin
        end = cutlass.min(count, cutlass.min(first + ROWS, s_q) + shift + visible.reach)
        end_tile = cutlass.max(cutlass.min((end + spec.tile - 1) // spec.tile, keys.tiles), 1)
        first_tile, full_from = Int32(0), Int32(0)
        if const_expr(spec.window):
            first_tile = cutlass.min(cutlass.max(first + shift - visible.window + 1, 0) // spec.tile, end_tile - 1)
            # from this tile on, the last row sees the first key
            full_from = (cutlass.max(first + ROWS + shift - visible.window, 0) + spec.tile - 1) // spec.tile
        # below this tile, the first row sees the last key
        full_to = cutlass.max(cutlass.min(count, first + shift + 1 + visible.reach), 0) // spec.tile
        column = 2 * (tid % 4)  # column of this thread's element 0
        ends = [cutlass.min(count, first + wgmma.row(tid, r) + shift + 1 + visible.reach) - column for r in range(2)]
        start = first + wgmma.row(tid, 0) + shift + 1 - visible.window - column
        return QueryLimits(first_tile, end_tile, full_from, full_to, ends[0], ends[1], start)

    @cute.jit
    def mask(self, acc_s: cute.Tensor, tile: Int32, limits: QueryLimits):
        """Sets S to -inf where a row does not see a key. Tiles that every row sees as a whole are skipped."""
        spec = self.spec
        s = wgmma.by_row(acc_s)
        if tile >= limits.full_to:
            for r in cutlass.range_constexpr(2):
                end = (limits.end1 if const_expr(r == 1) else limits.end0) - tile * spec.tile
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 < end, s[r, c], -Float32.inf)
        if const_expr(spec.window):
            if tile < limits.full_from:
                for r in cutlass.range_constexpr(2):
                    start = limits.start0 + 8 * r - tile * spec.tile
                    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                        s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 >= start, s[r, c], -Float32.inf)


class KeyLimits(NamedTuple):
    """Which queries see 64 keys: the mask of this thread's keys 0 and 1, which are rows of S^T.

    start0, start1, end0  queries from start_r to below end_r see key r, relative to this thread's first column; end1 is
                          end0 + 8
    full_from, full_to    range of queries: tiles within it see every key and need no mask
    """

    start0: Int32
    start1: Int32
    end0: Int32
    full_from: Int32
    full_to: Int32


class QueryRange(NamedTuple):
    """Queries from `begin` to below `end`."""

    begin: Int32
    end: Int32


class KeyMasks:
    """Masks of key blocks in the key-stationary kernel; `spec` is a SinkBackwardSpec."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def query_range(self, first: Int32, s_q: Int32, s_k: Int32, visible: Visibility) -> TileRange:
        """Returns the query tiles that see the keys of a work tile; they begin at multiples of their size."""
        shift = s_k - s_q
        begin = cutlass.max(first - shift - visible.reach, 0) & -self.spec.queries
        end = s_q
        if const_expr(self.spec.window):
            end = cutlass.min(s_q, cutlass.min(first + self.spec.keys, s_k) - 1 - shift + visible.window)
        tiles = (cutlass.max(end - begin, 0) + self.spec.queries - 1) // self.spec.queries
        return TileRange(begin, tiles)

    @cute.jit
    def limits(self, first: Int32, s_q: Int32, s_k: Int32, visible: Visibility, tid: Int32) -> KeyLimits:
        """Returns the limits of keys `first` to `first` + 63."""
        shift = s_k - s_q
        column = 2 * (tid % 4)  # column of this thread's element 0
        # keys past the last one are masked: their P would be exp2(-L), which may be infinite
        keys = [first + wgmma.row(tid, r) for r in range(2)]
        starts = [cutlass.select_(key < s_k, key - shift - visible.reach - column, Int32(NEVER)) for key in keys]
        end = keys[0] - shift + visible.window - column
        full_from = cutlass.select_(first + ROWS <= s_k, first + ROWS - 1 - shift - visible.reach, Int32(NEVER))
        return KeyLimits(starts[0], starts[1], end, full_from, first - shift + visible.window)

    @cute.jit
    def seeing(self, first: Int32, s_q: Int32, s_k: Int32, visible: Visibility) -> QueryRange:
        """Returns the queries that see any of the keys `first` to `first` + 63, with a window; there may be none."""
        shift = s_k - s_q
        end = cutlass.min(first + ROWS, s_k) - 1 - shift + visible.window
        return QueryRange(cutlass.select_(first < s_k, first - shift - visible.reach, Int32(NEVER)), end)

    @cute.jit
    def mask(self, acc_s: cute.Tensor, query: Int32, limits: KeyLimits):
        """Sets S^T to -inf where a query of the tile from `query` on does not see a key."""
        s = wgmma.by_row(acc_s)
        if query < limits.full_from:
            for r in cutlass.range_constexpr(2):
                start = (limits.start1 if const_expr(r == 1) else limits.start0) - query
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 >= start, s[r, c], -Float32.inf)
        if const_expr(self.spec.window):
            if query + self.spec.queries > limits.full_to:
                for r in cutlass.range_constexpr(2):
                    end = limits.end0 + 8 * r - query
                    for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                        s[r, c] = cutlass.select_(8 * (c // 2) + c % 2 < end, s[r, c], -Float32.inf)
