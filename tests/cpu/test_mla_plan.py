"""The planner of `mla_fp8_decode`: pure Python, so every property holds or fails anywhere."""

import itertools
from typing import Any

import pytest

from cute_kernels.mla.checks import Formats, check_exchange
from cute_kernels.mla.crossover.spec import WEIGHT, MlaCrossoverSpec
from cute_kernels.mla.crossover.spec import shipped_specs as shipped_crossover_specs
from cute_kernels.mla.plan import EXCHANGES, MAX_BALANCED, MAX_SPLITS, plan_decode
from cute_kernels.mla.spec import MASKED_SCALE, TOKENS_PER_TILE, WIDE, MlaDecodeSpec, shipped_specs
from fp8_mla.formats import FORMATS, PAIRS

SMS = 132
CASES = [
    {"sparse": sparse, "batch": batch, "s_q": s_q, "h_q": h_q, "max_keys": keys, "num_sms": SMS}
    for sparse in (True, False)
    for batch in (1, 4, 74, 321)
    for s_q in (1, 3)
    for h_q in (1, 16, 64, 96, 128)
    for keys in (1, 63, 64, 65, 2048, 131072)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_are_shipped_and_cover_the_keys(case):
    plan = plan_decode(**case)
    assert plan.spec in shipped_specs()
    assert plan.spec.can_implement() == []
    tiles = -(-case["max_keys"] // TOKENS_PER_TILE)
    if plan.spec.balanced:  # several waves, of which the last one would be filled by splits
        assert case["batch"] * case["s_q"] * plan.spec.head_blocks(case["h_q"]) > SMS
        assert plan.ctas * plan.tiles_per_split >= case["batch"] * case["s_q"] * tiles
        return
    assert plan.spec.split == (plan.num_splits > 1)
    assert plan.num_splits <= min(tiles, MAX_SPLITS)
    assert plan.num_splits * plan.tiles_per_split >= tiles
    work_tiles = case["batch"] * case["s_q"] * plan.spec.head_blocks(case["h_q"])
    assert plan.ctas == work_tiles * plan.num_splits
    # a part of the merge has at least a row for each of its four warpgroups, and all parts run at once if they can
    assert 1 <= plan.merge_ctas <= -(-min(case["h_q"], WIDE) // 4)
    assert plan.merge_ctas == 1 or work_tiles * plan.merge_ctas <= SMS + work_tiles


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_queries_share_tiles(case):
    plan = plan_decode(**case, ragged=True)
    queries, blocks = case["batch"] * case["s_q"], plan.spec.head_blocks(case["h_q"])
    assert plan.spec in shipped_specs()
    assert plan.spec.can_implement() == []
    assert plan.spec.balanced == (queries > 1)
    if queries > 1:
        assert plan.max_ctas % blocks == 0
        assert SMS - blocks < plan.max_ctas <= SMS
        # the partial result of share k and query n is in place k + n
        assert plan.partial_rows == (plan.max_ctas // blocks + queries) * case["h_q"]
        assert plan.ctas * plan.tiles_per_split >= queries * blocks * -(-case["max_keys"] // TOKENS_PER_TILE)


def test_whole_queries_are_kept_where_a_cut_would_not_pay():
    sizes = {"sparse": False, "s_q": 1, "max_keys": 8192, "num_sms": SMS, "ragged": True}
    assert plan_decode(**sizes, batch=128, h_q=16).num_splits == 1  # 130 tiles and more instead of 126
    assert plan_decode(**sizes, batch=64, h_q=128).num_splits == 1
    assert plan_decode(**sizes, batch=66, h_q=16).num_splits == 2  # equal parts: as many shares as halves
    assert plan_decode(**sizes, batch=100, h_q=16).num_splits == 3  # 99 instead of 130
    assert plan_decode(**sizes, batch=16, h_q=128).num_splits == 4  # 34 instead of 31 and a work tile more


@pytest.mark.parametrize(
    "forced", [{"num_splits": 3}, {"exchange": "values"}, {"batch": 1}, {"batch": MAX_BALANCED + 1}], ids=str
)
def test_nothing_is_shared_where_it_cannot_be(forced):
    sizes = {"sparse": True, "batch": 4, "s_q": 1, "h_q": 128, "max_keys": 2048, "num_sms": SMS, "ragged": True}
    assert not plan_decode(**{**sizes, **forced}).spec.balanced
    assert plan_decode(**sizes).spec.balanced


@pytest.mark.parametrize("num_splits", [1, 2, 7, 256])
def test_forced_splits_are_taken(num_splits):
    plan = plan_decode(sparse=True, batch=2, s_q=1, h_q=128, max_keys=512, num_sms=SMS, num_splits=num_splits)
    assert plan.num_splits == num_splits


def test_one_request_fills_the_card_and_many_are_not_split():
    alone = plan_decode(sparse=False, batch=1, s_q=1, h_q=128, max_keys=131072, num_sms=SMS)
    assert 0.9 * SMS <= alone.ctas <= SMS
    many = plan_decode(sparse=True, batch=128, s_q=2, h_q=128, max_keys=2048, num_sms=SMS)
    assert many.num_splits == 1


@pytest.mark.parametrize(("batch", "heads", "splits"), [(1, 32, 32), (2, 32, 16), (4, 64, 16), (8, 64, 8), (16, 64, 4)])
def test_small_batches_get_what_was_measured_fastest(batch, heads, splits):
    """Plans took 13.0, 13.7, 15.9, 20.9 and 29.9 us; clusters take 19 to 33% longer (docs/maintainers/crossover.md)."""
    plan = plan_decode(sparse=True, batch=batch, s_q=1, h_q=128, max_keys=2048, num_sms=SMS)
    assert isinstance(plan.spec, MlaDecodeSpec)
    assert (plan.spec.heads, plan.num_splits) == (heads, splits)
    assert plan.spec.merge_lanes == (128 if batch <= 4 else 32)


@pytest.mark.parametrize(
    ("blocks", "keys", "heads"),
    [
        (1, 512, 32),  # measured with 32 and with 64 heads: 12.9, 15.1 us
        (12, 512, 32),  # 15.8, 17.7
        (2, 2048, 32),  # 15.0, 16.9
        (6, 2048, 32),  # 18.4, 19.4
        (8, 2048, 64),  # 20.3, 20.0
        (2, 8192, 32),  # 20.6, 22.0, dense
        (2, 16384, 64),  # 27.0, 26.3, dense
        (6, 4096, 64),  # 23.1, 22.0
    ],
    ids=str,
)
def test_64_heads_are_cut_in_two_over_few_keys(blocks, keys, heads):
    plan = plan_decode(sparse=True, batch=blocks, s_q=1, h_q=64, max_keys=keys, num_sms=SMS)
    assert plan.spec.heads == heads


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("h_q", [1, 64, 65, 128])
def test_a_forced_exchange_is_taken_by_whole_clusters(exchange, h_q):
    plan = plan_decode(sparse=True, batch=2, s_q=3, h_q=h_q, max_keys=512, num_sms=SMS, num_splits=2, exchange=exchange)
    if exchange == "none":
        assert isinstance(plan.spec, MlaDecodeSpec)
    else:
        assert isinstance(plan.spec, MlaCrossoverSpec) and plan.spec in shipped_crossover_specs()
        assert plan.spec.exchange == exchange
    assert plan.ctas % plan.spec.cluster == 0
    assert plan.spec.head_blocks(h_q) >= -(-h_q // WIDE)
    assert plan.ctas == 2 * 3 * 2 * plan.spec.head_blocks(h_q)


def test_what_checks_let_pass_can_be_built():
    """The error of a spec is about the spec, whereas callers need errors about their arguments, which checks give."""
    pairs = [Formats(FORMATS[name], None) for name in FORMATS]
    pairs += [Formats(FORMATS[one], FORMATS[other]) for one, other in PAIRS]
    refused = set()
    for formats, exchange in itertools.product(pairs, (None, *EXCHANGES)):
        names = [kind.name for kind in formats if kind is not None]
        try:
            check_exchange(formats, exchange)
        except ValueError as error:
            refused.add(tuple(names))
            assert str(error).startswith("exchange: got") and "Spec" not in str(error)
            continue
        extra = {"extra_format": names[1], "extra_keys": 640} if len(names) > 1 else {}
        for h_q, splits, ragged in itertools.product((1, 16, 32, 64, 128), (None, 1, 3), (False, True)):
            plan = plan_decode(
                sparse=True, batch=8, s_q=2, h_q=h_q, max_keys=2048, num_sms=SMS, ragged=ragged, num_splits=splits,
                exchange=exchange, cache_format=names[0], **extra,
            )  # fmt: skip
            assert plan.spec.can_implement() == []
    assert ("v4.1",) in refused and ("v3.2", "v3.2") in refused and ("v3.2",) not in refused


def test_one_of_two_caches_without_keys_keeps_the_roundings_of_two():
    calls: list[dict[str, Any]] = [
        {}, {"of_two": True}, {"extra_format": "v3.2", "extra_keys": 64}, {"cache_format": "v4"}
    ]  # fmt: skip
    specs = [plan_decode(sparse=True, batch=8, s_q=1, h_q=64, max_keys=64, num_sms=SMS, **call).spec for call in calls]
    assert [isinstance(spec, MlaDecodeSpec) and spec.splits_p for spec in specs] == [False, True, True, True]


def test_a_tile_with_masked_keys_takes_the_fast_path():
    """Masked keys read a row of zeros, whose scales have weights that float16 holds."""
    assert 2.0**-14 <= MASKED_SCALE * WEIGHT < 2
