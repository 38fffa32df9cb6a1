"""Translates positions of a whole context for an op that sees only one rank's tokens.

An op counts keys from 0 and places its queries at their end. On one rank this holds for each query alone: it sees the
first n of the rank's tokens, where n is the rank's share of the keys that it sees in the whole context. So lengths
become shares, and queries become rows of a batch. Other arguments depend on positions too:

- A *window* of w tokens up to the query's own has the same number of tokens on a rank for every query only if w is a
  multiple of a stripe, ``interleave * world_size``. Then it is w / world_size, wherever it begins and ends.
- *ALiBi* adds slope * (key - query). If a rank's positions are a line, ``global = step * local + first``, that is slope
  * step * (local key - local query), which the op adds itself given slopes * step, plus a number that depends only on
  the row and the head. That number leaves the output unchanged and adds to the log-sum-exp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels.distributed.shards import shard_lengths
from cute_kernels.gqa.layouts import LAYOUTS
from cute_kernels.runtime.checks import check_tensor, fail, require


class LocalCall(NamedTuple):
    """One call of an op over one rank's tokens.

    queries    slice of the s_q queries
    arguments  arguments that replace the caller's
    flat       whether each query is a batch row of its own
    """

    queries: slice
    arguments: dict[str, Any]
    flat: bool = False


class LocalCalls(NamedTuple):
    """Calls that together have every query once, and the addend of the log-sum-exps, (batch, s_q, h_q), or None."""

    calls: list[LocalCall]
    lse_offset: torch.Tensor | None = None


class _Line(NamedTuple):
    """The positions of a rank's tokens in the context: ``step * local + first``."""

    step: int
    first: int


ALL = slice(None)


def local_calls(
    call: dict[str, Any], h_q: int, rank: int, world_size: int, interleave: int, local_lengths: torch.Tensor | None
) -> LocalCalls:
    """Makes the calls on one rank that together compute `call` over the whole context.

    Args:
        call: arguments of `mla_fp8_decode` or `gqa_decode` by name; `q` may still lack the heads of other ranks.
        h_q: all query heads.
        local_lengths: (batch, s_q) int32, `shard_lengths` of the call, or None.

    Raises:
        TypeError, ValueError: no op can compute the call on one rank, or lengths do not fit.
    """
    q, lengths = call["q"], call.get("cache_seqlens")
    if call.get("indices") is not None:
        require(local_lengths is None, "local_lengths", "a tensor", "None with indices, which need no positions")
        return LocalCalls([LocalCall(ALL, {})])
    batch, s_q = q.shape[:2]
    if lengths is None:
        fail("cache_seqlens", None, "a tensor: the lengths of the whole context")
    check_tensor("cache_seqlens", lengths, dtype=torch.int32, shape=(batch,), device=q.device)
    causal = bool(call.get("causal", True)) and s_q > 1
    if local_lengths is None:
        local_lengths = shard_lengths(
            lengths, rank=rank, world_size=world_size, interleave=interleave, s_q=s_q, causal=causal
        )
    check_tensor("local_lengths", local_lengths, dtype=torch.int32, shape=(batch, s_q), device=q.device)
    arguments: dict[str, Any] = {}
    if call.get("window") is not None:
        arguments["window"] = _local_window(call["window"], s_q, causal, world_size, interleave)
    slopes, offset = call.get("alibi_slopes"), None
    if slopes is not None:
        check_tensor("alibi_slopes", slopes, dtype=torch.float32, device=q.device)
        fits = tuple(slopes.shape) in ((h_q,), (batch, h_q))
        require(fits, "alibi_slopes", f"shape {tuple(slopes.shape)}", f"({h_q},) or ({batch}, {h_q})")
        line = _line(call, rank, world_size, interleave)
        slopes, offset = _local_slopes(slopes, lengths, local_lengths, line, causal)
    if not causal:
        arguments["cache_seqlens"] = local_lengths[:, 0]
        if slopes is not None:
            arguments["alibi_slopes"] = slopes
        return LocalCalls([LocalCall(ALL, arguments)], offset)
    table = call.get("block_table")
    if table is None:  # the cache has a row for each sequence, so each query is a call
        if slopes is not None:
            arguments["alibi_slopes"] = slopes
        queries = range(s_q)
        calls = [LocalCall(slice(j, j + 1), {**arguments, "cache_seqlens": local_lengths[:, j]}) for j in queries]
        return LocalCalls(calls, offset)
    check_tensor("block_table", table, dtype=torch.int32, shape=(batch, None), device=q.device)
    arguments["block_table"] = _repeat(table, s_q)
    arguments["cache_seqlens"] = local_lengths.reshape(-1)
    if slopes is not None:
        arguments["alibi_slopes"] = slopes if slopes.dim() == 1 else _repeat(slopes, s_q)
    return LocalCalls([LocalCall(ALL, arguments, flat=True)], offset)


