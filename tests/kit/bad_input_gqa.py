"""Right and wrong calls of `gqa_decode`, `kv_int8_append` and `sink_attention`; see tests/kit/bad_input.py."""

import functools
import math

import numpy
import torch

from cute_kernels.gqa.layouts import LAYOUTS, Which
from tests.kit.bad_tensors import (
    F32,
    F64,
    FP8,
    I8,
    I32,
    I64,
    U8,
    Call,
    Wrong,
    all_elsewhere,
    elsewhere,
    every_second,
    floats,
    ints,
    nans,
    numbers,
    off_by,
    overlapping,
    rows_apart,
    sevens,
    sharing,
    zeros,
)  # fmt: skip

# ---- gqa_decode

G_BATCH, G_S_Q, H_Q, H_KV, D, G_ROWS = 2, 3, 6, 2, 64, 16
SIZES = {"b": G_BATCH, "p": 5, "h": H_KV, "s": G_ROWS, "t": G_ROWS, "d": D}


def cache(device: str, layout: str, which: Which = "k", dtype: torch.dtype = I8, **sizes: int) -> torch.Tensor:
    """A cache of zeros, with some sizes of its axes changed."""
    x = 16 // dtype.itemsize
    size = {**SIZES, **sizes}
    size |= {"x": x, "c": size["d"] // x, **sizes}
    return zeros(device, *(size[axis] for axis in LAYOUTS[layout].axes(which)), dtype=dtype)


def scale(device: str, layout: str, dtype: torch.dtype = F32) -> torch.Tensor:
    """Per token and head."""
    return torch.ones(
        [SIZES[axis] for axis in LAYOUTS[layout].scale_axes("per_token_head")], dtype=dtype, device=device
    )


def gqa_call(device: str, layout: str = "BNSH", dtype: torch.dtype = I8) -> Call:
    scaled = dtype is I8
    return {
        "q": zeros(device, G_BATCH, G_S_Q, H_Q, D),
        "k_cache": cache(device, layout, "k", dtype),
        "v_cache": cache(device, layout, "v", dtype),
        "k_scale": scale(device, layout) if scaled else None,
        "v_scale": scale(device, layout) if scaled else None,
        "layout": layout,
        "cache_seqlens": torch.full((G_BATCH,), 4, dtype=I32, device=device),
        "block_table": ints(device, G_BATCH, 2) if LAYOUTS[layout].paged else None,
        "alibi_slopes": floats(device, H_Q),
        "s_aux": floats(device, H_Q),
        "out": nans(device, G_BATCH, G_S_Q, H_Q, D),
        "lse": nans(device, G_BATCH, G_S_Q, H_Q, dtype=F32),
    }


def gqa_paged_call(device: str) -> Call:
    return gqa_call(device, "paged_NHD")


def gqa_wrong(device: str) -> Wrong:
    call, new = gqa_call(device), functools.partial(zeros, device)
    k, v = call["k_cache"], call["v_cache"]
    ones = functools.partial(torch.ones, dtype=F32, device=device)
    return {
        "q of float32": ("q", call["q"].float()),
        "q no tensor": ("q", [[0.0]]),
        "q of rank 3": ("q", new(G_BATCH, H_Q, D)),
        "q of another head dimension": ("q", new(G_BATCH, G_S_Q, H_Q, 128)),
        "q without heads": ("q", new(G_BATCH, G_S_Q, 0, D)),
        "q of heads that are no multiple": ("q", new(G_BATCH, G_S_Q, 5, D)),
        "q of fewer heads than the caches": ("q", new(G_BATCH, G_S_Q, 1, D)),
        "q of 1026 heads": ("q", new(G_BATCH, G_S_Q, 1026, D)),
        "q of another batch": ("k_cache", {"q": new(G_BATCH + 1, G_S_Q, H_Q, D)}),
        "q without queries": ("q", new(G_BATCH, 0, H_Q, D)),
        "q of 9 queries": ("q", new(G_BATCH, 9, H_Q, D)),
        "q with a last stride of 2": ("q", every_second(call["q"])),
        "q 4 bytes off": ("q", off_by(4, call["q"])),
        "q with rows 4 bytes off": ("q", rows_apart(call["q"], 2)),
        "k_cache no tensor": ("k_cache", None),
        "k_cache of uint8": ("k_cache", k.view(U8)),
        "k_cache of float32": ("k_cache", k.float()),
        "k_cache of e5m2": ("k_cache", k.view(torch.float8_e5m2)),
        "k_cache of rank 3": ("k_cache", k[0]),
        "k_cache with a last stride of 2": ("k_cache", every_second(k)),
        "k_cache 8 bytes off": ("k_cache", off_by(8, k)),
        "k_cache with rows 8 bytes off": ("k_cache", rows_apart(k, 8)),
        "v_cache of another batch": ("v_cache", v[:1]),
        "v_cache no tensor": ("v_cache", None),
        "v_cache of FP8": ("v_cache", v.view(FP8)),
        "v_cache of other heads": ("v_cache", cache(device, "BNSH", h=1)),
        "v_cache of other tokens": ("v_cache", cache(device, "BNSH", s=G_ROWS + 1)),
        "v_cache of another head dimension": ("v_cache", cache(device, "BNSH", d=128)),
        "v_cache of rank 5": ("v_cache", cache(device, "paged_vllm")),
        "v_cache with a last stride of 2": ("v_cache", every_second(v)),
        "v_cache 8 bytes off": ("v_cache", off_by(8, v)),
        "v_cache with rows 8 bytes off": ("v_cache", rows_apart(v, 8)),
        "k_scale missing": ("k_scale", None),
        "v_scale missing": ("v_scale", None),
        "k_scale a number": ("k_scale", 0.02),
        "k_scale of float64": ("k_scale", call["k_scale"].double()),
        "k_scale of bfloat16": ("k_scale", call["k_scale"].bfloat16()),
        "v_scale of another dtype": ("v_scale", call["v_scale"].half()),
        "k_scale of a query's heads": ("k_scale", ones(H_Q)),
        "k_scale of another layout": ("k_scale", scale(device, "BSNH")),
        "k_scale of groups of 16": ("k_scale", ones((G_BATCH, H_KV, G_ROWS, D // 16))),
        "v_scale of groups of 128": ("v_scale", ones((G_BATCH, H_KV, G_ROWS, 0))),
        "v_scale of fewer tokens": ("v_scale", call["v_scale"][..., 1:]),
        "layout of another name": ("layout", "NHD"),
        "layout in small letters": ("layout", "bnsh"),
        "layout None": ("layout", None),
        "layout no string": ("layout", ["BNSH"]),
        "block_table without pages": ("block_table", ints(device, G_BATCH, 2)),
        "cache_seqlens of int64": ("cache_seqlens", ints(device, G_BATCH, dtype=I64)),
        "cache_seqlens of uint32": ("cache_seqlens", call["cache_seqlens"].view(torch.uint32)),
        "cache_seqlens of float32": ("cache_seqlens", floats(device, G_BATCH)),
        "cache_seqlens a list": ("cache_seqlens", [4, 4]),
        "cache_seqlens of rank 2": ("cache_seqlens", ints(device, G_BATCH, 1)),
        "cache_seqlens of another batch": ("cache_seqlens", ints(device, G_BATCH + 1)),
        "window 0": ("window", 0),
        "window negative": ("window", -1),
        "window a float": ("window", 4.0),
        "window a bool": ("window", True),
        "softcap 0": ("softcap", 0.0),
        "softcap negative": ("softcap", -30.0),
        "softcap infinite": ("softcap", math.inf),
        "softcap NaN": ("softcap", math.nan),
        "softcap no number": ("softcap", "30"),
        "softcap a bool": ("softcap", True),
        "softmax_scale no number": ("softmax_scale", "1"),
        "softmax_scale a bool": ("softmax_scale", True),
        "num_splits 0": ("num_splits", 0),
        "num_splits too many": ("num_splits", 257),
        "num_splits a float": ("num_splits", 1.5),
        "num_splits a bool": ("num_splits", True),
        "alibi_slopes of bfloat16": ("alibi_slopes", new(H_Q)),
        "alibi_slopes of the caches' heads": ("alibi_slopes", floats(device, H_KV)),
        "alibi_slopes of another batch": ("alibi_slopes", floats(device, G_BATCH + 1, H_Q)),
        "alibi_slopes of rank 3": ("alibi_slopes", floats(device, G_BATCH, G_S_Q, H_Q)),
        "alibi_slopes with a stride of 2": ("alibi_slopes", every_second(call["alibi_slopes"])),
        "alibi_slopes a number": ("alibi_slopes", 0.5),
        "s_aux of bfloat16": ("s_aux", new(H_Q)),
        "s_aux of the caches' heads": ("s_aux", floats(device, H_KV)),
        "s_aux of rank 2": ("s_aux", floats(device, G_BATCH, H_Q)),
        "s_aux a number": ("s_aux", 0.0),
        "out of float32": ("out", call["out"].float()),
        "out of float16": ("out", call["out"].half()),
        "out of another shape": ("out", call["out"][..., :32]),
        "out as other libraries have it": ("out", call["out"].transpose(1, 2).contiguous()),
        "out with a last stride of 2": ("out", every_second(call["out"])),
        "out 4 bytes off": ("out", off_by(4, call["out"])),
        "lse of bfloat16": ("lse", call["lse"].bfloat16()),
        "lse of float64": ("lse", call["lse"].double()),
        "lse as other libraries have it": ("lse", call["lse"].transpose(1, 2).contiguous()),
        "causal no flag": ("causal", "no"),
        "causal of numpy": ("causal", numpy.bool_(True)),
        "window of numpy": ("window", numpy.int64(5)),
        "window huge": ("window", 2**70),
        "num_splits huge": ("num_splits", 2**70),
        "softcap huge": ("softcap", 10**400),
        "softmax_scale NaN": ("softmax_scale", math.nan),
        "softmax_scale infinite": ("softmax_scale", math.inf),
        "softmax_scale huge": ("softmax_scale", 2**2000),
        **overlapping(call, "out", "lse"),
        "out and lse in one memory": ("out", sharing(call, "out", "lse")),
        "out of the memory of q, two bytes on": (
            "out", {"q": (wide := new(G_BATCH, G_S_Q, H_Q, D + 8))[..., :D], "out": wide[..., 4:-4]},
        ),
        **{f"out in the memory of {name}": ("out", sharing(call, "out", name)) for name in ("k_cache", "v_cache")},
        **{f"lse in the memory of {name}": ("lse", sharing(call, "lse", name))
           for name in ("k_scale", "v_scale", "cache_seqlens", "alibi_slopes", "s_aux")},
        **elsewhere(call, "k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens", "alibi_slopes", "s_aux", "out",
                    "lse"),
        "everything on another device": ("q", all_elsewhere(call)),
    }  # fmt: skip


def gqa_paged_wrong(device: str) -> Wrong:
    call = gqa_paged_call(device)
    vllm = gqa_call(device, "paged_vllm")
    # a page of a head is a row of bytes to TMA: tokens may lie apart in none of them
    apart = {"k": rows_apart(vllm["k_cache"], 16), "v": rows_apart(vllm["v_cache"], 16)}
    return {
        "block_table missing": ("block_table", None),
        "cache_seqlens missing": ("cache_seqlens", None),
        "block_table of int64": ("block_table", ints(device, G_BATCH, 2, dtype=I64)),
        "block_table of uint32": ("block_table", call["block_table"].view(torch.uint32)),
        "block_table of rank 1": ("block_table", ints(device, G_BATCH)),
        "block_table of another batch": ("block_table", ints(device, G_BATCH + 1, 2)),
        "block_table with a last stride of 2": ("block_table", every_second(call["block_table"])),
        "k_scale of other pages": (
            "k_scale",
            torch.ones((SIZES["p"] + 1, G_ROWS, H_KV), dtype=F32, device=device),
        ),
        **elsewhere(call, "block_table"),
        "k_cache of paged_vllm with tokens apart": ("k_cache", {**vllm, "k_cache": apart["k"]}),
        "v_cache of paged_vllm with channels apart": ("v_cache", {**vllm, "v_cache": apart["v"]}),
        "v_cache of paged_vllm 8 bytes off": ("v_cache", {**vllm, "v_cache": off_by(8, vllm["v_cache"])}),
    }


# ---- kv_int8_append


def kv_append_call(device: str) -> Call:
    codes = {f"{which}_cache": sevens(device, *cache(device, "BNSH").shape) for which in "kv"}
    scales = {f"{which}_scale": sevens(device, *scale(device, "BNSH").shape, dtype=F32) for which in "kv"}
    tokens = {which: zeros(device, 3, H_KV, D) for which in "kv"}
    return {**tokens, **codes, **scales, "slot_mapping": numbers(device, 1, 2, 3, dtype=I64), "layout": "BNSH"}


def kv_append_wrong(device: str) -> Wrong:
    call, new = kv_append_call(device), functools.partial(zeros, device)
    k, k_cache, v_cache, slots = call["k"], call["k_cache"], call["v_cache"], call["slot_mapping"]
    ones = functools.partial(torch.ones, dtype=F32, device=device)
    many = zeros(device, D, dtype=I8).as_strided((2**16, H_KV, 2**15, D), (0, 0, 0, 1))
    one = {"k_scale": ones(()), "v_scale": ones(())}
    return {
        "layout unknown": ("layout", "NBSH"),
        "layout None": ("layout", None),
        "layout no string": ("layout", ["BNSH"]),
        "layout of other axes": ("k_cache", {"layout": "paged_vllm"}),
        "layout with heads elsewhere": ("k", {"layout": "BSNH"}),
        "k of float32": ("k", k.float()),
        "k None": ("k", None),
        "k of rank 2": ("k", k[:, 0]),
        "k of other heads": ("k", k[:, :1]),
        "k of another head dimension": ("k", k[..., :32]),
        "k 2 bytes off": ("k", off_by(2, k)),
        "k with rows 8 bytes off": ("k", rows_apart(k, 4)),
        "k with a last stride of 2": ("k", every_second(k)),
        "v of float16": ("v", call["v"].half()),
        "v of other tokens": ("v", call["v"][:2]),
        "v 2 bytes off": ("v", off_by(2, call["v"])),
        "v None": ("v", None),
        "k_cache of uint8": ("k_cache", k_cache.view(U8)),
        "k_cache of FP8": ("k_cache", k_cache.view(FP8)),
        "k_cache of rank 3": ("k_cache", k_cache[0]),
        "k_cache 8 bytes off": ("k_cache", off_by(8, k_cache)),
        "k_cache with rows 8 bytes off": ("k_cache", rows_apart(k_cache, 8)),
        "k_cache with a last stride of 2": ("k_cache", every_second(k_cache)),
        "caches of d 32": ("k_cache", {"k_cache": k_cache[..., :32], "v_cache": v_cache[..., :32]}),
        "caches of more slots than 31 bits count": ("k_cache", {"k_cache": many, "v_cache": many, **one}),
        "v_cache of other sizes": ("v_cache", v_cache[:, :, :8]),
        "v_cache of uint8": ("v_cache", v_cache.view(U8)),
        "v_cache 8 bytes off": ("v_cache", off_by(8, v_cache)),
        "k_scale of bfloat16": ("k_scale", call["k_scale"].bfloat16()),
        "k_scale None": ("k_scale", None),
        "k_scale of no granularity": ("k_scale", ones((G_BATCH, H_KV, G_ROWS, 5))),
        "k_scale of other tokens": ("k_scale", call["k_scale"][:, :, 1:]),
        "v_scale of another dtype": ("v_scale", call["v_scale"].half()),
        "v_scale of no granularity": ("v_scale", ones(H_KV + 1)),
        "slot_mapping of int16": ("slot_mapping", slots.short()),
        "slot_mapping of uint64": ("slot_mapping", slots.view(torch.uint64)),
        "slot_mapping of other tokens": ("slot_mapping", slots[:2]),
        "slot_mapping of rank 2": ("slot_mapping", slots[:, None]),
        **overlapping(call, "k_cache", "v_cache", "k_scale", "v_scale"),
        "one tensor as both caches": ("k_cache", sharing(call, "k_cache", "v_cache")),
        "one tensor as both scales": ("k_scale", sharing(call, "k_scale", "v_scale")),
        "k in the memory of v_cache": ("v_cache", sharing(call, "k", "v_cache")),
        "v in the memory of k_cache": ("k_cache", sharing(call, "v", "k_cache")),
        "slot_mapping in the memory of v_scale": ("v_scale", sharing(call, "v_scale", "slot_mapping")),
        **elsewhere(call, "v", "k_cache", "v_cache", "k_scale", "v_scale", "slot_mapping"),
        "everything on another device": ("k", all_elsewhere(call)),
        "pages of 12 tokens": (
            "k_cache",
            {**one, **dict.fromkeys(("k_cache", "v_cache"), new(2, 12, H_KV, D, dtype=I8)), "layout": "paged_NHD"},
        ),
    }  # fmt: skip


# ---- sink_attention

S_K = 5
TOKENS_Q, TOKENS_K = 7, 9
CODES = (I8, U8, I32, FP8, torch.float8_e5m2)


def sink_call(device: str) -> Call:
    return {
        "q": zeros(device, G_BATCH, G_S_Q, H_Q, D),
        "k": zeros(device, G_BATCH, S_K, H_KV, D),
        "v": zeros(device, G_BATCH, S_K, H_KV, D),
        "s_aux": floats(device, H_Q),
    }


def sink_packed_call(device: str) -> Call:
    """The same of three packed sequences."""
    return {
        "q": zeros(device, TOKENS_Q, H_Q, D),
        "k": zeros(device, TOKENS_K, H_KV, D),
        "v": zeros(device, TOKENS_K, H_KV, D),
        "s_aux": floats(device, H_Q),
        "cu_seqlens_q": numbers(device, 0, 3, 3, TOKENS_Q),
        "cu_seqlens_k": numbers(device, 0, 5, 6, TOKENS_K),
    }


def sink_wrong(device: str) -> Wrong:
    call, new = sink_call(device), functools.partial(zeros, device)
    q, k, v = call["q"], call["k"], call["v"]
    return {
        "q no tensor": ("q", None),
        "q a list": ("q", [1.0]),
        "q of float32": ("q", q.float()),
        "q of float64": ("q", q.double()),
        "q of int8": ("q", q.to(I8)),
        "q of rank 3": ("q", q[0]),
        "q of rank 5": ("q", q[None]),
        "q of heads that are no multiple": ("q", new(G_BATCH, G_S_Q, 5, D)),
        "q of fewer heads than k": ("q", new(G_BATCH, G_S_Q, 1, D)),
        "q without heads": ("q", new(G_BATCH, G_S_Q, 0, D)),
        "q with a last stride of 2": ("q", every_second(q)),
        "q 8 bytes off": ("q", off_by(8, q)),
        "q with rows 8 bytes off": ("q", rows_apart(q, 4)),
        "k no tensor": ("k", None),
        "k of float16": ("k", k.half()),
        "k of float32": ("k", k.float()),
        "k of rank 3": ("k", k[0]),
        "k of another batch": ("k", new(G_BATCH + 1, S_K, H_KV, D)),
        "k of another head dimension": ("k", new(G_BATCH, S_K, H_KV, 128)),
        "k with a last stride of 2": ("k", every_second(k)),
        "k 8 bytes off": ("k", off_by(8, k)),
        "k with rows 8 bytes off": ("k", rows_apart(k, 4)),
        "v no tensor": ("v", None),
        "v as other libraries have it": ("v", v.transpose(1, 2).contiguous()),
        "v of float16": ("v", v.half()),
        "v of other tokens": ("v", new(G_BATCH, S_K + 1, H_KV, D)),
        "v of other heads": ("v", new(G_BATCH, S_K, 1, D)),
        "v of another head dimension": ("v", new(G_BATCH, S_K, H_KV, 128)),
        "v of another batch": ("v", new(1, S_K, H_KV, D)),
        "v with a last stride of 2": ("v", every_second(v)),
        "v 8 bytes off": ("v", off_by(8, v)),
        "k and v of FP8": ("k", {"k": k.to(FP8), "v": v.to(FP8)}),
        "s_aux of bfloat16": ("s_aux", new(H_Q)),
        "s_aux of float64": ("s_aux", floats(device, H_Q, dtype=F64)),
        "s_aux too short": ("s_aux", floats(device, H_Q - 1)),
        "s_aux too long": ("s_aux", floats(device, H_Q + 1)),
        "s_aux of the heads of k": ("s_aux", floats(device, H_KV)),
        "s_aux of rank 2": ("s_aux", floats(device, 1, H_Q)),
        "s_aux with a stride of 2": ("s_aux", every_second(call["s_aux"])),
        "s_aux a number": ("s_aux", 0.0),
        "causal a number": ("causal", 1),
        "causal None": ("causal", None),
        "causal a string": ("causal", "no"),
        "causal of numpy": ("causal", numpy.bool_(True)),
        "window huge": ("window", 2**70),
        "softmax_scale NaN": ("softmax_scale", math.nan),
        "softmax_scale huge": ("softmax_scale", 2**2000),
        "window 0": ("window", 0),
        "window negative": ("window", -1),
        "window a float": ("window", 4.0),
        "window a bool": ("window", True),
        "window two numbers": ("window", (4, 0)),
        "softmax_scale no number": ("softmax_scale", "1"),
        "softmax_scale a bool": ("softmax_scale", True),
        "softmax_scale a tensor": ("softmax_scale", floats(device)),
        "num_splits 0": ("num_splits", 0),
        "num_splits too many": ("num_splits", 257),
        "num_splits a float": ("num_splits", 1.5),
        "num_splits a bool": ("num_splits", True),
        "deterministic None": ("deterministic", None),
        "deterministic a number": ("deterministic", 1),
        **{f"{name} of {dtype}": (name, call[name].to(dtype)) for name in ("k", "v") for dtype in CODES},
        **elsewhere(call, "k", "v", "s_aux"),
        "everything on another device": ("q", all_elsewhere(call)),
    }


def sink_packed_wrong(device: str) -> Wrong:
    call, borders = sink_packed_call(device), functools.partial(numbers, device)
    wrong: Wrong = {
        "q of rank 4": ("q", call["q"][None]),
        "k of rank 4": ("k", call["k"][None]),
        "v of other tokens": ("v", zeros(device, TOKENS_K - 1, H_KV, D)),
        "cu_seqlens_k of another batch": ("cu_seqlens_k", borders(0, TOKENS_K)),
        "lengths without any element": ("cu_seqlens_q", dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), borders())),
    }
    for name, total in (("cu_seqlens_q", TOKENS_Q), ("cu_seqlens_k", TOKENS_K)):
        values = {
            "missing": None,
            "a list": [0, 3, 3, total],
            "of int64": borders(0, 3, 3, total, dtype=I64),
            "of uint32": borders(0, 3, 3, total).view(torch.uint32),
            "of float32": borders(0, 3, 3, total, dtype=F32),
            "of rank 2": borders(0, 3, 3, total)[None],
            "with a stride of 2": borders(0, 0, 3, 0, 3, 0, total, 0)[::2],
            "that begin after 0": borders(1, 3, 3, total),
            "that begin before 0": borders(-1, 3, 3, total),
            "that decrease": borders(0, 4, 3, total),
            "that decrease below 0": borders(0, -2, 3, total),
            "that end late": borders(0, 3, 3, total + 1),
            "that pass the end": borders(0, total + 1, total, total),
        }
        wrong |= {f"{name} {what}": (name, value) for what, value in values.items()}
    return wrong | elsewhere(call, "cu_seqlens_q", "cu_seqlens_k")
