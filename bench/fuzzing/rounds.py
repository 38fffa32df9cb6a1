"""A round: the oracle checks some calls one after another; then seven threads make all of them again, many times.

The GPU compares the bits of every later call with those of the checked one and counts differences; the counters are
read when the round ends. Each thread has a stream of its own. It makes calls of changing shapes in every mode, and
replays graphs. The main thread captures these graphs, and drops and replaces some while the other threads run.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import threading
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

from bench import kernels_run
from bench.fuzzing import strategies
from bench.fuzzing.calls import Call, Expected, Mode, WrongResult
from tests.kit.bad_input import ERROR, TABLES

THREADS: Final = 6
"""Threads in addition to the main thread."""
REPLAYS: Final = 0.35
"""Share of a thread's turns that replay a graph; the others make a call."""
GRAPHS_OF_THREAD: Final = 2
REFRESHES: Final = 3
"""How often a round replaces graphs after it has captured the first ones."""
CALLS_OF_GRAPH: Final = (1, 1, 2, 3, 4)
RESERVED: Final = 3 << 30
"""Bytes that torch's allocator may keep from one round to the next."""


class Work(NamedTuple):
    """The work of a round: it determines all of its calls on one kind of device.

    seed     seed of everything that is drawn
    calls    number of valid calls
    invalid  number of calls with one wrong argument
    turns    turns of each thread; a turn is one call, or one replay of several
    only     the one of `strategies.MAKERS` that makes the calls
    """

    seed: int
    calls: int = 48
    invalid: int = 0
    turns: int = 0
    only: str | None = None


class Finding(NamedTuple):
    """A wrong result in a round. `no_memory`: a call was not made because memory ran out."""

    seed: int
    said: str
    no_memory: bool = False


@dataclass
class Outcome:
    """The result of a round.

    calls          number of valid calls made and compared
    invalid_calls  number of invalid calls made
    findings       what was wrong
    shapes         distinct shapes of the valid calls
    """

    calls: int = 0
    invalid_calls: int = 0
    findings: list[Finding] = field(default_factory=list)
    shapes: set[tuple[str, ...]] = field(default_factory=set)


class Fault(Exception):
    """The device has failed: this process can make no more calls."""


class Unlisted(BaseException):
    """A plan asks for a kernel that is not compiled. No `except Exception` of an operator catches it."""


class Checked(NamedTuple):
    """A call whose results the oracle accepted, and their bits."""

    call: Call
    expected: Expected


def run_round(work: Work, device: torch.device, marks: MutableSequence[int] | None = None) -> Outcome:
    """Makes all calls of a round.

    Args:
        work: its seed and sizes.
        device: device of the calls.
        marks: item t is set to the number of the call that thread t works on; the main thread is 0.

    Raises:
        Fault: the device has failed.
    """
    marks = [0] * (THREADS + 1) if marks is None else marks
    outcome, checked = Outcome(), list[Checked]()

    def visit(call: Call) -> None:
        marks[0] = len(checked)
        try:
            found = check(call, device)
        except Unlisted:
            hypothesis.reject()
        outcome.calls += 1
        outcome.shapes.add(call.shape)
        if isinstance(found, Checked):
            checked.append(found)
        else:
            outcome.findings.append(Finding(work.seed, f"{call}: {'; '.join(found)}"))

    with kernels_run.watching(_require_listed):
        for_each_call(work, device, visit)
        refuse(work, device, outcome)
    require_no_fault(device)
    if checked and work.turns:
        Together(checked, device, work, marks).run(outcome)
    if device.type == "cuda" and torch.cuda.memory_reserved(device) > RESERVED:
        del checked
        torch.cuda.empty_cache()
    return outcome


