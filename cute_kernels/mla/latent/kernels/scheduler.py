"""Work tiles of the latent decode kernel: key tiles of a second cache follow those of the first."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.mla.kernels.scheduler import KeyRange, Scheduler, WorkTable, WorkTile
from cute_kernels.mla.latent.spec import LatentDecodeSpec
from cute_kernels.mla.spec import TOKENS_PER_TILE, WORK_TILE_OVERHEAD


class Lengths(NamedTuple):
    """How many keys a query has in each cache."""

    main: Int32
    extra: Int32


class Source(NamedTuple):
    """A cache, and where a key's rows lie in a page: a `PageLayout` of fp8_mla.formats.

    mKV  (pages, tokens of a page, bytes): the first size, the second, the first stride and the address count
    """

    mKV: cute.Tensor
    page_size: cute.FastDivmodDivisorV2
    data_stride: Int32
    scale_offset: Int32
    scale_stride: Int32


def tiles_of(keys: Int32) -> Int32:
    """Key tiles of so many keys; below 0 means 0."""
    return cute.ceil_div(cutlass.max(keys, 0), TOKENS_PER_TILE)


class LatentScheduler(Scheduler):
    """Device code for any thread: `Scheduler`, over one or two caches.

    With two caches `table.mIndex` and `table.mLength` are pairs of tensors, and a length is a `Lengths`. A key tile has
    keys of one cache, so the tiles of the second one begin where those of the first one end.
    """

    def __init__(self, spec: LatentDecodeSpec):
        super().__init__(spec)
        self.has_extra = spec.has_extra

    @cute.jit
    def length(self, work: WorkTile, mLength: Any) -> Any:
        """How many keys a query (sparse) or a request (dense) has."""
        if const_expr(self.has_extra):
            return Lengths(mLength[0][work.request, work.query], mLength[1][work.request, work.query])
        return Scheduler.length(self, work, mLength)

    @cute.jit
    def limits(self, work: WorkTile, length: Any, table: WorkTable) -> Lengths:
        """Where the keys of a query end in each cache, counted in that cache; below 0 means 0."""
        if const_expr(self.has_extra):
            main = cutlass.min(length.main, table.mIndex[0].shape[2])
            return Lengths(main, cutlass.min(length.extra, table.mIndex[1].shape[2]))
        return Lengths(self.key_limit(work, length, table), Int32(0))

    @cute.jit
    def keys(self, index: Int32, work: WorkTile, length: Any, table: WorkTable) -> KeyRange:
        """The keys of a work tile. `limit` is that of the first cache."""
        limits = self.limits(work, length, table)
        tiles = tiles_of(limits.main)
        if const_expr(self.has_extra):
            tiles += tiles_of(limits.extra)
        return self.part(index, work, limits.main, tiles, table)

    @cute.jit
    def weight_of(self, query: Int32, table: WorkTable) -> Int32:
        """Tiles of a query and its overhead."""
        request, query_idx = divmod(query, table.divisors.s_q)
        work = WorkTile(Int32(0), Int32(0), query_idx, request)
        limits = self.limits(work, self.length(work, table.mLength), table)
        tiles = tiles_of(limits.main)
        if const_expr(self.has_extra):
            tiles += tiles_of(limits.extra)
        return tiles + WORK_TILE_OVERHEAD
