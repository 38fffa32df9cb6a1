"""What all generators of calls draw with: a seed names a call exactly, on one kind of device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch

from tests.support.mla_cases import generator

Value = TypeVar("Value")
LARGE_SHARE: Final = 1 / 24
"""Of calls on a GPU: they take as much time as all others."""
USUAL_SMS: Final = 132
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
NEGATIVE: Final = (0, -1, -5, INT32_MIN)
"""Lengths that stand for no token."""


class Draw:
    """Random choices of one call.

    rng     of sizes and options
    gen     of numbers, on the device
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
        """True in that share of draws."""
        return self.rng.random() < share

    def batch(self) -> int:
        """Sequences: mostly few."""
        many = self.chance(0.15)
        few = self.choice((1, 2, 3, 4, 5, 8) if self.on_gpu else (1, 2, 3))
        number = self.choice((17, 40, 74, 150))
        return number if many and self.on_gpu else few

    def lengths(self, batch: int, longest: int, unit: int) -> list[int]:
        """Of sequences: some at borders of tiles and pages, some of nothing."""
        borders = [0, 1, 2, longest]
        borders += [edge + step for edge in (64, 128, unit, 2 * unit) for step in (-1, 0, 1)]
        borders = [length for length in borders if 0 <= length <= longest]
        return [self.choice(borders) if self.chance(0.4) else self.rng.randint(0, longest) for _ in range(batch)]

    def rows(self, batch: int, number: int = 3) -> list[int]:
        """Rows to hold to the oracle."""
        return sorted(self.rng.sample(range(batch), min(number, batch)))


MAX_SCRATCH = 1 << 26
"""float32 values of partial results, 256 MiB: each of seven threads in twelve processes keeps as many."""


def num_sms(device: torch.device) -> int:
    """That plans are made for; those of an H200 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else USUAL_SMS


def extreme_lengths(lengths: torch.Tensor, capacity: int, draw: Draw) -> torch.Tensor:
    """The same lengths, where those of nothing may be negative and those of all that there is may be anything above."""
    values = []
    for length in lengths.tolist():
        if length == 0:
            length = draw.choice(NEGATIVE)
        elif length == capacity and draw.chance(0.7):
            length = draw.choice((capacity + 1, capacity + 1000, INT32_MAX))
        values.append(length)
    return torch.tensor(values, dtype=torch.int32, device=lengths.device)


def name_of(dtype: torch.dtype) -> str:
    """As specifications have it."""
    return str(dtype).removeprefix("torch.")


def problems_of(comparison: Any) -> list[str]:
    """What a `Comparison` found."""
    return [f"{comparison.name}: {problem}" for problem in comparison.problems]
