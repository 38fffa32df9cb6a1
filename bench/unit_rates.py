"""A card's unit rates: runs the kernels of bench/units, checks what they computed, and makes a `Rates` of it.

Each kernel fills every SM with one CTA and counts clock64 around its loop; a figure is the median over CTAs and runs.
A kernel whose result is wrong gives no rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import ceilings, timing
from bench.units.spec import (
    HALF_BYTES,
    NOPE,
    STREAM_WORDS,
    TILE,
    ConvertSpec,
    ExchangeSpec,
    GatherSpec,
    StreamSpec,
    WgmmaSpec,
    shipped_specs,
)
from cute_kernels.runtime.compile import compile_kernel
from fp8_mla import NOPE_DIM, QK_DIM, ROPE_OFFSET, SCALE_OFFSET, TOKEN_BYTES
from tests.kit.compare import relative_error
from tests.kit.mla_cases import generator, latent_tokens

RUNS = 7
CONVERT_TURNS, EXCHANGE_TURNS, GATHER_TURNS, WGMMA_TURNS = 2000, 2000, 256, 2000
CHECKED_TURNS = 4
FAR_ROWS, NEAR_ROWS = 1 << 22, 1 << 14
"""Rows to gather from: 2.75 GB, which no cache holds, and 11 MB, which L2 does."""
LIMIT = 1e-5
"""Relative error of sums in float32; what is only converted or moved must be equal."""
P = 2.0**-7


@dataclass(frozen=True)
class UnitResult:
    """What one kernel showed.

    name     of the kernel, as printed
    figures  by what they are: cycles per token, bytes per clock …
    problem  what is wrong with its result; "" where it was right
    rates    fields of `Rates` that follow from it alone
    """

    name: str
    figures: dict[str, float]
    problem: str = ""
    rates: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: WRONG, {self.problem}"
        return f"{self.name}: " + ", ".join(f"{value:.4g} {what}" for what, value in self.figures.items())

    def as_record(self) -> dict[str, Any]:
        """For JSON; no speed of a kernel that computed something else."""
        known = {"problem": self.problem} if self.problem else {"figures": self.figures}
        return {"name": self.name, **known}


def name_of(spec: Any) -> str:
    """As `--only` matches it."""
    if isinstance(spec, ConvertSpec):
        return f"unit conversion, {spec.how}"
    if isinstance(spec, ExchangeSpec):
        return f"unit exchange, {'st.async' if spec.how == 'async' else 'bulk copy'}"
    if isinstance(spec, GatherSpec):
        return f"unit gather, {spec.rows} rows of a tile, {spec.in_flight} in flight"
    if isinstance(spec, StreamSpec):
        return "unit stream, read by TMA"
    storing = ", a third one storing" if spec.storing else ""
    return f"unit wgmma, {spec.schedule}, {spec.warpgroups} warpgroup{'s' * (spec.warpgroups > 1)}{storing}"


def selected(matches: Callable[[str], bool]) -> list[Any]:
    """The kernels whose names match."""
    return [spec for spec in shipped_specs() if matches(name_of(spec))]


def measure(spec: Any, kernel: Callable[..., Any] | None = None, device: str = "cuda") -> UnitResult:
    """Run one kernel and check it. `kernel`: in place of the compiled one."""
    run = kernel or compile_kernel(spec)
    for kind, how in MEASURES.items():
        if isinstance(spec, kind):
            return how(spec, run, device)
    raise TypeError(f"spec: got {type(spec).__name__}, needs one of bench.units.spec")


def figures_from(results: Sequence[UnitResult], found: Mapping[str, float]) -> dict[str, Any]:
    """What was measured, by fields of `Rates`: for `Rates.measured`. Wrong results and what was left out give none."""
    figures: dict[str, Any] = {}
    for result in results:
        if not result.problem:
            figures |= result.rates
    names = {"read_GBps": "read_gbps", "copy_GBps": "copy_gbps", "bf16_gemm_TFLOPs": "gemm_tflops"}
    figures |= {field: found[name] for name, field in names.items() if name in found}
    # two numbers of rows in flight: what does not depend on them is conversion, the rest is waiting for rows
    clocks = {
        result.figures["rows in flight"]: result.figures["cycles per row, HBM"]
        for result in results
        if not result.problem and result.figures.get("tiles in flight") == 1
    }
    if clocks.get(32.0, 0.0) > clocks.get(64.0, math.inf):
        figures["row_cycles"] = (clocks[32.0] - clocks[64.0]) / (1 / 32 - 1 / 64)
    return figures


# ---- what the kernels must compute


def converted(rows: torch.Tensor, how: str = "scaled") -> torch.Tensor:
    """(n, 656) bytes as (n, 576) bf16: codes times their scale, or times its power of two."""
    codes = rows[:, :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, SCALE_OFFSET:ROPE_OFFSET].contiguous().view(torch.float32)
    if how == "exact":
        scales = (scales.view(torch.int32) & 0x7F800000).view(torch.float32)
    nope = (codes * scales.repeat_interleave(NOPE_DIM // scales.shape[1], dim=1)).bfloat16()
    return torch.cat([nope, rows[:, ROPE_OFFSET:].contiguous().view(torch.bfloat16)], dim=1)


def last_tiles(cache: torch.Tensor, index: torch.Tensor, spec: GatherSpec, turns: int, ctas: int) -> torch.Tensor:
    """(ctas, rows, 576): what the last turn of the gather leaves. CTAs 2i and 2i + 1 read list i."""
    lists = index[:, (turns - 1) * TILE : turns * TILE].long()
    tiles = converted(cache[lists.flatten()]).view(-1, TILE, QK_DIM)
    if spec.rows == TILE:
        return tiles.repeat_interleave(2, dim=0)[:ctas]
    return tiles.view(-1, spec.rows, QK_DIM)[:ctas]


def products(q: torch.Tensor, tiles: torch.Tensor, turns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """S (2, 64, 64) of the two tiles, and O (64, 512) after so many turns, in float64."""
    s = torch.einsum("hd,tkd->thk", q.double(), tiles.double())
    o = turns * P * tiles[..., :NOPE].double().sum(dim=(0, 1))
    return s, o.expand(TILE, -1)


# ---- runs


def _median(run: Callable[[], Any], cycles: torch.Tensor, runs: int = RUNS) -> float:
    """Median clocks over CTAs, and over runs after one that warms up."""
    medians = []
    for _ in range(runs + 1):
        run()
        medians.append(cycles.double().median().item())
    return statistics.median(medians[1:])


def _sms(device: str) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device != "cpu" else 2


def _differs(got: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = (got != expected).float().mean().item()
    return f"{wrong:.2%} of the values differ" if wrong else ""


def _convert(spec: ConvertSpec, kernel: Callable[..., Any], device: str) -> UnitResult:
    rows = latent_tokens(TILE, generator(11, device))
    out = torch.full((_sms(device), TILE, QK_DIM), float("nan"), dtype=torch.bfloat16, device=device)
    cycles = torch.zeros(len(out), dtype=torch.int64, device=device)
    clocks = _median(lambda: kernel(rows, out, cycles, CONVERT_TURNS), cycles) / (CONVERT_TURNS * TILE)
    problem = _differs(out, converted(rows, spec.how).expand_as(out))
    # the rate of the published route stands in the budget; the other one is for comparison
    rates = {"conversion": (NOPE_DIM / clocks,)} if spec.how == "scaled" and clocks > 0 else {}
    return UnitResult(name_of(spec), {"cycles per token": clocks}, problem, rates)


def _exchange(spec: ExchangeSpec, kernel: Callable[..., Any], device: str) -> UnitResult:
    ctas = _sms(device) // 2 * 2
    sent = torch.randn((ctas, HALF_BYTES // 2), generator=generator(12, device), device=device).bfloat16()
    received = torch.full_like(sent, float("nan"))
    cycles = torch.zeros(ctas, dtype=torch.int64, device=device)
    clocks = _median(lambda: kernel(sent, received, cycles, EXCHANGE_TURNS), cycles) / EXCHANGE_TURNS
    problem = _differs(received, sent.view(-1, 2, sent.shape[1]).flip(1).view_as(sent))
    per_clock = HALF_BYTES / clocks if clocks > 0 else 0.0
    name = "dsm_async_bytes" if spec.how == "async" else "dsm_bulk_bytes"
    figures = {"bytes per clock": per_clock, "cycles per token, bf16 of every second": clocks / TILE}
    return UnitResult(name_of(spec), figures, problem, {name: per_clock} if per_clock else {})


def _gather(spec: GatherSpec, kernel: Callable[..., Any], device: str) -> UnitResult:
    figures = {"rows in flight": float(spec.in_flight), "tiles in flight": float(spec.depth)}
    problems = []
    for place, rows in (("HBM", FAR_ROWS), ("L2", NEAR_ROWS)):
        run, out, cycles, expected = gather_call(spec, kernel, rows if device != "cpu" else 256, device)
        clocks = _median(run, cycles) / GATHER_TURNS
        problems.append(_differs(out, expected))
        figures |= {f"cycles per row, {place}": clocks / spec.rows, f"cycles per token, {place}": clocks / TILE}
    return UnitResult(name_of(spec), figures, next(filter(None, problems), ""))


def gather_call(
    spec: GatherSpec, kernel: Callable[..., Any], rows: int, device: str
) -> tuple[Callable[[], Any], torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a call, its output, its clocks, what must be in the output) over so many random rows."""
    gen = generator(13, device)
    # drawn once and repeated: where a row lies matters here, not what is in it
    cache = latent_tokens(min(rows, 1 << 12), gen).repeat(max(1, rows >> 12), 1)
    ctas = _sms(device) // 2 * 2
    index = torch.randint(len(cache), (ctas // 2, (GATHER_TURNS + 2 * spec.depth) * TILE), generator=gen, device=device)
    index = index.int()
    out = torch.full((ctas, spec.rows, QK_DIM), float("nan"), dtype=torch.bfloat16, device=device)
    cycles = torch.zeros(ctas, dtype=torch.int64, device=device)
    expected = last_tiles(cache, index, spec, GATHER_TURNS, ctas)
    assert cache.shape[1] == TOKEN_BYTES
    return lambda: kernel(cache, index, out, cycles, GATHER_TURNS), out, cycles, expected


def _wgmma(spec: WgmmaSpec, kernel: Callable[..., Any], device: str) -> UnitResult:
    gen = generator(14, device)
    q = torch.randn((TILE, QK_DIM), generator=gen, device=device).bfloat16()
    # alike, and repeated every 16 rows and 64 columns: see `WgmmaKernel`
    tiles = torch.randn((1, 16, 64), generator=gen, device=device).bfloat16().repeat(2, TILE // 16, QK_DIM // 64)
    ctas = _sms(device)
    s = torch.full((ctas, 2, TILE, TILE), float("nan"), device=device)
    o = torch.full((ctas, TILE, NOPE), float("nan"), device=device)
    cycles = torch.zeros((ctas, 2), dtype=torch.int64, device=device)
    # checked after a few turns: over thousands the sums of float32 drift
    kernel(q, tiles, s, o, cycles, P, CHECKED_TURNS)
    expected_s, expected_o = products(q, tiles, CHECKED_TURNS)
    columns = NOPE // 2 * spec.warpgroups
    errors = {
        "S": relative_error(s[:, : spec.warpgroups], expected_s[: spec.warpgroups].expand(ctas, -1, -1, -1)),
        "O": relative_error(o[..., :columns], expected_o[..., :columns].expand(ctas, -1, -1)),
    }
    errors.pop({"qk": "O", "pv": "S"}.get(spec.schedule, ""), None)
    problem = ", ".join(f"{which} is off by {error:.1e}" for which, error in errors.items() if not error < LIMIT)
    used = cycles[:, : spec.warpgroups]
    clocks = _median(lambda: kernel(q, tiles, s, o, cycles, P, WGMMA_TURNS), used) / WGMMA_TURNS
    rate = spec.flops / clocks if clocks > 0 else 0.0
    figures = {"cycles per turn": clocks, "FLOP per clock": rate}
    if spec.schedule == "seesaw":
        figures["cycles per token"] = clocks / (2 * TILE)
    best = spec == WgmmaSpec("seesaw", 2)
    return UnitResult(name_of(spec), figures, problem, {"tensor_flops": rate} if best and rate else {})


def _stream(spec: StreamSpec, kernel: Callable[..., Any], device: str) -> UnitResult:
    data = torch.rand(STREAM_WORDS * (1 << 16 if device != "cpu" else 5), dtype=torch.float32, device=device)
    try:
        call = ceilings.reader_call(data, kernel)
    except ValueError as error:
        return UnitResult(name_of(spec), {}, str(error))
    return UnitResult(name_of(spec), {"GB per second": data.nbytes / timing.time_eager(call, RUNS) / 1e9})


MEASURES: dict[type, Callable[..., UnitResult]] = {
    ConvertSpec: _convert,
    ExchangeSpec: _exchange,
    GatherSpec: _gather,
    StreamSpec: _stream,
    WgmmaSpec: _wgmma,
}


def run_units(specs: Iterable[Any], say: Callable[[str], None]) -> list[UnitResult]:
    """Measure each; one that raises is a result with a problem, and the others go on."""
    results = []
    for spec in specs:
        try:
            result = measure(spec)
        except Exception as error:  # whatever broke one unit must not hide the others
            result = UnitResult(name_of(spec), {}, f"{type(error).__name__}: {error}"[:300])
        say(str(result))
        results.append(result)
        torch.cuda.empty_cache()
    return results
