"""A round of random calls on the GPU finds nothing, and finds a wrong bit when one is planted."""

import itertools
import threading
from typing import Any

import pytest
import torch

import cute_kernels
from bench.fuzzing import generate, invalid
from bench.fuzzing.calls import Call
from bench.fuzzing.generate import draw_call
from bench.fuzzing.rounds import Work, run_round

FIRST = 10_000
"""Seeds that `make fuzz` does not begin with."""


def kernel_specs() -> list[Any]:
    """All kernels that random calls may launch, so that they compile several at a time."""
    return list(generate.kernel_specs())


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def call_of(op: str) -> Call:
    """The first call of an op that has keys and that a graph can hold."""
    calls = (draw_call(seed, device()) for seed in itertools.count(FIRST))
    return next(call for call in calls if call.op == op and call.specs and call.capturable)


def test_a_round_finds_nothing():
    first_invalid = invalid.FIRST + FIRST * invalid.PER_CALL
    outcome = run_round(Work(FIRST, FIRST + 16, first_invalid, first_invalid + 256, turns=60), device())
    assert outcome.findings == []
    assert outcome.calls >= 16 + 7 * 60
    assert outcome.invalid_calls == 256


@pytest.mark.parametrize("where", ["thread", "graph"])
@pytest.mark.parametrize("op", ["gqa_decode", "mla_fp8_decode"])
def test_a_bit_that_is_wrong_in_a_thread_or_a_graph_alone_is_found(op, where, monkeypatch):
    seed, real = call_of(op).seed, getattr(cute_kernels, op)

    def change(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing if where == "graph" else threading.current_thread() is not threading.main_thread():
            out = result[0] if isinstance(result, tuple) else result
            out.view(torch.int16)[..., :1].bitwise_xor_(1)
        return result

    monkeypatch.setattr(cute_kernels, op, change)
    findings = run_round(Work(seed, seed + 1, turns=40), device()).findings
    assert findings
    assert {finding.seed for finding in findings} == {seed}
    assert all("other bits than alone" in finding.said for finding in findings)
    assert all(("replayed" in finding.said) == (where == "graph") for finding in findings)
    monkeypatch.undo()
    assert run_round(Work(seed, seed + 1, turns=40), device()).findings == []
