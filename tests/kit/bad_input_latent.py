"""Valid calls of `mla_fp8_decode` over planar pages and two caches, and changes that make each of them wrong."""

import functools

import torch

from fp8_mla.formats import V3_2, V3_2_NOPE, V4, V4_1, V4_1_FP4
from tests.kit import bad_tensors as bad
from tests.kit.bad_tensors import F32, I8, I64, U8, Call, Wrong

BATCH, S_Q, HEADS, TOPK, EXTRA_TOPK = 2, 2, 8, 5, 3
PAGES, PAGE_SIZE, EXTRA_PAGES, EXTRA_PAGE_SIZE = 3, 4, 6, 2
ROWS = (BATCH, S_Q, HEADS)
PLANAR_BYTES = PAGE_SIZE * V4.token_bytes  # bytes of a page
EXTRA_BYTES = EXTRA_PAGE_SIZE * V4_1_FP4.token_bytes


def pages_apart(device: str, shape: tuple[int, ...], page_stride: int) -> torch.Tensor:
    """A cache of zeros with `page_stride` bytes from page to page, whose memory ends with its last page."""
    pages, page_size, num_bytes = shape
    storage = bad.zeros(device, (pages - 1) * page_stride + page_size * num_bytes, dtype=U8)
    return storage.as_strided(shape, (page_stride, num_bytes, 1))


def planar_call(device: str) -> Call:
    """A call over one V4 cache in padded pages."""
    return {
        "q": bad.zeros(device, *ROWS, V4.d_qk),
        "kv_cache": pages_apart(device, (PAGES, PAGE_SIZE, V4.token_bytes), 2880).unsqueeze(2),
        "indices": bad.ints(device, BATCH, S_Q, TOPK),
        "topk_length": bad.ints(device, BATCH),
        "s_aux": bad.floats(device, HEADS),
        "out": bad.nans(device, *ROWS, V4.d_v),
        "lse": bad.nans(device, *ROWS, dtype=F32),
    }


def planar_wrong(device: str) -> Wrong:
    call, new = planar_call(device), functools.partial(bad.zeros, device, dtype=U8)
    shape = (PAGES, PAGE_SIZE, V4.token_bytes)
    cut_off = new(2 * PLANAR_BYTES + PAGE_SIZE * V4.row_bytes[0])
    cut_off = cut_off.as_strided(shape, (PLANAR_BYTES, 500, 1))
    return {
        **bad.wrong_tensor(call, "q", (*ROWS, V3_2.d_qk), (*ROWS, 448)),
        "kv_cache of bytes that no format has": ("kv_cache", new(PAGES, PAGE_SIZE, 592)),
        "kv_cache of one dimension": ("kv_cache", new(V4.token_bytes)),
        "kv_cache of two heads": ("kv_cache", new(PAGES, PAGE_SIZE, 2, V4.token_bytes)),
        "kv_cache of empty pages": ("kv_cache", new(PAGES, 0, V4.token_bytes)),
        "kv_cache of int8": ("kv_cache", new(*shape).view(I8)),
        "kv_cache with a last stride of 2": ("kv_cache", bad.every_second(new(*shape))),
        "kv_cache 8 bytes off": ("kv_cache", bad.off_by(8, new(*shape))),
        "kv_cache with pages 8 bytes off": ("kv_cache", pages_apart(device, shape, PLANAR_BYTES + 8)),
        "scale rows cut off by the next page": ("kv_cache", pages_apart(device, shape, PLANAR_BYTES - 16)),
        "every page the same": ("kv_cache", new(1, *shape[1:]).expand(shape)),
        "scale rows cut off by the end of memory": ("kv_cache", cut_off),
        "cache_format of other bytes": ("kv_cache", {"cache_format": V4_1.name}),
        "cache_format of V3.2": ("kv_cache", {"cache_format": V3_2.name}),
        **bad.wrong_options(cache_format=bad.NAMES, cache_layout=("rows", 0, "interleaved")),
        **bad.wrong_options(exchange=("codes",)),
        "cache_format that 528 bytes leave open": ("cache_format", {"kv_cache": new(PAGES, PAGE_SIZE, 528)}),
        "cache_layout that V3.2 lacks": (
            "cache_layout",
            {"cache_layout": "planar", "cache_format": V3_2_NOPE.name, "kv_cache": new(PAGES, PAGE_SIZE, 528)},
        ),
        "indices of a second cache alone": ("extra_indices", call["indices"]),
        "lengths of a second cache alone": ("extra_topk_length", call["topk_length"]),
        "format of a second cache alone": ("extra_cache_format", V4.name),
    }  # fmt: skip


