"""Hugging Face transformers: `attn_implementation="cute_mla"`, the sparse attention of DeepSeek V3.2 and GLM-5 in FP8.

    import cute_kernels.integrations.transformers as cute
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="cute_mla")
    model.generate(**inputs, past_key_values=cute.CuteMlaCache(model.config))

The cache keeps latents, 656 bytes a token, and the attention reads those that the indexer chooses: `kv_b_proj` is
absorbed into queries and outputs, so keys and values are never expanded. For that, `expand_kv` of the two attention
classes passes latents through while "cute_mla" is on. Without `CuteMlaCache`, plain torch runs.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicIndexedLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cute_kernels.integrations.on_import import change_on_import
from cute_kernels.integrations.transformers_cache import GrowingLayer, Positions, check_max_length, say_once
from cute_kernels.integrations.transformers_index import IndexPages, check_index, index_by_pages
from cute_kernels.mla.append_op import mla_fp8_append
from cute_kernels.mla.op import mla_fp8_decode
from cute_kernels.runtime.ops import needs_grad
from cute_kernels.warm.shapes import MAX_MLA_HEADS
from fp8_mla import QK_DIM, TOKEN_BYTES, V_DIM, unpack

NAME = "cute_mla"
"""The name of the attention that reads a `CuteMlaCache`, for `attn_implementation` and `set_attn_implementation`."""
LAYER = "_cute_mla_layer"
"""Attribute of the pages that `CuteMlaLayer.update` returns; it is the layer."""
ORIGINAL = "_cute_mla_original"
"""Attribute of an `expand_kv` that passes latents through; it is the original function of transformers."""
ATTENTIONS = {"deepseek_v32": "DeepseekV32Attention", "glm_moe_dsa": "GlmMoeDsaAttention"}
"""Attention classes by type of model."""
ROPE_DIM = QK_DIM - V_DIM
WIDTH_STEP = 64
"""Numbers of indices are rounded up to a multiple of it, so a growing context replans once in 64 tokens."""
HIDDEN = -1e4
"""Largest value of an additive mask that hides a key: exp(-1e4) is 0 in float32."""

_say_once = functools.partial(say_once, NAME)


# ---- the cache


class CuteMlaLayer(DynamicIndexedLayer, GrowingLayer):
    """The latents of a layer, (batch, capacity, 656) uint8: one page a sequence.

    The indexer's keys are upstream's tensors, or the pages of `index`.
    """

    stored = ("keys",)
    token_dim = 1

    def __init__(
        self, config: Any, positions: Positions, max_length: int | None = None, index: IndexPages | None = None
    ) -> None:
        GrowingLayer.__init__(self, config, positions, max_length)  # upstream's __init__ calls it without arguments
        self.index = index
        self._forget_indexer()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates for the number of sequences of these latents."""
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (key_states.shape[0], self.max_length or 0, TOKEN_BYTES)
        self.keys = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self._forget_indexer()  # even 0 tokens of another batch do not concatenate
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes and stores new tokens.

        Args:
            key_states: (batch, 1, tokens, 512) bfloat16 or float16, which is rounded to bfloat16.
            value_states: (batch, 1, tokens, 64), the part with rotary encoding.
            args: ignored.
            kwargs: ignored.

        Returns:
            The inputs of `expand_kv`: the pages twice, which "cute_mla" reads; or all latents, dequantized.

        Raises:
            ValueError: the cache is full, has tokens of another batch, or the latents have other shapes.
        """
        for name, states, width in (("key_states", key_states, V_DIM), ("value_states", value_states, ROPE_DIM)):
            if states.dim() != 4 or states.shape[1] != 1 or states.shape[3] != width:
                raise ValueError(
                    f"{name}: got shape {tuple(states.shape)}; needs latents, (batch, 1, tokens, {width}), which a"
                    f' model caches with attn_implementation="{NAME}"'
                )
            if states.dtype not in (torch.bfloat16, torch.float16):
                raise ValueError(f"{name}: got {states.dtype}; needs torch.bfloat16 or torch.float16")
        slots = self.new_slots(key_states, value_states)
        kv = torch.cat([key_states, value_states], dim=-1).to(torch.bfloat16).view(-1, QK_DIM)
        mla_fp8_append(kv, self.keys, slots)
        self.length += key_states.shape[2]
        if not self.serves(NAME):
            latents = self.latents(key_states.dtype)
            self.for_any_attention(latents[0], LAYER)
            return latents
        pages = self.keys[:]  # a new tensor, because an attribute of self.keys would be a cycle
        setattr(pages, LAYER, self)
        return pages, pages

    def latents(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all tokens, dequantized: (batch, 1, tokens, 512) and (batch, 1, tokens, 64)."""
        kv = unpack(self._written(self.keys), torch.float32).to(dtype).unsqueeze(1)
        return kv[..., :V_DIM], kv[..., V_DIM:]

    def reset(self) -> None:
        """Forgets all tokens. The memory of latents is kept, for another batch of as many sequences."""
        super().reset()
        self._forget_indexer()  # 5.17 would set its keys to zero and append to them

    def _forget_indexer(self) -> None:
        self.indexer_keys = self.indexer_position_ids = None
        self.is_indexer_initialized = False
        if self.index is not None:
            self.index.length = 0

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Stores new keys of the indexer, (batch, tokens, 128), and returns all keys for the model's indexer."""
        if self.index is None:
            return super().update_indexer(indexer_key_states)
        self.index.append(indexer_key_states)
        return self.index.keys(indexer_key_states.dtype)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, like `GrowingLayer.crop`, and their keys of the indexer."""
        super().crop(tokens_to_remove)
        if self.index is not None:
            self.index.length = min(self.index.length, self.length)

    def _select(self, indices: torch.Tensor) -> None:
        super()._select(indices)
        if self.index is not None:
            self.index.select(indices)

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        if self.index is not None:
            self.index.move(device)


class CuteMlaCache(Cache):
    """A cache of 656 bytes a token and layer for `model.generate(past_key_values=...)`, and the indexer's keys."""

    def __init__(self, config: Any, *, max_length: int | None = None, fp8_index: bool = False) -> None:
        """Makes a cache for one batch of sequences of equal length, padding included.

        Args:
            config: the model's.
            max_length: tokens of a sequence, allocated at once; default: it grows by doubling.
            fp8_index: also keeps the indexer's keys in FP8, 132 bytes a token instead of 256; `index_decode` scores
                steps of up to 8 tokens. It chooses some 96% of the tokens that the model's own indexer would.

        Raises:
            ValueError: a model of another type, with other latents or another indexer, or `max_length` below 1.
        """
        config = config.get_text_config(decoder=True)
        if config.model_type not in ATTENTIONS:
            raise ValueError(f"config: got model_type {config.model_type!r}; needs {' or '.join(ATTENTIONS)}")
        _check_ranks("config", config)
        check_max_length(max_length)
        if fp8_index:
            check_index(config)
        positions, index_positions = Positions(), Positions()
        indices = [
            IndexPages(index_positions, max_length) if fp8_index else None for _ in range(config.num_hidden_layers)
        ]
        super().__init__(layers=[CuteMlaLayer(config, positions, max_length, index) for index in indices])


