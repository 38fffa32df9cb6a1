"""SGLang: sparse MLA of DeepSeek-V3.2, V4 and GLM-5 on `mla_fp8_decode`, an attention backend "cute" on `gqa_decode`.

SGLang finds `register` by the entry point of group sglang.srt.plugins and calls it in each of its processes; nothing
else imports this module. `SGLANG_PLUGINS` names the plugins to load; a list without this one turns it off. Written
against SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.integrations import sglang_indexer
from cute_kernels.integrations.hooks import or_original, replace, say_once
from cute_kernels.integrations.on_import import change_on_import
from cute_kernels.integrations.padded_heads import V4Decode, device_refusal, real_heads
from fp8_mla.formats import V3_2

NAME = "cute"
"""The name of the attention backend, for `--attention-backend`."""
WRITTEN_AGAINST = "0.5.23"
SPARSE_MLA_CLASS, SPARSE_MLA_METHOD = "DeepseekSparseAttnBackend", "_forward_flashmla_kv"
DEEPSEEK_V4_CLASS, DEEPSEEK_V4_METHOD = "DeepseekV4AttnBackend", "_forward_attention"
MAX_HEADS = 128

logger = logging.getLogger(__name__)


def register(untested: bool = False) -> None:
    """Changes sparse MLA and DeepSeek-V4 when SGLang imports them, and adds the attention backend.

    A second call changes nothing. If SGLang lacks the means to add the backend, it serves without it, after a warning.

    Args:
        untested: also changes the sparse indexer. Its choice is not SGLang's, key by key, and no engine has run it.
            Your own plugin may call `register(untested=True)`.
    """
    change_on_import(CHANGES)
    if untested:
        change_on_import(sglang_indexer.CHANGES)
    try:
        _add_backend()
    except Exception as error:  # another version may have changed its private modules in any way
        logger.warning(
            'cute_kernels: no attention backend "%s": %s: %s; written against SGLang %s',
            NAME, type(error).__name__, error, WRITTEN_AGAINST,
        )  # fmt: skip


def _add_backend() -> None:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        register_attention_backend(NAME)(attention_backend)
        add_attention_backend_choices([NAME])
        add_deterministic_attention_backend_choices([NAME])
        add_radix_supported_deterministic_attention_backend_choices([NAME])


def attention_backend(runner: Any) -> Any:
    """Makes the backend "cute" for a model runner.

    Raises:
        ValueError: the model has latent attention, which SGLang's own backend serves, changed by a hook.
    """
    if runner.use_mla_backend:
        raise ValueError(f'attention backend: got "{NAME}" for latent attention; needs "dsa", which {NAME} is part of')
    from cute_kernels.integrations.sglang_gqa import CuteAttentionBackend  # imports SGLang's backend of FlashAttention

    return CuteAttentionBackend(runner)


def sparse_mla(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `DeepseekSparseAttnBackend._forward_flashmla_kv`, which pads heads to 64 or 128.

    Args:
        original: the method without the hook; it runs if no kernel takes the call.
        backend: the backend that is the method's self.
        args: the method's, as `_sparse_mla` names them.
        kwargs: likewise.

    Returns:
        (tokens, 1, heads, 512) bfloat16.
    """
    return or_original(_sparse_mla, original, _stays, backend, *args, **kwargs)


def _stays(reason: str) -> None:
    say_once(f"sparse MLA stays with FlashMLA: {reason}")


