"""`mla_fp8_decode(scores="fp8")`: codes as they lie times Q in two e4m3 numbers, on the GPU.

Each call is held to the tolerance rule, whose log-sum-exp has the slack of such scores. And to the rule by which users
may choose: over many heads the output is no worse than with keys in bf16, and the log-sum-exp at most half as far off.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from fp8_mla import NOPE_DIM, QUANT_TILE, ROPE_OFFSET, SCALE_OFFSET, V_DIM, reference_decode
from tests.kit.compare import bf16_yardstick, relative_error
from tests.kit.mla_cases import OUTLIER_CHANNELS, SCALE_KINDS, DecodeCase, dense_case, ragged_lengths, sparse_case

INEXACT_KEYS = tuple(kind for kind in SCALE_KINDS if kind != "power_of_two")
"""With powers of two keys are exact in bf16 as well, so that nothing would be allowed."""


@pytest.fixture
def run_fp8(run_decode: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(run_decode, scores="fp8")


def sparse(**options: Any) -> DecodeCase:
    return sparse_case(**{"batch": 3, "topk": 700, "sink": "finite", **options}, device="cuda")


def dense(**options: Any) -> DecodeCase:
    return dense_case(**{"seqlens": [1, 0, 700, 65, 2048], "sink": "finite", **options}, device="cuda")


MODES = {"sparse": sparse, "dense": dense}


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("h_q", [1, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("scales", SCALE_KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_all_heads_and_scales(run_fp8, mode, scales, h_q, num_splits):
    run_fp8(MODES[mode](h_q=h_q, s_q=2, scales=scales, outliers=scales != "mixed"), num_splits=num_splits)


@pytest.mark.parametrize("h_q", [32, 128])
@pytest.mark.parametrize("page_size", [1, 61, 64, 576])
def test_pages_lengths_and_balanced_schedules(run_fp8, page_size, h_q):
    run_fp8(sparse(batch=74, h_q=h_q, topk=320, lengths="query", page_size=page_size))
    run_fp8(dense(seqlens=ragged_lengths(74, 700, page_size, 3), h_q=h_q, s_q=3, page_size=page_size))


def test_every_length_around_the_tiles(run_fp8):
    case = sparse(batch=260, h_q=64, topk=259, invalid=False)
    lengths = torch.arange(260, device="cuda").int()
    for num_splits in (None, 1, 2):
        run_fp8(dataclasses.replace(case, topk_length=lengths), num_splits=num_splits)


def at_most_bf16(case: DecodeCase) -> None:
    """The rule by which users may choose, over all rows and heads."""
    out, lse = case.outputs()
    mla_fp8_decode(case.q, case.kv_cache, **case.options(), scores="fp8", out=out.tensor, lse=lse.tensor)
    expected, expected_lse = reference_decode(**case.arguments())
    emulation = bf16_yardstick(**case.arguments())
    assert relative_error(out.tensor, expected) <= 1.02 * relative_error(emulation.out, expected)
    has_keys = expected_lse.isfinite()
    bf16_off, fp8_off = (
        (found.double() - expected_lse)[has_keys].square().mean().sqrt() for found in (emulation.lse, lse.tensor)
    )
    assert fp8_off <= 0.5 * bf16_off + 2e-5, f"log-sum-exp off by {fp8_off:.1e}, with keys in bf16 by {bf16_off:.1e}"


@pytest.mark.parametrize("query_size", [0.3, 1.0, 3.0, 18.0])
@pytest.mark.parametrize("scales", INEXACT_KEYS)
@pytest.mark.parametrize("mode", MODES)
def test_no_worse_than_keys_in_bf16(mode, scales, query_size):
    options = {"seqlens": [2048] * 4} if mode == "dense" else {"topk": 2048, "invalid": False}
    at_most_bf16(MODES[mode](h_q=128, scales=scales, query_size=query_size, padded=False, **options))


@pytest.mark.parametrize("where", ["q", "k", "q and k"])
def test_outlier_channels(where):
    case = sparse(h_q=128, topk=2048, scales="arbitrary", outliers="k" in where, invalid=False, padded=False)
    if "q" in where:
        q = case.q.clone()
        q[..., list(OUTLIER_CHANNELS)] *= 8.0
        case = dataclasses.replace(case, q=q)
    at_most_bf16(case)


@pytest.mark.parametrize("decades", [4, 6, 8, 20, 60])
def test_quant_tiles_of_q_that_differ_in_size(run_fp8, decades):
    """Up to 2^6 a head has one power of two, beyond it one for each quant tile; keys make up for the difference."""
    case = sparse(h_q=64, scales="arbitrary", padded=False)
    q, cache = case.q.clone(), case.kv_cache.clone()
    scale = cache[..., SCALE_OFFSET:ROPE_OFFSET].view(torch.float32)
    for tile in range(4):
        factor = 2.0 ** (decades * (tile % 2))
        q[..., QUANT_TILE * tile : QUANT_TILE * (tile + 1)] /= factor
        scale[..., tile] *= factor
    changed = dataclasses.replace(case, q=q, kv_cache=cache)
    run_fp8(changed)
    heads = q.clone()  # in one head alone
    heads[:, :, 1:] = case.q[:, :, 1:]
    run_fp8(dataclasses.replace(case, q=heads))


def test_queries_far_from_usual_size(run_fp8):
    case = sparse(batch=2, h_q=64, topk=200, query_size=0.2, padded=False)
    for exponent in (100, 40, -40, -100):
        scale = 576**-0.5 * 2.0**-exponent
        run_fp8(dataclasses.replace(case, q=case.q * 2.0**exponent, softmax_scale=scale))
    small = case.q.clone()
    small[:, :, ::2] *= 2.0**-30
    run_fp8(dataclasses.replace(case, q=small))
    run_fp8(dataclasses.replace(case, q=torch.zeros_like(case.q)))
    for softmax_scale in (0.0, -(576**-0.5)):
        run_fp8(dataclasses.replace(case, softmax_scale=softmax_scale))


@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_a_rope_part_of_another_size(run_fp8, exponent):
    case = sparse(batch=2, h_q=64, topk=200, query_size=0.2, padded=False)
    q, cache = case.q.clone(), case.kv_cache.clone()
    q[..., NOPE_DIM:] *= 2.0**exponent
    cache[..., ROPE_OFFSET:].view(torch.bfloat16).mul_(2.0**-exponent)
    run_fp8(dataclasses.replace(case, q=q, kv_cache=cache))


@pytest.mark.parametrize("channel", [11, NOPE_DIM + 3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nan_or_inf_in_one_query_head_stays_there(run_fp8, value, channel):
    case = sparse(batch=2, h_q=128, topk=130, invalid=False, query_size=0.2)
    q = case.q.clone()
    q[1, 0, 37, channel] = value
    out, _ = reference_decode(**dataclasses.replace(case, q=q).arguments())
    assert int(out.isnan().sum()) == V_DIM
    run_fp8(dataclasses.replace(case, q=q))


@pytest.mark.parametrize("field", ["code", "scale", "rope"])
def test_a_nan_in_a_visible_key_is_not_hidden(run_fp8, field):
    case = sparse(batch=4, h_q=64, topk=100, page_size=1, invalid=False, padded=False)
    assert case.indices is not None
    cache, slot = case.kv_cache.clone(), int(case.indices[1, 0, 70])
    begin, end = {"code": (5, 6), "scale": (SCALE_OFFSET, ROPE_OFFSET), "rope": (ROPE_OFFSET, ROPE_OFFSET + 2)}[field]
    cache[slot, 0, begin:end] = 0xFF
    for num_splits in (None, 1, 2):
        run_fp8(dataclasses.replace(case, kv_cache=cache), num_splits=num_splits)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_on_20_runs(mode):
    case = MODES[mode](h_q=128, s_q=2)
    out, lse = case.outputs(padded=True)
    first = None
    for _ in range(20):
        out.poison()
        lse.poison()
        mla_fp8_decode(case.q, case.kv_cache, **case.options(), scores="fp8", out=out.tensor, lse=lse.tensor)
        bits = out.tensor.contiguous().view(torch.int16), lse.tensor.contiguous().view(torch.int32)
        first = first or bits
        assert torch.equal(bits[0], first[0])
        assert torch.equal(bits[1], first[1])
