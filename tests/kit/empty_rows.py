"""Calls in which some queries see no key, on every path of the kernels, and their expected results."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.mla.op import decode_request
from cute_kernels.mla.plan import plan_decode
from cute_kernels.mla.request import DECODE
from cute_kernels.runtime.cache import KernelSpec
from fp8_mla import V_DIM
from tests.kit.bits import require_same_bits
from tests.kit.compare import check_decode
from tests.kit.mla_cases import DecodeCase, PoisonedOutput, dense_case, sparse_case
from tests.kit.specs import NUM_SMS

SPARSE: dict[str, Any] = {"batch": 8, "s_q": 2, "topk": 130, "extra_topk": 70, "sink": "inf"}
"""Every seventh query has only invalid indices; some lengths are 0 or negative."""
DENSE: dict[str, Any] = {"seqlens": (0, 1, 2, 3, 64, 65, 200, 130), "s_q": 3, "sink": "finite"}
"""Empty sequences, queries before the first key of a causal call, and a request whose pages do not exist."""
V4_1: dict[str, Any] = {"formats": ("v4.1", "v4.1_fp4"), "cache_layout": "interleaved"}


class EmptyRows(NamedTuple):
    """A named call in which some queries see no key.

    sizes   arguments of `sparse_case` or `dense_case`
    forced  `num_splits` and `exchange`, unless the plan chooses them
    cut     an argument that is cut to size 0: a cache without pages, or a block table without columns
    """

    sizes: dict[str, Any]
    forced: dict[str, Any] = {}
    cut: str = ""

    @property
    def keyless(self) -> bool:
        """Whether no query sees a key at any length, so that nothing is launched."""
        return bool(self.cut) or self.sizes.get("topk") == 0

    def case(self, device: str) -> DecodeCase:
        case = (dense_case if "seqlens" in self.sizes else sparse_case)(**self.sizes, device=device)
        if case.block_table is not None and case.cache_seqlens is not None:
            case.block_table[-2] = -1
            case.cache_seqlens[-1] = -(2**31)
        if self.cut == "kv_cache":
            return dataclasses.replace(case, kv_cache=case.kv_cache[:0])
        if self.cut == "block_table" and case.block_table is not None:
            return dataclasses.replace(case, block_table=case.block_table[:, :0])
        return case


CALLS: dict[str, EmptyRows] = {
    "sparse": EmptyRows({**SPARSE, "h_q": 64}, {"num_splits": 1}),
    "sparse, few heads": EmptyRows({**SPARSE, "h_q": 12, "lengths": "query"}, {"num_splits": 1}),
    "sparse, splits": EmptyRows({**SPARSE, "h_q": 16, "lengths": "batch"}, {"num_splits": 3}),
    "sparse, more splits than tiles": EmptyRows({**SPARSE, "h_q": 100}, {"num_splits": 12}),
    "sparse, splits of many rows": EmptyRows({**SPARSE, "h_q": 32}, {"num_splits": 2}),
    "sparse, shares": EmptyRows({**SPARSE, "h_q": 64, "lengths": "query"}),
    "sparse, shares of few heads": EmptyRows({**SPARSE, "h_q": 8, "lengths": "query"}),
    "sparse, exchange": EmptyRows({**SPARSE, "h_q": 128}, {"num_splits": 1, "exchange": "values"}),
    "sparse, exchange and splits": EmptyRows({**SPARSE, "h_q": 128}, {"num_splits": 3, "exchange": "codes"}),
    "dense": EmptyRows({**DENSE, "h_q": 64}, {"num_splits": 1}),
    "dense, shares": EmptyRows({**DENSE, "h_q": 32}),
    "dense, splits": EmptyRows({**DENSE, "h_q": 128, "causal": False}, {"num_splits": 2}),
    "v4": EmptyRows({**SPARSE, "formats": ("v4",), "h_q": 64}, {"num_splits": 1}),
    "v4 twice, shares": EmptyRows({**SPARSE, "formats": ("v4", "v4"), "h_q": 64, "lengths": "query"}),
    "v4.1 and fp4, splits": EmptyRows({**SPARSE, **V4_1, "h_q": 16, "lengths": "batch"}, {"num_splits": 3}),
    "v3.2_nope, dense shares": EmptyRows({**DENSE, "cache_format": "v3.2_nope", "h_q": 32}),
    "no index": EmptyRows({**SPARSE, "h_q": 16, "topk": 0}),
    "no page": EmptyRows({**SPARSE, "h_q": 16}, cut="kv_cache"),
    "no column of the block table": EmptyRows({**DENSE, "h_q": 16}, cut="block_table"),
    "no index into either cache": EmptyRows(
        {**SPARSE, "formats": ("v4", "v4"), "h_q": 16, "topk": 0, "extra_topk": 0, "lengths": "batch"}
    ),
}


def spec_of(call: EmptyRows) -> KernelSpec | None:
    """The kernel that writes +inf for a call on a GPU with `NUM_SMS` SMs; None if nothing is launched."""
    if call.keyless:
        return None
    case = call.case("cpu")
    sparse = case.indices is not None
    index = case.indices if case.indices is not None else case.block_table
    assert index is not None
    width, page_size = index.shape[-1], case.kv_cache.shape[1]
    extra = case.extra_indices
    return plan_decode(
        sparse=sparse,
        batch=case.q.shape[0],
        s_q=case.q.shape[1],
        h_q=case.q.shape[2],
        max_keys=width if sparse else width * page_size,
        num_sms=NUM_SMS,
        ragged=any(length is not None for length in (case.topk_length, case.extra_topk_length, case.cache_seqlens)),
        cache_format=case.cache_format or "v3.2",
        extra_format=case.extra_cache_format or "",
        extra_keys=0 if extra is None else extra.shape[-1],
        inf_if_empty=True,
        **call.forced,
    ).spec


def kernel_specs() -> list[KernelSpec]:
    return list(dict.fromkeys(spec for call in CALLS.values() if (spec := spec_of(call)) is not None))


def require_inf_of_empty_rows(call: EmptyRows, device: str) -> None:
    """A call with `inf_if_empty` writes the bits of a call without it, except for +inf in the place of -inf.

    Results go to poisoned memory, the log-sum-exp in FlashMLA's order.
    """
    case = call.case(device)
    batch, s_q, h_q, _ = case.q.shape
    out = PoisonedOutput((batch, s_q, h_q, V_DIM), torch.bfloat16, device, padded=True)
    lse = PoisonedOutput((batch, h_q, s_q), torch.float32, device, padded=False)
    forced = {"num_splits": None, "exchange": None, "scores": None, **call.forced}
    written = {"out": out.tensor, "lse": lse.tensor.transpose(1, 2)}
    got = decode_request(DECODE.request(**case.arguments(), **forced, **written, inf_if_empty=True))
    assert got[0] is out.tensor and got[1] is written["lse"]
    result = mla_fp8_decode(**case.arguments(), **call.forced, return_lse=True)
    empty = result[1] == -torch.inf
    assert empty.any() and bool(empty.all()) == call.keyless, "a call of these has queries of both kinds"
    require_same_bits(got[1], torch.where(empty, torch.inf, result[1]))
    require_same_bits(got[0], result[0])
    assert (got[0][empty] == 0).all()
    if not call.keyless:
        shown = torch.where(got[1] == torch.inf, -torch.inf, got[1])
        check_decode(got[0], shown, **case.arguments()).require()
    out.require_no_stray_writes()
    lse.require_no_stray_writes()


def flash_mla_call(case: DecodeCase) -> dict[str, Any]:
    """The arguments of `flash_mla_with_kvcache` for a call that forces neither splits nor an exchange."""
    extra = case.extra_kv_cache
    return {
        "q": case.q,
        "k_cache": case.kv_cache.unsqueeze(2),
        "block_table": case.block_table,
        "cache_seqlens": case.cache_seqlens,
        "head_dim_v": V_DIM,
        "tile_scheduler_metadata": None,
        "causal": case.causal and case.indices is None,
        "is_fp8_kvcache": True,
        "indices": case.indices,
        "topk_length": case.topk_length,
        "attn_sink": case.s_aux,
        "extra_k_cache": None if extra is None else extra.unsqueeze(2),
        "extra_indices_in_kvcache": case.extra_indices,
        "extra_topk_length": case.extra_topk_length,
        "kv_format": case.cache_format,
    }
