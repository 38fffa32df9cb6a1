"""Device time of a call as a layer of a model sees it, back to back, and under load; of several computations in turn.

    in-layer      a small kernel runs before each call, as in a model; the time of the small kernels is subtracted
    back to back  calls alone, so that the start of one may overlap with the end of another
    sustained     in-layer after 0.4 s of such calls, at the clock that the power limit allows

The first two begin after a rest and take turns, replay by replay, with all that is timed together. Under load each
computation runs alone, since the clock depends on its own power, and the first runs again after the others.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from scripts.bench import nvml, timing
from scripts.bench.timing import Call, Expected, percentiles, require_expected

REPLAYS: Final = 20
"""Of a graph in-layer; of others too, where that takes no longer than `MAX_SECONDS`."""
FEW_REPLAYS: Final = 8
MAX_SECONDS: Final = 0.06
REST_SECONDS: Final = 0.1
"""Idle time before a measurement; without it, the clock still depends on the measurement before."""
BURST_SECONDS: Final = 0.04
"""Seconds of replays after a rest. Work that draws 700 W runs for 50 ms before the card lowers its clock (MLA, topk
16384: 20 calls take 2,495 us each, all later ones 2,850). Where one replay takes more than a quarter of it, there is
one rest, and the clock falls."""
LOAD_SECONDS: Final = 0.4
"""Of calls before a sustained time is taken; the clock has settled after 0.1 s."""
AGAIN_SECONDS: Final = 0.15
"""Of the first computation's second load: the card is under load already, and the clock settles in 0.1 s."""
SETTLED_SECONDS: Final = 0.1
POWER_SECONDS: Final = 1.0
"""Of further load while the counter of energy runs: it moves every 20 to 100 ms."""
CHUNK_SECONDS: Final = 0.01
"""Of replays that are enqueued at a time under load; two chunks are in flight, so the GPU never waits."""
LONG_CALL_SECONDS: Final = 2e-3
"""Calls from here on have a graph each: with 20 replays of all input sets, a case would take ten seconds."""
SMALL_ELEMENTS: Final = 4096
READINGS: Final = 20
"""Of the clock, at most, in one measurement."""


