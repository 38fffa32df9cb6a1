"""Rounds in several processes, each with its own device context. A process that dies is counted and replaced."""

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

from bench.fuzzing.rounds import THREADS, Fault, Outcome, Work, run_round

HANG_S: Final = 120.0
"""Seconds after which a round counts as hung; it takes a few."""
START_S: Final = 120.0
"""Seconds in addition for the first round of a process, which imports torch and loads all kernels."""
MAX_FAULTS: Final = 8
"""The run ends after this many faults: more would tell nothing new."""

RunRound = Callable[[Work, torch.device, MutableSequence[int]], Outcome]


@dataclass
class Total:
    """The sum of all rounds.

    outcome  of the rounds that ended
    seeds    of these rounds
    faults   of the rounds that did not end, in words
    """

    outcome: Outcome = field(default_factory=Outcome)
    seeds: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, work: Work, outcome: Outcome) -> None:
        """Adds a round that ended."""
        self.outcome.calls += outcome.calls
        self.outcome.invalid_calls += outcome.invalid_calls
        self.outcome.findings += outcome.findings
        self.outcome.shapes |= outcome.shapes
        self.seeds.append(work.seed)

    def ranges(self) -> list[list[int]]:
        """[first, last] of the seeds of all rounds that ended."""
        merged: list[list[int]] = []
        for seed in sorted(self.seeds):
            if merged and merged[-1][1] == seed - 1:
                merged[-1][1] = seed
            else:
                merged.append([seed, seed])
        return merged


def serve(connection: Connection, marks: Any, device: str, cores: int, run: RunRound) -> None:
    """The main function of a worker: one round for each message, until it gets None. A fault ends the process."""
    torch.set_num_threads(cores)
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        while (work := connection.recv()) is not None:
            try:
                connection.send(run(work, torch.device(device), marks))
            except Fault as fault:
                connection.send(f"the device failed: {fault}")
                os._exit(1)  # a failed device allows no cleanup
            except Exception:
                connection.send(traceback.format_exc())
                os._exit(1)


class Worker:
    """A worker process and the round that it makes now."""

    def __init__(self, device: torch.device, cores: int, run: RunRound) -> None:
        os.environ["PYTHONSAFEPATH"] = "1"  # else new processes look for modules in the current directory
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
        """The outcome of its round, or what went wrong in words, or None while it works."""
        alive = self.process.is_alive()  # read before its answer: a process may answer and die
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
        """Tells a process that waits for work to end."""
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def end(self, seconds: float = 0.0) -> None:
        """Waits up to `seconds` for the process to end, then kills it."""
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
    """Makes all rounds in worker processes, or in this one if `workers` is 0.

    Args:
        rounds: yields the next round whenever a worker is free.
        device: to make the calls on.
        workers: number of processes.
        run: makes a round; other processes must be able to import it.
        report: called after each round and each fault.
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
    return f"round {work.seed}, threads at calls [{', '.join(map(str, marks))}]: {said}"
