"""Rounds that fail, in a module that worker processes can import."""

import os
import time
from typing import Any

from bench.fuzzing.rounds import Fault, Finding, Outcome, Work


def count(work: Work, *others: Any) -> Outcome:
    """Makes no call, and reports one for each seed, of which one was wrong."""
    outcome = Outcome(calls=work.last - work.first, invalid_calls=1, shapes={("shape", work.first)})
    if work.first == 20:
        outcome.findings.append(Finding(23, "wrong"))
    return outcome


def die(work: Work, device: Any, marks: Any) -> Outcome:
    """The second round ends the process."""
    marks[2] = work.first + 1
    if work.first == 10:
        os._exit(11)
    return count(work)


def fail(work: Work, device: Any, marks: Any) -> Outcome:
    """The second round finds the device lost, and the third one is not made for its work."""
    if work.first == 10:
        raise Fault("an illegal memory access")
    if work.first == 20:
        raise LookupError("no such thing")
    return count(work)


def hang(work: Work, device: Any, marks: Any) -> Outcome:
    """The second round never ends."""
    if work.first == 10:
        time.sleep(1000)
    return count(work)
