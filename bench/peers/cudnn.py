"""cuDNN's attention in torch: over bfloat16 keys and values, without sinks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.peers.offer import Offer
from bench.timing import capture_stream
from cute_kernels.gqa.reference import dequantize
from tests.kit.gqa_cases import GqaCase
from tests.kit.sink_cases import SinkCase

ELEMENTS_PER_CHUNK: Final = 1 << 27
"""Numbers that are dequantized at a time: 512 MiB of float32."""


def version() -> str:
    """Returns the version that comes with torch."""
    return f"{torch.backends.cudnn.version() or 'missing'}, in torch {torch.__version__}"


def decode(case: Any, inputs: Sequence[GqaCase], store: Any) -> Offer | None:
    """Decodes over a contiguous cache of bfloat16; every sequence fills the cache."""
    calls = [
        _cudnn(_attention, one.q.transpose(1, 2), *(unpacked(one, which) for which in "kv"), enable_gqa=True)
        for one in inputs
    ]
    return Offer(calls, calls[0]().transpose(1, 2), inputs[0])


_attention = torch.nn.functional.scaled_dot_product_attention


def _cudnn(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return function(*arguments, **options)

    return call


def unpacked(case: GqaCase, which: str) -> torch.Tensor:
    """Returns a BNSH cache, per tensor or per token and head, as bfloat16."""
    cache, scale = getattr(case, f"{which}_cache"), getattr(case, f"{which}_scale")
    values = torch.empty(cache.shape, dtype=torch.bfloat16, device=cache.device)
    step = max(1, ELEMENTS_PER_CHUNK // math.prod(cache.shape[1:]))
    for start in range(0, len(cache), step):
        rows = slice(start, start + step)
        own = scale[rows] if scale is not None and scale.ndim > 1 else scale
        values[rows] = dequantize(cache[rows], own, "BNSH", "k", torch.bfloat16).transpose(1, 2)
    return values


def prefill(case: Any, inputs: Sequence[SinkCase], store: Any) -> Offer | None:
    """Computes a forward, or gradients from one forward whose graph is kept, without sinks.

    A backward runs on the stream of its forward, and is captured on the stream of captures.
    """
    with _on_capture_stream():
        calls = [_prefill_call(one, case.backward) for one in inputs]
        first = calls[0]()
    out = (first[0] if case.backward else first).transpose(1, 2)
    return Offer(calls, out, _without_sinks(inputs[0]), eager=case.backward)


def _without_sinks(case: SinkCase) -> SinkCase:
    return SinkCase(**{**vars(case), "s_aux": None})


def _prefill_call(case: SinkCase, backward: bool) -> Callable[[], Any]:
    q, k, v = (t.transpose(1, 2).detach().requires_grad_(backward) for t in (case.q, case.k, case.v))
    forward = _cudnn(_attention, q, k, v, is_causal=True, scale=case.softmax_scale, enable_gqa=True)
    if not backward:
        return forward
    d_out = case.d_out.transpose(1, 2)
    return functools.partial(torch.autograd.grad, forward(), (q, k, v), d_out, retain_graph=True)


@contextlib.contextmanager
def _on_capture_stream() -> Iterator[None]:
    """Enters the stream of captures, in order with the caller's stream before and after."""
    own, outer = capture_stream(), torch.cuda.current_stream()
    own.wait_stream(outer)
    with torch.cuda.stream(own):
        yield
    outer.wait_stream(own)
