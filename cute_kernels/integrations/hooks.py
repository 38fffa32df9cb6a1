"""What hooks in serving stacks share: they stand aside for what they do not know, and say so once. Imports no stack."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(r"\d+")
_REPLACED = "replaced_by_cute_kernels"
"""Attribute of what `replace` has put somewhere. `__wrapped__` does not tell: a stack's own decorators set it too."""


def or_original(
    ours: Callable[..., Any], original: Callable[..., Any], say: Callable[[str], None], *args: Any, **kwargs: Any
) -> Any:
    """What `ours` returns for a call; what `original` returns where ours does not take it.

    Args:
        ours: raises AttributeError, TypeError or ValueError before any launch for a call that it does not take. An
            argument that it has no name for is a TypeError by itself, an attribute that has moved an AttributeError.
        original: the function that a hook replaces.
        say: takes the reason.
        args: of the call.
        kwargs: of the call.
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
    """Puts `make(original)` in the place of a function of a module or a method of a class; a second call does nothing.

    Args:
        owner: the module or class; None if the class itself is missing.
        name: of the function.
        make: what stands for the original; of a method it takes the object first.
        missing: called where there is no such function.
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
    """Says a line once in each process. Lines that differ in numbers alone are one: some name the shapes of a batch."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._last = ""

    def __call__(self, text: str) -> None:
        """Says it, unless it was said."""
        if text == self._last:  # a layer says the same in each step
            return
        self._last, kind = text, _NUMBER.sub("#", text)
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


say_once = SayOnce(functools.partial(logging.getLogger(__name__).info, "cute_kernels: %s"))
"""Logs a line, once in each process."""