def _sparse_mla(
    backend: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: torch.Tensor,
) -> torch.Tensor:
    """Decodes; raises if no kernel takes the call.

    Args:
        backend: SGLang's backend.
        q_all: (tokens, heads * 576) or (tokens, heads, 576) bfloat16.
        kv_cache: the pool's rows of one layer, 656 bytes a token.
        v_head_dim: 512.
        sm_scale: the softmax scale.
        layer: the attention layer, which has `tp_q_head_num` and `head_dim`.
        metadata: FlashMLA's schedule, which only SGLang's own method needs.
        page_table_1: (tokens, topk) int32, slots, -1 for none.
    """
    reason = sparse_mla_refusal(backend, q_all, layer, v_head_dim)
    if reason is not None:
        raise ValueError(reason)
    out = mla_fp8_decode(
        q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim),
        kv_cache.view(-1, backend.physical_page_size, V3_2.token_bytes),
        indices=page_table_1.unsqueeze(1),
        softmax_scale=float(sm_scale),
    )
    assert isinstance(out, torch.Tensor)
    say_once("sparse MLA runs on mla_fp8_decode")
    return out


def sparse_mla_refusal(backend: Any, q: torch.Tensor, layer: Any, v_head_dim: int) -> str | None:
    """Returns in words why no kernel takes a call; None if one does. The device is checked before all else."""
    reason = device_refusal(q.device)
    if reason is not None:
        return reason
    if not backend.dsa_kv_cache_store_fp8:
        return "a cache that is not FP8: start with --kv-cache-dtype fp8_e4m3"
    if backend.flashmla_kv_format != "V32" or backend.kv_cache_dim != V3_2.token_bytes:
        return f"rows of {backend.kv_cache_dim} bytes, format {backend.flashmla_kv_format}: kernels read V32's 656"
    if (layer.head_dim, v_head_dim) != (V3_2.d_qk, V3_2.d_v):
        return f"head dimensions {layer.head_dim} and {v_head_dim}: kernels take {V3_2.d_qk} and {V3_2.d_v}"
    if layer.tp_q_head_num > MAX_HEADS:
        return f"{layer.tp_q_head_num} heads: kernels take up to {MAX_HEADS}"
    if q.dtype is not torch.bfloat16:
        return f"queries of {q.dtype}: kernels take bfloat16"
    return None


def change_sparse_mla(module: types.ModuleType) -> None:
    """Puts `sparse_mla` around `DeepseekSparseAttnBackend._forward_flashmla_kv`."""
    owner = getattr(module, SPARSE_MLA_CLASS, None)
    missing = f"this SGLang has no {SPARSE_MLA_CLASS}.{SPARSE_MLA_METHOD}"
    replace(owner, SPARSE_MLA_METHOD, lambda method: functools.partial(sparse_mla, method), lambda: _stays(missing))


def change_deepseek_v4(module: types.ModuleType) -> None:
    """Makes `DeepseekV4AttnBackend._forward_attention` decode with our kernel and only the real heads.

    That method stores tokens and chooses between kernels. FlashMLA's kernel is an attribute that the constructor makes
    on an NVIDIA GPU; a `V4Decode` replaces it in the first call. The backend is changed when SGLang imports it, because
    a hook would load it in each process of a server, whatever that serves.
    """

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        def forward_attention(self: Any, *args: Any, **kwargs: Any) -> Any:
            decode = getattr(self, "_flash_mla_with_kvcache", None)
            if decode is not None and not isinstance(decode, V4Decode):
                self._flash_mla_with_kvcache = V4Decode(decode, say_once)
            layer = kwargs.get("layer", args[3] if len(args) > 3 else None)
            with real_heads(getattr(layer, "tp_q_head_num", None)):  # differs between calls if disaggregated
                return method(self, *args, **kwargs)

        return forward_attention

    missing = f"DeepSeek-V4 decoding stays with FlashMLA: this SGLang has no {DEEPSEEK_V4_CLASS}.{DEEPSEEK_V4_METHOD}"
    replace(getattr(module, DEEPSEEK_V4_CLASS, None), DEEPSEEK_V4_METHOD, around, lambda: say_once(missing))


CHANGES = {
    "sglang.srt.layers.attention.dsa_backend": change_sparse_mla,
    "sglang.srt.layers.attention.deepseek_v4_backend": change_deepseek_v4,
}
"""The change of each module, made once SGLang has imported it."""
