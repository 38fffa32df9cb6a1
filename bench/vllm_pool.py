"""Runs jobs in processes of their own on one GPU, within a time: jobs that check run together, jobs that measure alone.

Processes are forked from one that has imported what they need, which saves each of them 10 s or more. They cannot harm
each other. A job's results are passed on as they come, so that nothing is lost if it fails later.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

Receive = Callable[["Job", str, Any], None]
TICK = 0.5  # seconds between two checks of the clock
LOG_TAIL = 2000  # characters of a log that an error quotes


@dataclass
class Job:
    """The work of a process.

    kind       kind of the job, a key of the pool's table
    options    options of the job; they can be pickled
    phase      jobs of a phase start when all of earlier phases have ended
    needs      what it waits for: names of jobs that have ended well, "NAME over" if they may fail, events
    gigabytes  GPU memory in GB
    seconds    most seconds that it may take
    least      least time that must be left for it to start
    fresh      whether it runs in a new interpreter, without waiting for the imports of the others
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    phase: int = 0
    needs: tuple[str, ...] = ()
    gigabytes: float = 2.0
    seconds: float = 120.0
    least: float = 10.0
    fresh: bool = False


class Messages:
    """Messages of a job to the pool."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, event: str, data: Any = None) -> None:
        """Sends a result, which the pool passes on."""
        self._connection.send((event, data))

    def wait_for_card(self) -> None:
        """Waits until no other job uses the GPU, which stays so until this one ends."""
        self.send("ready")
        self._connection.recv()


def work(call: Callable[[str, dict[str, Any], Messages], None], job: Job, connection: Connection, log: str) -> None:
    """Runs a job in a process; it ends without the destructors of a GPU's libraries, which can wait for ever."""
    os.setpgrp()  # so that it can be ended together with its children
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    messages = Messages(connection)
    try:
        call(job.kind, job.options, messages)
        messages.send("done")
    except BaseException as error:
        traceback.print_exc()
        messages.send("error", "".join(traceback.format_exception(error))[-LOG_TAIL:])
    finally:
        connection.close()
        os._exit(0)


@dataclass
class _Running:
    job: Job
    process: Any
    connection: Connection
    started: float
    state: str = "works"  # "ready": it waits for the card; "alone": it has it


