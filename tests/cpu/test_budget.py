"""The cycle budget gives the published estimate, behaves as a budget must, and fits recorded times."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from bench import budget as predictions
from bench import gqa, records
from bench.mla import MlaCase
from cute_kernels.budget import model, variants
from cute_kernels.budget.model import MlaLaunch, budget, calibrate, predict_gqa, predict_mla
from cute_kernels.budget.rates import H200, PUBLISHED_H800, Rates
from cute_kernels.budget.variants import GQA_VARIANTS, MLA_BUILT, MLA_VARIANTS, GqaVariant, MlaVariant, Unit
from tests.kit.kernel_place import printed

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.15
"""Largest relative difference between a prediction and a recorded time."""
CARDS = ("h200", "h100")
FAR: dict[str, list[str]] = {
    "h200": [
        "mla_fp8_decode dense 1x16x1 s_k 131072",
        "gqa_decode bf16 none paged_NHD_64 32x64x1 s_k 8192 d 64 window 128",
    ],
    "h100": [
        "mla_fp8_decode sparse 128x32x1 topk 2048",
        "mla_fp8_decode sparse 128x24x1 topk 2048",
        "mla_fp8_decode sparse 128x16x1 topk 2048",
        "mla_fp8_decode dense 1x16x1 s_k 131072",
        "gqa_decode bf16 none paged_NHD_64 32x64x1 s_k 8192 d 64 window 128",
    ],
}
"""For each card, the cases that are slower or faster than the budget by more than `LIMIT`."""
MOST = {"h200": 0.05, "h100": 0.11}
"""Three of four predictions are at least this close: 0.101 on the H100. The constants come from an H200."""


@pytest.fixture(scope="module", params=CARDS)
def card(request: pytest.FixtureRequest) -> str:
    """Every card with a record. The constants come from an H200, recorded on another day."""
    return request.param


@pytest.fixture(scope="module")
def record(card: str) -> dict[str, Any]:
    return records.read(ROOT / "results" / f"{card}.jsonl")


# --- the published estimate: 34 cycles of products, 50 of conversion, 25 with the crossover


def test_the_products_of_64_heads_take_34_cycles() -> None:
    assert PUBLISHED_H800.tensor_flops == pytest.approx(4096, rel=1e-3)
    cycles = variants.OVERLAPPED.demands(PUBLISHED_H800)[Unit.TENSOR]
    assert cycles == pytest.approx(64 * (576 + 512) * 2 / 4096, rel=1e-3)
    assert round(cycles) == 34


def test_converting_a_token_takes_50_cycles_and_is_what_binds() -> None:
    found = budget(variants.OVERLAPPED, PUBLISHED_H800)
    assert found.demands[Unit.CONVERSION] == pytest.approx((1 / 64 + 1 / 64 + 1 / 16 + 1 / 256) * 512) == 50
    assert (found.binds, found.cycles) == (Unit.CONVERSION, 50)


@pytest.mark.parametrize("variant", [variants.CROSSOVER_ASYNC, variants.CROSSOVER_BULK], ids=str)
def test_the_crossover_halves_it_to_25_and_the_products_bind(variant: MlaVariant) -> None:
    found = budget(variant, PUBLISHED_H800, readers=2)
    assert found.demands[Unit.CONVERSION] == 25
    assert found.demands[Unit.DSM] == 0, "the published estimate takes the exchange as free"
    assert found.binds in (Unit.TENSOR, Unit.POWER)
    assert round(found.cycles) == 34


# --- what was measured on an H200 comes out of the same functions


def test_measured_limits() -> None:
    demands = variants.CROSSOVER_ASYNC.demands(H200, readers=2)
    assert round(demands[Unit.DSM]) == 35
    assert variants.CROSSOVER_BULK.demands(H200, readers=2)[Unit.DSM] == pytest.approx(30, abs=0.1)
    assert 17 <= variants.CROSSOVER_RAW.demands(H200, readers=2)[Unit.DSM] <= 20
    plain = variants.TURNS.demands(H200)
    assert plain[Unit.CONVERSION] == pytest.approx(21.4)
    assert plain[Unit.SMEM] == pytest.approx(37, abs=0.5)
    assert plain[Unit.HBM] == pytest.approx(39, abs=1)
    # a producer alone takes 63.4 clocks a row with 32 rows in flight, 42.9 with 64
    for rows_in_flight, cycles in ((32, 63.4), (64, 42.9)):
        demand = dataclasses.replace(variants.TURNS, rows_in_flight=rows_in_flight).demands(H200)
        assert demand[Unit.CONVERSION] + demand[Unit.GATHER] == pytest.approx(cycles, rel=0.03)
    # recorded for 128 x 128 x 2: 290 us at 1980 MHz are 72 cycles a token
    assert model.spread_cycles(290.128, 1980, 128 * 2 * 2048 * 2, 132) == pytest.approx(72.3, abs=0.05)
    assert str(Unit.HBM) == Unit.HBM.value


# --- properties


@pytest.mark.parametrize("rates", [H200, PUBLISHED_H800], ids=lambda rates: rates.card)
@pytest.mark.parametrize("variant", [*MLA_VARIANTS, *GQA_VARIANTS], ids=lambda variant: variant.name)
def test_the_unit_that_binds_is_in_the_slowest_chain(variant: Any, rates: Rates) -> None:
    found = budget(variant, rates, readers=2)
    chain = next(chain for chain in variant.chains if found.binds in chain)
    assert found.cycles == pytest.approx(sum(found.demands[unit] for unit in chain))
    assert found.demands[found.binds] == max(found.demands[unit] for unit in chain)
    for other in variant.chains:
        assert sum(found.demands[unit] for unit in other) <= found.cycles
    assert {unit for chain in variant.chains for unit in chain} == set(found.demands)
    assert all(cycles >= 0 and math.isfinite(cycles) for cycles in found.demands.values())


LAUNCH = MlaLaunch(ctas=256, tiles=32, splits=1, rows=128 * 128, readers=2)


def test_a_small_call_is_bound_by_latency_and_a_large_one_by_its_tiles() -> None:
    small = dataclasses.replace(LAUNCH, ctas=64, tiles=1, splits=32)
    assert predict_mla(small, variants.OVERLAPPED).binds is Unit.LATENCY
    assert predict_mla(LAUNCH, variants.OVERLAPPED).binds is Unit.POWER
    assert predict_mla(LAUNCH).binds is Unit.TENSOR, "today's kernel waits for almost as long as its products take"
    assert predict_gqa(2e6, clustered=True).binds is Unit.LATENCY
    assert predict_gqa(1e9, clustered=False).binds is Unit.HBM


@pytest.mark.parametrize(
    "scales, extra", [("none", 0), ("per_head", 0), ("per_token", 4), ("per_group_32", 16), ("per_group_64", 8)]
)
def test_bytes_of_scales(scales: str, extra: int) -> None:
    assert GqaVariant(scales=scales).bytes_per_token == 256 + extra


def test_a_cluster_needs_two_ctas_that_read_the_same() -> None:
    with pytest.raises(ValueError, match="readers: got 1; crossover of bf16 by st.async shares rows between 2 CTAs"):
        variants.CROSSOVER_ASYNC.demands(H200, readers=1)


# --- rates


def test_measured_rates_take_the_place_of_others() -> None:
    found = H200.measured({"read_gbps": 3000.0, "conversion": [24.0], "card": "a card"})
    assert (found.read_gbps, found.conversion, found.card) == (3000.0, (24.0,), "a card")
    assert dataclasses.replace(found, read_gbps=4323, conversion=H200.conversion, card=H200.card) == H200


@pytest.mark.parametrize(
    "figures, said",
    [
        ({"reads": 1.0}, "figures: got reads; known are card, "),
        ({"read_gbps": 0}, "read_gbps: got 0, needs a positive number"),
        ({"read_gbps": None}, "read_gbps: got None"),
        ({"read_gbps": float("nan")}, "read_gbps: got nan"),
        ({"conversion": []}, r"conversion: got \(\)"),
        ({"conversion": [24, -1]}, r"conversion: got \(24, -1\)"),
        ({"row_cycles": -1}, "row_cycles: got -1"),
    ],
)
def test_wrong_rates_are_refused(figures: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        H200.measured(figures)


# --- calibration


def test_calibration_finds_what_a_prediction_was_made_from() -> None:
    short = dataclasses.replace(LAUNCH, ctas=1024, tiles=8)
    kernel = dataclasses.replace(MLA_BUILT, latency_cycles=50.0, cta_cycles=9000.0)
    points = [(launch, predict_mla(launch, kernel).us) for launch in (LAUNCH, short)]
    assert calibrate(points[0], points[1]) == pytest.approx((50, 9000))
    with pytest.raises(ValueError, match="long: its CTAs have 512 tokens, needs more than the 2048"):
        calibrate(points[1], points[0])
    with pytest.raises(ValueError, match="splits: got 2"):
        calibrate((dataclasses.replace(LAUNCH, splits=2), 1.0), points[1])


def test_parts_of_pages_are_waited_for_less_than_rows_of_a_list() -> None:
    """HBM-bound cases are an exception."""
    rows = dataclasses.replace(LAUNCH, readers=1)
    pages = dataclasses.replace(rows, pages=True)
    for variant in (MLA_BUILT, variants.MLA_HALF):
        cycles = predict_mla(rows, variant).cycles - predict_mla(pages, variant).cycles
        assert cycles == pytest.approx(variant.page_cycles) and cycles > 0
    assert predict_mla(pages, variants.MLA_NARROW).binds is Unit.HBM
    assert predict_mla(rows, variants.TURNS) == predict_mla(pages, variants.TURNS)


def test_ragged_lengths_have_no_prediction() -> None:
    ragged = MlaCase("dense", 64, 128, 1, 8192, ragged=True)
    with pytest.raises(ValueError, match="ragged, needs requests of one length"):
        predictions.predict_mla(ragged)
    assert 0.4 < ragged.flops / dataclasses.replace(ragged, ragged=False).flops < 0.6


# --- against the record


def off(predicted: float, case: dict[str, Any]) -> float:
    """Relative distance from the median, or from the range p10..p90 if that is wider than the limit.

    A case that takes 429 us in one replay and 510 in the next has no single time to predict.
    """
    us = predictions.measured(case)
    low, high = case["us_p10"] / case["us"] * us, case["us_p90"] / case["us"] * us
    if high - low <= LIMIT * us:
        low = high = us
    nearest = min(max(predicted, low), high)
    return abs(predicted - nearest) / nearest


def predicted_mla_cases(record: dict[str, Any]) -> list[tuple[MlaCase, dict[str, Any]]]:
    """The recorded cases that have a prediction, each with its benchmark."""
    found = [(bench, predictions.find_case(record, bench.key)) for bench in predictions.PREDICTED]
    return [(bench, case) for bench, case in found if case is not None]


def known_to_be_far(card: str, op: str) -> list[str]:
    """The known cases of an operation that are far off. Tests require that the list has no other case."""
    return [name for name in FAR[card] if name.startswith(op)]


def test_every_recorded_mla_case_is_predicted(card: str, record: dict[str, Any]) -> None:
    """The constants were fitted to two cases; cases with dense keys, 16 or 32 heads gave further numbers."""
    cases = predicted_mla_cases(record)
    far = []
    for bench, case in cases:
        predicted = predictions.predict_mla(bench, rates=predictions.rates_of(record)).us
        if off(predicted, case) > LIMIT:
            far.append(bench.name)
    assert len(cases) >= 17 and far == known_to_be_far(card, "mla_fp8_decode"), (
        "if the kernel has changed: python -m bench.budget --calibrate says what to write into variants.py"
    )


def test_the_record_calibrates_to_the_constants(record: dict[str, Any]) -> None:
    latency, cta = predictions.calibrated(record)
    assert latency == pytest.approx(variants.LATENCY_CYCLES, rel=LIMIT)
    assert cta == pytest.approx(variants.CTA_CYCLES, rel=2 * LIMIT), "a difference of two times"
    with pytest.raises(ValueError, match="record: has no time of mla_fp8_decode sparse 128x128x2 topk 2048"):
        predictions.calibrated({"cases": []})


def test_most_cases_are_predicted_much_better(card: str, record: dict[str, Any]) -> None:
    errors = [
        abs(predictions.predict_mla(bench, rates=predictions.rates_of(record)).us / predictions.measured(case) - 1)
        for bench, case in predicted_mla_cases(record)
    ]
    assert sorted(errors)[len(errors) * 3 // 4] < MOST[card]


def test_every_recorded_gqa_case_is_predicted(card: str, record: dict[str, Any]) -> None:
    far, count = [], 0
    for bench in gqa.DECODE_CASES:
        case = predictions.find_case(record, bench.key)
        if case is None:
            continue  # newer than the record
        predicted, count = predictions.predict_gqa(bench, predictions.rates_of(record)).us, count + 1
        if off(predicted, case) > LIMIT:
            far.append(bench.name)
    assert count >= 36 and far == known_to_be_far(card, "gqa_decode")


def test_the_budget_needs_nothing() -> None:
    code = """
import sys
import cute_kernels.budget.model
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "cutlass", "cuda", "numpy", "einops"}))
"""
    assert printed(code).strip() == "[]"
