"""Launches of `mla_fp8_decode`: looks up the prepared launch, or prepares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.mla.checks import check, formats_of
from cute_kernels.mla.plan import plan_decode
from cute_kernels.mla.request import DECODE, Request
from cute_kernels.mla.spec import MASKED_SCALE, PARTIAL_FLOATS
from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.checks import fail
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, by_name
from fp8_mla import ROPE_OFFSET, SCALE_OFFSET, TOKEN_BYTES
from fp8_mla.formats import V3_2, TokenFormat
from fp8_mla.pages import check_pages

_NO_EXTRA = dict.fromkeys(
    ("mExtraKV", "mExtraIndex", "mExtraLength", "extra_data_stride", "extra_scale_offset", "extra_scale_stride")
)
"""The kernel's arguments for a second cache."""


class PreparedLaunch(NamedTuple):
    """Facts that stay the same while the shapes of a call do.

    launch      the kernel, called by name; None if there is no key
    read        which caches the kernel reads: (0,), (1,) if the first has no key, or (0, 1)
    is_checked  whether every call is checked: the kernel does not check a cache that it does not read, and a tensor
                whose tokens overlap does not reach to the end of its scale rows
    need        scratch memory
    no_sink, no_length   replace arguments that are left out
    out_like    a template of out
    unread_lse  receives the lse of callers that want none
    apart       see `Operator.check_addresses`
    """

    launch: Callable[..., None] | None
    read: tuple[int, ...]
    is_checked: bool
    need: workspace.Need
    no_sink: torch.Tensor
    no_length: torch.Tensor
    out_like: torch.Tensor
    unread_lse: torch.Tensor
    apart: set[tuple[int, ...]]


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def launch(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a call, or raises before any launch.

    Args:
        request: unchecked. Wrong arguments may raise any error: `launch_or_explain` replaces it.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16 and lse (batch, s_q, h_q) float32.
    """
    q, out, lse, sink = request["q"], request["out"], request["lse"], request["s_aux"]
    index: Any = request["indices"]
    sparse, length = index is not None, request["topk_length"]
    if index is None:
        if length is not None:
            fail("indices", "neither or both kinds of arguments", "one kind")
        index, length = request["block_table"], request["cache_seqlens"]
    elif request["block_table"] is not None or request["cache_seqlens"] is not None:
        fail("indices", "both kinds of arguments", "one kind")
    pages = _pages(request["kv_cache"])
    second: Any = request["extra_kv_cache"]
    extra_index: Any = request["extra_indices"]
    extra_length: Any = request["extra_topk_length"]
    # kernels check neither strides nor the bytes of a token: a page must hold its scale rows
    key: tuple[Any, ...] = (
        q.get_device(), sparse, q.shape, pages.shape, pages.stride(), index.shape[-1], index.dtype,
        None if length is None else length.dtype, sink is not None and sink.is_neg(), DECODE.key(request),
    )  # fmt: skip
    if second is not None:
        second = _pages(second)
        length_dtype = None if extra_length is None else extra_length.dtype
        key = (*key, second.shape, second.stride(), extra_index.shape[-1], extra_index.dtype, length_dtype)
    elif extra_index is not None or extra_length is not None:
        fail("extra_kv_cache", "None with its arguments", "a second cache")
    prepared = _prepared.get(key) or _prepare(key, request)
    if out is not None or lse is not None:
        DECODE.check_addresses(request, prepared.apart)
    if prepared.is_checked:
        check(request)
    if out is None:
        out = memory.empty_like(prepared.out_like)
    if lse is None:
        lse = memory.empty_like(prepared.unread_lse) if request["return_lse"] else prepared.unread_lse
    if prepared.launch is None:
        check(request)
        out.zero_()
        lse.fill_(torch.inf if request.get("inf_if_empty") else -torch.inf)
        return out, lse
    sink = prepared.no_sink if sink is None else sink
    if prepared.read == (1,):
        pages, index, length = second, extra_index, extra_length
    length = _length(index, length, prepared.no_length)
    scratch, counters = workspace.addresses(prepared.need)
    if len(prepared.read) == 1:
        prepared.launch(  # on the current stream of the tensors' device
            request, mQ=q, mKV=pages, mIndex=index, mLength=length, mSink=sink, mOut=out, mLse=lse, scratch=scratch,
            counters=counters,
        )  # fmt: skip
        return out, lse
    extra_length = _length(extra_index, extra_length, prepared.no_length)
    prepared.launch(
        request, mQ=q, mKV=pages, mIndex=index, mLength=length, mExtraKV=second, mExtraIndex=extra_index,
        mExtraLength=extra_length, mSink=sink, mOut=out, mLse=lse, scratch=scratch, counters=counters,
    )  # fmt: skip
    return out, lse


def _length(index: torch.Tensor, length: torch.Tensor | None, no_length: torch.Tensor) -> torch.Tensor:
    """Returns how many indices count, for each query."""
    if length is None:
        return no_length
    if index.dim() == 3 and length.dim() == 1:
        if length.shape[0] != index.shape[0]:
            fail("topk_length", f"shape {tuple(length.shape)}", f"({index.shape[0]},)")
        return length.unsqueeze(1).expand(index.shape[:2])
    return length


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """Views the cache as (num_pages, page_size, bytes) uint8."""
    pages = cache
    if pages.dtype is not torch.uint8:
        if pages.dtype is not torch.float8_e4m3fn:
            fail("kv_cache", pages.dtype, "uint8 or float8_e4m3fn", TypeError)
        pages = pages.view(torch.uint8)
    return pages.squeeze(2) if pages.dim() == 4 else pages


def _prepare(key: tuple[Any, ...], request: Request) -> PreparedLaunch:
    """Plans a call and loads its kernel. Checks, or puts into the key, what the kernel does not check itself."""
    check(request)
    q, indices, device = request["q"], request["indices"], request["q"].device
    batch, s_q, h_q, _ = q.shape
    formats = formats_of(request)
    constants = memory.constants(device)
    caches, widths = [_pages(request["kv_cache"])], []
    for index in (indices if indices is not None else request["block_table"], request["extra_indices"]):
        widths += [] if index is None else [index.shape[-1]]
    if request["extra_kv_cache"] is not None:
        caches.append(_pages(request["extra_kv_cache"]))
    lengths = (request["topk_length"], request["cache_seqlens"], request["extra_topk_length"])
    read = tuple(i for i, pages in enumerate(caches) if widths[i] and pages.shape[0])
    run, blocks, partial_rows = None, 1, 0
    if batch and read:
        first, second = formats[read[0]], formats.extra if len(read) > 1 else None
        assert first is not None
        pages, width = caches[read[0]], widths[read[0]]
        plan = plan_decode(
            sparse=indices is not None,
            batch=batch,
            s_q=s_q,
            h_q=h_q,
            max_keys=width if indices is not None else width * pages.shape[1],
            num_sms=constants.num_sms,
            ragged=any(length is not None for length in lengths),
            cache_format=first.name,
            extra_format=second.name if second else "",
            extra_keys=widths[1] if second else 0,
            # with two caches of V3.2, roundings stay the same if one of them has no key
            of_two=len(caches) > len(read) and first.name == V3_2.name,
            num_splits=request["num_splits"],
            exchange=request["exchange"],
            **DECODE.facts_of(request),
        )
        places = dict(_NO_EXTRA) if second is None else {}
        for prefix, i in zip(("", "extra_"), read, strict=False):
            places |= _rows(prefix, caches[i], formats[i], request["cache_layout"])
        run = by_name(
            DECODE,
            get_kernel(plan.spec),
            plan.spec.kernel,
            softmax_scale=formats.first.d_qk**-0.5,
            num_splits=plan.num_splits,
            merge_ctas=plan.merge_ctas,
            max_ctas=plan.max_ctas,
            zero_row=_zero_row(device).data_ptr(),
            trace=0,
            **places,
        )
        blocks, partial_rows = plan.spec.head_blocks(h_q), plan.partial_rows
    prepared = PreparedLaunch(
        run,
        read,
        len(read) < len(caches) or any(pages.stride(1) < pages.shape[2] for pages in caches),
        workspace.reserve(device, partial_rows * PARTIAL_FLOATS, batch * s_q * blocks if partial_rows else 0),
        constants.no_sink[:h_q],
        constants.no_length.expand(batch, s_q),
        memory.template((batch, s_q, h_q, formats.first.d_v), torch.bfloat16, device),
        memory.unread((batch, s_q, h_q), device),
        set(),
    )
    return _prepared.keep(key, prepared, device)


def _rows(prefix: str, pages: torch.Tensor, token_format: TokenFormat | None, layout: str | None) -> dict[str, int]:
    """Returns where a page has the rows of its tokens, in the form that kernels take."""
    assert token_format is not None
    _, found = check_pages(pages, token_format, layout)
    return {f"{prefix}{name}": getattr(found, name) for name in ("data_stride", "scale_offset", "scale_stride")}


@memory.once_per_device
def _zero_row(device: torch.device) -> torch.Tensor:
    """Makes the token that masked keys read, (656,) uint8; kept for ever, because graphs hold its address."""
    memory.require_not_capturing(device)

    def make() -> torch.Tensor:
        row = torch.zeros(TOKEN_BYTES, dtype=torch.uint8, device=device)
        # scales in the range of real keys: the kernel divides by them
        row[SCALE_OFFSET:ROPE_OFFSET].view(torch.float32).fill_(MASKED_SCALE)
        return row

    return memory.for_all_streams(device, make)
