"""Rows of tokens in paged memory: views of them, and tokens scattered to slots or gathered from them.

A token of one row lies where the cache tensor's strides say: (num_pages, page_size, bytes), bytes of a token adjacent,
tokens and pages any distance apart. For a *planar* page the tensor only tells where it starts, its number of tokens,
their bytes, and where the next page starts: the tokens' data rows come first, then their scale rows, whatever the
tensor's other strides are. FlashMLA passes such tensors; they are accepted as they are.
"""

from __future__ import annotations

import torch

from fp8_mla.formats import V3_2, PageLayout, TokenFormat, as_format
from fp8_mla.layout import CACHE_DTYPES, describe, token_bytes
from fp8_mla.slots import check_index_tensor, valid_slots


def row_views(
    kv_cache: torch.Tensor,
    token_format: TokenFormat | str = V3_2,
    cache_layout: str | None = None,
    *,
    name: str = "kv_cache",
) -> tuple[torch.Tensor, ...]:
    """Views a paged cache by the rows of its tokens, without a copy.

    Args:
        kv_cache: (num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes), uint8 or float8_e4m3fn; bytes is
            one of the format's `cache_bytes`. `num_pages` may be 0.
        token_format: a format or its name.
        cache_layout: "planar" or "interleaved" if the format has both; None: planar.
        name: name of the first argument, for messages.

    Returns:
        A (num_pages, page_size, row_bytes) uint8 tensor for each of the format's `row_bytes`.

    Raises:
        TypeError: `kv_cache` is not a tensor of one of these dtypes.
        ValueError: its shape or strides do not fit, its memory ends before its last page does, or there is no such
            format or layout.
    """
    token_format = as_format(token_format)
    pages, layout = check_pages(kv_cache, token_format, cache_layout, name=name)
    if layout.cache_layout == "interleaved":
        return pages[..., : token_format.token_bytes].split(token_format.row_bytes, dim=-1)
    num_pages, page_size, _ = pages.shape
    data, scale = token_format.row_bytes
    start, page_stride = pages.storage_offset(), pages.stride(0)
    if not num_pages:
        return pages.new_empty((0, page_size, data)), pages.new_empty((0, page_size, scale))
    return (
        pages.as_strided((num_pages, page_size, data), (page_stride, data, 1), start),
        pages.as_strided((num_pages, page_size, scale), (page_stride, scale, 1), start + page_size * data),
    )


def check_pages(
    kv_cache: torch.Tensor, token_format: TokenFormat, cache_layout: str | None = None, *, name: str = "kv_cache"
) -> tuple[torch.Tensor, PageLayout]:
    """Check a paged cache, and find where the rows of its pages are.

    Arguments and errors are those of `row_views`.

    Returns:
        The cache as (num_pages, page_size, bytes) uint8, and the layout of its pages. The strides of a planar cache's
        last two dimensions mean nothing.
    """
    if not isinstance(kv_cache, torch.Tensor) or kv_cache.is_nested or kv_cache.dtype not in CACHE_DTYPES:
        raise TypeError(f"{name}: got {describe(kv_cache)}; needs a tensor of uint8 or float8_e4m3fn")
    sizes = " or ".join(str(size) for size in token_format.cache_bytes)
    if kv_cache.ndim == 0 or kv_cache.shape[-1] not in token_format.cache_bytes:
        raise ValueError(f"{name}: got {describe(kv_cache)}; needs {sizes} bytes in the last dimension")
    if kv_cache.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {kv_cache.stride()}; needs a last stride of 1")
    pages = kv_cache.view(torch.uint8)
    if pages.ndim == 4 and pages.shape[2] == 1:
        pages = pages.squeeze(2)
    if pages.ndim != 3 or pages.shape[1] == 0:
        needs = f"(num_pages, page_size, bytes) or (num_pages, page_size, 1, bytes), page_size >= 1, bytes {sizes}"
        raise ValueError(f"{name}: got {describe(kv_cache)}; needs {needs}")
    num_pages, page_size, _ = pages.shape
    chosen = token_format.cache_layouts[0] if cache_layout is None else cache_layout
    if chosen != "planar":
        token_stride = pages.stride(1) if page_size > 1 else None  # with a single token torch leaves it open
        return pages, token_format.page_layout(page_size, chosen, token_stride=token_stride)
    layout = token_format.page_layout(page_size, chosen)
    needed, apart = layout.page_bytes, pages.stride(0)
    if num_pages > 1 and apart < needed:
        needs = (
            f"at least {needed}, for {page_size} data rows of {token_format.row_bytes[0]} and then as many scale rows"
        )
        raise ValueError(f"{name}: got pages {apart} bytes apart; needs {needs} of {token_format.row_bytes[1]}")
    memory = pages.untyped_storage().nbytes() - pages.storage_offset()
    if num_pages and memory < (num_pages - 1) * apart + needed:
        got = f"memory of {memory} bytes for {num_pages} pages {apart} bytes apart"
        raise ValueError(f"{name}: got {got}; needs {needed} for the last of them, scale rows included")
    return pages, layout


