"""What a long run is doing, how far it is, and for how long it took: on standard error, results go elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

BAR = 24  # characters


def bar(done: int, total: int) -> str:
    """How far a run is, as a bar and in numbers."""
    filled = BAR * done // max(1, total)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}"


class Progress:
    """Prints what is going on and how long it took: a live line where rich is installed, plain lines elsewhere."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._console: Any = None
        with contextlib.suppress(ImportError):
            from rich.console import Console

            self._console = Console(highlight=False, stderr=True)

    def say(self, text: str) -> None:
        """One line with the time since the start."""
        line = f"{time.monotonic() - self._started:6.1f} s  {text}"
        if self._console is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._console.print(line, markup=False)

    @contextlib.contextmanager
    def step(self, text: str, done: int | None = None, total: int = 0) -> Iterator[None]:
        """Show `text` while the block runs, with a bar where it is one of several."""
        shown = text if done is None else f"{bar(done, total)}  {text}"
        if self._console is None or not self._console.is_terminal:
            self.say(shown)
            yield
            return
        with self._console.status(shown.replace("[", "\\[")):
            yield
        self.say(text)

    @contextlib.contextmanager
    def count(self, text: str, total: int) -> Iterator[Callable[[str], None]]:
        """Show how many of `total` steps are done; call what this gives after each, with words on it.

        A live bar on a terminal where rich is installed, elsewhere a line for each tenth of the steps.
        """
        if self._console is None or not self._console.is_terminal:
            done = 0

            def say_tenths(words: str) -> None:
                nonlocal done
                done += 1
                if done == total or 10 * done // total > 10 * (done - 1) // total:
                    self.say(f"{bar(done, total)}  {text}  {words}".rstrip())

            yield say_tenths
            return
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}", markup=False), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
        )  # fmt: skip
        with progress.Progress(*columns, console=self._console, transient=True) as live:
            task = live.add_task(text, total=total)
            yield lambda words: live.update(task, advance=1, description=f"{text}  {words}".rstrip())
        self.say(f"{bar(total, total)}  {text}")
