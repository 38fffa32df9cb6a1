"""FlashMLA's decoding interface over `mla_fp8_decode`, for the FP8 and FP4 caches.

Replace ``import flash_mla`` with ``import cute_kernels.compat.flash_mla as flash_mla``. Signatures, shapes and meaning
are FlashMLA's (github.com/deepseek-ai/FlashMLA), with the arguments that vLLM and SGLang add. Supported beyond
FlashMLA: dense decoding over these caches, any number of query heads from 1 to 128, any topk, any page size,
`topk_length` with every format, `attn_sink` in dense mode, a second cache of V3.2.

Not supported, with an error that says so: bfloat16 caches, FP8 queries, sparse prefill.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from cute_kernels.runtime.checks import check_plain
from fp8_mla import CACHE_DTYPES, V_DIM
from fp8_mla.formats import FORMATS, V3_2, V3_2_NOPE, V4, V4_1, V4_1_FP4

_OLD_METADATA_INTS = 8
"""Integers in a row of the schedule that FlashMLA's older interface returns."""

_KV_FORMATS = {
    "V32": ((V3_2, V3_2_NOPE), None),
    "V4": ((V4,), None),
    "MODEL1": ((V4,), None),
    "V41": ((V4_1, V4_1_FP4), "planar"),
    "V41_FP4": ((V4_1, V4_1_FP4), "planar"),
    "V41_NEW": ((V4_1, V4_1_FP4), "interleaved"),
    "V41_FP4_NEW": ((V4_1, V4_1_FP4), "interleaved"),
    **{name.upper(): ((token_format,), None) for name, token_format in FORMATS.items()},
}
"""By `kv_format`: the formats that `k_cache` may have, told apart by its bytes, and the layout of its pages."""


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Replaces FlashMLA's tile schedule. Always empty: `mla_fp8_decode` plans each call by itself."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta | torch.Tensor, torch.Tensor | None]:
    """Returns the metadata that FlashMLA's users request before they decode. Nothing in it is used here.

    Code for the newer interface calls it without arguments and gets an object and None. Code for the older one passes
    `cache_seqlens` first and gets tensors, which it may copy into its own buffers (for a CUDA graph).

    Args:
        *args: nothing, or the older interface's ``cache_seqlens, num_q_tokens_per_head_k, num_heads_k, ...``.
        **kwargs: the same by name.

    Returns:
        (`FlashMLASchedMeta`, None); or, if `cache_seqlens` (batch,) is given, int32 tensors on its device of shapes
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
    enable_batch_invariant: bool = False,
    kv_format: Any = None,
    use_legacy: bool | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged FP8 or FP4 cache: sparse if `indices` is given, dense otherwise.

    Args:
        q: (batch, s_q, h_q, 576 or 512) bfloat16.
        k_cache: (num_pages, page_size, 1, bytes) uint8 or float8_e4m3fn, in pages of any distance. 656 bytes a token
            are V3.2, 584 V4, 528 V4.1, 288 its fp4.
        block_table: (batch, max_pages) int32. Not read in sparse mode.
        cache_seqlens: (batch,) int32. Not read in sparse mode.
        head_dim_v: 512.
        tile_scheduler_metadata: the first result of `get_mla_metadata`; not used.
        num_splits: its second result; not used.
        softmax_scale: default: columns of q ** -0.5.
        causal: dense only: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys.
        is_fp8_kvcache: True.
        indices: (batch, s_q, topk) int32, ``page * page_size + offset``; an index outside of the cache is skipped.
        attn_sink: (h_q,) float32: a logit that joins the denominator; +inf makes the output 0.
        extra_k_cache: a second cache, as `k_cache`, in the same softmax: V4 with V4, V4.1 with V4.1 or its fp4, V3.2
            with V3.2.
        extra_indices_in_kvcache: (batch, s_q, extra_topk) int32: slots of the second cache.
        topk_length: (batch,) int32: only that many leading indices count.
        extra_topk_length: as `topk_length`, for the second cache.
        out: (batch, s_q, h_q, 512) bfloat16 to write to.
        enable_batch_invariant: vLLM's: one CTA has all keys of a query, so a query's bits do not depend on the batch.
        kv_format: SGLang's: "V32", "MODEL1" or "V4", "V41", "V41_FP4", "V41_NEW" or "V41_FP4_NEW", as a string or an
            enum; also a `cache_format` of `mla_fp8_decode`, which 528 bytes of "v3.2_nope" need. The pages of the last
            two are interleaved. None: what the bytes say; pages of V4.1 are then planar.
        use_legacy: SGLang's choice between two kernels of FlashMLA; not used.
        descale_q: None.
        descale_k: None.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16 and lse (batch, h_q, s_q) float32: natural log, without the sink, and
        **+inf** for a query that sees no key, as in FlashMLA (`mla_fp8_decode` has -inf there). Its out is 0.

    Raises:
        TypeError: a wrong dtype, a bfloat16 `k_cache` among them.
        ValueError: anything else that is wrong or not supported. `mla_fp8_decode` checks the arguments that are only
            passed on; in its messages `k_cache` is called kv_cache, `attn_sink` s_aux, `extra_k_cache` extra_kv_cache
            and `extra_indices_in_kvcache` extra_indices.
    """
    # imported here, so that importing this module loads no kernel
    from cute_kernels.mla.op import decode_request
    from cute_kernels.mla.request import DECODE

    _refuse_unsupported(k_cache, head_dim_v, is_fp8_kvcache, descale_q, descale_k)
    sparse = indices is not None
    if sparse and causal:
        raise ValueError("causal: got True with indices; needs False, as indices alone say what a query sees")
    cache_format, cache_layout = _format(q, k_cache, kv_format)
    lse = None
    if isinstance(q, torch.Tensor) and not q.is_nested and q.dim() == 4:
        batch, s_q, h_q, _ = q.shape
        lse = torch.empty((batch, h_q, s_q), dtype=torch.float32, device=q.device).transpose(1, 2)
    request = DECODE.request(
        q=q,
        kv_cache=k_cache,
        indices=indices,
        topk_length=topk_length,
        # users of FlashMLA pass these in sparse mode too, where they have no meaning
        block_table=None if sparse else block_table,
        cache_seqlens=None if sparse else cache_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        s_aux=attn_sink,
        num_splits=1 if enable_batch_invariant else None,
        exchange="none" if enable_batch_invariant else None,
        cache_format=cache_format,
        cache_layout=cache_layout,
        extra_kv_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
        out=out,
        lse=lse,
        inf_if_empty=True,
    )
    out, lse = decode_request(request)
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill over bfloat16 keys, which this package does not have.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "flash_mla_sparse_fwd: got bfloat16 keys; needs FlashMLA itself: the kernels of this package read quantized "
        "caches alone, and flash_mla_with_kvcache decodes over those"
    )


