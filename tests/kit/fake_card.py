"""A GPU made of two clocks, the host's and its own, on which timers of CUDA graphs run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import in_layer, nvml, timing

SMALL_US, OVERHEAD_US = 1.5, 4.0
"""Of a small kernel with its launch, and of any graph before its first kernel."""
MHZ, LOADED_MHZ = 1980.0, 1650.0


class Work:
    """A computation: microseconds alone and at full clock, and whether it lowers the clock after 50 ms."""

    card: Card

    def __init__(self, us: float, *, hungry: bool = False, overlap_us: float = 0.0) -> None:
        self.us, self.hungry, self.overlap_us = us, hungry, overlap_us

    def __call__(self) -> None:
        self.card.graph([self])()


class Card:
    """What it has done is in `log`: ("rest" or a graph's calls, start, seconds).

    It slows by `drift` a second, and by `fade` a second of hungry work since its last rest.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, reading_s: float = 1e-4, drift: float = 0.0, fade: float = 0.0
    ) -> None:
        self.host = self.gpu = self.busy = 0.0
        self.reading_s, self.drift, self.fade = reading_s, drift, fade
        monkeypatch.setattr(Work, "card", self, raising=False)
        self.log: list[tuple[Any, float, float]] = []
        monkeypatch.setattr(timing, "capture", self.capture)
        monkeypatch.setattr(timing, "warm", lambda calls: None)
        monkeypatch.setattr(in_layer, "small_kernel", lambda: _small)
        monkeypatch.setattr(in_layer, "_small_graph", lambda calls: self.graph([_small] * calls))
        monkeypatch.setattr(in_layer, "time", SimpleNamespace(sleep=self.sleep, monotonic=lambda: self.host))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: _Event(self))
        monkeypatch.setattr(nvml, "sm_mhz", self.sm_mhz)
        monkeypatch.setattr(nvml, "joules", lambda: 600.0 * self.host)
        monkeypatch.setattr(in_layer, "_seconds", self.seconds)

    @property
    def slow(self) -> bool:
        return self.busy >= 0.05

    def slowed(self, start: float) -> float:
        return 1 + self.drift * start + self.fade * self.busy

    def sm_mhz(self) -> float:
        self.host += self.reading_s
        return LOADED_MHZ if self.slow else MHZ

    def sleep(self, seconds: float) -> None:
        self.synchronize()
        self.log.append(("rest", self.host, seconds))
        self.host += seconds
        self.gpu = self.host
        if seconds >= 0.1:
            self.busy = 0.0

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def capture(self, calls: Sequence[Any], *, warmed: bool = False) -> tuple[Any, list[Any]]:
        works = [part for call in calls for part in _parts(call)]
        return SimpleNamespace(replay=self.graph(works)), [None for _ in calls]

    def graph(self, works: Sequence[Work]) -> Callable[[], None]:
        """A replay of these one after another; the same one twice in a row may overlap."""

        def replay() -> None:
            start, total = max(self.gpu, self.host), OVERHEAD_US
            before = None
            for work in works:
                total += work.us * (MHZ / LOADED_MHZ if work.hungry and self.slow else 1.0) * self.slowed(start)
                total -= work.overlap_us if before is work else 0.0
                before = work
            self.host += 5e-6
            self.gpu = start + total * 1e-6
            if any(work.hungry for work in works):
                self.busy += total * 1e-6
            self.log.append((tuple(works), start, total * 1e-6))

        return replay

    def seconds(self, work: Callable[[], Any]) -> float:
        self.synchronize()
        started = self.gpu = self.host
        found = work()
        assert found is None
        self.synchronize()
        return self.gpu - started


_small = Work(SMALL_US)


def _parts(call: Any) -> list[Work]:
    """The kernels of what `prepare` captures: a small one and a call, or the call."""
    if isinstance(call, Work):
        return [call]
    return [part for argument in call.args for part in _parts(argument)]


class _Event:
    def __init__(self, card: Card) -> None:
        self.card, self.at = card, 0.0

    def record(self) -> None:
        self.at = max(self.card.gpu, self.card.host)

    def synchronize(self) -> None:
        self.card.host = max(self.card.host, self.at)

    def query(self) -> bool:
        return self.card.host >= self.at

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3
