"""Bundles that the roles of the crossover kernel hand to each other."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64


class QueryLoad(NamedTuple):
    """The TMA load of Q: atom, and Q as (heads, columns, query, request)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class KeySource(NamedTuple):
    """The keys of a work tile.

    cache         (pages, page size, 656) uint8
    zero_row      address of a row that masked keys are read from
    entries       slots of the query, or page numbers of the request
    begin, limit  positions of the first key, and past the last one; those from `limit` on are masked
    page_size     fast divisor
    """

    cache: cute.Tensor
    zero_row: Int64
    entries: cute.Tensor
    begin: Int32
    limit: Int32
    page_size: Any


class TileRange(NamedTuple):
    """Key tiles of a work tile, counted through all tiles of the CTA: `count` from tile `first` on."""

    first: Int32
    count: Int32


class PassPlace(NamedTuple):
    """What a thread of the load warpgroup has of a pass of 16 rows, the same in every pass.

    row      of 16
    segment  first of its 16 columns in a quant tile
    even, odd, rope  where its even and odd chunks and its chunk of the rope part go, in elements from the pass's first
             row on
    """

    row: Int32
    segment: Int32
    even: Int32
    odd: Int32
    rope: Int32


class PassTargets(NamedTuple):
    """Where a thread's row of a pass goes in shared memory: even and odd chunks (8, 4), rope (8)."""

    even: cute.Tensor
    odd: cute.Tensor
    rope: cute.Tensor


class RowStates(NamedTuple):
    """A thread's two rows (2) at a tile: the factor of O before it, and with the last tile row_max and row_sum."""

    rescaling: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
