"""`mla_fp8_decode`: checks, plan, launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

import fp8_mla
from cute_kernels.mla.plan import MAX_SPLITS, plan_decode
from cute_kernels.runtime.arch import require_sm90
from cute_kernels.runtime.checks import check_tensor, fail, require
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.ops import register_op

MAX_HEADS = 128
_NEEDS_KEYS = "either indices (sparse; topk_length is optional), or block_table and cache_seqlens (dense)"


def mla_fp8_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    s_aux: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention of a few query tokens over a paged cache of 656-byte FP8 tokens, sparse or dense.

    The attention is DeepSeek's absorbed form: one key of 576 values for all heads, the first 512 of which are also the
    value. The cache format is that of DeepSeek-V3.2 (docs/format.md); every scale is used as the float32 that it is.

    Runs on the current stream, captures into a CUDA graph after one eager call with the same shapes, and traces under
    torch.compile. CPU tensors run the reference, with float64 inside.

    Args:
        q: (batch, s_q, h_q, 576) bfloat16, 1 <= h_q <= 128, s_q >= 1. Rows contiguous and 16-byte aligned.
        kv_cache: (num_pages, page_size, 656) or (num_pages, page_size, 1, 656), uint8 or float8_e4m3fn, any page size.
            Rows contiguous and 16-byte aligned; pages may be strided.
        indices: sparse: (batch, s_q, topk) int32, each ``page * page_size + offset``. An index outside of the cache is
            masked, wherever it stands.
        topk_length: (batch,) or (batch, s_q) int32: only that many leading indices count.
        block_table: dense: (batch, max_pages) int32. Entries behind a request's last page may be anything.
        cache_seqlens: dense: (batch,) int32, tokens; those beyond the block table do not exist.
        causal: dense, s_q > 1: query j sees the first ``cache_seqlens - s_q + 1 + j`` keys.
        softmax_scale: default 576 ** -0.5.
        s_aux: (h_q,) float32, a logit per head in natural-log units that joins the softmax denominator and nothing else.
        num_splits: CTAs that share the keys of one query; default: planned from the shapes.
        out: (batch, s_q, h_q, 512) bfloat16 to write to; rows contiguous and 16-byte aligned.
        lse: (batch, s_q, h_q) float32 to write to.
        return_lse: also return the log-sum-exp.

    Returns:
        out (batch, s_q, h_q, 512) bfloat16; with `return_lse` also lse (batch, s_q, h_q) float32, natural log, without the
        sink. A query without keys has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what it got and what it needs.
    """
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        check_tensor("q", q, ndim=4)
    batch, s_q, h_q, _ = q.shape
    if out is None:
        out = q.new_empty((batch, s_q, h_q, fp8_mla.V_DIM), dtype=torch.bfloat16)
    if lse is None:
        lse = q.new_empty((batch, s_q, h_q), dtype=torch.float32)
    _decode_into(
        q,
        kv_cache,
        indices,
        topk_length,
        block_table,
        cache_seqlens,
        causal,
        softmax_scale,
        s_aux,
        num_splits,
        out,
        lse,
    )
    return (out, lse) if return_lse else out


