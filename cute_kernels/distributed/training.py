"""`context_parallel_sink_attention`: attention with gradients over sequences that are spread over a group's ranks."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from cute_kernels.distributed.exchange import Member, all_gather
from cute_kernels.distributed.sequence_chunks import ORDERS, Keys, Place, chunk_lengths, keys_of, whole_sequences
from cute_kernels.runtime.checks import check_tensor, require
from cute_kernels.sink.op import cast_under_autocast, check, sink_attention, sink_attention_backward
from cute_kernels.sink.request import FORWARD

NAME: Final = "context_parallel_sink_attention"
COMMS: Final = ("all_gather", "a2a")


def context_parallel_sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s_aux: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    comm: str = "all_gather",
    order: str = "zigzag",
    window: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Compute causal attention with sinks over sequences that ranks share; differentiable in q, k, v and s_aux.

    A sequence is cut into equal chunks, 2 n of them for n ranks in order "zigzag", n in order "contiguous". Rank r has
    chunks r and 2 n - 1 - r, or chunk r, in this order; positions for RoPE are those in the whole sequence. All ranks
    call together, forward and backward.

    Gradients of q, k and v are complete. **The gradient of s_aux is only this rank's part**: sum it over the group like
    the gradient of any parameter that ranks share, by FSDP or DDP over a mesh that includes it, or by an all-reduce.

    Args:
        q: (batch, tokens of this rank, h_q, d) bfloat16 or float16, d 64 or 128; packed (tokens of this rank, h_q, d):
            the chunks of each sequence, sequence after sequence. The same number of tokens on all ranks.
        k: (batch, tokens of this rank, h_kv, d), q's dtype; packed (tokens of this rank, h_kv, d).
        v: likewise.
        s_aux: (h_q,) float32 sinks of all heads, on every rank, or None.
        group: a group of torch.distributed; None: the default group.
        comm: "all_gather": every rank gets keys and values of one layer at a time, or only those before its chunks that
            a window reaches; nothing of them is saved for the backward, which gathers again. "a2a": heads are exchanged
            for tokens, so h_q and h_kv are multiples of the ranks.
        order: "zigzag" balances causal attention; "contiguous" is for data that is dealt out in whole runs.
        window: most tokens that a query sees, its own included.
        softmax_scale: default d ** -0.5.
        cu_seqlens: packed: (sequences + 1,) int32, borders of whole sequences, the same on all ranks; each has a
            multiple of 2 n, or n, tokens. Later tokens are padding.
        deterministic: the same call gives gradients with the same bits; torch.use_deterministic_algorithms also turns
            it on.

    Returns:
        out of q's shape and dtype.

    Raises:
        TypeError, ValueError: before any collective, naming the argument, what it got and what it needs.
        RuntimeError: another rank failed, or did not call within the group's timeout.
    """
    member = Member.of(group)
    require(comm in COMMS, "comm", repr(comm), " or ".join(map(repr, COMMS)))
    require(order in ORDERS, "order", repr(order), " or ".join(map(repr, ORDERS)))
    q, k, v, s_aux = cast_under_autocast(q, k, v, s_aux)
    place = Place(member.rank, member.world_size, order)
    _check(q, k, v, s_aux, window, softmax_scale, cu_seqlens is not None, deterministic)
    lengths = chunk_lengths(q, cu_seqlens, place)
    if comm == "a2a":
        for name, heads in (("k", k.shape[-2]), ("q", q.shape[-2])):
            needs = f"a multiple of {member.world_size}, the ranks, for comm='a2a'; comm='all_gather' takes any"
            require(heads % member.world_size == 0, name, f"{heads} heads", needs)
    same = {"comm": comm, "order": order, "window": window, "softmax_scale": softmax_scale, "cu_seqlens": cu_seqlens}
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "s_aux": s_aux is not None}
    member.require_same_call(NAME, {**same, **shapes}, q.device)
    options = {"window": window, "softmax_scale": softmax_scale, "deterministic": deterministic}
    flat = [t if cu_seqlens is not None else t.flatten(0, 1) for t in (q, k, v)]
    if comm == "a2a":
        out = _by_heads(flat, s_aux, whole_sequences(lengths, flat[0].shape[0], place, q.device), member, options)
    else:
        keys = keys_of(lengths, flat[0].shape[0], place, window, q.device)
        out = _OverGatheredKeys.apply(*flat, s_aux, _Call(keys, member, options))
    return out.view(q.shape)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor | None, window: int | None,
    softmax_scale: float | None, packed: bool, deterministic: bool,
) -> None:  # fmt: skip
    """Raises the error that `sink_attention` would raise for the tensors as one batch."""
    check_tensor("q", q, ndim=3 if packed else 4)
    tokens = tuple(q.shape[:-2])
    check_tensor("k", k, shape=(*tokens, None, q.shape[-1]))
    options = {"window": window, "softmax_scale": softmax_scale, "deterministic": deterministic}
    rows = [t[None] if packed and isinstance(t, torch.Tensor) else t for t in (q, k, v)]
    check(FORWARD.request(**dict(zip("qkv", rows, strict=True)), s_aux=s_aux, **options, differentiable=True))


