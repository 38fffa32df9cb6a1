"""The arguments of `mla_fp8_decode` and `mla_fp8_append`, each said once; see `cute_kernels.runtime.ops`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypedDict

import torch

from cute_kernels.mla.plan import EXCHANGES, MAX_SPLITS
from cute_kernels.runtime.checks import check_flag, check_int, check_number, check_one_of, fail, is_finite
from cute_kernels.runtime.ops import Operator, Option, Output, Written
from fp8_mla.formats import CACHE_LAYOUTS, FORMATS

_check_splits = partial(check_int, least=1, most=MAX_SPLITS, needs=f"1 to {MAX_SPLITS}, or None to have it planned")


def _check_scores(name: str, value: object) -> None:
    if not (isinstance(value, str) and value == "exact"):
        gone = "; 'fp8' is no more: it was no faster, and less exact" if value == "fp8" else ""
        fail(name, repr(value), f"None or 'exact'{gone}")


Format = Annotated[str | None, Option(check=check_one_of(tuple(FORMATS)), planned=True)]
Layout = Annotated[str | None, Option(check=check_one_of(CACHE_LAYOUTS), planned=True)]


class Inputs(TypedDict):
    """Positional arguments of `mla_fp8_decode`.

    q: (batch, s_q, h_q, d_qk) bfloat16, 1 <= h_q <= 128, s_q >= 1. Rows contiguous and 16-byte aligned. d_qk is 576
        for "v3.2", 512 for the other formats.
    kv_cache: (num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes), uint8 or float8_e4m3fn, any page
        size. Rows contiguous and 16-byte aligned; pages may be strided. Of a planar cache only the address, the
        shape and the distance of two pages count, a multiple of 16 bytes: each page has all its data rows, then all
        its scale rows.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor


class Options(TypedDict, total=False):
    """Keyword arguments of `mla_fp8_decode`.

    indices: sparse: (batch, s_q, topk) int32, each ``page * page_size + offset``. Indices outside of the cache are
        masked, at any position.
    topk_length: (batch,) or (batch, s_q) int32: only that many leading indices count. Negative counts as 0.
    block_table: dense: (batch, max_pages) int32. Entries past a sequence's last page may be anything; the keys of a
        page that does not exist are masked.
    cache_seqlens: dense: (batch,) int32, tokens of each sequence. Negative counts as 0; a length past the block
        table's capacity counts as that capacity.
    causal: dense, s_q > 1: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys.
    softmax_scale: default d_qk ** -0.5.
    s_aux: (h_q,) float32, a logit per head in natural-log units that joins the softmax denominator alone.
    num_splits: number of CTAs that split the keys of each query. Default: planned from the shapes. For several queries
        with lengths the plan is a balanced schedule: each CTA gets an equal share of all their keys.
    exchange: form in which two CTAs of 64 heads each send each other every key that one of them has gathered: "codes",
        its 656 bytes; "values", 16-bit numbers; or "none", where each CTA gathers all keys. Default: "none". With more
        than 64 heads and a given number of splits all three give the same bits.
    scores: "exact", the only value and the default: S = Q K^T is a float32 sum of exact products. The log-sum-exp is
        off by at most 2e-5, or 7e-5 if a few channels are 20 times the others.
    cache_format: "v3.2", "v3.2_nope", "v4", "v4.1" or "v4.1_fp4". Default: "v3.2" for 656 bytes a token with 576
        columns of q, "v3.2_nope" with 512; "v4" for 584; "v4.1_fp4" for 288. 528 bytes need it: "v3.2_nope" and
        "v4.1" both have as many.
    cache_layout: "planar" or "interleaved", for both caches: "v4.1" and "v4.1_fp4" exist in both, with the same
        shapes. Default: planar. "v4" is planar, "v3.2" and "v3.2_nope" are interleaved.
    extra_kv_cache: a second cache, as `kv_cache`, with a page size of its own. Pairs of formats: one format twice,
        or ("v4.1", "v4.1_fp4"); not "v4.1_fp4" twice.
    extra_indices: (batch, s_q, extra_topk) int32, as `indices`: slots of the second cache.
    extra_topk_length: as `topk_length`, for `extra_indices`.
    extra_cache_format: as `cache_format`. Default: the format that pairs with the first and has as many bytes.
    out: (batch, s_q, h_q, 512) bfloat16 to write to; rows contiguous and 16-byte aligned. It may be q itself if q has
        512 columns, and shares memory with no other argument.
    lse: (batch, s_q, h_q) float32 to write to. It shares memory with no other argument.
    return_lse: also return the log-sum-exp.
    """

    indices: torch.Tensor | None
    topk_length: torch.Tensor | None
    block_table: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    causal: Annotated[bool, Option(True, check=check_flag)]
    softmax_scale: Annotated[float | None, Option(check=check_number, fits=is_finite)]
    s_aux: torch.Tensor | None
    num_splits: Annotated[int | None, Option(check=_check_splits, planned=True)]
    exchange: Annotated[str | None, Option(check=check_one_of(EXCHANGES), planned=True)]
    scores: Annotated[str | None, Option(check=_check_scores, planned=True)]
    cache_format: Format
    cache_layout: Layout
    extra_kv_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    extra_cache_format: Format
    out: Output
    lse: Output


