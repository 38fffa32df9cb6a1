"""Rounds in several processes at once, each with a device context of its own; one that dies is counted and replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch

from scripts.fuzzing.rounds import THREADS, Fault, Finding, Outcome, Work, run_round

HANG_S: Final = 120.0
"""For a round, which takes some seconds."""
START_S: Final = 120.0
"""More for the first one of a process, which imports torch and loads all kernels."""
MAX_FAULTS: Final = 8
"""More say no more: the run ends."""

RunRound = Callable[[Work, torch.device, MutableSequence[int]], Outcome]


@dataclass
class Total:
    """All rounds together.

    outcome  sums of those that came to their end
    done     their seeds: valid and invalid ones
    faults   what became of the others, in words
    """

    outcome: Outcome = field(default_factory=Outcome)
    done: list[tuple[int, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, work: Work, outcome: Outcome) -> None:
        """One more round."""
        self.outcome.calls += outcome.calls
        self.outcome.invalid_calls += outcome.invalid_calls
        self.outcome.findings += outcome.findings
        self.outcome.shapes |= outcome.shapes
        self.done += [(work.first, work.last), (work.invalid_first, work.invalid_last)]

    def seeds(self) -> list[list[int]]:
        """First and last of all ranges of seeds that were made, neighbours together."""
        merged: list[list[int]] = []
        for first, end in sorted(pair for pair in self.done if pair[1] > pair[0]):
            if merged and merged[-1][1] == first - 1:
                merged[-1][1] = end - 1
            else:
                merged.append([first, end - 1])
        return merged


def serve(connection: Connection, marks: Any, device: str, cores: int, run: RunRound) -> None:
    """What a worker does: a round for each message, until None comes. A fault ends it."""
    torch.set_num_threads(cores)
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        while (work := connection.recv()) is not None:
            try:
                connection.send(run(work, torch.device(device), marks))
            except Fault as fault:
                connection.send(f"the device failed: {fault}")
                os._exit(1)  # nothing can be cleaned up
            except Exception:
                connection.send(traceback.format_exc())
                os._exit(1)


class Worker:
    """A process and the round that it is at."""

    def __init__(self, device: torch.device, cores: int, run: RunRound) -> None:
        context = multiprocessing.get_context("spawn")  # fork would copy the locks and threads of torch
        self.connection, theirs = context.Pipe()
        self.marks = context.Array("q", THREADS + 1, lock=False)
        self.process = context.Process(target=serve, args=(theirs, self.marks, str(device), cores, run), daemon=True)
        self.process.start()
        theirs.close()
        self.work: Work | None = None
        self.since = 0.0
        self.is_new = True

    def give(self, work: Work) -> None:
        """Starts a round."""
        self.work, self.since = work, time.monotonic()
        self.connection.send(work)

    def answer(self) -> Outcome | str | None:
        """The outcome of its round, what went wrong instead, or None while it is at work."""
        alive = self.process.is_alive()  # asked first: it may answer and die
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        if not alive:
            self.process.join()
            return f"it died with status {self.process.exitcode}"
        limit = HANG_S + (START_S if self.is_new else 0.0)
        if time.monotonic() - self.since > limit:
            return f"it did not answer for {limit:.0f} s"
        return None

    def dismiss(self) -> None:
        """Lets a process end that waits for work."""
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def end(self, seconds: float = 0.0) -> None:
        """Waits for so long, then ends the process whatever it does."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def run_rounds(
    rounds: Iterator[Work],
    device: torch.device,
    workers: int,
    *,
    run: RunRound = run_round,
    report: Callable[[Total], None] = lambda total: None,
) -> Total:
    """Makes rounds in worker processes, or in this one where `workers` is 0, until there are no more.

    Args:
        rounds: asked for the next one when a worker is free.
        device: to make the calls on.
        workers: processes.
        run: makes a round; importable, for other processes.
        report: called after each round, and each fault.
    """
    total = Total()
    if workers == 0:
        for work in rounds:
            try:
                total.add(work, run(work, device, [0] * (THREADS + 1)))
            except Fault as fault:
                total.faults.append(_fault(work, [], str(fault)))
                break
            report(total)
        return total
    cores = max(1, (os.cpu_count() or 1) // workers)
    idle: list[Worker] = []
    busy: list[Worker] = []
    more = True
    try:
        while True:
            while more and len(busy) < workers:
                following = next(rounds, None)
                if following is None:
                    more = False
                    break
                worker = idle.pop() if idle else Worker(device, cores, run)
                worker.give(following)
                busy.append(worker)
            if not busy:
                return total
            wait([end for worker in busy for end in (worker.connection, worker.process.sentinel)], timeout=1.0)
            for worker in list(busy):
                answer = worker.answer()
                if answer is None or worker.work is None:
                    continue
                busy.remove(worker)
                if isinstance(answer, Outcome):
                    total.add(worker.work, answer)
                    worker.is_new = False
                    idle.append(worker)
                else:
                    total.faults.append(_fault(worker.work, worker.marks, answer))
                    worker.end()
                    more = more and len(total.faults) < MAX_FAULTS
                report(total)
    finally:
        for worker in idle:
            worker.dismiss()
        for worker in idle:
            worker.end(10.0)
        for worker in busy:
            worker.end()


def _fault(work: Work, marks: MutableSequence[int], said: str) -> str:
    at = ", ".join(str(seed) for seed in marks)
    return f"seeds {work.first} to {work.last - 1}, threads at [{at}]: {said}"


def first_findings(total: Total, most: int) -> list[Finding]:
    """Some of what was wrong, each seed once."""
    return list({finding.seed: finding for finding in reversed(total.outcome.findings)}.values())[::-1][:most]