def as_pages(kv_cache: torch.Tensor, *, token_format: TokenFormat = V3_2) -> torch.Tensor:
    """View a paged cache of one row a token as (num_pages, page_size, 656) uint8, without a copy.

    `row_views` has views of every format.

    Args:
        kv_cache: (num_pages, page_size, 656) or (num_pages, page_size, 1, 656), uint8 or float8_e4m3fn. The 656 bytes
            of a token are adjacent. Tokens and pages may be strided. `num_pages` may be 0.
        token_format: how many bytes a token has; 656 by default.

    Raises:
        TypeError: `kv_cache` is not a tensor of one of these dtypes.
        ValueError: it has another shape, bytes of a token that are not adjacent, or a format of two rows a token.
    """
    if len(token_format.row_bytes) != 1:
        raise ValueError(f"token_format: got {token_format.name}; needs a format with one row a token")
    pages, _ = check_pages(kv_cache, token_format)
    if pages.shape[-1] != token_format.token_bytes:
        raise ValueError(f"kv_cache: got {describe(kv_cache)}; needs {token_format.token_bytes} bytes a token")
    return pages


def read_pages(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    token_format: TokenFormat | str = V3_2,
    cache_layout: str | None = None,
) -> torch.Tensor:
    """Gather tokens of a paged cache, as `unpack` takes them.

    Args:
        kv_cache: as `row_views` takes it.
        slots: int32 or int64 of any shape, ``page * page_size + offset``.
        token_format: a format or its name.
        cache_layout: "planar" or "interleaved" if the format has both; None: planar.

    Returns:
        (*slots.shape, token_bytes) uint8: all rows of each token, one after the other; zeros for an invalid slot.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as `row_views`.
    """
    rows = row_views(kv_cache, token_format, cache_layout)
    check_index_tensor("slots", slots, (None,) * getattr(slots, "ndim", 0))
    num_pages, page_size, _ = rows[0].shape
    valid = valid_slots(slots, num_pages * page_size)
    tokens = torch.zeros((*slots.shape, as_format(token_format).token_bytes), dtype=torch.uint8, device=kv_cache.device)
    tokens[valid] = gather(rows, slots[valid].long())
    return tokens


def write_pages(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    *,
    token_format: TokenFormat | str = V3_2,
    cache_layout: str | None = None,
) -> None:
    """Scatter tokens, as `pack` returns them, into a paged cache, in place.

    Args:
        kv_cache: as `row_views` takes it. Bytes that belong to no row are left alone.
        slots: int32 or int64 of any shape, ``page * page_size + offset``. A token whose slot is invalid is skipped.
        tokens: (*slots.shape, token_bytes) uint8 or float8_e4m3fn.
        token_format: a format or its name.
        cache_layout: "planar" or "interleaved" if the format has both; None: planar.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as `row_views`, or `tokens` has another shape, or two slots share memory.
    """
    token_format = as_format(token_format)
    rows = row_views(kv_cache, token_format, cache_layout)
    check_index_tensor("slots", slots, (None,) * getattr(slots, "ndim", 0))
    tokens = token_bytes(tokens, "tokens", token_format=token_format)
    if any(_overlap(row) for row in rows):
        raise ValueError(
            f"kv_cache: got strides {kv_cache.stride()}, with which slots share memory; needs none that do"
        )
    if tokens.shape[:-1] != slots.shape:
        raise ValueError(f"tokens: got {describe(tokens)}; needs {tuple(slots.shape)} of them, as slots")
    num_pages, page_size, _ = rows[0].shape
    valid = valid_slots(slots, num_pages * page_size)
    chosen, new = slots[valid].long(), tokens[valid]
    for row, bytes_of_row in zip(rows, new.split(token_format.row_bytes, dim=-1), strict=True):
        row[chosen // page_size, chosen % page_size] = bytes_of_row


def _overlap(rows: torch.Tensor) -> bool:
    """Returns whether two rows of (num_pages, page_size, row_bytes) may share memory."""
    reach = rows.shape[2]
    for stride, size in sorted(zip(rows.stride()[:2], rows.shape[:2], strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def gather(rows: tuple[torch.Tensor, ...], slots: torch.Tensor) -> torch.Tensor:
    """Returns (n, token_bytes) of (n,) valid slots, out of `row_views`."""
    page_size = rows[0].shape[1]
    return torch.cat([row[slots // page_size, slots % page_size] for row in rows], dim=-1)