def for_each_call(
    work: Work, device: torch.device, visit: Callable[[Call], None], phases: tuple[Phase, ...] = (Phase.generate,)
) -> None:
    """Calls `visit` with each call of a round."""

    @hypothesis.seed(work.seed)
    @hypothesis.settings(
        max_examples=work.calls, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(strategies.calls(device, work.only))
    def each(call: Call) -> None:
        visit(call)

    each()


def shrink(work: Work, device: torch.device) -> None:
    """Makes the calls of a round until one is wrong, and prints the simplest call that is wrong as well.

    Raises:
        AssertionError: with what is wrong.
    """

    def visit(call: Call) -> None:
        found = check(call, device)
        assert isinstance(found, Checked), "; ".join(found)

    for_each_call(work, device, visit, (Phase.generate, Phase.shrink))


@functools.cache
def _listed() -> frozenset[Any]:
    return frozenset(strategies.kernel_specs())


def _require_listed(spec: Any) -> None:
    if spec not in _listed():
        raise Unlisted(spec)


def check(call: Call, device: torch.device) -> Checked | list[str]:
    """Makes a call while no other runs, with all outputs passed in, and checks it; else returns what is wrong."""
    mode = call.modes[0]
    block = call.image.before.clone()
    try:
        values = call.run(mode, call.image.views(block, mode.given))
        require_no_fault(device)
        problems = call.oracle(values)
    except Fault:
        raise
    except WrongResult as error:
        return [str(error)]
    except Exception as error:  # the operator refused a valid call, or the oracle failed
        require_no_fault(device)
        return [f"raised {type(error).__name__}: {error}"]
    if strays := call.image.strays(block):
        problems = [*problems, f"{strays} words around the outputs were overwritten"]
    return problems or Checked(call, Expected(call, values))


def refuse(work: Work, device: torch.device, outcome: Outcome) -> None:
    """Makes calls with one wrong argument, some after the valid call; each must be refused by the argument's name."""
    rng = random.Random(work.seed)
    for _ in range(work.invalid):
        name = rng.choice(tuple(TABLES))
        table, label = TABLES[name], rng.choice(_labels(name))
        if rng.random() < 0.1:  # prepared launches of the shapes then exist
            with contextlib.suppress(Unlisted):
                table.function(**table.right(str(device)))
        try:
            argument, _ = table.call(label, str(device))
            said = str(table.refusal(label, str(device)))
            problem = "" if re.search(ERROR.format(argument), said) else f"the error does not name {argument}: {said}"
        except Unlisted:
            problem = "got as far as a kernel"
        except Exception as error:  # the call was accepted, or an output was written
            problem = f"{type(error).__name__}: {error}"
        outcome.invalid_calls += 1
        if problem:
            outcome.findings.append(Finding(work.seed, f"{name}, {label}: {problem}"))


@functools.cache
def _labels(name: str) -> tuple[str, ...]:
    return tuple(TABLES[name].wrong("cpu"))


def require_no_fault(device: torch.device) -> None:
    """Synchronizes with the device.

    Raises:
        Fault: the device reports an error.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise Fault(str(error)) from error


class Gate:
    """A gate: threads may be inside while it is open, and none is inside while it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Waits until the gate is open; stays inside for the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Waits until no thread is inside, and keeps all outside for the block."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class Recorded(NamedTuple):
    """A captured graph of several calls, with the memory that each of them writes."""

    graph: Any
    items: list[tuple[int, Mode, torch.Tensor | None, dict[str, torch.Tensor]]]


class Together:
    """The calls of a round, made by several threads at once."""

    def __init__(self, checked: list[Checked], device: torch.device, work: Work, marks: MutableSequence[int]) -> None:
        self.checked, self.device, self.work, self.marks = checked, device, work, marks
        self.gate, self.stop = Gate(), threading.Event()
        self.on_gpu = device.type == "cuda"
        self.graphs: list[list[Recorded]] = [[] for _ in range(THREADS + 1)]
        self.made = [0] * (THREADS + 1)
        self.errors: list[tuple[int, BaseException]] = []
        self.counters: list[torch.Tensor] = []
        self.rng = random.Random(work.seed)
        self.capture_stream = torch.cuda.Stream(device) if self.on_gpu else None

    def run(self, outcome: Outcome) -> None:
        """Runs all threads to their end and adds their findings to `outcome`."""
        width = 1 + max(len(one.call.modes) for one in self.checked)
        size = (len(self.checked), width)
        self.counters = [torch.zeros(size, dtype=torch.int64, device=self.device) for _ in range(THREADS + 1)]
        require_no_fault(self.device)
        threads = [threading.Thread(target=self._side_thread, args=(n,), daemon=True) for n in range(1, THREADS + 1)]
        for thread in threads:
            thread.start()
        self._turns(0, self._refresh)
        for thread in threads:
            thread.join()
        require_no_fault(self.device)
        outcome.calls += sum(self.made)
        for place, error in self.errors:
            said = f"{self.checked[place].call}, from a thread: {type(error).__name__}: {error}"
            outcome.findings.append(Finding(self.work.seed, said, isinstance(error, torch.OutOfMemoryError)))
        for number, counts in enumerate(self.counters):
            for place, row in enumerate(counts.tolist()):
                for column, count in enumerate(row):
                    if count:
                        outcome.findings.append(self._describe(place, column, count, number))

    def _describe(self, place: int, column: int, count: int, thread: int) -> Finding:
        call = self.checked[place].call
        how = call.modes[column] if column < len(call.modes) else "replayed"
        said = f"{call}: other bits than alone, {count} times in thread {thread}, {how}"
        return Finding(self.work.seed, said)

    def _side_thread(self, thread: int) -> None:
        if not self.on_gpu:
            self._turns(thread)
            return
        torch.cuda.set_device(self.device)
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            self._turns(thread)
            try:
                stream.synchronize()
            except RuntimeError as error:
                self.errors.append((self.marks[thread], error))

    def _turns(self, thread: int, pause: Any = None) -> None:
        """Makes the turns of one thread; calls `pause`, if given, four times, outside of the gate."""
        rng = random.Random(f"{self.work.seed} {thread}")
        counters = [list(row.unbind()) for row in self.counters[thread].unbind()]
        pauses = {self.work.turns * n // (REFRESHES + 1) for n in range(REFRESHES + 1)}
        for turn in range(self.work.turns):
            if self.stop.is_set():
                return
            try:
                if pause is not None and turn in pauses:
                    pause()
                with self.gate.inside():
                    if self.graphs[thread] and rng.random() < REPLAYS:
                        self._replay(thread, rng.choice(self.graphs[thread]), counters)
                    else:
                        self._call(thread, rng.randrange(len(self.checked)), rng, counters)
            except Exception as error:  # one error is enough, and the device may have failed
                self.errors.append((self.marks[thread], error))
                self.stop.set()
                return

    def _call(self, thread: int, place: int, rng: random.Random, counters: list[list[torch.Tensor]]) -> None:
        call, expected = self.checked[place]
        self.marks[thread] = place
        column = rng.randrange(len(call.modes))
        mode = call.modes[column]
        block = call.image.before.clone() if mode.given else None
        views = {} if block is None else call.image.views(block, mode.given)
        for name in mode.returns:
            if name not in views:
                torch.full_like(expected.values[name], -1)  # poison in memory that the op may get next
        values = call.run(mode, views)
        expected.count_wrong(mode, block, values, counters[place][column])
        self.made[thread] += 1

    def _replay(self, thread: int, recorded: Recorded, counters: list[list[torch.Tensor]]) -> None:
        for place, mode, block, values in recorded.items:
            call = self.checked[place].call
            self.marks[thread] = place
            if block is not None:
                block.copy_(call.image.before)
            for name, value in values.items():
                if name not in mode.given:
                    value.fill_(torch.nan)
        recorded.graph.replay()
        for place, mode, block, values in recorded.items:
            self.checked[place].expected.count_wrong(mode, block, values, counters[place][-1])
        self.made[thread] += len(recorded.items)

    def _refresh(self) -> None:
        """Drops one graph of each thread that has its full number, and captures new ones, while all threads wait."""
        if not self.on_gpu:
            return
        with self.gate.closed():
            torch.cuda.synchronize(self.device)  # a graph that is dropped may still be running
            for graphs in self.graphs:
                if len(graphs) >= GRAPHS_OF_THREAD:
                    graphs.pop(self.rng.randrange(len(graphs)))
                while len(graphs) < GRAPHS_OF_THREAD:
                    recorded = self._record()
                    if recorded is None:
                        break
                    graphs.append(recorded)
            torch.cuda.synchronize(self.device)

    def _record(self) -> Recorded | None:
        able = [place for place, one in enumerate(self.checked) if one.call.capturable]
        chosen = self.rng.sample(able, min(self.rng.choice(CALLS_OF_GRAPH), len(able)))
        if not chosen:
            return None
        prepared = []
        for place in chosen:
            call = self.checked[place].call
            mode = self.rng.choice(call.modes)
            prepared.append((place, mode, call.image.before.clone() if mode.given else None))
        torch.cuda.synchronize(self.device)
        items = []
        # torch.cuda.graph would also collect garbage and return cached memory, 100 ms each time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.capture_stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for place, mode, block in prepared:
                    call = self.checked[place].call
                    self.marks[0] = place
                    views = {} if block is None else call.image.views(block, mode.given)
                    items.append((place, mode, block, call.run(mode, views)))
            finally:
                graph.capture_end()
        return Recorded(graph, items)
