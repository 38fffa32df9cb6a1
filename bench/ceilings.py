"""A card's highest speeds: reads, copies, matrix products. They are timed as kernels are, in-layer after a rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from bench.in_layer import prepare, prepare_eager, time_together
from bench.timing import Call, time_eager
from cute_kernels.runtime.compile import compile_kernel

GEMM_SIZE: Final = 8192
STREAM_BYTES: Final = 4 << 30
STREAM_WORDS, STREAM_STAGES = 4096, 8
"""Words of 4 bytes in a tile, and tiles in flight: 128 KB an SM, of which 30 are enough."""
WAYS: Final = {"sum": "torch.sum", "tma": "a reader by TMA", "copy": "a copy"}
"""Ways of moving bytes, the best of which is the ceiling for reads."""


@dataclass(frozen=True)
class StreamSpec:
    """Every SM reads tiles of 16 KB by bulk copies, eight in flight, and adds up their words."""

    kernel: ClassVar[str] = "bench.stream:StreamKernel"

    def can_implement(self) -> list[str]:
        """Returns the reasons, in words, why this kernel cannot be built; empty when it can."""
        return []

    @property
    def expected(self) -> dict[str, Any]:
        """Limits of the compiled kernel."""
        return {"registers": 96, "instructions": ("UBLKCP", "LDS.128")}


def measure_ceilings() -> dict[str, float]:
    """Measures the ceilings of this card, in the units of a results file.

    Returns:
        read_GBps: the best of `WAYS`, each of which has a key too (sum_GBps: torch.sum over 4 GiB of float32; tma_GBps:
        bench/stream.py, left out if it does not run or is wrong). copy_GBps: device-to-device copy, bytes read plus
        bytes written. bf16_gemm_TFLOPs: an 8192^3 product of random numbers (zeros would run faster).
    """
    ways = stream_rates()
    a, b = (torch.randn((GEMM_SIZE, GEMM_SIZE), dtype=torch.float32, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    flops = 2 * GEMM_SIZE**3 / time_eager(functools.partial(torch.mm, a, b, out=product), 20)
    rates = {f"{name}_GBps": rate for name, rate in ways.items()}
    found = {"read_GBps": max(ways.values()), **rates, "bf16_gemm_TFLOPs": flops / 1e12}
    return {name: round(value, 1) for name, value in found.items()}


def stream_rates() -> dict[str, float]:
    """Measures GB/s of each of `WAYS`."""
    data = torch.rand(STREAM_BYTES // 4, dtype=torch.float32, device="cuda")
    target, source = data.chunk(2)
    ways: dict[str, Call] = {"sum": data.sum}
    try:
        ways["tma"] = reader_call(data, compile_kernel(StreamSpec()))
    except Exception as error:  # the other two are ceilings without it
        print(f"no reader by TMA: {type(error).__name__}: {error}"[:300], flush=True)
    graphs = {name: prepare([call]) for name, call in ways.items()}
    # eager: captured in a graph, the same call moves 2782 GB/s instead of 4262 on an H200
    graphs["copy"] = prepare_eager([functools.partial(target.copy_, source)])
    timings = time_together(graphs, sustained=False)
    return {name: STREAM_BYTES / timing.us / 1e3 for name, timing in timings.items()}


def reader_call(data: torch.Tensor, kernel: Callable[..., Any]) -> Call:
    """Returns a call of the reader by TMA over all of `data`, float32.

    Raises:
        ValueError: the reader's sum is wrong.
    """
    words = data.view(torch.int32)
    tiles = words[: len(words) // STREAM_WORDS * STREAM_WORDS].view(-1, STREAM_WORDS)
    on_gpu = data.device.type == "cuda"
    ctas = torch.cuda.get_device_properties(data.device).multi_processor_count if on_gpu else 2
    sums = torch.zeros((ctas, 128), dtype=torch.int32, device=data.device)
    kernel(tiles, sums)
    got, expected = (int(part.sum(dtype=torch.int64)) % 2**32 for part in (sums, tiles))
    if got != expected:
        raise ValueError(f"the words add up to {expected}, the kernel has {got}")
    return functools.partial(kernel, tiles, sums)
