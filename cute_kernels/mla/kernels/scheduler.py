"""The work tiles of a CTA and their keys: some heads of a query over all of its keys, or over a range of them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.mla.spec import CUT_TILES, TOKENS_PER_TILE, WORK_TILE_OVERHEAD

WARP = 32
END = 1 << 30  # a key tile number past the tiles of any query


class Divisors(NamedTuple):
    """Numbers that many threads divide by, as fast divisors."""

    page_size: cute.FastDivmodDivisorV2
    head_blocks: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2
    s_q: cute.FastDivmodDivisorV2
    merge_ctas: Any = None  # merge CTAs of a group


class Share(NamedTuple):
    """The work of a CTA: work tiles first, first + step, ... below end.

    In a uniform schedule the other fields are 0. In a balanced one a work tile is a query. The share begins with key
    tile `first_tile` of the first query and stops before key tile `end_tile` of the last one.
    """

    first: Int32
    end: Int32
    step: Int32
    first_tile: Int32
    end_tile: Int32
    number: Int32
    head_block: Int32


class WorkTable(NamedTuple):
    """The inputs of work tiles, the same for all threads of a CTA. With two caches mIndex and mLength are pairs.

    zero_row  for the crossover: address of the row that masked keys read
    """

    mKV: cute.Tensor
    mIndex: Any
    mLength: Any
    num_splits: Int32
    causal: Int32
    divisors: Divisors
    share: Share
    zero_row: Int64 | None = None


class Lengths(NamedTuple):
    """The number of a query's keys in each of two caches, or the positions where they end."""

    main: Int32
    extra: Int32


class WorkTile(NamedTuple):
    """A work tile's query and heads. `split` is the number of the split, or the place of a balanced partial."""

    head_block: Int32
    split: Int32
    query: Int32  # query of the request
    request: Int32


class KeyRange(NamedTuple):
    """Keys of a work tile: positions begin, begin + 1, ... in `tiles` key tiles; keys from `limit` on are masked.

    With two caches `limit` belongs to the first one.

    is_whole  1 if these are all keys of the query, so the result is final
    """

    begin: Int32
    limit: Int32
    tiles: Int32
    is_whole: Int32


class Weights(NamedTuple):
    """How a balanced schedule cuts: shares of `each` tiles, the first `longer` of them one more.

    If cuts at query boundaries cost no more, whole > 0: each share gets `whole` queries. With more shares than queries,
    each query is cut into `parts` equal shares. `before` is the weight of the queries before this lane's.
    """

    before: Int32
    each: Int32
    longer: Int32
    whole: Int32
    parts: Int32


def tiles_of(keys: Int32) -> Int32:
    """Returns the number of key tiles of `keys` keys; below 0 means 0."""
    return cute.ceil_div(cutlass.max(keys, 0), TOKENS_PER_TILE)


