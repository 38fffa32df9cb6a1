"""Runs rounds in several processes, each with its own device context. A process that dies is counted and replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from bench.fuzzing.rounds import THREADS, Fault, Outcome, Work, run_round

HANG_S: Final = 120.0
"""Seconds after which a round counts as hung; usually it takes a few."""
START_S: Final = 120.0
"""Additional seconds for the first round of a process, which imports torch and loads all kernels."""
MAX_FAULTS: Final = 8
"""The run ends after this many faults: more would show nothing new."""

RunRound = Callable[[Work, torch.device, MutableSequence[int]], Outcome]


@dataclass
class Total:
    """The sum of all rounds.

    outcome  sum of the rounds that ended
    seeds    of these rounds
    faults   descriptions of the rounds that did not end
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
        """Returns [first, last] of the seeds of all rounds that ended."""
        merged: list[list[int]] = []
        for seed in sorted(self.seeds):
            if merged and merged[-1][1] == seed - 1:
                merged[-1][1] = seed
            else:
                merged.append([seed, seed])
        return merged


def serve(connection: Connection, marks: Any, device: str, cores: int, run: RunRound) -> None:
    """Runs a worker: one round for each message, until it gets None. A fault ends the process."""
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
    """A worker process, which makes one round after the other."""

    def __init__(self, device: torch.device, cores: int, run: RunRound) -> None:
        os.environ["PYTHONSAFEPATH"] = "1"  # else new processes look for modules in the current directory
        context = multiprocessing.get_context("spawn")  # fork would copy the locks and threads of torch
        self.connection, theirs = context.Pipe()
        self.marks = context.Array("q", THREADS + 1, lock=False)
        self.process = context.Process(target=serve, args=(theirs, self.marks, str(device), cores, run), daemon=True)
        self.process.start()
        theirs.close()
        self.patience = HANG_S + START_S

    def make(self, work: Work) -> Outcome | str:
        """Returns the outcome of a round, or in words what went wrong; the process has then ended."""
        try:
            self.connection.send(work)
            said = self.connection.recv() if self.connection.poll(self.patience) else "it did not answer in time"
        except (EOFError, OSError):
            self.process.join()
            said = f"it died with status {self.process.exitcode}"
        self.patience = HANG_S
        if isinstance(said, Outcome):
            return said
        self.process.kill()
        return f"round {work.seed}, threads at calls [{', '.join(map(str, self.marks))}]: {said}"

    def end(self) -> None:
        """Tells the process to end, and waits for it."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(10.0)
        self.process.kill()


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
        device: device of the calls.
        workers: number of processes.
        run: makes a round; other processes must be able to import it.
        report: called after each round and each fault.
    """
    total = Total()
    if workers == 0:
        for work in rounds:
            total.add(work, run(work, device, [0] * (THREADS + 1)))
            report(total)
        return total
    cores, lock = max(1, (os.cpu_count() or 1) // workers), threading.Lock()

    def work_off() -> None:
        """Gives rounds to one process after the other, until none is left or too much is wrong."""
        worker: Worker | None = None
        while True:
            with lock:
                work = next(rounds, None) if len(total.faults) < MAX_FAULTS else None
            if work is None:
                break
            worker = worker or Worker(device, cores, run)
            answer = worker.make(work)
            with lock:
                if isinstance(answer, Outcome):
                    total.add(work, answer)
                else:
                    total.faults.append(answer)
                    worker = None
                report(total)
        if worker is not None:
            worker.end()

    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(work_off) for _ in range(workers)]:
            done.result()
    return total
