"""The bench of a card without one: its kernels compile, its checks see wrong results, its script prints predictions."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8_mla
from bench import card, card_plots, card_summary, timeline, unit_rates
from bench import gqa as bench_gqa
from bench import mla as bench_mla
from bench.progress import Progress, bar
from bench.timeline import Span
from bench.unit_rates import UnitResult
from bench.units.spec import (
    EVENTS,
    HALF_BYTES,
    ROLES,
    TILE,
    AccumulatorSpec,
    ConvertSpec,
    ExchangeSpec,
    GatherSpec,
    StreamSpec,
    WgmmaSpec,
    shipped_specs,
)
from cute_kernels.budget.rates import H200
from scripts import budget_table, h800_bench
from tests.kit.mla_cases import generator, latent_tokens
from tests.kit.reports import report_of

ROOT = Path(__file__).resolve().parents[2]
WORK = {name: value for name, value in vars(unit_rates).items() if name.endswith("_TURNS")}


# --- the kernels that measure units


@pytest.mark.anywhere
@pytest.mark.parametrize("spec", shipped_specs(), ids=repr)
def test_unit_kernels_compile_without_spills(spec: Any) -> None:
    found = report_of(spec)
    assert spec.can_implement() == []
    assert found.problems(spec.expected) == []


def test_the_loops_of_wgmma_are_what_they_are_called() -> None:
    tiles = {spec: report_of(spec).count("HGMMA") for spec in shipped_specs() if isinstance(spec, WgmmaSpec)}
    for spec, count in tiles.items():
        assert count == {"qk": 36, "pv": 8, "seesaw": 44}[spec.schedule]
    stores = [report_of(WgmmaSpec(storing=storing)).count("STS.128") for storing in (False, True)]
    assert stores == [0, 72], "two tiles of 576 columns, 36 pieces a thread"


def test_without_trace_no_clock_but_that_of_the_loop_is_read() -> None:
    plain, traced = report_of(GatherSpec()), report_of(GatherSpec(trace=True))
    assert plain.count("CS2R") + 8 < traced.count("CS2R")
    assert plain.count("STG") + 8 < traced.count("STG")


@pytest.mark.parametrize(
    "spec, reason",
    [
        (ConvertSpec("slowly"), "how is slowly; known are scaled, exact"),
        (ExchangeSpec("mail"), "how is mail; known are async, bulk"),
        (GatherSpec(rows=16), "rows is 16; it is 32 or 64"),
        (GatherSpec(rows=64, depth=2), "128 rows in flight; registers hold 32 or 64"),
        (WgmmaSpec("chain"), "schedule is chain; known are qk, pv, seesaw"),
        (WgmmaSpec(warpgroups=3), "warpgroups is 3; it is 1 or 2"),
    ],
)
def test_what_cannot_be_built_says_why(spec: Any, reason: str) -> None:
    assert reason in spec.can_implement()


def test_flops_of_the_schedules() -> None:
    """64 heads, tiles of 64 tokens: two warpgroups in the seesaw do two tiles a turn."""
    assert WgmmaSpec("seesaw", 2).flops == 2 * 64 * 64 * (576 + 512) * 2
    assert WgmmaSpec("qk", 1).flops == 64 * 64 * 576 * 2
    assert WgmmaSpec("pv", 1).flops == 2 * 64 * 64 * 256 * 2


# --- their checks, with kernels in torch in their place


def convert_kernel(how: str) -> Any:
    def run(rows: torch.Tensor, out: torch.Tensor, cycles: torch.Tensor, turns: int) -> None:
        codes = rows[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
        scales = rows[:, 512:528].contiguous().view(torch.float32)
        if how == "exact":
            scales = torch.exp2(torch.floor(torch.log2(scales)))
        out[..., :512] = (codes * scales.unsqueeze(-1)).view(-1, 512).bfloat16()
        out[..., 512:] = rows[:, 528:].contiguous().view(torch.bfloat16)
        cycles.fill_(round(21.4 * turns * TILE))

    return run


def exchange_kernel(sent: torch.Tensor, received: torch.Tensor, cycles: torch.Tensor, turns: int) -> None:
    for cta in range(len(sent)):
        received[cta] = sent[cta ^ 1]
    cycles.fill_(turns * HALF_BYTES // 16)


def gather_kernel(spec: GatherSpec) -> Any:
    def run(cache: Any, index: Any, out: Any, cycles: Any, times: Any, turns: int) -> None:
        for cta in range(len(out)):
            rows = index[cta // 2, (turns - 1) * TILE : turns * TILE].long()
            tile = fp8_mla.unpack(cache[rows])
            out[cta] = tile if spec.rows == TILE else tile[cta % 2 * 32 :][:32]
        cycles.fill_(round(turns * spec.rows * (21.4 + 1312 / spec.in_flight)))

    return run


def wgmma_kernel(spec: WgmmaSpec) -> Any:
    def run(q: Any, tiles: Any, s: Any, o: Any, cycles: Any, p: float, turns: int) -> None:
        for tile in range(spec.warpgroups):
            s[:, tile] = q.float() @ tiles[tile].float().T
            columns = slice(256 * tile, 256 * tile + 256)
            o[..., columns] = turns * p * tiles[..., columns].float().sum(dim=(0, 1))
        cycles.fill_(spec.flops * turns // 4096)

    return run


def stream_kernel(tiles: torch.Tensor, sums: torch.Tensor) -> None:
    sums.zero_()
    sums[1, 5] = int(tiles.sum(dtype=torch.int64).add(2**31) % 2**32 - 2**31)


def accumulator_kernel(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor) -> None:
    sums.copy_(a.view(torch.float8_e4m3fn).double() @ b.view(torch.float8_e4m3fn).double().T)


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**WORK, "GATHER_TURNS": 4}.items():
        monkeypatch.setattr(unit_rates, name, value)
    monkeypatch.setattr(unit_rates.timing, "time_eager", lambda call, runs: call() or 1e-6)


def right_results() -> list[UnitResult]:
    kernels: list[tuple[Any, Any]] = [
        *((ConvertSpec(how), convert_kernel(how)) for how in ("scaled", "exact")),
        *((ExchangeSpec(how), exchange_kernel) for how in ("async", "bulk")),
        *((spec, gather_kernel(spec)) for spec in (GatherSpec(64), GatherSpec(32), GatherSpec(32, 2))),
        *((spec, wgmma_kernel(spec)) for spec in (WgmmaSpec("qk", 1), WgmmaSpec("pv", 2), WgmmaSpec("seesaw", 2))),
        (StreamSpec(), stream_kernel),
        (AccumulatorSpec(), accumulator_kernel),
    ]
    return [unit_rates.measure(spec, kernel, "cpu") for spec, kernel in kernels]


@pytest.mark.usefixtures("short_turns")
def test_right_results_become_rates() -> None:
    results = right_results()
    assert [result.problem for result in results] == [""] * len(results)
    ceilings = {"read_GBps": 4000.0, "copy_GBps": 4100.0, "bf16_gemm_TFLOPs": 700.0}
    rates = H200.measured(unit_rates.figures_from(results, ceilings))
    assert rates.conversion_cycles(512) == pytest.approx(21.4, rel=1e-3)
    assert rates.dsm_async_bytes == rates.dsm_bulk_bytes == pytest.approx(16.0)
    assert rates.tensor_flops == pytest.approx(4096)
    assert rates.row_cycles == pytest.approx(1312, rel=1e-2)
    assert (rates.read_gbps, rates.copy_gbps, rates.gemm_tflops) == (4000, 4100, 700)
    assert "16 bytes per clock" in str(results[2])
    assert json.loads(json.dumps([result.as_record() for result in results]))[0]["figures"]


def spoil(kernel: Any, place: int) -> Any:
    """The same kernel with one value of one result changed."""

    def run(*arguments: Any) -> None:
        kernel(*arguments)
        arguments[place].view(-1)[100] += 1

    return run


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize(
    "spec, kernel, place",
    [
        (ConvertSpec(), convert_kernel("scaled"), 1),
        (ConvertSpec(), convert_kernel("exact"), None),
        (ConvertSpec("exact"), convert_kernel("scaled"), None),
        (ExchangeSpec(), exchange_kernel, 1),
        (GatherSpec(), gather_kernel(GatherSpec()), 2),
        (WgmmaSpec(), wgmma_kernel(WgmmaSpec()), 2),
        (WgmmaSpec(), wgmma_kernel(WgmmaSpec()), 3),
        (WgmmaSpec(), wgmma_kernel(WgmmaSpec(warpgroups=1)), None),
        (WgmmaSpec(), lambda *arguments: None, None),
        (ExchangeSpec(), lambda *arguments: None, None),
        (StreamSpec(), stream_kernel, 1),
        (StreamSpec(), lambda *arguments: None, None),
        (AccumulatorSpec(), accumulator_kernel, 2),
        (AccumulatorSpec(), lambda *arguments: None, None),
    ],
)
def test_a_wrong_result_gives_no_rate(spec: Any, kernel: Any, place: int | None) -> None:
    found = unit_rates.measure(spec, kernel if place is None else spoil(kernel, place), "cpu")
    assert found.problem and "WRONG" in str(found)
    assert unit_rates.figures_from([found], {}) == {}
    assert "figures" not in found.as_record()


def test_what_a_conversion_must_give() -> None:
    rows = latent_tokens(100, generator(3), scales="arbitrary")
    assert torch.equal(unit_rates.converted(rows), fp8_mla.unpack(rows))
    powers = latent_tokens(100, generator(3), scales="power_of_two")
    assert torch.equal(unit_rates.converted(powers, "exact"), unit_rates.converted(powers))
    assert not torch.equal(unit_rates.converted(rows, "exact"), unit_rates.converted(rows))


def test_names_select_units() -> None:
    specs = unit_rates.selected(lambda name: True)
    names = [unit_rates.name_of(spec) for spec in specs]
    assert len(set(names)) == len(names) == len(shipped_specs()) - 1, "all but the traced one, each by its own name"
    assert unit_rates.selected(lambda name: "exchange" in name) == [ExchangeSpec("async"), ExchangeSpec("bulk")]


# --- cases


def test_the_published_cases_are_there() -> None:
    sparse = {(b.batch, b.h_q, b.s_q, b.keys) for b in card.MLA_CASES if b.mode == "sparse"}
    assert {(128, 128, 2, 2048), (128, 128, 2, 32768), (1, 128, 1, 2048), (128, 64, 1, 2048)} <= sparse
    assert any(bench.mode == "dense" for bench in card.MLA_CASES)
    assert len({bench.name for bench in card.MLA_CASES}) == len(card.MLA_CASES)
    assert len(card.GQA_CASES) > 30 and {bench.kv_dtype for bench in card.GQA_CASES} == {"int8"}


def test_cases_are_selected() -> None:
    mla, gqa = card.select(quick=True, only=None)
    assert 0 < len(mla) < len(card.MLA_CASES) and 0 < len(gqa) < len(card.GQA_CASES)
    mla, gqa = card.select(quick=False, only="topk 32768")
    assert [bench.keys for bench in mla] == [32768] and gqa == []


def some_cases() -> tuple[list[dict[str, Any]], list[Any], list[Any]]:
    """Every selected case as if it took 10% longer than predicted; one failed."""
    mla = [bench for bench in card.MLA_CASES if bench.batch != 4]
    gqa = [bench for bench in card.GQA_CASES if bench.batch == 64]
    cases: list[dict[str, Any]] = []
    benches: list[Any] = [*mla, *gqa]
    for bench in benches:
        room: Any = bench_mla if isinstance(bench, bench_mla.DecodeBench) else bench_gqa
        us = 1.1 * room.predict(bench).us
        speeds = {"TFLOPs": bench.flops / us / 1e6, "GBps": bench.bytes_moved / us / 1e3, "sm_mhz": 1980}
        peers = {"flash_mla": {"us": us * 0.9, "ratio": 0.9}} if room is bench_mla else {}
        cases.append({**bench.key, "us": us, **speeds, "cycles_per_token": 110.0, "peers": peers})
    cases[2] = {**mla[2].key, "failed": "wrong"}
    return cases, mla, gqa


def test_predictions_stand_beside_cases() -> None:
    cases, mla, gqa = some_cases()
    found: list[dict[str, Any]] = card.predicted(cases, mla, gqa, H200)
    assert found[2] == cases[2], "a failed case has no time and gets none"
    for case in (*found[:2], *found[3:]):
        assert case["model_error"] == pytest.approx(1 / 1.1 - 1, abs=1e-3)
        assert case["binds"]
    assert found[0]["predicted_cycles_per_token"] == bench_mla.predicted_cycles(mla[0])
    table = card.case_table(found)
    assert len(table) == len(found) + 1 and {len(row) for row in table} == {len(table[0])}
    assert table[3][1] == "FAILED" and table[1][-3:] == ["-9.1%", "latency", "0.9"]
    assert table[-1][-2] == "HBM"
    with pytest.raises(ValueError):
        card.predicted(cases[1:], mla, gqa, H200)


def test_the_clock_is_that_of_the_run() -> None:
    clocks: list[dict[str, Any]] = [{"op": "mla_fp8_decode", "sm_mhz_rested": mhz} for mhz in (1700, 1980, 1800)]
    others: list[dict[str, Any]] = [
        {"op": "gqa_decode", "sm_mhz_rested": 1000},
        {"op": "mla_fp8_decode", "failed": "wrong"},
    ]
    assert card.at_clock_of(H200, [*clocks, *others]).sm_mhz == 1800
    assert card.at_clock_of(H200, others) == H200


# --- the script


def test_without_a_gpu_it_prints_predictions(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "run_h800_bench.sh"), "--out", str(tmp_path / "out"), "--trace"]
    code = "import torch, sys; sys.exit(torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", code]).returncode:
        pytest.skip("there is a GPU, and the script would measure it")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == h800_bench.NO_GPU
    assert "NVIDIA H200" in lines[0]
    published = [line.split() for line in lines if line.startswith("published estimate")]
    assert ["34.0", "50.0"] == [cell for cell in published[0] if cell[0].isdigit()][:2]
    assert ["34.0", "25.0"] == [cell for cell in published[1] if cell[0].isdigit()][:2]
    assert any(line.startswith("crossover of bf16 by st.async") and "prediction" in line for line in lines)
    assert not (tmp_path / "out").exists(), "nothing was measured, so nothing is written"


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    for name in ("python3", "python"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    checkout = tmp_path / "checkout" / "scripts"
    checkout.mkdir(parents=True)
    script = checkout / "run_h800_bench.sh"
    script.write_text((ROOT / "scripts" / "run_h800_bench.sh").read_text())
    done = subprocess.run(
        ["/bin/bash", str(script)], capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert done.returncode == 1
    assert "No Python with torch and einops was found" in done.stderr


def test_ten_lines_say_what_to_expect() -> None:
    machine = {"card": "NVIDIA H100", "driver": "1", "torch": "2", "cutlass_dsl": "4"}
    ceilings = {"read_GBps": 3000.0, "sum_GBps": 2900.0, "tma_GBps": 3000.0, "copy_GBps": 2800.0}
    ceilings["bf16_gemm_TFLOPs"] = 700.0
    mla = {"op": "mla_fp8_decode", "mode": "sparse", "batch": 128, "h_q": 128, "s_q": 2, "topk": 2048}
    times = {"us": 300.0, "us_sustained": 340.0, "sm_mhz": 1650, "sm_mhz_rested": 1980, "watts": 698}
    peers = {"flash_mla": {"us": 420.0, "ratio": 1.4}}
    first = {**mla, **times, "TFLOPs": 490.0, "GBps": 1400.0, "binds": "tensor core", "peers": peers}
    failed = {"op": "gqa_decode", "kv_dtype": "int8", "batch": 64, "s_k": 8192, "failed": "wrong"}
    lines = card_summary.summary(machine, ceilings, [first, failed])
    assert len(lines) == 10
    assert lines[1] == "ceilings: reads 3000 GB/s (torch.sum 2900, TMA 3000, copy 2800), bf16 products 700 TFLOP/s"
    assert lines[2].startswith("clock: 1980 MHz after a rest; under load 1650 MHz and 698 W at least (mla_fp8_decode)")
    assert lines[3] == (
        "MLA sparse, 128 x 128 x 2, topk 2048: 300 us, 340 under load; 70% of products; tensor core binds; "
        "FlashMLA takes 1.40 x"
    )
    assert lines[4].endswith("did not run") and lines[5] == "GQA INT8, 64 x 8192: FAILED, wrong"
    assert "not known" in card_summary.summary(machine, ceilings, [])[2]


def test_standard_cases_are_cases_that_run() -> None:
    keys = [*(bench.key for bench in card.MLA_CASES), *(bench.key for bench in card.GQA_CASES)]
    names = [name for name, _ in card.others(None)]
    assert len(names) == 4 and card.others("nothing") == []
    for standard in card_summary.STANDARD[:3]:
        assert card_summary.find(standard, keys) is not None, standard.name


def test_progress_is_a_bar_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert bar(0, 4) == "[........................] 0/4" and bar(3, 4) == "[##################......] 3/4"
    with Progress().step("a case", 1, 2):
        pass
    said = capsys.readouterr()
    assert said.out == "" and "[############............] 1/2  a case" in said.err


def test_output_goes_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on another card says so, and a partial one does not overwrite a whole one."""
    cases, mla, gqa = some_cases()
    machine = {"card": "NVIDIA H100 80GB HBM3", "driver": "1", "torch": "2", "cutlass_dsl": "4", "date": "2026-01-01"}
    ceilings = {"read_GBps": 3000.0, "copy_GBps": 2900.0, "bf16_gemm_TFLOPs": 700.0}
    monkeypatch.setattr(card.records, "machine", lambda: machine)
    monkeypatch.setattr(card, "measure_ceilings", lambda: ceilings)
    monkeypatch.setattr(card.unit_rates, "run_units", lambda specs, say: [UnitResult("u", {"x": 1.0})])
    monkeypatch.setattr(card, "select", lambda quick, only: (mla, gqa))
    monkeypatch.setattr(card, "precompile", lambda specs: None)
    unpredicted = [{"op": "mla_fp8_append", "tokens": 65536, "us": 33.0, "copy_fraction": 0.84}]
    monkeypatch.setattr(card, "others", lambda only: [("mla_fp8_append", None)])
    monkeypatch.setattr(card, "run_benches", lambda benches, ceilings, progress: [*cases, *unpredicted])
    monkeypatch.setattr(card.bench_mla, "import_peer", lambda: "none here")
    monkeypatch.setattr(card, "ROOT", tmp_path)
    sizes = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    options: dict[str, Any] = {"quick": False, "only": None, "no_units": False, "trace": False, "out": None}
    for changed, place in (({}, "results"), ({"quick": True}, "build"), ({"no_units": True}, "build")):
        status = card.measure(SimpleNamespace(**{**options, **changed}))
        assert status == 1, "a case failed"
        record = json.loads((tmp_path / place / "bench_h100" / "bench.json").read_text())
        assert record["card"] == record["rates"]["card"] == machine["card"]
        assert record["rates"]["read_gbps"] == 3000 and "conversion" in record["rates_not_measured"]
        assert len(record["cases"]) == len(cases) + 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("NVIDIA H100") and lines[10] == "" and "Cycles per token" in "\n".join(lines[11:])
        assert lines[6] == "MLA append, 65,536 tokens: 33 us; 84% of copies; HBM binds"
        assert record["units"] == ([] if changed.get("no_units") else [{"name": "u", "figures": {"x": 1.0}}])


