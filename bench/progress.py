"""Progress of a long run with its time: lines on standard error, while results go elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


class Progress:
    """Prints lines with the time since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Prints one line."""
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def step(self, text: str, done: int | None = None, total: int = 0) -> Iterator[None]:
        """Prints what the block does, and which of several steps it is."""
        self.say(text if done is None else f"[{done + 1}/{total}]  {text}")
        yield

    @contextlib.contextmanager
    def count(self, text: str, total: int) -> Iterator[Callable[[str], None]]:
        """Yields a function to call after each of `total` steps with a text; it prints each tenth of them."""
        done = 0

        def advance(words: str) -> None:
            nonlocal done
            done += 1
            if 10 * done // total > 10 * (done - 1) // total:
                self.say(f"[{done}/{total}]  {text}  {words}".rstrip())

        yield advance
