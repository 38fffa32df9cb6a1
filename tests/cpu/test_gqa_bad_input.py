"""Bad input to `gqa_decode`: a TypeError or ValueError that names the argument, what it got and what it needs.

The checks do not depend on the device, so CPU tensors show them; what only a GPU can show is in
tests/gpu/test_bad_input.py, and `kv_int8_append` is in test_gqa_append.py. The outputs of every call are full of NaN
before it and must be after it.
"""

import math
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode
from cute_kernels.gqa.layout_plan import LAYOUTS

BATCH, S_Q, H_Q, H_KV, D = 2, 3, 6, 2, 64
ROWS = 16  # of a sequence or a page
SIZES = {"b": BATCH, "p": 5, "h": H_KV, "s": ROWS, "t": ROWS, "d": D}
FP8 = torch.float8_e4m3fn
ITEM = {torch.int8: 1, FP8: 1, torch.bfloat16: 2, torch.float16: 2}
ERROR = r"(?s)^{}: got .+[,;] (needs|known are|layout .+ needs) .+"


def cache(layout: str, which: str = "k", dtype: torch.dtype = torch.int8, **sizes: int) -> torch.Tensor:
    x = 16 // ITEM[dtype]
    all_sizes = {**SIZES, **sizes}
    all_sizes |= {"x": x, "c": all_sizes["d"] // x, **sizes}
    axes = LAYOUTS[layout].key if which == "k" else LAYOUTS[layout].value
    return torch.zeros([all_sizes[axis] for axis in axes], dtype=dtype)


def scale(layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Per token and head."""
    return torch.ones([SIZES[axis] for axis in LAYOUTS[layout].token_axes], dtype=dtype)


def call(layout: str = "BNSH", dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    """A call that is right in everything."""
    scaled = dtype is torch.int8
    return {
        "q": torch.zeros((BATCH, S_Q, H_Q, D), dtype=torch.bfloat16),
        "k_cache": cache(layout, "k", dtype),
        "v_cache": cache(layout, "v", dtype),
        "k_scale": scale(layout) if scaled else None,
        "v_scale": scale(layout) if scaled else None,
        "layout": layout,
        "cache_seqlens": torch.full((BATCH,), 4, dtype=torch.int32),
        "block_table": torch.zeros((BATCH, 2), dtype=torch.int32) if LAYOUTS[layout].paged else None,
        "alibi_slopes": torch.zeros(H_Q),
        "s_aux": torch.zeros(H_Q),
        "out": torch.full((BATCH, S_Q, H_Q, D), math.nan, dtype=torch.bfloat16),
        "lse": torch.full((BATCH, S_Q, H_Q), math.nan),
    }


def query(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def every_second(like: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype with a last stride of 2."""
    return torch.zeros((*like.shape[:-1], 2 * like.shape[-1]), dtype=like.dtype)[..., ::2]


def shifted(like: torch.Tensor, bytes_: int) -> torch.Tensor:
    """The same shape and dtype at an address that far beyond a multiple of 16."""
    size = like.numel() * like.element_size()
    storage = torch.zeros(size + 32, dtype=torch.uint8)
    start = (-storage.data_ptr()) % 16 + bytes_
    return storage[start : start + size].view(like.dtype).view(like.shape)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BASE = call()
WRONG: dict[str, tuple[str, Any]] = {
    "q of float32": ("q", query(BATCH, S_Q, H_Q, D, dtype=torch.float32)),
    "q no tensor": ("q", [[0.0]]),
    "q of rank 3": ("q", query(BATCH, H_Q, D)),
    "q of another head dimension": ("q", query(BATCH, S_Q, H_Q, 128)),
    "q without heads": ("q", query(BATCH, S_Q, 0, D)),
    "q of heads that are no multiple": ("q", query(BATCH, S_Q, 5, D)),
    "q of fewer heads than the caches": ("q", query(BATCH, S_Q, 1, D)),
    "q of 1026 heads": ("q", query(BATCH, S_Q, 1026, D)),
    "q without queries": ("q", query(BATCH, 0, H_Q, D)),
    "q of 9 queries": ("q", query(BATCH, 9, H_Q, D)),
    "q with a last stride of 2": ("q", every_second(BASE["q"])),
    "q 4 bytes off": ("q", shifted(BASE["q"], 4)),
    "q with rows 4 bytes off": ("q", query(BATCH, S_Q, H_Q, D + 2)[..., :D]),
    "k_cache no tensor": ("k_cache", None),
    "k_cache of uint8": ("k_cache", BASE["k_cache"].view(torch.uint8)),
    "k_cache of float32": ("k_cache", BASE["k_cache"].float()),
    "k_cache of e5m2": ("k_cache", BASE["k_cache"].view(torch.float8_e5m2)),
    "k_cache of rank 3": ("k_cache", BASE["k_cache"][0]),
    "v_cache of another batch": ("v_cache", BASE["v_cache"][:1]),
    "v_cache no tensor": ("v_cache", None),
    "v_cache of FP8": ("v_cache", BASE["v_cache"].view(FP8)),
    "v_cache of other heads": ("v_cache", cache("BNSH", h=1)),
    "v_cache of other tokens": ("v_cache", cache("BNSH", s=ROWS + 1)),
    "v_cache of another head dimension": ("v_cache", cache("BNSH", d=128)),
    "v_cache of rank 5": ("v_cache", cache("paged_vllm")),
    "k_scale missing": ("k_scale", None),
    "v_scale missing": ("v_scale", None),
    "k_scale a number": ("k_scale", 0.02),
    "k_scale of float64": ("k_scale", BASE["k_scale"].double()),
    "k_scale of bfloat16": ("k_scale", BASE["k_scale"].bfloat16()),
    "v_scale of another dtype": ("v_scale", BASE["v_scale"].half()),
    "k_scale of a query's heads": ("k_scale", torch.ones(H_Q)),
    "k_scale of another layout": ("k_scale", scale("BSNH")),
    "k_scale of groups of 16": ("k_scale", torch.ones((BATCH, H_KV, ROWS, D // 16))),
    "v_scale of groups of 128": ("v_scale", torch.ones((BATCH, H_KV, ROWS, 0))),
    "v_scale of fewer tokens": ("v_scale", BASE["v_scale"][..., 1:]),
    "layout of another name": ("layout", "NHD"),
    "layout in small letters": ("layout", "bnsh"),
    "layout None": ("layout", None),
    "layout no string": ("layout", ["BNSH"]),
    "block_table without pages": ("block_table", ints(BATCH, 2)),
    "cache_seqlens of int64": ("cache_seqlens", ints(BATCH, dtype=torch.int64)),
    "cache_seqlens of float32": ("cache_seqlens", torch.zeros(BATCH)),
    "cache_seqlens a list": ("cache_seqlens", [4, 4]),
    "cache_seqlens of rank 2": ("cache_seqlens", ints(BATCH, 1)),
    "cache_seqlens of another batch": ("cache_seqlens", ints(BATCH + 1)),
    "window 0": ("window", 0),
    "window negative": ("window", -1),
    "window a float": ("window", 4.0),
    "window a bool": ("window", True),
    "softcap 0": ("softcap", 0.0),
    "softcap negative": ("softcap", -30.0),
    "softcap infinite": ("softcap", math.inf),
    "softcap NaN": ("softcap", math.nan),
    "softcap no number": ("softcap", "30"),
    "softmax_scale no number": ("softmax_scale", "1"),
    "num_splits 0": ("num_splits", 0),
    "num_splits too many": ("num_splits", 257),
    "num_splits a float": ("num_splits", 1.5),
    "alibi_slopes of bfloat16": ("alibi_slopes", torch.zeros(H_Q, dtype=torch.bfloat16)),
    "alibi_slopes of the caches' heads": ("alibi_slopes", torch.zeros(H_KV)),
    "alibi_slopes of another batch": ("alibi_slopes", torch.zeros((BATCH + 1, H_Q))),
    "alibi_slopes of rank 3": ("alibi_slopes", torch.zeros((BATCH, S_Q, H_Q))),
    "alibi_slopes with a stride of 2": ("alibi_slopes", torch.zeros(2 * H_Q)[::2]),
    "alibi_slopes a number": ("alibi_slopes", 0.5),
    "s_aux of bfloat16": ("s_aux", torch.zeros(H_Q, dtype=torch.bfloat16)),
    "s_aux of the caches' heads": ("s_aux", torch.zeros(H_KV)),
    "s_aux of rank 2": ("s_aux", torch.zeros((BATCH, H_Q))),
    "s_aux a number": ("s_aux", 0.0),
    "out of float32": ("out", BASE["out"].float()),
    "out of float16": ("out", BASE["out"].half()),
    "out of another shape": ("out", BASE["out"][..., :32]),
    "out as other libraries have it": ("out", BASE["out"].transpose(1, 2).contiguous()),
    "out with a last stride of 2": ("out", every_second(BASE["out"])),
    "out 4 bytes off": ("out", shifted(BASE["out"], 4)),
    "lse of bfloat16": ("lse", BASE["lse"].bfloat16()),
    "lse as other libraries have it": ("lse", BASE["lse"].transpose(1, 2).contiguous()),
    **{
        f"{name} on another device": (name, BASE[name].to("meta"))
        for name in ("k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens", "alibi_slopes", "s_aux", "out", "lse")
    },
}
PAGED: dict[str, tuple[str, Any]] = {
    "block_table missing": ("block_table", None),
    "cache_seqlens missing": ("cache_seqlens", None),
    "block_table of int64": ("block_table", ints(BATCH, 2, dtype=torch.int64)),
    "block_table of rank 1": ("block_table", ints(BATCH)),
    "block_table of another batch": ("block_table", ints(BATCH + 1, 2)),
    "block_table with a last stride of 2": ("block_table", every_second(ints(BATCH, 2))),
    "block_table on another device": ("block_table", ints(BATCH, 2).to("meta")),
    "k_scale of other pages": ("k_scale", torch.ones((SIZES["p"] + 1, ROWS, H_KV))),
}


def require_error(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=ERROR.format(name)):
        gqa_decode(**arguments)
    for buffer in ("out", "lse"):
        if arguments[buffer].device.type == "cpu" and buffer != name:
            assert arguments[buffer].isnan().all(), "an output was written before the arguments were checked"


@pytest.mark.parametrize("dtype", [torch.int8, FP8, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_calls_that_the_others_break_are_right(layout, dtype):
    arguments = call(layout, dtype)
    gqa_decode(**arguments)
    assert arguments["out"].isfinite().all()


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG)
def test_decode(name, value):
    require_error({**call(), name: value}, name)


@pytest.mark.parametrize(("name", "value"), PAGED.values(), ids=PAGED)
def test_decode_with_pages(name, value):
    require_error({**call("paged_NHD"), name: value}, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", [16, 32, 80, 96, 192, 512])
def test_head_dimensions(layout, d):
    caches = {"k_cache": cache(layout, "k", d=d), "v_cache": cache(layout, "v", d=d)}
    require_error({**call(layout), **caches, "q": query(BATCH, S_Q, H_Q, d)}, "k_cache")


@pytest.mark.parametrize(
    ("layout", "page_size"),
    [*((layout, size) for layout in ("paged_NHD", "paged_HND") for size in (0, 3, 12, 48, 100)),
     *(("paged_vllm", size) for size in (0, 1, 4, 12, 24, 64))],
)  # fmt: skip
def test_page_sizes(layout, page_size):
    caches = {"k_cache": cache(layout, "k", t=page_size), "v_cache": cache(layout, "v", t=page_size)}
    one = torch.ones(1)
    require_error({**call(layout), **caches, "k_scale": one, "v_scale": one}, "k_cache")


def test_chunks_of_another_size():
    """A chunk is 16 bytes: 8 values of bfloat16, and 16 of int8."""
    short = cache("paged_vllm", x=8, c=8)
    assert short.shape[2] * short.shape[4] == D
    require_error({**call("paged_vllm"), "k_cache": short}, "k_cache")
    long = cache("paged_vllm", "k", torch.bfloat16, x=16, c=4)
    require_error({**call("paged_vllm", torch.bfloat16), "k_cache": long}, "k_cache")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_another_cache(layout):
    """A cache of another rank, or one whose sizes fit another number of sequences or scales."""
    for other in LAYOUTS:
        if other == layout or (LAYOUTS[other].paged, LAYOUTS[layout].paged) == (True, False):
            continue
        with pytest.raises((TypeError, ValueError), match=r"^(q|k_cache|v_cache|k_scale|block_table): got .+"):
            gqa_decode(**{**call(layout), "layout": other})


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_caches_that_have_none_or_both(name, dtype):
    """One of two for FP8; any for 16 bits."""
    missing = {"k_scale": "v_scale", "v_scale": "k_scale"}[name] if dtype is FP8 else name
    require_error({**call(dtype=dtype), name: torch.ones(1)}, missing)


def test_16_bit_caches_have_the_dtype_of_q():
    half = call(dtype=torch.float16)
    require_error(half, "k_cache")
    require_error({**call(dtype=torch.bfloat16), "v_cache": half["v_cache"]}, "v_cache")


def test_a_device_that_is_no_sm90_is_named():
    arguments = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in call().items()}
    with pytest.raises(ValueError, match=r"^q: got .*meta.*; needs an SM90 GPU"):
        gqa_decode(**arguments)