# --- plots


def test_plots_are_drawn_and_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases, mla, gqa = some_cases()
    cases = card.predicted(cases, mla, gqa, H200)
    names = ["roofline.svg", "budget.svg", "speed.svg"]
    for folder in ("a", "b"):
        assert card_plots.draw(cases, H200, tmp_path / folder) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert "NVIDIA H200" in (tmp_path / "a" / name).read_text()
    text = (tmp_path / "a" / "budget.svg").read_text()
    for unit in ("tensor core", "conversion", "gather", "DSM", "HBM", "latency", "measured"):
        assert unit in text
    assert "FlashMLA" in (tmp_path / "a" / "speed.svg").read_text()
    # a failed run has nothing but the budget to show
    assert card_plots.draw([{**mla[0].key, "failed": "wrong"}], H200, tmp_path / "c") == ["budget.svg"]


# --- the timeline


def some_times() -> list[Any]:
    """One CTA with two roles: 1000 clocks from 5000 on are 500 ns."""
    producer = [[5000, 5100], [5100, 5400], [5400, 5420], [5420, 5700]]
    consumer = [[5010, 5400], [5400, 5410], [5410, 5700], [0, 0]]
    return [[producer, consumer, [[9000, 5000], [9500, 6000], [0, 0], [0, 0]]]]


