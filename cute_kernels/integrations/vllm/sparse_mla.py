"""vLLM's sparse MLA on `mla_fp8_decode`, replacing FLASHMLA_SPARSE. For 0.26 and 0.33; imports vLLM.

vLLM pads 8 to 32 heads of a GPU to 64 for FlashMLA; this kernel takes them unpadded. The metadata, the cache of 656
bytes a token and the kernels for long prompts of 32 heads or more stay vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)

from cute_kernels.integrations.hooks import SayOnce, or_original
from cute_kernels.integrations.vllm.backends import Function
from cute_kernels.integrations.vllm.calls import sparse_mla
from cute_kernels.integrations.vllm.warming import compile_shapes
from cute_kernels.warm.shapes import MlaShape

logger = init_logger("vllm.cute_kernels")

CACHE_DTYPE = "fp8_ds_mla"
"""vLLM's name of the 656-byte format; `--kv-cache-dtype fp8` becomes it."""
WARM_BATCH_SIZES = 256
EXTENDS: tuple[Function, ...] = (
    (FlashMLASparseImpl, "_fp8_flash_mla_kernel", "self q kv_c_and_k_pe_cache topk_indices kernel_metadata"),
    (FlashMLASparseMetadataBuilder, "__init__", "self kv_cache_spec layer_names vllm_config device"),
    (FlashMLASparseBackend, "get_impl_cls", ""),
    (FlashMLASparseBackend, "get_builder_cls", ""),
)
"""Functions of vLLM that are replaced here, in the form of 0.26 and 0.33."""


_stays = SayOnce(lambda reason: logger.warning("cute-kernels: sparse MLA runs on vLLM's kernels: %s", reason))


def inactive_because(kv_cache_dtype: str) -> str | None:
    """Returns in words why vLLM's own kernels run; None if ours do."""
    capability = current_platform.get_device_capability()
    if capability is None or (capability.major, capability.minor) != (9, 0):
        return f"compute capability {'unknown' if capability is None else capability.as_version_str()}; needs 9.0"
    if kv_cache_dtype != CACHE_DTYPE:
        return f"a KV cache of {kv_cache_dtype}; needs --kv-cache-dtype fp8"
    return None


class CuteFlashMLASparseImpl(FlashMLASparseImpl):
    """The attention of a layer: FlashMLA's class with another kernel over FP8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = inactive_because(self.kv_cache_dtype)
        if reason is None:
            logger.info_once(
                "cute-kernels: sparse MLA of %d heads runs on mla_fp8_decode (VLLM_PLUGINS= turns it off)",
                self.num_heads,
            )
        else:
            logger.info_once("cute-kernels: sparse MLA runs on vLLM's kernels: %s", reason)

    def _fp8_flash_mla_kernel(self, *args: Any, **kwargs: Any) -> Any:
        """Attends with q (b, s, heads, 576) to slots (b, s, topk): out (b, s, heads, 512), lse (b, heads, s).

        It is only called over the 656-byte format; `CuteFlashMLASparseBackend` returns this class only on SM90.
        """
        return or_original(self._decode, super()._fp8_flash_mla_kernel, _stays, *args, **kwargs)

    def _decode(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, topk_indices: torch.Tensor, kernel_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_mla(q, kv_c_and_k_pe_cache, topk_indices, self.softmax_scale)


class CuteFlashMLASparseMetadataBuilder(FlashMLASparseMetadataBuilder):
    """FlashMLA's builder, which also compiles the kernels that its layers will ask for, unless they are on disk."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if device.type == "cuda" and inactive_because(vllm_config.cache_config.cache_dtype) is None:
            batches = range(1, min(vllm_config.scheduler_config.max_num_seqs, WARM_BATCH_SIZES) + 1)
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            shape = MlaShape(self.num_heads, self.topk_tokens, append=False)
            compile_shapes((shape,), tuple(batches), (1,), num_sms)


class CuteFlashMLASparseBackend(FlashMLASparseBackend):
    """FLASHMLA_SPARSE, under its own name: vLLM turns `fp8` into the 656-byte format for that name."""

    @staticmethod
    def get_impl_cls() -> type[FlashMLASparseImpl]:
        """Returns our class on SM90; elsewhere vLLM's, which has other formats on other GPUs."""
        reason = inactive_because(CACHE_DTYPE)
        if reason is None:
            return CuteFlashMLASparseImpl
        logger.info_once("cute-kernels: sparse MLA runs on vLLM's kernels: %s", reason)
        return FlashMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMLASparseMetadataBuilder]:
        """Returns the class of metadata builders."""
        return CuteFlashMLASparseMetadataBuilder
