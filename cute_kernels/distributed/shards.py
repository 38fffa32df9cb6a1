"""Which rank keeps which token of a context, and at which place.

Tokens are dealt to ranks in turn, `interleave` at a time: the token at position p belongs to rank
``p // interleave % world_size``. A rank keeps its tokens in their order, so its own *local* position of p is
``p // (interleave * world_size) * interleave + p % interleave``. An interleave of 1 balances best, one of a page moves
whole pages, and one of at least ``context / world_size`` cuts the context into one contiguous range a rank.

A rank's block table is an ordinary one over its local positions. If each page holds page_size tokens of *every*
rank, as in vLLM and SGLang, all ranks have the same table, ``ceil(length / (page_size * world_size))`` entries long.
If a page belongs to one rank, `shard_block_table` picks a rank's entries.

All functions take the `rank` whose tokens are asked for, the `world_size`, which is the number of ranks, and the
`interleave`. They are torch arithmetic on the device of their tensors, without synchronization: a CUDA graph captures
them and torch.compile fuses them. Every value of an integer tensor is legal, -2^31 included.
"""

from __future__ import annotations

import torch

from cute_kernels.runtime.checks import check_tensor, fail, require
from fp8_mla import slots_from_positions

INTEGERS = (torch.int32, torch.int64)
NOT_HERE = -1
"""The slot of a token that another rank keeps, or that does not exist."""
MAX_SLOTS = 2**31
"""A cache has fewer slots than this, because indices are int32."""
MAX_LENGTH = 2**31 - 1
"""The largest length of an int32 tensor."""
MAX_STRIPE = 2**63
"""``interleave * world_size`` is below it: positions are int64."""


def check_share(rank: int, world_size: int, interleave: int) -> None:
    """Raises unless rank, world_size and interleave are valid together."""
    for name, value, least in (("world_size", world_size, 1), ("interleave", interleave, 1), ("rank", rank, 0)):
        is_int = isinstance(value, int) and not isinstance(value, bool)
        require(is_int, name, type(value).__name__, "an int", TypeError)
        require(value >= least, name, value, f"at least {least}")
    require(rank < world_size, "rank", rank, f"less than world_size {world_size}")
    stripe = interleave * world_size
    require(stripe < MAX_STRIPE, "interleave", f"{interleave} with world_size {world_size}", "a product below 2^63")


