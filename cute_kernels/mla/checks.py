"""The formats of a call's caches, and the checks of the arguments of `mla_fp8_decode`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.mla.request import DECODE, Request
from cute_kernels.mla.spec import MAX_KEYS
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_given, check_tensor, fail, require
from fp8_mla.formats import FORMATS, V3_2, PageLayout, TokenFormat, format_of_cache, format_of_extra_cache
from fp8_mla.layout import CACHE_DTYPES
from fp8_mla.pages import check_pages

MAX_HEADS = 128
MAX_SLOTS = 2**31
"""A cache has fewer slots than this, because indices are int32."""
NEEDS_KEYS = "either indices (sparse; topk_length is optional), or block_table and cache_seqlens (dense)"
_ALIGN = 16  # bytes: alignment of the kernels' loads


class Formats(NamedTuple):
    """The formats of a call's caches. `extra` is None if there is one cache."""

    first: TokenFormat
    extra: TokenFormat | None


def formats_of(request: Request) -> Formats:
    """Returns the formats of a call's caches: those that the call names, or that its bytes and q imply.

    Raises:
        ValueError: the formats are unknown or ambiguous, or the two caches do not go together.
    """
    first = _first_format(request)
    if request["extra_kv_cache"] is None:
        return Formats(first, None)
    num_bytes = request["extra_kv_cache"].shape[-1]
    return Formats(first, format_of_extra_cache(first, num_bytes, request["extra_cache_format"]))


def _first_format(request: Request) -> TokenFormat:
    if request["cache_format"] is None:
        return format_of_cache(request["kv_cache"].shape[-1], request["q"].shape[-1])
    return V3_2 if request["cache_format"] == V3_2.name else FORMATS[request["cache_format"]]


def check(request: Request) -> None:
    """Checks the arguments of a call; an error names the wrong one."""
    q = request["q"]
    check_tensor("q", q, dtype=torch.bfloat16, shape=(None, None, None, None), align=_ALIGN, unit_last_stride=True)
    device = q.device
    batch, s_q, h_q, d_qk = q.shape
    require(1 <= h_q <= MAX_HEADS, "q", f"{h_q} heads", f"1 to {MAX_HEADS} heads")
    require(s_q >= 1, "q", f"s_q = {s_q}", "at least one query token")
    DECODE.check_options(request)
    _check_cache_tensor("kv_cache", request["kv_cache"], device)
    first = _first_format(request)
    layout = check_cache("kv_cache", request["kv_cache"], first, request["cache_layout"])
    require(d_qk == first.d_qk, "q", f"{d_qk} columns", f"{first.d_qk} for a cache of {first.name}")
    _check_keys(request)
    extra = _check_extra(request, layout)
    check_exchange(Formats(first, extra), request["exchange"])
    shape = (batch, s_q, h_q)
    check_given(
        request,
        device,
        s_aux={"dtype": torch.float32, "shape": (h_q,), "unit_last_stride": True},
        out={"dtype": torch.bfloat16, "shape": (*shape, first.d_v), "align": _ALIGN, "unit_last_stride": True},
        lse={"dtype": torch.float32, "shape": shape},
    )
    if device.type != "cpu":
        require_sm90("q", device)
    DECODE.check_outputs(request)


def check_width(sparse: bool, width: int, page_size: int, extra_width: int = 0) -> None:
    """Raises if a query has more keys than 32-bit positions can count."""
    name, got = ("indices", f"topk {width}") if sparse else ("block_table", f"{width} pages of {page_size} tokens")
    keys = width if sparse else width * page_size
    if extra_width:
        name, got, keys = f"{name}, extra_indices", f"{got} and {extra_width}", keys + extra_width
    require(keys <= MAX_KEYS, name, got, f"at most {MAX_KEYS} keys of a query")


def check_cache(name: str, cache: torch.Tensor, token_format: TokenFormat, cache_layout: str | None) -> PageLayout:
    """Raises unless kernels can read and write a cache of this format; returns the layout of its pages.

    The strides within the pages of a planar cache have no meaning.
    """
    pages, layout = check_pages(cache, token_format, cache_layout, name=name)
    rows = pages if layout.cache_layout == "interleaved" else pages[:, 0]
    check_tensor(name, rows, align=_ALIGN)
    num_slots = pages.shape[0] * pages.shape[1]
    require(num_slots < MAX_SLOTS, name, f"{num_slots} slots", "fewer than 2^31")
    return layout


