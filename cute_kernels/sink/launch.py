"""The launches behind `sink_attention` on a GPU: what they are given, and what they have to leave behind.

`op.py` has checked all arguments, allocated all outputs and answered the calls without any query or key itself. As long
as there is no kernel for SM90 here, plain torch does the work on the tensors' device, in float32: right, and slow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward


class SinkRequest(NamedTuple):
    """The arguments of one call, checked.

    q               (batch, s_q, h_q, d) bfloat16 or float16, d 64 or 128; packed (tokens_q, h_q, d)
    k, v            (batch, s_k, h_kv, d) of q's dtype, h_q a multiple of h_kv; packed (tokens_k, h_kv, d). q, k and v
                    each have strides of their own: the last is 1, the others are positive multiples of 16 bytes but for
                    dimensions of size 1, whose strides may be anything. Addresses are multiples of 16 bytes
    s_aux           (h_q,) float32, last stride 1, or None; any value, infinities included, but NaN
    cu_seqlens_q    (batch + 1,) int32, contiguous, or None; both are None or neither is
    cu_seqlens_k    likewise. They begin with 0, never decrease and end with the number of tokens, as far as the host
                    could see: a CUDA graph may find other contents when it is replayed. Then results are undefined, but
                    nothing outside of the tensors may be read or written
    causal          query j of a sequence, at position s_k - s_q + j, sees keys up to its own position
    window          None, or at least 1 and at most 2^30: it sees keys at positions > its own - window
    softmax_scale   a number, the default filled in
    deterministic   the same call gives the same bits; the forward always does
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s_aux: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    causal: bool
    window: int | None
    softmax_scale: float
    deterministic: bool


def launch_forward(request: SinkRequest, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Starts the forward.

    Args:
        request: with at least one query and one key in all.
        out: q's shape and dtype, contiguous, its memory not initialized. Every element is to be written.
        lse: (batch, s_q, h_q), packed (tokens_q, h_q), float32, contiguous, not initialized. Every element is to be
            written: natural log, the softmax scale applied, without the sink.

    A query without keys (at a negative position under `causal`, or in a packed sequence that has none) gets out 0 and
    lse -inf. A sink of +inf gives out 0 and leaves lse as it is. What tokens of another sequence hold, NaN included,
    reaches neither.
    """
    result, result_lse = reference_sink_attention(**reference_arguments(request), dtype=torch.float32)
    out.copy_(result)
    lse.copy_(result_lse)


def launch_backward(
    request: SinkRequest,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    ds_aux: torch.Tensor | None,
) -> None:
    """Starts the backward.

    Args:
        request: that of the forward, with at least one query and one key in all.
        out: what the forward has written, contiguous.
        lse: likewise.
        dout: gradient of out, its shape and dtype; strides and address as those of q.
        dq: q's shape and dtype, contiguous, not initialized. Every element is to be written: 0 for a query without
            keys.
        dk: k's shape and dtype, likewise: 0 for a key that no query sees.
        dv: v's shape and dtype, likewise.
        ds_aux: (h_q,) float32, contiguous, not initialized; None if `request.s_aux` is. A sink of -inf or +inf gets 0,
            and so does a head none of whose queries has keys.

    With `request.deterministic` the same call gives the same bits in all four.
    """
    gradients = reference_sink_attention_backward(dout, **reference_arguments(request), dtype=torch.float32)
    for target, gradient in zip((dq, dk, dv, ds_aux), gradients, strict=True):
        if target is not None and gradient is not None:
            target.copy_(gradient)


def reference_arguments(call: NamedTuple) -> dict[str, Any]:
    """What plain torch takes of a call, by name; it is deterministic anyway."""
    arguments = call._asdict()
    return {name: value for name, value in arguments.items() if name not in ("deterministic", "differentiable")}