class Pool:
    """Runs jobs; `receive(job, event, data)` gets their messages, and "failed" with the reason if one fails.

    Args:
        call: `call(kind, options, messages)`, a function of a module, runs a job.
        folder: for logs.
        receive: see above; it also gets "started" and "done".
        deadline: value of `time.monotonic()` at which running jobs are ended.
        gigabytes: GPU memory of all jobs together in GB; may be set later.
        slots: jobs at a time; jobs that wait for the card do not count.
        preload: modules that are imported once for all jobs, from now on.
    """

    def __init__(
        self,
        call: Callable[[str, dict[str, Any], Messages], None],
        folder: pathlib.Path,
        receive: Receive,
        *,
        deadline: float,
        gigabytes: float = 100.0,
        slots: int = 6,
        preload: Sequence[str] = (),
    ) -> None:
        self._call, self._folder, self._receive = call, folder, receive
        self.deadline, self.gigabytes, self._slots = deadline, gigabytes, slots
        os.environ["PYTHONSAFEPATH"] = "1"  # else new processes look for modules in the current directory
        self._forking, self._fresh = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        if preload:
            self._forking.set_forkserver_preload(list(preload))
            forkserver.ensure_running()
        self._running: list[_Running] = []
        self._given: set[str] = set()
        self._drains = False  # all jobs that wait for the card get it before more are started

    def run(self, jobs: Iterable[Job]) -> dict[str, str]:
        """Runs all jobs; returns those that were left out, with the reason."""
        waiting, left = list(jobs), dict[str, str]()
        try:
            while waiting or self._running:
                self._start_what_fits(waiting, left)
                if not self._running:
                    self._leave_out(waiting, left)
                    continue
                self._give_card(waiting)
                connections = [one.connection for one in self._running]
                for connection in wait(connections, timeout=TICK):
                    self._hear(next(one for one in self._running if one.connection is connection))
                self._end_late_ones(left)
        finally:
            for one in list(self._running):
                self._end(one)
        return left

    def _leave_out(self, waiting: list[Job], left: dict[str, str]) -> None:
        """Leaves out jobs of the first phase that wait for something that cannot happen."""
        phase = min((job.phase for job in waiting), default=0)
        for job in [job for job in waiting if job.phase == phase]:
            waiting.remove(job)
            left[job.name] = f"needs {', '.join(need for need in job.needs if need not in self._given)}"

    def _start_what_fits(self, waiting: list[Job], left: dict[str, str]) -> None:
        remaining = self.deadline - time.monotonic()
        for job in [job for job in waiting if job.least > remaining]:
            waiting.remove(job)
            left[job.name] = f"needs {job.least:.0f} s, {max(remaining, 0):.0f} s were left"
        waits = any(one.state == "ready" for one in self._running)
        self._drains = self._drains and waits
        if self._drains or any(one.state == "alone" for one in self._running):
            return
        while (startable := self._next(waiting)) is not None:
            waiting.remove(startable)
            self._start(startable)

    def _next(self, waiting: Sequence[Job]) -> Job | None:
        """Returns the first job that can start now."""
        if sum(one.state == "works" for one in self._running) >= self._slots:
            return None
        used = sum(one.job.gigabytes for one in self._running)
        phase = min([job.phase for job in waiting] + [one.job.phase for one in self._running], default=0)
        for job in waiting:
            fits = used + job.gigabytes <= self.gigabytes or not self._running
            if job.phase == phase and fits and self._given.issuperset(job.needs):
                return job
        return None

    def _start(self, job: Job) -> None:
        ours, theirs = multiprocessing.Pipe()
        log = self._log_of(job)
        log.unlink(missing_ok=True)
        context: Any = self._fresh if job.fresh else self._forking
        process = context.Process(target=work, args=(self._call, job, theirs, str(log)))
        process.start()
        theirs.close()
        self._running.append(_Running(job, process, ours, time.monotonic()))
        self._receive(job, "started", None)

    def _log_of(self, job: Job) -> pathlib.Path:
        return self._folder / f"{job.name}.log"

    def _give_card(self, waiting: Sequence[Job]) -> None:
        """Lets a job continue that waits for the card, when nothing else uses it or is about to."""
        if all(one.state == "ready" for one in self._running) and (self._drains or self._next(waiting) is None):
            first = self._running[0]
            first.state, first.started, self._drains = "alone", time.monotonic(), True
            first.connection.send("go")

    def _hear(self, one: _Running) -> None:
        try:
            event, data = one.connection.recv()
        except (EOFError, OSError):
            log = self._log_of(one.job)
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            event, data = "error", f"the process ended: {text[-LOG_TAIL:]}"
        if event == "ready":
            one.state = "ready"
            return
        if event in ("done", "error"):
            self._end(one)
        if event == "error":
            self._failed(one.job, str(data))
            return
        self._given |= {one.job.name, f"{one.job.name} over"} if event == "done" else {event}
        self._receive(one.job, event, data)

    def _failed(self, job: Job, text: str) -> None:
        self._given.add(f"{job.name} over")
        self._receive(job, "failed", text)

    def _end_late_ones(self, left: dict[str, str]) -> None:
        now = time.monotonic()
        for one in list(self._running):
            if now > self.deadline:
                self._end(one)
                left[one.job.name] = "was not done in time"
            elif one.state != "ready" and now > one.started + one.job.seconds:
                self._end(one)
                self._failed(one.job, f"took more than {one.job.seconds:.0f} s")

    def _end(self, one: _Running) -> None:
        """Ends a process and its children."""
        self._running.remove(one)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.kill()  # one that has no group yet
        one.process.join(10)
        one.connection.close()
