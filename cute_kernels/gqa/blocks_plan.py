"""Turns block-sparse calls into calls that read all of their keys: pure Python, from shapes and strides to views.

Each query token and KV head becomes a sequence of its own, whose block table has the blocks of its list. So the decode
kernel knows nothing about lists. A cache becomes *virtual pages* of one head: a page of a head, or one block of it if a
block is smaller. Virtual page `page * steps[0] + part * steps[1] + head * steps[2]` begins that many units of memory
after the first, in K, in V and in their scales, each in units of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from cute_kernels.gqa.layouts import ALIGNMENT, LAYOUTS, CacheLayout, CacheSizes, token_major

INDEX_BLOCKS: Final = (64, 128)
"""Tokens of a block. Smaller blocks would need smaller boxes of TMA."""
HEADS_SHARE: Final = ("per_head", "per_token")
"""Granularities of scales that a virtual page of one head cannot have."""
INT32_MAX: Final = 2**31 - 1


class DecodeShape(NamedTuple):
    """The decode of a block-sparse call: layout and sizes of virtual pages; batch, query tokens, heads; most keys."""

    layout: CacheLayout
    sizes: CacheSizes
    q_shape: tuple[int, int, int]
    max_keys: int


def decode_shape(
    layout: CacheLayout, sizes: CacheSizes, q_shape: tuple[int, int, int], index_block: int, lists: int, n: int
) -> DecodeShape:
    """Returns the shape of the decode for `lists` lists of n blocks a query token, with the call's layout, sizes and q.

    There may be more virtual pages than `sizes` says: no plan depends on their number.
    """
    batch, s_q, h_q = q_shape
    rows, heads = min(sizes.rows, index_block), sizes.h_kv // lists
    virtual = layout if layout.x_packed else LAYOUTS["paged_NHD"]
    pages = CacheSizes(sizes.outer * lists, rows, heads, sizes.d)
    return DecodeShape(virtual, pages, (batch * s_q * lists, 1, h_q // lists), n * index_block)


class Strided(NamedTuple):
    """A cache or its scales, by the axes of its `CacheLayout`: sizes and strides in elements."""

    name: str
    axes: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class VirtualPages(NamedTuple):
    """The virtual pages of a call.

    rows    tokens of a virtual page
    parts   virtual pages of a page of a head
    heads   heads that have pages of their own: 1 if all heads share lists, and virtual pages have all heads
    steps   from a page, a part and a head to the next
    total   virtual page numbers, some of which are no page if strides leave gaps
    """

    rows: int
    parts: int
    heads: int
    steps: tuple[int, int, int]
    total: int


def virtual_pages(
    layout: CacheLayout, sizes: CacheSizes, index_block: int, lists: int, tensors: Sequence[Strided]
) -> VirtualPages:
    """Returns the virtual pages of a call.

    Args:
        layout: layout of the caches.
        sizes: sizes of the caches.
        index_block: tokens of a block.
        lists: lists of a query token: one for each KV head, or one.
        tensors: k_cache, v_cache, and their scales that have pages.

    Raises:
        ValueError: a tensor's strides have other ratios than k_cache's, or there are too many pages.
    """
    rows = min(sizes.rows, index_block)
    parts, heads = sizes.rows // rows, lists
    steps = {t.name: _steps(layout, sizes, rows, parts, heads, t) for t in tensors}
    first = tensors[0]
    for t in tensors[1:]:
        if steps[t.name][0] != steps[first.name][0]:
            raise ValueError(
                f"{t.name}: got strides {t.strides}; needs the proportions of {first.name}'s, {first.strides}, with "
                f"indices: from page to page, from head to head and from {rows} tokens to the next"
            )
    taken, _ = steps[first.name]
    total = 1 + sum((size - 1) * step for size, step in zip((sizes.outer, parts, heads), taken, strict=True))
    if total > INT32_MAX:
        raise ValueError(f"{first.name}: got strides {first.strides}, {total} pages and gaps; needs fewer than 2^31")
    return VirtualPages(rows, parts, heads, taken, total)


def _steps(
    layout: CacheLayout, sizes: CacheSizes, rows: int, parts: int, heads: int, t: Strided
) -> tuple[tuple[int, int, int], int]:
    """Returns the steps of page, part and head, in the largest unit that divides all three, and the unit's elements."""
    stride = dict(zip(t.axes, t.strides, strict=True))
    outer = stride[layout.outer] if sizes.outer > 1 else 0
    part = stride.get(layout.rows, 0) * rows if parts > 1 else 0
    head = stride.get("h", 0) if heads > 1 else 0
    unit = math.gcd(outer, part, head) or ALIGNMENT
    return (outer // unit, part // unit, head // unit), unit


def virtual_view(layout: CacheLayout, sizes: CacheSizes, pages: VirtualPages, t: Strided) -> Strided:
    """Views a cache or its scales as virtual pages, in the order of the decode's layout."""
    _, unit = _steps(layout, sizes, pages.rows, pages.parts, pages.heads, t)
    size, stride = dict(zip(t.axes, t.shape, strict=True)), dict(zip(t.axes, t.strides, strict=True))
    size |= {layout.outer: pages.total, layout.rows: pages.rows}
    stride[layout.outer] = unit
    if pages.heads > 1:
        size["h"], stride["h"] = 1, unit
    order = range(len(t.axes)) if layout.x_packed else token_major(t.axes)
    axes = "".join(t.axes[i] for i in order)
    return Strided(t.name, axes, tuple(size[axis] for axis in axes), tuple(stride[axis] for axis in axes))
