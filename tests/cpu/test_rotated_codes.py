"""Rotated 4-bit codes in plain torch, against vLLM's arithmetic written out number by number."""

import math

import numpy
import pytest
import torch

from cute_kernels.gqa.reference import dequantize_uint4, quantize_rotated
from cute_kernels.gqa.rotation_reference import rotate, signs, unrotate
from tests.kit.mla_cases import generator

SEED = 0x9E3779B9
DIMS = (64, 128, 256)


@pytest.mark.parametrize("d", DIMS)
def test_signs_are_drawn_from_the_seed(d: int) -> None:
    drawn = torch.full((d,), 0.5).bernoulli(generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    assert torch.equal(signs(d), drawn)


@pytest.mark.parametrize("d", DIMS)
def test_a_rotation_is_the_matrix_and_comes_back(d: int) -> None:
    """Small integers have exact sums."""
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(d)] for i in range(d)])
    x = torch.randint(-100, 101, (50, d), generator=generator(d)).float()
    assert torch.equal(rotate(x), (x * signs(d)) @ matrix)
    assert torch.equal(unrotate(rotate(x)), x)


def written_out(y: torch.Tensor) -> tuple[list[int], int, numpy.float32]:
    """(codes, zero point, scale) of one rotated vector, step by step in float32; halves round away from zero."""
    numbers = [numpy.float32(x) for x in y.tolist()]
    high, low = max(numbers), min(numbers)
    scale = max((high - low) / numpy.float32(15), numpy.float32(1e-6))

    def rounded(x: numpy.float32) -> int:
        return min(max(int(x + numpy.float32(0.5) if x >= 0 else x - numpy.float32(0.5)), 0), 15)

    zero_point = rounded(-low / scale)
    inverse = numpy.float32(1) / scale
    return [rounded(x * inverse + numpy.float32(zero_point)) for x in numbers], zero_point, scale


@pytest.mark.parametrize("d", DIMS)
def test_codes_are_those_of_the_arithmetic(d: int) -> None:
    """The vectors' rotated elements have both signs, as they have unless only the first channel is nonzero."""
    gen = generator(7)
    x = torch.randn(200, d, generator=gen) * torch.logspace(-6, 6, 200).unsqueeze(1)
    x[50:100] = torch.randint(-9, 10, (50, d), generator=gen)
    x[100:150, 3] *= 50
    x[150:160] = torch.arange(-5, 5).unsqueeze(1)
    x[160:165], x[165:170] = 0.0, -0.0
    codes, scales = quantize_rotated(x.bfloat16())
    words = scales.view(torch.int32)
    for row, y in enumerate(rotate(x.bfloat16().float())):
        expected, zero_point, scale = written_out(y)
        nibbles = [code for byte in codes[row].tolist() for code in (byte & 15, byte >> 4)]
        assert nibbles == expected and words[row] & 15 == zero_point
        assert words[row] & -16 == scale.view(numpy.int32) & -16


def test_one_sign_keeps_the_vector() -> None:
    """If only the first channel is nonzero, y has one sign. Codes span y and 0: clamped zero points would lose x."""
    x = torch.zeros(2, 128)
    x[0, 0], x[1, 0] = 100, -100
    read = unrotate(dequantize_uint4(*quantize_rotated(x), torch.float64))
    assert torch.allclose(read, x.double(), atol=0.1)


def test_what_codes_stand_for_is_within_half_a_step() -> None:
    x = torch.randn(500, 128, generator=generator(3))
    codes, scales = quantize_rotated(x)
    step = (scales.view(torch.int32) & -16).view(torch.float32).unsqueeze(-1)
    # half a step for the zero point, and half for the code
    assert ((dequantize_uint4(codes, scales, torch.float32) - rotate(x)).abs() <= 1.001 * step).all()


def test_numbers_that_are_none() -> None:
    x = torch.zeros(4, 64)
    x[1], x[2, 5], x[3, 5] = math.nan, math.inf, -0.0
    codes, scales = quantize_rotated(x)
    for row in (0, 1, 3):
        assert not codes[row].any() and scales[row].view(torch.int32) == torch.tensor(1e-6).view(torch.int32) & -16
    assert scales[2].isfinite() and codes[2].any()
