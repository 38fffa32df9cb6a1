"""Valid calls of `mla_fp8_decode` over planar pages and two caches, and changes that make each of them wrong."""

import functools

import torch

from fp8_mla.formats import V3_2, V3_2_NOPE, V4, V4_1, V4_1_FP4
from tests.kit.bad_tensors import (
    F32,
    I8,
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
    sevens,
    zeros,
)  # fmt: skip

BATCH, S_Q, HEADS, TOPK, EXTRA_TOPK = 2, 2, 8, 5, 3
PAGES, PAGE_SIZE, EXTRA_PAGES, EXTRA_PAGE_SIZE = 3, 4, 6, 2
ROWS = (BATCH, S_Q, HEADS)
PLANAR_BYTES = PAGE_SIZE * V4.token_bytes  # of a page
EXTRA_BYTES = EXTRA_PAGE_SIZE * V4_1_FP4.token_bytes


def pages_apart(device: str, shape: tuple[int, ...], page_stride: int) -> torch.Tensor:
    """A cache of zeros whose pages are so far apart, and whose memory ends with the last page."""
    pages, page_size, num_bytes = shape
    storage = zeros(device, (pages - 1) * page_stride + page_size * num_bytes, dtype=U8)
    return storage.as_strided(shape, (page_stride, num_bytes, 1))


def planar_call(device: str) -> Call:
    """One cache of V4 in padded pages."""
    return {
        "q": zeros(device, *ROWS, V4.d_qk),
        "kv_cache": pages_apart(device, (PAGES, PAGE_SIZE, V4.token_bytes), 2880).unsqueeze(2),
        "indices": ints(device, BATCH, S_Q, TOPK),
        "topk_length": ints(device, BATCH),
        "s_aux": floats(device, HEADS),
        "out": nans(device, *ROWS, V4.d_v),
        "lse": nans(device, *ROWS, dtype=F32),
    }


def planar_wrong(device: str) -> Wrong:
    call, new = planar_call(device), functools.partial(zeros, device, dtype=U8)
    shape = (PAGES, PAGE_SIZE, V4.token_bytes)
    cut_off = new(2 * PLANAR_BYTES + PAGE_SIZE * V4.row_bytes[0])
    cut_off = cut_off.as_strided(shape, (PLANAR_BYTES, 500, 1))
    return {
        "q of V3.2": ("q", zeros(device, *ROWS, V3_2.d_qk)),
        "q of another width": ("q", zeros(device, *ROWS, 448)),
        "kv_cache of bytes that no format has": ("kv_cache", new(PAGES, PAGE_SIZE, 592)),
        "kv_cache of one dimension": ("kv_cache", new(V4.token_bytes)),
        "kv_cache of two heads": ("kv_cache", new(PAGES, PAGE_SIZE, 2, V4.token_bytes)),
        "kv_cache of empty pages": ("kv_cache", new(PAGES, 0, V4.token_bytes)),
        "kv_cache of int8": ("kv_cache", new(*shape).view(I8)),
        "kv_cache with a last stride of 2": ("kv_cache", every_second(new(*shape))),
        "kv_cache 8 bytes off": ("kv_cache", off_by(8, new(*shape))),
        "kv_cache with pages 8 bytes off": ("kv_cache", pages_apart(device, shape, PLANAR_BYTES + 8)),
        "scale rows cut off by the next page": ("kv_cache", pages_apart(device, shape, PLANAR_BYTES - 16)),
        "every page the same": ("kv_cache", new(1, *shape[1:]).expand(shape)),
        "scale rows cut off by the end of memory": ("kv_cache", cut_off),
        "cache_format of other bytes": ("kv_cache", {"cache_format": V4_1.name}),
        "cache_format of V3.2": ("kv_cache", {"cache_format": V3_2.name}),
        "cache_format unknown": ("cache_format", "v5"),
        "cache_format of another type": ("cache_format", 4),
        "cache_format a list": ("cache_format", ["v4"]),
        "cache_format that 528 bytes leave open": ("cache_format", {"kv_cache": new(PAGES, PAGE_SIZE, 528)}),
        "cache_layout unknown": ("cache_layout", "rows"),
        "cache_layout of another type": ("cache_layout", 0),
        "cache_layout that V4 lacks": ("cache_layout", "interleaved"),
        "cache_layout that V3.2 lacks": (
            "cache_layout",
            {"cache_layout": "planar", "cache_format": V3_2_NOPE.name, "kv_cache": new(PAGES, PAGE_SIZE, 528)},
        ),
        "an exchange": ("exchange", "codes"),
        "indices of a second cache alone": ("extra_indices", call["indices"]),
        "lengths of a second cache alone": ("extra_topk_length", call["topk_length"]),
        "format of a second cache alone": ("extra_cache_format", V4.name),
        **elsewhere(call, "kv_cache", "indices", "s_aux", "out"),
    }  # fmt: skip


def two_caches_call(device: str) -> Call:
    """V4.1's caches, planar."""
    return {
        "q": zeros(device, *ROWS, V4_1.d_qk),
        "kv_cache": zeros(device, PAGES, PAGE_SIZE, V4_1.token_bytes, dtype=U8),
        "indices": ints(device, BATCH, S_Q, TOPK),
        "cache_format": V4_1.name,
        "extra_kv_cache": zeros(device, EXTRA_PAGES, EXTRA_PAGE_SIZE, 1, V4_1_FP4.token_bytes, dtype=U8),
        "extra_indices": ints(device, BATCH, S_Q, EXTRA_TOPK),
        "extra_topk_length": ints(device, BATCH, S_Q),
        "out": nans(device, *ROWS, V4_1.d_v),
        "lse": nans(device, *ROWS, dtype=F32),
    }


