"""The kernels that measure units of a card compile, a wrong result gives no rate, and timestamps become a timeline."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8_mla
from bench import card, timeline, unit_rates
from bench.timeline import Step
from bench.units.spec import TILE, ConvertSpec, ExchangeSpec, GatherSpec, WgmmaSpec, shipped_specs
from cute_kernels.budget.rates import H200
from cute_kernels.mla.spec import EVENTS, ROLES
from tests.kit import sass


@pytest.mark.anywhere
@pytest.mark.parametrize("spec", [*shipped_specs(), timeline.SPEC], ids=repr)
def test_unit_kernels_compile_within_their_budgets(spec: Any) -> None:
    assert spec.can_implement() == []
    assert sass.report(spec).problems(spec.expected) == []


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


def wgmma(
    q: torch.Tensor, tiles: torch.Tensor, s: torch.Tensor, o: torch.Tensor, cycles: torch.Tensor, p: float, turns: int
) -> None:
    s.copy_((q.float() @ tiles.float().mT).expand_as(s))
    o.copy_((turns * p * tiles[..., :512].float().sum(dim=(0, 1))).expand_as(o))
    cycles.fill_(turns * 2 * TILE * 34)


KERNELS: list[tuple[Any, Callable[..., None]]] = [
    *((ConvertSpec(), convert), (ExchangeSpec("async"), exchange), (ExchangeSpec("bulk"), exchange)),
    *((GatherSpec(64), gather), (GatherSpec(32), gather), (WgmmaSpec(), wgmma)),
]


def test_right_results_become_rates() -> None:
    results = [result for spec, kernel in KERNELS for result in unit_rates.measure(spec, kernel, "cpu")]
    assert [result.problem for result in results] == [""] * len(results)
    ceilings = {"read_GBps": 4000.0, "copy_GBps": 4100.0, "bf16_gemm_TFLOPs": 700.0}
    rates = H200.measured(unit_rates.figures_from(results, ceilings))
    assert rates.conversion_cycles(512) == pytest.approx(21.4, rel=1e-3)
    assert rates.dsm_async_bytes == rates.dsm_bulk_bytes == 16
    assert rates.tensor_flops == pytest.approx(4096)
    assert rates.row_cycles == pytest.approx((1312 // 32 - 1312 // 64) * 64)
    assert (rates.read_gbps, rates.copy_gbps, rates.gemm_tflops) == (4000, 4100, 700)
    lines = {row[0]: row[1:] for row in unit_rates.table([*results, *unit_rates.of_ceilings(ceilings)])}
    assert lines[WgmmaSpec().name] == ["34.0", "34.0", "+0.0%"]
    assert lines[GatherSpec(64).name + ", HBM"] == ["42.0", "41.9", "-0.2%"]
    assert lines["unit stream, copy"] == ["20.9", "20.0", "-4.1%"]
    assert lines["unit products, 8192 x 8192 x 8192"] == ["52.0", "46.5", "-10.5%"]


@pytest.mark.parametrize("place", [1, None])
@pytest.mark.parametrize(("spec", "kernel"), [*KERNELS, (ConvertSpec("exact"), convert)])
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


def test_names_select_units() -> None:
    assert len({spec.name for spec in shipped_specs()}) == len(shipped_specs())
    assert unit_rates.selected(lambda name: "exchange" in name) == [ExchangeSpec("async"), ExchangeSpec("bulk")]


# ---- the timeline


def some_times() -> list[list[list[int]]]:
    """One CTA: 1000 clocks from 5000 on are 500 ns."""
    load = [[5000, 5100], [5100, 5400], [5420, 5700], [5700, 5701], [0, 0]]
    qk = [[5010, 5400], [5400, 5410], [5410, 5700], [0, 0], [0, 0]]
    empty = [[0, 0]] * 5
    return [load, qk, empty, empty, [[9000, 5000], [9500, 6000], *empty[2:]]]


def test_timestamps_become_steps() -> None:
    found = timeline.steps(some_times())
    assert len(found) == 7, "a step without timestamps is none"
    assert found[0] == Step("load", "wait", 0.0, 50.0)
    assert Step("load", "softmax", 210.0, 350.0) in found and Step("load", "wait", 350.0, 350.5) in found
    assert Step("QK", "QK", 200.0, 205.0) in found
    assert timeline.busy(found)[:2] == [
        "trace: load: wait 50 ns, load 150 ns, softmax 140 ns",
        "trace: QK: wait 195 ns, QK 5 ns, store S 145 ns",
    ]


@pytest.mark.parametrize(
    ("role", "step", "value", "said"),
    [
        (4, 1, [0, 0], "without anchors"),
        (0, 1, [5400, 5100], "step 1 of load is from 5400 to 5100"),
        (1, 0, [4000, 5400], "step 0 of QK is from 4000"),
    ],
)
def test_timestamps_that_cannot_be_are_refused(role: int, step: int, value: list[int], said: str) -> None:
    times = some_times()
    times[role][step] = value
    with pytest.raises(ValueError, match=said):
        timeline.steps(times)


def test_the_timeline_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    assert timeline.draw(timeline.steps(some_times()), tmp_path, "a card") == ["trace.svg"]
    text = (tmp_path / "trace.svg").read_text()
    for name in (*ROLES, *(event for events in EVENTS for event in events), "a card", "ns since"):
        assert name in text


# ---- the report


def test_ten_lines_say_what_to_expect() -> None:
    machine = {"card": "NVIDIA H100", "driver": "1", "torch": "2", "cutlass_dsl": "4"}
    ceilings = {"read_GBps": 3000.0, "copy_GBps": 2800.0, "bf16_gemm_TFLOPs": 700.0}
    case = {"op": "mla_fp8_decode", "mode": "sparse", "batch": 128, "h_q": 128, "s_q": 2, "topk": 2048}
    times = {"us": 300.0, "us_sustained": 340.0, "sm_mhz": 1650, "sm_mhz_rested": 1980, "watts": 698}
    first = {**case, **times, "TFLOPs": 490.0, "GBps": 1400.0, "binds": "tensor core"}
    failed = {"op": "gqa_decode", "kv_dtype": "int8", "batch": 64, "s_k": 8192, "failed": "wrong"}
    lines = card.summary(machine, ceilings, [first, failed])
    assert len(lines) == 10
    assert lines[2].startswith("clock: 1980 MHz after a rest; under load 1650 MHz and 698 W at least (mla_fp8_decode)")
    assert lines[3].endswith(": 300 us, 340 under load; 70% of products; tensor core binds")
    assert lines[4].endswith("did not run") and lines[5] == "GQA INT8, 64 x 8192: FAILED, wrong"
