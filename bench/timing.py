"""Helpers of timers: capture of CUDA graphs, comparison of their results with eager calls, host time of a call.

The results of a timed graph are compared with those that eager calls of the same inputs wrote to other memory. Times of
graphs are taken in `bench.in_layer`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.kit.compare import bits, relative_error

Call = Callable[[], Any]
"""A function that returns one tensor, several, or None. The results are kept as long as a graph of the call."""

HOST_ROUNDS, HOST_CALLS = 9, 100
"""More than about 1000 launches in flight would fill the launch queue, and the host would wait for the GPU."""


class WrongReplay(Exception):
    """A timed graph has written other results than an eager call of the same inputs; the message says where."""


@dataclass(frozen=True)
class Expected:
    """The bits that the calls of a graph must write.

    names    names of the tensors that a call returns
    results  results of each call, made eagerly, in memory that the graph does not use
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
            names: names of the tensors that each call returns.
            eager: the calls of the graph in its order, without the first one if its results are `checked`; each
                allocates its results.
            checked: results of the first call, which the oracle has accepted. A copy is kept.
            limits: see the class.
        """
        first = [tuple(t.clone() for t in checked)] if checked else []
        return cls(tuple(names), (*first, *(_tensors(call()) for call in eager)), limits or {})

    def problems(self, results: Sequence[Any]) -> list[str]:
        """Describes each tensor of each call that differs from its expected result."""
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


def poison(results: Any) -> None:
    """Sets every bit of a call's results: NaN in each floating-point dtype, FP8 included."""
    for tensor in _tensors(results):
        bits(tensor).fill_(255 if tensor.element_size() == 1 else -1)


def _tensors(results: Any) -> tuple[torch.Tensor, ...]:
    if results is None:
        return ()
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def sets_to_outgrow_l2(bytes_per_call: int, *, most: int = 64) -> int:
    """Returns how many input sets of that size exceed twice the L2 cache; at least 2, at most `most`."""
    l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    return max(2, min(most, -(-2 * l2_bytes // max(1, bytes_per_call))))


def capture_stream() -> torch.cuda.Stream:
    """Returns the stream that all graphs of the current device are captured on.

    Autograd runs a backward on the stream of its forward, so a backward can be captured if its forward ran here.
    """
    return _stream_of(torch.cuda.current_device())


_stream_of = functools.cache(torch.cuda.Stream)


def warm(calls: Sequence[Call]) -> None:
    """Makes each call twice: once to compile and plan, once on the stream of captures."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    stream = capture_stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()


def capture(calls: Sequence[Call], *, warmed: bool = False) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Captures one graph that makes every call once, in order; also returns the captured calls' results.

    While the results are kept, no two calls of the graph share memory for results. `warmed`: `warm` has made the calls.
    """
    if not warmed:
        warm(calls)
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        results = [call() for call in calls]
    torch.cuda.current_stream().wait_stream(stream)
    return graph, results


def require_expected(replay: Call, results: Sequence[Any], expected: Expected) -> None:
    """Compares the results of the timed replays, then those of one more replay over poison.

    The first finds back-to-back calls that overwrite each other, the second results that a replay does not write.

    Raises:
        WrongReplay: names each difference.
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


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Returns median, 10th and 90th percentile (nearest rank)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def host_times(call: Call) -> dict[str, float]:
    """Returns `host_us`, host microseconds of one eager call with a cached plan, and `host_mul_us`, for a record.

    The latter are those of `mul_` of one number, the shortest call of torch that launches a kernel, in turns with the
    call: hosts differ by a factor of two, the ratio does not.
    """
    one = torch.ones(1, dtype=torch.float32, device="cuda")
    host, mul = host_medians(call, functools.partial(one.mul_, 1.0))
    return {"host_us": round(host, 2), "host_mul_us": round(mul, 2)}


def host_medians(*calls: Call) -> list[float]:
    """Returns host microseconds of one eager call, for each of `calls` in turns: the median of 9 rounds of 100.

    The queue is empty before each round. Rounds of 400 calls of 250 us each filled it, and the host waited for the GPU.
    """
    for call in calls:
        for _ in range(20):
            call()
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(HOST_ROUNDS):
        for call, spans in zip(calls, rounds, strict=True):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            spans.append((time.perf_counter() - started) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(spans) for spans in rounds]


def event_seconds(call: Call) -> float:
    """Returns the seconds of one call on the GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def time_eager(call: Call, repeats: int) -> float:
    """Returns the seconds of one call of a millisecond or more: the median, after two warm-up calls."""
    call()
    call()
    return statistics.median(event_seconds(call) for _ in range(repeats))
