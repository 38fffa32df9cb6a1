"""Arguments that the roles of one crossover launch share, by name."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64


class KeyTensors(NamedTuple):
    """The cache, the indices (sparse) or the block table (dense), and how many keys a query or a request has."""

    mKV: cute.Tensor
    mIndex: cute.Tensor
    mLength: cute.Tensor


class KeySource(NamedTuple):
    """How the rows of a work tile's keys are found.

    mKV        the cache
    zero_row   address of the row that a masked key reads
    entries    indices of the query, or block table of the request
    begin      position of the first key
    limit      keys at this position and beyond are masked
    page_size  page size as a fast divisor
    """

    mKV: cute.Tensor
    zero_row: Int64
    entries: cute.Tensor
    begin: Int32
    limit: Int32
    page_size: Any
