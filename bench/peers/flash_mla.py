"""FlashMLA: its FP8 kernels for index lists of V3.2 and V4, its bfloat16 kernel for dense decoding."""

from __future__ import annotations

import functools
import math
import pathlib
import types
from collections.abc import Sequence
from typing import Any, Final

import torch

from bench.peers.offer import Offer, digest, load
from bench.records import package_version
from tests.kit.mla_cases import DecodeCase

SPARSE_HEADS: Final = (64, 128)
"""Numbers of heads that its FP8 kernels take; its users pad."""
FORMATS: Final = ("v3.2", "v4")


def version() -> str:
    """Returns the version of the module or its distribution, or else the digest of its compiled library."""
    module = load("flash_mla")
    if isinstance(module, str):
        return f"missing: {module}"
    libraries = sorted(pathlib.Path(module.__file__ or "").parent.glob("*.so"))
    own = getattr(module, "__version__", None) or package_version("flash_mla")
    return ", ".join([str(own), *(f"{path.name} sha256 {digest([path])}" for path in libraries)])


def sparse(case: Any, inputs: Sequence[DecodeCase], store: Any) -> Offer | None:
    """Decodes over the same bytes, q padded to the heads that it takes; the plan of its first call is kept."""
    if case.mode != "sparse" or case.formats[0] not in FORMATS or len(set(case.formats)) > 1:
        return None
    heads = next(heads for heads in SPARSE_HEADS if heads >= case.h_q)
    note = "" if heads == case.h_q else f"q padded to {heads} heads"
    return _offer(case, [_sparse_call(one, heads - case.h_q) for one in inputs], inputs[0], note)


def dense(case: Any, inputs: Sequence[DecodeCase], store: Any) -> Offer | None:
    """Decodes over the same tokens in bfloat16."""
    if case.mode != "dense":
        return None
    keys = store.in_bf16(inputs[0].kv_cache)
    calls = [
        functools.partial(
            _module().flash_mla_with_kvcache,
            **_usual(one.q),
            k_cache=keys,
            block_table=one.block_table,
            cache_seqlens=one.cache_seqlens,
            causal=case.s_q > 1,
        )
        for one in inputs
    ]
    return _offer(case, calls, inputs[0], "")


def _module() -> types.ModuleType:
    module = load("flash_mla")
    assert isinstance(module, types.ModuleType)
    return module


def _offer(case: Any, calls: Sequence[Any], first: DecodeCase, note: str) -> Offer:
    return Offer(calls, calls[0]()[0][:, :, : case.h_q], first, note)


def _usual(q: torch.Tensor) -> dict[str, Any]:
    meta, _ = _module().get_mla_metadata()
    scale = q.shape[-1] ** -0.5
    return {"q": q, "head_dim_v": 512, "tile_scheduler_metadata": meta, "num_splits": None, "softmax_scale": scale}


def _sparse_call(one: DecodeCase, more_heads: int) -> Any:
    pad = torch.nn.functional.pad
    given: dict[str, Any] = {
        **_usual(pad(one.q, (0, 0, 0, more_heads))),
        "k_cache": _as_flash_mla(one.kv_cache),
        "block_table": None,
        "cache_seqlens": None,
        "is_fp8_kvcache": True,
        "indices": one.indices,
    }
    if one.s_aux is not None:
        given["attn_sink"] = pad(one.s_aux, (0, more_heads), value=-math.inf)
    if one.topk_length is not None:
        given["topk_length"] = one.topk_length
    if one.extra_kv_cache is not None:
        given["extra_k_cache"] = _as_flash_mla(one.extra_kv_cache)
        given["extra_indices_in_kvcache"] = one.extra_indices
        given["extra_topk_length"] = one.extra_topk_length
    return functools.partial(_module().flash_mla_with_kvcache, **given)


def _as_flash_mla(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.float8_e4m3fn).unsqueeze(2)