def test_timestamps_become_spans() -> None:
    found = timeline.spans(some_times(), 0, ROLES, EVENTS)
    assert len(found) == 7, "a step without timestamps is none"
    assert found[0] == Span("producer", "wait for a stage", 0.0, 50.0)
    assert Span("consumer", "release", 200.0, 205.0) in found
    assert [span.start_ns for span in found] == sorted(span.start_ns for span in found)
    assert timeline.busy(found)["producer", "gather and convert"] == pytest.approx(290)


@pytest.mark.parametrize(
    "role, step, value, said",
    [
        (2, 1, [0, 0], "CTA 0 has no anchors"),
        (0, 1, [5400, 5100], "step 1 of producer is from 5400 to 5100"),
        (1, 0, [4000, 5400], "step 0 of consumer is from 4000"),
    ],
)
def test_timestamps_that_cannot_be_are_refused(role: int, step: int, value: list[int], said: str) -> None:
    times = some_times()
    times[0][role][step] = value
    with pytest.raises(ValueError, match=said):
        timeline.spans(times, 0, ROLES, EVENTS)


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = timeline.spans(some_times(), 0, ROLES, EVENTS)
    assert timeline.draw(found, tmp_path / "trace.svg", "One CTA")
    text = (tmp_path / "trace.svg").read_text()
    for name in (*ROLES, *(event for events in EVENTS for event in events), "One CTA", "ns since"):
        assert name in text
    assert not timeline.draw([], tmp_path / "none.svg", "") and not (tmp_path / "none.svg").exists()


# --- the tables


def test_the_tables_tell_predictions_from_what_is_built() -> None:
    rows = budget_table.mla_table()
    states = {row[0]: row[1] for row in rows[1:]}
    assert list(states.values()).count("built") == 3
    assert {name for name, state in states.items() if state == "prediction"} >= {
        "crossover of bf16 by st.async",
        "crossover of bf16 by bulk copy",
        "crossover of raw bytes by bulk copy",
    }
    assert {len(row) for row in rows} == {len(rows[0])}


def test_a_slower_card_has_larger_figures() -> None:
    slower = dataclasses.replace(H200, gemm_tflops=600, card="another")
    fast, slow = budget_table.speed_table(H200), budget_table.speed_table(slower)
    assert fast[1] == slow[1], "what waits does not depend on it"
    assert fast[4] != slow[4]
