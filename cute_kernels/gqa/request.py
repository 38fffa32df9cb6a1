"""The arguments of `gqa_decode`, `kv_append` and `kv_int8_append`, each said once; see `cute_kernels.runtime.ops`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, TypedDict

import torch

from cute_kernels.gqa.blocks_plan import INDEX_BLOCKS
from cute_kernels.gqa.codes import KINDS
from cute_kernels.gqa.layouts import LAYOUTS
from cute_kernels.gqa.plan import SOFTCAPS, kernel_softcap
from cute_kernels.gqa.spec import MAX_RANGES
from cute_kernels.runtime.checks import check_flag, check_int, check_number, fail, is_finite, kind, require
from cute_kernels.runtime.ops import Address, Later, Operator, Option, Output, Written, is_given

NO_WINDOW = 2**30
"""A window wider than any cache, and far enough from 2^31 for differences."""


def _check_layout(name: str, value: object) -> None:
    require(isinstance(value, str), name, kind(value), "a str", TypeError)
    if value not in LAYOUTS:
        fail(name, repr(value), f"one of {', '.join(LAYOUTS)}")


def _check_kind(name: str, value: object) -> None:
    require(isinstance(value, str), name, kind(value), "a str", TypeError)
    if value not in KINDS:
        fail(name, repr(value), f"one of {', '.join(KINDS)}")


def _check_index_block(name: str, value: object) -> None:
    require(type(value) is int, name, kind(value), "an int", TypeError)
    require(value in INDEX_BLOCKS, name, value, f"one of {INDEX_BLOCKS}")


_check_window = partial(check_int, least=1, needs="at least 1, or None for no window")
_check_splits = partial(check_int, least=1, most=MAX_RANGES, needs=f"1 to {MAX_RANGES}, or None to have it planned")


def _check_softcap(name: str, value: Any) -> None:
    check_number(name, min(value, SOFTCAPS[1]) if type(value) is float else value)
    require(_is_softcap(value), name, value, "a positive finite number, or None for no cap")


def _is_softcap(value: float) -> bool:
    return 0 < value < float("inf")


def _is_window(window: int) -> bool:
    return 0 < window < 2**63


def _clip_window(window: int) -> int:
    return min(window, NO_WINDOW)


class Inputs(TypedDict):
    """Positional arguments of `gqa_decode`.

    q: (batch, s_q, h_q, d) bfloat16 or float16, 1 <= s_q <= 8, d 64, 128, 256 or 512, h_q a multiple of h_kv.
        Rows contiguous and 8-byte aligned.
    k_cache: int8, float8_e4m3fn, or q's dtype, as `layout` says; rows contiguous, all strides multiples of 16
        bytes.
    v_cache: k_cache's dtype and sizes. With kind "int8_k_int4_v" it is uint8, d / 2 bytes for d values, d 256 at most;
        with kind "int4" both caches are.
    k_scale: the factors of k_cache's elements: float16 or float32, of one of these shapes:
        per_tensor () or (1,); per_head (h_kv,); per_token, the cache's shape without heads and d; per_token_head,
        the cache's shape without d; per_group, the cache's shape with d / 32 or d / 64 instead of d. In paged_vllm
        these are (pages, page_size), (pages, h_kv, page_size) and (pages, h_kv, groups, page_size). Required with
        int8; optional, both or none, with float8_e4m3fn; None with 16-bit caches.
    v_scale: k_scale's dtype, of any granularity.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: Address
    v_scale: Address


