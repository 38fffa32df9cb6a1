"""Blocks of memory that hold everything a call writes, with poison around it; filled and compared as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

POISON: Final = -1
"""An int32 word of bytes 0xFF, which are NaN in every floating-point dtype."""
GAP: Final = 256
"""Least number of bytes before and after every tensor."""


class Place(NamedTuple):
    """The place of a tensor in a block, in elements of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns the elements of memory from the first element of a strided tensor to its last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a dense tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def padded_stride(shape: Sequence[int], unit: int, gaps: Sequence[int]) -> tuple[int, ...]:
    """Returns strides with gaps along all axes but the last; all strides are multiples of `unit` elements.

    Args:
        shape: shape of the tensor.
        unit: number of elements.
        gaps: gap of each axis but the last, in units.
    """
    stride, step = [1] * len(shape), max(shape[-1], 1)
    for axis in range(len(shape) - 2, -1, -1):
        step = -(-step // unit) * unit + unit * gaps[axis]
        stride[axis] = step
        step *= max(shape[axis], 1)
    return tuple(stride)


class Image:
    """The tensors that a call writes, in one block of memory.

    before   the block before a call, int32 words; each call gets a copy
    places   the places of the tensors, by name
    """

    def __init__(self, places: Mapping[str, Place], before: torch.Tensor) -> None:
        self.places = dict(places)
        self.before = before

    @classmethod
    def of_outputs(
        cls, outputs: Mapping[str, tuple[torch.dtype, Sequence[int], Sequence[int], int]], device: torch.device
    ) -> Image:
        """Makes a block full of poison for outputs: (dtype, shape, strides, alignment in bytes) by name."""
        places, end = {}, 0
        for name, (dtype, shape, stride, align) in outputs.items():
            # a multiple of the alignment, but not of a larger power of two
            start = -(-(end + GAP) // (2 * align)) * 2 * align + align
            places[name] = Place(dtype, tuple(shape), tuple(stride), start // dtype.itemsize)
            end = start + span(shape, stride) * dtype.itemsize
        words = -(-(end + GAP) // 16) * 4  # a multiple of 16 bytes, so that it can be viewed as any dtype
        return cls(places, torch.full((words,), POISON, dtype=torch.int32, device=device))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Image:
        """Makes a block with copies of tensors at multiples of 16 bytes; their strides stay, and gaps hold poison."""
        device = next(iter(tensors.values())).device
        image = cls.of_outputs({name: (t.dtype, t.shape, t.stride(), 16) for name, t in tensors.items()}, device)
        for name, view in image.views(image.before).items():
            view.copy_(tensors[name])
        return image

    def views(self, block: torch.Tensor, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Views the tensors in a block laid out like this image: all, or those of some names."""
        chosen = {name: self.places[name] for name in (self.places if names is None else names)}
        return {name: block.view(at.dtype).as_strided(at.shape, at.stride, at.offset) for name, at in chosen.items()}

    def after(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the block after a call that writes these values and nothing else."""
        block = self.before.clone()
        for name, view in self.views(block, values).items():
            view.copy_(values[name])
        return block

    def strays(self, block: torch.Tensor) -> int:
        """Returns how many words outside the tensors have changed."""
        return int((block != self.after(self.views(block))).sum())
