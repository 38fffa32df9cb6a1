"""Translates a token's place in its sequence to its place in the cache.

A *position* counts the tokens of one sequence from 0. A *slot* counts the tokens of the whole paged cache:
``slot = page * page_size + offset``. A sequence's row of the block table names its pages in order, so position ``p`` is
found on page ``block_table[row, p // page_size]`` at offset ``p % page_size``.

A slot is **invalid** when it is negative or not below ``num_pages * page_size``. Invalid slots may be anywhere in an
index tensor; whatever reads the cache skips them and never reads their bytes. The functions here write -1 for them.
"""

from __future__ import annotations

from typing import Final

import torch

from fp8_mla.layout import describe

INVALID_SLOT: Final = -1
"""The slot that the functions here write if there is no token."""

INDEX_DTYPES: Final = (torch.int32, torch.int64)
INT64_MAX: Final = 2**63 - 1


def check_index_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise unless `tensor` is int32 or int64 of `shape`, where None means any size."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: got {describe(tensor)}; needs a tensor of int32 or int64")
    if tensor.ndim != len(shape) or any(
        want not in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    ):
        needs = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: got {describe(tensor)}; needs shape ({needs}{',' if len(shape) == 1 else ''})")


def valid_slots(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Returns a mask of the slots that are valid in a cache of ``num_slots = num_pages * page_size`` tokens; bool."""
    return (slots >= 0) & (slots < num_slots)


def slots_from_positions(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    *,
    cache_seqlens: torch.Tensor | None = None,
    num_pages: int | None = None,
) -> torch.Tensor:
    """Translate positions in each sequence to slots.

    For the indices of a sparse decode, cast the result to int32. For the slot mapping of an append, flatten it.

    Args:
        positions: (batch, ...) int32 or int64, any values.
        block_table: (batch, max_pages) int32 or int64, any values.
        page_size: tokens of a page, at least 1.
        cache_seqlens: (batch,) int32 or int64: positions not below it are invalid. None: only the table limits them.
        num_pages: pages of the cache: table entries not below it are invalid. None: only negative entries are, and
            those whose slots do not fit into int64.

    Returns:
        int64 of the shape of `positions`; -1 where the position or its table entry is out of range.

    Raises:
        TypeError: a tensor is not of an integer type named above.
        ValueError: shapes do not fit each other, or `page_size` is below 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size: got {page_size}; needs at least 1")
    check_index_tensor("block_table", block_table, (None, None))
    batch, max_pages = block_table.shape
    if not isinstance(positions, torch.Tensor) or positions.is_nested or positions.dtype not in INDEX_DTYPES:
        raise TypeError(f"positions: got {describe(positions)}; needs a tensor of int32 or int64")
    if positions.ndim == 0 or positions.shape[0] != batch:
        raise ValueError(f"positions: got {describe(positions)}; needs ({batch}, ...) as block_table has {batch} rows")
    if cache_seqlens is not None:
        check_index_tensor("cache_seqlens", cache_seqlens, (batch,))
    if max_pages == 0 or positions.numel() == 0:
        return torch.full_like(positions, INVALID_SLOT, dtype=torch.int64)

    rows = positions.reshape(batch, -1).long()
    valid = (rows >= 0) & (rows < max_pages * page_size)
    if cache_seqlens is not None:
        valid &= rows < cache_seqlens.unsqueeze(1)
    pages = block_table.long().gather(1, (rows // page_size).clamp(0, max_pages - 1))
    valid &= (pages >= 0) & (pages < INT64_MAX // page_size)  # a larger product would overflow
    if num_pages is not None:
        valid &= pages < num_pages
    return torch.where(valid, pages * page_size + rows % page_size, INVALID_SLOT).view(positions.shape)


def slots_from_block_table(
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_size: int,
    *,
    num_pages: int | None = None,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """List the slots of each sequence in order.

    Args:
        block_table: (batch, max_pages) int32 or int64, any values.
        cache_seqlens: (batch,) int32 or int64: tokens of each sequence. Negative counts as 0; tokens past the table's
            capacity of ``max_pages * page_size`` do not exist.
        page_size: tokens of a page, at least 1.
        num_pages: pages of the cache: table entries not below it are invalid. None: only negative ones are.
        max_tokens: columns of the result. None: the table's capacity.

    Returns:
        (batch, max_tokens) int64, -1 past a sequence's end and where its table entry is out of range.

    Raises:
        TypeError: a tensor is not of an integer type named above.
        ValueError: shapes do not fit each other, `page_size` is below 1 or `max_tokens` is negative.
    """
    check_index_tensor("block_table", block_table, (None, None))
    batch, max_pages = block_table.shape
    width = max_pages * page_size if max_tokens is None else max_tokens
    if width < 0:
        raise ValueError(f"max_tokens: got {width}; needs at least 0")
    positions = torch.arange(width, dtype=torch.int64, device=block_table.device).expand(batch, width)
    return slots_from_positions(positions, block_table, page_size, cache_seqlens=cache_seqlens, num_pages=num_pages)
