"""FlashMLA's decoding interface over `mla_fp8_decode`, for the 656-byte FP8 cache.

Replace ``import flash_mla`` with ``import cute_kernels.compat.flash_mla as flash_mla``. Signatures, shapes and meaning
are FlashMLA's (github.com/deepseek-ai/FlashMLA). Supported beyond FlashMLA: dense decoding over the FP8 cache, any
number of query heads from 1 to 128, any topk, any page size, `topk_length` with this format, `attn_sink` in dense mode.

Not supported, with an error that says so: bfloat16 caches, the other FP8 layouts, a second cache (`extra_k_cache`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fp8_mla import CACHE_DTYPES, TOKEN_BYTES, V_DIM

_OLD_METADATA_INTS = 8
"""Integers in a row of the schedule that FlashMLA's older interface returns."""


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Replaces FlashMLA's tile schedule. Always empty: `mla_fp8_decode` plans each call by itself."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta | torch.Tensor, torch.Tensor | None]:
    """The metadata that FlashMLA's users request before they decode. Nothing in it is used here.

    Code for the newer interface calls it without arguments and gets an object and None. Code for the older one passes
    `cache_seqlens` first and gets tensors, which it may copy into its own buffers (for a CUDA graph).

    Args:
        *args: nothing, or the older interface's ``cache_seqlens, num_q_tokens_per_head_k, num_heads_k, ...``.
        **kwargs: the same by name.

    Returns:
        (`FlashMLASchedMeta`, None); or, where `cache_seqlens` (batch,) is given, int32 tensors on its device of shapes
        (1, 8) and (batch + 1,): a schedule with one row, and one split per sequence.
    """
    cache_seqlens = args[0] if args else kwargs.get("cache_seqlens")
    if not isinstance(cache_seqlens, torch.Tensor):
        return FlashMLASchedMeta(), None
    schedule = torch.zeros((1, _OLD_METADATA_INTS), dtype=torch.int32, device=cache_seqlens.device)
    return schedule, torch.arange(len(cache_seqlens) + 1, dtype=torch.int32, device=cache_seqlens.device)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: torch.Tensor | None = None,
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged FP8 cache: sparse where `indices` is given, dense otherwise.

    Args:
        q: (batch, s_q, h_q, 576) bfloat16.
        k_cache: (num_pages, page_size, 1, 656) uint8 or float8_e4m3fn.
        block_table: (batch, max_pages) int32. Not read in sparse mode.
        cache_seqlens: (batch,) int32. Not read in sparse mode.
        head_dim_v: 512.
        tile_scheduler_metadata: the first result of `get_mla_metadata`; not used.
        num_splits: its second result; not used.
        softmax_scale: default 576 ** -0.5.
        causal: dense only: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys.
        is_fp8_kvcache: True.
        indices: (batch, s_q, topk) int32, ``page * page_size + offset``; an index outside of the cache is skipped.
        attn_sink: (h_q,) float32: a logit that joins the denominator; +inf makes the output 0.
        extra_k_cache: None.
        extra_indices_in_kvcache: None.
        topk_length: (batch,) int32: only that many leading indices count.
        extra_topk_length: None.
        out: (batch, s_q, h_q, 512) bfloat16 to write to.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16 and lse (batch, h_q, s_q) float32: natural log, without the sink, and
        **+inf** for a query that sees no key, as in FlashMLA (`mla_fp8_decode` has -inf there). Its out is 0.

    Raises:
        TypeError: a wrong dtype, a bfloat16 `k_cache` among them.
        ValueError: anything else that is wrong or not supported. `mla_fp8_decode` checks the arguments that are only
            passed on; in its messages `k_cache` is called kv_cache and `attn_sink` s_aux.
    """
    # imported here, so that importing this module loads no kernel
    from cute_kernels.mla.op import mla_fp8_decode

    _refuse_unsupported(
        k_cache, head_dim_v, is_fp8_kvcache, (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    )
    sparse = indices is not None
    if sparse and causal:
        raise ValueError("causal: got True with indices; needs False, as indices alone say what a query sees")
    out, lse = mla_fp8_decode(
        q,
        k_cache,
        indices=indices,
        topk_length=topk_length,
        # users of FlashMLA pass these in sparse mode too, where they have no meaning
        block_table=None if sparse else block_table,
        cache_seqlens=None if sparse else cache_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        s_aux=attn_sink,
        out=out,
        return_lse=True,
    )
    return out, lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2).contiguous()


def _refuse_unsupported(
    k_cache: torch.Tensor, head_dim_v: int, is_fp8_kvcache: bool, extra: tuple[torch.Tensor | None, ...]
) -> None:
    """Raise for features that FlashMLA has and this package does not."""
    if not isinstance(k_cache, torch.Tensor) or k_cache.dtype not in CACHE_DTYPES:
        got = k_cache.dtype if isinstance(k_cache, torch.Tensor) else repr(k_cache)
        raise TypeError(
            f"k_cache: got {got}; needs uint8 or float8_e4m3fn: only the {TOKEN_BYTES}-byte FP8 format is supported"
        )
    if not is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache: got False; needs True: bfloat16 caches are not supported")
    if k_cache.shape[-1:] != (TOKEN_BYTES,):
        raise ValueError(
            f"k_cache: got shape {tuple(k_cache.shape)}; needs (num_pages, page_size, 1, {TOKEN_BYTES}): "
            "other FP8 layouts are not supported"
        )
    if head_dim_v != V_DIM:
        raise ValueError(f"head_dim_v: got {head_dim_v}; needs {V_DIM}")
    if any(argument is not None for argument in extra):
        raise ValueError(
            "extra_k_cache, extra_indices_in_kvcache, extra_topk_length: got a second cache; needs None: "
            "attention over two caches is not supported"
        )
