"""The public function `gqa_decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from cute_kernels.gqa import blocks_op
from cute_kernels.gqa.checks import check
from cute_kernels.gqa.launch import launch
from cute_kernels.gqa.reference import reference_gqa_decode
from cute_kernels.gqa.request import DECODE, Options, Request
from cute_kernels.runtime.launch import launch_or_explain
from cute_kernels.runtime.ops import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

Both = tuple[torch.Tensor, torch.Tensor]


@overload
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., *, return_lse: Literal[False] = ..., **options: Unpack[Options],
) -> torch.Tensor: ...  # fmt: skip
@overload
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., *, return_lse: Literal[True], **options: Unpack[Options],
) -> Both: ...  # fmt: skip
@overload
def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ..., *, return_lse: bool, **options: Unpack[Options],
) -> torch.Tensor | Both: ...  # fmt: skip
@DECODE.describe
def gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> torch.Tensor | Both:
    """Compute attention of one to eight query tokens over a KV cache of 4, 8 or 16 bits; MHA, GQA and MQA.

    Query head h reads head ``h // (h_q // h_kv)`` of the cache. The queries are the last tokens of their sequence:
    query j is at position ``cache_seqlens - s_q + j``.

    It runs on the current stream, captures into a CUDA graph after one eager call with the same shapes (lengths and
    tables may change between replays), and traces under torch.compile. CPU tensors run the reference, which computes in
    float64. `cute_kernels.gqa.request` has the arguments.

    Returns:
        out (batch, s_q, h_q, d) of q's dtype; with `return_lse` also lse (batch, s_q, h_q) float32, natural log,
        without the sink. A query without keys has out 0 and lse -inf. Tokens that a query does not see, NaN included,
        change neither; an infinity in values or scales may become NaN for queries that see it.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what it got and what it needs.
            Also if gradients are enabled and a tensor requires them: there is no backward.
    """
    request: Any = {**DECODE.defaults, **options}  # adding names one by one takes 0.2 us less
    request["q"], request["k_cache"], request["v_cache"] = q, k_cache, v_cache
    request["k_scale"], request["v_scale"], request["return_lse"] = k_scale, v_scale, return_lse
    if len(request) != len(DECODE.defaults):
        DECODE.refuse_unknown(options)
    if torch.is_grad_enabled():
        DECODE.refuse_gradients(request)
    if isinstance(q, torch.Tensor) and q.is_cuda and not is_traced():
        results = (_decode_on_gpu if request["indices"] is None else _decode_blocks_on_gpu)(request)
        return results if return_lse else results[0]
    if not isinstance(q, torch.Tensor) or q.is_nested or q.dim() != 4:
        check(request)
    out, lse = request["out"], request["lse"]
    if out is None:
        out = q.new_empty(q.shape)
    if lse is None:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _decode_into({**request, "out": out, "lse": lse})
    return (out, lse) if return_lse else out


def check_decode(request: Request) -> None:
    """Raises what `gqa_decode` would raise, for adapters of this package that write to a cache before they call it."""
    if torch.is_grad_enabled():
        DECODE.refuse_gradients(request)
    check(request)


def _run(request: Request) -> None:
    """The torch operator, for torch.compile and CPU tensors."""
    if request["q"].is_cuda:
        (_decode_on_gpu if request["indices"] is None else _decode_blocks_on_gpu)(request)
        return
    check(request)
    result, result_lse = reference_gqa_decode(**_of_reference(request))
    out, lse = request["out"], request["lse"]
    assert out is not None and lse is not None  # the schema requires both
    out.copy_(result)
    lse.copy_(result_lse)


_decode_on_gpu = launch_or_explain(DECODE, launch, check)
_decode_blocks_on_gpu = launch_or_explain(DECODE, blocks_op.launch, check)
_of_reference = DECODE.arguments_of(reference_gqa_decode)
_decode_into = DECODE.register(_run, lambda request: None)
