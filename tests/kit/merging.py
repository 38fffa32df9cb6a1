"""The oracle of `merge_states`: states in float64, with the error that float32 weights and sums may have."""

from typing import Final

import torch

HALF_ULP: Final = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUM_ERROR: Final = 4e-6
"""Error of float32 weights and sums, relative to the sum of magnitudes."""
EXPONENT_ERROR: Final = 2.25 * 2.0**-24
"""Error of a weight exp(-x) = exp2(-x log2 e), relative to it, per unit of x. The difference x and the product err by
half an ulp each, at most 2**-24, and log2 e by 2**-26. x is the distance to the largest state or to the sink."""


def merge_problems(
    out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> list[str]:
    """Problems of merged states, compared with float64."""
    values = torch.where((lses == -torch.inf).unsqueeze(-1), 0.0, outs.double())
    total = torch.logsumexp(lses.double(), dim=0)
    weights = torch.where(total == -torch.inf, 0.0, torch.exp(lses.double() - total))
    if sink is not None:
        weights = weights * torch.where(total == -torch.inf, 0.0, torch.sigmoid(total - sink.double()))
    expected = (weights.unsqueeze(-1) * values).sum(0)
    top = lses.amax(0) if sink is None else torch.maximum(lses.amax(0), sink)
    known = SUM_ERROR + EXPONENT_ERROR * (top - lses).double().masked_fill(lses == -torch.inf, 0.0)
    owed = (known * weights).masked_fill(weights == 0, 0.0).unsqueeze(-1) * values.abs()
    allowed = HALF_ULP[out.dtype] * expected.abs() + owed.sum(0) + torch.finfo(out.dtype).tiny
    wrong = ~((out.double() - expected).abs() <= allowed)
    problems = [f"out: {int(wrong.sum())} of {wrong.numel()} elements are off"] if wrong.any() else []
    inexact = (lse != total.float()) & ~((lse.double() - total).abs() <= 1e-6 + 1e-6 * total.abs())
    return problems + ([f"lse: {int(inexact.sum())} of {inexact.numel()} are off"] if inexact.any() else [])