class Request(Inputs, Options, total=False):
    """All arguments of a `mla_fp8_decode` call, hidden ones included.

    inf_if_empty  a query without keys has an lse of +inf, as in FlashMLA, instead of -inf; for adapters
    return_lse    whether the caller wants lse, if it is not given
    """

    inf_if_empty: Annotated[bool, Option(False, fact=bool, hidden=True, later=True)]
    return_lse: Annotated[bool, Option(True, schema="")]


DECODE = Operator("mla_fp8_decode", Inputs, Options, Request)


class AppendInputs(TypedDict):
    """Positional arguments of `mla_fp8_append`.

    kv: (tokens, 576) bfloat16: 512 latent elements, then 64 with rotary encoding; (tokens, 512) for formats other
        than "v3.2". Rows are contiguous and start at multiples of 16 bytes; any distance between rows.
    kv_cache: (num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes) uint8 or float8_e4m3fn, any page
        size. The bytes of a slot are contiguous and start at a multiple of 16; any distance between slots and
        between pages. Of a planar cache only the address, the shape and the distance of two pages count.
        No two slots share memory, and none is also another argument's.
    slot_mapping: (tokens,) int64 or int32, which is widened first, ``page * page_size + offset``. A token whose
        slot is negative or past the cache is skipped. Slots must differ: if two tokens have the same one, its bytes
        may be a mixture of both.
    """

    kv: torch.Tensor
    kv_cache: Written
    slot_mapping: torch.Tensor


class AppendOptions(TypedDict, total=False):
    """Keyword arguments of `mla_fp8_append`.

    cache_format: as `mla_fp8_decode` takes it. Default: "v3.2" for 656 bytes a token with 576 columns of kv,
        "v3.2_nope" with 512, which leaves the other bytes of a slot alone; "v4" for 584; "v4.1_fp4" for 288. 528
        bytes need it: "v3.2_nope" and "v4.1" both have as many.
    cache_layout: "planar" or "interleaved", for "v4.1" and "v4.1_fp4". Default: planar.
    """

    cache_format: Annotated[str | None, Option(check=check_one_of(tuple(FORMATS)), planned=True, later=True)]
    cache_layout: Annotated[str | None, Option(check=check_one_of(CACHE_LAYOUTS), planned=True, later=True)]


class AppendRequest(AppendInputs, AppendOptions):
    """Arguments of a `mla_fp8_append` call."""


APPEND = Operator("mla_fp8_append", AppendInputs, AppendOptions, AppendRequest)
