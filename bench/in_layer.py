"""Device time of a call as a layer of a model sees it, back to back, and under load; of several computations in turn.

    in-layer      a small kernel runs before each call, as in a model; the time of the small kernels is subtracted
    back to back  calls alone, so that the start of one may overlap with the end of another
    sustained     in-layer after 0.4 s of such calls, at the clock that the power limit allows

The first two begin after a rest and take turns, replay by replay and in an order that reverses, with all that is timed
together. The third is taken under one load without a pause, in which the computations take turns of 20 ms, so that all
meet the same clock and temperature. (One after the other, half a second each, the same matrix product took 1.30 times
as long the second time.)
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

from bench import nvml, timing
from bench.timing import Call, Expected, percentiles, require_expected

REPLAYS: Final = 20
"""Of a graph, where that takes no longer than `MAX_SECONDS`."""
FEW_REPLAYS: Final = 8
MAX_SECONDS: Final = 0.06
REST_SECONDS: Final = 0.1
"""Idle time before a measurement; without it, the clock still depends on the measurement before."""
BURST_SECONDS: Final = 0.04
"""Seconds of replays after a rest. Work that draws 700 W runs for 50 ms before the card lowers its clock (MLA, topk
16384: 20 calls take 2,495 us each, all later ones 2,850). Where one replay takes more than a quarter of it, there is
one rest, and the clock falls."""
LOAD_SECONDS: Final = 0.4
"""Of calls, in turns too, before a sustained time is taken."""
TURN_SECONDS: Final = 0.02
"""Of replays of one computation under load. Two turns are in flight, so the GPU never waits."""
ROUNDS: Final = 10
"""Turns of each computation in which replays are timed, in an order that reverses from round to round."""
FEW_ROUNDS, ROUNDS_SECONDS = 4, 0.7
"""Where more would take longer than so many seconds."""
TURN_REPLAYS: Final = 16
"""Of a turn, at most so many are timed: the last ones, from its middle on."""
SETTLED_SECONDS: Final = 0.1
POWER_SECONDS: Final = 1.0
"""Of load of one computation alone while the counter of energy runs: it moves every 20 to 100 ms."""
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
    recorded      the captured calls, kept for what they hold: a graph reads its inputs by address. (FlashMLA's metadata
                  was freed with its calls, and its replays read whatever came to lie there.)
    """

    calls: int
    back_to_back: tuple[Call, ...]
    in_layer: tuple[Call, ...]
    results: tuple[tuple[tuple[Call, ...], list[Any]], ...] = ()
    expected: Expected | None = None
    recorded: tuple[Call, ...] = ()

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
    us_sustained        median over rounds, None where it was not asked for
    rounds_us           of each round, the medians that `us_sustained` is the median of: see `sustained_ratio`
    sm_mhz              SM clock while sustained times were taken, of all that were timed together
    sm_mhz_rested       after a rest
    watts               of the card under a second of load of this computation alone
    us_loaded_alone     mean over that second, in-layer: at the clock that this computation's own power allows
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
    us_loaded_alone: float | None = None
    rounds_us: tuple[float, ...] = ()

    def sustained_ratio(self, other: Timing) -> float | None:
        """This one's time under load over another's: the median over the rounds that they were timed in together."""
        if not self.rounds_us or len(self.rounds_us) != len(other.rounds_us):
            return None
        return statistics.median(own / theirs for own, theirs in zip(self.rounds_us, other.rounds_us, strict=True))

    def as_record(self) -> dict[str, float]:
        """The keys of a results file."""
        times = {
            "us": self.us,
            "us_p10": self.us_p10,
            "us_p90": self.us_p90,
            "us_back_to_back": self.us_back_to_back,
            "us_sustained": self.us_sustained,
            "us_loaded_alone": self.us_loaded_alone,
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
    return Graphs(len(groups[0]), kinds[1][0], kinds[0][0], tuple(kinds), expected, tuple(calls))


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
        sustained: whether to time them under load too, or which of them; takes 0.4 s, and 0.2 s for each.
        power: whether to load the card with each of these alone too, for its power and its time then; takes 1.1 s each.

    Raises:
        WrongReplay: results of the timed replays, or of one more replay over poison, are not those expected.
    """
    if not ways:
        raise ValueError("ways: got none, needs at least one")
    nvml.sm_mhz()  # the first reading takes long
    bases = {graphs.calls: _small_graph(graphs.calls) for graphs in ways.values()}
    rested, rested_mhz, costs = _rested(ways, bases)
    names = [name for name in ways if (sustained if isinstance(sustained, bool) else name in sustained)]
    turns = {name: _Turns(ways[name], bases[ways[name].calls], costs[name]) for name in names}
    mhz = _sustained(list(turns.values())) if turns else None
    rounds = {name: turn.rounds_us() for name, turn in turns.items()}
    alone = {name: _alone(turn) for name, turn in turns.items()} if power else {}
    timings = {}
    for name, graphs in ways.items():
        small = statistics.median(rested["small", str(graphs.calls)])
        us, p10, p90 = _us(rested["in-layer", name], graphs.calls, small)
        back_to_back, _, _ = _us(rested["back to back", name], graphs.calls)
        watts, us_loaded_alone = alone.get(name, (None, None))
        loaded = rounds.get(name, ())
        timings[name] = Timing(
            us=us,
            us_p10=p10,
            us_p90=p90,
            us_back_to_back=back_to_back,
            us_sustained=statistics.median(loaded) if loaded else None,
            sm_mhz=mhz if loaded else None,
            sm_mhz_rested=rested_mhz,
            watts=watts,
            us_loaded_alone=us_loaded_alone,
            sets_compared=graphs.require_expected(),
            rounds_us=loaded,
        )
    return timings


def _us(spans: Sequence[float], calls: int, small: float = 0.0) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of microseconds a call, from seconds of replays and of their small kernels."""
    return percentiles([(span - small) * 1e6 / calls for span in spans])


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
    wanted = {key: REPLAYS if REPLAYS * took <= MAX_SECONDS else FEW_REPLAYS for key, took in seconds.items()}
    # there and back, as under load: of equal kernels that never swap places, the later one is slower as the clock falls
    there = list(replays)
    queue = [
        key for number in range(REPLAYS) for key in (there if number % 2 == 0 else there[::-1]) if number < wanted[key]
    ]
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


Events = list[tuple[Any, torch.cuda.Event, torch.cuda.Event]]
"""Begin and end of replays, with the key of each."""


class _Turns:
    """Turns of one computation under load.

    seconds  of a turn, about
    """

    def __init__(self, graphs: Graphs, base: Call, seconds: float) -> None:
        self._calls, self._base = graphs.calls, base
        self._replays = itertools.cycle(graphs.in_layer)
        self._number = max(1, round(TURN_SECONDS / max(seconds, 1e-6)))
        self.seconds = self._number * seconds
        self.found: list[float] = []
        self._small: list[float] = []

    def enqueue(self) -> Events:
        """Starts a turn: replays, the last of which are timed, and one of its small kernels alone."""
        timed = min(TURN_REPLAYS, -(-self._number // 2))
        for _ in range(self._number - timed):
            next(self._replays)()
        return _enqueue([*(("", next(self._replays)) for _ in range(timed)), ("small", self._base)])

    def note(self, events: Events) -> None:
        """Keeps the times of a turn that has ended."""
        spans = _spans(events)
        self.found.append(statistics.median(span for key, span in spans if key == ""))
        self._small += [span for key, span in spans if key == "small"]

    def rounds_us(self) -> tuple[float, ...]:
        """In-layer microseconds of a call, of each turn that was kept."""
        small = statistics.median(self._small)
        return tuple((span - small) * 1e6 / self._calls for span in self.found)

    def mean_us(self, seconds: float, turns: int) -> float:
        """In-layer microseconds of a call of so many turns that took so many seconds."""
        small = statistics.median(self._small)
        return (seconds / turns - (self._number + 1) * small) * 1e6 / (self._number * self._calls)


def _sustained(turns: Sequence[_Turns]) -> float | None:
    """Has all computations keep times of turns under one load, without a pause; the SM clock meanwhile."""
    rounds = ROUNDS if ROUNDS * sum(turn.seconds for turn in turns) <= ROUNDS_SECONDS else FEW_ROUNDS
    clocks: list[float] = []
    before: tuple[_Turns, Events, bool] | None = None
    for turn, kept in _order(turns, rounds):
        events = turn.enqueue()
        if kept:
            clocks += _clock_before(events[-1][2])
        _end(before)
        before = turn, events, kept
    _end(before)
    return statistics.median(clocks[-READINGS:]) if clocks else None


def _order(turns: Sequence[_Turns], rounds: int) -> Iterator[tuple[_Turns, bool]]:
    """Whose turn it is, and whether it is kept: those of the load are not."""
    started = time.monotonic()
    while time.monotonic() - started < LOAD_SECONDS:
        yield from ((turn, False) for turn in turns)
    for number in range(rounds):
        yield from ((turn, True) for turn in (turns if number % 2 == 0 else turns[::-1]))


def _end(started: tuple[_Turns, Events, bool] | None) -> None:
    """Waits for a turn that has been started."""
    if started is not None:
        turn, events, kept = started
        events[-1][2].synchronize()
        if kept:
            turn.note(events)


def _alone(turn: _Turns) -> tuple[float | None, float]:
    """Power of the card under a load of one computation alone, and in-layer microseconds of a call, their mean."""
    _, first = _turns_alone(turn, SETTLED_SECONDS, None)
    before, started = nvml.joules(), time.monotonic()
    number, last = _turns_alone(turn, POWER_SECONDS, first)
    after, took = nvml.joules(), time.monotonic() - started
    last[-1][2].synchronize()
    us = turn.mean_us(first[-1][2].elapsed_time(last[-1][2]) * 1e-3, number)
    return None if before is None or after is None else (after - before) / took, us


def _turns_alone(turn: _Turns, seconds: float, before: Events | None) -> tuple[int, Events]:
    """Turns without a pause: how many, and the last one, which is left in flight."""
    started, number = time.monotonic(), 0
    while before is None or time.monotonic() - started < seconds:
        events = turn.enqueue()
        if before is not None:
            before[-1][2].synchronize()
        before, number = events, number + 1
    return number, before


def _enqueue(replays: Sequence[tuple[Any, Call]]) -> Events:
    """Starts all replays, each between two events."""
    events = []
    for key, replay in replays:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        events.append((key, begin, end))
    return events


def _spans(events: Events) -> list[tuple[Any, float]]:
    """Seconds of replays that have ended, with their keys."""
    return [(key, begin.elapsed_time(end) * 1e-3) for key, begin, end in events]


def _timed(replays: Sequence[tuple[Any, Call]]) -> tuple[list[tuple[Any, float]], list[float]]:
    """Enqueues all replays; seconds of each, with the key that it came with, and clocks that were read meanwhile."""
    events = _enqueue(replays)
    last = events[-1][2]
    clocks: list[float] = []
    while len(clocks) < READINGS and (read := _clock_before(last)):
        clocks += read
    last.synchronize()
    return _spans(events), clocks


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
