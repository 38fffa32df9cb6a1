"""The oracle of `index_topk` in plain torch, and its CPU path."""

from __future__ import annotations

import torch

from fp8_mla.indexer import canonical, highest
from fp8_mla.slots import slots_from_positions


def index_topk_reference(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `cute_kernels.index_topk` returns, by definition; it takes the same arguments."""
    rows, width = logits.shape
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts.clamp(0, width)
    positions = torch.full((rows, topk), -1, dtype=torch.int32, device=logits.device)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        seen = logits[row, start : start + max(length, 0)]
        chosen = highest(canonical(seen), topk)
        positions[row, : len(chosen)] = chosen.int()
    if block_table is None or page_size is None or not rows:
        return positions
    by_sequence = positions.view(block_table.shape[0], -1)
    slots = slots_from_positions(by_sequence, block_table, page_size).view(rows, topk)
    return slots.masked_fill(slots >= 2**31, -1).int()
