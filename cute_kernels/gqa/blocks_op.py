"""Launches of `gqa_decode` with lists of blocks: a block table for each list, then a decode over these tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.gqa.block_table_spec import BlockTableSpec
from cute_kernels.gqa.blocks_plan import Strided, decode_shape, virtual_view
from cute_kernels.gqa.checks import capacity_of, check, pages_of, sizes_of, strided_of
from cute_kernels.gqa.launch import launch as decode
from cute_kernels.gqa.layouts import LAYOUTS
from cute_kernels.gqa.request import DECODE, Request
from cute_kernels.runtime import memory
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, by_name
from cute_kernels.runtime.ops import signature


class PreparedLaunch(NamedTuple):
    """Facts that stay the same while the shapes of a call do.

    make_table  the kernel that makes block tables, called by name; None if there is no key or no query
    layout      layout of the decode
    views       views of caches and scales
    rows        sequences of the decode: query tokens x lists
    table       template of the block table
    keys        template of the lengths
    no_length   replaces lengths that are left out
    apart       see `Operator.check_addresses`
    """

    make_table: Callable[..., None] | None
    layout: str
    views: tuple[Strided, ...]
    rows: int
    table: torch.Tensor
    keys: torch.Tensor
    no_length: torch.Tensor
    apart: set[tuple[int, ...]]


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def launch(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a call with `indices`, or raises before any launch; see `gqa.launch`."""
    given: Any = request
    q, k_cache, v_cache, indices = request["q"], request["k_cache"], request["v_cache"], given["indices"]
    out, lse, lengths, pages = request["out"], request["lse"], request["cache_seqlens"], request["block_table"]
    key = (
        q.get_device(), q.shape, q.dtype, signature(k_cache), signature(v_cache), indices.shape, indices.dtype,
        None if pages is None else (pages.shape, pages.dtype), None if lengths is None else lengths.dtype,
        DECODE.key(request), signature(out), signature(lse),
        *(given[name] is None for name in ("s_aux", "alibi_slopes", "cache_starts", "window")),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, request)
    if out is not None or lse is not None:
        DECODE.check_addresses(request, prepared.apart)
    if prepared.make_table is None:
        given = {**given, "indices": None}
        return decode(given)
    lengths = prepared.no_length if lengths is None else lengths
    table, keys = memory.empty_like(prepared.table), memory.empty_like(prepared.keys)
    prepared.make_table(request, mIndices=indices, mPages=pages, mLengths=lengths, mTable=table, mKeys=keys)
    results = decode(decode_request(request, prepared, table, keys))
    found = results[0].view(q.shape), results[1].view(q.shape[:3])
    return _in_place(out, found[0]), _in_place(lse, found[1])


def decode_request(request: Request, prepared: PreparedLaunch, table: torch.Tensor, keys: torch.Tensor) -> Request:
    """Makes the request that decodes the sequences of a block table and its lengths."""
    given: Any = request
    q, out, lse = request["q"], request["out"], request["lse"]
    rows, d = prepared.rows, q.shape[3]
    flat_q = q.reshape(rows, 1, -1, d)
    found: Any = {
        **given,
        **{view.name: given[view.name].as_strided(view.shape, view.strides) for view in prepared.views},
        "q": flat_q,
        "layout": prepared.layout,
        "cache_seqlens": keys,
        "block_table": table,
        "indices": None,
        "out": flat_q if out is q else None if out is None else out.reshape(rows, 1, -1, d),
        "lse": None if lse is None else lse.reshape(rows, 1, -1),
    }
    return found


def _in_place(given: torch.Tensor | None, found: torch.Tensor) -> torch.Tensor:
    """Returns the result in the caller's tensor; copies it if the heads of that tensor are not evenly apart."""
    if given is None:
        return found
    if given.data_ptr() != found.data_ptr():
        given.copy_(found)
    return given


def _prepare(key: tuple[Any, ...], request: Request) -> PreparedLaunch:
    """Plans a call and loads the kernel that makes tables, after all checks."""
    check(request)
    q, indices = request["q"], request["indices"]
    assert indices is not None  # the callers have checked
    layout = LAYOUTS[request["layout"]]
    sizes = sizes_of(request, layout)
    batch, s_q, lists, n = indices.shape
    rows, capacity, device = batch * s_q * lists, capacity_of(request, layout, sizes), q.device
    pages = pages_of(request, layout, sizes)
    shape = decode_shape(layout, sizes, (batch, s_q, q.shape[2]), request["index_block"], lists, n)
    make_table = None
    if rows and capacity and sizes.outer:
        spec = BlockTableSpec(layout.paged)
        tokens = {"block_shift": request["index_block"], "rows_shift": pages.rows, "page_shift": sizes.rows}
        make_table = by_name(
            DECODE,
            get_kernel(spec),
            spec.kernel,
            capacity=capacity,
            num_pages=sizes.outer,
            **{name: size.bit_length() - 1 for name, size in tokens.items()},
            **dict(zip(("page_step", "part_step", "head_step"), pages.steps, strict=True)),
        )
    prepared = PreparedLaunch(
        make_table,
        shape.layout.name,
        tuple(virtual_view(layout, sizes, pages, t) for t in strided_of(request, layout, sizes)),
        rows,
        memory.template((rows, shape.max_keys // pages.rows), torch.int32, device),
        memory.template((rows,), torch.int32, device),
        memory.constants(device).no_length.expand(batch),
        set(),
    )
    return _prepared.keep(key, prepared, device)
