"""Scores capped in float32, as the kernel caps them, against float64."""

import math

import pytest
import torch

from cute_kernels import gqa_decode
from cute_kernels.gqa.kernels.softcap import capped
from cute_kernels.gqa.plan import SOFTCAPS, kernel_softcap

LOG2_E = math.log2(math.e)
CAPS = [2.0**n for n in (*range(-100, -20, 16), *range(-20, 44), *range(44, 101, 8))] + [
    0.3,
    1.0,
    7.3,
    30.0,
    50.0,
    1e3,
    1e30,
]
ANY_CAPS = [*CAPS, 5e-324, 1e-300, 1e-39, 1e39, 1.7e308]
ULPS = 2.0**-23


def kernel_scores(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Capped scores (in units of log2), computed as `Softmax.scaled_scores` does with a GPU's operations.

    Approximate operations err by what PTX allows: 2^-22.5 for 2^x, one unit in the last place for 1 / x. Signs are such
    that both errors add up.
    """
    gen = torch.Generator().manual_seed(0)

    def signs(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand(x.shape, generator=gen) < 0.5, -1.0, 1.0)

    def exp2(x: torch.Tensor) -> torch.Tensor:
        return torch.exp2(x) * (1 + 2**-22.5 * signs(x))

    def reciprocal(x: torch.Tensor) -> torch.Tensor:
        return x.reciprocal() * (1 + ULPS * signs(x))

    cap = torch.tensor(kernel_softcap(softcap), dtype=torch.float32)
    factor = 2.0 * LOG2_E * reciprocal(cap)
    return capped(scores * factor, cap * LOG2_E, exp2, reciprocal, torch.where)


def scores_of_all_sizes() -> torch.Tensor:
    sizes = torch.logspace(-3, 6, 2000, dtype=torch.float64).float()
    return torch.cat([sizes, -sizes, torch.zeros(1)])


@pytest.mark.parametrize("softcap", ANY_CAPS)
def test_every_cap_is_exact_to_the_rule(softcap: float) -> None:
    """Each score obeys the rule for a log-sum-exp, 2e-5 + 1e-6 of its size, and in fact half of that."""
    scores = scores_of_all_sizes()
    exact = softcap * torch.tanh(scores.double() / softcap)
    got = kernel_scores(scores, softcap).double() / LOG2_E
    assert ((got - exact).abs() <= 1e-5 + 1e-6 * exact.abs()).all()


@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e3, 2.0**40])
def test_the_two_formulas_meet(softcap: float) -> None:
    """Checks values around x^2 = NEAR_0, where the formulas change, and scores far below the cap."""
    scores = softcap * torch.cat([torch.linspace(0.4, 0.45, 10_001), torch.logspace(-6, 0, 1001)])
    got = kernel_scores(scores, softcap).double() / LOG2_E
    exact = softcap * torch.tanh(scores.double() / softcap)
    assert ((got - exact).abs() <= 1e-6 * exact).all()


def test_scores_that_are_no_numbers() -> None:
    got = kernel_scores(torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38]), 30.0) / LOG2_E
    assert got[2].isnan() and got[[0, 1, 3, 4]].tolist() == pytest.approx([30, -30, 30, -30])


@pytest.mark.parametrize("softcap", ANY_CAPS[::3] + ANY_CAPS[-5:])
def test_the_op_takes_every_positive_finite_cap(softcap: float) -> None:
    """On a CPU, very large caps have no effect and very small caps make scores 0."""
    torch.manual_seed(0)
    q = 8 * torch.randn(1, 1, 2, 64).bfloat16()
    k, v = torch.randn(2, 1, 1, 33, 64).bfloat16()
    out, lse = gqa_decode(q, k, v, softcap=softcap, return_lse=True)
    assert out.isfinite().all() and lse.isfinite().all()
    if softcap >= 2.0**20:
        want, want_lse = gqa_decode(q, k, v, return_lse=True)
        assert torch.equal(out, want)
        torch.testing.assert_close(lse, want_lse)
    if softcap <= 2.0**-20:
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(33)), rtol=0, atol=2e-6)


def test_the_bounds_change_nothing_to_float32_rounding() -> None:
    least, most = SOFTCAPS
    assert torch.exp(torch.tensor([least, -least])).tolist() == [1.0, 1.0]
    large = torch.tensor(2.0**52, dtype=torch.float64)
    assert (most * torch.tanh(large / most)).float() == large.float()
