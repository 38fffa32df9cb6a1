"""What a long run is doing, and for how long it took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class Progress:
    """Prints what is going on and how long it took: a live line where rich is installed, plain lines elsewhere."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._console: Any = None
        with contextlib.suppress(ImportError):
            from rich.console import Console

            self._console = Console(highlight=False)

    def say(self, text: str) -> None:
        """One line with the time since the start."""
        line = f"{time.monotonic() - self._started:6.1f} s  {text}"
        if self._console is None:
            print(line, flush=True)
        else:
            self._console.print(line, markup=False)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show `text` while the block runs."""
        if self._console is None or not self._console.is_terminal:
            self.say(text)
            yield
            return
        with self._console.status(text):
            yield
        self.say(text)