@dataclass(frozen=True)
class Graphs:
    """What is replayed to time one computation: see `prepare`.

    calls         of one replay
    back_to_back  replays of the calls, to be made in turn
    in_layer      replays of a small kernel and a call each
    results       what the captured calls wrote, by the replays that write them
    expected      the same of eager calls; None where the caller has checked
    """

    calls: int
    back_to_back: tuple[Call, ...]
    in_layer: tuple[Call, ...]
    results: tuple[tuple[tuple[Call, ...], list[Any]], ...] = ()
    expected: Expected | None = None

    def require_expected(self) -> int:
        """Compares all that was written; the number of input sets, 0 where nothing is expected.

        Raises:
            WrongReplay: naming each difference.
        """
        if self.expected is None:
            return 0
        for replays, results in self.results:
            require_expected(functools.partial(_all, replays), results, self.expected)
        return len(self.expected.results)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, clocks and power.

    us, us_p10, us_p90  in-layer: median and percentiles over replays, of the mean of a replay's calls
    us_back_to_back     median
    us_sustained        median, None where it was not asked for
    sm_mhz              SM clock while sustained times were taken
    sm_mhz_rested       after a rest
    watts               of the card under load
    sets_compared       input sets whose results were compared with those of eager calls
    """

    us: float
    us_p10: float
    us_p90: float
    us_back_to_back: float
    us_sustained: float | None = None
    sm_mhz: float | None = None
    sm_mhz_rested: float | None = None
    watts: float | None = None
    sets_compared: int = 0

    def as_record(self) -> dict[str, float]:
        """The keys of a results file."""
        times = {
            "us": self.us,
            "us_p10": self.us_p10,
            "us_p90": self.us_p90,
            "us_back_to_back": self.us_back_to_back,
            "us_sustained": self.us_sustained,
        }
        others = {"sm_mhz": self.sm_mhz, "sm_mhz_rested": self.sm_mhz_rested, "watts": self.watts}
        return {
            **{name: round(value, 3) for name, value in times.items() if value is not None},
            **{name: round(value) for name, value in others.items() if value is not None},
            **({"sets_compared": self.sets_compared} if self.sets_compared else {}),
        }


# ---- preparing


def prepare(calls: Sequence[Call], *, expected: Expected | None = None) -> Graphs:
    """Captures what `time_together` replays.

    Args:
        calls: the same computation over rotated input sets that together outgrow the L2 cache.
        expected: the results of each call, everything that it writes. None for a peer, which its caller checks.
    """
    if not calls:
        raise ValueError("calls: got none, needs at least one")
    timing.warm(calls)
    groups = [[call] for call in calls] if _is_long(calls) else [list(calls)]
    small = small_kernel()
    plain, layered = (
        [timing.capture([functools.partial(make, call) for call in group], warmed=True) for group in groups]
        for make in (_only, functools.partial(_after, small))
    )
    kinds = []
    for captured in (layered, plain):
        replays = tuple(graph.replay for graph, _ in captured)
        kinds.append((replays, list(itertools.chain.from_iterable(results for _, results in captured))))
    return Graphs(len(groups[0]), kinds[1][0], kinds[0][0], tuple(kinds), expected)


def prepare_eager(calls: Sequence[Call]) -> Graphs:
    """The same without graphs, for what cannot be captured; calls must take far longer than their launch."""
    timing.warm(calls)
    small = small_kernel()
    return Graphs(1, tuple(calls), tuple(functools.partial(_after, small, call) for call in calls))


def _only(call: Call) -> Any:
    return call()


def _after(small: Call, call: Call) -> Any:
    small()
    return call()


def _all(replays: Sequence[Call]) -> None:
    for replay in replays:
        replay()


def _is_long(calls: Sequence[Call]) -> bool:
    return _seconds(lambda: _all(calls)) > LONG_CALL_SECONDS * len(calls)


def small_kernel() -> Call:
    """What stands for the other kernels of a layer: an addition to 4,096 numbers, launched without overlap."""
    return functools.partial(_small_tensor(torch.cuda.current_device()).add_, 1.0)


@functools.cache
def _small_tensor(device: int) -> torch.Tensor:
    return torch.zeros(SMALL_ELEMENTS, dtype=torch.float32, device=torch.device("cuda", device))


def _small_graph(calls: int) -> Call:
    """Replays so many small kernels."""
    return _captured_small(calls, torch.cuda.current_device())


@functools.cache
def _captured_small(calls: int, device: int) -> Call:
    graph, _ = timing.capture([small_kernel()] * calls)
    return graph.replay


# ---- timing


def time_calls(calls: Sequence[Call], *, expected: Expected | None = None, sustained: bool = True) -> Timing:
    """`time_together` of one computation."""
    return time_together({"": prepare(calls, expected=expected)}, sustained=sustained)[""]


def time_together(
    ways: Mapping[str, Graphs], *, sustained: bool | Collection[str] = True, power: bool = False
) -> dict[str, Timing]:
    """Device times of computations that are to be compared, by their names.

    Args:
        ways: the computations.
        sustained: whether to time them under load too, or which of them; takes half a second each.
        power: whether to measure the power under load; takes a second more.

    Raises:
        WrongReplay: results of the timed replays, or of one more replay over poison, are not those expected.
    """
    if not ways:
        raise ValueError("ways: got none, needs at least one")
    nvml.sm_mhz()  # the first reading takes long
    bases = {graphs.calls: _small_graph(graphs.calls) for graphs in ways.values()}
    rested, rested_mhz, costs = _rested(ways, bases)
    loaded: dict[str, list[_Loaded]] = {name: [] for name in ways}
    names = [name for name in ways if (sustained if isinstance(sustained, bool) else name in sustained)]
    order = [*names, *names[:1]] if len(names) > 1 else names
    for place, name in enumerate(order):
        graphs, again = ways[name], place == len(names)
        load = AGAIN_SECONDS if again else LOAD_SECONDS
        loaded[name].append(_sustained(graphs, bases[graphs.calls], costs[name], load, power and not again))
    timings = {}
    for name, graphs in ways.items():
        small = statistics.median(rested["small", str(graphs.calls)])
        us, p10, p90 = _us(rested["in-layer", name], graphs.calls, small)
        alone, _, _ = _us(rested["back to back", name], graphs.calls)
        blocks = loaded[name]
        timings[name] = Timing(
            us=us,
            us_p10=p10,
            us_p90=p90,
            us_back_to_back=alone,
            us_sustained=statistics.mean(block.us for block in blocks) if blocks else None,
            sm_mhz=_mean([block.sm_mhz for block in blocks]),
            sm_mhz_rested=rested_mhz,
            watts=_mean([block.watts for block in blocks]),
            sets_compared=graphs.require_expected(),
        )
    return timings


def _us(spans: Sequence[float], calls: int, small: float = 0.0) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of microseconds a call, from seconds of replays and of their small kernels."""
    return percentiles([(span - small) * 1e6 / calls for span in spans])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


Spans = dict[tuple[str, str], list[float]]
"""Seconds of replays, by their kind and whose they are."""


