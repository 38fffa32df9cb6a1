"""`context_parallel_decode` runs a decode op over the keys of all ranks of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from cute_kernels.distributed import exchange
from cute_kernels.distributed.exchange import HEADS, Member, Rows, Target, gather_heads
from cute_kernels.distributed.positions import LocalCall, local_calls
from cute_kernels.distributed.shards import check_share
from cute_kernels.distributed.symmetric import COMBINE, combine_with_peers, peer_buffer, raise_if_failed
from cute_kernels.gqa.op import gqa_decode
from cute_kernels.mla.op import mla_fp8_decode
from cute_kernels.runtime.checks import check_tensor, fail, refuse_gradients, require
from fp8_mla import V_DIM

NAME: Final = "context_parallel_decode"
_OWN: Final = ("s_aux", "out", "lse", "return_lse", "local_lengths")
"""Arguments that the op never gets unchanged."""
_SAME: Final = ("cache_seqlens", "causal", "window", "softcap", "softmax_scale")
"""Arguments of an op that must be equal on all ranks."""


class _Op(NamedTuple):
    """A decode op of this package.

    positional  names of its positional arguments
    d_v         columns of its output; None: as many as q has
    """

    positional: tuple[str, ...]
    d_v: int | None


_OPS: Final[dict[Any, _Op]] = {
    mla_fp8_decode: _Op(("q", "kv_cache"), V_DIM),
    gqa_decode: _Op(("q", "k_cache", "v_cache", "k_scale", "v_scale"), None),
}


def context_parallel_decode(
    decode: Callable[..., Any],
    group: dist.ProcessGroup | None = None,
    *args: Any,
    heads: str = "gather",
    interleave: int = 1,
    gather_q: bool = False,
    combine: str | None = "collective",
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of a few query tokens over a context whose keys are spread over the ranks of a group.

    Each rank runs `decode` over the keys that it keeps. Outputs and log-sum-exps are then exchanged and merged in the
    order of ranks: the same call gives the same bits. Every rank makes the same call, with tensors of the same shapes
    but for its cache and table.

    Which rank keeps which token: see `shard_slots`. All positions are those of the whole context:

    - dense calls take `cache_seqlens` of the whole context, and `block_table` or a contiguous cache of this rank. Query
      j of s_q > 1 causal queries sees ``cache_seqlens - s_q + 1 + j`` tokens of the whole context. Each query then is
      a row of its own, since the counts of neighbouring queries on one rank differ by 0 or 1: MLA loses nothing by
      that, GQA reads its keys s_q times.
    - sparse calls (`indices`) take slots of this rank's cache and its counts, both from `shard_indices`.
    - `window` must be a multiple of ``interleave * world_size``: only then do all queries see equally many tokens of a
      rank. It is for one query token, or for causal ones.
    - `alibi_slopes` need an interleave of 1, or one that is at least the capacity of the rank's cache: only then are
      distances on a rank a multiple of true ones.

    Args:
        decode: `mla_fp8_decode`, `gqa_decode`, a functools.partial of one, or any callable that returns (out, lse) of
            this rank's keys without sink, (..., heads, d) and (..., heads) float32. Such a callable gets its arguments
            as they are.
        group: a group of torch.distributed, of any backend that carries its tensors; None: the default group. NCCL is
            captured into CUDA graphs after one eager call with the same shapes.
        args: positional arguments of the op.
        heads: "gather": every rank gets all heads. "scatter": each rank gets its own, the rank-th of world_size equal
            blocks, and receives world_size times fewer bytes.
        interleave: number of consecutive tokens that go to one rank before the next rank's turn.
        gather_q: q has this rank's heads only, and those of all ranks are gathered first.
        combine: how partials are exchanged. None: "symmetric" if ranks can, and partials fit into buffers of 64 MiB
            a rank, else "collective"; the two may differ in the last bit. "collective": one collective of the group,
            then `merge_states`. "symmetric": one launch stores them to the other ranks' memory and merges them as they
            arrive, over torch's symmetric memory, for GPUs of one host that reach each other. The first call makes the
            buffers, outside of graph capture. Replays of graphs with calls of one group must follow one another, on one
            stream of a rank or on streams that wait for each other; eager calls wait for earlier eager calls.
        kwargs: arguments of the op by name; `out`, `lse` and `return_lse` are those of this function's result. `s_aux`
            joins the denominator once: (all heads,), or (heads that are returned,). `local_lengths`, (batch, s_q) int32
            from `shard_lengths`, may be given too: a model then computes it once a step, and not in each layer.

    Returns:
        out (batch, s_q, heads, d), all or this rank's; with `return_lse` also lse (batch, s_q, heads) float32, without
        the sink. A query without keys on any rank has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: before partials are exchanged, naming the argument, what it got and what it needs. Also
            if gradients are enabled and a tensor requires them: there is no backward. On CPUs, if ranks' calls
            differ, on every rank: they tell each other of each call. On GPUs, which do not wait for that, results are
            NaN if ranks differ in shape or dtype of their partials, heads, interleave or gather_q.
        RuntimeError: another rank failed, or did not call within the group's timeout. With "symmetric" also if ranks
            share no memory, or the first call is under graph capture.
    """
    member = Member.of(group)
    if not torch.compiler.is_compiling():
        raise_if_failed(member)
    check_share(member.rank, member.world_size, interleave)
    require(heads in HEADS, "heads", repr(heads), " or ".join(map(repr, HEADS)))
    require(combine in COMBINE, "combine", repr(combine), " or ".join(map(repr, COMBINE)))
    if isinstance(decode, functools.partial) and _op_of(decode.func):
        args, kwargs, decode = (*decode.args, *args), {**decode.keywords, **kwargs}, decode.func
    own = {name: kwargs.pop(name, None) for name in _OWN}
    if torch.is_grad_enabled():
        named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs, **own}
        refuse_gradients(NAME, named)
    op = _op_of(decode)
    if op is None:
        rows, target = _rows_of_callable(decode, args, kwargs, own, heads, gather_q, member)
    else:
        call = _named(op, args, kwargs)
        rows, target = _rows_of_op(decode, op, call, own, heads, interleave, gather_q, member)
    if combine != "collective" and torch.compiler.is_compiling():
        # locks, and ranks that meet on the host, are not traced: the graph breaks
        merged = torch.compiler.disable(_combine)(combine, rows, member, target)
    else:
        merged = _combine(combine, rows, member, target)
    return merged if own["return_lse"] else merged[0]


