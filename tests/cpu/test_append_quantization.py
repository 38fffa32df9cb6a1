"""The arithmetic of the append kernels, `mla/kernels/quantize.py`, step by step in numpy, over every bf16 value.

A kernel neither divides an element by its e4m3 scale nor takes a logarithm. These tests show over all inputs that this
changes no bit, against rules written with exact fractions. `tests/gpu` shows that the kernels take these steps.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cute_kernels.mla.kernels.quantize import bf16_pair
from fp8_mla.formats import E8M0_BIAS, FP4_VALUES, FP8_MAX, MIN_FP4_SCALE, MIN_SCALE_EXPONENT

Array = Any  # a numpy array; numpy is not type-checked here

MAGNITUDES: Array = np.arange(0x7F80, dtype=np.uint32)
"""Bits of the magnitudes of all finite bf16 numbers."""
INF, NAN = 0x7F80, 0x7FFF
E4M3 = [
    Fraction(code % 8, 8) * Fraction(2) ** -6
    if code < 8
    else (1 + Fraction(code % 8, 8)) * Fraction(2) ** (code // 8 - 7)
    for code in range(127)
]
"""The values of the finite e4m3 codes, from 0 to 448."""


def as_float(bf16_bits: Array) -> Array:
    return (bf16_bits.astype(np.uint32) << 16).view(np.float32)


def bf16(exact: Array) -> Array:
    """Checks that a packed bf16 instruction can hold the numbers exactly."""
    result: Array = exact.astype(np.float32)
    assert (result == exact).all() and not (result.view(np.uint32) & 0xFFFF).any()
    return result


def e2m1_steps(bits: Array, scale: float) -> tuple[Array, Array]:
    """Low and high half of the word that `quantize_e2m1` makes of a pair of elements with these bits, without signs."""
    x = as_float(bits)
    s = np.float64(scale)  # products and sums of a few bits, exact in float64, then checked to be bf16
    s025, s075, s100, s150, s175, s225, s275 = (bf16(s * m) for m in (0.25, 0.75, 1.0, 1.5, 1.75, 2.25, 2.75))
    b2 = (x >= s175).astype(np.float64)
    b1 = (x >= bf16(b2 * s275 + s075)).astype(np.float64)
    limit = bf16(b1 * bf16(b2 * s150 + s100).astype(np.float64) + bf16(b2 * s225 + s025))
    b0 = (x > limit).astype(np.float64)
    halves = []
    for one in (1.0, 16.0):
        code = bf16(b0 * one + 128)
        code = bf16(b1 * 2 * one + code)
        code = bf16(b2 * 4 * one + code)
        halves.append(code.view(np.uint32) >> 16)
    return halves[0], halves[1]


def nearest_e2m1(bits: Array, scale: Fraction) -> Array:
    """The code nearest to x / scale, ties to even, found by comparing x with fractions times the scale."""
    x: Array = as_float(bits).astype(np.float64)
    values = [Fraction(value) for value in FP4_VALUES]
    code: Array = np.zeros(len(bits), dtype=np.int64)
    for upper in range(1, 8):
        middle = float((values[upper - 1] + values[upper]) / 2 * scale)  # 7 bits, so this is exact
        code += x >= middle if upper % 2 == 0 else x > middle
    return code


def test_e2m1_codes_of_all_magnitudes_with_every_scale() -> None:
    for scale in E4M3[1:]:
        even, odd = e2m1_steps(MAGNITUDES, float(scale))
        expected = nearest_e2m1(MAGNITUDES, scale)
        assert (even == 0x4300 + expected).all()
        assert (odd == 0x4300 + 16 * expected).all()


def test_e2m1_codes_are_those_of_a_float32_quotient() -> None:
    """The rule divides in float32, as torch does."""
    for scale in E4M3[1:]:
        with np.errstate(over="ignore"):
            quotient = as_float(MAGNITUDES) / np.float32(scale)
        middles = [(FP4_VALUES[i] + FP4_VALUES[i + 1]) / 2 for i in range(7)]
        code = sum((quotient >= m if i % 2 else quotient > m).astype(np.int64) for i, m in enumerate(middles))
        assert (code == nearest_e2m1(MAGNITUDES, scale)).all()


def nearest_e4m3(x: Fraction) -> int:
    """The code nearest to a number from 0 to 448, ties to even."""
    return min(range(127), key=lambda code: (abs(E4M3[code] - x), code % 2))


def test_e4m3_scale_of_every_largest_magnitude() -> None:
    """The float32 product with 1 / 6 rounds to the e4m3 number of the exact quotient."""
    smallest = bf16_pair(6 * MIN_FP4_SCALE) & 0xFFFF
    largest = np.maximum(MAGNITUDES, smallest)
    with np.errstate(over="ignore"):
        product = as_float(largest) * np.float32(1 / 6)
    clamped = np.minimum(product, np.float32(FP8_MAX))
    for bits in range(smallest - 1, int(np.argmax(as_float(MAGNITUDES) > 6 * FP8_MAX)) + 1):
        exact = min(
            max(Fraction(float(as_float(MAGNITUDES[bits : bits + 1])[0])) / 6, Fraction(MIN_FP4_SCALE)), FP8_MAX
        )
        assert nearest_e4m3(Fraction(float(clamped[bits]))) == nearest_e4m3(Fraction(exact))


def test_ue8m0_scale_of_every_largest_magnitude() -> None:
    scale = np.maximum(((MAGNITUDES.astype(np.int64) + 0x1F) >> 7) - 8, MIN_SCALE_EXPONENT + E8M0_BIAS)
    for bits, byte in enumerate(scale.tolist()):
        ratio = max(Fraction(float(as_float(MAGNITUDES[bits : bits + 1])[0])), Fraction(1, 10_000)) / 448
        power = Fraction(2) ** (byte - E8M0_BIAS)
        assert power / 2 < ratio <= power
    assert ((INF + 0x1F) >> 7) - 8 == scale[-1], "an Inf counts as the largest finite value"
    assert scale[-1] < 254, "the inverse is a normal number"


def test_products_with_the_inverse_of_a_ue8m0_scale_are_exact() -> None:
    """Exceptions are products far below the smallest e4m3 number, which become 0 however they are rounded."""
    for byte in range(MIN_SCALE_EXPONENT + E8M0_BIAS, ((INF + 0x1F) >> 7) - 7):
        inverse = np.array([(2 * E8M0_BIAS - byte) << 23], dtype=np.uint32).view(np.float32)
        with np.errstate(over="ignore"):
            product = (as_float(MAGNITUDES) * inverse).astype(np.float64)
        exact = as_float(MAGNITUDES).astype(np.float64) * 2.0 ** (E8M0_BIAS - byte)
        fits = exact <= 2 * FP8_MAX
        assert ((product == exact) | (exact < 2.0**-11) | ~fits).all()
        assert (product[~fits] > FP8_MAX).all()


def test_bits_of_magnitudes_are_in_the_order_of_the_numbers() -> None:
    assert (np.diff(as_float(MAGNITUDES)) > 0).all()
    assert MAGNITUDES[-1] < INF < NAN


@pytest.mark.parametrize(
    ("low", "high", "word"), [(1.0, None, 0x3F803F80), (1.0, 16.0, 0x41803F80), (0.25, 2.75, 0x40303E80)]
)
def test_words_of_constants(low: float, high: float | None, word: int) -> None:
    assert bf16_pair(low, high) == word


def test_constants_that_bf16_does_not_hold() -> None:
    with pytest.raises(ValueError, match="needs numbers that bf16 holds"):
        bf16_pair(1 / 3)
