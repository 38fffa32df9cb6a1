"""The kernels that measure one unit of a card each: they compile as meant, and a wrong result gives no rate."""

from typing import Any

import pytest
import torch

from bench import card, unit_rates
from bench.unit_rates import UnitResult
from bench.units.spec import ConvertSpec, shipped_specs
from tests.kit.mla_cases import generator, latent_tokens
from tests.kit.sass import report


@pytest.mark.anywhere
@pytest.mark.parametrize("spec", shipped_specs(), ids=repr)
def test_units_compile_within_their_budget(spec: Any) -> None:
    assert spec.can_implement() == [] and report(spec).problems(spec.expected) == []


def test_a_unit_that_computes_something_else_gives_no_rate() -> None:
    rows = latent_tokens(64, generator(11, "cpu"))

    def kernel(given: torch.Tensor, out: torch.Tensor, cycles: torch.Tensor, turns: int) -> None:
        out.copy_(factor * unit_rates.converted(given).expand_as(out))
        cycles.fill_(21 * 64 * turns)

    factor = 1.0
    right = unit_rates.measure(ConvertSpec(), kernel, "cpu")
    assert right.problem == "" and right.figures == {"cycles per token": 21.0} and len(rows) == 64
    factor = 1.01
    wrong = unit_rates.measure(ConvertSpec(), kernel, "cpu")
    assert "of the values differ" in wrong.problem and "figures" not in wrong.as_record()
    ceilings = {"read_GBps": 3000.0}
    assert unit_rates.figures_from([right, wrong], ceilings) == {"conversion": (512 / 21,), "read_gbps": 3000.0}
    assert unit_rates.figures_from([wrong, UnitResult("x", {}, "y")], {}) == {}


def test_a_case_without_a_time_gets_none_by_its_prediction() -> None:
    found = card.budget.predict_mla(card.budget.LONG)
    assert card.with_prediction({"op": "mla_fp8_decode", "failed": "off"}, found) == {
        "op": "mla_fp8_decode",
        "failed": "off",
    }
    assert card.with_prediction({"us": found.us}, found)["model_error"] == 0
