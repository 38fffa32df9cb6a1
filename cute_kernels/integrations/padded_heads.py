"""Decodes only the real heads of DeepSeek-V4 in vLLM and SGLang, which pad query heads to 64 or 128 for FlashMLA.

It imports neither of them. Their adapters replace FlashMLA's function by a `V4Decode`, and tell around its callers how
many heads are real.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cute_kernels.compat.flash_mla import flash_mla_with_kvcache
from cute_kernels.runtime.arch import is_sm90
from fp8_mla.formats import V4

# one value per thread, since vLLM runs two micro-batches in two threads
_heads: contextvars.ContextVar[int | None] = contextvars.ContextVar("cute_kernels_heads", default=None)


@contextlib.contextmanager
def real_heads(heads: int | None) -> Iterator[None]:
    """Makes calls of a `V4Decode` inside compute only the first `heads` heads; outside, and with None, all heads."""
    token = _heads.set(heads)
    try:
        yield
    finally:
        _heads.reset(token)


class V4Decode:
    """Takes the calls of FlashMLA's `flash_mla_with_kvcache` that DeepSeek-V4 models make.

    Attributes:
        original: function that runs if no kernel takes a call.
        say: called with a line for the log; the same line may come again.
    """

    def __init__(self, original: Callable[..., Any], say: Callable[[str], None]) -> None:
        self.original = original
        self.say = say
        self._has_said_why_not = False

    def __call__(self, *positional: Any, **arguments: Any) -> Any:
        """Runs `cute_kernels.compat.flash_mla.flash_mla_with_kvcache` over the real heads, or `original`.

        Args:
            *positional: none; with any, `original` runs.
            **arguments: as FlashMLA has them. q (batch, s_q, padded heads, 512), out (batch, s_q, padded heads, 512)
                and attn_sink (padded heads,) begin with the real heads. Schedules are not used.

        Returns:
            out (batch, s_q, padded heads, 512), with arbitrary values in heads that are not real; lse (batch, real
            heads, s_q). Or the result of `original`.
        """
        reason = refusal(positional, arguments)
        if reason is None:
            try:
                return self._decode(**arguments)
            except (TypeError, ValueError) as error:  # refused before any launch
                reason = str(error)
        if not self._has_said_why_not:  # once, since a reason can name the shapes of a batch
            self._has_said_why_not = True
            self.say(f"DeepSeek-V4 decoding stays with FlashMLA: {reason}")
        return self.original(*positional, **arguments)

    def _decode(
        self,
        *,
        q: torch.Tensor,
        attn_sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = min(_heads.get() or q.shape[2], q.shape[2])
        if out is None:
            out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        _, lse = flash_mla_with_kvcache(
            q=q[:, :, :heads],
            attn_sink=None if attn_sink is None else attn_sink[:heads],
            out=out[:, :, :heads],
            **others,
        )
        self.say(f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode")
        return out, lse


def refusal(positional: tuple[Any, ...], arguments: dict[str, Any]) -> str | None:
    """Returns in words why no kernel takes a call; None if one does, unless the operator refuses its arguments."""
    q, extra = arguments.get("q"), arguments.get("extra_k_cache")
    if positional or not isinstance(q, torch.Tensor):
        return "arguments that are not by name"
    if q.dim() != 4 or q.shape[-1] != V4.d_qk or q.dtype is not torch.bfloat16:
        return f"queries of {q.dtype} and shape {tuple(q.shape)}: kernels take bfloat16, {V4.d_qk} columns"
    # planar in one release of FlashMLA, interleaved in another, with the same shapes: other rows of V4.1
    for cache in (arguments.get("k_cache"), extra):
        if isinstance(cache, torch.Tensor) and cache.shape[-1] != V4.token_bytes:
            return f"a cache of {cache.shape[-1]} bytes a token: this hook is for V4's {V4.token_bytes}"
    return device_refusal(q.device)


def device_refusal(device: torch.device) -> str | None:
    """Returns in words why no kernel runs on a device; None for an SM90 GPU and for a CPU, which runs the reference."""
    if device.type == "cpu" or is_sm90(device):
        return None
    return f"device {device}: kernels need an SM90 GPU (H100, H200)"
