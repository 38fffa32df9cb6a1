"""vLLM's models with a FlashMLA class of their own, which a replaced backend does not reach: DeepSeek-V4, HY-V4.

Written against vLLM 0.26 (DeepSeek-V4) and 0.33 (also V4.1 and HY-V4); imports no vLLM.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.integrations.hooks import SayOnce, or_original, replace
from cute_kernels.integrations.padded_heads import V4Decode, device_refusal, real_heads
from cute_kernels.integrations.vllm.calls import sparse_mla

logger = logging.getLogger("vllm.cute_kernels")

FLASH_MLA = "flash_mla_with_kvcache"
V4_CLASS, V4_METHOD = "DeepseekV4FlashMLAAttention", "forward_mqa"
"""The class and method whose calls of FlashMLA have padded heads; `n_local_heads` of an instance are real."""
HY_V4_CLASS, HY_V4_METHOD = "HYV4FlashMLASparseImpl", "_fp8_flash_mla_kernel"
say_once = SayOnce(functools.partial(logger.info, "cute-kernels: %s"))
"""Logs a line, once in each process."""


def change_deepseek_v4(module: types.ModuleType) -> None:
    """Replaces FlashMLA's function by a `V4Decode`, and tells it the heads of the layer that calls it."""

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        def forward_mqa(self: Any, *args: Any, **kwargs: Any) -> Any:
            with real_heads(getattr(self, "n_local_heads", None)):
                return method(self, *args, **kwargs)

        return forward_mqa

    original, layer = getattr(module, FLASH_MLA, None), getattr(module, V4_CLASS, None)
    if original is None or not hasattr(layer, V4_METHOD):
        logger.warning(
            "cute-kernels: DeepSeek-V4 decoding stays with FlashMLA: %s has no %s or no %s.%s",
            module.__name__, FLASH_MLA, V4_CLASS, V4_METHOD,
        )  # fmt: skip
    elif not isinstance(original, V4Decode):
        replace(layer, V4_METHOD, around, lambda: None)
        setattr(module, FLASH_MLA, V4Decode(original, say_once))


def change_hy_v4(module: types.ModuleType) -> None:
    """Replaces the kernel over V3.2's 656 bytes in the class that adds a sink to vLLM's sparse MLA."""

    def decode(
        self: Any, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, topk_indices: torch.Tensor, kernel_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reason = device_refusal(q.device)
        if reason is not None:
            raise ValueError(reason)
        sinks = self._sinks_for_query(q, head_dim=2, kernel_heads=q.shape[2])
        result = sparse_mla(q, kv_c_and_k_pe_cache, topk_indices, self.softmax_scale, sinks)
        say_once(f"sparse MLA of HY-V4 with {q.shape[2]} heads runs on mla_fp8_decode")
        return result

    def stays(reason: str) -> None:
        say_once(f"sparse MLA of HY-V4 stays with FlashMLA: {reason}")

    def missing() -> None:
        logger.warning(
            "cute-kernels: sparse MLA of HY-V4 stays with FlashMLA: %s has no %s.%s or no _sinks_for_query",
            module.__name__, HY_V4_CLASS, HY_V4_METHOD,
        )  # fmt: skip

    layer = getattr(module, HY_V4_CLASS, None)
    owner = layer if hasattr(layer, "_sinks_for_query") else None
    replace(owner, HY_V4_METHOD, lambda method: functools.partial(or_original, decode, method, stays), missing)


CHANGES: dict[str, Callable[[types.ModuleType], None]] = {
    "vllm.models.deepseek_v4.nvidia.flashmla": change_deepseek_v4,
    "vllm.models.deepseek_v41.nvidia.flashmla": change_deepseek_v4,
    "vllm.models.hy_v4.nvidia.flashmla_sparse": change_hy_v4,
}
"""The change of each module, made once vLLM has imported it."""
