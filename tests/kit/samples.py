"""A sample call of every public function, for tests of environments: defaults, modes, compilers.

Inputs are drawn on a device from a seed, and are as adversarial as those of `tests.kit`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import fp8_mla
from cute_kernels import (
    gqa_decode,
    index_append,
    index_decode,
    index_topk,
    kv_append,
    kv_int8_append,
    merge_states,
    mla_fp8_append,
    mla_fp8_decode,
    sink_attention,
    sink_attention_backward,
)
from cute_kernels.compat import flash_mla
from cute_kernels.sink.reference import reference_sink_attention
from tests.kit.block_lists import listed_case
from tests.kit.draws import generator, normal
from tests.kit.gqa_cases import FOUR_BITS, gqa_case
from tests.kit.index_cases import index_call
from tests.kit.mla_cases import dense_case, latent_tokens, sparse_case
from tests.kit.sink_cases import SinkCase, sink_case

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample call of a public function.

    inputs    makes its arguments on a device, with the same values each time
    run       makes the call and returns its results and the tensors that it wrote
    backward  whether the call needs gradients
    """

    inputs: Callable[[str], dict[str, Any]]
    run: Callable[..., Tensors]
    backward: bool = False


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy of the arguments, strides included, so that a call may write to them."""
    return {name: _copy(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def _copy(t: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    return storage.clone().as_strided(t.shape, t.stride(), t.storage_offset())


# ---- inputs


def case_of(make: Callable[..., Any], **options: Any) -> Callable[[str], dict[str, Any]]:
    """Makes the arguments of a case of the kit. For sink attention, the gradient of the output is one of them."""

    def inputs(device: str) -> dict[str, Any]:
        case = make(**options, device=device)
        return {**case.arguments(), **({"d_out": case.d_out} if isinstance(case, SinkCase) else {})}

    return inputs


def _normal(shape: tuple[int, ...], seed: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return normal(shape, generator(seed, device)).to(dtype)


SPARSE = case_of(sparse_case, batch=3, h_q=16, s_q=2, topk=130, num_slots=512, lengths="query", sink="inf")
DENSE = case_of(dense_case, seqlens=[70, 0, 5, 129], h_q=16, s_q=2, sink="finite")
SHARES = case_of(dense_case, seqlens=[700, 3, 0, 300], h_q=64, s_q=2, padded=False)
PAGED = case_of(
    gqa_case, seqlens=[70, 0, 33], h_q=8, h_kv=2, layout="paged_NHD", page_size=16, kv_dtype="fp8",
    k_scales="per_tensor", v_scales="per_head", values="wild", bad_entries=True,
)  # fmt: skip
X_PACKED = case_of(
    gqa_case, seqlens=[20, 33], h_q=4, h_kv=4, layout="paged_vllm", page_size=16, kv_dtype="fp16",
    q_dtype=torch.float16, sink="finite",
)  # fmt: skip
BLOCKS = case_of(
    listed_case, seqlens=[200, 90, 0], h_q=8, h_kv=2, s_q=2, d=64, layout="paged_HND", page_size=128, n=3
)  # fmt: skip
CONTIGUOUS = case_of(
    gqa_case, seqlens=[40, 40], h_q=8, h_kv=2, s_q=2, d=64, whole=True, window=17, softcap=20.0, alibi="batch",
    sink="inf",
)  # fmt: skip
LONG = case_of(gqa_case, seqlens=[700, 3, 64, 300], h_q=8, h_kv=2, layout="paged_NHD", padded=False)
SINK = case_of(sink_case, lengths=[(9, 13)] * 2, window=5, sinks="extreme")
SINK_PACKED = case_of(sink_case, lengths=[(9, 13), (0, 3), (12, 7)], d=128, dtype=torch.float16, packed=True)
SINK_LONG = case_of(sink_case, lengths=[(200, 260)] * 2, padded=False)


def _mla_append(device: str) -> dict[str, Any]:
    slots = torch.tensor([5, -1, 130, 64, 1 << 40], dtype=torch.int64, device=device)
    kv = _normal((5, fp8_mla.QK_DIM), 3, device)
    return {"kv": kv, "kv_cache": latent_tokens(192, generator(4, device)).view(3, 64, 656), "slot_mapping": slots}


def _index_append(device: str) -> dict[str, Any]:
    slots = torch.tensor([5, -1, 130, 64, 1 << 40], dtype=torch.int64, device=device)
    cache = torch.full((3, 64, 132), 7, dtype=torch.uint8, device=device)
    return {"k": _normal((5, 128), 3, device), "k_cache": cache, "slot_mapping": slots, "scale": "ue8m0"}


def _index_decode(device: str) -> dict[str, Any]:
    call = index_call([300, 70, 9], s_q=2, heads=16, page_size=16, exact=True)
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    return {**moved, "topk": 64, "first": 2, "last": 3}


def _index_topk(device: str) -> dict[str, Any]:
    logits = (2 * _normal((4, 900), 5, device, torch.float32)).round()
    lengths = torch.tensor([900, 0, 300, 70], dtype=torch.int32, device=device)
    table = torch.arange(2 * 57, dtype=torch.int32, device=device).flip(0).view(2, 57)
    return {"logits": logits, "lengths": lengths, "topk": 128, "block_table": table, "page_size": 16}


CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


def _kv_append(**options: Any) -> Callable[[str], dict[str, Any]]:
    """New tokens for the caches of a `gqa_case`."""

    def inputs(device: str) -> dict[str, Any]:
        case = gqa_case(seqlens=[20, 33], h_q=2, h_kv=2, d=64, **options, device=device)
        k, v = _normal((2, 4, 2, 64), 5, device).unbind()
        slots = torch.tensor([3, -1, 40, 41], dtype=torch.int64, device=device)
        kind = {} if case.kind is None else {"kind": case.kind}
        caches = {name: getattr(case, name) for name in CACHES}
        return {"k": k, "v": v, **caches, "slot_mapping": slots, "layout": "BNSH", **kind}

    return inputs


OWN_SCALES = _kv_append(k_scales="per_token", v_scales="per_group_32", scale_dtype=torch.float16)


def _given_scales(device: str) -> dict[str, Any]:
    ones = torch.full((2,), 0.02, dtype=torch.float32, device=device)
    return {**OWN_SCALES(device), "k_scale": ones, "v_scale": ones[0].clone()}


def _states(device: str) -> dict[str, Any]:
    lses = 4 * _normal((5, 3, 2, 8), 7, device, torch.float32)
    lses[1] = -torch.inf
    lses[:, 0] = -torch.inf
    outs = _normal((5, 3, 2, 8, 128), 6, device)
    outs[1] = torch.nan
    return {"outs": outs, "lses": lses, "s_aux": _normal((8,), 8, device, torch.float32)}


def _sink_backward(device: str) -> dict[str, Any]:
    case = sink_case([(9, 13), (0, 3), (12, 7)], packed=True, window=5, device=device)
    out, lse = reference_sink_attention(**case.arguments())
    rows = {"dout": case.d_out, "out": out.to(case.q.dtype), "lse": lse.float()}
    return {**case.arguments(), **rows, "deterministic": True}


def _split(device: str) -> dict[str, Any]:
    case = sparse_case(batch=1, h_q=128, topk=2048, sink="finite", padded=False, device=device)
    out, lse = case.outputs()
    return {**case.arguments(), "num_splits": 32, "out": out.tensor, "lse": lse.tensor}


def _flash(device: str) -> dict[str, Any]:
    call = SPARSE(device)
    return {
        "q": call["q"], "k_cache": call["kv_cache"].unsqueeze(2), "indices": call["indices"],
        "topk_length": call["topk_length"][:, 0].contiguous(), "attn_sink": call["s_aux"],
    }  # fmt: skip


def _flash_dense(device: str) -> dict[str, Any]:
    call = DENSE(device)
    return {
        "q": call["q"], "k_cache": call["kv_cache"].unsqueeze(2), "block_table": call["block_table"],
        "cache_seqlens": call["cache_seqlens"],
    }  # fmt: skip


# ---- calls


def calling(function: Callable[..., Any], *written: str, **options: Any) -> Callable[..., Tensors]:
    """Calls a function with options. The results are what it returns, or copies of the arguments that it writes."""

    def run(d_out: torch.Tensor | None = None, **call: Any) -> Tensors:
        results = function(**call, **options)
        if written:
            return tuple(call[name].clone() for name in written)
        return results if isinstance(results, tuple) else (results,)

    return run


def _attend_with_gradients(d_out: torch.Tensor, **call: Any) -> Tensors:
    names = [name for name in ("q", "k", "v", "s_aux") if call[name] is not None]
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [call[name].detach().requires_grad_() for name in names]
        call |= dict(zip(names, leaves, strict=True))
        out, lse = sink_attention(**call, deterministic=True, return_lse=True)
        return out.detach(), lse, *torch.autograd.grad(out, leaves, d_out)


def _decode_flash(**call: Any) -> Tensors:
    metadata, num_splits = flash_mla.get_mla_metadata()
    tensors = {"block_table": None, "cache_seqlens": None, **call}
    return flash_mla.flash_mla_with_kvcache(
        **tensors, head_dim_v=512, tile_scheduler_metadata=metadata, num_splits=num_splits, is_fp8_kvcache=True
    )


def _decode_flash_dense(**call: Any) -> Tensors:
    """Dense decoding in FlashMLA's older interface; its schedule is among the results."""
    schedule, num_splits = flash_mla.get_mla_metadata(call["cache_seqlens"], 32, 1)
    assert isinstance(schedule, torch.Tensor) and num_splits is not None
    out, lse = flash_mla.flash_mla_with_kvcache(
        **call, head_dim_v=512, tile_scheduler_metadata=schedule, num_splits=num_splits, causal=True,
        is_fp8_kvcache=True,
    )  # fmt: skip
    return out, lse, schedule, num_splits


