"""vLLM's decode context parallelism: a request's keys are dealt out to ranks in turns. Imports no vLLM.

The ranks of a group have the same KV heads, and query heads of their own. Each rank attends with the query heads of all
ranks to its own keys, and gets back the other ranks' results for its own heads. `merge_states` merges these, and joins
the sinks of the rank's heads last: they join the denominator once.

A rank has `interleave` tokens of each `interleave * ranks`. Its keys have no positions, so only queries that see all of
them may attend to them: one token of each request that decodes, or a prompt's tokens to the keys before all of them. A
prompt's tokens attend to each other directly, since every rank has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from cute_kernels.integrations.vllm.calls import MAX_QUERIES, CacheViews, GqaCalls
from cute_kernels.merge.op import merge_states
from cute_kernels.sink.op import sink_attention


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a request's keys.

    size, rank   number of ranks in the group, and number of this one
    interleave   consecutive tokens of one rank
    all_gather   all_gather(t, dim=1): concatenates the tensors of all ranks
    group        a group of torch.distributed
    """

    size: int
    rank: int
    interleave: int
    all_gather: Callable[..., torch.Tensor]
    group: Any

    @classmethod
    def of(cls, group: Any, interleave: int) -> Ranks:
        """Makes ranks from a group of vLLM's."""
        return cls(group.world_size, group.rank_in_group, interleave, group.all_gather, group.device_group)

    def lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """Returns how many of the first `lengths` tokens of each request this rank has: (requests,) int32."""
        whole = lengths // (self.interleave * self.size) * self.interleave
        rest = lengths - whole * self.size - self.rank * self.interleave
        return (whole + rest.clamp(0, self.interleave)).to(torch.int32)

    def of_own_heads(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchanges this rank's results for all heads for all ranks' results for this rank's heads.

        Args:
            outs: (tokens, heads of all ranks, d).
            lses: (tokens, heads of all ranks) float32.

        Returns:
            (ranks, tokens, heads, d) and (ranks, tokens, heads).
        """
        found = []
        for t in (outs, lses):
            by_rank = t.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
            received = torch.empty_like(by_rank)
            dist.all_to_all_single(received, by_rank, group=self.group)
            found.append(received)
        return found[0], found[1]


def refusal(calls: GqaCalls) -> str | None:
    """Returns in words why a layer's keys cannot be dealt out; None if they can."""
    if calls.window is not None or calls.alibi_slopes is not None:
        return "a window or ALiBi: keys that are dealt out have no positions"
    if calls.kv_heads != 1:
        return f"{calls.kv_heads} KV heads on a GPU: ranks that share keys have one each"
    if calls.shares_cache or not calls.is_plain:
        return "a layer with softcap, of another head dimension than 64 and 128, or without keys of its own"
    return None


def attend_with(
    ranks: Ranks, calls: GqaCalls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, views: CacheViews,
    m: Any, output: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Computes attention of a batch whose new tokens are in the caches, into `output`, and returns it.

    Args:
        ranks: ranks that share the keys.
        calls: calls of the layer.
        query: (tokens, heads, d).
        key: (tokens, kv_heads, d).
        value: likewise.
        views: views of the layer's cache.
        m: a `CuteAttentionMetadata` with `local_lens`.
        output: (tokens, heads, d).
    """
    n, tokens = m.num_decode_tokens, m.num_actual_tokens
    if n:
        requests = slice(m.num_decodes)
        decode(calls, ranks, query[:n], views, m.local_lens[requests], m.block_table[requests], output[:n])
    if tokens > n:
        part, rows = m.prefill or m, slice(n, tokens)
        if m.fresh:
            calls.prefill_fresh(
                query[rows], key[rows], value[rows], part.query_start_loc, part.max_query_len, output[rows]
            )
            return output
        output[n + m.starts_host[-1] : tokens].zero_()
        prefill(
            calls, ranks, query[rows], key[rows], value[rows], views, part.query_start_loc, m.starts_host,
            part.seq_lens, part.block_table, output[rows],
        )  # fmt: skip
    return output


def decode(
    calls: GqaCalls, ranks: Ranks, query: torch.Tensor, views: CacheViews, lengths: torch.Tensor,
    block_table: torch.Tensor, output: torch.Tensor,
) -> None:  # fmt: skip
    """Computes attention of one token of each request, whose own key is in some rank's cache, into `output`.

    Args:
        calls: calls of the layer; other arguments that are not here are as in `attend_with`.
        lengths: (requests,) int32, number of this rank's tokens of each request.
        block_table: (requests, pages) int32.
    """
    every = ranks.all_gather(query.contiguous(), dim=1).unsqueeze(1)
    out, lse = calls.part(every, views, lengths, block_table)
    merge_states(*ranks.of_own_heads(out[:, 0], lse[:, 0]), s_aux=calls.s_aux, out=output)


def prefill(
    calls: GqaCalls, ranks: Ranks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, views: CacheViews,
    starts: torch.Tensor, starts_host: Sequence[int], seq_lens: torch.Tensor, block_table: torch.Tensor,
    output: torch.Tensor,
) -> None:  # fmt: skip
    """Computes attention of any number of tokens of each request, into `output`.

    Args:
        calls: calls of the layer; other arguments that are not here are as in `attend_with`.
        starts: (requests + 1,) int32, where tokens of each request begin.
        starts_host: `starts` on the host.
        seq_lens: (requests,) int32, tokens of each request on all ranks, new tokens included.
        block_table: (requests, pages) int32.
    """
    tokens = starts_host[-1]
    query, key, value, output = (t[:tokens] for t in (query, key, value, output))
    own, own_lse = sink_attention(
        query, key, value, softmax_scale=calls.scale, cu_seqlens_q=starts, cu_seqlens_k=starts,
        max_seqlen_q=max(end - begin for begin, end in pairwise(starts_host)), return_lse=True,
    )  # fmt: skip
    rows, owners = pieces(starts_host)
    pick = torch.tensor(owners, dtype=torch.int64, device="cpu").to(query.device, non_blocking=True)
    places = torch.tensor(rows, dtype=torch.int64, device="cpu").to(query.device, non_blocking=True)
    context = ranks.lengths(seq_lens - (starts[1:] - starts[:-1]))
    every = ranks.all_gather(query.contiguous(), dim=1)
    out, lse = calls.part(every[places].unflatten(0, (-1, MAX_QUERIES)), views, context[pick], block_table[pick])
    found, found_lse = torch.empty_like(every), lse.new_empty(every.shape[:2])
    found[places], found_lse[places] = out.flatten(0, 1), lse.flatten(0, 1)  # places of one token have equal values
    outs, lses = ranks.of_own_heads(found, found_lse)
    merge_states(
        torch.cat([outs, own.unsqueeze(0)]), torch.cat([lses, own_lse.unsqueeze(0)]), s_aux=calls.s_aux,
        out=output,
    )  # fmt: skip


def pieces(starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Splits tokens of requests into pieces of `MAX_QUERIES`; a request's last token fills up its last piece.

    Returns:
        the tokens of all pieces, and the request of each piece.
    """
    rows: list[int] = []
    owners: list[int] = []
    for request, (begin, end) in enumerate(pairwise(starts)):
        for first in range(begin, end, MAX_QUERIES):
            rows += [min(first + i, end - 1) for i in range(MAX_QUERIES)]
            owners.append(request)
    return rows, owners
