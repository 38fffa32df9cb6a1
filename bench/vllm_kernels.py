"""The time of a vLLM layer on a GPU, with its kernels and ours: prompts, and sparse MLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from bench.in_layer import LONG_CALL_SECONDS, Graphs, prepare, time_calls, time_together
from bench.timing import time_eager
from bench.vllm_engine import fill_cache
from cute_kernels import sink_attention
from cute_kernels.integrations.vllm.calls import INT8, GqaCalls
from cute_kernels.integrations.vllm.prompts import Prompts, attend
from tests.kit.vllm_batches import empty_cache

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PROMPTS = ((1, 0, 2048), (1, 0, 8192), (4, 0, 2048), (1, 0, 32768), (1, 24576, 8192), (1, 32256, 512), (8, 3584, 512),
           (16, 8176, 16), (1, 122880, 8192))  # fmt: skip
"""Requests, tokens of each request in the cache, and its new tokens."""
EAGER_SECONDS = 0.04
"""Calls from this length on are timed eagerly, because a graph is replayed 20 times."""
MLA_HEADS, MLA_REQUESTS, MLA_TOPK = (8, 16, 32, 128), (1, 16, 64), 2048
MLA_QUERY_TOKENS = 2  # query tokens of a request
PAGE = 16


def _microseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float | str]:
    """Returns the time of one call of each on the GPU, by graphs in turns, or why there is none; long ones eager."""
    found: dict[str, float | str] = {}
    ways: dict[str, Graphs] = {}
    for name, call in calls.items():
        try:
            seconds = time_eager(call, 2)
            if seconds > EAGER_SECONDS:
                found[name] = seconds * 1e6
            else:
                ways[name] = prepare([call] * (4 if seconds < LONG_CALL_SECONDS else 1))
        except Exception as error:  # a missing peer does not affect the others
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found | {name: timing.us for name, timing in time_together(ways, sustained=False).items()}


def prompts() -> Iterator[dict[str, Any]]:
    """Measures attention of prompts in microseconds, ours and vLLM's, over each cache; fresh ones over their keys."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    for requests, context, tokens in PROMPTS:
        given = _Prompts.draw(requests, context, tokens)
        q, out = given.q, torch.empty_like(given.q)
        layers = {name: given.layer(name, flash_attn_varlen_func) for name in ("auto", "fp8", INT8)}
        ones = torch.ones(requests, KV_HEADS, dtype=torch.float32, device="cuda")
        views = {name: calls.views(kv_cache, ones[0, 0], ones[0, 0]) for name, (calls, kv_cache) in layers.items()}
        paged: dict[str, Any] = {
            "q": q, "out": out, "cu_seqlens_q": given.starts, "max_seqlen_q": tokens, "seqused_k": given.lengths,
            "max_seqlen_k": context + tokens, "softmax_scale": HEAD_DIM**-0.5, "causal": True,
            "window_size": (-1, -1), "block_table": given.table, "softcap": 0.0,
        }  # fmt: skip
        codes = views[INT8].tokens_first()
        int8 = {
            "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD, "k_scale_cache": codes[2], "v_scale_cache": codes[3],
        }  # fmt: skip
        fp8_q = q.to(torch.float8_e4m3fn)
        calls: dict[str, Callable[[], Any]] = {
            "flash_fp8": partial(
                flash_attn_varlen_func, **paged | {"q": fp8_q}, k=views["fp8"].k, v=views["fp8"].v, fa_version=3,
                q_descale=ones, k_descale=ones, v_descale=ones,
            ),
            "triton_int8": partial(
                unified_attention, k=codes[0], v=codes[1], **paged, **int8, q_descale=None, k_descale=None,
                v_descale=None,
            ),
        }  # fmt: skip
        if context:
            for name, (layer, _) in layers.items():
                calls[f"ours_{name}"] = partial(attend, layer, q, views[name], given.prompts, out)
        else:
            k, v = torch.randn(2, requests * tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
            calls["flash_fresh"] = partial(
                layers["auto"][0].flash_attend, q, k, v, out, cu_seqlens_q=given.starts, cu_seqlens_k=given.starts,
                max_seqlen_q=tokens, max_seqlen_k=tokens, causal=True,
            )  # fmt: skip
            calls["sink_attention"] = partial(
                sink_attention, q, k, v, cu_seqlens_q=given.starts, cu_seqlens_k=given.starts
            )  # fmt: skip
        if context + tokens <= 32768:
            k, v = views["auto"][:2]
            calls["triton_bf16"] = partial(
                unified_attention, k=k, v=v, **paged, q_descale=None, k_descale=ones, v_descale=ones
            )
        case: dict[str, Any] = {"requests": requests, "context": context, "tokens": tokens}
        yield case | {f"{name}_us": us for name, us in _microseconds(calls).items()}


class _Prompts(NamedTuple):
    """Requests in the form of a step, with pages in order."""

    q: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    prompts: Prompts

    @classmethod
    def draw(cls, requests: int, context: int, tokens: int) -> _Prompts:
        """Makes random queries."""
        q = torch.randn(requests * tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        starts = torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32, device="cuda")
        lengths = torch.full((requests,), context + tokens, dtype=torch.int32, device="cuda")
        pages = requests * (context + tokens) // PAGE
        table = torch.arange(pages, dtype=torch.int32, device="cuda").view(requests, -1)
        return cls(q, starts, lengths, table, Prompts(starts, lengths, table, starts.tolist(), lengths.tolist()))

    def layer(self, cache_dtype: str, flash: Callable[..., Any]) -> tuple[GqaCalls, torch.Tensor]:
        """Makes a layer, and its cache with random numbers."""
        calls = GqaCalls(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, cache_dtype, flash=flash)
        kv_cache = empty_cache(self.table.numel(), PAGE, cache_dtype, "cuda", KV_HEADS, HEAD_DIM)
        fill_cache(kv_cache, SimpleNamespace(calls=calls))
        return calls, kv_cache


FORWARDS = 16
"""Forwards of a graph: with one, the launch of the graph itself hides up to 8 us of a short forward."""


def sparse_mla() -> Iterator[dict[str, Any]]:
    """Measures vLLM's forward over 656-byte tokens, FlashMLA's and ours, in microseconds; two tokens a request."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    from cute_kernels.integrations.vllm.sparse_mla import CuteFlashMLASparseImpl
    from tests.kit.compare import relative_error
    from tests.kit.vllm_fakes import sparse_mla_layer

    for heads in MLA_HEADS:
        for requests in MLA_REQUESTS:
            tokens = MLA_QUERY_TOKENS * requests
            case: dict[str, Any] = {"heads": heads, "requests": requests, "tokens": tokens, "topk": MLA_TOPK}
            outs = []
            for name, cls in (("ours", CuteFlashMLASparseImpl), ("flashmla", FlashMLASparseImpl)):
                layer = sparse_mla_layer(
                    cls, heads, requests=requests, topk=MLA_TOPK, tokens=8192, device="cuda"
                )  # fmt: skip
                try:
                    outs.append(layer.forward()[0])
                    timing = time_calls([layer.forward] * FORWARDS, sustained=False)
                    case[f"{name}_us"] = timing.us
                except Exception as error:
                    case[f"{name}_us"] = f"{type(error).__name__}: {error}"[:200]
            if len(outs) == 2:
                case["difference"] = relative_error(outs[0], outs[1])
            yield case