_mla = calling(mla_fp8_decode, return_lse=True)
_mla_splits = calling(mla_fp8_decode, num_splits=3)
_gqa = calling(gqa_decode, return_lse=True)
_gqa_splits = calling(gqa_decode, num_splits=2)
_sink = calling(sink_attention, return_lse=True)
SAMPLES = {
    "mla_fp8_decode, sparse": Sample(SPARSE, _mla),
    "mla_fp8_decode, sparse, no lse": Sample(
        case_of(sparse_case, batch=2, h_q=128, topk=64, num_slots=256, padded=False), _mla_splits
    ),
    "mla_fp8_decode, dense": Sample(DENSE, _mla),
    "mla_fp8_append": Sample(_mla_append, calling(mla_fp8_append, "kv_cache")),
    "index_append": Sample(_index_append, calling(index_append, "k_cache")),
    "index_decode": Sample(_index_decode, calling(index_decode)),
    "index_topk": Sample(_index_topk, calling(index_topk)),
    "gqa_decode, contiguous": Sample(CONTIGUOUS, _gqa),
    "gqa_decode, paged": Sample(PAGED, _gqa_splits),
    "gqa_decode, paged_vllm": Sample(X_PACKED, _gqa),
    **{
        f"gqa_decode, {kind}": Sample(
            case_of(gqa_case, seqlens=[40, 90], h_q=8, h_kv=2, d=64, kv_dtype=kind, starts=[0, 7]), _gqa
        )
        for kind in FOUR_BITS
    },
    "gqa_decode, blocks": Sample(BLOCKS, _gqa),
    "kv_int8_append, own scales": Sample(OWN_SCALES, calling(kv_int8_append, *CACHES)),
    "kv_int8_append, given scales": Sample(_given_scales, calling(kv_int8_append, *CACHES)),
    **{f"kv_append, {kind}": Sample(_kv_append(kv_dtype=kind), calling(kv_append, *CACHES)) for kind in FOUR_BITS},
    "merge_states": Sample(_states, calling(merge_states)),
    "sink_attention": Sample(SINK, _sink),
    "sink_attention, gradients": Sample(SINK, _attend_with_gradients, backward=True),
    "sink_attention_backward": Sample(_sink_backward, calling(sink_attention_backward)),
    "sink_attention, packed": Sample(SINK_PACKED, _sink),
    "sink_attention, packed, gradients": Sample(SINK_PACKED, _attend_with_gradients, backward=True),
    "flash_mla_with_kvcache, sparse": Sample(_flash, _decode_flash),
    "flash_mla_with_kvcache, dense": Sample(_flash_dense, _decode_flash_dense),
}

LONG_SAMPLES = {
    "mla_fp8_decode, 32 splits": Sample(_split, _mla),
    "mla_fp8_decode, shares": Sample(SHARES, _mla),
    "mla_fp8_decode, dense splits": Sample(SHARES, _mla_splits),
    "gqa_decode, planned": Sample(LONG, _gqa),
    "gqa_decode, splits": Sample(LONG, _gqa_splits),
    "sink_attention, long": Sample(SINK_LONG, _sink),
    "sink_attention, long, gradients": Sample(SINK_LONG, _attend_with_gradients, backward=True),
    "sink_attention, decoded": Sample(case_of(sink_case, lengths=[(1, 260)] * 2, padded=False), _sink),
}
"""Calls with partial results and several tiles. They run on GPUs only, because plain torch takes too long."""
