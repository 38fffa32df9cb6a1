"""Launches of every call of `mla_fp8_decode` but those over one cache of V3.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.mla.checks import MAX_SLOTS, Request, check, check_outputs, formats_of
from cute_kernels.mla.plan import plan_decode
from cute_kernels.mla.spec import PARTIAL_FLOATS
from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.checks import fail
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches
from cute_kernels.runtime.overlap import share_storage
from fp8_mla.formats import FORMATS, TokenFormat
from fp8_mla.pages import check_pages


class CacheKey(NamedTuple):
    """Of a cache, what a prepared launch depends on."""

    name: str
    num_bytes: int  # of a token; not checked by the kernel, as both strides: a page must hold its scale rows
    page_size: int
    width: int
    page_stride: int
    token_stride: int
    pages: int  # 0, 1, or 2 for more: of one page the stride means nothing

    @property
    def has_pages(self) -> bool:
        """Whether there is a key to read."""
        return self.pages > 0


class LatentLaunch(NamedTuple):
    """All that stays the same while the shapes of a call do. `kernel` is None if there is no key."""

    kernel: Callable[..., Any] | None
    swapped: bool  # the first cache has no key, so the second is the only one
    strides: tuple[tuple[int, int, int], ...]  # data_stride, scale_offset, scale_stride of each cache that is read
    num_splits: int
    merge_ctas: int
    max_ctas: int
    need: workspace.Need
    no_sink: torch.Tensor
    no_length: torch.Tensor
    out_like: torch.Tensor  # a template
    unread_lse: torch.Tensor  # for callers that want no lse


_prepared: PreparedLaunches[tuple[Any, ...], LatentLaunch] = PreparedLaunches()


def launch_latent(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches for the arguments of a call, or raises before any launch.

    Args:
        request: unchecked. Errors for wrong arguments may be of any kind: `launch_or_explain` replaces them.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16 and lse (batch, s_q, h_q) float32.
    """
    q, indices, out, lse = request.q, request.indices, request.out, request.lse
    batch, s_q, h_q, d_qk = q.shape
    sparse = indices is not None
    index = indices if sparse else request.block_table
    given = request.topk_length if sparse else request.cache_seqlens
    wrong = request.block_table if sparse else request.topk_length
    if index is None or sparse != (request.cache_seqlens is None) or wrong is not None:
        fail("indices", "neither or both kinds of arguments", "one kind")
    first, second = formats_of(request)
    if d_qk != first.d_qk or (second is None) != (request.extra_indices is None) or not (sparse or second is None):
        fail("q", f"{d_qk} columns, or a second cache without indices", "what the format has")
    caches = [_pages(request.kv_cache)]
    keys = [_cache_key(caches[0], first, request.cache_layout, index)]
    indices_of, lengths = [index], [given]
    if second is not None:
        assert request.extra_kv_cache is not None and request.extra_indices is not None
        caches.append(_pages(request.extra_kv_cache))
        keys.append(_cache_key(caches[1], second, request.cache_layout, request.extra_indices))
        indices_of.append(request.extra_indices)
        lengths.append(request.extra_topk_length)
    elif request.extra_topk_length is not None or request.extra_cache_format is not None:
        fail("extra_kv_cache", "None with its arguments", "a second cache")
    ragged = any(length is not None for length in lengths)
    key = (
        q.get_device(), sparse, batch, s_q, h_q, ragged, request.num_splits, request.exchange,
        request.cache_layout, request.inf_if_empty,
        None if out is None or out.is_contiguous() else out.stride(),
        None if lse is None or lse.is_contiguous() else (lse.stride(), lse.is_neg()), *keys,
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(request, key, keys, ragged, caches)
    if (out is not None or lse is not None) and share_storage(
        out, lse, (None if out is q else q, request.s_aux, *caches, *indices_of, *lengths)
    ):
        check_outputs(request)
    if out is None:
        out = memory.empty_like(prepared.out_like)
    if lse is None:
        lse = memory.empty_like(prepared.unread_lse) if request.return_lse else prepared.unread_lse
    if prepared.kernel is None:
        check(*request)
        out.zero_()
        lse.fill_(request.lse_if_empty)
        return out, lse
    if len(prepared.strides) < len(caches):
        check(*request)  # of a cache that the kernel does not read it checks nothing
    arguments: list[Any] = []
    for i, strides in enumerate(prepared.strides, start=1 if prepared.swapped else 0):
        length = lengths[i]
        if length is None:
            length = prepared.no_length
        elif sparse and length.dim() == 1:
            if length.shape[0] != batch:
                fail("topk_length", f"shape {tuple(length.shape)}", f"({batch},)")
            length = length.unsqueeze(1).expand(batch, s_q)
        # the compiled kernel takes unsigned integers for signed ones
        if indices_of[i].dtype is not torch.int32 or length.dtype is not torch.int32:
            fail("indices", f"{indices_of[i].dtype}, lengths {length.dtype}", "int32", TypeError)
        arguments += (caches[i], indices_of[i], length, *strides)
    if len(prepared.strides) == 1:
        arguments += (None,) * 6
    scratch, counters = workspace.addresses(prepared.need)
    prepared.kernel(  # on the current stream of the tensors' device
        q, *arguments, prepared.no_sink if request.s_aux is None else request.s_aux, out, lse, scratch, counters,
        d_qk**-0.5 if request.softmax_scale is None else request.softmax_scale, prepared.num_splits,
        prepared.merge_ctas, prepared.max_ctas, 1 if request.causal else 0, 0,
    )  # fmt: skip
    return out, lse


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """The cache as (num_pages, page_size, bytes) uint8."""
    pages = cache
    if pages.dtype is not torch.uint8:
        if pages.dtype is not torch.float8_e4m3fn:
            fail("kv_cache", pages.dtype, "uint8 or float8_e4m3fn", TypeError)
        pages = pages.view(torch.uint8)
    if pages.dim() == 4:
        pages = pages.squeeze(2)
    num_pages, page_size, _ = pages.shape
    if not page_size or num_pages * page_size >= MAX_SLOTS:
        fail("kv_cache", f"{num_pages} pages of {page_size}", "slots that 31 bits count")
    return pages


def _cache_key(
    pages: torch.Tensor, token_format: TokenFormat, cache_layout: str | None, index: torch.Tensor
) -> CacheKey:
    num_pages, page_size, num_bytes = pages.shape
    page_stride, token_stride, _ = pages.stride()
    if token_stride < num_bytes:  # a tensor whose tokens overlap does not reach to the end of its scale rows
        check_pages(pages, token_format, cache_layout)
    return CacheKey(
        token_format.name, num_bytes, page_size, index.shape[-1], page_stride, token_stride, min(num_pages, 2)
    )


def _prepare(
    request: Request, key: tuple[Any, ...], keys: list[CacheKey], ragged: bool, caches: list[torch.Tensor]
) -> LatentLaunch:
    """Plans a call and loads its kernel. What the kernel does not check itself is checked here, or is in the key."""
    check(*request)
    batch, s_q, h_q, _ = request.q.shape
    sparse, device = request.indices is not None, request.q.device
    constants = memory.constants(device)
    read = [i for i, cache in enumerate(keys) if cache.width and cache.has_pages]
    strides = []
    for i in read:
        _, layout = check_pages(caches[i], FORMATS[keys[i].name], request.cache_layout)
        strides.append((layout.data_stride, layout.scale_offset, layout.scale_stride))
    kernel, splits, merge_ctas, max_ctas, blocks, partial_rows = None, 1, 1, 1, 1, 0
    if batch and read:
        first = keys[read[0]]
        plan = plan_decode(
            sparse=sparse,
            batch=batch,
            s_q=s_q,
            h_q=h_q,
            max_keys=first.width if sparse else first.width * first.page_size,
            num_sms=constants.num_sms,
            ragged=ragged,
            num_splits=request.num_splits,
            cache_format=first.name,
            extra_format=keys[1].name if len(read) > 1 else "",
            extra_keys=keys[1].width if len(read) > 1 else 0,
            latent=True,
            inf_if_empty=request.inf_if_empty,
        )
        kernel, splits, merge_ctas = get_kernel(plan.spec), plan.num_splits, plan.merge_ctas
        blocks, max_ctas, partial_rows = plan.spec.head_blocks(h_q), plan.max_ctas, plan.partial_rows
    prepared = LatentLaunch(
        kernel,
        bool(read) and read[0] == 1,
        tuple(strides),
        splits,
        merge_ctas,
        max_ctas,
        workspace.reserve(device, partial_rows * PARTIAL_FLOATS, batch * s_q * blocks if partial_rows else 0),
        constants.no_sink[:h_q],
        constants.no_length.expand(batch, s_q),
        memory.template((batch, s_q, h_q, FORMATS[keys[0].name].d_v), torch.bfloat16, device),
        memory.unread((batch, s_q, h_q), device),
    )
    return _prepared.keep(key, prepared, device)
