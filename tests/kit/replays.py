"""A graph without a GPU: a replay makes the calls again and copies their results into those of the first calls."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import timing
from bench.in_layer import Timing
from bench.timing import Expected


def fake_time_graph(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    """Puts timers that need no GPU into a module; returns how many input sets each of its graphs rotates."""
    sets: list[int] = []

    def prepare(calls: Sequence[Callable[[], Any]], *, expected: Expected | None = None) -> Any:
        results = [call() for call in calls]

        def replay() -> None:
            for result, call in zip(results, calls, strict=True):
                for old, new in zip(timing._tensors(result), timing._tensors(call()), strict=True):
                    if old is not new:
                        old.copy_(new)

        sets.append(len(calls))
        return SimpleNamespace(replay=replay, results=results, expected=expected)

    def time_together(ways: Mapping[str, Any], *, sustained: Any = True, power: bool = False) -> dict[str, Timing]:
        for way in ways.values():
            if way.expected is not None:
                timing.require_expected(way.replay, way.results, way.expected)
        loaded = (2.2, 1700.0, 1980.0, 650.0 if power else None) if sustained else (None, None, 1980.0, None)
        return {
            name: Timing(2.0, 1.9, 2.1, 1.8, *loaded, 0 if way.expected is None else len(way.results))
            for name, way in ways.items()
        }

    def time_calls(
        calls: Sequence[Callable[[], Any]], *, expected: Expected | None = None, sustained: bool = True
    ) -> Timing:
        return time_together({"": prepare(calls, expected=expected)}, sustained=sustained)[""]

    fakes = {"prepare": prepare, "prepare_eager": prepare, "time_together": time_together, "time_calls": time_calls}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, fake in fakes.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, fake)
    return sets
