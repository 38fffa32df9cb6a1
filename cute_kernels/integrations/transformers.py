"""Hugging Face transformers: `attn_implementation="cute"`, and an INT8 cache. Tested with 5.17, 5.23 and 5.24.

`attn_implementation="cute_mla"`, for DeepSeek V3.2 and GLM-5, is in transformers_mla.py.

    import cute_kernels.integrations.transformers as cute
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="cute")
    model.generate(**inputs, past_key_values=cute.CuteInt8Cache(model.config))    # without the cache: bfloat16 keys

Importing this module registers the attention and its masks. It serves models that pass their window and sinks to the
attention function, as all that support flash attention do: Llama, Qwen, Mistral, Gemma, gpt-oss. If no kernel of this
package computes a call, plain torch does, after one warning that says why.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from cute_kernels.gqa.op import gqa_decode
from cute_kernels.gqa.plan import MAX_S_Q, kernel_softcap
from cute_kernels.runtime.arch import is_sm90
from cute_kernels.runtime.memory import is_capturing
from cute_kernels.runtime.ops import is_traced, needs_grad
from cute_kernels.sink.op import cast_under_autocast, sink_attention

try:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    from cute_kernels.integrations.transformers_cache import LAYER, NAME, CuteInt8Cache, say_once
    from cute_kernels.integrations.transformers_mla import CuteMlaCache
    from cute_kernels.integrations.transformers_packed import borders_of_positions, each_sequence, packed_borders
except ImportError as error:
    raise ImportError(f"cute_kernels.integrations.transformers needs transformers 5.17 or later: {error}") from error

__all__ = ["NAME", "CuteInt8Cache", "CuteMlaCache", "cute_attention", "cute_mask"]

DECODE_HEAD_DIMS, PREFILL_HEAD_DIMS = (64, 128, 256, 512), (64, 128)


# ---- attention


class _Request(NamedTuple):
    """A call of the attention function; q, k, v are as in transformers, (batch, heads, tokens, d).

    packed  borders of packed queries and keys, which `mask` need not repeat; None if each row is a sequence
    starts  (batch,) int32, the first key of each row that queries see, if rows are padded on the left
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    causal: bool
    window: int | None
    softcap: float | None
    s_aux: torch.Tensor | None
    dropout: float
    packed: tuple[torch.Tensor, torch.Tensor] | None = None
    starts: torch.Tensor | None = None

    @property
    def decodes(self) -> bool:
        """Whether `gqa_decode` may take the call."""
        return self.packed is None and self.q.shape[2] <= MAX_S_Q and not needs_grad(self.q, self.k, self.v, self.s_aux)


