"""Device time of a call in a layer of a model, back to back, and under load; several computations take turns.

    in-layer      a small kernel runs before each call, as in a model; the time of the small kernels is subtracted
    back to back  calls alone, so that the start of one may overlap with the end of another
    sustained     in-layer after 0.4 s of such calls, at the clock that the power limit allows

The first two begin after a rest and take turns with everything that is timed together, replay by replay and in an order
that reverses. The third is taken under one load without a pause, in which the computations take turns of 20 ms, so that
all see the same clock and temperature. (One after the other, half a second each, the same matrix product took 1.30
times as long the second time.)
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench import nvml, timing
from bench.timing import Call, Expected, percentiles, require_expected

REPLAYS: Final = 20
"""Replays of a graph, unless they take longer than `MAX_SECONDS`."""
FEW_REPLAYS: Final = 8
MAX_SECONDS: Final = 0.06
REST_SECONDS: Final = 0.1
"""Idle time before a measurement; without it, the clock still depends on the previous measurement."""
BURST_SECONDS: Final = 0.04
"""Seconds of replays after a rest. Work that draws 700 W runs for 50 ms before the card lowers its clock (MLA, topk
16384: 20 calls take 2,495 us each, all later ones 2,850). If one replay takes more than a quarter of it, there is a
single rest, and the clock falls."""
LOAD_SECONDS: Final = 0.4
"""Seconds of calls, in turns too, before a sustained time is taken."""
TURN_SECONDS: Final = 0.02
"""Seconds of replays of one computation under load. Two turns are in flight, so the GPU never waits."""
ROUNDS: Final = 10
"""Turns of each computation in which replays are timed, in an order that reverses from round to round."""
FEW_ROUNDS, ROUNDS_SECONDS = 4, 0.7
"""Fewer rounds if more would take longer than this many seconds."""
TURN_REPLAYS: Final = 16
"""Most replays of a turn that are timed: the last ones, from its middle on."""
SETTLED_SECONDS: Final = 0.1
POWER_SECONDS: Final = 1.0
"""Seconds of load of one computation alone, with the energy counter running: it moves every 20 to 100 ms."""
LONG_CALL_SECONDS: Final = 2e-3
"""Calls from this length on have a graph each: with 20 replays of all input sets, a case would take ten seconds."""
SMALL_ELEMENTS: Final = 4096
READINGS: Final = 20
"""Most readings of the clock in one measurement."""


@dataclass(frozen=True)
class Graphs:
    """The graphs that are replayed to time one computation: see `prepare`.

    calls         calls of one replay
    back_to_back  replays of the calls, to be made in turn
    in_layer      replays of a small kernel and a call each
    results       results of the captured calls, by the replays that write them
    expected      results of eager calls; None if the caller has checked
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
        """Compares all written results; returns the number of input sets, 0 if nothing is expected.

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
    us_sustained        median over rounds, None if it was not requested
    rounds_us           in-layer median of each round, whose median is `us_sustained`: see `sustained_ratio`
    sm_mhz              SM clock during sustained times, of everything that was timed together
    sm_mhz_rested       SM clock after a rest
    watts               power of the card under a second of load of this computation alone
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
        """Returns this time under load over another's: the median over the rounds in which both were timed."""
        if not self.rounds_us or len(self.rounds_us) != len(other.rounds_us):
            return None
        return statistics.median(own / theirs for own, theirs in zip(self.rounds_us, other.rounds_us, strict=True))

    def as_record(self) -> dict[str, float]:
        """Returns the keys of a record, without those that were not measured."""
        times = ("us", "us_p10", "us_p90", "us_back_to_back", "us_sustained", "us_loaded_alone")
        rounded = {name: round(value, 3) for name in times if (value := getattr(self, name)) is not None}
        for name in ("sm_mhz", "sm_mhz_rested", "watts"):
            if (value := getattr(self, name)) is not None:
                rounded[name] = round(value)
        return {**rounded, **({"sets_compared": self.sets_compared} if self.sets_compared else {})}


