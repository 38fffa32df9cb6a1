"""Eager calls at little cost: launch what an earlier call prepared, and check the arguments where that does not work.

A compiled kernel checks its own arguments before it launches anything: that they are tensors, their ranks, dtypes,
static sizes, strides and alignments, that sizes agree between them, and that they are on one CUDA device, which it
makes the current one for the launch. That takes 3 us for six tensors. The checks of `runtime.checks` say more precisely
what is wrong, but take 2.6 us a tensor on the hosts of the H200, so they run only before the first launch of a kind and
after a refused one.

What a kernel does not check belongs into the key of the prepared launch: that the device is an SM90, limits such as
2^31 slots, and the sign of integers, which it takes for one another (int8 for uint8, uint64 for int64).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

MAX_PREPARED = 4096  # about 1 MB of keys


def optimistic(launch: Callable[..., bool], checked: Callable[..., None]) -> Callable[..., None]:
    """The function that tries `launch` and falls back on `checked`, with the same arguments, all positional.

    Args:
        launch: launches what was prepared for arguments of this kind and returns True, or returns False. May raise
            anything for arguments that are wrong, as long as nothing was launched; the error is not shown.
        checked: raises what the caller is to see if an argument is wrong. Otherwise it does the whole work, and
            prepares later launches; an error of the kernel itself comes up here again.
    """

    def run(*arguments: object) -> None:
        try:
            if launch(*arguments):
                return
        except Exception:
            pass  # `checked` names the argument
        checked(*arguments)

    return run


def remember(prepared: dict[Key, Value], key: Key, value: Value) -> None:
    """Adds an entry to a dictionary of prepared launches, which starts over when it has `MAX_PREPARED`."""
    if len(prepared) >= MAX_PREPARED:
        prepared.clear()
    prepared[key] = value
