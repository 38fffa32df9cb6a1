"""A round of random calls on the GPU finds no fault, and finds a planted wrong bit."""

import threading
from typing import Any

import pytest
import torch

import cute_kernels
from bench.fuzzing import strategies
from bench.fuzzing.rounds import Work, run_round

ROUND = 10_000
"""Number of a round that `make fuzz` does not begin with."""


def kernel_specs() -> list[Any]:
    """Kernels that random calls may launch, so that several compile at a time."""
    return strategies.kernel_specs()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_round_finds_nothing():
    outcome = run_round(Work(ROUND, 16, invalid=256, turns=60), device())
    assert outcome.findings == []
    assert outcome.calls >= 16 + 7 * 60
    assert outcome.invalid_calls == 256


@pytest.mark.parametrize("where", ["thread", "graph"])
@pytest.mark.parametrize("op", ["gqa_decode", "mla_fp8_decode"])
def test_a_bit_that_is_wrong_in_a_thread_or_a_graph_alone_is_found(op, where, monkeypatch):
    real = getattr(cute_kernels, op)

    def change(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing if where == "graph" else threading.current_thread() is not threading.main_thread():
            out = result[0] if isinstance(result, tuple) else result
            out.view(torch.int16)[..., :1].bitwise_xor_(1)
        return result

    work = Work(ROUND, 16, turns=40)
    monkeypatch.setattr(cute_kernels, op, change)
    findings = run_round(work, device()).findings
    assert findings
    assert all(finding.said.startswith(op) and "other bits than alone" in finding.said for finding in findings)
    assert all(("replayed" in finding.said) == (where == "graph") for finding in findings)
    monkeypatch.undo()
    assert run_round(work, device()).findings == []
