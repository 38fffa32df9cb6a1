"""Random tensors on the device of their generator, with a dtype that torch's defaults do not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def normal(shape: Sequence[int], gen: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float32, device=gen.device)


def uniform(shape: Sequence[int], gen: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=gen, dtype=torch.float32, device=gen.device)


def integers(
    low: int, high: int, shape: Sequence[int], gen: torch.Generator, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Numbers from `low` to `high` - 1."""
    return torch.randint(low, high, tuple(shape), generator=gen, dtype=dtype, device=gen.device)
