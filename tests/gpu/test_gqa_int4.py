"""`gqa_decode` over rotated 4-bit values, or keys and values, against the float64 oracle; see test_gqa_decode.py."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch

from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.request import DECODE
from cute_kernels.gqa.spec import GqaDecodeSpec
from tests.gpu.test_gqa_decode import decode, hold, usual
from tests.kit.bits import require_same_bits_each_time
from tests.kit.gqa_cases import FOUR_BITS, VALUES, GqaExpectation
from tests.kit.graphs import capture
from tests.kit.mla_cases import ragged_lengths

INF = math.inf
CACHES: tuple[dict[str, Any], ...] = (
    {"layout": "paged_NHD"},
    {"layout": "paged_HND", "d": 64, "page_size": 4},
    {"layout": "BNSH", "h_q": 32},
    {"layout": "BSNH", "d": 256, "q_dtype": torch.float16},
    {"layout": "paged_NHD", "d": 64, "h_q": 32, "page_size": 256},
    {"layout": "paged_HND", "d": 256, "page_size": 1},
    {"layout": "paged_NHD", "page_size": 1, "alibi": "batch", "softcap": 5.0},
    {"layout": "BNSH", "starts": [300, 0, 2000]},
    {"layout": "paged_HND", "page_size": 512},
)
"""Options of `usual`, each with its own kernels: one to sixteen columns, all layouts, all kinds of pages."""


def kernel_specs() -> list[GqaDecodeSpec]:
    specs: dict[GqaDecodeSpec, None] = {}
    for kind, options in itertools.product(FOUR_BITS, CACHES):
        arguments = usual(kv_dtype=kind, **options, device="cpu").arguments()
        specs |= {decode_spec(DECODE.request(**arguments, num_splits=splits)): None for splits in (1, None)}
    return list(specs)


@pytest.fixture(params=FOUR_BITS)
def of_kind(request: Any) -> Any:
    """A function that makes cases of a kind on the GPU."""
    return functools.partial(usual, kv_dtype=request.param)


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_caches_of_all_kinds(of_kind, options, values):
    hold(of_kind(**options, values=values, sink="inf"), splits=(None, 1, 3))


@pytest.mark.parametrize("options", CACHES, ids=str)
@pytest.mark.parametrize("s_q", [2, 8])
def test_several_queries(of_kind, options, s_q):
    some = {**options, "h_q": max(2, options.get("h_q", 8) // s_q * 2)}
    hold(of_kind(**some, s_q=s_q, window=100, sink="finite"), splits=(None, 1, 2))
    hold(of_kind(**some, s_q=s_q, causal=False), splits=(None, 3))


def test_every_length_around_tiles_and_pages(of_kind):
    hold(of_kind(seqlens=[*range(260), *range(500, 524)], page_size=64), splits=(None, 1, 2))
    hold(of_kind(seqlens=range(260), layout="BNSH", s_q=2, window=70), splits=(None, 2))


def test_many_sequences_and_a_long_one(of_kind):
    lengths = ragged_lengths(300, 1500, 64, seed=3)
    lengths[17:200:13] = [0] * len(range(17, 200, 13))
    hold(of_kind(seqlens=[*lengths, 100_003], sink="inf"), splits=(None, 132))
    hold(of_kind(seqlens=[0, 1, 127, 128, 129, 0, 0, 512, 300, 640, 2, 0] * 24, sink="finite"), splits=(None, 2))


@pytest.mark.parametrize("num_splits", [None, 1, 5])
def test_the_same_bits_on_20_runs(of_kind, num_splits):
    for case in (of_kind(seqlens=[4000, 1, 513, 64, 0], s_q=2), of_kind(seqlens=[20_000], layout="BNSH")):
        require_same_bits_each_time(case, functools.partial(decode, case, num_splits=num_splits))


def test_a_sequence_does_not_depend_on_the_batch(of_kind):
    case = of_kind(seqlens=[700, 1, 65, 3000], layout="BNSH", padded=False)
    out = decode(case, num_splits=3)
    for row in range(4):
        own = {name: getattr(case, name)[row : row + 1] for name in ("q", "k_cache", "v_cache", "k_scale", "v_scale")}
        alone = dataclasses.replace(case, **own, cache_seqlens=case.cache_seqlens[row : row + 1])
        assert torch.equal(decode(alone, num_splits=3)[0], out[row])


@pytest.mark.parametrize("zero_point", [0, 15])
def test_zero_points_at_both_ends(of_kind, zero_point):
    """All zero points and scales are equal, so that sums of many tokens cancel if codes are near the zero point."""
    case = of_kind(seqlens=[5000, 300], layout="BNSH")
    words = torch.full_like(case.v_scale, 0.25).view(torch.int32) | zero_point
    case = dataclasses.replace(case, v_scale=words.view(torch.float32))
    if case.k_cache.dtype == torch.uint8:
        case = dataclasses.replace(case, k_scale=case.v_scale)
    hold(case)


@pytest.mark.parametrize("s_q", [1, 2])
def test_a_nan_in_a_visible_scale_is_not_hidden(of_kind, s_q):
    """The NaN must reach every query head of its KV head that sees it, and no other."""
    case = of_kind(seqlens=[100, 200, 300], layout="BNSH", padded=False, s_q=s_q)
    v_scale = case.v_scale.clone()
    v_scale[1, 1, 199] = math.nan
    case = dataclasses.replace(case, v_scale=v_scale)
    for num_splits in (None, 1, 2):
        out = decode(case, num_splits=num_splits)
        nan = out.isnan()
        assert nan[1, -1, 4:].all(), "the last query sees it"
        nan[1, -1, 4:] = False
        assert not nan.any()


def test_keys_that_do_not_exist(of_kind):
    case = of_kind(seqlens=[0] * 74, sink="finite", s_q=2)
    for num_splits in (None, 1, 3):
        out, lse = decode(case, num_splits=num_splits, return_lse=True)
        assert (out == 0).all() and (lse == -INF).all()
    hold(of_kind(seqlens=[640, 640, 640], bad_entries=True, sink="finite"))
    late = of_kind(seqlens=[300, 300, 17], starts=[300, 2**31 - 1, 18], sink="finite", s_q=2)
    for num_splits in (None, 1, 3):
        out, lse = decode(late, num_splits=num_splits, return_lse=True)
        assert (out == 0).all() and (lse == -INF).all()


def test_a_graph_whose_lengths_change(of_kind):
    case = of_kind(seqlens=[2000] * 4, layout="BNSH", padded=False)
    graph, (out, lse) = capture(lambda: decode(case, return_lse=True))
    case.cache_seqlens.copy_(torch.tensor([1, 0, 700, 2000]))
    graph.replay()
    GqaExpectation.of(case).check(out, lse).require()