def _repeat(rows: torch.Tensor, times: int) -> torch.Tensor:
    """Repeats each row of (batch, n): (batch x times, n)."""
    n, width = rows.shape
    return rows.unsqueeze(1).expand(n, times, width).reshape(n * times, width)


def _local_window(window: object, s_q: int, causal: bool, world_size: int, interleave: int) -> int:
    is_int = isinstance(window, int) and not isinstance(window, bool)
    if not is_int:
        fail("window", type(window).__name__, "an int", TypeError)
    assert isinstance(window, int)
    stripe = interleave * world_size
    needs = f"a positive multiple of {stripe}, interleave x ranks: another one has a varying number of a rank's tokens"
    require(window >= 1 and window % stripe == 0, "window", window, needs)
    require(causal or s_q == 1, "window", f"{window} with {s_q} query tokens and causal=False", "causal, or one query")
    return window // world_size


def _line(call: dict[str, Any], rank: int, world_size: int, interleave: int) -> _Line:
    """Returns the line that a rank's tokens are on.

    Raises:
        ValueError: they are not on a line.
    """
    if interleave == 1:
        return _Line(world_size, rank)
    capacity = _capacity(call)
    needs = (
        f"interleave 1, or one of at least {capacity}, the tokens that a rank's cache has room for in a sequence: "
        "distances of tokens that are dealt out in runs are no multiple of their distances on a rank"
    )
    require(capacity <= interleave, "alibi_slopes", f"slopes with interleave {interleave}", needs)
    return _Line(1, rank * interleave)


def _capacity(call: dict[str, Any]) -> int:
    """Returns how many tokens of a sequence fit into a rank's cache."""
    layout, cache, table = LAYOUTS.get(call.get("layout", "BNSH")), call.get("v_cache"), call.get("block_table")
    if layout is None:
        fail("layout", repr(call.get("layout")), f"one of {', '.join(LAYOUTS)}")
    check_tensor("v_cache", cache, ndim=len(layout.value))
    assert isinstance(cache, torch.Tensor)
    rows = cache.shape[layout.value.index(layout.rows)]
    if not layout.paged:
        return rows
    check_tensor("block_table", table, ndim=2)
    assert isinstance(table, torch.Tensor)
    return rows * table.shape[1]


def _local_slopes(
    slopes: torch.Tensor, lengths: torch.Tensor, local_lengths: torch.Tensor, line: _Line, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns slopes for a rank's own positions, and slope * (the op's position of a query - its true position)."""
    s_q = local_lengths.shape[1]
    ends = torch.arange(-s_q, 0, dtype=torch.int64, device=lengths.device)
    own = lengths.long().clamp(min=0).unsqueeze(1) + ends
    # a causal query is the last of its tokens, in a call of its own; other queries are the last s_q of all
    local = local_lengths.long() + (-1 if causal else ends)
    distance = (line.step * local + line.first - own).float()
    offset = distance.unsqueeze(-1) * (slopes if slopes.dim() == 1 else slopes.unsqueeze(1))
    return slopes * line.step, offset
