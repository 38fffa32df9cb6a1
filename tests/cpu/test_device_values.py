"""Lengths, indices, tables and slots of any value on the CPU give the results of clamped values.

tests/gpu/test_device_values.py does the same for kernels.
"""

from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, kv_int8_append, mla_fp8_append, mla_fp8_decode
from cute_kernels.gqa.plan import plan_decode as plan_gqa
from cute_kernels.gqa.spec import MAX_RANGES, GqaDecodeSpec
from cute_kernels.mla.plan import MAX_BALANCED
from cute_kernels.mla.plan import plan_decode as plan_mla
from cute_kernels.mla.spec import MAX_KEYS, TOKENS_PER_TILE, WORK_TILE_OVERHEAD
from fp8_mla import QK_DIM, TOKEN_BYTES
from fp8_mla.slots import slots_from_positions
from tests.kit.compare import bf16_yardstick
from tests.kit.gqa_cases import gqa_case
from tests.kit.mla_cases import generator, latent_tokens

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
CAPACITY, PAGE = 12, 4
LENGTHS = [INT32_MIN, INT32_MIN + 1, -(2**30), -1, 0, 1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2**30, INT32_MAX]
OUTSIDE = [INT32_MIN, INT32_MIN + 1, -(2**30), -1, 2**30, INT32_MAX]


def equal(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def mla_cache() -> torch.Tensor:
    return latent_tokens(CAPACITY, generator(0)).view(-1, PAGE, TOKEN_BYTES)


def mla_call(s_q: int, batch: int) -> dict[str, Any]:
    """A dense call over the whole cache."""
    q = torch.randn((batch, s_q, 2, QK_DIM), generator=generator(1)).bfloat16()
    table = torch.arange(CAPACITY // PAGE, dtype=torch.int32).expand(batch, -1)
    return {"q": q, "kv_cache": mla_cache(), "block_table": table}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("s_q", [1, 2, 8])
def test_mla_lengths(s_q, causal):
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    call = {**mla_call(s_q, len(LENGTHS)), "causal": causal}
    clamped = lengths.clamp(0, CAPACITY)
    got = mla_fp8_decode(**call, cache_seqlens=lengths, return_lse=True)
    equal(got, mla_fp8_decode(**call, cache_seqlens=clamped, return_lse=True))
    assert (got[0][:5] == 0).all() and (got[1][:5] == -torch.inf).all()
    assert got[1][-3:, -1].isfinite().all()
    equal(bf16_yardstick(**call, cache_seqlens=lengths), bf16_yardstick(**call, cache_seqlens=clamped))


@pytest.mark.parametrize("per_query", [False, True])
def test_mla_topk_lengths_and_indices(per_query):
    batch, s_q, topk = len(LENGTHS), 2, CAPACITY
    q = torch.randn((batch, s_q, 2, QK_DIM), generator=generator(1)).bfloat16()
    indices = torch.arange(topk, dtype=torch.int32).repeat(batch, s_q, 1)
    indices[..., 1 : 1 + len(OUTSIDE)] = torch.tensor(OUTSIDE, dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    if per_query:
        lengths = lengths.unsqueeze(1).expand(batch, s_q)
    call = {"q": q, "kv_cache": mla_cache(), "return_lse": True}
    got = mla_fp8_decode(**call, indices=indices, topk_length=lengths)
    masked = torch.where((indices >= 0) & (indices < CAPACITY), indices, -1)
    equal(got, mla_fp8_decode(**call, indices=masked, topk_length=lengths.clamp(0, topk)))
    assert (got[1][:5] == -torch.inf).all() and got[1][-1].isfinite().all()


def test_mla_table_entries():
    call = mla_call(2, len(OUTSIDE))
    table = call.pop("block_table").clone()
    lengths = torch.full((len(OUTSIDE),), INT32_MAX, dtype=torch.int32)
    table[:, 1] = torch.tensor(OUTSIDE, dtype=torch.int32)
    got = mla_fp8_decode(**call, block_table=table, cache_seqlens=lengths, return_lse=True)
    table[:, 1] = -1
    equal(got, mla_fp8_decode(**call, block_table=table, cache_seqlens=lengths, return_lse=True))


def test_positions_and_tables_of_64_bits():
    """Products with the page size would wrap around to slots that exist."""
    table = torch.tensor([[2**62, 2**63 - 1, -(2**63), 2**58, 1]])
    positions = torch.tensor([[0, 4, 8, 12, 16, -(2**63), 2**63 - 1, 2**33]])
    slots = slots_from_positions(positions, table, PAGE)
    assert slots.tolist() == [[-1, -1, -1, 2**60, 4, -1, -1, -1]]
    assert slots_from_positions(positions, table, PAGE, num_pages=3).tolist() == [[-1] * 4 + [4] + [-1] * 3]
    every = torch.arange(4).expand(len(LENGTHS), 4)
    known = slots_from_positions(every, every, 1, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32)) >= 0
    assert known.sum(1).tolist() == [min(max(length, 0), 4) for length in LENGTHS]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, INT32_MAX])
