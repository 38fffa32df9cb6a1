"""The oracle of `merge_states`: states in float64, with the error that float32 weights and sums may have."""

from typing import Final

import torch

HALF_ULP: Final = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUM_ERROR: Final = 4e-6
"""Error of float32 weights and sums, relative to the sum of magnitudes."""


def merge_problems(
    out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> list[str]:
    """What is wrong with merged states, compared with float64."""
    values = torch.where((lses == -torch.inf).unsqueeze(-1), 0.0, outs.double())
    total = torch.logsumexp(lses.double(), dim=0)
    weights = torch.where(total == -torch.inf, 0.0, torch.exp(lses.double() - total))
    if sink is not None:
        weights = weights * torch.where(total == -torch.inf, 0.0, torch.sigmoid(total - sink.double()))
    expected = (weights.unsqueeze(-1) * values).sum(0)
    size = (weights.unsqueeze(-1) * values.abs()).sum(0)
    # float32 holds a log-sum-exp far from 0 to a few ulps, and the weights inherit that error
    known = SUM_ERROR + 2.0**-23 * lses.masked_fill(lses == -torch.inf, 0.0).abs().amax(0).double().unsqueeze(-1)
    allowed = HALF_ULP[out.dtype] * expected.abs() + known * size + torch.finfo(out.dtype).tiny
    wrong = ~((out.double() - expected).abs() <= allowed)
    problems = [f"out: {int(wrong.sum())} of {wrong.numel()} elements are off"] if wrong.any() else []
    inexact = (lse != total.float()) & ~((lse.double() - total).abs() <= 1e-6 + 1e-6 * total.abs())
    return problems + ([f"lse: {int(inexact.sum())} of {inexact.numel()} are off"] if inexact.any() else [])