class Options(TypedDict, total=False):
    """Keyword arguments of `gqa_decode`.

    layout: "BNSH" (batch, h_kv, s, d) · "BSNH" (batch, s, h_kv, d) · "paged_NHD" (pages, page_size, h_kv, d) ·
        "paged_HND" (pages, h_kv, page_size, d), page sizes powers of two · "paged_vllm" K (pages, h_kv, d / x,
        page_size, x) with x = 16 bytes, V (pages, h_kv, d, page_size), page sizes 8, 16, 32.
    cache_seqlens: (batch,) int32: tokens of each sequence, those of the queries included. Default: all of a contiguous
        cache. Negative counts as 0; a length past the cache's capacity counts as that capacity.
    block_table: (batch, max_pages) int32, with paged layouts. Entries past a sequence's last page may be anything;
        the keys of a page that does not exist are masked.
    causal: a query does not see tokens after its own.
    window: a query sees at most this many tokens, its own included; tiles outside of every window are not read.
    softcap: c > 0, finite: scores become ``c * tanh(score / c)``, to float32 rounding whatever c is.
    alibi_slopes: (h_q,) or (batch, h_q) float32; ``slope * (key - own position)`` is added to scores.
    s_aux: (h_q,) float32, a logit per head in natural-log units that joins the softmax denominator alone.
    softmax_scale: default d ** -0.5.
    num_splits: splits of each sequence; default: planned over the whole batch.
    out: (batch, s_q, h_q, d), q's dtype, to write to; rows contiguous and 8-byte aligned. It may be q itself, and
        shares memory with no other argument.
    lse: (batch, s_q, h_q) float32 to write to. It shares memory with no other argument.
    return_lse: also return the log-sum-exp.
    cache_starts: (batch,) int32, the first token of each sequence that queries may see. Earlier tokens are padding;
        whole tiles of padding are not read. Negative counts as 0. Positions stay as they are.
    kind: "int8_k_int4_v" or "int4" if `kv_append` stored that, since the dtypes do not say it. Scales are float32, per
        token and head; see `cute_kernels.gqa.reference.quantize_rotated`.
    indices: (batch, s_q, h_kv or 1, n) int32, block-sparse attention: a query sees a key only if the key's block,
        ``position // index_block``, is in the query's list. A query has a list for each KV head, or one for all. Order
        does not matter, and a block counts once however often it is listed. -1 and numbers that are no block of the
        sequence are left out. The last block counts as far as it is filled. Rows are contiguous. Lists exclude window,
        alibi_slopes and cache_starts. A list for each of several heads also excludes s_aux and scales that heads share
        (per_head, per_token); strides of both caches and their scales are then in the same proportions. Without pages
        the cache has room for whole blocks. The call copies q, out and lse if their heads are not evenly apart.
    index_block: tokens of a block, 64 or 128.
    """

    layout: Annotated[str, Option("BNSH", check=_check_layout, planned=True)]
    cache_seqlens: torch.Tensor | None
    block_table: torch.Tensor | None
    causal: Annotated[bool, Option(True, check=check_flag)]
    window: Annotated[int | None, Option(check=_check_window, fits=_is_window, given=_clip_window)]
    softcap: Annotated[
        float | None, Option(check=_check_softcap, fits=_is_softcap, fact=is_given, given=kernel_softcap)
    ]
    alibi_slopes: Address
    s_aux: torch.Tensor | None
    softmax_scale: Annotated[float | None, Option(check=check_number, fits=is_finite)]
    num_splits: Annotated[int | None, Option(check=_check_splits, planned=True)]
    out: Output
    lse: Output
    cache_starts: Later
    kind: Annotated[str | None, Option(check=_check_kind, planned=True, later=True)]
    indices: Later
    index_block: Annotated[int, Option(128, check=_check_index_block, planned=True, later=True)]


class Request(Inputs, Options, total=False):
    """All arguments of a `gqa_decode` call.

    return_lse  whether the caller wants lse, if it is not given
    """

    return_lse: Annotated[bool, Option(True, schema="")]


DECODE = Operator("gqa_decode", Inputs, Options, Request)


class AppendInputs(TypedDict):
    """Positional arguments of `kv_append` and `kv_int8_append`.

    k: (tokens, h_kv, d) bfloat16 or float16, d 64, 128, 256 or 512. Rows of d elements are contiguous and start at
        multiples of 16 bytes; any distance between tokens and between heads.
    v: as k.
    k_cache: int8, or float8_e4m3fn with kind "fp8_per_token_head", of the shape that `layout` says; see `gqa_decode`.
        The innermost axis is contiguous, and all strides are multiples of 16 bytes.
    v_cache: as k_cache, with any strides in paged_vllm. With kind "int8_k_int4_v" it is uint8, d / 2 bytes for d
        values, d 256 at most; with kind "int4" both caches are.
    k_scale: float32 and per_token_head; with kind "int8" float16 or float32 of any granularity, which the shape says.
        per_token, per_token_head and per_group (32, 64) are written. per_tensor () or (1,) and per_head (h_kv,) are
        read: they are positive and finite.
    v_scale: as k_scale, of the same dtype. Its granularity may be another. No two elements that are written share
        memory, and none is also another argument's.
    slot_mapping: (tokens,) int64, or int32, which is widened first: ``page * page_size + offset``, without pages
        ``sequence * s + position``. A token whose slot is negative or past the cache is skipped. Slots must differ:
        if two tokens have the same one, it may hold a mixture of both.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_cache: Written
    v_cache: Written
    k_scale: Written
    v_scale: Written
    slot_mapping: torch.Tensor


class AppendOptions(TypedDict):
    """Keyword arguments of `kv_int8_append`.

    layout: "BNSH", "BSNH", "paged_NHD", "paged_HND" or "paged_vllm"; any name in `gqa.layouts.LAYOUTS`.
    """

    layout: Annotated[str, Option(check=_check_layout, planned=True)]


class KindOptions(AppendOptions):
    """Keyword arguments of `kv_append`.

    layout: "BNSH", "BSNH", "paged_NHD", "paged_HND" or "paged_vllm"; any name in `gqa.layouts.LAYOUTS`.
    kind: "int8", "fp8_per_token_head", "int8_k_int4_v" or "int4"; the last two have no paged_vllm.
    """

    kind: Annotated[str, Option(check=_check_kind, planned=True)]


class Int8AppendRequest(AppendInputs, AppendOptions):
    """All arguments of a `kv_int8_append` call."""


class AppendRequest(AppendInputs, KindOptions):
    """All arguments of a `kv_append` call."""


APPEND = Operator("kv_append", AppendInputs, KindOptions, AppendRequest)
INT8_APPEND = Operator("kv_int8_append", AppendInputs, AppendOptions, Int8AppendRequest)
