"""Engine jobs of scripts/vllm_check.py on a CPU, on the platform of tests/kit/vllm_engine.py."""

from __future__ import annotations

from typing import Any

from bench import vllm_engine as gpu
from bench.vllm_pool import Messages


def run(kind: str, options: dict[str, Any], messages: Messages) -> None:
    gpu.set_environment()
    import torch

    from tests.kit import vllm_engine as on_cpu

    torch.set_num_threads(1)
    on_cpu.count_calls()
    {"serve": gpu.serve, "measure": gpu.measure, "first": gpu.first_tokens}[kind](options, messages)
    messages.send("calls", dict(on_cpu.CALLS))
