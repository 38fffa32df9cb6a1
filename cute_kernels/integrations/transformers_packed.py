"""Packed and padded batches of transformers: which tokens of a batch are a sequence, found in O(tokens).

A batch is *packed* if its tokens, row after row, are sequences: attention is causal within each, with a window or
without, and there is none between them. A run of padding counts as a sequence of its own. So each token belongs to one,
and nothing of tokens x tokens elements is made. There are two sources: the mask function that most models make of
padding and positions, and the positions if a model (gpt-oss) leaves them out of its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cute_kernels.runtime import memory
from cute_kernels.runtime.ops import is_traced

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""sees(batch, head, query, key) of integer tensors that broadcast, bool."""


def packed_borders(
    sees: MaskFunction, padding: torch.Tensor | None, batch: int, tokens: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Finds where sequences of a batch begin and the last one ends, (sequences + 1,) int32; None if it is not packed.

    A sequence begins where a token does not see the one before it. Eight places of each query are then compared with
    the mask of such sequences. Padding hides keys, so each row may have one run of other tokens. This waits for the
    device twice.

    Args:
        sees: transformers' mask function, without padding.
        padding: (batch, tokens) bool, False for padding; None without padding.
        batch: number of rows.
        tokens: tokens of a row.
        window: most tokens that a token sees, its own included.
        device: device of the result.
    """
    if not batch * tokens:
        return None
    row = torch.arange(batch, dtype=torch.int64, device=device).unsqueeze(1)
    query = torch.arange(tokens, dtype=torch.int64, device=device).expand(batch, tokens)
    head = torch.zeros((), dtype=torch.int64, device=device)
    begins = ~sees(row, head, query, (query - 1).clamp(min=0)).expand(batch, tokens)
    real = torch.ones_like(begins) if padding is None else padding
    before = torch.cat([~real[:, :1], real[:, :-1]], dim=1)
    begins = begins | (real != before) | (query == 0)
    first = torch.where(begins, query, 0).cummax(dim=1).values
    if window is not None:
        first = torch.maximum(first, query - window + 1)
    right = (real & ~before).sum(dim=1).max() <= 1
    last = torch.full_like(query, tokens - 1)
    for key in (query, query - 1, query + 1, first, first - 1, (first + query) // 2, torch.zeros_like(query), last):
        inside = key.clamp(0, tokens - 1)
        seen = sees(row, head, query, inside) & real.gather(1, inside)
        right &= ((seen == ((first <= inside) & (inside <= query))) | ~real).all()
    if not right:
        return None
    borders = begins.flatten().nonzero().flatten()
    return torch.nn.functional.pad(borders, (0, 1), value=batch * tokens).to(torch.int32)


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By tensor of positions: its version and batch when it was read, and its borders. Layers share positions."""


def borders_of_positions(position_ids: torch.Tensor, batch: int) -> torch.Tensor | None:
    """Finds where sequences of consecutive positions begin, (sequences + 1,) int32; None if each row is one sequence.

    It waits for the device once for each tensor and each change of it, so once a forward. torch.compile cannot have a
    graph for each number of sequences: traced calls take each row as a sequence, and fail if positions disagree.

    Args:
        position_ids: (batch or 1, tokens) integers.
        batch: number of rows.

    Raises:
        RuntimeError: a compiled model found packed positions; on a GPU this is a device-side assertion.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    if is_traced():
        begins[:, 1:] = position_ids.diff(dim=1) != 1
        needs = "position_ids: got packed sequences in a compiled model; needs cu_seq_lens_q and cu_seq_lens_k as well"
        torch._assert_async(~begins[:, 1:].any(), needs)
        return None
    version = None if position_ids.is_inference() else position_ids._version
    known = _known.get(position_ids)
    if version is not None and known is not None and known[:2] == (version, batch):
        return known[2]
    if memory.is_capturing(position_ids.device):
        return None
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    rows = begins.expand(batch, -1).flatten().nonzero().flatten()
    borders = torch.nn.functional.pad(rows, (0, 1), value=batch * begins.shape[1]).to(torch.int32)
    found = borders if len(borders) > batch + 1 else None
    _known[position_ids] = (version, batch, found)
    return found


def each_sequence(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Runs an attention without packing on each packed sequence by itself: (batch, s_q, heads, d).

    Args:
        attend: takes q, k and v of one sequence, (1, heads, tokens, d) each; returns (1, s_q, heads, d).
        q: (batch, heads, s_q, d).
        k: (batch, kv_heads, s_k, d).
        v: likewise.
        cu_seqlens: borders of queries and of keys. Later queries get 0.
    """
    queries, keys, values = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    borders = [pairwise(t.tolist()) for t in cu_seqlens]
    outs = [
        attend(queries[:, :, slice(*own)], keys[:, :, slice(*theirs)], values[:, :, slice(*theirs)])[0]
        for own, theirs in zip(*borders, strict=True)
    ]
    out = torch.cat([*outs, q.new_zeros(queries.shape[2] - sum(map(len, outs)), q.shape[1], q.shape[3])])
    return out.unflatten(0, (q.shape[0], q.shape[2]))