# ---- preparing


def prepare(calls: Sequence[Call], *, expected: Expected | None = None) -> Graphs:
    """Captures the graphs that `time_together` replays.

    Args:
        calls: the same computation over rotated input sets that together outgrow the L2 cache.
        expected: the results of each call, everything that it writes. None for a peer, which its caller checks.
    """
    if not calls:
        raise ValueError("calls: got none, needs at least one")
    timing.warm(calls)
    groups = [[call] for call in calls] if _is_long(calls) else [list(calls)]
    small = small_kernel()
    plain = [timing.capture(group, warmed=True) for group in groups]
    layered = [
        timing.capture([functools.partial(_after, small, call) for call in group], warmed=True) for group in groups
    ]
    back_to_back, in_layer = (tuple(graph.replay for graph, _ in captured) for captured in (plain, layered))
    written = ((in_layer, layered), (back_to_back, plain))
    results = tuple((replays, [one for _, found in captured for one in found]) for replays, captured in written)
    return Graphs(len(groups[0]), back_to_back, in_layer, results, expected, tuple(calls))


def prepare_eager(calls: Sequence[Call]) -> Graphs:
    """Prepares calls that cannot be captured, without graphs; they must take far longer than their launch."""
    timing.warm(calls)
    small = small_kernel()
    return Graphs(1, tuple(calls), tuple(functools.partial(_after, small, call) for call in calls))


def _after(small: Call, call: Call) -> Any:
    small()
    return call()


def _all(replays: Sequence[Call]) -> None:
    for replay in replays:
        replay()


def _is_long(calls: Sequence[Call]) -> bool:
    return timing.event_seconds(lambda: _all(calls)) > LONG_CALL_SECONDS * len(calls)


def small_kernel() -> Call:
    """Returns a kernel that stands for a layer's other kernels: it adds to 4,096 numbers, launched without overlap."""
    return functools.partial(_small_tensor(torch.cuda.current_device()).add_, 1.0)


@functools.cache
def _small_tensor(device: int) -> torch.Tensor:
    return torch.zeros(SMALL_ELEMENTS, dtype=torch.float32, device=torch.device("cuda", device))


@functools.cache
def _small_graph(calls: int, device: int) -> Call:
    """Returns replays of `calls` small kernels on the current device."""
    graph, _ = timing.capture([small_kernel()] * calls)
    return graph.replay


# ---- timing


def time_calls(calls: Sequence[Call], *, sustained: bool = True) -> Timing:
    """Calls `time_together` for one computation."""
    return time_together({"": prepare(calls)}, sustained=sustained)[""]


def time_together(
    ways: Mapping[str, Graphs], *, sustained: bool | Collection[str] = True, power: bool = False
) -> dict[str, Timing]:
    """Measures device times of computations that are to be compared, by their names.

    Args:
        ways: the computations.
        sustained: whether to time them under load too, or which of them; takes 0.4 s, and 0.2 s for each.
        power: whether to load the card with each of these alone too, for its power and time; takes 1.1 s each.

    Raises:
        WrongReplay: results of the timed replays, or of one more replay over poison, are not those expected.
    """
    if not ways:
        raise ValueError("ways: got none, needs at least one")
    nvml.sm_mhz()  # the first reading takes long
    timed = {name: _Timed(graphs) for name, graphs in ways.items()}
    rested_mhz = _rest_and_replay(list(timed.values()))
    loaded = {
        name: one for name, one in timed.items() if (sustained if isinstance(sustained, bool) else name in sustained)
    }
    mhz = _take_turns(list(loaded.values())) if loaded else None
    alone = {name: _alone(one) for name, one in loaded.items()} if power else {}
    timings = {}
    for name, one in timed.items():
        us, p10, p90 = one.us("in-layer")
        watts, us_loaded_alone = alone.get(name, (None, None))
        rounds = one.rounds_us()
        timings[name] = Timing(
            us=us,
            us_p10=p10,
            us_p90=p90,
            us_back_to_back=one.us("back to back")[0],
            us_sustained=statistics.median(rounds) if rounds else None,
            sm_mhz=mhz if rounds else None,
            sm_mhz_rested=rested_mhz,
            watts=watts,
            sets_compared=one.graphs.require_expected(),
            us_loaded_alone=us_loaded_alone,
            rounds_us=rounds,
        )
    return timings


