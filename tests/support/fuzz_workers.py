"""Rounds that fail, for worker processes: those can import them."""

import os
import time
from typing import Any

from scripts.fuzzing.rounds import Fault, Finding, Outcome, Work


def count(work: Work, *others: Any) -> Outcome:
    """Makes nothing and says that it made a call for each seed, one of which was wrong."""
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
    """The second round does not end."""
    if work.first == 10:
        time.sleep(1000)
    return count(work)
