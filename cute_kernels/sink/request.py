"""The arguments of `sink_attention` and of its gradients, each said once; see `cute_kernels.runtime.ops`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypedDict

import torch

from cute_kernels.gqa.spec import MAX_RANGES
from cute_kernels.runtime.checks import check_flag, check_int, check_number
from cute_kernels.runtime.ops import Operator, Option

_check_window = partial(
    check_int, least=1, needs="at least 1, as a window shows a query its own token, or None for no window"
)


class Inputs(TypedDict):
    """Positional arguments of `sink_attention`.

    q: (batch, s_q, h_q, d) bfloat16 or float16, d 64 or 128; packed (tokens, h_q, d). Rows contiguous, addresses
        and all other strides multiples of 16 bytes.
    k: (batch, s_k, h_kv, d), q's dtype, h_q a multiple of h_kv; packed (tokens, h_kv, d). Rows as q's.
    v: the same shape and dtype; strides may differ.
    s_aux: (h_q,) float32, a logit per head in natural-log units that joins the softmax denominator alone and is not
        multiplied by softmax_scale. -inf is no sink, +inf makes the output 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s_aux: torch.Tensor | None


class Shared(TypedDict, total=False):
    """Options of the forward and of the backward."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    causal: Annotated[bool, Option(True, check=check_flag)]
    window: Annotated[int | None, Option(check=_check_window)]
    softmax_scale: Annotated[float | None, Option(check=check_number)]
    deterministic: Annotated[bool, Option(False, check=check_flag)]


class Forward(TypedDict, total=False):
    """Options of the forward only."""

    max_seqlen_q: Annotated[int | None, Option(check=partial(check_int, least=0), later=True, schema="SymInt?")]
    num_splits: Annotated[int | None, Option(check=partial(check_int, least=1, most=MAX_RANGES), later=True)]


class Options(Shared, Forward, total=False):
    """Keyword arguments of `sink_attention`.

    causal: a query does not see tokens after its own. With s_q > s_k the first queries see none.
    window: number of tokens up to and including its own that a query sees, at least 1. Without `causal` a query
        also sees all tokens after its own.
    softmax_scale: default d ** -0.5.
    cu_seqlens_q: (batch + 1,) int32, contiguous: sequence i has tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1
        of a packed q. It begins with 0, never decreases, and ends with the number of tokens or before: rows past the
        last sequence are padding, and their results are those of queries without keys. The host reads and checks the
        contents once for each tensor and each change that torch counts, which waits for the GPU; not under graph
        capture. If a replay finds contents that break these rules, its results are undefined, but it stays within its
        tensors.
    cu_seqlens_k: the same for k and v.
    deterministic: the same call gives gradients with the same bits; torch.use_deterministic_algorithms also turns
        it on. The bits of the output are always the same.
    return_lse: also return the log-sum-exp.
    max_seqlen_q: tokens of the longest sequence of a packed q, for callers who know it. Without gradients the host then
        does not read cu_seqlens_q and cu_seqlens_k and waits for nothing; they must keep the rules above. With
        gradients it changes nothing.
    num_splits: splits of each sequence's keys, 1 to 256, in calls that run the kernel of `gqa_decode`.
        Default: planned over the whole batch. With a number a row's bits depend on that row alone. Other calls
        split no keys, and their rows never depend on others.
    """


class Recorded(TypedDict, total=False):
    """Facts of a call that autograd decides: `differentiable`, whether it records the call."""

    differentiable: Annotated[bool, Option(False)]


class Request(Inputs, Shared, Recorded, Forward, total=False):
    """All arguments of a `sink_attention` call, hidden ones included.

    return_lse  whether a call that runs the kernel of `gqa_decode` returns lse too
    """

    return_lse: Annotated[bool, Option(True, schema="")]


class Results(TypedDict):
    """Inputs of a backward from its forward: the gradient of out, and the results."""

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class BackwardInputs(TypedDict):
    """Positional arguments of `sink_attention_backward`.

    dout: gradient of out, q's shape and dtype, any strides.
    q: as `sink_attention` takes it.
    k: likewise; all keys that the queries see, or some of them.
    v: likewise.
    out: q's shape and dtype: the output over all keys, whichever calls it is from.
    lse: (batch, s_q, h_q) or packed (tokens, h_q) float32, natural log, over all keys. Without the sink if s_aux is
        given. A query with -inf or +inf gets and gives gradient 0.
    s_aux: as `sink_attention` takes it. None if there is no sink, or if lse contains it: lse is then
        ``torch.logaddexp(lse, s_aux)``, dq, dk and dv are the same, and the caller computes the gradient of s_aux.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    s_aux: torch.Tensor | None


class BackwardOptions(Shared, total=False):
    """Keyword arguments of `sink_attention_backward`.

    causal: as `sink_attention` takes it, for the keys that are given.
    window: likewise.
    softmax_scale: likewise.
    cu_seqlens_q: likewise.
    cu_seqlens_k: likewise.
    deterministic: likewise.
    delta: lse's shape, float32: the sum over d of dout * out of each query, if the caller has it; out is not read
        then. If a loss depends on lse too, pass that sum minus the gradient of lse, and s_aux None.
    """

    delta: torch.Tensor | None


class BackwardRequest(Results, Inputs, Shared):
    """All inputs of the gradients."""

    delta: torch.Tensor | None


FORWARD = Operator("sink_attention", Inputs, Options, Request, "(Tensor out, Tensor lse)")
BACKWARD = Operator(
    "sink_attention_backward",
    BackwardInputs,
    BackwardOptions,
    BackwardRequest,
    "(Tensor dq, Tensor dk, Tensor dv, Tensor ds_aux)",
)
