"""`gqa_decode` with heads of 512, of which each of four warps has a quarter; see test_gqa_decode.py."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.plan import cluster_for
from cute_kernels.gqa.request import DECODE
from cute_kernels.gqa.spec import GqaDecodeSpec
from tests.gpu.test_gqa_decode import SM_COUNT, decode, hold, usual
from tests.kit.bits import require_same_bits_each_time
from tests.kit.gqa_cases import VALUES
from tests.kit.mla_cases import ragged_lengths

GEMMA: tuple[dict[str, Any], ...] = tuple(
    {"h_q": h_q, "h_kv": h_kv} for h_q, h_kv in ((32, 4), (16, 2), (16, 1), (8, 2))
)
"""Heads of the global layers of Gemma 4."""
CACHES: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "BNSH", "k_scales": "per_head", "v_scales": "per_head", "starts": [300, 0, 64]},
    {"layout": "BSNH", "h_q": 32, "k_scales": "per_group_32", "v_scales": "per_group_64"},
    {"layout": "paged_HND", "page_size": 16, "kv_dtype": "fp8"},
    {"layout": "paged_vllm", "page_size": 8, "kv_dtype": "fp8", "k_scales": None, "v_scales": None},
    {"layout": "paged_NHD", "page_size": 1, "h_q": 32, "alibi": "batch", "softcap": 5.0},
    {"kv_dtype": "bf16"},
    {"kv_dtype": "bf16", "layout": "paged_vllm", "page_size": 32, "h_q": 32},
    {"kv_dtype": "fp16", "q_dtype": torch.float16, "layout": "BNSH", "alibi": "head", "starts": [300, 0, 64]},
)
"""Options of `usual`, each with its own kernels: 8 and 16 columns, all layouts, all types."""


def kernel_specs() -> list[GqaDecodeSpec]:
    specs: dict[GqaDecodeSpec, None] = {}
    for options in (*CACHES, *GEMMA):
        case = of_512(**options, device="cpu")
        spec = decode_spec(DECODE.request(**case.arguments(), num_splits=1))
        h_kv, (_, s_q, h_q, _) = options.get("h_kv", 2), case.q.shape
        cluster = cluster_for(spec, 3, h_kv, h_q // h_kv * s_q, 700, SM_COUNT)
        specs |= {spec: None, dataclasses.replace(spec, cluster=cluster): None}
    return list(specs)


def of_512(**options: Any) -> Any:
    scales = {"k_scales": None, "v_scales": None} if options.get("kv_dtype") in ("bf16", "fp16") else {}
    return usual(**{"d": 512, **scales, **options})


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_caches_of_all_kinds(options, values):
    hold(of_512(**options, values=values, sink="inf"), splits=(None, 1, 3))


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("s_q", [2, 8])
def test_several_queries(options, s_q):
    hold(of_512(**options, s_q=s_q, window=100, sink="finite"), splits=(None, 1, 2))
    hold(of_512(**options, s_q=s_q, causal=False), splits=(None, 3))


@pytest.mark.parametrize("heads", GEMMA, ids=str)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "bf16"])
def test_heads_of_gemma_4(heads, kv_dtype):
    hold(of_512(**heads, kv_dtype=kv_dtype, seqlens=[1, 0, 33, 5000, 31]), splits=(None, 1, 7))


@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
def test_every_length_around_tiles_and_pages(kv_dtype):
    hold(of_512(kv_dtype=kv_dtype, seqlens=range(132), page_size=64), splits=(None, 1, 2))
    hold(of_512(kv_dtype=kv_dtype, seqlens=range(132), layout="BNSH", s_q=2, window=35), splits=(None, 2))


def test_many_sequences_and_a_long_one():
    lengths = ragged_lengths(150, 1500, 64, seed=3)
    lengths[17:100:13] = [0] * len(range(17, 100, 13))
    hold(of_512(seqlens=[*lengths, 100_003], sink="inf"), splits=(None, 132))
    hold(of_512(seqlens=[0, 1, 31, 32, 33, 0, 0, 512, 300, 640, 2, 0] * 24, sink="finite"), splits=(None, 2))


@pytest.mark.parametrize("num_splits", [None, 1, 5])
@pytest.mark.parametrize("kv_dtype", ["int8", "bf16"])
def test_the_same_bits_on_20_runs(num_splits, kv_dtype):
    for options in ({"seqlens": [4000, 1, 513, 64, 0], "s_q": 2}, {"seqlens": [20_000], "layout": "BNSH"}):
        case = of_512(kv_dtype=kv_dtype, **options)
        require_same_bits_each_time(case, functools.partial(decode, case, num_splits=num_splits))


@pytest.mark.parametrize("element", [0, 127, 128, 300, 511])
@pytest.mark.parametrize("s_q", [1, 2])
def test_a_nan_in_a_visible_value_is_not_hidden(element, s_q):
    """The NaN must reach its element of every query that sees it, whichever warp has it, and nothing else."""
    case = of_512(kv_dtype="bf16", seqlens=[100, 200, 300], layout="BNSH", padded=False, s_q=s_q)
    v_cache = case.v_cache.clone()
    v_cache[1, 1, 199, element] = math.nan
    case = dataclasses.replace(case, v_cache=v_cache)
    for num_splits in (None, 1, 2):
        nan = decode(case, num_splits=num_splits).isnan()
        assert nan[1, -1, 4:, element].all(), "the last query sees it"
        nan[1, -1, 4:, element] = False
        assert not nan.any()