def two_caches_call(device: str) -> Call:
    """A call over V4.1's two caches in planar pages."""
    return {
        "q": bad.zeros(device, *ROWS, V4_1.d_qk),
        "kv_cache": bad.zeros(device, PAGES, PAGE_SIZE, V4_1.token_bytes, dtype=U8),
        "indices": bad.ints(device, BATCH, S_Q, TOPK),
        "cache_format": V4_1.name,
        "extra_kv_cache": bad.zeros(device, EXTRA_PAGES, EXTRA_PAGE_SIZE, 1, V4_1_FP4.token_bytes, dtype=U8),
        "extra_indices": bad.ints(device, BATCH, S_Q, EXTRA_TOPK),
        "extra_topk_length": bad.ints(device, BATCH, S_Q),
        "out": bad.nans(device, *ROWS, V4_1.d_v),
        "lse": bad.nans(device, *ROWS, dtype=F32),
    }


def two_caches_wrong(device: str) -> Wrong:
    call, new = two_caches_call(device), functools.partial(bad.zeros, device, dtype=U8)
    extra = (EXTRA_PAGES, EXTRA_PAGE_SIZE, V4_1_FP4.token_bytes)
    without = {"extra_kv_cache": None, "extra_topk_length": None}
    dense = {"indices": None, "block_table": bad.ints(device, BATCH, 2), "cache_seqlens": bad.ints(device, BATCH)}
    return {
        **bad.wrong_tensor(
            call, "extra_kv_cache", (12, extra[2]), (*extra[:2], 2, extra[2]), (EXTRA_PAGES, 0, extra[2]),
            (*extra[:2], V4.token_bytes), dtypes=[I8],
        ),
        "extra_kv_cache 8 bytes off": ("extra_kv_cache", bad.off_by(8, new(*extra))),
        "extra_kv_cache with pages 8 bytes off": ("extra_kv_cache", pages_apart(device, extra, EXTRA_BYTES + 8)),
        "scale rows cut off by the next page": ("extra_kv_cache", pages_apart(device, extra, EXTRA_BYTES - 32)),
        "a second cache in a dense call": ("extra_kv_cache", dense),
        "a second cache after one of fp4": ("extra_kv_cache", {"kv_cache": new(*extra), "cache_format": V4_1_FP4.name}),
        "extra_cache_format of other bytes": ("extra_kv_cache", {"extra_cache_format": V4_1.name}),
        **bad.wrong_tensor(
            call, "extra_indices", (BATCH, EXTRA_TOPK), (BATCH + 1, S_Q, EXTRA_TOPK), dtypes=[I64], spread=True
        ),
        "extra_indices without the cache": ("extra_indices", without),
        **bad.wrong_tensor(call, "extra_topk_length", (BATCH + 1,), dtypes=[I64]),
        "extra_topk_length without the cache": ("extra_topk_length", {"extra_kv_cache": None, "extra_indices": None}),
        **bad.wrong_options(extra_cache_format=("fp4", 4, V4.name), exchange=("values",), extra_indices=(None,)),
    }  # fmt: skip


def append_call(device: str) -> Call:
    """An append to a planar cache in V4.1's fp4 format."""
    return {
        "kv": bad.zeros(device, 3, V4_1_FP4.d_qk),
        "kv_cache": bad.sevens(device, PAGES, PAGE_SIZE, V4_1_FP4.token_bytes, dtype=U8),
        "slot_mapping": bad.numbers(device, 1, 2, 3, dtype=I64),
    }


def append_wrong(device: str) -> Wrong:
    call, shape = append_call(device), (PAGES, PAGE_SIZE, V4_1_FP4.token_bytes)
    page_bytes = PAGE_SIZE * V4_1_FP4.token_bytes
    return {
        **bad.wrong_tensor(call, "kv", (3, V3_2.d_qk), dtypes=[F32]),
        "kv_cache of bytes that no format has": ("kv_cache", call["kv_cache"][..., :256]),
        "kv_cache of two heads": ("kv_cache", bad.sevens(device, *shape[:2], 2, shape[2], dtype=U8)),
        "kv_cache with pages 8 bytes off": ("kv_cache", pages_apart(device, shape, page_bytes + 8)),
        "scale rows cut off by the next page": ("kv_cache", pages_apart(device, shape, page_bytes - 32)),
        "every page the same": ("kv_cache", bad.sevens(device, 1, *shape[1:], dtype=U8).expand(shape)),
        "cache_format of other bytes": ("kv_cache", {"cache_format": V4.name}),
        **bad.wrong_options(cache_format=bad.NAMES, cache_layout=("rows",)),
        "cache_format that 528 bytes leave open": (
            "cache_format", {"kv_cache": bad.sevens(device, PAGES, PAGE_SIZE, 528, dtype=U8)},
        ),
        "cache_layout that V4 lacks": (
            "cache_layout",
            {"cache_layout": "interleaved", "kv_cache": bad.sevens(device, PAGES, PAGE_SIZE, V4.token_bytes, dtype=U8)},
        ),
    }  # fmt: skip
