"""Timers for an SM90 GPU: CUDA-graph replays over rotated inputs, host time of a call, and the card's own ceilings.

What a timed graph has written is compared with what eager calls of the same inputs wrote into other memory.
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
"""What it returns is kept as long as a graph of it: tensors, one alone or several; None if it returns nothing."""

REPLAYS: Final = 40
MAX_SECONDS: Final = 0.06
"""Replays of one measurement stop after this long, but not before `MIN_REPLAYS`."""
MIN_REPLAYS: Final = 8
REST_SECONDS: Final = 0.1
"""Idle time before a measurement, or it starts at the clock that the one before has left."""
BURST_SECONDS: Final = 0.04
"""How long replays follow each other after a rest, uncounted ones among them: what draws 700 W runs for 50 ms before
the card lowers its clock (MLA, topk 16384: 20 calls of 2,495 us, then all of 2,850). A measurement that takes longer
has more rests; but where a burst holds less than four replays, these follow each other at the clock that is left."""
HOST_ROUNDS, HOST_CALLS = 9, 100
"""More than about 1000 launches in flight would time the launch queue instead of the host."""
GEMM_SIZE: Final = 8192
STREAM_BYTES: Final = 4 << 30


class WrongReplay(Exception):
    """A timed graph has written something else than an eager call of the same inputs; the message says where."""


@dataclass(frozen=True)
class Expected:
    """What the calls of a graph must write, bit by bit.

    names    of the tensors that a call returns
    results  of each call: made eagerly, in memory that no call of the graph knows
    limits   by name, the relative error of tensors that are exempt from the comparison of bits: sums whose terms come
             in any order
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
            names: of what each of them returns.
            eager: the calls of a graph, in its order, each into memory of its own. Not those whose results are
                `checked`.
            checked: what the first call gave when it was held to the oracle. A copy is kept.
            limits: see the class.
        """
        first = [tuple(t.clone() for t in checked)] if checked else []
        return cls(tuple(names), (*first, *(_tensors(call()) for call in eager)), limits or {})

    def problems(self, results: Sequence[Any]) -> list[str]:
        """In words, each tensor of each call that is not what it must be."""
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
    """The tensor as integers of its size, over the same memory: they compare NaNs by their bits."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def poison(results: Any) -> None:
    """Sets every bit of what a call returned: NaN in each floating-point dtype, also those of FP8."""
    for tensor in _tensors(results):
        bits(tensor).fill_(255 if tensor.element_size() == 1 else -1)


def _tensors(results: Any) -> tuple[torch.Tensor, ...]:
    if results is None:
        return ()
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 10th and 90th percentile over graph replays, and the SM clock meanwhile.

    The percentiles are of the mean call of a replay: a replay makes one call per rotated input set. `sets_compared`
    says of how many of these sets the results were held to those of eager calls.
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
    """How many input sets of that size pass twice the L2 cache; at least 2, at most `most`."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(most, -(-2 * l2_bytes // max(1, bytes_per_call))))


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """One graph that makes every call once, in order, and what the captured calls returned.

    Each is made twice before: to compile and plan, and on the side stream that capture needs. As long as the results
    are kept, no call of the graph gets the memory of another one's.
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
    """Device time of one call, host time left out.

    Args:
        calls: the same computation over rotated input sets that together outgrow the L2 cache.
        expected: what each call must return: all that it writes. None for a peer, which is checked otherwise.
        replays: at most so many, each timed by a pair of events.
        clock: read the SM clock while further replays run.
        load_seconds: 0: time begins after a rest, at the clock that the card has then. Else after replays for so long,
            at the clock that the limit of its power leaves.

    Returns:
        `Timing`, in microseconds a call.

    Raises:
        WrongReplay: what the replays left, or one more replay after all results were poisoned, is not as expected.
    """
    if not calls:
        raise ValueError("calls: got none, needs at least one")
    graph, results = capture(calls)
    spans: list[float] = []  # seconds of a replay
    left = 0.0  # of a burst, in seconds
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
    """Compares what replays have left, and once more what one replay writes over poison.

    The first finds calls that disturb each other when they follow closely, the second what a replay does not write.

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
    """Rests, and makes three replays, or replays for `load_seconds`; returns the seconds of replays."""
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
    """Host microseconds of one eager call with a cached plan: median of 9 rounds of 100, the queue drained between.

    In rounds of 400 calls that take the GPU 250 us each the queue was full, and the host waited for it.
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
    """SM clock in MHz while the GPU is kept busy: the median of a few readings; None where none can be taken.

    Args:
        replay: enqueues work without waiting for it.
        us: how long that work takes.
        seconds: for how long to keep the GPU busy.
    """
    for _ in range(max(1, min(1000, round(seconds * 1e6 / max(us, 1.0))))):
        replay()
    busy = torch.cuda.Event()
    busy.record()
    # Readings are only good while work is queued; the clock needs some milliseconds to settle.
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
    except Exception:  # NVML's Python binding is missing or refuses: what it raises varies with its version
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
    """Seconds of one call, median over event-timed repeats after two warm-ups. For calls of a millisecond and more."""
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
    """What this card reaches today, in the units of a results file.

    Returns:
        read_GBps: torch.sum over 4 GiB of float32. copy_GBps: device-to-device copy, bytes read plus bytes written.
        bf16_gemm_TFLOPs: an 8192^3 matrix product of random numbers (of zeros it would run faster).
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
