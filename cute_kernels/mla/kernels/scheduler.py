"""Items of work of the MLA decode kernel: some heads of a query token, over all keys of it or a part of them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.mla.spec import CUT_TILES, ITEM_TILES, TOKENS_PER_TILE, MlaDecodeSpec

WARP = 32
END = 1 << 30  # beyond the tiles of any query
INDEX, LENGTH, DIVISORS, OWN = 1, 2, 6, 7  # places in a table of items


class WorkItems:
    """Device code for any thread.

    An item is a block of heads of a query over all of its keys or, where it is `split`, over one of num_splits equal
    parts; CTA b has the items b, b + ctas, ...

    Balanced, an item is a query, and neighbouring CTAs, one for each block of heads, have an equal share of the tiles
    of all queries: the queries from one cut to the next, the first and the last of them in part; or whole queries, or
    equal parts of each, where these are as good. A query counts ITEM_TILES more than it has. From one partial result to
    the next the number of the share or of the query grows, so their sum says where it is kept.

    `table` has what items are made of: (mKV, mIndex, mLength, zero_row, num_splits, causal, divisors, own), divisors by
    (page size, blocks of heads, splits, queries of a request), and `own` what this CTA has: (first item, end, step,
    first tile of the first item, end of the tiles of the last one, share, block of heads), the last four balanced.
    """

    def __init__(self, spec: MlaDecodeSpec):
        self.sparse, self.split, self.balanced = spec.sparse, spec.split, spec.balanced

    def locate(self, item: Int32, table: tuple):
        """(block of heads, split or place of a partial result, query, request) of an item of work.

        Neighbouring CTAs read the same rows: the second one finds them in L2, or is the other one of a cluster.
        """
        _, head_divisor, split_divisor, query_divisor = table[DIVISORS]
        if self.balanced:
            _, _, _, _, _, share, head_block = table[OWN]
            batch_idx, query_idx = divmod(item, query_divisor)
            return head_block, share + item, query_idx, batch_idx
        rest, head_block = divmod(item, head_divisor)
        rest, split_idx = divmod(rest, split_divisor)
        batch_idx, query_idx = divmod(rest, query_divisor)
        return head_block, split_idx, query_idx, batch_idx

    def entries(self, work: tuple, mIndex: cute.Tensor) -> cute.Tensor:
        """The keys of an item: indices of its query, or the block table of its request."""
        _, _, query_idx, batch_idx = work
        return mIndex[batch_idx, query_idx, None] if self.sparse else mIndex[batch_idx, None]

    @cute.jit
    def length_of(self, work: tuple, mLength: cute.Tensor) -> Int32:
        """How many keys a query (sparse) or a request (dense) has."""
        _, _, query_idx, batch_idx = work
        if const_expr(self.sparse):
            return mLength[batch_idx, query_idx]
        return mLength[batch_idx]

    @cute.jit
    def limit_of(self, work: tuple, length: Int32, table: tuple) -> Int32:
        """The position at which the keys of a query end; below 0 as 0.

        A length may be any int32: it is clamped before anything is subtracted, for -2^31 would wrap around.
        """
        mKV, mIndex, causal, query_divisor = table[0], table[INDEX], table[5], table[DIVISORS][3]
        if const_expr(self.sparse):
            return cutlass.min(length, mIndex.shape[2])
        length = cutlass.min(cutlass.max(length, 0), mIndex.shape[1] * mKV.shape[1])
        return length - causal * (query_divisor.divisor - 1 - work[2])

    @cute.jit
    def keys_of(self, item: Int32, work: tuple, length: Int32, table: tuple):
        """(first key, position at which all end, tiles, 1 if these are all keys of the query) of an item of work."""
        limit = self.limit_of(work, length, table)
        tiles = cute.ceil_div(cutlass.max(limit, 0), TOKENS_PER_TILE)
        if const_expr(self.balanced):
            first, stop, _, begin, end, _, _ = table[OWN]
            first_tile = Int32(cutlass.select_(item == first, begin, Int32(0)))
            last_tile = Int32(cutlass.select_(item == stop - 1, cutlass.min(end, tiles), tiles))
            count = last_tile - first_tile
            return first_tile * TOKENS_PER_TILE, limit, count, Int32(1) if count == tiles else Int32(0)
        tiles_per_split = cute.ceil_div(tiles, table[4])
        first_tile = work[1] * tiles_per_split
        count = cutlass.max(cutlass.min(tiles_per_split, tiles - first_tile), 0)
        return first_tile * TOKENS_PER_TILE, limit, count, Int32(0 if self.split else 1)

    # ---- shares

    @cute.jit
    def find_cut(self, place: cute.Pointer, number: Int32, shares: Int32, queries: Int32, table: tuple, lane: Int32):
        """Stores where share `number` begins at `place`: (query, tile of it). Called by one warp."""
        before, each, more, whole, parts = self.weigh(shares, queries, table, lane)
        cut = cute.make_tensor(place, cute.make_layout(2))
        if lane == 0:
            cut[0] = cutlass.min(cutlass.select_(whole > 0, number // parts * whole, queries), queries)
            cut[1] = Int32(0)
        cute.arch.sync_warp()
        if whole == 0:
            position = self.position_of(number, each, more)
            query, at, _ = self.walk(Int32(-1), position, before, queries, table, lane)
            if query >= 0:
                cut[0] = query
                cut[1] = cutlass.max(position - at - ITEM_TILES, 0)
        elif number % parts > 0 and number // parts < queries and lane == 0:
            tiles = self.weight_of(number // parts, table) - ITEM_TILES
            tile = number % parts * cute.ceil_div(tiles, parts)
            cut[0] = number // parts + Int32(cutlass.select_(tile < tiles, Int32(0), Int32(1)))
            cut[1] = Int32(cutlass.select_(tile < tiles, tile, Int32(0)))

    @cute.jit
    def find_merge(self, place: cute.Pointer, number: Int32, shares: Int32, queries: Int32, table: tuple, lane: Int32):
        """Stores what group `number` of merging CTAs merges at `place`: (query, first share of it, parts or 0).

        That is query `number`; where there are as many queries as shares or more, the one in which share number + 1
        begins, if no share before begins in it. Called by one warp.
        """
        before, each, more, whole, parts = self.weigh(shares, queries, table, lane)
        by_query = queries < shares
        wanted = cutlass.select_(by_query, number, Int32(-1))
        position = cutlass.select_(by_query, Int32(-1), self.position_of(number + 1, each, more))
        found = cute.make_tensor(place, cute.make_layout(3))
        if lane == 0:
            found[2] = Int32(0)
        cute.arch.sync_warp()
        query, at, weight = self.walk(Int32(wanted), Int32(position), before, queries, table, lane)
        if query >= 0:
            first = self.cuts_up_to(at + ITEM_TILES, each, more)
            count = self.cuts_up_to(at + weight - 1, each, more) - first + 1
            if whole > 0:
                tiles = weight - ITEM_TILES
                first, count = query * parts, cute.ceil_div(tiles, cutlass.max(cute.ceil_div(tiles, parts), 1))
            if count > 1 and (by_query or first == number):
                found[0] = query
                found[1] = first
                found[2] = count

    @cute.jit
    def weigh(self, shares: Int32, queries: Int32, table: tuple, lane: Int32):
        """What shares are to hold.

        (what queries before those of this lane count, what a share does, how many shares have one tile more; or how
        many whole queries a share has, and how many shares have equal parts of one: as many as there are for each.
        These are 0 and 1 where shares of all tiles save more than what it takes to have parts of two queries.)
        """
        of_lane = cute.ceil_div(queries, WARP)
        first = cutlass.min(lane * of_lane, queries)
        own, most = Int32(0), Int32(0)
        for query in cutlass.range(first, cutlass.min(first + of_lane, queries), unroll=4):
            weight = self.weight_of(query, table)
            own += weight
            most = cutlass.max(most, weight)
        end = own
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(end, 1 << step)
            end += cutlass.select_(lane >= 1 << step, other, Int32(0))
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, 1 << step))
        total = cute.arch.shuffle_sync(end, WARP - 1)
        of_share, parts = cute.ceil_div(queries, shares), cutlass.max(shares // queries, 1)
        longest = of_share * (cute.ceil_div(most - ITEM_TILES, parts) + ITEM_TILES)
        spare = cutlass.select_(parts == 1, Int32(CUT_TILES), Int32(2 * ITEM_TILES))
        pays = longest > total // shares + spare
        whole = Int32(cutlass.select_(pays, Int32(0), of_share))
        return end - own, total // shares, total % shares, whole, Int32(cutlass.select_(pays, Int32(1), parts))

    def position_of(self, share, each, more):
        """Where a share begins, in what queries count."""
        return share * each + cutlass.min(share, more)

    def cuts_up_to(self, position, each, more):
        """How many shares but the first begin there or before."""
        longer = more * (each + 1)
        rest = more + (position - longer) // cutlass.max(each, 1)
        return Int32(cutlass.select_(position < longer, position // (each + 1), rest))

    @cute.jit
    def walk(self, wanted: Int32, position: Int32, before: Int32, queries: Int32, table: tuple, lane: Int32):
        """(query, what those before it count, what it counts) of query `wanted`, or of the one at `position`.

        The other one is -1. Of one lane; others, which do not have that query, find -1.
        """
        of_lane = cute.ceil_div(queries, WARP)
        query = lane * of_lane
        end = cutlass.min(query + of_lane, queries)
        found, at, weight = Int32(-1), before, Int32(0)
        while query < end and found < 0 and (wanted >= query or position >= at):
            weight = self.weight_of(query, table)
            if query == wanted or (position >= at and position < at + weight):
                found = query
            else:
                at += weight
            query += 1
        return found, at, weight

    @cute.jit
    def weight_of(self, query: Int32, table: tuple) -> Int32:
        """What a query counts, in tiles."""
        batch_idx, query_idx = divmod(query, table[DIVISORS][3])
        work = (Int32(0), Int32(0), query_idx, batch_idx)
        limit = self.limit_of(work, self.length_of(work, table[LENGTH]), table)
        return cute.ceil_div(cutlass.max(limit, 0), TOKENS_PER_TILE) + ITEM_TILES

    @cute.jit
    def own_share(self, cuts: cute.Pointer, share: Int32, head_block: Int32):
        """What a CTA has between two cuts: `own` of the table."""
        cut = cute.make_tensor(cuts, cute.make_layout(4))
        begin, first_tile, stop, end = (cute.arch.make_warp_uniform(cut[i]) for i in range(4))
        if begin == stop and first_tile == end:
            begin, stop = Int32(0), Int32(0)  # nothing
        elif end > 0:
            stop += 1
        else:
            end = Int32(END)
        return begin, stop, Int32(1), first_tile, end, share, head_block
