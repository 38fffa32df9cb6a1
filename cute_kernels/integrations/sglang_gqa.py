"""SGLang's attention backend "cute": `gqa_decode` decodes one token of each request, FlashAttention 3 does the rest.

`cute_kernels.integrations.sglang` imports this module when a server asks for the backend; it imports SGLang. The base
class keeps pages, lengths and CUDA graphs. Written against SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec

from cute_kernels import gqa_decode
from cute_kernels.integrations.hooks import or_original, say_once
from cute_kernels.integrations.padded_heads import device_refusal

HEAD_DIMS = (64, 128, 256)


class CuteAttentionBackend(FlashAttentionBackend):
    """FlashAttention's backend with another kernel in `forward_decode`."""

    def forward_decode(self, *args: Any, **kwargs: Any) -> Any:
        """Stores new tokens and decodes; arguments and result of the base class, which runs if `gqa_decode` cannot."""
        return or_original(
            self._decode, super().forward_decode,
            lambda reason: say_once(f"layers decode on FlashAttention 3: {reason}"), *args, **kwargs,
        )  # fmt: skip

    def _decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Stores and decodes; raises if `gqa_decode` does not take the call.

        Args:
            q: (requests, heads * d) or (requests, heads, d) bfloat16 or float16.
            k: (requests, kv_heads, d), stored before attention; None if it is stored already.
            v: likewise.
            layer: the attention layer.
            forward_batch: the requests.
            save_kv_cache: whether to store `k` and `v`.
            sinks: (heads,), a sink logit per head.
            others: arguments that only the base class has; a value that is neither None nor False is refused.

        Returns:
            (requests, heads * d) of q's dtype.
        """
        reason = self.refusal(q, layer, forward_batch, others)
        if reason is not None:
            raise ValueError(reason)
        metadata, heads = self.forward_metadata, layer.tp_q_head_num
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        k_pages, v_pages = self.get_paged_mha_kv_cache(layer)
        scales = (layer.k_scale, layer.v_scale) if k_pages.dtype is torch.float8_e4m3fn else (None, None)
        result = getattr(forward_batch, "_attn_output", None)  # tensor that SGLang wants the result in; None: any
        out = gqa_decode(
            q.reshape(-1, 1, heads, layer.head_dim),
            k_pages,
            v_pages,
            *scales,
            layout="paged_NHD",
            cache_seqlens=metadata.cache_seqlens_int32,
            block_table=self.pages_of(layer),
            window=layer.sliding_window_size + 1
            if layer.sliding_window_size > -1
            else None,  # SGLang's window leaves out a query's own token
            softcap=float(layer.logit_cap) or None,
            s_aux=None if sinks is None else sinks.float(),
            softmax_scale=float(layer.scaling),
            num_splits=1 if get_exec().deterministic.enable_deterministic_inference else None,
            out=None if result is None else result.view(-1, 1, heads, layer.head_dim),
        )
        assert isinstance(out, torch.Tensor)
        say_once("layers decode on gqa_decode")
        return out.view(-1, heads * layer.head_dim)

    def pages_of(self, layer: Any) -> torch.Tensor:
        """Returns a layer's block table, (requests, pages) int32. Layers with a window may have a pool of their own."""
        metadata = self.forward_metadata
        if layer.sliding_window_size > -1 and self.use_sliding_window_kv_pool:
            return metadata.swa_page_table
        return metadata.page_table

    def refusal(self, q: torch.Tensor, layer: Any, forward_batch: Any, others: dict[str, Any]) -> str | None:
        """Returns in words why `gqa_decode` does not take a call; None if it does."""
        reason = device_refusal(q.device)
        if reason is not None:
            return reason
        metadata, d = self.forward_metadata, layer.head_dim
        asked = [name for name, value in others.items() if value is not None and value is not False]
        if asked:
            return f"{', '.join(asked)}: FlashAttention's alone"
        if layer.is_cross_attention or layer.attn_type is AttentionType.ENCODER_ONLY:
            return "attention that is not causal"
        if self.local_attn_builder is not None and self.local_attn_builder.applies(layer, metadata):
            return "attention in chunks"
        if metadata.pa_swa_page_table is not None:
            return "windows that follow the prompt"
        if forward_batch.spec_info is not None and self.topk > 1:
            return "drafts that branch"
        if metadata.max_seq_len_q != 1:
            return f"{metadata.max_seq_len_q} query tokens a request"
        if self.pages_of(layer) is None:
            return "a window without a page table of its own"
        if len(q) != len(metadata.page_table) or len(q) != len(metadata.cache_seqlens_int32):
            return "queries that are padded"
        if layer.v_head_dim != d or d not in HEAD_DIMS:
            return f"head dimensions {d} and {layer.v_head_dim}: kernels take {HEAD_DIMS}"
        if self.kv_cache_is_mxfp8:
            return "a cache of MXFP8"
        if q.dtype not in (torch.bfloat16, torch.float16) or self.kv_cache_dtype not in (torch.float8_e4m3fn, q.dtype):
            return f"queries of {q.dtype} over a cache of {self.kv_cache_dtype}"
        if (layer.k_scale is None) != (layer.v_scale is None):
            return "a scale of keys or of values alone"
        return None