# ---- keys of all ranks


class _Call(NamedTuple):
    """Arguments of a call that its backward needs, besides tensors."""

    keys: Keys
    member: Member
    options: dict[str, Any]


class _OverGatheredKeys(torch.autograd.Function):
    """Attention of a rank's chunks to the keys that they see, in one packed call."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, s_aux: Any, call: _Call) -> torch.Tensor:
        keys, values = _gathered(k, v, call)
        out, lse = sink_attention(q, keys, values, s_aux, **_packed(call), return_lse=True)
        ctx.save_for_backward(q, k, v, s_aux, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        (q, k, v, s_aux, out, lse), call = ctx.saved_tensors, ctx.call
        keys, values = _gathered(k, v, call)
        dq, dkeys, dvalues, ds_aux = sink_attention_backward(dout, q, keys, values, out, lse, s_aux, **_packed(call))
        del keys, values
        dk, dv = _scattered(dkeys, dvalues, call, k)
        return dq, dk, dv, ds_aux, None


def _packed(call: _Call) -> dict[str, Any]:
    return {"cu_seqlens_q": call.keys.cu_seqlens_q, "cu_seqlens_k": call.keys.cu_seqlens_k, **call.options}


def _gathered(k: torch.Tensor, v: torch.Tensor, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers the keys and values of a call, (keys, h_kv, d) each, from all ranks."""
    own = torch.stack([k, v], dim=1)
    sent = own if call.keys.sent is None else own.index_select(0, call.keys.sent)
    received = sent.new_empty((call.member.world_size * sent.shape[0], *sent.shape[1:]))
    call.member.exchange(NAME, all_gather(), received.view(torch.uint8), sent.view(torch.uint8))
    rows = received if call.keys.sent is None else torch.cat([own, received])
    keys, values = rows.index_select(0, call.keys.rows).unbind(1)
    return keys, values


def _scattered(
    dkeys: torch.Tensor, dvalues: torch.Tensor, call: _Call, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up gradients of a rank's k and v from those of all ranks' keys: float32, in the order of ranks.

    A key is at most once in each chunk's keys. Sums of two have the same bits in any order.
    """
    (keys, member, _), tokens = call, k.shape[0]
    sent = tokens if keys.sent is None else len(keys.sent)
    own = 0 if keys.sent is None else tokens
    sums = dkeys.new_zeros((own + member.world_size * sent, 2, *k.shape[1:]), dtype=torch.float32)
    sums.index_add_(0, keys.rows, torch.stack([dkeys, dvalues], dim=1).float())
    theirs = sums[own:].unflatten(0, (member.world_size, sent))
    received = torch.empty_like(theirs)
    member.exchange(NAME, dist.all_to_all_single, received.view(torch.uint8), theirs.view(torch.uint8))
    total = received[0]
    for part in received[1:]:
        total += part
    if keys.sent is not None:
        total = sums[:tokens].index_add_(0, keys.sent, total)
    dk, dv = total.to(k.dtype).unbind(1)
    return dk, dv


# ---- heads for tokens


class _AllToAll(torch.autograd.Function):
    """Exchanges (ranks, ...): each rank gets its own entry from all. The gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, member: Member) -> torch.Tensor:
        ctx.member = member
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        member.exchange(NAME, dist.all_to_all_single, received.view(torch.uint8), sent.view(torch.uint8))
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _AllToAll.apply(gradient, ctx.member), None


def _by_heads(
    qkv: list[torch.Tensor], s_aux: torch.Tensor | None, whole: tuple[torch.Tensor, torch.Tensor], member: Member,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Computes attention of this rank's block of heads over whole sequences, described by `whole_sequences`."""
    ranks, tokens, (rows, borders) = member.world_size, qkv[0].shape[0], whole

    def of_own_heads(t: torch.Tensor) -> torch.Tensor:
        return _AllToAll.apply(t.unflatten(1, (ranks, -1)).movedim(1, 0), member).flatten(0, 1).index_select(0, rows)

    sinks = None if s_aux is None else s_aux.chunk(ranks)[member.rank]
    q, k, v = map(of_own_heads, qkv)
    out: torch.Tensor = sink_attention(q, k, v, sinks, cu_seqlens_q=borders, cu_seqlens_k=borders, **options)
    placed = out.new_zeros((ranks * tokens, *out.shape[1:])).index_copy(0, rows, out)
    return _AllToAll.apply(placed.unflatten(0, (ranks, tokens)), member).movedim(0, 1).flatten(1, 2)
