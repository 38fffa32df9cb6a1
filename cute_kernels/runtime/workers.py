"""Processes that work for this one: new interpreters that import from the same places, and end when it ends.

multiprocessing is not used. Its processes import from the current directory while they start, its pools outlive a
parent that is killed, and a daemonic process, as servers start them, may have no children.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

Item = TypeVar("Item")


def python_command(code: str) -> list[str]:
    """Returns the command of a new interpreter that runs `code` and imports from where this process does.

    `python -c` alone looks in the current directory first, where anybody may have left a `json.py`.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]


def call_each(
    function: Callable[[Item], None],
    items: Sequence[Item],
    processes: int,
    on_done: Callable[[Item], None],
    timeout_s: float | None = None,
) -> None:
    """Calls a function with each item, in other processes.

    If this process is killed, each worker ends after its current call, because its standard input ends.

    Args:
        function: importable by its name. It and the items are pickled.
        items: arguments, one for each call.
        processes: number of workers, at most one for each item.
        on_done: called in this process with each item whose call has returned.
        timeout_s: seconds after which the processes are ended and this returns.

    Raises:
        ValueError, RuntimeError: the first error of a call; other types become a RuntimeError with their text.
    """
    give_up = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = list(reversed(items))
    with contextlib.ExitStack() as ends:
        idle = [ends.enter_context(_Worker()) for _ in range(min(processes, len(items)))]
        busy: dict[Any, Item] = {}  # by the worker that handles the item
        while waiting or busy:
            while waiting and idle:
                worker, item = idle.pop(), waiting.pop()
                worker.send((function, item))
                busy[worker] = item
            answered: list[Any] = wait(list(busy), None if give_up is None else max(0.0, give_up - time.monotonic()))
            if not answered:
                return
            for worker in answered:
                worker.receive()
                on_done(busy.pop(worker))
                idle.append(worker)


class _Worker:
    """A process that runs `serve`."""

    def __enter__(self) -> _Worker:
        # `serve` is found by its path: a loader of kernels may have given the package another name
        command = python_command(f"import runpy; runpy.run_path({__file__!r})['serve']()")
        # a session of its own: Ctrl-C in a terminal interrupts this process alone, which then ends the workers
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process, contextlib.suppress(BrokenPipeError):
            self._requests.close()

    def fileno(self) -> int:
        return self._answers.fileno()

    def send(self, call: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` says that the process has ended
            pickle.dump(call, self._requests)
            self._requests.flush()

    def receive(self) -> None:
        try:
            error = pickle.load(self._answers)
        except EOFError:
            raise RuntimeError(f"a process that compiles kernels ended with status {self._process.wait()}") from None
        if error is not None:
            raise error


def serve() -> None:
    """Makes the calls that come through standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything else that is printed goes to standard error
    gc.set_threshold(50_000, 20, 50)  # tracing a kernel makes a million objects, hardly one of them in a cycle
    while True:
        error: Exception | None = None
        try:
            function, item = pickle.load(sys.stdin.buffer)
            function(item)
        except EOFError:
            return
        except Exception as failure:  # an error of another class may not survive pickling
            plain = type(failure) in (ValueError, RuntimeError)
            error = failure if plain else RuntimeError(f"{type(failure).__name__}: {failure}")
        pickle.dump(error, answers)
        answers.flush()