class Scheduler:
    """Device code for any thread; `spec` is a MlaDecodeSpec or a MlaCrossoverSpec.

    A query has key tiles of the first cache, then those of the second, if any: no tile has keys of both.

    Uniform: a work tile is a block of heads of a query over all of its keys or, if it is `split`, over one of
    num_splits equal parts. CTA b has the work tiles b, b + ctas, ...

    Balanced: a work tile is a query, and neighbouring CTAs, one for each block of heads, have an equal share of the key
    tiles of all queries, from one cut to the next; the first and the last query of a share may be cut. If it is no
    slower, CTAs have whole queries or equal parts of each instead. A query weighs WORK_TILE_OVERHEAD more than its
    tiles. From one partial to the next either the share's or the query's number grows, so their sum is the place of the
    partial.
    """

    def __init__(self, spec):
        self.sparse, self.split, self.balanced = spec.sparse, spec.split, spec.balanced
        self.has_extra = spec.has_extra

    def locate(self, index: Int32, table: WorkTable) -> WorkTile:
        """Returns work tile number `index`.

        Neighbouring CTAs read the same rows: the second CTA finds them in L2, or is the first one's peer in a cluster.
        """
        divisors = table.divisors
        if self.balanced:
            request, query = divmod(index, divisors.s_q)
            return WorkTile(table.share.head_block, table.share.number + index, query, request)
        rest, head_block = divmod(index, divisors.head_blocks)
        rest, split = divmod(rest, divisors.splits)
        request, query = divmod(rest, divisors.s_q)
        return WorkTile(head_block, split, query, request)

    def entries(self, work: WorkTile, mIndex: cute.Tensor) -> cute.Tensor:
        """Returns the keys of a work tile: indices of its query, or the block table of its request."""
        return mIndex[work.request, work.query, None] if self.sparse else mIndex[work.request, None]

    @cute.jit
    def length(self, work: WorkTile, mLength: Any) -> Any:
        """Returns the number of keys of a query (sparse) or a request (dense); with two caches `Lengths`."""
        if const_expr(self.has_extra):
            return Lengths(mLength[0][work.request, work.query], mLength[1][work.request, work.query])
        if const_expr(self.sparse):
            return mLength[work.request, work.query]
        return mLength[work.request]

    @cute.jit
    def key_limit(self, work: WorkTile, length: Int32, table: WorkTable) -> Int32:
        """Returns the position at which the keys of a query end; below 0 means 0.

        A length may be any int32. It is clamped before any subtraction, because -2^31 would wrap around.
        """
        if const_expr(self.sparse):
            return cutlass.min(length, table.mIndex.shape[2])
        length = cutlass.min(cutlass.max(length, 0), table.mIndex.shape[1] * table.mKV.shape[1])
        return length - table.causal * (table.divisors.s_q.divisor - 1 - work.query)

    @cute.jit
    def limits(self, work: WorkTile, length: Any, table: WorkTable) -> Lengths:
        """Returns where the keys of a query end in each cache, counted in that cache; below 0 means 0."""
        if const_expr(self.has_extra):
            main = cutlass.min(length.main, table.mIndex[0].shape[2])
            return Lengths(main, cutlass.min(length.extra, table.mIndex[1].shape[2]))
        return Lengths(self.key_limit(work, length, table), Int32(0))

    def tiles(self, limits: Lengths) -> Int32:
        """Returns the number of key tiles of a query."""
        return tiles_of(limits.main) + tiles_of(limits.extra) if self.has_extra else tiles_of(limits.main)

    @cute.jit
    def keys(self, index: Int32, work: WorkTile, length: Any, table: WorkTable) -> KeyRange:
        """Returns the keys of a work tile."""
        limits = self.limits(work, length, table)
        return self.part(index, work, limits.main, self.tiles(limits), table)

    @cute.jit
    def part(self, index: Int32, work: WorkTile, limit: Int32, tiles: Int32, table: WorkTable) -> KeyRange:
        """Returns the part of a query's `tiles` key tiles that a work tile has."""
        if const_expr(self.balanced):
            share = table.share
            first_tile = Int32(cutlass.select_(index == share.first, share.first_tile, Int32(0)))
            last_tile = Int32(cutlass.select_(index == share.end - 1, cutlass.min(share.end_tile, tiles), tiles))
            count = last_tile - first_tile
            return KeyRange(first_tile * TOKENS_PER_TILE, limit, count, Int32(1) if count == tiles else Int32(0))
        tiles_per_split = cute.ceil_div(tiles, table.num_splits)
        first_tile = work.split * tiles_per_split
        count = cutlass.max(cutlass.min(tiles_per_split, tiles - first_tile), 0)
        return KeyRange(first_tile * TOKENS_PER_TILE, limit, count, Int32(0 if self.split else 1))

    # ---- balanced shares

    @cute.jit
    def find_cut(self, target: cute.Pointer, number: Int32, shares: Int32, queries: Int32, table: WorkTable, lane):
        """Stores where share `number` begins: (query, tile of it). Called by one warp."""
        weights = self.weigh(shares, queries, table, lane)
        whole, parts = weights.whole, weights.parts
        cut = cute.make_tensor(target, cute.make_layout(2))
        if lane == 0:
            cut[0] = cutlass.min(cutlass.select_(whole > 0, number // parts * whole, queries), queries)
            cut[1] = Int32(0)
        cute.arch.sync_warp()
        if whole == 0:
            position = self.share_begin(number, weights.each, weights.longer)
            query, start, _ = self.walk(Int32(-1), position, weights.before, queries, table, lane)
            if query >= 0:
                cut[0] = query
                cut[1] = cutlass.max(position - start - WORK_TILE_OVERHEAD, 0)
        elif number % parts > 0 and number // parts < queries and lane == 0:
            tiles = self.weight_of(number // parts, table) - WORK_TILE_OVERHEAD
            tile = number % parts * cute.ceil_div(tiles, parts)
            cut[0] = number // parts + Int32(cutlass.select_(tile < tiles, Int32(0), Int32(1)))
            cut[1] = Int32(cutlass.select_(tile < tiles, tile, Int32(0)))

    @cute.jit
    def find_merge(self, target: cute.Pointer, number: Int32, shares: Int32, queries: Int32, table: WorkTable, lane):
        """Stores what merge group `number` merges: (query, its first share, number of partials or 0).

        It merges query `number`. If there are no more shares than queries, it instead merges the query in which share
        number + 1 begins, unless an earlier share begins in it. Called by one warp.
        """
        weights = self.weigh(shares, queries, table, lane)
        each, longer, whole, parts = weights.each, weights.longer, weights.whole, weights.parts
        by_query = queries < shares
        wanted = cutlass.select_(by_query, number, Int32(-1))
        position = cutlass.select_(by_query, Int32(-1), self.share_begin(number + 1, each, longer))
        found = cute.make_tensor(target, cute.make_layout(3))
        if lane == 0:
            found[2] = Int32(0)
        cute.arch.sync_warp()
        query, start, weight = self.walk(Int32(wanted), Int32(position), weights.before, queries, table, lane)
        if query >= 0:
            first = self.cuts_up_to(start + WORK_TILE_OVERHEAD, each, longer)
            count = self.cuts_up_to(start + weight - 1, each, longer) - first + 1
            if whole > 0:
                tiles = weight - WORK_TILE_OVERHEAD
                first, count = query * parts, cute.ceil_div(tiles, cutlass.max(cute.ceil_div(tiles, parts), 1))
            if count > 1 and (by_query or first == number):
                found[0] = query
                found[1] = first
                found[2] = count

    @cute.jit
    def weigh(self, shares: Int32, queries: Int32, table: WorkTable, lane: Int32) -> Weights:
        """Returns how much a share holds. Shares of tiles are chosen if they save more than a cut costs."""
        per_lane = cute.ceil_div(queries, WARP)
        first = cutlass.min(lane * per_lane, queries)
        own, most = Int32(0), Int32(0)
        for query in cutlass.range(first, cutlass.min(first + per_lane, queries), unroll=4):
            weight = self.weight_of(query, table)
            own += weight
            most = cutlass.max(most, weight)
        end = own
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(end, 1 << step)
            end += cutlass.select_(lane >= 1 << step, other, Int32(0))
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, 1 << step))
        total = cute.arch.shuffle_sync(end, WARP - 1)
        per_share, parts = cute.ceil_div(queries, shares), cutlass.max(shares // queries, 1)
        longest = per_share * (cute.ceil_div(most - WORK_TILE_OVERHEAD, parts) + WORK_TILE_OVERHEAD)
        spare = cutlass.select_(parts == 1, Int32(CUT_TILES), Int32(2 * WORK_TILE_OVERHEAD))
        pays = longest > total // shares + spare
        whole = Int32(cutlass.select_(pays, Int32(0), per_share))
        each, longer = total // shares, total % shares
        return Weights(end - own, each, longer, whole, Int32(cutlass.select_(pays, Int32(1), parts)))

    def share_begin(self, share, each, longer):
        """Returns where a share begins, in tiles of all queries, their overhead included."""
        return share * each + cutlass.min(share, longer)

    def cuts_up_to(self, position, each, longer):
        """Returns how many shares, without the first one, begin at `position` or before."""
        end_of_longer = longer * (each + 1)
        rest = longer + (position - end_of_longer) // cutlass.max(each, 1)
        return Int32(cutlass.select_(position < end_of_longer, position // (each + 1), rest))

    @cute.jit
    def walk(self, wanted: Int32, position: Int32, before: Int32, queries: Int32, table: WorkTable, lane: Int32):
        """Finds (query, weight of the queries before it, its weight), for query `wanted` or the query at `position`.

        The other one of these two arguments is -1. One lane has that query; the others return -1.
        """
        per_lane = cute.ceil_div(queries, WARP)
        query = lane * per_lane
        end = cutlass.min(query + per_lane, queries)
        found, start, weight = Int32(-1), before, Int32(0)
        while query < end and found < 0 and (wanted >= query or position >= start):
            weight = self.weight_of(query, table)
            if query == wanted or (position >= start and position < start + weight):
                found = query
            else:
                start += weight
            query += 1
        return found, start, weight

    @cute.jit
    def weight_of(self, query: Int32, table: WorkTable) -> Int32:
        """Returns a query's number of tiles plus its overhead."""
        request, query_idx = divmod(query, table.divisors.s_q)
        work = WorkTile(Int32(0), Int32(0), query_idx, request)
        limits = self.limits(work, self.length(work, table.mLength), table)
        return self.tiles(limits) + WORK_TILE_OVERHEAD

    @cute.jit
    def share_between(self, cuts: cute.Pointer, number: Int32, head_block: Int32) -> Share:
        """Returns the share of a CTA between two cuts."""
        cut = cute.make_tensor(cuts, cute.make_layout(4))
        first, first_tile, end, end_tile = (cute.arch.make_warp_uniform(cut[i]) for i in range(4))
        if first == end and first_tile == end_tile:
            first, end = Int32(0), Int32(0)  # no work
        elif end_tile > 0:
            end += 1
        else:
            end_tile = Int32(END)
        return Share(first, end, Int32(1), first_tile, end_tile, number, head_block)