def _format(q: Any, k_cache: torch.Tensor, kv_format: Any) -> tuple[str | None, str | None]:
    """Returns `cache_format` and `cache_layout` for `mla_fp8_decode`."""
    num_bytes = k_cache.shape[-1] if k_cache.dim() else 0
    if kv_format is None:
        return V4_1.name if num_bytes == V4_1.token_bytes else None, None
    name = str(getattr(kv_format, "name", kv_format)).upper()
    if name not in _KV_FORMATS:
        raise ValueError(f"kv_format: got {kv_format!r}; needs one of {', '.join(_KV_FORMATS)}")
    formats, layout = _KV_FORMATS[name]
    d_qk = q.shape[-1] if isinstance(q, torch.Tensor) and not q.is_nested and q.dim() else 0
    fitting = [token_format for token_format in formats if num_bytes in token_format.cache_bytes]
    if not fitting:
        sizes = " or ".join(str(size) for token_format in formats for size in token_format.cache_bytes)
        raise ValueError(f"k_cache: got tokens of {num_bytes} bytes with kv_format {kv_format!r}; needs {sizes}")
    # V3.2's bytes may be one of several: the columns of q decide
    return next((f for f in fitting if f.d_qk == d_qk), fitting[0]).name, layout


def _refuse_unsupported(
    k_cache: torch.Tensor, head_dim_v: int, is_fp8_kvcache: bool, descale_q: object, descale_k: object
) -> None:
    """Raises for features that FlashMLA has and this package does not."""
    if not isinstance(k_cache, torch.Tensor) or k_cache.dtype not in CACHE_DTYPES:
        got = k_cache.dtype if isinstance(k_cache, torch.Tensor) else repr(k_cache)
        raise TypeError(f"k_cache: got {got}; needs uint8 or float8_e4m3fn: only FP8 and FP4 caches are supported")
    check_plain("k_cache", k_cache)
    if not is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache: got False; needs True: bfloat16 caches are not supported")
    if head_dim_v != V_DIM:
        raise ValueError(f"head_dim_v: got {head_dim_v}; needs {V_DIM}")
    for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
        if value is not None:
            raise ValueError(f"{name}: got a value; needs None: queries are bfloat16, and caches have their own scales")
