"""A card's unit rates: runs the kernels of bench/units, checks what they computed, and makes a `Rates` of it.

Each kernel fills every SM with one CTA and counts clock64 around its loop; a figure is the median over CTAs and runs.
A kernel whose result is wrong gives no rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from bench import budget
from bench.units.spec import HALF_BYTES, TILE, ConvertSpec, ExchangeSpec, GatherSpec, UnitSpec, shipped_specs
from cute_kernels.budget.rates import H200
from cute_kernels.runtime.compile import get_kernel
from fp8_mla import NOPE_DIM, QK_DIM, ROPE_OFFSET, SCALE_OFFSET, TOKEN_BYTES
from tests.kit.mla_cases import generator, latent_tokens

RUNS: Final = 7
TURNS: Final = 2000
GATHER_TURNS: Final = 256
PLACES: Final = {"HBM": 1 << 22, "L2": 1 << 14}
"""Rows to gather from: 2.75 GB, which no cache holds, and 11 MB, which L2 does."""
FLOPS: Final = 2 * 64 * (QK_DIM + NOPE_DIM)
"""Of both products of one token with 64 heads."""
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class UnitResult:
    """What one unit showed.

    name       as printed
    cycles     per token, or per row of a gather
    predicted  the same by the rates of an H200; None where the budget has none
    problem    what is wrong with the result; "" where it was right
    rates      fields of `Rates` that follow from it alone
    """

    name: str
    cycles: float = 0.0
    predicted: float | None = None
    problem: str = ""
    rates: Mapping[str, Any] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """For a record; no speed of a kernel that computed something else."""
        if self.problem:
            return {"name": self.name, "problem": self.problem}
        predicted = None if self.predicted is None else round(self.predicted, 2)
        return {"name": self.name, "cycles": round(self.cycles, 2), "predicted_cycles": predicted}


def run_units(specs: Iterable[UnitSpec]) -> list[UnitResult]:
    """Measures each; one that raises is a result with a problem, and the others go on."""
    results = []
    for spec in specs:
        try:
            results += measure(spec)
        except Exception as error:  # whatever broke one unit must not hide the others
            results.append(UnitResult(spec.name, problem=f"{type(error).__name__}: {error}"[:300]))
        torch.cuda.empty_cache()
    return results


def measure(spec: UnitSpec, kernel: Kernel | None = None, device: str = "cuda") -> list[UnitResult]:
    """Runs one kernel and checks it. `kernel`: in place of the compiled one."""
    run = kernel or get_kernel(spec)
    if isinstance(spec, ConvertSpec):
        return [_convert(spec, run, device)]
    if isinstance(spec, ExchangeSpec):
        return [_exchange(spec, run, device)]
    return [_gather(spec, run, device, place) for place in PLACES]


def of_ceilings(ceilings: Mapping[str, float]) -> list[UnitResult]:
    """The units that the whole card shares, in cycles of one SM: a token's bytes for two CTAs, its bf16 products."""

    def read(gbps: float) -> float:
        return H200.measured({"read_gbps": gbps}).read_cycles(TOKEN_BYTES / budget.READERS)

    def multiply(tflops: float) -> float:
        return H200.measured({"gemm_tflops": tflops}).sustained_cycles(FLOPS)

    ways = {
        "unit stream, torch.sum": (read, "sum_GBps", H200.read_gbps),
        "unit stream, TMA": (read, "tma_GBps", H200.read_gbps),
        "unit stream, copy": (read, "copy_GBps", H200.copy_gbps),
        "unit products, 8192 x 8192 x 8192": (multiply, "bf16_gemm_TFLOPs", H200.gemm_tflops),
    }
    return [
        UnitResult(name, cycles(ceilings[ceiling]), cycles(rate))
        for name, (cycles, ceiling, rate) in ways.items()
        if ceiling in ceilings
    ]


def figures_from(results: Sequence[UnitResult], ceilings: Mapping[str, float]) -> dict[str, Any]:
    """What was measured, by fields of `Rates`: for `Rates.measured`. Wrong results and what was left out give none."""
    right = {result.name: result for result in results if not result.problem}
    figures = {rate: ceilings[name] for rate, name in budget.CEILINGS.items() if name in ceilings}
    for result in right.values():
        figures |= result.rates
    # two numbers of rows in flight: what does not depend on them is conversion, the rest is waiting for rows
    few, many = (right.get(f"{GatherSpec(rows).name}, HBM") for rows in (32, 64))
    if few and many and few.cycles > many.cycles:
        figures["row_cycles"] = (few.cycles - many.cycles) / (1 / 32 - 1 / 64)
    return figures


def table(results: Iterable[UnitResult]) -> budget.Table:
    """A line a unit, what is wrong in the place of its cycles. The error is that of the prediction."""
    rows = [["unit", "cycles", "predicted", "error"]]
    for result in results:
        if result.problem:
            rows.append([result.name, f"WRONG: {result.problem[:80]}", "", ""])
        elif result.predicted is None:
            rows.append([result.name, f"{result.cycles:.1f}", "–", ""])
        else:
            error = f"{result.predicted / result.cycles - 1:+.1%}"
            rows.append([result.name, f"{result.cycles:.1f}", f"{result.predicted:.1f}", error])
    return rows


