"""What the FP8 tensor core keeps of a sum: products of chosen exponents, and which of them are in the result.

A large product, 2^14, stands beside one that is 2^-j of it, for all j at once: rows of A have one part of the exponent,
rows of B the other. The largest j up to which the sum is exact is the number of bits that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from bench.units.spec import ACC_COLUMNS, ACC_STEP, TILE, AccumulatorSpec
from cute_kernels.runtime.compile import compile_kernel
from tests.kit.mla_cases import generator

LARGE: Final = 7
"""Exponent of both factors of the large product."""
EXPONENTS: Final = range(8, -10, -1)
"""Of e4m3 numbers, subnormal ones among them: row i of A and of B has the i-th, further rows have 0."""
PLACES: Final = {"same": (0, 1), "after": (0, ACC_STEP), "before": (ACC_STEP, 0)}
"""Columns of the large and the small product: of one instruction, the small one in the next, or in the one before."""
NEARLY_TWO: Final = 1.875

Sums = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A B^T of e4m3 numbers (64, 128), float32 (64, 64)."""


def on_card(device: str = "cuda", kernel: Callable[..., Any] | None = None) -> Sums:
    """The sums of the tensor core; `kernel`: in place of the compiled one."""
    kernel = kernel or compile_kernel(AccumulatorSpec())

    def sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.full((TILE, TILE), float("nan"), dtype=torch.float32, device=device)
        kernel(*(_codes(x).to(device) for x in (a, b)), out)
        return out.cpu()

    return sums


def _codes(x: torch.Tensor) -> torch.Tensor:
    codes = x.to(torch.float8_e4m3fn)
    if not torch.equal(codes.float(), x):
        raise ValueError("x: has numbers that e4m3 does not hold")
    return codes.view(torch.uint8).contiguous()


def probe(sums: Sums) -> dict[str, Any]:
    """What is kept, for a record.

    Returns:
        bits_same: of a product, below the largest of the same instruction. bits_after: of a product, below the
        accumulator. bits_before: of the accumulator, below a product. positive, negative: what becomes of 15/16 of the
        last bit that is kept: "truncated", "rounded" away from zero, or the value in such bits. lost_together: how many
        of the 15.5 last bits that 31 halves of it make are in the sum. Or "problem", where exact sums are not.
    """
    if problem := wrong(sums):
        return {"problem": problem}
    bits = {f"bits_{name}": kept_bits(sums, *columns) for name, columns in PLACES.items()}
    last = bits["bits_same"]
    unit = 2.0 ** (2 * LARGE - last)
    found: dict[str, Any] = dict(bits)
    for name, sign in (("positive", 1.0), ("negative", -1.0)):
        rest = sign * beside(sums, *PLACES["same"], factor=sign * NEARLY_TWO).get(last + 1, float("nan")) / unit
        found[name] = {0.0: "truncated", 1.0: "rounded"}.get(rest, rest)
    many = beside(sums, 0, slice(1, ACC_STEP)).get(last + 1, float("nan"))
    return {**found, "lost_together": many / unit}


def wrong(sums: Sums) -> str:
    """What is wrong with sums of small integers, which any accumulator holds; "" where nothing is."""
    gen = generator(21)
    a, b = (torch.randint(-2, 3, (TILE, ACC_COLUMNS), generator=gen).float() for _ in range(2))
    differ = int((sums(a, b) != a @ b.T).sum())
    return f"{differ} of {TILE * TILE} sums of small integers are wrong" if differ else ""


def kept_bits(sums: Sums, large: int, small: int) -> int:
    """The largest j up to which 2^14 + 2^(14 - j) is exact."""
    kept = 0
    for j, rest in sorted(beside(sums, large, small).items()):
        if j < 1:
            continue
        if rest != 2.0 ** (2 * LARGE - j):
            break
        kept = j
    return kept


def beside(sums: Sums, large: int, small: int | slice, factor: float = 1.0) -> dict[int, float]:
    """By j, what is in the sum beside 2^14, of a product of `factor` x 2^(14 - j); NaN where that is not always one."""
    exponents = [e for e in EXPONENTS if abs(factor) * 2.0**e <= 448 and _holds(factor * 2.0**e)]
    a, b = torch.zeros(TILE, ACC_COLUMNS), torch.zeros(TILE, ACC_COLUMNS)
    a[:, large] = b[:, large] = 2.0**LARGE
    for row, e in enumerate(exponents):
        a[row, small] = factor * 2.0**e
    for row, e in enumerate(EXPONENTS):
        b[row, small] = 2.0**e
    rest = sums(a, b).double() - 4.0**LARGE
    found: dict[int, float] = {}
    for row, e in enumerate(exponents):
        for column, f in enumerate(EXPONENTS):
            j, value = 2 * LARGE - e - f, float(rest[row, column])
            found[j] = value if found.get(j, value) == value else float("nan")
    return found


def _holds(value: float) -> bool:
    x = torch.tensor(value)
    return bool(x.to(torch.float8_e4m3fn).float() == x)
