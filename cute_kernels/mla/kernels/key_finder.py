"""Where the row of a key is, from the index list or block table, and whether the key is masked."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.device import token_cache


class KeyPlace(NamedTuple):
    """A key's page and its place in the page; for a masked key, not `valid`, those of some key of the cache."""

    valid: cutlass.Boolean
    page: Int32
    offset: Int32


class KeyRow(NamedTuple):
    """A key's row in the cache: (1, its address), or (0, the address of a row of zeros) for a masked key."""

    valid: Int32
    row: cute.Pointer


class KeyFinder:
    """Device code for any thread. A position counts from the first key of a query, over all splits."""

    def __init__(self, sparse: bool):
        self.sparse = sparse

    @cute.jit
    def read_entry(self, entries: cute.Tensor, position: Int32, last: Int32, page_divisor):
        """Returns the index (sparse) or page number (dense) of a position, at most of the last position."""
        position = cutlass.min(position, last)
        if const_expr(not self.sparse):
            position = position // page_divisor
        return entries[position]

    @cute.jit
    def place(self, mKV: cute.Tensor, entry: Int32, position: Int32, last: Int32, page_divisor) -> KeyPlace:
        """Returns where the key at a position is, from its entry."""
        bound = mKV.shape[0]
        if const_expr(self.sparse):
            bound *= mKV.shape[1]
        inside = cutlass.min(cutlass.max(entry, 0), bound - 1)  # one comparison, so one predicate less than two bounds
        valid = inside == entry and position <= last
        if const_expr(self.sparse):
            page, offset = divmod(inside, page_divisor)
        else:
            page, offset = inside, position % page_divisor
        return KeyPlace(valid, page, offset)

    @cute.jit
    def locate(
        self, mKV: cute.Tensor, zero_row: Int64, entry: Int32, position: Int32, last: Int32, page_divisor
    ) -> KeyRow:
        """Returns the row of the key at a position, from its entry."""
        valid, page, offset = self.place(mKV, entry, position, last, page_divisor)
        row = token_cache.row_pointer(mKV, zero_row, valid, page, offset)
        return KeyRow(Int32(1) if valid else Int32(0), row)