@pytest.mark.parametrize("s_q", [1, 8])
@pytest.mark.parametrize("layout", ["BNSH", "paged_NHD"])
def test_gqa_lengths(layout, s_q, window, causal):
    options: dict[str, Any] = {"seqlens": [CAPACITY] * len(LENGTHS), "whole": True, "page_size": PAGE, "d": 64}
    case: Any = gqa_case(h_q=2, h_kv=1, layout=layout, s_q=s_q, causal=causal, alibi="head", **options)
    call = {**case.arguments(), "window": window}
    if case.block_table is not None:
        call["block_table"] = case.block_table[:, : CAPACITY // PAGE].contiguous()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    got = gqa_decode(**{**call, "cache_seqlens": lengths}, return_lse=True)
    equal(got, gqa_decode(**{**call, "cache_seqlens": lengths.clamp(0, CAPACITY)}, return_lse=True))
    assert (got[0][:5] == 0).all() and (got[1][:5] == -torch.inf).all()


SLOTS = [-(2**63), -(2**32) + 1, INT32_MIN, -1, 2, 2**31 + 3, 2**32 + 1, 2**40, 2**63 - 1]
"""One of these numbers is a valid slot. The low 32 bits of some others are one, too."""


def test_slots_of_appends():
    slots = torch.tensor(SLOTS)
    kv = torch.randn((len(SLOTS), QK_DIM), generator=generator(2)).bfloat16()
    cache = torch.zeros((3, PAGE, TOKEN_BYTES), dtype=torch.uint8)
    mla_fp8_append(kv, cache, slots)
    assert cache.view(CAPACITY, -1).any(1).nonzero().tolist() == [[2]]
    k, v = torch.randn((2, len(SLOTS), 1, 64), generator=generator(3)).bfloat16()
    caches = [torch.zeros((3, PAGE, 1, 64), dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros((3, PAGE, 1)) for _ in range(2)]
    kv_int8_append(k, v, *caches, *scales, slots, layout="paged_NHD")
    for tensor in (*caches, *scales):
        assert tensor.view(CAPACITY, -1).any(1).nonzero().tolist() == [[2]]


# ---- sums over a batch, which devices make in 32 bits


@pytest.mark.parametrize("max_keys", [2**20, 2**27, 2**30, MAX_KEYS])
@pytest.mark.parametrize("batch", [2, 100, MAX_BALANCED])
def test_mla_shares_are_planned_where_32_bits_hold_their_sum(batch, max_keys):
    plan = plan_mla(sparse=False, batch=batch, s_q=1, h_q=16, max_keys=max_keys, num_sms=132, ragged=True)
    total = batch * (-(-max_keys // TOKENS_PER_TILE) + WORK_TILE_OVERHEAD)
    assert plan.spec.balanced == (total < 2**31 - 132)
    assert plan.num_splits * plan.tiles_per_split * TOKENS_PER_TILE < 2**31


@pytest.mark.parametrize("num_splits", [None, 1, 7, MAX_RANGES])
@pytest.mark.parametrize("max_keys", [2**20, 2**29, 2**30 - 1])
@pytest.mark.parametrize("batch", [1, 255, 256, 1024])
@pytest.mark.parametrize("warps", [4, 8])
def test_gqa_ranges_are_planned_where_32_bits_hold_their_sum(batch, max_keys, num_splits, warps):
    spec = GqaDecodeSpec("bfloat16", "bfloat16", 256 if warps == 4 else 128, 8, warps=warps)
    plan = plan_gqa(spec, batch=batch, h_kv=1, rows=1, max_keys=max_keys, num_sms=132, num_splits=num_splits)
    tiles = -(-max_keys // spec.keys_per_tile)
    assert (plan.splits or plan.ranges) * (tiles if plan.splits else tiles * batch) < 2**31
    assert plan.ctas <= 132 and (plan.splits == 0) == (num_splits is None and tiles * batch < 2**31)


def test_more_keys_than_32_bits_count_are_refused():
    call = mla_call(1, 1)
    page = 2**20
    call["kv_cache"] = call["kv_cache"].as_strided((1, page, TOKEN_BYTES), (0, 0, 1))
    call["block_table"] = torch.zeros((1, 2**11), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^block_table: got 2048 pages of 1048576 tokens; needs at most"):
        mla_fp8_decode(**call, cache_seqlens=torch.zeros(1, dtype=torch.int32))