def cute_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of "cute": `gqa_decode` for a few query tokens, `sink_attention` for more.

    Under autocast tensors are cast to its dtype, as eager attention casts them.

    Args:
        module: the attention layer.
        query: (batch, heads, s_q, d). The queries are the last tokens of their sequence.
        key: (batch, kv_heads, s_k, d), or what a `CuteInt8Cache` returns.
        value: likewise.
        attention_mask: what `cute_mask` returns: None; (sequences + 1,) int32, where packed or padded sequences begin
            in the tokens of all rows; (batch, 1) int32, the first key of each row, for a few tokens after padding on
            the left; or (batch, 1, s_q, s_k), which plain torch applies.
        scaling: default d ** -0.5.
        dropout: dropout of attention weights; if it is not 0, plain torch runs.
        sliding_window: most tokens that a query sees, its own included.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: (heads,), a sink logit per head.
        is_causal: default: the module's.
        cache: a paged cache of continuous batching, which is refused.
        cu_seq_lens_q: (sequences + 1,) int32, where packed queries begin in the tokens of all rows; with it the mask is
            ignored. Tokens past the last sequence get 0.
        cu_seq_lens_k: borders of keys; default cu_seq_lens_q.
        position_ids: (batch or 1, s_q). Without a mask, cu_seq_lens_q or earlier keys, a sequence begins wherever they
            do not count on by 1.
        unused: arguments for other implementations.

    Returns:
        (batch, s_q, heads, d), and None: no attention weights.

    Raises:
        ValueError: a paged cache; a layer with a window that is not passed on; INT8 codes without their scales.
    """
    if cache is not None:
        raise ValueError(f'cache: got {type(cache).__name__}; needs None: "{NAME}" has no continuous batching')
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _check_window(module, attention_mask, sliding_window)
    layer = getattr(key, LAYER, None)
    if layer is not None:
        layer.read_by(module)
    if layer is None and key.dtype is torch.int8:
        raise ValueError("key: got int8 codes without scales; needs those that CuteInt8Cache returned, as they were")
    s_aux = None if s_aux is None else s_aux.float()
    query, key, value, s_aux = cast_under_autocast(query, key, value, s_aux)
    packed, starts = None, None
    if cu_seq_lens_q is not None:
        packed = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    elif attention_mask is not None and attention_mask.dim() == 1:
        packed, attention_mask, causal = (attention_mask, attention_mask), None, True
    elif attention_mask is not None and attention_mask.dim() == 2:
        starts, attention_mask = attention_mask[:, 0], None
    elif attention_mask is None and position_ids is not None and _is_whole(query, key, position_ids):
        borders = borders_of_positions(position_ids, query.shape[0])
        packed = None if borders is None else (borders, borders)
    if packed is not None and layer is not None:
        key, value, layer = layer.dense_keys(query.dtype), layer.dense_values(query.dtype), None
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    softcap = float(softcap) if softcap else None
    call = _Request(
        query, key, value, attention_mask, scaling, causal, sliding_window, softcap, s_aux, float(dropout), packed,
        starts,
    )  # fmt: skip
    reason = refusal(call)
    if reason is not None:
        _say_once(reason)
        if layer is not None:
            call = call._replace(k=layer.dense_keys(query.dtype), v=layer.dense_values(query.dtype))
        return plain_attention(call), None
    options: dict[str, Any] = {"causal": causal, "window": sliding_window, "s_aux": s_aux, "softmax_scale": scaling}
    q = query.transpose(1, 2)
    out: Any
    if layer is not None:
        caches = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        options |= {"cache_seqlens": layer.lengths(), "kind": layer.kind}
        out = gqa_decode(q, *caches, softcap=softcap, cache_starts=starts, **options)
    elif packed is not None:
        rows = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        out = sink_attention(*rows, cu_seqlens_q=packed[0], cu_seqlens_k=packed[1], **options)
        out = out.view(q.shape)
    elif call.decodes:
        out = gqa_decode(q, _rows(key), _rows(value), softcap=softcap, cache_starts=starts, **options)
    else:
        out = sink_attention(q, key.transpose(1, 2), value.transpose(1, 2), **options)
    return out, None


def _is_whole(query: torch.Tensor, key: torch.Tensor, position_ids: torch.Tensor) -> bool:
    """Returns whether there are no earlier keys, more than one token, and a position for each."""
    tokens = query.shape[2]
    return key.shape[2] == tokens > 1 and position_ids.dim() == 2 and position_ids.shape[1] == tokens


def refusal(call: _Request) -> str | None:
    """Returns in words why no kernel takes a call; None if one does."""
    q, d = call.q, call.q.shape[-1]
    if call.mask is not None and call.packed is None:
        return "attention_mask: padding of earlier keys, or a mask that is neither causal nor a window"
    if call.starts is not None and not call.decodes:
        return "attention_mask: padding of earlier keys, with gradients"
    if call.dropout:
        return f"dropout {call.dropout}: there is none in the kernels"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"queries of {q.dtype}: kernels take bfloat16 and float16"
    if q.device.type not in ("cpu", "cuda") or (q.device.type == "cuda" and not is_sm90(q.device)):
        return f"device {q.device}: kernels need an SM90 GPU (H100, H200)"
    # reasons name no number of tokens, so that each is one warning
    where = f"up to {MAX_S_Q} query tokens" if call.decodes else f"more than {MAX_S_Q} query tokens, or gradients"
    known = DECODE_HEAD_DIMS if call.decodes else PREFILL_HEAD_DIMS
    v_dim = call.v.shape[-1] * (2 if call.v.dtype is torch.uint8 else 1)  # a byte holds two 4-bit codes
    if v_dim != d or d not in known:
        return f"head dimensions {d} and {v_dim} with {where}: kernels take {known}"
    if call.softcap is not None and not call.decodes:
        return f"softcap with {where}: it is there for up to {MAX_S_Q} without"
    return None


def plain_attention(call: _Request) -> torch.Tensor:
    """Computes attention in plain torch, which holds all scores: (batch, s_q, heads, d).

    A mask says everything that a query sees; without one, `causal`, `window`, `packed` and `starts` do. A query that
    sees nothing sees everything, as in eager attention: it is padding, and its result must be a number.
    """
    mask = call.mask
    if mask is None and call.packed is not None:
        alone = call._replace(packed=None)
        return each_sequence(
            lambda q, k, v: plain_attention(alone._replace(q=q, k=k, v=v)), call.q, call.k, call.v, call.packed
        )
    if mask is None and (call.causal or call.window is not None):
        s_q, s_k = call.q.shape[2], call.k.shape[2]
        position = torch.arange(s_k - s_q, s_k, dtype=torch.int64, device=call.q.device).unsqueeze(1)
        key = torch.arange(s_k, dtype=torch.int64, device=call.q.device)
        mask = key <= position if call.causal else torch.ones_like(key <= position)
        if call.window is not None:
            mask &= key > position - call.window
    if call.starts is not None:
        key = torch.arange(call.k.shape[2], dtype=torch.int64, device=call.q.device)
        seen = key >= call.starts.view(-1, 1, 1, 1)
        mask = seen if mask is None else seen & mask
        mask = mask | ~mask.any(dim=-1, keepdim=True)
    if call.s_aux is None and call.softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            call.q, call.k, call.v, attn_mask=mask, dropout_p=call.dropout, scale=call.scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()
    ratio = call.q.shape[1] // call.k.shape[1]
    k, v = (t.repeat_interleave(ratio, dim=1) for t in (call.k, call.v))
    scores = (call.q @ k.transpose(2, 3)).float() * call.scaling
    if call.softcap is not None:
        cap = kernel_softcap(call.softcap)  # another cap may be 0 or infinity in float32
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if call.s_aux is not None:
        sinks = call.s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    weights = torch.nn.functional.dropout(weights, call.dropout, training=call.dropout > 0)
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()


def _check_window(module: Any, mask: torch.Tensor | None, sliding_window: int | None) -> None:
    """Checks a model that keeps its windows to itself: it relies on masks, and `cute_mask` leaves windows out of them.

    Only masks for plain torch include windows.
    """
    index = getattr(module, "layer_idx", None)
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if mask is not None and mask.dim() == 4:
        return
    if sliding_window is not None or index is None or not types or index >= len(types):
        return
    if types[index] == "sliding_attention":
        name = type(module).__name__
        raise ValueError(f'sliding_window: got None from layer {index}, {name}; needs its window: "{NAME}" has no mask')


def _rows(t: torch.Tensor) -> torch.Tensor:
    """Returns a cache in layout BNSH that TMA can read: rows contiguous, strides and address multiples of 16 bytes."""
    step = 16 // t.element_size()
    good = t.stride(-1) == 1 and not any(n > 1 and s % step for n, s in zip(t.shape[:3], t.stride(), strict=False))
    return t if good and t.data_ptr() % 16 == 0 else t.contiguous()


_say_once = functools.partial(say_once, NAME)


def cute_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    use_vmap: bool = False,
    batch_size: int = 1,
    device: Any = "cpu",
    **others: Any,
) -> torch.Tensor | None:
    """The mask function of "cute", called once a forward for each kind of layer.

    It takes the keyword arguments that transformers calls mask functions with.

    Returns:
        None if `causal` and `sliding_window` describe the mask. If they do within each sequence of a packed or padded
        batch, (sequences + 1,) int32: where sequences begin in the tokens of all rows. If they do for a few tokens
        after rows padded on the left, (batch, 1) int32: the first key of each row. This reads positions and padding on
        the host, so not while torch.compile traces: `cu_seq_lens_q` serves there. Else the mask of "eager".
    """
    plain = allow_is_causal_skip and isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if plain and attention_mask is not None and is_traced():
        plain = False
    if plain and local_size is not None:
        plain = _is_window(mask_function, local_size)
    visible = None if attention_mask is None else attention_mask[:, -kv_length:].bool()
    if plain and visible is not None:
        plain = visible.shape[1] == kv_length
    if plain and (visible is None or bool(visible.all())):
        return None
    whole = isinstance(q_offset, int) and (q_offset, q_length) == (0, kv_length) and kv_offset == 0
    padding = None if attention_mask is None else attention_mask.bool()
    whole &= padding is None or padding.shape == (batch_size, q_length)
    if whole and not use_vmap and not is_traced() and not is_capturing(torch.device(device)):
        borders = packed_borders(mask_function, padding, batch_size, q_length, local_size, device)
        if borders is not None:
            return borders
    if plain and visible is not None and q_length <= MAX_S_Q:
        if bool((visible[:, :-1] <= visible[:, 1:]).all()):  # each row is padding, then tokens
            return (kv_length - visible.sum(dim=1, keepdim=True)).to(torch.int32)
    given = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function, "use_vmap": use_vmap,
             "batch_size": batch_size, "device": device} | others  # fmt: skip
    return eager_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **given)


def _is_window(mask_function: Any, size: int) -> bool:
    """Returns whether a mask function has a window, rather than chunks of `size`: token `size` sees token 1."""
    zero, query, key = (torch.tensor(n, dtype=torch.int64, device="cpu") for n in (0, size, 1))
    return bool(mask_function(zero, zero, query, key))


AttentionInterface.register(NAME, cute_attention)
AttentionMaskInterface.register(NAME, cute_mask)
