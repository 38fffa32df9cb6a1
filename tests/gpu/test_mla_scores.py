"""Scores of `mla_fp8_decode` on the GPU, with adversarial sizes of Q and of scales.

Each call must satisfy the tolerance rule. Over many heads the output must be no worse than with keys in bf16.
"""

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from fp8_mla import NOPE_DIM, QUANT_TILE, ROPE_OFFSET, SCALE_OFFSET, reference_decode
from tests.kit.compare import bf16_yardstick, relative_error
from tests.kit.mla_cases import OUTLIER_CHANNELS, SCALE_KINDS, DecodeCase, dense_case, sparse_case

INEXACT_KEYS = tuple(kind for kind in SCALE_KINDS if kind != "power_of_two")
"""With powers of two, bf16 keys are exact, too, so that no error would be allowed."""


def sparse(**options: Any) -> DecodeCase:
    return sparse_case(**{"batch": 3, "topk": 700, "sink": "finite", **options}, device="cuda")


def dense(**options: Any) -> DecodeCase:
    return dense_case(**{"seqlens": [1, 0, 700, 65, 2048], "sink": "finite", **options}, device="cuda")


MODES = {"sparse": sparse, "dense": dense}


def at_most_bf16(case: DecodeCase) -> None:
    """Errors over all rows and heads must not exceed those with keys in bf16."""
    out, lse = case.outputs()
    mla_fp8_decode(case.q, case.kv_cache, **case.options(), out=out.tensor, lse=lse.tensor)
    expected, expected_lse = reference_decode(**case.arguments())
    emulation = bf16_yardstick(**case.arguments())
    assert relative_error(out.tensor, expected) <= 1.02 * relative_error(emulation.out, expected)
    has_keys = expected_lse.isfinite()
    bf16_off, off = (
        (found.double() - expected_lse)[has_keys].square().mean().sqrt() for found in (emulation.lse, lse.tensor)
    )
    assert off <= 0.5 * bf16_off + 2e-5, f"log-sum-exp off by {off:.1e}, with keys in bf16 by {bf16_off:.1e}"


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
def test_quant_tiles_of_q_that_differ_in_size(run_decode, decades):
    """Up to 2^6, a head has one power of two, beyond that one per quant tile. Keys compensate for the difference."""
    case = sparse(h_q=64, scales="arbitrary", padded=False)
    q, cache = case.q.clone(), case.kv_cache.clone()
    scale = cache[..., SCALE_OFFSET:ROPE_OFFSET].view(torch.float32)
    for tile in range(4):
        factor = 2.0 ** (decades * (tile % 2))
        q[..., QUANT_TILE * tile : QUANT_TILE * (tile + 1)] /= factor
        scale[..., tile] *= factor
    changed = dataclasses.replace(case, q=q, kv_cache=cache)
    run_decode(changed)
    heads = q.clone()  # in one head alone
    heads[:, :, 1:] = case.q[:, :, 1:]
    run_decode(dataclasses.replace(case, q=heads))


@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_a_rope_part_of_another_size(run_decode, exponent):
    case = sparse(batch=2, h_q=64, topk=200, query_size=0.2, padded=False)
    q, cache = case.q.clone(), case.kv_cache.clone()
    q[..., NOPE_DIM:] *= 2.0**exponent
    cache[..., ROPE_OFFSET:].view(torch.bfloat16).mul_(2.0**-exponent)
    run_decode(dataclasses.replace(case, q=q, kv_cache=cache))
