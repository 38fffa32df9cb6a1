"""FlashAttention 3: a library of two torch operators in vLLM's wheel, which is loaded as one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from bench.peers.offer import FLASH_ATTENTION, FP8_LIMIT, LIMIT, Offer, digest, folder_of
from bench.records import package_version
from tests.kit.gqa_cases import KV_DTYPES, GqaCase
from tests.kit.sink_cases import SinkCase

LIBRARY: Final = "_vllm_fa3_C.abi3.so"
FORWARD: Final[dict[str, Any]] = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "q_v", "out")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k")),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")),
    "softmax_scale": 1.0,
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "scheduler_metadata": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "s_aux": None,
    "cp_world_size": 1,
    "cp_rank": 0,
    "cp_tot_seqused_k": None,
}
"""Arguments of `_vllm_fa3_C.fwd`, none of which has a default there: a causal call without anything optional."""
SCHEDULE: Final[dict[str, Any]] = {
    **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v")),
    **dict.fromkeys(("qkv_dtype", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q")),
    **dict.fromkeys(("leftpad_k", "page_size")),
    "max_seqlen_k_new": 0,
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "has_softcap": False,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
}
"""Arguments of `_vllm_fa3_C.get_scheduler_metadata`. In both calls, 0 splits let FA3 choose."""


@functools.cache
def operators() -> Any | str:
    """Returns the namespace of the operators `fwd` and `get_scheduler_metadata`, or why there is none."""
    found = torch.ops._vllm_fa3_C
    if hasattr(found, "fwd"):  # vLLM has been imported
        return found
    folder = folder_of(FLASH_ATTENTION)
    if isinstance(folder, str):
        return folder
    if not (folder / LIBRARY).is_file():
        return f"vllm_flash_attn has no {LIBRARY}"
    try:
        torch.ops.load_library(str(folder / LIBRARY))
    except (OSError, RuntimeError) as error:  # built for another torch, or another CUDA
        return f"{LIBRARY} cannot be loaded: {error.__cause__ or error}"
    return found if hasattr(found, "fwd") else f"{LIBRARY} registers no operator fwd"


def version() -> str:
    """Returns the version of vLLM, and the digest of the library."""
    found, folder = operators(), folder_of(FLASH_ATTENTION)
    if isinstance(found, str):
        return f"missing: {found}"
    library = "" if isinstance(folder, str) else f", {LIBRARY} sha256 {digest([folder / LIBRARY])}"
    return f"vllm {package_version('vllm')}{library}"


def forward(**arguments: Any) -> torch.Tensor:
    """Returns the output of a call, by the names of `FORWARD`; q (tokens, h_q, d), packed by `cu_seqlens_q`."""
    found: Any = operators()
    return found.fwd(**{**FORWARD, **arguments})[0]


def _window(window: int | None) -> dict[str, int]:
    """Translates a window, own position included, to FA3's number of keys to either side."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


# ---- decoding over pages


def decode(case: Any, inputs: Sequence[GqaCase], store: Any, *, dtype: str) -> Offer | None:
    """Decodes over the case's own cache, or over as many tokens of `dtype`: "bf16" or "fp8". It has no INT8 cache."""
    if case.kv_dtype not in ("int8", dtype):
        return None
    own = [as_dtype(case, one, store, dtype) for one in inputs]
    calls = [_decode_call(case, one) for one in own]
    notes = [] if dtype == case.kv_dtype else [f"a {dtype} cache of as many tokens"]
    notes += ["q rounded to fp8 before"] if dtype == "fp8" else []
    out = calls[0]().view_as(own[0].q)
    first = dataclasses.replace(own[0], q=own[0].q.bfloat16())
    return Offer(calls, out, first, ", ".join(notes), FP8_LIMIT if dtype == "fp8" else LIMIT)


def as_dtype(case: Any, one: GqaCase, store: Any, dtype: str) -> GqaCase:
    """Returns the input with q and caches in FP8, or in 16 bits."""
    q = one.q.to(KV_DTYPES[dtype])
    if dtype == case.kv_dtype:
        return dataclasses.replace(one, q=q)
    caches = {f"{which}_cache": store.codes(which, dtype, tuple(one.k_cache.shape)) for which in "kv"}
    return dataclasses.replace(one, q=q, **caches, k_scale=None, v_scale=None)


def _decode_call(case: Any, one: GqaCase) -> Callable[[], torch.Tensor]:
    """Returns a decode over pages, scheduled before, as vLLM does once for all layers."""
    device, q = one.q.device, one.q.flatten(0, 1)
    common: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.s_q,
        "seqused_k": one.cache_seqlens,
        "max_seqlen_q": case.s_q,
        "max_seqlen_k": case.s_k,
        **_window(case.window),
    }
    heads = {"num_heads": case.h_q, "num_heads_k": case.h_kv, "headdim": case.d, "headdim_v": case.d}
    pages = {"batch_size": case.batch, "page_size": case.page_size, "qkv_dtype": q.dtype}
    scales = {}
    if q.dtype.itemsize == 1:
        one_scale = torch.ones((), dtype=torch.float32, device=device)
        for which, scale in (("q", None), ("k", one.k_scale), ("v", one.v_scale)):
            own_scale = one_scale if scale is None else scale.float()
            scales[f"{which}_descale"] = own_scale.expand(case.batch, case.h_kv)
    found: Any = operators()
    schedule = found.get_scheduler_metadata(**{**SCHEDULE, **common, **heads, **pages})
    tensors = {"q": q, "k": one.k_cache, "v": one.v_cache, "page_table": one.block_table}
    given = {**tensors, "softmax_scale": case.d**-0.5, "scheduler_metadata": schedule, **common, **scales}
    return functools.partial(forward, **given)


# ---- forwards with sinks


def prefill(case: Any, inputs: Sequence[SinkCase], store: Any) -> Offer | None:
    """Computes a forward over packed sequences, the only form that its build takes; sinks in bfloat16."""
    if case.backward or case.deterministic:
        return None
    calls = [functools.partial(forward, **_packed(one)) for one in inputs]
    out = calls[0]().view_as(inputs[0].q)
    return Offer(calls, out, inputs[0], "sinks in bfloat16, packed sequences")


def _packed(one: SinkCase) -> dict[str, Any]:
    (s_q, s_k), batch = one.lengths[0], len(one.lengths)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=one.q.device)
    return {
        **{name: t.flatten(0, 1) for name, t in (("q", one.q), ("k", one.k), ("v", one.v))},
        "cu_seqlens_q": starts * s_q,
        "cu_seqlens_k": starts * s_k,
        "max_seqlen_q": s_q,
        "max_seqlen_k": s_k,
        "softmax_scale": one.softmax_scale,
        "s_aux": None if one.s_aux is None else one.s_aux.bfloat16(),
        **_window(one.window),
    }
