"""Timers for an SM90 GPU: CUDA-graph replays over rotated inputs, host time of a call, and ceilings of the card.

The results of a timed graph are compared with those that eager calls of the same inputs wrote to other memory.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tests.support.compare import relative_error

Call = Callable[[], Any]
"""Returns one tensor, several, or None. The results are kept as long as a graph of the call."""

REPLAYS: Final = 40
MAX_SECONDS: Final = 0.06
"""Replays of one measurement stop after this long, but not before `MIN_REPLAYS`."""
MIN_REPLAYS: Final = 8
REST_SECONDS: Final = 0.1
"""Idle time before a measurement; without it, the clock still depends on the measurement before."""
BURST_SECONDS: Final = 0.04
"""Seconds of back-to-back replays after a rest, uncounted ones included. Work that draws 700 W runs for 50 ms before
the card lowers its clock (MLA, topk 16384: 20 calls take 2,495 us each, all later ones 2,850). A longer measurement has
several rests. Where a burst has room for fewer than four replays, there is one rest, and the clock falls."""
HOST_ROUNDS, HOST_CALLS = 9, 100
"""More than about 1000 launches in flight would fill the launch queue, and the host would wait for the GPU."""
GEMM_SIZE: Final = 8192
STREAM_BYTES: Final = 4 << 30


class WrongReplay(Exception):
    """A timed graph has written other results than an eager call of the same inputs; the message says where."""


@dataclass(frozen=True)
class Expected:
    """The bits that the calls of a graph must write.

    names    of the tensors that a call returns
    results  of each call, made eagerly, in memory that the graph does not use
    limits   by name, the largest relative error of tensors whose bits are not compared: sums whose terms come in any
             order
    """

    names: tuple[str, ...]
    results: tuple[tuple[torch.Tensor, ...], ...]
    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        eager: Sequence[Call],
        *,
        checked: Sequence[torch.Tensor] = (),
        limits: Mapping[str, float] | None = None,
    ) -> Expected:
        """Makes the calls.

        Args:
            names: of the tensors that each call returns.
            eager: the calls of the graph in its order, without the first one if its results are `checked`; each
                allocates its results.
            checked: results of the first call, which the oracle has passed. A copy is kept.
            limits: see the class.
        """
        first = [tuple(t.clone() for t in checked)] if checked else []
        return cls(tuple(names), (*first, *(_tensors(call()) for call in eager)), limits or {})

    def problems(self, results: Sequence[Any]) -> list[str]:
        """In words, each tensor of each call that differs from its expected result."""
        if len(results) != len(self.results):
            return [f"{len(results)} calls, {len(self.results)} expected results"]
        found = []
        for number, (got, expected) in enumerate(zip(map(_tensors, results), self.results, strict=True)):
            if not len(got) == len(expected) == len(self.names):
                found.append(f"set {number}: {len(got)} results, {len(expected)} expected, {len(self.names)} names")
                continue
            for name, own, other in zip(self.names, got, expected, strict=True):
                if problem := self._problem(name, own, other):
                    found.append(f"set {number}, {name}: {problem}")
        return found

    def _problem(self, name: str, got: torch.Tensor, expected: torch.Tensor) -> str:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"{got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        if got.numel() and got.data_ptr() == expected.data_ptr():
            return "the expected result lies in the same memory"
        if name in self.limits:
            error = relative_error(got, expected)
            return "" if error < self.limits[name] else f"relative error {error:.2g}, needs {self.limits[name]}"
        different = bits(got) != bits(expected)
        count = int(different.sum())
        return f"{count} of {got.numel()} elements differ from those of an eager call" if count else ""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor as integers of the same size, in which NaNs compare by their bits."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def poison(results: Any) -> None:
    """Sets every bit of a call's results: NaN in each floating-point dtype, FP8 included."""
    for tensor in _tensors(results):
        bits(tensor).fill_(255 if tensor.element_size() == 1 else -1)


