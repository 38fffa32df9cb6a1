"""How the MLA decode kernel finds the row of a key: index or block table, and what masks it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.device import token_cache


class KeyFinder:
    """Device code for any thread. A position counts from the first key of a query, before splits."""

    def __init__(self, spec):
        self.sparse = spec.sparse

    @cute.jit
    def read_entry(self, entries: cute.Tensor, position: Int32, last: Int32, page_divisor):
        """The index (sparse) or page number (dense) behind a position; beyond the last one, that of the last one."""
        position = cutlass.min(position, last)
        if const_expr(not self.sparse):
            position = position // page_divisor
        return entries[position]

    @cute.jit
    def locate(self, mKV: cute.Tensor, zero_row: Int64, entry: Int32, position: Int32, last: Int32, page_divisor):
        """(1, the address of the key's row), or (0, that of a row of zeros) where the position is masked."""
        bound = mKV.shape[0]
        if const_expr(self.sparse):
            bound *= mKV.shape[1]
        inside = cutlass.min(
            cutlass.max(entry, 0), bound - 1
        )  # one comparison less, and so a predicate, than two bounds
        valid = inside == entry and position <= last
        if const_expr(self.sparse):
            page, offset = divmod(inside, page_divisor)
        else:
            page, offset = inside, position % page_divisor
        row = token_cache.row_pointer(mKV, zero_row, valid, page, offset)
        return (Int32(1) if valid else Int32(0)), row
