"""Items of work of the MLA decode kernel: some heads of a query token, over all keys of it or a split of them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.mla.spec import TOKENS_PER_TILE, MlaDecodeSpec


class WorkItems:
    """Device code for any thread."""

    def __init__(self, spec: MlaDecodeSpec):
        self.sparse = spec.sparse

    def locate(self, item: Int32, head_divisor, split_divisor, query_divisor):
        """(block of heads, split, query, request) of an item of work.

        Neighbouring CTAs read the same rows: the second one finds them in L2, or is the other one of a cluster.
        """
        rest, head_block = divmod(item, head_divisor)
        rest, split_idx = divmod(rest, split_divisor)
        batch_idx, query_idx = divmod(rest, query_divisor)
        return head_block, split_idx, query_idx, batch_idx

    @cute.jit
    def length_of(self, work: tuple, mLength: cute.Tensor) -> Int32:
        """How many keys a query (sparse) or a request (dense) has."""
        _, _, query_idx, batch_idx = work
        if const_expr(self.sparse):
            return mLength[batch_idx, query_idx]
        return mLength[batch_idx]

    @cute.jit
    def keys_of(
        self,
        work: tuple,
        length: Int32,
        mIndex: cute.Tensor,
        mKV: cute.Tensor,
        num_splits: Int32,
        causal: Int32,
        query_divisor,
    ):
        """(first key, key at which all end, tiles) of an item of work."""
        _, split_idx, query_idx, _ = work
        if const_expr(self.sparse):
            limit = cutlass.min(length, mIndex.shape[2])
        else:
            limit = length - causal * (query_divisor.divisor - 1 - query_idx)
            limit = cutlass.min(limit, mIndex.shape[1] * mKV.shape[1])
        tiles = cute.ceil_div(cutlass.max(limit, 0), TOKENS_PER_TILE)
        tiles_per_split = cute.ceil_div(tiles, num_splits)
        first_tile = split_idx * tiles_per_split
        count = cutlass.max(cutlass.min(tiles_per_split, tiles - first_tile), 0)
        return first_tile * TOKENS_PER_TILE, limit, count