Events = list[tuple[str, torch.cuda.Event, torch.cuda.Event]]
"""Kind, start and end of replays."""


class _Timed:
    """A computation while it is timed.

    seconds  approximate seconds of a replay of each kind
    spans    seconds of replays of each kind after a rest
    turns    under load, the median seconds of a replay in each turn that was kept
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        kinds = {
            "small": (_small_graph(graphs.calls, torch.cuda.current_device()),),
            "in-layer": graphs.in_layer,
            "back to back": graphs.back_to_back,
        }
        self._replays = {kind: itertools.cycle(replays) for kind, replays in kinds.items()}
        self.seconds: dict[str, float] = {}
        for kind in kinds:
            self.replay(kind)  # not counted: the first replay of a graph uploads it
            self.seconds[kind] = timing.event_seconds(functools.partial(self.replay, kind))
        self.spans: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.turns: list[float] = []
        self._small_in_turns: list[float] = []
        self.replays_of_turn = max(1, round(TURN_SECONDS / max(self.seconds["in-layer"], 1e-6)))

    def replay(self, kind: str) -> None:
        """Replays the next graph of a kind."""
        next(self._replays[kind])()

    def us(self, kind: str) -> tuple[float, float, float]:
        """Returns median, 10th and 90th percentile of microseconds a call; small kernels in a layer are subtracted."""
        small = statistics.median(self.spans["small"]) if kind == "in-layer" else 0.0
        return percentiles([(span - small) * 1e6 / self.graphs.calls for span in self.spans[kind]])

    def start_turn(self) -> Events:
        """Starts a turn under load: replays, the last of which are timed, and one of only the small kernels."""
        timed = min(TURN_REPLAYS, -(-self.replays_of_turn // 2))
        for _ in range(self.replays_of_turn - timed):
            self.replay("in-layer")
        return _enqueue([(self, "in-layer")] * timed + [(self, "small")])

    def end_turn(self, events: Events, kept: bool) -> None:
        """Waits for a turn, and keeps its times."""
        events[-1][2].synchronize()
        if kept:
            spans = [begin.elapsed_time(end) * 1e-3 for _, begin, end in events]
            self.turns.append(statistics.median(spans[:-1]))
            self._small_in_turns.append(spans[-1])

    def rounds_us(self) -> tuple[float, ...]:
        """Returns in-layer microseconds of a call, for each turn that was kept."""
        if not self.turns:
            return ()
        small = statistics.median(self._small_in_turns)
        return tuple((span - small) * 1e6 / self.graphs.calls for span in self.turns)

    def mean_us(self, seconds: float, turns: int) -> float:
        """Returns in-layer microseconds of a call, from `turns` turns that took `seconds`."""
        small, number = statistics.median(self._small_in_turns), self.replays_of_turn
        return (seconds / turns - (number + 1) * small) * 1e6 / (number * self.graphs.calls)


def _rest_and_replay(timed: Sequence[_Timed]) -> float | None:
    """Measures all replays in bursts after rests, in an order that reverses; returns the SM clock meanwhile."""
    there = [(one, kind) for one in timed for kind in one.spans]
    # the order reverses, as under load: without it, the later one of equal kernels is slower as the clock falls
    queue = [
        (one, kind)
        for number in range(REPLAYS)
        for one, kind in (there if number % 2 == 0 else there[::-1])
        if number < (REPLAYS if REPLAYS * one.seconds[kind] <= MAX_SECONDS else FEW_REPLAYS)
    ]
    rests = max(one.seconds[kind] for one, kind in there) <= BURST_SECONDS / 4
    clocks: list[float] = []
    place = 0
    while place < len(queue):
        if rests or place == 0:
            torch.cuda.synchronize()
            time.sleep(REST_SECONDS)
        first, left = place, BURST_SECONDS
        while place < len(queue) and (left > 0 or place == first):
            one, kind = queue[place]
            left -= one.seconds[kind]
            place += 1
        burst = queue[first:place]
        burst[0][0].replay(burst[0][1])  # not counted: the host gets ahead of the GPU
        events = _enqueue(burst)
        clocks += _clocks_before(events[-1][2], READINGS)
        events[-1][2].synchronize()
        for (one, kind), (_, begin, end) in zip(burst, events, strict=True):
            one.spans[kind].append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(clocks) if clocks else None


def _take_turns(timed: Sequence[_Timed]) -> float | None:
    """Measures turns of all computations under one load, without a pause; returns the SM clock meanwhile.

    Two turns are in flight, so the GPU never waits.
    """
    turn_seconds = sum(one.replays_of_turn * one.seconds["in-layer"] for one in timed)
    rounds = ROUNDS if ROUNDS * turn_seconds <= ROUNDS_SECONDS else FEW_ROUNDS
    clocks: list[float] = []
    before: tuple[_Timed, Events, bool] | None = None
    for one, kept in _order(timed, rounds):
        events = one.start_turn()
        if kept:
            clocks += _clocks_before(events[-1][2], 1)
        if before is not None:
            before[0].end_turn(*before[1:])
        before = one, events, kept
    if before is not None:
        before[0].end_turn(*before[1:])
    return statistics.median(clocks[-READINGS:]) if clocks else None


def _order(timed: Sequence[_Timed], rounds: int) -> Iterator[tuple[_Timed, bool]]:
    """Yields whose turn it is, and whether it is kept: turns before the rounds only load the card."""
    started = time.monotonic()
    while time.monotonic() - started < LOAD_SECONDS:
        yield from ((one, False) for one in timed)
    for number in range(rounds):
        yield from ((one, True) for one in (timed if number % 2 == 0 else timed[::-1]))


def _alone(one: _Timed) -> tuple[float | None, float]:
    """Returns the card's power under a load of one computation alone, and its mean in-layer microseconds of a call."""
    first, _ = _turns_alone(one, SETTLED_SECONDS, None)
    before, started = nvml.joules(), time.monotonic()
    last, number = _turns_alone(one, POWER_SECONDS, first)
    after, took = nvml.joules(), time.monotonic() - started
    last[-1][2].synchronize()
    us = one.mean_us(first[-1][2].elapsed_time(last[-1][2]) * 1e-3, number)
    return None if before is None or after is None else (after - before) / took, us


def _turns_alone(one: _Timed, seconds: float, before: Events | None) -> tuple[Events, int]:
    """Makes turns without a pause; returns the last one, which is left in flight, and their number."""
    started, number = time.monotonic(), 0
    while before is None or time.monotonic() - started < seconds:
        events = one.start_turn()
        if before is not None:
            before[-1][2].synchronize()
        before, number = events, number + 1
    return before, number


def _enqueue(replays: Sequence[tuple[_Timed, str]]) -> Events:
    """Starts all replays, each between two events."""
    events = []
    for one, kind in replays:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        one.replay(kind)
        end.record()
        events.append((kind, begin, end))
    return events


def _clocks_before(end: torch.cuda.Event, most: int) -> list[float]:
    """Reads SM clocks until the GPU comes to `end`."""
    clocks: list[float] = []
    while len(clocks) < most and not end.query():
        reading = nvml.sm_mhz()
        if reading is None or end.query():
            break
        clocks.append(reading)
    return clocks
