"""The formula of capped scores, in arithmetic that a kernel and a CPU test share."""

from collections.abc import Callable
from typing import Any

LN_2 = 0.6931471805599453
P1, P2, P3 = -0.04003530088, 0.001913576471, -8.159861626e-05
NEAR_0 = 1.5
"""tanh(y) / y = 1 + u (P1 + u (P2 + u P3)) to 2e-7, where y = x ln(2) / 2, u = x^2 < NEAR_0."""


def capped(
    x: Any, cap: Any, exp2: Callable[[Any], Any], reciprocal: Callable[[Any], Any], select: Callable[..., Any]
) -> Any:
    """Gives cap * tanh(x ln(2) / 2), with a relative error of 1e-6 at most.

    cap - 2 cap / (1 + 2^x) is off by 2^-23 of the cap, however small the result is: with a cap of 1000 a score of 1
    would be off by 2e-4. Near 0 an odd polynomial has the relative precision that the difference loses.

    Args:
        x: float32: 2 log2(e) score / cap, both in natural units.
        cap: float32.
        exp2: 2^x.
        reciprocal: 1 / x.
        select: returns its second argument if the first is true, else the third.
    """
    u = x * x
    near_0 = x * (cap * (LN_2 / 2)) * (1.0 + u * (P1 + u * (P2 + u * P3)))
    return select(u < NEAR_0, near_0, cap - 2.0 * cap * reciprocal(1.0 + exp2(x)))
