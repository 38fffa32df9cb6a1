"""Threads of this package, for work that nothing in the caller's thread may interrupt.

An exception that a signal handler raises (Ctrl-C, a notebook's stop button, a test's time limit) arrives in the main
thread, between any two steps of Python. In the middle of a compilation or of the import of the compiler it ends the
process or leaves it unable to compile. So both run in a thread of their own: the caller waits, and may stop waiting,
while the work goes on to its end.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

compiling = threading.RLock()
"""Held by the thread that uses the compiler, whose state is global: a process compiles one kernel at a time."""

# A fork waits for the compilation under way: the child has a compiler in order, and a lock that its thread can take.
os.register_at_fork(before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release)


def in_new_thread(work: Callable[[], Result]) -> Result:
    """Returns the result of `work`, or its exception, from a new thread.

    If the wait for it is interrupted, the thread goes on; a process that exits waits for it.
    """
    done: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run(done: concurrent.futures.Future[Result]) -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised in the caller's thread
            done.set_exception(error)
        finally:
            del done  # an exception holds the frames that it passed through, and so would hold itself

    threading.Thread(target=run, args=(done,), name="cute_kernels").start()
    try:
        return done.result()
    finally:
        del done