def shard_lengths(
    lengths: torch.Tensor,
    *,
    rank: int,
    world_size: int,
    interleave: int = 1,
    s_q: int | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Counts how many of the first `lengths` tokens of each context a rank keeps.

    With `s_q` it counts what each query sees: query j of s_q is at position ``lengths - s_q + j`` and sees no later
    token. A model needs this once a step; `context_parallel_decode` takes it as `local_lengths`.

    Args:
        lengths: (batch,) int32 or int64, of any shape without `s_q`: tokens of the whole context. Below 0 counts as 0.
        s_q: queries of each context, its last tokens; None: no queries.
        causal: False: every query sees all tokens.

    Returns:
        int32, the shape of `lengths`; (batch, s_q) with `s_q`. Counts beyond 2^31 - 1 are 2^31 - 1.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it needs.
    """
    check_share(rank, world_size, interleave)
    check_tensor("lengths", lengths, dtype=INTEGERS, ndim=None if s_q is None else 1)
    seen = lengths.long().clamp(min=0)
    if s_q is not None:
        require(isinstance(s_q, int) and s_q >= 1, "s_q", s_q, "None or an int of at least 1")
        if causal:
            ends = torch.arange(1 - s_q, 1, dtype=torch.int64, device=lengths.device)
            seen = (seen.unsqueeze(1) + ends).clamp(min=0)
        else:
            seen = seen.unsqueeze(1).expand(-1, s_q)
    stripe = interleave * world_size
    rest = seen % stripe - rank * interleave
    return (seen // stripe * interleave + rest.clamp(0, interleave)).clamp(max=MAX_LENGTH).int()


def local_positions(positions: torch.Tensor, *, rank: int, world_size: int, interleave: int) -> torch.Tensor:
    """Returns the int64 local positions of this rank's tokens, -1 for all others."""
    wide = positions.long()
    stripe = interleave * world_size
    local = wide // stripe * interleave + wide % interleave
    mine = (wide >= 0) & (wide // interleave % world_size == rank)
    return torch.where(mine, local, NOT_HERE)


def shard_slots(
    positions: torch.Tensor,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    *,
    rank: int,
    world_size: int,
    interleave: int = 1,
    num_pages: int | None = None,
) -> torch.Tensor:
    """Returns the slots of tokens in a rank's own cache, -1 for the tokens of other ranks.

    Flattened, it is the slot mapping of `mla_fp8_append` and `kv_int8_append`, which skip negative slots: every rank
    appends the same new tokens and keeps its own.

    Args:
        positions: (batch, ...) int32 or int64: positions in each context. Negative positions are no token.
        block_table: (batch, max_pages) int32 or int64, this rank's. None: `positions` are slots of one whole cache
            whose tokens are dealt to ranks like a context's, ``page * page_size * world_size + offset`` with page_size
            a multiple of `interleave`; any shape.
        page_size: tokens that a page holds on one rank; with a block table.
        num_pages: pages of this rank's cache: larger table entries hold no token. None: only negative entries do not.

    Returns:
        int64 of the shape of `positions`.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it needs.
    """
    check_share(rank, world_size, interleave)
    check_tensor("positions", positions, dtype=INTEGERS)
    return _slots("positions", positions, block_table, page_size, rank, world_size, interleave, num_pages)


def _slots(
    name: str,
    positions: torch.Tensor,
    block_table: torch.Tensor | None,
    page_size: int | None,
    rank: int,
    world_size: int,
    interleave: int,
    num_pages: int | None,
) -> torch.Tensor:
    local = local_positions(positions, rank=rank, world_size=world_size, interleave=interleave)
    if block_table is None:
        for other, value in (("page_size", page_size), ("num_pages", num_pages)):
            require(value is None, other, value, "None without a block_table")
        return local
    if page_size is None or page_size < 1:
        fail("page_size", page_size, "at least 1 with a block_table")
    batch = positions.shape[0] if positions.dim() else None
    check_tensor("block_table", block_table, dtype=INTEGERS, ndim=2, device=positions.device)
    require(batch == block_table.shape[0], name, f"shape {tuple(positions.shape)}", f"({len(block_table)}, ...)")
    return slots_from_positions(local, block_table, page_size, num_pages=num_pages)


def shard_block_table(
    block_table: torch.Tensor, page_size: int, *, rank: int, world_size: int, interleave: int
) -> torch.Tensor:
    """Returns a rank's entries of the block table of a whole context, in which every page belongs to one rank.

    Entries are moved, not changed: each names a page of the cache of the rank that keeps it. If pages hold tokens of
    every rank, this function is not needed, and all ranks use one table.

    Args:
        block_table: (batch, max_pages) int32 or int64, pages of `page_size` consecutive tokens.
        page_size: tokens of a page; `interleave` is a multiple of it.

    Returns:
        (batch, n) of the same dtype, contiguous, n the same on all ranks; -1 past the end.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it needs.
    """
    check_share(rank, world_size, interleave)
    check_tensor("block_table", block_table, dtype=INTEGERS, ndim=2)
    require(page_size >= 1, "page_size", page_size, "at least 1")
    whole = interleave % page_size == 0
    require(whole, "interleave", interleave, f"a multiple of page_size {page_size}: a page belongs to one rank")
    batch, width = block_table.shape
    run = interleave // page_size
    rounds = -(-width // (run * world_size))
    padded = block_table.new_full((batch, rounds, world_size, run), NOT_HERE)
    padded.view(batch, rounds * world_size * run)[:, :width] = block_table
    return padded[:, :, rank].reshape(batch, rounds * run).contiguous()  # runs of one page are a strided view


def shard_indices(
    indices: torch.Tensor,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    *,
    rank: int,
    world_size: int,
    interleave: int = 1,
    topk_length: torch.Tensor | None = None,
    num_pages: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a rank's part of a sparse index list, in the form that `mla_fp8_decode` takes.

    The entries of a rank come first, in their order; the rest is -1. The lists of all ranks together have every valid
    entry once.

    Args:
        indices: (batch, s_q, topk) int32 or int64: positions in each context, in any order; negative ones are skipped.
        block_table: (batch, max_pages) int32 or int64, this rank's. None: `indices` are slots of one whole cache that
            is dealt out like a context, as in `shard_slots`.
        page_size: tokens that a page holds on one rank; with a block table.
        topk_length: (batch,) or (batch, s_q) int32 or int64: only that many leading entries count.
        num_pages: pages of this rank's cache: entries on pages not below it are dropped. None: the decode masks
            slots beyond its cache.

    Returns:
        indices (batch, s_q, topk) int32, slots of this rank's cache, and topk_length (batch, s_q) int32.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it needs.
    """
    check_share(rank, world_size, interleave)
    check_tensor("indices", indices, dtype=INTEGERS, ndim=3)
    batch, s_q, topk = indices.shape
    slots = _slots("indices", indices, block_table, page_size, rank, world_size, interleave, num_pages)
    mine = (slots >= 0) & (slots < MAX_SLOTS)
    if topk_length is not None:
        per_query = isinstance(topk_length, torch.Tensor) and topk_length.dim() == 2
        shape = (batch, s_q) if per_query else (batch,)
        check_tensor("topk_length", topk_length, dtype=INTEGERS, shape=shape, device=indices.device)
        column = torch.arange(topk, dtype=torch.int64, device=indices.device)
        mine &= column < (topk_length.unsqueeze(-1) if per_query else topk_length[:, None, None])
    # every entry gets a column of its own, this rank's from the left: a permutation, so the scatter has one outcome
    before = mine.cumsum(-1, dtype=torch.int64)
    count = before[..., -1:] if topk else before.new_zeros((batch, s_q, 1))
    others = (~mine).cumsum(-1, dtype=torch.int64)
    columns = torch.where(mine, before, count + others) - 1
    kept = torch.where(mine, slots, NOT_HERE).int()
    return torch.empty_like(kept).scatter_(-1, columns, kept), count.squeeze(-1).int()
