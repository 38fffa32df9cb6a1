"""A graph without a GPU: a replay makes the calls again and copies their results into those of the first calls."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from scripts.bench import timing
from scripts.bench.timing import Expected, Timing


def fake_time_graph(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    """Puts a `time_graph` that needs no GPU into a module; returns how many input sets each timing rotated."""
    sets: list[int] = []

    def time_graph(
        calls: Sequence[Callable[[], Any]],
        *,
        expected: Expected | None = None,
        clock: bool = True,
        load_seconds: float = 0.0,
    ) -> Timing:
        results = [call() for call in calls]

        def replay() -> None:
            for result, call in zip(results, calls, strict=True):
                for old, new in zip(timing._tensors(result), timing._tensors(call()), strict=True):
                    if old is not new:
                        old.copy_(new)

        sets.append(len(calls))
        if expected is not None:
            timing.require_expected(replay, results, expected)
        return Timing(2.0, 1.9, 2.1, 1980.0 if clock else None, 0 if expected is None else len(calls))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "time_graph", time_graph)
    return sets
