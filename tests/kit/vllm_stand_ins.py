"""Stand-ins of vLLM 0.26's modules: what our backends import and extend, so that they load without vLLM."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch

from cute_kernels.integrations.vllm import backends

OURS = tuple(f"cute_kernels.integrations.vllm.{name}" for name in backends.MODULES.values())


class AttentionCGSupport(Enum):
    NEVER = 0
    UNIFORM_BATCH = 1


class AttentionType:
    DECODER = "decoder"


class TritonAttentionBackend:
    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return True


class TritonAttentionImpl:
    dcp_world_size = 1

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any, sliding_window: Any,
        kv_cache_dtype: str, logits_soft_cap: Any = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: Any = None, sinks: Any = None, use_alibi_sqrt: bool = False,
    ) -> None:  # fmt: skip
        self.alibi_slopes, self.sinks, self.kv_cache_dtype = None, sinks, kv_cache_dtype

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        """Ones for the tokens of requests; like the Triton kernel it leaves other rows as they are."""
        output[: int(attn_metadata.query_start_loc[-1])] = 1

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None: ...

    def _pth_key_value_caches(self, kv_cache: Any) -> Any: ...

    def _ensure_scale_caches(self, kv_cache: Any) -> None: ...

    def process_weights_after_loading(self, act_dtype: Any) -> None: ...


@dataclass
class TritonAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class TritonAttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None: ...

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any: ...

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold: Any = 1, supports_spec_as_decode: bool = False, more: bool = False
    ) -> None: ...

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any: ...

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any: ...


def split_decodes_and_prefills(
    common_attn_metadata: Any, decode_threshold: int = 1, require_uniform: bool = False
) -> None: ...


class FlashMLASparseImpl:
    kv_cache_dtype, num_heads, softmax_scale = "fp8_ds_mla", 16, 0.1

    def _fp8_flash_mla_kernel(self, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, kernel_metadata: Any) -> Any:
        return "FlashMLA"


class FlashMLASparseMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None: ...


class FlashMLASparseBackend:
    @staticmethod
    def get_impl_cls() -> Any:
        return FlashMLASparseImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return FlashMLASparseMetadataBuilder


class Place:
    """A member of vLLM's enum of backends."""

    def __init__(self, name: str, value: str | None = None) -> None:
        self.name, self.value, self.path = name, value, ""

    def is_overridden(self) -> bool:
        return bool(self.path)

    def get_path(self) -> str:
        return self.path


class Log:
    """A logger of vLLM's."""

    def __init__(self, name: str) -> None: ...

    def info_once(self, *words: Any) -> None: ...

    warning_once = info_once


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Modules in the places of vLLM's; gives the members of its enum. Ours are loaded anew, before and after."""
    attention = "v1.attention.backends"
    sparse = f"{attention}.mla.flashmla_sparse"
    places = types.SimpleNamespace(
        CUSTOM=Place("CUSTOM"), FLASHMLA_SPARSE=Place("FLASHMLA_SPARSE", f"vllm.{sparse}.FlashMLASparseBackend")
    )
    triton = (TritonAttentionBackend, TritonAttentionImpl, TritonAttentionMetadata, TritonAttentionMetadataBuilder)
    flash_mla = (FlashMLASparseBackend, FlashMLASparseImpl, FlashMLASparseMetadataBuilder)
    capability = types.SimpleNamespace(major=9, minor=0)
    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    members: dict[str, dict[str, Any]] = {
        "": {"__version__": "0.26.0"},
        "config": {"get_current_vllm_config": nothing, "get_current_vllm_config_or_none": nothing},
        "distributed": {"get_dcp_group": nothing},
        "envs": {"VLLM_BATCH_INVARIANT": False},
        "logger": {"init_logger": Log},
        "platforms": {"current_platform": types.SimpleNamespace(get_device_capability=lambda: capability)},
        "v1.attention.backend": {"AttentionCGSupport": AttentionCGSupport, "AttentionType": AttentionType},
        f"{attention}.registry": {
            "AttentionBackendEnum": places,
            "register_backend": lambda place, path: setattr(place, "path", path),
        },
        f"{attention}.fa_utils": {"get_flash_attn_version": nothing},
        f"{attention}.utils": {"split_decodes_and_prefills": split_decodes_and_prefills},
        f"{attention}.triton_attn": {cls.__name__: cls for cls in triton},
        sparse: {cls.__name__: cls for cls in flash_mla},
    }
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, inside in members.items():
        path = ["vllm", *name.split(".")] if name else ["vllm"]
        for end in range(1, len(path) + 1):
            full = ".".join(path[:end])
            if full not in sys.modules:
                module = types.ModuleType(full)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, full, module)
                if end > 1:
                    setattr(sys.modules[".".join(path[: end - 1])], path[end - 1], module)
        vars(sys.modules[".".join(path)]).update(inside)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    backends._backend.cache_clear()
    yield places
    backends._backend.cache_clear()
    for name in OURS:
        sys.modules.pop(name, None)
