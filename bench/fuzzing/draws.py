"""Random choices of all generators of calls. A seed and a kind of device (CPU, GPU) name a call exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch

from tests.kit.mla_cases import generator
from tests.kit.values import FAMILIES

Value = TypeVar("Value")
LARGE_SHARE: Final = 1 / 24
"""Share of large calls on a GPU: they take as much time as all others together."""
USUAL_SMS: Final = 132
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
NEGATIVE: Final = (0, -1, -5, INT32_MIN)
"""Lengths that mean no token."""


class Draw:
    """Random choices of one call.

    rng     draws sizes and options
    gen     draws the numbers of tensors, on the device
    large   whether this is one of the few large calls
    """

    def __init__(self, seed: int, device: torch.device, attempt: int = 0) -> None:
        self.seed, self.device = seed, device
        self.rng = random.Random(seed if not attempt else f"{seed} {attempt}")
        self.on_gpu = device.type == "cuda"
        self.large = self.rng.random() < LARGE_SHARE and self.on_gpu
        self.gen = generator(seed % 2**63, device)

    def choice(self, values: Sequence[Value]) -> Value:
        """One of them."""
        return self.rng.choice(values)

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return self.rng.random() < share

    def batch(self) -> int:
        """A batch size: 1 to 8, or in 15% of draws on a GPU up to 150."""
        many = self.chance(0.15)
        few = self.choice((1, 2, 3, 4, 5, 8) if self.on_gpu else (1, 2, 3))
        number = self.choice((17, 40, 74, 150))
        return number if many and self.on_gpu else few

    def lengths(self, batch: int, longest: int, unit: int) -> list[int]:
        """A length for each sequence; 40% are at borders: 0, 1, 2, the longest, the end of a tile or page +- 1."""
        borders = [0, 1, 2, longest]
        borders += [edge + step for edge in (64, 128, unit, 2 * unit) for step in (-1, 0, 1)]
        borders = [length for length in borders if 0 <= length <= longest]
        return [self.choice(borders) if self.chance(0.4) else self.rng.randint(0, longest) for _ in range(batch)]

    def family(self) -> str:
        """A family of values, or "" in 70% of draws: a case then has values of its own."""
        return self.choice(tuple(FAMILIES)) if self.chance(0.3) else ""

    def rows(self, batch: int, number: int = 3) -> list[int]:
        """Batch rows that the oracle checks."""
        return sorted(self.rng.sample(range(batch), min(number, batch)))


MAX_SCRATCH = 1 << 26
"""Limit of float32 values of partials, 256 MiB: each of seven threads in twelve processes may keep that much."""


def num_sms(device: torch.device) -> int:
    """SMs that plans are made for: those of the GPU, or of an H200 without one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else USUAL_SMS


def extreme_lengths(lengths: torch.Tensor, capacity: int, draw: Draw) -> torch.Tensor:
    """The same lengths in extreme values: 0 may become negative, the capacity may become any larger number."""
    values = []
    for length in lengths.tolist():
        if length == 0:
            length = draw.choice(NEGATIVE)
        elif length == capacity and draw.chance(0.7):
            length = draw.choice((capacity + 1, capacity + 1000, INT32_MAX))
        values.append(length)
    return torch.tensor(values, dtype=torch.int32, device=lengths.device)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a specification."""
    return str(dtype).removeprefix("torch.")


def problems_of(comparison: Any) -> list[str]:
    """The problems of a `Comparison`, each with its name."""
    return [f"{comparison.name}: {problem}" for problem in comparison.problems]
