"""Rows of logits in which a choice of the highest is hard, for `index_topk`, and caches of index keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.kit.mla_cases import generator


def normal(rows: int, width: int, gen: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, width, generator=gen, dtype=torch.float32, device="cpu")


def _uniform(rows: int, width: int, gen: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, width, generator=gen, dtype=torch.float32, device="cpu")


def _words(rows: int, width: int, gen: torch.Generator) -> torch.Tensor:
    """Any 32 bits: every exponent, NaN of all kinds, infinities now and then."""
    bits = torch.randint(-(2**31), 2**31, (rows, width), generator=gen, dtype=torch.int64, device="cpu")
    return bits.int().view(torch.float32)


def _one_of(values: list[float]) -> Callable[[int, int, torch.Generator], torch.Tensor]:
    def draw(rows: int, width: int, gen: torch.Generator) -> torch.Tensor:
        known = torch.tensor(values, dtype=torch.float32, device="cpu")
        return known[torch.randint(len(values), (rows, width), generator=gen, dtype=torch.int64, device="cpu")]

    return draw


def _plateau(value: float, higher: float) -> Callable[[int, int, torch.Generator], torch.Tensor]:
    """So many equal numbers that rank k is among them; a part of the row is higher, and as much is lower."""

    def draw(rows: int, width: int, gen: torch.Generator) -> torch.Tensor:
        drawn = _uniform(rows, width, gen)
        row = torch.full((rows, width), value, dtype=torch.float32, device="cpu")
        row = torch.where(drawn < higher, value + 1 + drawn, row)
        return torch.where(drawn > 1 - higher, value - 1 - drawn, row)

    return draw


FAMILIES: dict[str, Callable[[int, int, torch.Generator], torch.Tensor]] = {
    "normal": normal,
    "far from zero": lambda *sizes: 100 + normal(*sizes),
    "all negative": lambda *sizes: -normal(*sizes).abs() - 0.01,
    "tiny": lambda *sizes: normal(*sizes) * 2.0**-30,
    "subnormal": lambda *sizes: normal(*sizes) * 2.0**-140,
    "huge": lambda *sizes: normal(*sizes) * 2.0**40,
    "any bits": _words,
    "neighbouring ulps": lambda *sizes: (0x3FC00000 + (_uniform(*sizes) * 5000).int()).view(torch.float32),
    "negative neighbouring ulps": lambda *sizes: -(0x3FC00000 + (_uniform(*sizes) * 300).int()).view(torch.float32),
    "all equal": _one_of([1.5]),
    "all zero": _one_of([0.0]),
    "zeros of both signs": _one_of([0.0, -0.0]),
    "NaN alone": _one_of([math.nan]),
    "two values": _one_of([1.0, -1.0]),
    "NaN and infinities": _one_of([math.nan, math.inf, -math.inf, 1.0, 2.0]),
    "few infinities": lambda *sizes: torch.where(_uniform(*sizes) < 1e-3, math.inf, normal(*sizes)),
    "zeros, few positive": _plateau(0.0, 0.004),
    "zeros and numbers": lambda *sizes: normal(*sizes).clamp(min=0.0),
    "zeros of one sign above negative": lambda *sizes: -normal(*sizes).clamp(min=0.0),
    "equal numbers, few higher": _plateau(3.0, 0.004),
    "equal negative numbers, few higher": _plateau(-3.0, 0.004),
    "ascending": lambda *sizes: normal(*sizes).sort(dim=1).values,
    "descending": lambda *sizes: normal(*sizes).sort(dim=1, descending=True).values,
    "highest together": lambda *sizes: (
        normal(*sizes) + 10 * (torch.arange(sizes[1], dtype=torch.int64, device="cpu") // 3000 == 3)
    ),
    "integers": lambda *sizes: (8 * normal(*sizes)).round(),
}
"""Functions of (rows, width, generator), by what they draw."""


def logits_of(family: str, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """(rows, width) float32 on the CPU."""
    return FAMILIES[family](rows, width, generator(seed))


def lengths_around(topk: int, width: int) -> torch.Tensor:
    """Lengths at which something changes, and some that no row has."""
    found = (0, 1, 63, 64, 65, topk - 1, topk, topk + 1, topk + 3, 2 * topk, 511, 512, 513, width - 1, width)
    return torch.tensor([*found, -1, -(2**31), width + 1, 2**31 - 1], dtype=torch.int32, device="cpu")


def table_of(batch: int, width: int, page_size: int, seed: int = 0) -> torch.Tensor:
    """(batch, pages) int32 on the CPU: shuffled pages, some twice, some that no cache has."""
    gen = generator(seed)
    pages = -(-width // page_size)
    table = torch.randint(0, 4 * pages, (batch, pages), generator=gen, device="cpu", dtype=torch.int32)
    table.view(-1)[:: 7 + pages // 3] = -1
    table.view(-1)[3 :: 11 + pages // 2] = 2**31 - 1
    return table


def index_keys(tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(tokens, 128) on the CPU: random magnitudes, then rows at which a rule of scales changes."""
    gen = generator(seed)
    k = (
        normal(tokens, 128, gen)
        * (torch.rand(tokens, 1, generator=gen, dtype=torch.float32, device="cpu") * 60 - 30).exp2()
    )
    nearest = torch.finfo(dtype).eps
    special = [
        [0.0], [-0.0], [1e-5], [1e-4], [9.9e-5], [-1.01e-4], [math.nan], [math.nan, 3.0], [math.inf], [-math.inf, 2.0],
        [1e-40, -1e-39], [3.4e38], [3.3895e38, 1e-30], [6e-8], [448.0 * 2.0**-22], [448.0 * 2.0**-23],
        *([448.0 * 2.0**n * (1 + ulp)] for n in (-21, -3, 0, 7, 100) for ulp in (-nearest, 0.0, nearest)),
    ]  # fmt: skip
    for row, values in zip(k, special, strict=False):
        row.zero_()
        row[5 : 5 + len(values)] = torch.tensor(values, dtype=torch.float32, device="cpu")
        row[64:] = (
            row[5]
            * torch.rand(64, generator=gen, dtype=torch.float32, device="cpu")
            * (0.5 if row[5].isfinite() else 0.0)
        )
    return k.to(dtype)


def index_cache(num_pages: int, page_size: int, apart: int = 0, byte: int = 0xA5) -> torch.Tensor:
    """(num_pages, page_size, 132) uint8 on the CPU, pages `apart` bytes apart: by default one after the other."""
    apart = apart or page_size * 132
    whole = torch.full((num_pages * apart,), byte, dtype=torch.uint8, device="cpu")
    return whole.as_strided((num_pages, page_size, 132), (apart, 132, 1))