def _check_ranks(name: str, owner: Any) -> None:
    found = owner.kv_lora_rank, owner.qk_rope_head_dim
    if found != (V_DIM, ROPE_DIM):
        raise ValueError(
            f"{name}: got kv_lora_rank {found[0]} and qk_rope_head_dim {found[1]}; needs {V_DIM} and {ROPE_DIM}, of"
            f" which a token of {TOKEN_BYTES} bytes consists"
        )


# ---- attention


def cute_mla_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    indices: torch.Tensor | None = None,
    dropout: float = 0.0,
    cache: Any = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of "cute_mla": `mla_fp8_decode` for prompts and for decoding.

    Args:
        module: the attention layer, of a class that `ATTENTIONS` names.
        query: (batch, heads, s_q, qk_nope_head_dim + 64).
        key: the pages that a `CuteMlaCache` returns; with another cache or none (batch, 1, tokens, 512).
        value: the same pages; or (batch, 1, tokens, 64), the part with rotary encoding.
        attention_mask: (batch or 1, 1, s_q, tokens) bool, where True is seen, or additive.
        scaling: factor of scores.
        indices: (batch, s_q, topk) int32, the tokens that the indexer chose; hidden ones may be among them.
        dropout: dropout of attention weights; if it is not 0, plain torch runs.
        cache: a paged cache of continuous batching, which is refused.
        unused: arguments for other implementations.

    Returns:
        (batch, s_q, heads, v_head_dim), and None: no attention weights. 0 where a query sees no key of its indices.

    Raises:
        ValueError: a paged cache, a module of another class, other latents than 512 + 64.
    """
    if cache is not None:
        raise ValueError(f'cache: got {type(cache).__name__}; needs None: "{NAME}" has no continuous batching')
    expand: Callable[..., Any] | None = getattr(getattr(type(module), "expand_kv", None), ORIGINAL, None)
    if expand is None or indices is None:
        raise ValueError(f"module: got {type(module).__name__}; needs {' or '.join(ATTENTIONS.values())}")
    _check_ranks("module", module)
    layer: Any = getattr(key, LAYER, None)
    if layer is not None:
        layer.read_by(module)
    reason = refusal(module, query, attention_mask, dropout, layer)
    if reason is not None:
        _say_once(reason)
        k, v = expand(module, *(layer.latents(query.dtype) if layer is not None else (key, value)))
        return _eager(module, query, k, v, attention_mask, indices, scaling, dropout), None
    batch, heads, s_q, _ = query.shape
    nope = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(heads, -1, V_DIM)
    absorbed = torch.einsum("bhsn,hnc->bshc", query[..., :nope], weight[:, :nope])
    q = torch.cat([absorbed, query[..., nope:].transpose(1, 2)], dim=-1).to(torch.bfloat16)
    slots = _slots(indices, attention_mask, layer.capacity)
    latent: Any = mla_fp8_decode(q, layer.keys, indices=slots, softmax_scale=float(scaling))
    out = torch.einsum("bshc,hvc->bshv", latent.to(weight.dtype), weight[:, nope:])
    return out.contiguous(), None


def refusal(
    module: Any, query: torch.Tensor, mask: torch.Tensor, dropout: float, layer: CuteMlaLayer | None
) -> str | None:
    """Returns in words why no kernel takes a call; None if one does."""
    if layer is None:
        return "another cache than CuteMlaCache, or none: the kernel reads 656-byte tokens"
    if dropout:
        return f"dropout {dropout}: there is none in the kernel"
    projection, heads = module.kv_b_proj, query.shape[1]
    weight: Any = getattr(projection, "weight", None)
    shape = (heads * (module.qk_nope_head_dim + module.v_head_dim), V_DIM)
    plain = type(projection) is torch.nn.Linear and projection.bias is None
    plain = plain and type(weight) in (torch.nn.Parameter, torch.Tensor) and weight.shape == shape
    if not plain or weight.dtype != query.dtype or weight.device != query.device:
        got = f"{type(projection).__name__} with a weight of {getattr(weight, 'dtype', None)}"
        return f"kv_b_proj: got {got}; the kernel needs a torch.nn.Linear with {query.dtype} {shape} on {query.device}"
    if needs_grad(query, weight):
        return "gradients: the kernel has no backward"
    if heads > MAX_MLA_HEADS:
        return f"{heads} heads: the kernel takes up to {MAX_MLA_HEADS}"
    if mask.shape[1] != 1:
        return f"attention_mask: got one for each of {mask.shape[1]} heads; the kernel takes one for all"
    # the mask function makes bool masks: only a caller's own mask costs this synchronization
    if mask.dtype is not torch.bool and not bool(((mask == 0) | (mask <= HIDDEN)).all()):
        return "attention_mask: a bias of scores; the kernel takes masks that hide keys or do not"
    return None


def _slots(indices: torch.Tensor, mask: torch.Tensor, capacity: int) -> torch.Tensor:
    """Returns slots of the indices' tokens, (batch, s_q, topk rounded up) int32; -1 for hidden tokens."""
    batch, s_q, topk = indices.shape
    seen = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] > HIDDEN
    seen = seen.expand(batch, -1, -1).gather(2, indices.long())
    first = torch.arange(batch, dtype=torch.int32, device=indices.device).view(-1, 1, 1) * capacity
    slots = torch.where(seen, indices + first, -1)
    return torch.nn.functional.pad(slots, (0, -topk % WIDTH_STEP), value=-1)