def _tensors(results: Any) -> tuple[torch.Tensor, ...]:
    if results is None:
        return ()
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 10th and 90th percentile over graph replays, and the SM clock during replays.

    A replay makes one call per rotated input set; percentiles are over replays, of the mean of these calls.
    `sets_compared` is the number of input sets whose results were compared with those of eager calls.
    """

    us: float
    us_p10: float
    us_p90: float
    sm_mhz: float | None = None
    sets_compared: int = 0

    def as_record(self) -> dict[str, float | None]:
        """The keys of a results file."""
        record: dict[str, float | None] = {
            "us": round(self.us, 3),
            "us_p10": round(self.us_p10, 3),
            "us_p90": round(self.us_p90, 3),
        }
        if self.sm_mhz is not None:
            record["sm_mhz"] = round(self.sm_mhz)
        if self.sets_compared:
            record["sets_compared"] = self.sets_compared
        return record


def sets_to_outgrow_l2(bytes_per_call: int, *, device: torch.device | str = "cuda", most: int = 64) -> int:
    """How many input sets of that size exceed twice the L2 cache; at least 2, at most `most`."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(most, -(-2 * l2_bytes // max(1, bytes_per_call))))


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """One graph that makes every call once, in order, and what the captured calls returned.

    Each call is made twice before capture: once to compile and plan, once on the side stream that capture needs. While
    the results are kept, no two calls of the graph share memory for results.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = [call() for call in calls]
    torch.cuda.current_stream().wait_stream(stream)
    return graph, results


def time_graph(
    calls: Sequence[Call],
    *,
    expected: Expected | None = None,
    replays: int = REPLAYS,
    clock: bool = True,
    load_seconds: float = 0.0,
) -> Timing:
    """Device time of one call, without host time.

    Args:
        calls: the same computation over rotated input sets that together outgrow the L2 cache.
        expected: the results of each call, everything that it writes. None for a peer, which its caller checks.
        replays: largest number of replays, each timed by a pair of events.
        clock: whether to read the SM clock, during further replays.
        load_seconds: 0: timing starts after a rest, at the clock of a rested card. Otherwise it starts after replays
            for so many seconds, at the clock that the power limit allows.

    Returns:
        `Timing`, in microseconds a call.

    Raises:
        WrongReplay: results of the timed replays, or of one more replay over poison, differ from `expected`.
    """
    if not calls:
        raise ValueError("calls: got none, needs at least one")
    graph, results = capture(calls)
    spans: list[float] = []  # seconds of a replay
    left = 0.0  # seconds of the burst
    while len(spans) < replays and (len(spans) < MIN_REPLAYS or sum(spans) < MAX_SECONDS):
        if not spans or (load_seconds == 0 and left < spans[-1] <= BURST_SECONDS / 4):
            left = BURST_SECONDS - _before_timing(graph.replay, load_seconds)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e-3)
        left -= spans[-1]
    us, p10, p90 = percentiles([span * 1e6 / len(calls) for span in spans])
    mhz = None
    if clock:
        _before_timing(graph.replay, load_seconds)
        mhz = sm_clock_under(graph.replay, us * len(calls))
    if expected is not None:
        require_expected(graph.replay, results, expected)
    return Timing(us, p10, p90, mhz, 0 if expected is None else len(calls))


def require_expected(replay: Call, results: Sequence[Any], expected: Expected) -> None:
    """Compares the results of the timed replays, then those of one more replay over poison.

    The first finds back-to-back calls that overwrite each other, the second results that a replay does not write.

    Raises:
        WrongReplay: naming each difference.
    """
    torch.cuda.synchronize()
    found = [f"after the timed replays: {problem}" for problem in expected.problems(results)]
    for result in results:
        poison(result)
    replay()
    torch.cuda.synchronize()
    found += [f"a replay over poison: {problem}" for problem in expected.problems(results)]
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        raise WrongReplay("the timed graph: " + "; ".join(found[:4]) + more)


def _before_timing(replay: Call, load_seconds: float) -> float:
    """Rests, then makes three replays; or replays for `load_seconds` without a rest. Returns the seconds of replays."""
    torch.cuda.synchronize()
    if load_seconds == 0:
        time.sleep(REST_SECONDS)
    started, done = time.monotonic(), 0
    while done < 3 or time.monotonic() - started < load_seconds:
        replay()
        torch.cuda.synchronize()
        done += 1
    return time.monotonic() - started


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile (nearest rank)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def host_time(call: Call) -> float:
    """Host microseconds of one eager call with a cached plan: median of 9 rounds of 100 calls.

    The queue is empty before each round. Rounds of 400 calls of 250 us each filled it, and the host waited for the GPU.
    """
    for _ in range(20):
        call()
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - started) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def sm_clock_under(replay: Call, us: float, *, seconds: float = BURST_SECONDS) -> float | None:
    """SM clock in MHz while the GPU is busy: the median of up to five readings; None where none can be taken.

    Args:
        replay: enqueues work without waiting for it.
        us: microseconds that this work takes.
        seconds: how long to keep the GPU busy.
    """
    for _ in range(max(1, min(1000, round(seconds * 1e6 / max(us, 1.0))))):
        replay()
    busy = torch.cuda.Event()
    busy.record()
    # A reading counts only while work is queued; the clock takes some milliseconds to settle.
    time.sleep(seconds / 4)
    readings: list[float] = []
    while not busy.query() and len(readings) < 5:
        reading = _read_sm_clock()
        if reading is None:
            break
        if not busy.query():
            readings.append(reading)
    torch.cuda.synchronize()
    return statistics.median(readings) if readings else None


def _read_sm_clock() -> float | None:
    try:
        return float(torch.cuda.clock_rate())
    except Exception:  # NVML's Python binding is missing or fails; what it raises varies with its version
        return _clock_of_nvidia_smi()


def _clock_of_nvidia_smi() -> float | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--id={torch.cuda.current_device()}", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return float(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def time_eager(call: Call, repeats: int) -> float:
    """Seconds of one call of a millisecond or more: median over event-timed repeats, after two warm-up calls."""
    call()
    call()
    spans = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(spans)


def measure_ceilings(*, stream_bytes: int = STREAM_BYTES, gemm_size: int = GEMM_SIZE) -> dict[str, float]:
    """Measures the ceilings of this card, in the units of a results file.

    Returns:
        read_GBps: torch.sum over 4 GiB of float32. copy_GBps: device-to-device copy, bytes read plus bytes written.
        bf16_gemm_TFLOPs: an 8192^3 matrix product of random numbers (zeros would run faster).
    """
    data = torch.rand(stream_bytes // 4, dtype=torch.float32, device="cuda")
    read = stream_bytes / time_eager(data.sum, 10)
    target, source = data.chunk(2)
    copy = stream_bytes / time_eager(functools.partial(target.copy_, source), 10)
    del data, target, source
    a, b = (torch.randn((gemm_size, gemm_size), dtype=torch.float32, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    flops = 2 * gemm_size**3 / time_eager(functools.partial(torch.mm, a, b, out=product), 20)
    return {
        "read_GBps": round(read / 1e9, 1),
        "copy_GBps": round(copy / 1e9, 1),
        "bf16_gemm_TFLOPs": round(flops / 1e12, 1),
    }
