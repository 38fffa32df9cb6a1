"""What a layer of vLLM costs on a GPU, its kernels and ours: prompts, and sparse MLA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from cute_kernels import sink_attention
from scripts.bench.in_layer import time_calls
from scripts.bench.timing import time_eager

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PROMPTS = ((1, 2048), (1, 8192), (4, 2048), (1, 32768))
"""Requests of so many tokens each."""
MLA_HEADS, MLA_REQUESTS, MLA_TOPK = (8, 16, 32, 128), (1, 16, 64), 2048
MLA_QUERY_TOKENS = 2  # of a request
PAGE = 16


def _microseconds(call: Callable[[], Any]) -> float | str:
    """Of one call, or why there is none."""
    try:
        return time_eager(call, 10) * 1e6
    except Exception as error:  # a peer that this machine lacks leaves the others as they are
        return f"{type(error).__name__}: {error}"[:200]


def prompts() -> Iterator[dict[str, Any]]:
    """Microseconds of the attention of fresh prompts: ours over keys as they came, vLLM's over them and over caches."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    for requests, tokens in PROMPTS:
        total, pages = requests * tokens, requests * tokens // PAGE
        q = torch.randn(total, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, total, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        starts = torch.arange(0, total + 1, tokens, dtype=torch.int32, device="cuda")
        lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
        table = torch.arange(pages, dtype=torch.int32, device="cuda").view(requests, -1)
        out = torch.empty_like(q)
        scale = torch.ones(requests, KV_HEADS, dtype=torch.float32, device="cuda")
        codes = torch.randint(-127, 128, (2, pages, PAGE, KV_HEADS, HEAD_DIM), dtype=torch.int8, device="cuda")
        scales = torch.full((2, pages, PAGE, KV_HEADS), 0.01, dtype=torch.float32, device="cuda")
        paged = [t.view(pages, PAGE, KV_HEADS, HEAD_DIM) for t in (k, v)]
        common: dict[str, Any] = {
            "q": q, "out": out, "cu_seqlens_q": starts, "max_seqlen_q": tokens, "seqused_k": lengths,
            "max_seqlen_k": tokens, "softmax_scale": HEAD_DIM**-0.5, "causal": True, "window_size": (-1, -1),
            "block_table": table, "softcap": 0.0, "q_descale": None,
        }  # fmt: skip

        ones = {"k_descale": scale, "v_descale": scale}
        int8 = {
            "k_descale": None, "v_descale": None, "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD,
            "k_scale_cache": scales[0], "v_scale_cache": scales[1],
        }  # fmt: skip
        flash: dict[str, Any] = {
            "max_seqlen_q": tokens, "cu_seqlens_q": starts, "max_seqlen_k": tokens, "cu_seqlens_k": starts,
            "softmax_scale": HEAD_DIM**-0.5, "causal": True, "fa_version": 3, "out": out,
        }  # fmt: skip
        calls: dict[str, Callable[[], Any]] = {
            "sink_attention": partial(sink_attention, q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts),
            "flash_attention_3": partial(flash_attn_varlen_func, q, k, v, **flash),
            "triton_bf16": partial(unified_attention, k=paged[0], v=paged[1], **common, **ones),
            "triton_int8": partial(unified_attention, k=codes[0], v=codes[1], **common, **int8),
        }
        case: dict[str, Any] = {"requests": requests, "tokens": tokens}
        yield case | {f"{name}_us": _microseconds(call) for name, call in calls.items()}


FORWARDS = 16
"""Of a graph: with one, the launch of the graph itself hides up to 8 us of a short forward."""


def sparse_mla() -> Iterator[dict[str, Any]]:
    """Microseconds of vLLM's forward over 656-byte tokens, FlashMLA's and ours; two tokens a request."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    from cute_kernels.integrations.vllm.sparse_mla import CuteFlashMLASparseImpl
    from tests.support.compare import relative_error
    from tests.support.vllm_fakes import sparse_mla_layer

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
