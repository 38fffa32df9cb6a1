"""A module like vLLM's for DeepSeek-V4 and HY-V4: FlashMLA's function, and classes that call it as vLLM's classes do.

Tests load fresh copies of this file by `load`, or put it where vLLM's modules are. FlashMLA is a record here.
"""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path
from typing import Any

import torch

CALLS: list[dict[str, Any]] = []
"""The arguments of every call of FlashMLA."""


def load() -> types.ModuleType:
    """A new copy of this module, not in sys.modules."""
    spec = importlib.util.spec_from_file_location("flash_mla_of_v4_copy", Path(__file__))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Any, Any]:
    """Has the signature of the function in vLLM 0.26."""
    CALLS.append(dict(locals()))
    return "FlashMLA's out", "FlashMLA's lse"


class DeepseekV4FlashMLAAttention:
    """A layer with a window's cache and, unless `extra_cache` is None, a compressed one. Heads of q are padded."""

    def __init__(
        self,
        n_local_heads: int,
        scale: float,
        attn_sink: torch.Tensor,
        window_cache: torch.Tensor,
        extra_cache: torch.Tensor | None,
    ) -> None:
        self.n_local_heads, self.scale, self.attn_sink = n_local_heads, scale, attn_sink
        self.window_cache, self.extra_cache = window_cache, extra_cache

    def forward_mqa(self, q: torch.Tensor, kv: Any, positions: Any, output: torch.Tensor) -> Any:
        """Here `positions` has the index lists, which vLLM takes from its metadata."""
        return flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=self.window_cache.unsqueeze(-2),
            block_table=None,
            head_dim_v=512,
            tile_scheduler_metadata=object(),
            cache_seqlens=None,
            is_fp8_kvcache=True,
            indices=positions.indices,
            topk_length=positions.topk_length,
            softmax_scale=self.scale,
            attn_sink=self.attn_sink,
            extra_k_cache=None if self.extra_cache is None else self.extra_cache.unsqueeze(-2),
            extra_indices_in_kvcache=positions.extra_indices,
            extra_topk_length=positions.extra_topk_length,
            out=output.unsqueeze(1),
        )


class HYV4FlashMLASparseImpl:
    """Has the attributes of vLLM's class that the adapter reads."""

    softmax_scale = 0.1

    def __init__(self, sinks: torch.Tensor | None) -> None:
        self.sinks = sinks

    def _sinks_for_query(self, q: torch.Tensor, head_dim: int, kernel_heads: int) -> torch.Tensor | None:
        assert q.shape[head_dim] == kernel_heads, "a kernel of padded heads"
        return self.sinks

    def _fp8_flash_mla_kernel(self, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, kernel_metadata: Any) -> Any:
        return "FlashMLA's out", "FlashMLA's lse"