def _eager(
    module: Any,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    indices: torch.Tensor,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Computes what "eager" computes, with its function and its mask."""
    least = torch.finfo(query.dtype).min
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, least)
    batch, s_q, _ = indices.shape
    left_out = torch.ones((batch, s_q, k.shape[2]), dtype=torch.bool, device=k.device)
    left_out.scatter_(2, indices.long(), False)
    mask = mask.masked_fill(left_out.unsqueeze(1), least)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, _ = eager(module, query, k, v, mask, scaling=scaling, dropout=dropout)
    return out


def cute_mla_mask(**given: Any) -> torch.Tensor:
    """The mask function of "cute_mla": (batch, 1, s_q, tokens) bool, never None, because the indexer reads it.

    It takes the keyword arguments that transformers calls mask functions with.
    """
    return sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def pass_latents(modeling: types.ModuleType) -> None:
    """Makes `expand_kv` of a model's attention return its arguments while "cute_mla" is on.

    transformers 5.17 caches what it returns; 5.23 and 5.24 cache latents, and call it with the cache's result.
    """
    attention: Any = next((getattr(modeling, name) for name in ATTENTIONS.values() if hasattr(modeling, name)), None)
    original = getattr(attention, "expand_kv", None)
    if original is None or hasattr(original, ORIGINAL):
        return

    @functools.wraps(original)
    def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config._attn_implementation == NAME:
            return kv_nope, k_rot
        return original(self, kv_nope, k_rot)

    setattr(expand_kv, ORIGINAL, original)
    attention.expand_kv = expand_kv


def change_model(modeling: types.ModuleType) -> None:
    """Changes a model's attention and its indexer."""
    pass_latents(modeling)
    index_by_pages(modeling)


AttentionInterface.register(NAME, cute_mla_attention)
AttentionMaskInterface.register(NAME, cute_mla_mask)
change_on_import({f"transformers.models.{name}.modeling_{name}": change_model for name in ATTENTIONS})