def _combine(how: str | None, rows: Rows, member: Member, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines partial rows over symmetric memory, or by a collective."""
    buffer = peer_buffer(how, member, rows, target)
    if buffer is None:
        return exchange.combine(NAME, rows, member, target)
    return combine_with_peers(rows, buffer, target)


def _op_of(function: Callable[..., Any]) -> _Op | None:
    """Returns the facts about an op of this package; None for another callable, which may have no hash."""
    return next((op for known, op in _OPS.items() if known is function), None)


def _named(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of an op by name."""
    names = op.positional
    require(len(args) <= len(names), "args", f"{len(args)} of them", f"at most {', '.join(names)}", TypeError)
    call = dict(zip(names, args, strict=False))
    for name in call:
        require(name not in kwargs, name, "two values", "one", TypeError)
    return {**call, **kwargs}


def _rows_of_op(
    decode: Callable[..., Any],
    op: _Op,
    call: dict[str, Any],
    own: dict[str, Any],
    heads: str,
    interleave: int,
    gather_q: bool,
    member: Member,
) -> tuple[Rows, Target]:
    """Makes this rank's partial rows, which the op writes itself, and the target of the merged rows."""
    q = call.get("q")
    check_tensor("q", q, ndim=4)
    assert isinstance(q, torch.Tensor)
    batch, s_q, h_q, _ = q.shape
    h_q *= member.world_size if gather_q else 1
    d = op.d_v or q.shape[-1]
    shape = (batch, s_q, h_q)
    target = Target.of(heads, member, shape, d, q.dtype, q.device, own["s_aux"], own["out"], own["lse"])
    positions = local_calls(call, h_q, member.rank, member.world_size, interleave, own["local_lengths"])
    same = {"heads": heads, "interleave": interleave, "gather_q": gather_q, "q": q, "s_aux": own["s_aux"] is not None}
    same |= {name: call.get(name) for name in _SAME}
    member.require_same_call(NAME, {"decode": decode.__name__, **same}, q.device, None if gather_q else q)
    if gather_q:
        q = gather_heads(NAME, q, member)
    rows = Rows.empty(shape, d, q.dtype, q.device, (1, heads == "gather", interleave, gather_q))
    for local in positions.calls:
        _run(decode, call, local, q, rows)
    if positions.lse_offset is not None:
        rows.lse.add_(positions.lse_offset)
    return rows, target


def _run(decode: Callable[..., Any], call: dict[str, Any], local: LocalCall, q: torch.Tensor, rows: Rows) -> None:
    """Runs the op for some of the queries, into their rows."""
    own_q, out, lse = (t[:, local.queries] for t in (q, rows.out, rows.lse))
    if local.flat:  # each query is a row of the batch
        queries = q.shape[0] * q.shape[1]
        own_q = own_q.reshape(queries, 1, *q.shape[2:])
        out, lse = out.view(queries, 1, *out.shape[2:]), lse.view(queries, 1, lse.shape[2])
    decode(**{**call, **local.arguments, "q": own_q}, out=out, lse=lse, return_lse=True)


def _rows_of_callable(
    decode: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: dict[str, Any],
    heads: str,
    gather_q: bool,
    member: Member,
) -> tuple[Rows, Target]:
    """Makes rows and target for a callable that returns (out, lse)."""
    require(callable(decode), "decode", type(decode).__name__, "a decode op, or a callable: (out, lse)", TypeError)
    require(not gather_q, "gather_q", gather_q, "False: only an op of this package has a q to gather")
    require(own["local_lengths"] is None, "local_lengths", "a tensor", "None: only ops of this package take lengths")
    partial = decode(*args, **kwargs)
    if not (isinstance(partial, tuple) and len(partial) == 2):
        fail("decode", f"a callable that returns {type(partial).__name__}", "one that returns (out, lse)", TypeError)
    out, lse = partial
    check_tensor("decode", out)
    check_tensor("decode", lse, dtype=torch.float32, shape=tuple(out.shape[:-1]), device=out.device)
    shape, d = tuple(lse.shape), out.shape[-1]
    target = Target.of(heads, member, shape, d, out.dtype, out.device, own["s_aux"], own["out"], own["lse"])
    if torch.is_grad_enabled():
        for partial_tensor in (out, lse):
            refuse_gradients(NAME, {"decode": partial_tensor})
    member.require_same_call(NAME, {"heads": heads, "decode": out, "s_aux": own["s_aux"] is not None}, out.device)
    rows = Rows.empty(shape, d, out.dtype, out.device, (2, heads == "gather"))
    rows.out.copy_(out)
    rows.lse.copy_(lse)
    return rows, target
