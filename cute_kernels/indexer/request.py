"""The arguments of `index_append`, `index_topk` and `index_decode`, each said once; see `cute_kernels.runtime.ops`."""

from __future__ import annotations

from typing import Annotated, TypedDict

import torch

from cute_kernels.indexer.append_spec import SCALE_RULES
from cute_kernels.indexer.topk_spec import MAX_TOPK
from cute_kernels.runtime.checks import check_flag, check_int, fail
from cute_kernels.runtime.ops import Operator, Option, Output, Written


def _check_topk(name: str, value: object) -> None:
    check_int(name, value, 1, MAX_TOPK)


def _check_topk_of_decode(name: str, value: object) -> None:
    check_int(name, value, 0, MAX_TOPK)


def _check_forced(name: str, value: object) -> None:
    check_int(name, value, 0, MAX_TOPK)


def _check_page_size(name: str, value: object) -> None:
    check_int(name, value, 1, 2**31 - 1)


def _check_scale(name: str, value: object) -> None:
    if not (isinstance(value, str) and value in SCALE_RULES):
        fail(
            name, repr(value), " or ".join(map(repr, SCALE_RULES)), ValueError if isinstance(value, str) else TypeError
        )


PageSize = Annotated[int | None, Option(check=_check_page_size, planned=True)]


class AppendInputs(TypedDict):
    """Positional arguments of `index_append`.

    k: (tokens, 128) bfloat16 or float32, after norm, rotary encoding and Hadamard transform, if the model has it. Rows
        are contiguous and start at multiples of 16 bytes; any distance between rows.
    k_cache: (num_pages, page_size, 132) or (num_pages, page_size, 1, 132) uint8 or float8_e4m3fn. A page has
        page_size x 128 bytes of codes, then page_size float32 scales. Only the address, the shape and the distance of
        two pages count, both of them multiples of 16 bytes. No two pages share memory.
    slot_mapping: (tokens,) int64 or int32, which is widened first, ``page * page_size + offset``. A token whose slot is
        negative or past the cache is skipped. Slots must differ: if two tokens have the same one, its bytes may be a
        mixture of both.
    """

    k: torch.Tensor
    k_cache: Written
    slot_mapping: torch.Tensor


class AppendOptions(TypedDict, total=False):
    """Keyword arguments of `index_append`.

    scale: "float32", as SGLang writes it, or "ue8m0", a power of two, as vLLM does. Readers take both.
    """

    scale: Annotated[str, Option("float32", check=_check_scale, planned=True)]


class AppendRequest(AppendInputs, AppendOptions):
    """All arguments of an `index_append` call."""


APPEND = Operator("index_append", AppendInputs, AppendOptions, AppendRequest)


class TopkInputs(TypedDict):
    """Positional arguments of `index_topk`.

    logits: (rows, width) float32, width up to 4,718,589. Rows are contiguous, any distance apart, and may begin at any
        multiple of 4 bytes. What is beyond a row's length may be anything.
    lengths: (rows,) int32: how many logits each row has. Negative counts as 0; more than the row holds is cut off.
    topk: 1 to 2048. A row of no more logits gets all its positions.
    """

    logits: torch.Tensor
    lengths: torch.Tensor
    topk: Annotated[int, Option(check=_check_topk, planned=True)]


class TopkOptions(TypedDict, total=False):
    """Keyword arguments of `index_topk`.

    block_table: (batch, max_pages) int32, rows a multiple of batch: rows of a request are neighbours. With it the
        result is slots, ``table[position // page_size] * page_size + position % page_size``, and -1 where the table
        ends before, names a negative page, or the slot is no int32.
    page_size: tokens of a page, given if and only if `block_table` is.
    row_starts: (rows,) int32: the column where position 0 of a row is, for prompts, whose rows share a buffer. Default:
        column 0.
    out: (rows, topk) int32: where to write the result; rows contiguous. It shares memory with no other argument.
    """

    block_table: torch.Tensor | None
    page_size: PageSize
    row_starts: torch.Tensor | None
    out: Output


class TopkRequest(TopkInputs, TopkOptions):
    """All arguments of an `index_topk` call."""


TOPK = Operator("index_topk", TopkInputs, TopkOptions, TopkRequest)


class DecodeInputs(TypedDict):
    """Positional arguments of `index_decode`.

    q: (batch, s_q, heads, 128) float8_e4m3fn, or its bytes as uint8; 16, 32 or 64 heads, s_q 1 to 8; rows contiguous,
        16-byte aligned.
    weights: (batch, s_q, heads) float32 of any sign, the scale of q and all other factors included; rows contiguous.
    k_cache: (num_pages, page_size, 132) or (num_pages, page_size, 1, 132), uint8 or float8_e4m3fn, planar pages as
        `index_append` fills them, at least one; page_size a multiple of 16, pages multiples of 16 bytes apart.
    """

    q: torch.Tensor
    weights: torch.Tensor
    k_cache: torch.Tensor


class DecodeOptions(TypedDict, total=False):
    """Keyword arguments of `index_decode`.

    block_table: needed: (batch, max_pages) int32; rows contiguous. Entries past a sequence's end may be anything. Keys
        of a page that the cache lacks come last.
    cache_seqlens: needed: (batch,) int32: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys; or (batch, s_q):
        what each query sees, such as (position + 1) // 4 in DeepSeek-V4.
    topk: 1 to 2048. A query that sees no more keys gets all of them. 0, with `logits`: these alone, nothing is chosen.
    slot_table: (batch, pages) int32: the block table of the cache that slots are wanted for. Default: block_table.
    slot_page_size: tokens of a page of that cache, given if and only if `slot_table` is.
    first: number of first keys that are always chosen; they count in topk.
    last: number of last keys, of those that a query sees, that are always chosen; they count in topk.
    return_positions: positions instead of slots.
    out: (batch, s_q, topk) int32, contiguous: where to write the result.
    logits: (batch, s_q, max_pages * page_size) float32, contiguous: where to write the logits. Those of no key
        stay as they are. `out` and `logits` share memory with no other argument.
    """

    block_table: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    topk: Annotated[int, Option(2048, check=_check_topk_of_decode, planned=True)]
    slot_table: torch.Tensor | None
    slot_page_size: PageSize
    first: Annotated[int, Option(0, check=_check_forced, planned=True)]
    last: Annotated[int, Option(0, check=_check_forced, planned=True)]
    return_positions: Annotated[bool, Option(False, check=check_flag, planned=True)]
    out: Output
    logits: Output


class DecodeRequest(DecodeInputs, DecodeOptions):
    """All arguments of an `index_decode` call."""


DECODE = Operator("index_decode", DecodeInputs, DecodeOptions, DecodeRequest)
