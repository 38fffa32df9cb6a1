"""Helpers for hooks in serving stacks: they stand aside for unknown calls, and say so once. No stack is imported."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(r"\d+")
_REPLACED = "replaced_by_cute_kernels"
"""Attribute of a function that `replace` has installed. `__wrapped__` does not tell: stacks' decorators set it too."""


def or_original(
    ours: Callable[..., Any], original: Callable[..., Any], say: Callable[[str], None], *args: Any, **kwargs: Any
) -> Any:
    """Returns the result of `ours` for a call, or of `original` if ours does not take the call.

    Args:
        ours: raises AttributeError, TypeError or ValueError before any launch for a call that it does not take. An
            argument that it has no name for is a TypeError by itself, an attribute that has moved an AttributeError.
        original: the function that a hook replaces.
        say: called with the reason.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    try:
        return ours(*args, **kwargs)
    except (AttributeError, TypeError, ValueError) as error:
        reason = str(error)
    say(reason)
    return original(*args, **kwargs)


def replace(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], missing: Callable[[], None]
) -> None:
    """Replaces a function of a module or a method of a class by `make(original)`; a second call does nothing.

    Args:
        owner: the module or class; None if the class itself is missing.
        name: name of the function.
        make: returns the replacement for the original; the replacement of a method takes the object first.
        missing: called if the function does not exist.
    """
    original = getattr(owner, name, None)
    if original is None:
        missing()
    elif not hasattr(original, _REPLACED):
        ours = make(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # a function, so that a class binds it to its objects
            return ours(*args, **kwargs)

        setattr(call, _REPLACED, True)
        setattr(owner, name, call)


class SayOnce:
    """Says a line once in each process. Lines that differ only in numbers are one: some name the shapes of a batch."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._last = ""

    def __call__(self, text: str) -> None:
        """Says the line, unless it was said before."""
        if text == self._last:  # fast path: a layer says the same in each step
            return
        self._last, kind = text, _NUMBER.sub("#", text)
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


say_once = SayOnce(functools.partial(logging.getLogger(__name__).info, "cute_kernels: %s"))
"""Logs a line, once in each process."""
