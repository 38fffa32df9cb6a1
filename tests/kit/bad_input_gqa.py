"""Valid and invalid calls of `gqa_decode`, the appends and `sink_attention`; see tests/kit/bad_input.py."""

import functools
from collections.abc import Collection

import torch

from cute_kernels.gqa.layouts import LAYOUTS, Which
from tests.kit import bad_tensors as bad
from tests.kit.bad_tensors import BF16, F32, F64, FP8, FP16, I8, I32, I64, U8, Call, Wrong

# ---- gqa_decode

G_BATCH, G_S_Q, H_Q, H_KV, D, G_ROWS = 2, 3, 6, 2, 64, 16
SIZES = {"b": G_BATCH, "p": 5, "h": H_KV, "s": G_ROWS, "t": G_ROWS, "d": D}


def cache(device: str, layout: str, which: Which = "k", dtype: torch.dtype = I8, **sizes: int) -> torch.Tensor:
    """A cache of zeros in which some axes have other sizes."""
    x = 16 // dtype.itemsize
    size = {**SIZES, **sizes}
    size |= {"x": x, "c": size["d"] // x, **sizes}
    return bad.zeros(device, *(size[axis] for axis in LAYOUTS[layout].axes(which)), dtype=dtype)


def of_dim(device: str, d: int, four_bits: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Both caches with another head dimension, in BNSH. `four_bits` names those with 4-bit codes."""
    sizes = {which: (U8, d // 2) if which in four_bits else (I8, d) for which in ("k", "v")}
    return {f"{which}_cache": cache(device, "BNSH", dtype=dtype, d=row) for which, (dtype, row) in sizes.items()}


def scale(device: str, layout: str) -> torch.Tensor:
    """Scales of ones per token and head."""
    return torch.ones([SIZES[axis] for axis in LAYOUTS[layout].scale_axes("per_token_head")], dtype=F32, device=device)


def gqa_call(device: str, layout: str = "BNSH", dtype: torch.dtype = I8) -> Call:
    scaled = dtype is I8
    return {
        "q": bad.zeros(device, G_BATCH, G_S_Q, H_Q, D),
        "k_cache": cache(device, layout, "k", dtype),
        "v_cache": cache(device, layout, "v", dtype),
        "k_scale": scale(device, layout) if scaled else None,
        "v_scale": scale(device, layout) if scaled else None,
        "layout": layout,
        "cache_seqlens": torch.full((G_BATCH,), 4, dtype=I32, device=device),
        "block_table": bad.ints(device, G_BATCH, 2) if LAYOUTS[layout].paged else None,
        "cache_starts": torch.full((G_BATCH,), 1, dtype=I32, device=device),
        "alibi_slopes": bad.floats(device, H_Q),
        "s_aux": bad.floats(device, H_Q),
        "out": bad.nans(device, G_BATCH, G_S_Q, H_Q, D),
        "lse": bad.nans(device, G_BATCH, G_S_Q, H_Q, dtype=F32),
    }


def gqa_paged_call(device: str) -> Call:
    return gqa_call(device, "paged_NHD")


def gqa_blocks_call(device: str) -> Call:
    """A call over pages of two blocks of 64 tokens, with a list of two blocks for each of two KV heads."""
    blocks = {"p": 5, "t": 128}
    cached = {f"{which}_cache": cache(device, "paged_HND", which, **blocks) for which in ("k", "v")}
    scales = {name: torch.ones((5, H_KV, 128), dtype=F32, device=device) for name in ("k_scale", "v_scale")}
    call = {**gqa_paged_call(device), **cached, **scales, "layout": "paged_HND"}
    call |= dict.fromkeys(("cache_starts", "alibi_slopes", "s_aux"))
    return {**call, "indices": bad.ints(device, G_BATCH, G_S_Q, H_KV, 2), "index_block": 64}


def gqa_wrong(device: str) -> Wrong:
    call, new = gqa_call(device), functools.partial(bad.zeros, device)
    q, heads = call["q"].shape, (G_BATCH, H_Q)
    four_bits = call["v_cache"][..., : D // 2].contiguous().view(U8)
    rotated = {"kind": "int8_k_int4_v", "v_cache": four_bits}
    half = {name: call[name].half() for name in ("k_scale", "v_scale")}
    return {
        **bad.wrong_tensor(
            call, "q", (G_BATCH, H_Q, D), (*q[:3], 128), (*q[:2], 0, D), (*q[:2], 5, D), (*q[:2], 1, D),
            (*q[:2], 1026, D), (G_BATCH, 0, H_Q, D), (G_BATCH, 9, H_Q, D), dtypes=[F32], off=4, rows=2, spread=True,
        ),
        "q of another batch": ("k_cache", {"q": new(G_BATCH + 1, *q[1:])}),
        **bad.wrong_tensor(
            call, "k_cache", (H_KV, G_ROWS, D), dtypes=[U8, F32, torch.float8_e5m2], off=8, rows=8, spread=True
        ),
        **bad.wrong_tensor(
            call, "v_cache", (1, H_KV, G_ROWS, D), (G_BATCH, 1, G_ROWS, D), (G_BATCH, H_KV, G_ROWS + 1, D),
            (G_BATCH, H_KV, G_ROWS, 128), cache(device, "paged_vllm").shape, dtypes=[FP8], off=8, rows=8, spread=True,
        ),
        **bad.wrong_tensor(
            call, "k_scale", (H_Q,), scale(device, "BSNH").shape, (G_BATCH, H_KV, G_ROWS, D // 16), dtypes=[F64, BF16]
        ),
        **bad.wrong_tensor(
            call, "v_scale", (G_BATCH, H_KV, G_ROWS, 0), (G_BATCH, H_KV, G_ROWS - 1), dtypes=[torch.float16]
        ),
        "block_table without pages": ("block_table", bad.ints(device, G_BATCH, 2)),
        **bad.wrong_tensor(call, "cache_seqlens", (G_BATCH, 1), (G_BATCH + 1,), dtypes=[I64, torch.uint32, F32]),
        **bad.wrong_tensor(call, "cache_starts", (G_BATCH, 1), (G_BATCH + 1,), dtypes=[I64, torch.uint32, F32]),
        **bad.wrong_tensor(
            call, "alibi_slopes", (H_KV,), (G_BATCH + 1, H_Q), (G_BATCH, G_S_Q, H_Q), dtypes=[BF16], spread=True
        ),
        **bad.wrong_tensor(call, "s_aux", (H_KV,), heads, dtypes=[BF16]),
        **bad.wrong_tensor(call, "out", (*q[:3], 32), (G_BATCH, H_Q, G_S_Q, D), dtypes=[F32, FP16], off=4, spread=True),
        **bad.wrong_tensor(call, "lse", (G_BATCH, H_Q, G_S_Q), dtypes=[BF16, F64]),
        **bad.wrong_options(
            layout=("NHD", "bnsh", None, ["BNSH"]), kind=("int3", 4, ["int8"]), k_scale=(None, 0.02), v_scale=(None,),
            s_aux=(0.0,), alibi_slopes=(0.5,), num_splits=(257,),
            index_block=(32, 8, 256, 0, -64, 64.0, True, None, "128"),
        ),
        "values of bytes without their kind": ("v_cache", {"v_cache": four_bits}),
        "int8 values of another kind": ("v_cache", {"kind": "int8_k_int4_v"}),
        "int8 keys of another kind": ("k_cache", {"kind": "fp8_per_token_head"}),
        "all bytes of a vector of 4-bit codes": ("v_cache", {**rotated, "v_cache": four_bits.repeat(1, 1, 1, 2)}),
        "4-bit values, scales of heads": ("v_scale", {**rotated, "v_scale": bad.floats(device, H_KV)}),
        "4-bit values, one scale a token": ("v_scale", {**rotated, "v_scale": bad.floats(device, G_BATCH, G_ROWS)}),
        "4-bit values, float16 scales": ("k_scale", {**rotated, **half}),
        "4-bit values, 4-bit keys": ("k_cache", {**rotated, "k_cache": four_bits}),
        "4-bit keys without their kind": ("k_cache", {"k_cache": four_bits, "v_cache": four_bits}),
        "4-bit keys, int8 values": ("v_cache", {"kind": "int4", "k_cache": four_bits}),
        "4-bit keys and values, float16 scales": (
            "k_scale", {"kind": "int4", "k_cache": four_bits, "v_cache": four_bits, **half},
        ),
        "int8 keys of kind int4": ("k_cache", {**rotated, "kind": "int4"}),
        "rotated values of d 512": (
            "v_cache", {"kind": "int8_k_int4_v", "q": new(*q[:3], 512), **of_dim(device, 512, "v")},
        ),
        **{f"4-bit codes of d {d}": ("k_cache", {"kind": "int4", "q": new(*q[:3], d), **of_dim(device, d, "kv")})
           for d in (32, 96)},
        "an odd d": ("q", {"q": new(*q[:3], 63), **of_dim(device, 63)}),
        "caches of an odd d": ("k_cache", of_dim(device, 63)),
        "4-bit codes of an odd d": ("q", {"kind": "int4", "q": new(*q[:3], 127), **of_dim(device, 128, "kv")}),
        "out of the memory of q, two bytes on": (
            "out", {"q": (wide := new(G_BATCH, G_S_Q, H_Q, D + 8))[..., :D], "out": wide[..., 4:-4]},
        ),
    }  # fmt: skip


def gqa_paged_wrong(device: str) -> Wrong:
    call, vllm = gqa_paged_call(device), gqa_call(device, "paged_vllm")
    # TMA reads a page of a head as one row of bytes, so the tokens of a page must not lie apart
    apart = {"k": bad.rows_apart(vllm["k_cache"], 16), "v": bad.rows_apart(vllm["v_cache"], 16)}
    return {
        **bad.wrong_options(cache_seqlens=(None,), block_table=(None,)),
        **bad.wrong_tensor(call, "block_table", (G_BATCH,), (G_BATCH + 1, 2), dtypes=[I64, torch.uint32], spread=True),
        **bad.wrong_tensor(call, "k_scale", (SIZES["p"] + 1, G_ROWS, H_KV)),
        "k_cache of paged_vllm with tokens apart": ("k_cache", {**vllm, "k_cache": apart["k"]}),
        "v_cache of paged_vllm with channels apart": ("v_cache", {**vllm, "v_cache": apart["v"]}),
        "4-bit values in paged_vllm": (
            "layout", {**vllm, "kind": "int8_k_int4_v", "v_cache": vllm["v_cache"].view(U8)},
        ),
        "v_cache of paged_vllm 8 bytes off": ("v_cache", {**vllm, "v_cache": bad.off_by(8, vllm["v_cache"])}),
    }  # fmt: skip


def gqa_blocks_wrong(device: str) -> Wrong:
    call, lists = gqa_blocks_call(device), (G_BATCH, G_S_Q, H_KV, 2)
    new, shared = functools.partial(bad.ints, device), bad.ints(device, G_BATCH, G_S_Q, 1, 2)
    per_head = bad.floats(device, H_KV)
    rows = {name: value for name, value in gqa_call(device).items() if name not in ("cache_starts", "alibi_slopes")}
    apart = bad.rows_apart(call["k_scale"].flatten(1), 4)[:, : H_KV * 128].unflatten(1, (H_KV, 128))
    return {
        **bad.wrong_tensor(
            call, "indices", lists[1:], (G_BATCH + 1, *lists[1:]), (G_BATCH, G_S_Q + 1, H_KV, 2),
            (G_BATCH, G_S_Q, H_Q, 2), (G_BATCH, G_S_Q, 0, 2), (*lists[:3], 0), dtypes=[I64, torch.uint32, F32],
            spread=True,
        ),
        "more blocks than tokens can be numbered": ("indices", new(1, 1, 1, 2**24).expand(*lists[:3], -1)),
        "indices and a window": ("window", 128),
        "indices and starts": ("cache_starts", new(G_BATCH)),
        "indices and slopes": ("alibi_slopes", bad.floats(device, H_Q)),
        "own lists and sinks": ("s_aux", bad.floats(device, H_Q)),
        "own lists and scales of heads": ("k_scale", per_head),
        "own lists and scales of tokens": ("v_scale", bad.floats(device, 5, 128)),
        "scales further apart than codes": ("v_scale", apart),
        "own lists of blocks that no page begins": ("v_scale", {"v_scale": apart, "indices": shared}),
        "room for a part of a block": ("k_cache", {**rows, "s_aux": None, "indices": shared, "index_block": 64}),
        "out of the same number of elements": ("out", bad.nans(device, G_BATCH, H_Q, G_S_Q, D)),
    }  # fmt: skip


# ---- kv_int8_append


def kv_append_call(device: str) -> Call:
    codes = {f"{which}_cache": bad.sevens(device, *cache(device, "BNSH").shape) for which in "kv"}
    scales = {f"{which}_scale": bad.sevens(device, *scale(device, "BNSH").shape, dtype=F32) for which in "kv"}
    tokens = {which: bad.zeros(device, 3, H_KV, D) for which in "kv"}
    return {**tokens, **codes, **scales, "slot_mapping": bad.numbers(device, 1, 2, 3, dtype=I64), "layout": "BNSH"}


def kv_append_wrong(device: str) -> Wrong:
    call, k_shape = kv_append_call(device), (G_BATCH, H_KV, G_ROWS, D)
    k_cache, v_cache = call["k_cache"], call["v_cache"]
    many = bad.zeros(device, D, dtype=I8).as_strided((2**16, H_KV, 2**15, D), (0, 0, 0, 1))
    one = dict.fromkeys(("k_scale", "v_scale"), torch.ones((), dtype=F32, device=device))
    odd = dict.fromkeys(("k_cache", "v_cache"), bad.zeros(device, 2, 12, H_KV, D, dtype=I8))
    return {
        **bad.wrong_options(layout=("NBSH", None, ["BNSH"])),
        "layout of other axes": ("k_cache", {"layout": "paged_vllm"}),
        "layout with heads elsewhere": ("k", {"layout": "BSNH"}),
        **bad.wrong_tensor(call, "k", (3, D), (3, 1, D), (3, H_KV, 32), dtypes=[F32], off=2, rows=4, spread=True),
        **bad.wrong_tensor(call, "v", (2, H_KV, D), dtypes=[torch.float16], off=2),
        **bad.wrong_tensor(call, "k_cache", k_shape[1:], dtypes=[U8, FP8], off=8, rows=8, spread=True),
        **bad.wrong_tensor(call, "v_cache", (*k_shape[:2], 8, D), dtypes=[U8], off=8),
        "caches of d 32": ("k_cache", {"k_cache": k_cache[..., :32], "v_cache": v_cache[..., :32]}),
        "caches of more slots than 31 bits count": ("k_cache", {"k_cache": many, "v_cache": many, **one}),
        "pages of 12 tokens": ("k_cache", {**one, **odd, "layout": "paged_NHD"}),
        **bad.wrong_tensor(call, "k_scale", (*k_shape[:3], 5), (*k_shape[:2], 15), dtypes=[BF16]),
        **bad.wrong_tensor(call, "v_scale", (H_KV + 1,), dtypes=[torch.float16]),
        **bad.wrong_tensor(call, "slot_mapping", (2,), (3, 1), dtypes=[torch.int16, torch.uint64]),
    }  # fmt: skip


def kv_kind_call(device: str) -> Call:
    call = kv_append_call(device)
    return {**call, "v_cache": call["v_cache"][..., : D // 2].contiguous().view(U8), "kind": "int8_k_int4_v"}


def kv_kind_wrong(device: str) -> Wrong:
    call, plain = kv_kind_call(device), kv_append_call(device)
    fp8 = {name: plain[name].view(FP8) for name in ("k_cache", "v_cache")}
    vllm = {f"{which}_cache": cache(device, "paged_vllm", which) for which in ("k", "v")}
    heads = dict.fromkeys(("k_scale", "v_scale"), torch.ones(H_KV, dtype=F32, device=device))
    half = {name: call[name].half() for name in ("k_scale", "v_scale")}

    def tokens(d: int) -> Call:
        return {which: bad.zeros(device, 3, H_KV, d) for which in ("k", "v")}

    return {
        **bad.wrong_options(kind=("int3", None, 4), layout=("NBSH",)),
        **bad.wrong_tensor(call, "k_cache", dtypes=[U8, FP8], off=8),
        **bad.wrong_tensor(call, "v_cache", (G_BATCH, H_KV, G_ROWS, D), dtypes=[I8, FP8], off=8),
        "scales of float16": ("k_scale", half),
        "scales of heads": ("k_scale", heads),
        "fp8 scales of heads": ("k_scale", {**fp8, **heads, "kind": "fp8_per_token_head"}),
        "fp8 in caches of int8": ("k_cache", {"v_cache": plain["v_cache"], "kind": "fp8_per_token_head"}),
        "int8 in caches of fp8": ("k_cache", {**fp8, "kind": "int8"}),
        "rotated values of d 512": ("v_cache", {**tokens(512), **of_dim(device, 512, "v")}),
        "rotated vectors of d 96": ("k_cache", {**tokens(96), **of_dim(device, 96, "kv"), "kind": "int4"}),
        "an odd d": ("k_cache", {**tokens(127), **of_dim(device, 127), "kind": "int8"}),
        "4-bit codes of an odd d": ("k", {**tokens(127), **of_dim(device, 128, "v")}),
        "packed pages": ("layout", {**vllm, "v_cache": vllm["v_cache"].view(U8), "layout": "paged_vllm"}),
    }


# ---- sink_attention

S_K = 5
TOKENS_Q, TOKENS_K = 7, 9
CODES = (I8, U8, I32, FP8, torch.float8_e5m2)


def sink_call(device: str) -> Call:
    return {
        "q": bad.zeros(device, G_BATCH, G_S_Q, H_Q, D),
        "k": bad.zeros(device, G_BATCH, S_K, H_KV, D),
        "v": bad.zeros(device, G_BATCH, S_K, H_KV, D),
        "s_aux": bad.floats(device, H_Q),
    }


def sink_packed_call(device: str) -> Call:
    """A valid call with three packed sequences."""
    return {
        "q": bad.zeros(device, TOKENS_Q, H_Q, D),
        "k": bad.zeros(device, TOKENS_K, H_KV, D),
        "v": bad.zeros(device, TOKENS_K, H_KV, D),
        "s_aux": bad.floats(device, H_Q),
        "cu_seqlens_q": bad.numbers(device, 0, 3, 3, TOKENS_Q),
        "cu_seqlens_k": bad.numbers(device, 0, 5, 6, TOKENS_K),
    }


def sink_wrong(device: str) -> Wrong:
    call, new = sink_call(device), functools.partial(bad.zeros, device)
    q, k = call["q"].shape, call["k"].shape
    return {
        **bad.wrong_tensor(
            call, "q", q[1:], (1, *q), (*q[:2], 5, D), (*q[:2], 1, D), (*q[:2], 0, D), dtypes=[F32, F64, I8], off=8,
            rows=4, spread=True,
        ),
        **bad.wrong_tensor(
            call, "k", k[1:], (G_BATCH + 1, *k[1:]), (*k[:3], 128), dtypes=[FP16, F32, *CODES], off=8, rows=4,
            spread=True,
        ),
        **bad.wrong_tensor(
            call, "v", (G_BATCH, H_KV, S_K, D), (G_BATCH, S_K + 1, H_KV, D), (G_BATCH, S_K, 1, D), (*k[:3], 128),
            (1, *k[1:]), dtypes=[FP16, *CODES], off=8, spread=True,
        ),
        "k and v of FP8": ("k", {"k": new(*k).to(FP8), "v": new(*k).to(FP8)}),
        **bad.wrong_tensor(call, "s_aux", (H_Q - 1,), (H_Q + 1,), (H_KV,), (1, H_Q), dtypes=[BF16, F64], spread=True),
        **bad.wrong_options(s_aux=(0.0,), num_splits=(257,)),
    }  # fmt: skip


def sink_backward_call(device: str) -> Call:
    call = sink_call(device)
    rows = functools.partial(bad.floats, device, G_BATCH, G_S_Q, H_Q)
    return {
        **call,  # q comes first because the other tensors must be on its device
        "dout": bad.zeros(device, *call["q"].shape),
        "out": bad.zeros(device, *call["q"].shape),
        "lse": rows(),
        "delta": rows(),
    }


def sink_backward_wrong(device: str) -> Wrong:
    call = sink_backward_call(device)
    q = call["q"].shape
    forward = {label: wrong for label, wrong in sink_wrong(device).items() if wrong[0] != "num_splits"}
    return {
        **forward,
        **bad.wrong_tensor(call, "dout", q[1:], (*q[:3], 32), (1, *q[1:]), dtypes=[FP16, F32, I8]),
        **bad.wrong_tensor(call, "out", q[1:], (*q[:2], 3, D), dtypes=[FP16, F32, I8]),
        **bad.wrong_tensor(call, "lse", q, (G_BATCH, H_Q, G_S_Q), dtypes=[BF16, F64, I32]),
        **bad.wrong_tensor(call, "delta", (*q[:3], 1), (G_BATCH, H_Q, G_S_Q), dtypes=[BF16, F64]),
    }


def sink_packed_wrong(device: str) -> Wrong:
    call, borders = sink_packed_call(device), functools.partial(bad.numbers, device)
    wrong: Wrong = {
        "q of rank 4": ("q", call["q"][None]),
        "k of rank 4": ("k", call["k"][None]),
        "v of other tokens": ("v", bad.zeros(device, TOKENS_K - 1, H_KV, D)),
        "cu_seqlens_k of another batch": ("cu_seqlens_k", borders(0, TOKENS_K)),
        "lengths without any element": ("cu_seqlens_q", dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), borders())),
    }
    for name, total in (("cu_seqlens_q", TOKENS_Q), ("cu_seqlens_k", TOKENS_K)):
        values = {
            "missing": None,
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
    return wrong
