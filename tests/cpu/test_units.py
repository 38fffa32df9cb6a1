"""The kernels that measure units of a card compile within their budgets, and a wrong result gives no rate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8_mla
from bench import timeline, unit_rates
from bench.units.spec import TILE, ConvertSpec, ExchangeSpec, GatherSpec, shipped_specs
from cute_kernels.budget.rates import H200
from tests.kit import sass


@pytest.mark.anywhere
def test_unit_kernels_compile_within_their_budgets() -> None:
    specs = [*shipped_specs(), timeline.SPEC]
    problems = {
        repr(spec): spec.can_implement() + code.problems(spec.expected)
        for spec, code in zip(specs, sass.reports(specs), strict=True)
    }
    assert problems == dict.fromkeys(problems, [])


# ---- the checks, with kernels in torch in the place of compiled ones


def convert(rows: torch.Tensor, out: torch.Tensor, cycles: torch.Tensor, turns: int) -> None:
    out.copy_(fp8_mla.unpack(rows).expand_as(out))
    cycles.fill_(round(21.4 * turns * TILE))


def exchange(sent: torch.Tensor, received: torch.Tensor, cycles: torch.Tensor, turns: int) -> None:
    received.copy_(sent.flip(0))
    cycles.fill_(turns * TILE * 36)


def gather(cache: torch.Tensor, index: torch.Tensor, out: torch.Tensor, cycles: torch.Tensor, turns: int) -> None:
    rows = out.shape[1]
    tile = fp8_mla.unpack(cache[index[0, (turns - 1) * TILE : turns * TILE].long()])
    out.copy_(tile.expand_as(out) if rows == TILE else tile.view(2, rows, -1))
    cycles.fill_(turns * rows * (22 + 1312 // rows))


KERNELS: list[tuple[Any, Callable[..., None]]] = [
    *((ConvertSpec(), convert), (ExchangeSpec("async"), exchange), (ExchangeSpec("bulk"), exchange)),
    *((GatherSpec(64), gather), (GatherSpec(32), gather)),
]


def test_right_results_become_rates() -> None:
    results = [result for spec, kernel in KERNELS for result in unit_rates.measure(spec, kernel, "cpu")]
    assert [result.problem for result in results] == [""] * len(results)
    ceilings = {"read_GBps": 4000.0, "copy_GBps": 4100.0, "bf16_gemm_TFLOPs": 700.0}
    rates = H200.measured(unit_rates.figures_from(results, ceilings))
    assert rates.conversion_cycles(512) == pytest.approx(21.4, rel=1e-3)
    assert rates.dsm_async_bytes == rates.dsm_bulk_bytes == 16
    assert rates.row_cycles == pytest.approx((1312 // 32 - 1312 // 64) * 64)
    assert (rates.read_gbps, rates.copy_gbps, rates.gemm_tflops) == (4000, 4100, 700)
    lines = {row[0]: row[1:] for row in unit_rates.table([*results, *unit_rates.of_ceilings(ceilings)])}
    assert lines[GatherSpec(64).name + ", HBM"] == ["42.0", "41.9", "-0.2%"]
    assert lines["unit stream, copy"] == ["20.9", "20.0", "-4.1%"]
    assert lines["unit products, 8192 x 8192 x 8192"] == ["52.0", "46.5", "-10.5%"]


@pytest.mark.parametrize("place", [1, None])
@pytest.mark.parametrize(("spec", "kernel"), KERNELS)
def test_a_wrong_result_gives_no_rate(spec: Any, kernel: Callable[..., None], place: int | None) -> None:
    """One value is wrong, or the kernel writes nothing."""

    def spoilt(*arguments: Any) -> None:
        if place is not None:
            kernel(*arguments)
            out = next(a for a in reversed(arguments[:-1]) if isinstance(a, torch.Tensor) and a.is_floating_point())
            out.view(-1)[100] += 1

    for found in unit_rates.measure(spec, spoilt, "cpu"):
        assert found.problem
        assert unit_rates.figures_from([found], {}) == {}
        assert set(found.as_record()) == {"name", "problem"}
        assert unit_rates.table([found])[1][1].startswith("WRONG")