def _rested(ways: Mapping[str, Graphs], bases: Mapping[int, Call]) -> tuple[Spans, float | None, dict[str, float]]:
    """Spans of all replays after rests; the SM clock; and, of each computation, about the seconds of a replay."""
    replays: dict[tuple[str, str], Iterator[Call]] = {}
    for calls, base in bases.items():
        replays["small", str(calls)] = itertools.repeat(base)
    replays |= {("in-layer", name): itertools.cycle(graphs.in_layer) for name, graphs in ways.items()}
    replays |= {("back to back", name): itertools.cycle(graphs.back_to_back) for name, graphs in ways.items()}
    seconds = {}
    for key, turn in replays.items():
        next(turn)()  # uncounted: the first replay of a graph uploads it
        seconds[key] = _seconds(next(turn))
    wanted = {
        key: REPLAYS if key[0] != "back to back" or REPLAYS * took <= MAX_SECONDS else FEW_REPLAYS
        for key, took in seconds.items()
    }
    queue = [key for number in range(REPLAYS) for key in replays if number < wanted[key]]
    rests = max(seconds.values()) <= BURST_SECONDS / 4
    spans: Spans = {key: [] for key in replays}
    clocks: list[float] = []
    place = 0
    while place < len(queue):
        if rests or place == 0:
            torch.cuda.synchronize()
            time.sleep(REST_SECONDS)
        burst: list[tuple[str, str]] = []
        left = BURST_SECONDS
        while place < len(queue) and (left > 0 or not burst):
            burst.append(queue[place])
            left -= seconds[queue[place]]
            place += 1
        next(replays[burst[0]])()  # uncounted: the host gets ahead of the GPU
        found, read = _timed([(key, next(replays[key])) for key in burst])
        clocks += read
        for key, span in found:
            spans[key].append(span)
    return spans, statistics.median(clocks) if clocks else None, {name: seconds["in-layer", name] for name in ways}


@dataclass(frozen=True)
class _Loaded:
    us: float
    sm_mhz: float | None
    watts: float | None


def _sustained(graphs: Graphs, base: Call, seconds: float, load_seconds: float, power: bool) -> _Loaded:
    """In-layer times, clock and power after `load_seconds` of such replays, each of which takes `seconds`."""
    turn = itertools.cycle(graphs.in_layer)
    clocks = _load(turn, load_seconds, seconds)
    watts = None
    if power:
        before, started = nvml.joules(), time.monotonic()
        clocks += _load(turn, POWER_SECONDS, seconds)
        after, took = nvml.joules(), time.monotonic() - started
        watts = None if before is None or after is None else (after - before) / took
    replays = REPLAYS if REPLAYS * seconds <= MAX_SECONDS else FEW_REPLAYS
    found, read = _timed([*(("", next(turn)) for _ in range(replays)), *(("small", base) for _ in range(FEW_REPLAYS))])
    by_key: dict[str, list[float]] = {"": [], "small": []}
    for key, span in found:
        by_key[key].append(span)
    us, _, _ = _us(by_key[""], graphs.calls, statistics.median(by_key["small"]))
    clocks = (clocks + read)[-READINGS:]
    return _Loaded(us, statistics.median(clocks) if clocks else None, watts)


def _load(turn: Iterator[Call], load_seconds: float, seconds: float) -> list[float]:
    """Replays without a pause; returns clocks that were read once they have settled. A chunk is left in flight."""
    chunk = max(1, round(CHUNK_SECONDS / max(seconds, 1e-6)))
    started, before, clocks = time.monotonic(), None, []
    while (passed := time.monotonic() - started) < load_seconds:
        for _ in range(chunk):
            next(turn)()
        end = torch.cuda.Event()
        end.record()
        if passed > SETTLED_SECONDS:
            clocks += _clock_before(end)
        if before is not None:
            before.synchronize()
        before = end
    return clocks


def _timed(replays: Sequence[tuple[Any, Call]]) -> tuple[list[tuple[Any, float]], list[float]]:
    """Enqueues all replays; seconds of each, with the key that it came with, and clocks that were read meanwhile."""
    events = []
    for key, replay in replays:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        events.append((key, begin, end))
    last = events[-1][2]
    clocks: list[float] = []
    while len(clocks) < READINGS and (read := _clock_before(last)):
        clocks += read
    last.synchronize()
    return [(key, begin.elapsed_time(end) * 1e-3) for key, begin, end in events], clocks


def _clock_before(end: torch.cuda.Event) -> list[float]:
    """The SM clock, if the GPU has not come to `end` when it has been read."""
    if end.query():
        return []
    reading = nvml.sm_mhz()
    return [] if reading is None or end.query() else [reading]


def _seconds(work: Callable[[], Any]) -> float:
    """Of work that is enqueued alone."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