def check_exchange(formats: Formats, exchange: str | None) -> None:
    """Raises for an exchange that kernels of these formats do not support."""
    names = [token_format.name for token_format in formats if token_format is not None]
    if exchange not in (None, "none") and names != [V3_2.name]:
        fail("exchange", f"{exchange!r} with {' and '.join(names)}", f"None or 'none', or one cache of {V3_2.name}")


def _check_cache_tensor(name: str, cache: torch.Tensor, device: torch.device) -> None:
    """Checks what a cache of any format has to be."""
    check_tensor(name, cache, dtype=CACHE_DTYPES, device=device, unit_last_stride=True)
    shape = tuple(cache.shape)
    if cache.dim() not in (3, 4) or (cache.dim() == 4 and shape[2] != 1):
        fail(name, f"shape {shape}", "(num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes)")


def _check_keys(request: Request) -> None:
    """Checks that a call has either indices, or a block table and lengths."""
    q, indices, topk_length = request["q"], request["indices"], request["topk_length"]
    block_table, cache_seqlens = request["block_table"], request["cache_seqlens"]
    if indices is not None:
        if block_table is not None or cache_seqlens is not None:
            fail("indices", "indices and dense arguments", NEEDS_KEYS)
        _check_indices("", indices, topk_length, q)
        return
    if block_table is None or cache_seqlens is None or topk_length is not None:
        names = ("topk_length", "block_table", "cache_seqlens")
        given = [n for n, t in zip(names, (topk_length, block_table, cache_seqlens), strict=True) if t is not None]
        fail("indices", f"None, with {' and '.join(given) or 'nothing else'}", NEEDS_KEYS)
    batch, device = q.shape[0], q.device
    shape = (batch, None)
    check_tensor("block_table", block_table, dtype=torch.int32, shape=shape, device=device, unit_last_stride=True)
    check_width(False, block_table.shape[1], request["kv_cache"].shape[1])
    check_tensor("cache_seqlens", cache_seqlens, dtype=torch.int32, shape=(batch,), device=device)


def _check_indices(prefix: str, indices: torch.Tensor, length: torch.Tensor | None, q: torch.Tensor) -> None:
    """Checks indices into one cache and their number; `prefix` begins the names of the arguments."""
    batch, s_q = q.shape[:2]
    shape: tuple[int | None, ...] = (batch, s_q, None)
    name = f"{prefix}indices"
    check_tensor(name, indices, dtype=torch.int32, shape=shape, device=q.device, unit_last_stride=True)
    require(indices.shape[2] <= MAX_KEYS, name, f"topk {indices.shape[2]}", f"at most {MAX_KEYS} keys of a query")
    if length is not None:
        per_query = isinstance(length, torch.Tensor) and length.dim() == 2
        shape = (batch, s_q) if per_query else (batch,)
        check_tensor(f"{prefix}topk_length", length, dtype=torch.int32, shape=shape, device=q.device)


def _check_extra(request: Request, layout: PageLayout) -> TokenFormat | None:
    """Checks that a second cache and its indices are given together or not at all; returns the cache's format."""
    cache, indices, length = request["extra_kv_cache"], request["extra_indices"], request["extra_topk_length"]
    if cache is None:
        others = {"extra_indices": indices, "extra_topk_length": length}
        for name, value in {**others, "extra_cache_format": request["extra_cache_format"]}.items():
            require(value is None, name, "a value without extra_kv_cache", "None, or a second cache")
        return None
    _check_cache_tensor("extra_kv_cache", cache, request["q"].device)
    extra = formats_of(request).extra
    assert extra is not None
    check_cache("extra_kv_cache", cache, extra, layout.cache_layout)
    if request["indices"] is None:
        fail("extra_kv_cache", "a second cache and a block_table", "indices and extra_indices: sparse calls alone")
    if indices is None:
        fail("extra_indices", "None with extra_kv_cache", "(batch, s_q, extra_topk) int32")
    _check_indices("extra_", indices, length, request["q"])
    check_width(True, request["indices"].shape[2], 1, indices.shape[2])
    return extra
