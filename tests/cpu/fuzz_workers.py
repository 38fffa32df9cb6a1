"""Fuzzing rounds that fail, in a module that worker processes can import."""

import os
from typing import Any

from bench.fuzzing.rounds import Fault, Outcome, Work


def fail(work: Work, device: Any, marks: Any) -> Outcome:
    """The second round ends the process, the third finds the device lost."""
    if work.seed == 1:
        os._exit(11)
    if work.seed == 2:
        raise Fault("an illegal memory access")
    return Outcome(calls=1)
