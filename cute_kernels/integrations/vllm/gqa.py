"""vLLM's attention backend over `gqa_decode`: `--attention-backend CUSTOM`. For 0.26 and 0.33; imports vLLM.

Decoding and whole prompts run on our kernels, prompts with tokens in the cache on vLLM's FlashAttention 3 (prompts.py).
Everything else is left to the base class, vLLM's Triton backend: it reads the same caches, and serves what none of
these kernels supports. Pages with scales of tokens order a head's bytes in their own way (calls.py).

If vLLM is batch invariant (`VLLM_BATCH_INVARIANT=1`), the kernels of a request depend on that request alone: one split,
all prompts over the cache, and one call for each prompt that reads copies of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.distributed import get_dcp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import fa_utils, utils
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from cute_kernels.integrations.vllm.backends import Function
from cute_kernels.integrations.vllm.batches import are_fresh, counted, prompts_of, without_decodes
from cute_kernels.integrations.vllm.calls import FP8, HEAD_DIMS, MAX_QUERIES, SCALED, CacheViews, GqaCalls, runs_prompts
from cute_kernels.integrations.vllm.context_parallel import Ranks, attend_with, refusal
from cute_kernels.integrations.vllm.prompts import AHEAD, Prompts, attend, reserve
from cute_kernels.integrations.vllm.warming import warm_layers

logger = init_logger("vllm.cute_kernels")

BLOCK_SIZES = (16, 32, 64, 128, 256)
EXTENDS: tuple[Function, ...] = (
    (TritonAttentionImpl, "__init__",
     "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap attn_type"
     " kv_sharing_target_layer_name sinks ..."),
    (TritonAttentionImpl, "forward",
     "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"),
    (TritonAttentionImpl, "do_kv_cache_update", "self layer key value kv_cache slot_mapping"),
    (TritonAttentionImpl, "_pth_key_value_caches", "self kv_cache"),
    (TritonAttentionImpl, "_ensure_scale_caches", "self kv_cache"),
    (TritonAttentionImpl, "process_weights_after_loading", "self act_dtype"),
    (TritonAttentionMetadataBuilder, "__init__", "self kv_cache_spec layer_names vllm_config device"),
    (TritonAttentionMetadataBuilder, "build", "self common_prefix_len common_attn_metadata fast_build"),
    (TritonAttentionMetadataBuilder, "build_for_drafting", "self common_attn_metadata draft_index"),
    (TritonAttentionMetadataBuilder, "get_cudagraph_support", "vllm_config kv_cache_spec"),
    (TritonAttentionMetadataBuilder, "_init_reorder_batch_threshold",
     "self reorder_batch_threshold supports_spec_as_decode ..."),
    (TritonAttentionBackend, "supports_block_size", "block_size"),
    (TritonAttentionBackend, "supports_head_size", "head_size"),
    (TritonAttentionBackend, "supports_compute_capability", "capability"),
    (TritonAttentionBackend, "supports_attn_type", "attn_type"),
    (utils, "split_decodes_and_prefills", "common_attn_metadata decode_threshold require_uniform ..."),
)  # fmt: skip
"""Functions of vLLM that are replaced or called here, in the form of 0.26 and 0.33."""


@dataclass
class CuteAttentionMetadata(TritonAttentionMetadata):
    """A batch's metadata for layers: the Triton backend's, and where decoding ends.

    Requests that decode come first, all with the same number of tokens.

    num_decodes        requests that decode
    num_decode_tokens  their tokens
    prefill            metadata of the other requests, counted from 0; None: no request decodes, and this object has it
    fresh              whether no other request has tokens in the cache before those of this batch
    prompts            the other requests with their lengths on the host, if these are known
    local_lens         with decode context parallelism: number of this rank's tokens of each request
    starts_host        likewise, on the host: where tokens of the other requests begin
    """

    num_decodes: int = 0
    num_decode_tokens: int = 0
    prefill: TritonAttentionMetadata | None = None
    fresh: bool = False
    prompts: Prompts | None = None
    local_lens: torch.Tensor | None = None
    starts_host: list[int] | None = None


class CuteAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """Makes `CuteAttentionMetadata`, and compiles the kernels of its layers when it is made."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # some batches decode drafts, in others drafts are prompts
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=not envs.VLLM_BATCH_INVARIANT)
        if self.reorder_batch_threshold > MAX_QUERIES:
            logger.warning_once(
                "cute-kernels: requests of %d query tokens are not decoded by gqa_decode, which takes up to %d",
                self.reorder_batch_threshold, MAX_QUERIES,
            )  # fmt: skip
            self.reorder_batch_threshold = 1
        self.supports_draft_decode_metadata_update = False  # 0.33: the end of decoding may move from draft to draft
        if device.type == "cuda":
            page = max(size for size in BLOCK_SIZES if kv_cache_spec.block_size % size == 0)
            warm_layers(layer_names, page, self.reorder_batch_threshold, kv_cache_spec, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Supports graphs of uniform batches, unless speculation gives a request more tokens than `gqa_decode` has."""
        speculative = vllm_config.speculative_config
        drafts = (speculative.num_speculative_tokens or 0) if speculative is not None else 0
        tokens = 1 + drafts * (2 if drafts and speculative.parallel_drafting else 1)  # counted like vLLM's threshold
        most = 1 if envs.VLLM_BATCH_INVARIANT else MAX_QUERIES
        return cls._cudagraph_support if tokens <= most else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CuteAttentionMetadata:
        """Splits a batch into decoding and the rest."""
        whole = super().build(common_prefix_len, common_attn_metadata, fast_build)
        decodes, rest, decode_tokens, _ = utils.split_decodes_and_prefills(
            common_attn_metadata, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        found = counted(common_attn_metadata, decodes, decode_tokens)
        if common_attn_metadata.causal is not True or (decodes and not found):
            decodes, found, rest, decode_tokens = 0, 0, common_attn_metadata.num_reqs, 0
        prefill, prompts, fresh = None, None, False
        if rest:
            part = common_attn_metadata
            if decodes:
                part = without_decodes(common_attn_metadata, decodes, decode_tokens)
                prefill = super().build(0, part, fast_build)
            # builders that vLLM derives from this one get batches that do not match the host's lengths
            own = type(self) is CuteAttentionMetadataBuilder
            invariant = envs.VLLM_BATCH_INVARIANT
            prompts = prompts_of(part, alone=invariant) if own and part.causal is True else None
            fresh = not invariant and are_fresh(prompts, part.num_actual_tokens)
        local_lens, starts_host = common_attn_metadata.dcp_local_seq_lens, None
        if local_lens is not None and rest:
            starts_host = part.query_start_loc_cpu[: part.num_reqs + 1].tolist()
        return CuteAttentionMetadata(
            **vars(whole), num_decodes=found, num_decode_tokens=decode_tokens, prefill=prefill, fresh=fresh,
            prompts=prompts, local_lens=local_lens, starts_host=starts_host,
        )  # fmt: skip

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> CuteAttentionMetadata:
        """Splits a draft model's batch, which may have longer queries than the lengths on the host say."""
        found = super().build_for_drafting(common_attn_metadata, draft_index)
        found.fresh, found.prompts = False, None
        return found


class CuteAttentionBackend(TritonAttentionBackend):
    """An attention backend that decodes by `gqa_decode`, over 16-bit, FP8, INT8 and INT4 caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *FP8, *SCALED]

    @staticmethod
    def get_name() -> str:
        """Returns the member of vLLM's enum that the backend is registered as."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CuteAttentionImpl]:
        """Returns the class of layers."""
        return CuteAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CuteAttentionMetadataBuilder]:
        """Returns the class of metadata builders."""
        return CuteAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Returns the sizes of a page: powers of two."""
        return list(BLOCK_SIZES)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Returns whether a block can be split into pages."""
        return block_size is None or block_size % BLOCK_SIZES[0] == 0

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Returns whether `gqa_decode` has this head size."""
        return head_size in HEAD_DIMS

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Returns whether the GPU is an SM90."""
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Returns whether the model is a decoder."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **more: Any
    ) -> str | None:
        """Returns in words why a model of `dtype` cannot have this cache; None if it can."""
        return GqaCalls.refusal(kv_cache_dtype, dtype, head_size)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Returns False: there is no attention in both directions."""
        return False

    supports_non_causal = supports_alibi_sqrt = supports_rswa = supports_mm_prefix
    supports_device_cpu_query_lens_mismatch = supports_mm_prefix  # 0.33: the host's lengths decide which pages are read

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Returns whether vLLM's batch invariance is supported; see the module's docstring."""
        return True

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Whether pages may be padded: vLLM pads its blocks, so not if a block is split into several pages."""
        block_size = get_current_vllm_config().cache_config.block_size  # vLLM asks while it has a configuration
        return super().indexes_kv_by_block_stride() and block_size in BLOCK_SIZES


class CuteAttentionImpl(TritonAttentionImpl):
    """The attention of a layer."""

    can_return_lse_for_decode = supports_dcp = True
    dcp_world_size: int
    _k_scales: torch.Tensor | None = None
    _ranks: Ranks | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        if any(value not in (None, False, -1) for value in others.values()):
            raise NotImplementedError(f"cute-kernels: got {others}; needs a layer without: use another backend")
        kv_heads = num_kv_heads or num_heads
        super().__init__(
            num_heads, head_size, scale, kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, sinks,
        )  # fmt: skip
        self.supports_quant_query_input = False  # gqa_decode takes 16-bit queries over FP8
        self.calls = GqaCalls(
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_size,
            scale=float(scale),
            cache_dtype=kv_cache_dtype,
            window=sliding_window,
            softcap=float(logits_soft_cap) if logits_soft_cap else None,
            alibi_slopes=self.alibi_slopes,
            shares_cache=kv_sharing_target_layer_name is not None,
            flash=_flash_attention(head_size, self.alibi_slopes is not None, sinks),
            max_tokens=_max_model_len(),
            num_splits=1 if envs.VLLM_BATCH_INVARIANT else None,
        )
        if self.dcp_world_size > 1:
            reason = refusal(self.calls)
            if reason is not None:
                raise NotImplementedError(f"cute-kernels: got decode context parallelism and {reason}")
            interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size
            self._ranks = Ranks.of(get_dcp_group(), interleave)
        longest = self.calls.max_tokens + AHEAD
        if envs.VLLM_BATCH_INVARIANT and self.calls.copies_pages and longest > self.calls.copied_tokens:
            # a context would be cut where this step's tokens begin, which depends on other requests
            logger.info_once(
                "cute-kernels: batch invariant prompts of up to %d tokens run on Triton: copies have room for %d",
                self.calls.max_tokens, self.calls.copied_tokens,
            )  # fmt: skip
            self.calls.flash = None
        if self.calls.rotated_kind and self.calls.flash is None and current_platform.is_cuda():
            raise NotImplementedError("cute-kernels: got an INT4 cache; needs prompts that FlashAttention 3 runs")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Converts the sinks, which are loaded now, to float32.

        They share the model's parameter, so that new weights are written to the memory that graphs read.
        """
        super().process_weights_after_loading(act_dtype)
        if self.sinks is None:
            return
        if self.calls.s_aux is None:
            self.calls.s_aux = self.sinks.detach().float()
        else:  # the parameter is new
            self.calls.s_aux.copy_(self.sinks.detach())
        self.sinks.data = self.calls.s_aux

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Returns False: outputs are 16-bit numbers."""
        return False

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CuteAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of a batch: query, output (tokens, heads, d), key and value (tokens, kv_heads, d).

        Raises:
            NotImplementedError: a quantized output is asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("cute-kernels: got a scale of the output; needs outputs of 16-bit numbers")
        m = attn_metadata
        if m is None:  # vLLM is measuring memory
            reserve(self.calls, output)
            return output.fill_(0)
        n, tokens = m.num_decode_tokens, m.num_actual_tokens
        if tokens < len(output):
            output[tokens:].zero_()  # padding rows of the step: vLLM takes maxima over all rows
        if self._ranks is not None:
            views = self._views(layer, kv_cache)
            return attend_with(self._ranks, self.calls, query, key, value, views, m, output)
        if n:
            views, requests = self._views(layer, kv_cache), slice(m.num_decodes)
            self.calls.decode(query[:n], views, m.seq_lens[requests], m.block_table[requests], output[:n])
        if tokens > n:
            rows = slice(n, tokens)
            new = (None, None) if key is None else (key[rows], value[rows])
            self._prefill(layer, query[rows], *new, kv_cache, m, output[rows])
        return output

    def _prefill(
        self, layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: torch.Tensor,
        metadata: CuteAttentionMetadata, output: torch.Tensor,
    ) -> None:  # fmt: skip
        part, prompts = metadata.prefill or metadata, metadata.prompts
        if metadata.fresh and self.calls.prefills_fresh_tokens() and key is not None:
            self.calls.prefill_fresh(query, key, value, part.query_start_loc, part.max_query_len, output)
            return
        # vLLM may count padding rows as tokens, and no kernel below writes rows past the last request
        output[0 if prompts is None else prompts.starts_host[-1] :].zero_()
        if prompts is not None and self.calls.flash is not None:
            attend(self.calls, query, self._views(layer, kv_cache), prompts, output)
        elif query.device.type == "cpu":
            views, starts, lengths = self._views(layer, kv_cache), part.query_start_loc, part.seq_lens
            self.calls.prefill_in_pieces(query, views, starts, lengths, part.block_table, output)
        else:
            super().forward(layer, query, key, value, kv_cache, part, output)

    def _views(self, layer: Any, kv_cache: torch.Tensor) -> CacheViews:
        return self.calls.views(kv_cache, layer._k_scale, layer._v_scale)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Stores new tokens: key and value (tokens or more, kv_heads, d), slot_mapping (tokens,)."""
        if self.calls.kind is not None:
            self.calls.append_scaled(key, value, self._views(layer, kv_cache), slot_mapping)
        elif key.device.type == "cpu":
            self.calls.append_plain(key, value, self._views(layer, kv_cache), slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    @property
    def _k_scale_cache(self) -> torch.Tensor | None:
        return self._k_scales

    @_k_scale_cache.setter
    def _k_scale_cache(self, scales: torch.Tensor | None) -> None:
        """Drops the views when vLLM sets None: it has measured the memory of graphs and frees that cache."""
        self._k_scales = scales
        if scales is None and hasattr(self, "calls"):
            self.calls.forget_views()

    def _ensure_scale_caches(self, kv_cache: torch.Tensor) -> None:
        """Sets the scales of our page; `super().forward` reads both attributes."""
        *_, self._k_scale_cache, self._v_scale_cache = self.calls.views(kv_cache).tokens_first()

    def _pth_key_value_caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the codes, (pages, tokens, kv_heads, d)."""
        self._ensure_scale_caches(kv_cache)
        k, v, *_ = self.calls.views(kv_cache).tokens_first()
        return k, v


def _max_model_len() -> int:
    """Returns the most tokens of a request; 0 if a layer is made without a configuration."""
    config = get_current_vllm_config_or_none()
    return 0 if config is None or config.model_config is None else int(config.model_config.max_model_len)


def _flash_attention(head_dim: int, alibi: bool, sinks: torch.Tensor | None) -> Callable[..., Any] | None:
    """Returns vLLM's FlashAttention if a layer's version is the one that prompts run on. It takes bfloat16 sinks."""
    version = fa_utils.get_flash_attn_version(requires_alibi=alibi, head_size=head_dim)
    if not runs_prompts(version, head_dim) or (sinks is not None and sinks.dtype is not torch.bfloat16):
        return None
    found: Callable[..., Any] = fa_utils.flash_attn_varlen_func
    return found
