"""Launches of `gqa_decode`: looks up the prepared launch, or prepares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.gqa.blocks_plan import DecodeShape, decode_shape
from cute_kernels.gqa.checks import NAMES, capacity_of, check, kinds_of, sizes_of
from cute_kernels.gqa.codes import ROTATED_KINDS
from cute_kernels.gqa.layouts import LAYOUTS, CacheLayout, ScaleKind
from cute_kernels.gqa.plan import choose_spec, plan_decode
from cute_kernels.gqa.request import DECODE, NO_WINDOW, Request
from cute_kernels.gqa.spec import GqaDecodeSpec
from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.launch import PreparedLaunches, by_name


class PreparedLaunch(NamedTuple):
    """Facts that stay the same while the shapes of a call do.

    launch      the kernel, called by name; None if there is no key
    need        scratch memory
    no_sink, no_length   replace arguments that are left out
    unread_lse  receives the lse of callers that want none
    apart       see `Operator.check_addresses`
    """

    launch: Callable[..., None] | None
    need: workspace.Need
    no_sink: torch.Tensor
    no_length: torch.Tensor
    unread_lse: torch.Tensor
    apart: set[tuple[int, ...]]


_prepared: PreparedLaunches[tuple[Any, ...], PreparedLaunch] = PreparedLaunches()


def launch(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a call, or raises before any launch.

    Args:
        request: unchecked. Wrong arguments may raise any error: `launch_or_explain` replaces it.

    Returns:
        out and lse.
    """
    q, k_cache, v_cache, table = request["q"], request["k_cache"], request["v_cache"], request["block_table"]
    k_scale, v_scale, slopes = request["k_scale"], request["v_scale"], request["alibi_slopes"]
    out, lse, lengths, starts = request["out"], request["lse"], request["cache_seqlens"], request["cache_starts"]
    sink = request["s_aux"]
    key = (
        q.get_device(), q.shape, q.dtype, k_cache.shape, k_cache.dtype, v_cache.dtype, DECODE.key(request),
        None if table is None else (table.shape, table.dtype), None if lengths is None else lengths.dtype,
        None if starts is None else starts.dtype, sink is not None and sink.is_neg(),
    )  # fmt: skip
    prepared = _prepared.get(key) or _prepare(key, request)
    if out is not None or lse is not None:
        DECODE.check_addresses(request, prepared.apart)
    if out is None:
        out = memory.empty_like(q)
    if lse is None:
        lse = memory.empty_like(prepared.unread_lse) if request["return_lse"] else prepared.unread_lse
    if prepared.launch is None:
        check(request)
        out.zero_()
        lse.fill_(-torch.inf)
        return out, lse
    scratch, counters = workspace.addresses(prepared.need)
    prepared.launch(  # on the current stream of the tensors' device
        request,
        mQ=q,
        mK=k_cache,
        mV=v_cache,
        mTable=table,
        mLengths=prepared.no_length if lengths is None else lengths,
        mStarts=starts,
        mSink=prepared.no_sink if sink is None else sink,
        mOut=out,
        mLse=lse,
        k_scale=0 if k_scale is None else k_scale.data_ptr(),
        v_scale=0 if v_scale is None else v_scale.data_ptr(),
        alibi=0 if slopes is None else slopes.data_ptr(),
        scratch=scratch,
        counters=counters,
    )
    return out, lse


def _prepare(key: tuple[Any, ...], request: Request) -> PreparedLaunch:
    """Plans a call and loads its kernel, after all checks."""
    check(request)
    q, slopes = request["q"], request["alibi_slopes"]
    layout = LAYOUTS[request["layout"]]
    sizes = sizes_of(request, layout)
    batch, s_q, h_q, d = q.shape
    device = q.device
    constants = memory.constants(device)
    spec = decode_spec(request, constants.num_sms)
    capacity = capacity_of(request, layout, sizes)
    run, size, counters = None, 0, 0
    if batch and capacity and sizes.outer:
        plan = plan_decode(
            spec,
            batch=batch,
            h_kv=sizes.h_kv,
            rows=h_q // sizes.h_kv * s_q,
            max_keys=capacity,
            num_sms=constants.num_sms,
            num_splits=request["num_splits"],
        )
        size, counters = plan.states * plan.state_floats, plan.counters
        kinds = kinds_of(request, layout, sizes)
        run = by_name(
            DECODE,
            get_kernel(spec),
            spec.kernel,
            softmax_scale=d**-0.5,
            softcap=1.0,
            window=NO_WINDOW,
            **_scale_strides("k_scale", request["k_scale"], kinds[0], layout),
            **_scale_strides("v_scale", request["v_scale"], kinds[1], layout),
            alibi_batch=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            ranges=plan.ranges,
            splits=plan.splits,
            ctas=plan.ctas,
        )
    prepared = PreparedLaunch(
        run,
        workspace.reserve(device, size, counters if size else 0),
        constants.no_sink[:h_q],
        constants.no_length.expand(batch),
        memory.unread((batch, s_q, h_q), device),
        set(),
    )
    return _prepared.keep(key, prepared, device)


def decode_spec(request: Request, num_sms: int = 132) -> GqaDecodeSpec:
    """Chooses the kernel for checked arguments; with lists of blocks, the kernel that decodes their virtual pages."""
    layout = LAYOUTS[request["layout"]]
    sizes = sizes_of(request, layout)
    batch, s_q, h_q, _ = request["q"].shape
    scale, indices = request["k_scale"], request["indices"]
    shape = DecodeShape(layout, sizes, (batch, s_q, h_q), capacity_of(request, layout, sizes))
    if indices is not None:
        shape = decode_shape(layout, sizes, shape.q_shape, request["index_block"], *indices.shape[2:])
    return choose_spec(
        shape,
        kinds_of(request, layout, sizes),
        q_dtype=NAMES[request["q"].dtype],
        kv_dtype=NAMES[request["k_cache"].dtype],
        scale_dtype="float32" if scale is None else NAMES[scale.dtype],
        num_sms=num_sms,
        num_splits=request["num_splits"],
        alibi=request["alibi_slopes"] is not None,
        starts=request["cache_starts"] is not None,
        v_dtype=ROTATED_KINDS.get(request["kind"] or ""),
        **DECODE.facts_of(request),
    )


def _scale_strides(
    name: str, scale: torch.Tensor | None, kind: ScaleKind | None, layout: CacheLayout
) -> dict[str, int]:
    """Returns strides of sequences or pages, heads, rows and groups, in elements; 0 along axes that share a scale."""
    axes = {"outer": layout.outer, "head": "h", "row": layout.rows, "group": "g"}
    stride = {}
    if scale is not None and kind is not None and kind.granularity != "per_tensor":
        stride = dict(zip(layout.scale_axes(kind.granularity), scale.stride(), strict=True))
    return {f"{name}_{word}": stride.get(axis, 0) for word, axis in axes.items()}
