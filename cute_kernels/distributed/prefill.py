"""`context_parallel_prefill` lets new tokens attend to a context that is spread over the ranks of a group."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
import torch.distributed as dist

from cute_kernels.distributed.exchange import HEADS, Member, Rows, Target, combine
from cute_kernels.merge.op import merge_states
from cute_kernels.runtime.checks import check_tensor, refuse_gradients, require
from cute_kernels.sink.op import sink_attention

NAME: Final = "context_parallel_prefill"


@overload
def context_parallel_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_context: torch.Tensor, v_context: torch.Tensor,
    group: dist.ProcessGroup | None = ..., *, heads: str = ..., s_aux: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_context: torch.Tensor | None = ..., out: torch.Tensor | None = ..., lse: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def context_parallel_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_context: torch.Tensor, v_context: torch.Tensor,
    group: dist.ProcessGroup | None = ..., *, heads: str = ..., s_aux: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_context: torch.Tensor | None = ..., out: torch.Tensor | None = ..., lse: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def context_parallel_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_context: torch.Tensor, v_context: torch.Tensor,
    group: dist.ProcessGroup | None = ..., *, heads: str = ..., s_aux: torch.Tensor | None = ...,
    softmax_scale: float | None = ..., cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_context: torch.Tensor | None = ..., out: torch.Tensor | None = ..., lse: torch.Tensor | None = ...,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def context_parallel_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_context: torch.Tensor,
    v_context: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    heads: str = "gather",
    s_aux: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_context: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of a chunk of new tokens to all tokens before it and, causally, to itself; forward only.

    Earlier tokens are spread over the ranks as `context_parallel_decode` reads them: each rank passes keys and values
    of those that it keeps, in any order, since every new token sees them all. All ranks have the chunk's own keys and
    values, as they have its queries; each rank attends to the chunk for its share of the heads, so no work is done
    twice. Outputs are exchanged in one collective and merged in the order of ranks.

    There is no window: layers that have one keep as many tokens, and each rank can keep them all.

    Args:
        q: (batch, s_q, h_q, d), all heads, or packed (tokens, h_q, d), as `sink_attention` takes it.
        k: (batch, s_q, h_kv, d), keys of the chunk; packed (tokens, h_kv, d).
        v: likewise.
        k_context: (batch, n, h_kv, d), keys of the earlier tokens that this rank keeps; packed (n, h_kv, d). n may be
            0, and another one on each rank.
        v_context: likewise.
        group: a group of torch.distributed; None: the default group.
        heads: "gather": every rank gets all heads. "scatter": each rank gets its own, the rank-th of world_size blocks.
        s_aux: (h_q,) float32, or (heads that are returned,): a sink that joins the denominator once.
        softmax_scale: default d ** -0.5.
        cu_seqlens_q: (batch + 1,) int32: where each packed chunk begins.
        cu_seqlens_context: (batch + 1,) int32: where each sequence's packed earlier tokens begin on this rank.
        out: q's shape with the heads that are returned, q's dtype: tensor to write to.
        lse: out's shape without d, float32: tensor to write to.
        return_lse: also return the log-sum-exp.

    Returns:
        out of q's shape and dtype, with all heads or this rank's; with `return_lse` also lse, without d, float32,
        without the sink.

    Raises:
        TypeError, ValueError: before any collective, naming the argument, what it got and what it needs. Also if
            gradients are enabled and a tensor requires them: there is no backward.
        RuntimeError: another rank failed, or did not call within the group's timeout.
    """
    member = Member.of(group)
    require(heads in HEADS, "heads", repr(heads), " or ".join(map(repr, HEADS)))
    if torch.is_grad_enabled():
        tensors = {"q": q, "k": k, "v": v, "k_context": k_context, "v_context": v_context, "s_aux": s_aux}
        refuse_gradients(NAME, {**tensors, "out": out, "lse": lse})
    packed = cu_seqlens_q is not None or cu_seqlens_context is not None
    check_tensor("q", q, ndim=3 if packed else 4)
    check_tensor("k", k, shape=(*q.shape[:-2], None, q.shape[-1]), dtype=q.dtype, device=q.device)
    check_tensor("v", v, shape=tuple(k.shape), dtype=q.dtype, device=q.device)
    h_q, h_kv, shape = q.shape[-2], k.shape[-2], tuple(q.shape[:-1])
    good = h_kv > 0 and h_q > 0 and h_q % h_kv == 0
    require(good, "q", f"{h_q} heads", f"a multiple of the {h_kv} heads of k, at least one")
    context = (None, h_kv, q.shape[-1]) if packed else (q.shape[0], None, h_kv, q.shape[-1])
    check_tensor("k_context", k_context, shape=context, dtype=q.dtype, device=q.device)
    check_tensor("v_context", v_context, shape=tuple(k_context.shape), dtype=q.dtype, device=q.device)
    if packed:
        check_tensor("cu_seqlens_q", cu_seqlens_q, dtype=torch.int32, ndim=1, device=q.device)
        check_tensor("cu_seqlens_context", cu_seqlens_context, dtype=torch.int32, device=q.device)
    target = Target.of(heads, member, shape, q.shape[-1], q.dtype, q.device, s_aux, out, lse)
    given = None if softmax_scale is None else float(softmax_scale)
    same = {"heads": heads, "q": q, "k": k, "s_aux": s_aux is not None, "softmax_scale": given}
    member.require_same_call(NAME, {**same, "cu_seqlens_q": cu_seqlens_q}, q.device, q)
    earlier, earlier_lse = sink_attention(
        q, k_context, v_context, causal=False, softmax_scale=given, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_context, return_lse=True,
    )  # fmt: skip
    rows = Rows.empty(shape, q.shape[-1], q.dtype, q.device, (3, heads == "gather"))
    rows.out.copy_(earlier)
    rows.lse.copy_(earlier_lse)
    mine = own_heads(h_q, h_kv, member.rank, member.world_size)
    if mine.start < mine.stop:
        ratio = h_q // h_kv
        theirs = slice(mine.start // ratio, -(-mine.stop // ratio))
        chunk, chunk_lse = sink_attention(
            q[..., mine, :], k[..., theirs, :], v[..., theirs, :], softmax_scale=given, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_q, return_lse=True,
        )  # fmt: skip
        outs = torch.stack([earlier[..., mine, :], chunk])
        lses = torch.stack([earlier_lse[..., mine], chunk_lse])
        merge_states(outs, lses, out=rows.out[..., mine, :], lse=rows.lse[..., mine])
    merged, merged_lse = combine(NAME, rows, member, target)
    return (merged, merged_lse) if return_lse else merged


def own_heads(h_q: int, h_kv: int, rank: int, world_size: int) -> slice:
    """Returns the query heads for which a rank attends to the chunk: whole heads of the cache, a part of one, or none.

    Every head belongs to one rank. With fewer heads of the cache than ranks, surplus ranks have none.
    """
    ratio = h_q // h_kv
    parts = max(1, world_size // h_kv)  # ranks that share a head of the cache
    if parts == 1 and h_kv >= world_size:
        return slice(h_kv * rank // world_size * ratio, h_kv * (rank + 1) // world_size * ratio)
    head, part = divmod(rank, parts)
    if head >= h_kv:
        return slice(0, 0)
    return slice(head * ratio + ratio * part // parts, head * ratio + ratio * (part + 1) // parts)