def two_caches_wrong(device: str) -> Wrong:
    call, new = two_caches_call(device), functools.partial(zeros, device, dtype=U8)
    extra = (EXTRA_PAGES, EXTRA_PAGE_SIZE, V4_1_FP4.token_bytes)
    without = {"extra_kv_cache": None, "extra_topk_length": None}
    dense = {"indices": None, "block_table": ints(device, BATCH, 2), "cache_seqlens": ints(device, BATCH)}
    return {
        "extra_kv_cache a list": ("extra_kv_cache", [0]),
        "extra_kv_cache of int8": ("extra_kv_cache", call["extra_kv_cache"].view(I8)),
        "extra_kv_cache of rank 2": ("extra_kv_cache", new(12, V4_1_FP4.token_bytes)),
        "extra_kv_cache of two heads": ("extra_kv_cache", new(*extra[:2], 2, extra[2])),
        "extra_kv_cache of empty pages": ("extra_kv_cache", new(EXTRA_PAGES, 0, extra[2])),
        "extra_kv_cache of V4": ("extra_kv_cache", new(EXTRA_PAGES, EXTRA_PAGE_SIZE, V4.token_bytes)),
        "extra_kv_cache 8 bytes off": ("extra_kv_cache", off_by(8, new(*extra))),
        "extra_kv_cache with pages 8 bytes off": ("extra_kv_cache", pages_apart(device, extra, EXTRA_BYTES + 8)),
        "scale rows cut off by the next page": ("extra_kv_cache", pages_apart(device, extra, EXTRA_BYTES - 32)),
        "a second cache in a dense call": ("extra_kv_cache", dense),
        "a second cache after one of fp4": (
            "extra_kv_cache", {"kv_cache": new(*extra), "cache_format": V4_1_FP4.name},
        ),
        "extra_cache_format unknown": ("extra_cache_format", "fp4"),
        "extra_cache_format of another type": ("extra_cache_format", 4),
        "extra_cache_format of no pair": ("extra_cache_format", V4.name),
        "extra_cache_format of other bytes": ("extra_kv_cache", {"extra_cache_format": V4_1.name}),
        "extra_indices missing": ("extra_indices", None),
        "extra_indices of int64": ("extra_indices", call["extra_indices"].long()),
        "extra_indices of rank 2": ("extra_indices", ints(device, BATCH, EXTRA_TOPK)),
        "extra_indices of another batch": ("extra_indices", ints(device, BATCH + 1, S_Q, EXTRA_TOPK)),
        "extra_indices with a last stride of 2": ("extra_indices", every_second(call["extra_indices"])),
        "extra_indices without the cache": ("extra_indices", without),
        "extra_topk_length of int64": ("extra_topk_length", ints(device, BATCH, dtype=I64)),
        "extra_topk_length of another batch": ("extra_topk_length", ints(device, BATCH + 1)),
        "extra_topk_length without the cache": ("extra_topk_length", {"extra_kv_cache": None, "extra_indices": None}),
        "an exchange": ("exchange", "values"),
        **elsewhere(call, "kv_cache", "extra_kv_cache", "extra_indices", "extra_topk_length"),
    }  # fmt: skip


def append_call(device: str) -> Call:
    """An append to a planar cache of V4.1's fp4."""
    return {
        "kv": zeros(device, 3, V4_1_FP4.d_qk),
        "kv_cache": sevens(device, PAGES, PAGE_SIZE, V4_1_FP4.token_bytes, dtype=U8),
        "slot_mapping": numbers(device, 1, 2, 3, dtype=I64),
    }


def append_wrong(device: str) -> Wrong:
    call, shape = append_call(device), (PAGES, PAGE_SIZE, V4_1_FP4.token_bytes)
    page_bytes = PAGE_SIZE * V4_1_FP4.token_bytes
    return {
        "kv of V3.2": ("kv", zeros(device, 3, V3_2.d_qk)),
        "kv of float32": ("kv", floats(device, 3, V4_1_FP4.d_qk)),
        "kv_cache of bytes that no format has": ("kv_cache", call["kv_cache"][..., :256]),
        "kv_cache of two heads": ("kv_cache", sevens(device, *shape[:2], 2, shape[2], dtype=U8)),
        "kv_cache with pages 8 bytes off": ("kv_cache", pages_apart(device, shape, page_bytes + 8)),
        "scale rows cut off by the next page": ("kv_cache", pages_apart(device, shape, page_bytes - 32)),
        "every page the same": ("kv_cache", sevens(device, 1, *shape[1:], dtype=U8).expand(shape)),
        "cache_format of other bytes": ("kv_cache", {"cache_format": V4.name}),
        "cache_format unknown": ("cache_format", "fp4"),
        "cache_format of another type": ("cache_format", 4),
        "cache_format that 528 bytes leave open": (
            "cache_format", {"kv_cache": sevens(device, PAGES, PAGE_SIZE, 528, dtype=U8)},
        ),
        "cache_layout unknown": ("cache_layout", "rows"),
        "cache_layout that V4 lacks": (
            "cache_layout",
            {"cache_layout": "interleaved", "kv_cache": sevens(device, PAGES, PAGE_SIZE, V4.token_bytes, dtype=U8)},
        ),
        **elsewhere(call, "kv_cache", "slot_mapping"),
        "everything on another device": ("kv", all_elsewhere(call)),
    }  # fmt: skip