def _run(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    s_aux: torch.Tensor | None,
    num_splits: int | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Checks everything, then writes `out` and `lse`."""
    device = q.device
    batch, s_q, h_q, _ = q.shape
    check_tensor("q", q, dtype=torch.bfloat16, shape=(batch, s_q, h_q, fp8_mla.QK_DIM), align=16, unit_last_stride=True)
    if not 1 <= h_q <= MAX_HEADS:
        fail("q", f"{h_q} heads, shape {tuple(q.shape)}", f"1 to {MAX_HEADS} heads")
    require(s_q >= 1, "q", f"shape {tuple(q.shape)}", "at least one query token")
    check_tensor("kv_cache", kv_cache, dtype=fp8_mla.CACHE_DTYPES, device=device, align=16, unit_last_stride=True)
    pages = fp8_mla.as_pages(kv_cache)
    check_tensor("out", out, dtype=torch.bfloat16, shape=(batch, s_q, h_q, fp8_mla.V_DIM), device=device, align=16,
                 unit_last_stride=True)  # fmt: skip
    check_tensor("lse", lse, dtype=torch.float32, shape=(batch, s_q, h_q), device=device)
    if s_aux is not None:
        check_tensor("s_aux", s_aux, dtype=torch.float32, shape=(h_q,), device=device, unit_last_stride=True)
    if num_splits is not None:
        require(isinstance(num_splits, int), "num_splits", type(num_splits).__name__, "an int", TypeError)
        require(1 <= num_splits <= MAX_SPLITS, "num_splits", num_splits, f"1 to {MAX_SPLITS}")
    sparse = indices is not None
    if sparse:
        if block_table is not None or cache_seqlens is not None:
            fail("indices", "indices and dense arguments", _NEEDS_KEYS)
        check_tensor(
            "indices", indices, dtype=torch.int32, shape=(batch, s_q, None), device=device, unit_last_stride=True
        )
        if topk_length is not None:
            per_query = isinstance(topk_length, torch.Tensor) and topk_length.dim() == 2
            shape = (batch, s_q) if per_query else (batch,)
            check_tensor("topk_length", topk_length, dtype=torch.int32, shape=shape, device=device)
    else:
        if block_table is None or cache_seqlens is None or topk_length is not None:
            names = ("topk_length", "block_table", "cache_seqlens")
            given = [n for n, t in zip(names, (topk_length, block_table, cache_seqlens), strict=True) if t is not None]
            fail("indices", f"None, with {' and '.join(given) or 'nothing else'}", _NEEDS_KEYS)
        check_tensor(
            "block_table", block_table, dtype=torch.int32, shape=(batch, None), device=device, unit_last_stride=True
        )
        check_tensor("cache_seqlens", cache_seqlens, dtype=torch.int32, shape=(batch,), device=device)

    if device.type == "cpu":
        result, result_lse = fp8_mla.reference_decode(
            q, pages, indices=indices, topk_length=topk_length, block_table=block_table, cache_seqlens=cache_seqlens,
            causal=causal, softmax_scale=softmax_scale, s_aux=s_aux,
        )  # fmt: skip
        out.copy_(result)
        lse.copy_(result_lse)
        return
    require_sm90("q", device)
    if batch == 0:
        return

    constants = _constants(device)
    index = indices if sparse else block_table
    assert index is not None
    if index.shape[-1] == 0 or pages.shape[0] == 0:  # no key exists for anybody
        out.zero_()
        lse.fill_(-torch.inf)
        return
    if sparse:
        if topk_length is None:
            length = constants.no_length.expand(batch, s_q)
        else:
            length = topk_length if topk_length.dim() == 2 else topk_length.unsqueeze(1).expand(batch, s_q)
    else:
        assert cache_seqlens is not None
        length = cache_seqlens
    plan = plan_decode(
        sparse=sparse, batch=batch, s_q=s_q, h_q=h_q,
        max_keys=index.shape[-1] if sparse else index.shape[-1] * pages.shape[1],
        num_sms=constants.num_sms, num_splits=num_splits,
    )  # fmt: skip
    partial = partial_lse = None
    if plan.spec.merge is not None:
        partial = torch.empty((plan.num_splits, *out.shape), dtype=torch.float32, device=device)
        partial_lse = torch.empty((plan.num_splits, *lse.shape), dtype=torch.float32, device=device)
    get_kernel(plan.spec)(
        q, pages, index, length, constants.no_sink[:h_q] if s_aux is None else s_aux, out, lse, partial, partial_lse,
        constants.zero_row, fp8_mla.QK_DIM**-0.5 if softmax_scale is None else softmax_scale, plan.num_splits, int(causal),
    )  # fmt: skip


class _Constants(NamedTuple):
    """Small tensors that stand for absent arguments, and what the planner needs to know of a device."""

    zero_row: torch.Tensor  # what a masked key reads
    no_sink: torch.Tensor
    no_length: torch.Tensor
    num_sms: int


@functools.cache
def _constants(device: torch.device) -> _Constants:
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("mla_fp8_decode: call it once before it is captured into a CUDA graph")
        constants = _Constants(
            torch.zeros(fp8_mla.TOKEN_BYTES, dtype=torch.uint8, device=device),
            torch.full((MAX_HEADS,), -torch.inf, device=device),
            torch.full((1, 1), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device),
            torch.cuda.get_device_properties(device).multi_processor_count,
        )
        torch.cuda.current_stream().synchronize()  # other streams may read them at once
    return constants


_decode_into = register_op(
    "mla_fp8_decode",
    "(Tensor q, Tensor kv_cache, Tensor? indices, Tensor? topk_length, Tensor? block_table, Tensor? cache_seqlens, bool causal, "
    "float? softmax_scale, Tensor? s_aux, int? num_splits, Tensor(a!) out, Tensor(b!) lse) -> ()",
    _run,
    lambda *args: None,
)