# ---- what the kernels must compute


def converted(rows: torch.Tensor) -> torch.Tensor:
    """(n, 656) bytes as (n, 576) bf16: codes times their scale."""
    codes = rows[:, :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, SCALE_OFFSET:ROPE_OFFSET].contiguous().view(torch.float32)
    nope = (codes * scales.repeat_interleave(NOPE_DIM // scales.shape[1], dim=1)).bfloat16()
    return torch.cat([nope, rows[:, ROPE_OFFSET:].contiguous().view(torch.bfloat16)], dim=1)


def last_tiles(cache: torch.Tensor, index: torch.Tensor, rows: int, ctas: int) -> torch.Tensor:
    """(ctas, rows, 576): what the last turn of the gather leaves. CTAs 2i and 2i + 1 read list i."""
    lists = index[:, (GATHER_TURNS - 1) * TILE : GATHER_TURNS * TILE].long()
    tiles = converted(cache[lists.flatten()]).view(-1, TILE, QK_DIM)
    return tiles.repeat_interleave(2, dim=0)[:ctas] if rows == TILE else tiles.view(-1, rows, QK_DIM)[:ctas]


# ---- runs


def _result(
    name: str, spec: UnitSpec, clocks: float, problem: str, rates: Mapping[str, Any] | None = None
) -> UnitResult:
    if not problem and not clocks > 0:
        problem = f"it took {clocks} clocks"
    return UnitResult(name, clocks, spec.predicted(H200), problem, {} if problem else rates or {})


def _median(run: Callable[[], Any], cycles: torch.Tensor) -> float:
    """Median clocks over CTAs, and over runs after one that warms up."""
    medians = []
    for _ in range(RUNS + 1):
        run()
        medians.append(cycles.double().median().item())
    return statistics.median(medians[1:])


def _sms(device: str) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device != "cpu" else 2


def _differs(got: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = (got != expected).float().mean().item()
    return f"{wrong:.2%} of the values differ" if wrong else ""


def _nan(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _convert(spec: ConvertSpec, kernel: Kernel, device: str) -> UnitResult:
    rows = latent_tokens(TILE, generator(11, device))
    out = _nan(_sms(device), TILE, QK_DIM, device=device)
    cycles = torch.zeros(len(out), dtype=torch.int64, device=device)
    clocks = _median(lambda: kernel(rows, out, cycles, TURNS), cycles) / (TURNS * TILE)
    problem = _differs(out, converted(rows).expand_as(out))
    rates = {"conversion": (NOPE_DIM / clocks,)} if clocks > 0 else {}
    return _result(spec.name, spec, clocks, problem, rates)


def _exchange(spec: ExchangeSpec, kernel: Kernel, device: str) -> UnitResult:
    ctas = _sms(device) // 2 * 2
    sent = torch.randn((ctas, HALF_BYTES // 2), generator=generator(12, device), device=device).bfloat16()
    received = torch.full_like(sent, float("nan"))
    cycles = torch.zeros(ctas, dtype=torch.int64, device=device)
    clocks = _median(lambda: kernel(sent, received, cycles, TURNS), cycles) / (TURNS * TILE)
    problem = _differs(received, sent.view(-1, 2, sent.shape[1]).flip(1).view_as(sent))
    rates = {spec.rate: HALF_BYTES / TILE / clocks} if clocks > 0 else {}
    return _result(spec.name, spec, clocks, problem, rates)


def _gather(spec: GatherSpec, kernel: Kernel, device: str, place: str) -> UnitResult:
    gen = generator(13, device)
    count = PLACES[place] if device != "cpu" else 256
    # drawn once and repeated: where a row lies matters here, not what is in it
    cache = latent_tokens(min(count, 1 << 12), gen).repeat(max(1, count >> 12), 1)
    ctas = _sms(device) // 2 * 2
    shape = (ctas // 2, (GATHER_TURNS + 2) * TILE)
    index = torch.randint(len(cache), shape, generator=gen, dtype=torch.int32, device=device)
    out = _nan(ctas, spec.rows, QK_DIM, device=device)
    cycles = torch.zeros(ctas, dtype=torch.int64, device=device)
    clocks = _median(lambda: kernel(cache, index, out, cycles, GATHER_TURNS), cycles) / (GATHER_TURNS * spec.rows)
    found = _result(f"{spec.name}, {place}", spec, clocks, _differs(out, last_tiles(cache, index, spec.rows, ctas)))
    return found if place == "HBM" else UnitResult(found.name, clocks, None, found.problem)


def selected(matches: Callable[[str], bool]) -> list[UnitSpec]:
    """The units whose names match."""
    return [spec for spec in shipped_specs() if matches(spec.name)]
