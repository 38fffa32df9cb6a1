"""Views of packed sequences that TMA reads and writes through: addresses, edges, and their memory."""

import itertools

import pytest

from cute_kernels.sink.kernels import views

WIDTH = 2  # bytes of an element
BOX = 192  # rows of the largest tile


def address(place: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Bytes from the beginning of the view, summed in 64 bits."""
    return sum(c * s for c, s in zip(place, strides, strict=True)) * WIDTH % 2**64


@pytest.mark.parametrize("row", [64, 72, 8 * 128, 128 * 128 + 8])
@pytest.mark.parametrize(
    "lengths", [[1], [64], [0, 3, 0], [1, 130, 0, 257, 64, 3, 191], [2**30 - 1], [2**29, 5, 2**29 - 7]]
)
def test_rows_of_a_sequence_are_those_of_the_tensor_and_no_others(lengths, row):
    """TMA reads from the beginning of the view even where it fills with zeros, so memory must exist there."""
    sizes, strides = views.packed_modes(sum(lengths), row)
    for length, end in zip(lengths, itertools.accumulate(lengths), strict=True):
        first, outer = views.origin(True, length, end - length, 0)
        for i in {0, 1, length // 2, length - 1, length, length + BOX}:
            place = (first + i, *outer)
            assert all(0 <= c < 2**31 for c in place)
            seen = all(c < size for c, size in zip(place, sizes, strict=True))
            assert seen == (i < length) or i < 0
            if 0 <= i < length:
                assert address(place, strides) == (end - length + i) * row * WIDTH


@pytest.mark.parametrize("row", [64, 72, 128 * 128 + 8])
@pytest.mark.parametrize("tokens", [1, 63, 65536, 2**30 - 1])
def test_a_descriptor_spans_the_tensor(tokens, row):
    sizes, strides = views.packed_modes(tokens, row)
    assert address(tuple(size - 1 for size in sizes), strides) == (tokens - 1) * row * WIDTH
    assert all(0 < s * WIDTH < 2**40 and s * WIDTH % 16 == 0 for s in strides)  # what TMA takes
    assert all(size <= 2**32 for size in sizes)
