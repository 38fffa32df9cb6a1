"""The public function `mla_fp8_decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

import fp8_mla
from cute_kernels.mla.checks import check
from cute_kernels.mla.launch import launch
from cute_kernels.mla.request import DECODE, Options, Request
from cute_kernels.runtime.launch import launch_or_explain
from cute_kernels.runtime.ops import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

Both = tuple[torch.Tensor, torch.Tensor]


@overload
def mla_fp8_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> torch.Tensor: ...
@overload
def mla_fp8_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> Both: ...
@overload
def mla_fp8_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> torch.Tensor | Both: ...
@DECODE.describe
def mla_fp8_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, return_lse: bool = False, **options: Unpack[Options]
) -> torch.Tensor | Both:
    """Compute multi-head latent attention of a few query tokens over a paged, quantized cache, sparse or dense.

    The attention is DeepSeek's absorbed form: all heads share one key of d_qk elements, 576 or 512, whose first 512 are
    also the value. docs/users/formats.md has the formats of a token; scales are used as they are.

    A sparse call may have two caches, such as a window and a compressed one: one softmax goes over the keys that
    `indices` names in `kv_cache` and those that `extra_indices` names in `extra_kv_cache`.

    It runs on the current stream, captures into a CUDA graph after one eager call with the same shapes, and traces
    under torch.compile. CPU tensors run the reference, which computes in float64. `cute_kernels.mla.request` has the
    arguments.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16; with `return_lse` also lse (batch, s_q, h_q) float32, natural log, without
        the sink. A query without keys has out 0 and lse -inf. Tokens that a query does not see, NaN included, change
        neither.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what it got and what it needs.
            Also if gradients are enabled and a tensor requires them: there is no backward.
    """
    request: Request = {**DECODE.defaults, **options, "q": q, "kv_cache": kv_cache, "return_lse": return_lse}
    if len(request) != len(DECODE.defaults):
        DECODE.refuse_unknown(options)
    if isinstance(q, torch.Tensor) and q.is_cuda and not (torch.is_grad_enabled() or is_traced()):
        out, lse = _decode_on_gpu(request)  # like `decode_request`, without one Python call
    else:
        out, lse = decode_request(request)
    return (out, lse) if return_lse else out


def decode_request(request: Request) -> Both:
    """Runs `mla_fp8_decode` for adapters of this package, which may ask for `inf_if_empty`.

    Returns:
        out and lse, as of `mla_fp8_decode`; with `inf_if_empty` the lse of a query without keys is +inf.

    Raises:
        TypeError, ValueError: as `mla_fp8_decode`.
    """
    if torch.is_grad_enabled():
        DECODE.refuse_gradients(request)
    q, out, lse = request["q"], request["out"], request["lse"]
    if isinstance(q, torch.Tensor) and q.is_cuda and not is_traced():
        return _decode_on_gpu(request)
    if not isinstance(q, torch.Tensor) or q.is_nested or q.dim() != 4:
        check(request)
    if out is None:
        out = q.new_empty((*q.shape[:3], fp8_mla.V_DIM), dtype=torch.bfloat16)
    if lse is None:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _decode_into({**request, "out": out, "lse": lse})
    return out, lse


def _run(request: Request) -> None:
    """The torch operator, for torch.compile and CPU tensors."""
    if request["q"].is_cuda:
        _decode_on_gpu(request)
        return
    check(request)
    result, result_lse = fp8_mla.reference_decode(**_of_reference(request))
    out, lse = request["out"], request["lse"]
    assert out is not None and lse is not None  # the schema requires both
    out.copy_(result)
    lse.copy_(result_lse)
    if request.get("inf_if_empty"):
        lse.masked_fill_(lse == -torch.inf, torch.inf)


_decode_on_gpu = launch_or_explain(DECODE, launch, check)
_of_reference = DECODE.arguments_of(fp8_mla.reference_decode)
_decode_into = DECODE.register(_run, lambda request: None)
