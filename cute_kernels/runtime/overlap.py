"""Memory of written tensors: no element may share memory with another element, nor with another argument.

`check_written` compares exactly and runs with the other checks. The key of a prepared launch has the strides of outputs
that are not contiguous, and `Operator.check_addresses` checks the addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch

from cute_kernels.runtime.checks import check_plain, fail

_NEEDS = "memory of its own: it is written"
_MANY = 256
"""Most multiples of one stride that are tried; tensors with more count as overlapping. Equal pitches need two."""


def check_written(
    written: Mapping[str, torch.Tensor | None],
    read: Mapping[str, torch.Tensor | None],
    in_place: tuple[str, str] | None = None,
) -> None:
    """Raises ValueError if a written tensor shares memory with itself, another written one, or one that is read.

    Args:
        written: tensors by argument, which other checks have passed.
        read: read tensors by argument, which other checks have passed.
        in_place: a written and a read argument that may be the same elements at the same addresses.
    """
    rest = {name: t for name, t in (*read.items(), *written.items()) if t is not None and t.numel()}
    for name, t in written.items():
        if t is None or rest.pop(name, None) is None:
            continue
        check_plain(name, t)
        check_strides(name, t.shape, t.stride())
        for other, u in rest.items():
            if (name, other) != in_place or not same_place(t, u):
                if overlap(t, u):
                    fail(name, f"memory that is also {other}'s", _NEEDS)


def share_storage(written: Mapping[str, torch.Tensor | None], addresses: Mapping[str, int]) -> bool:
    """Whether the storage of a written tensor has the address of another argument; no storage has the address 0."""
    for name, t in written.items():
        if t is not None and holds(t, [at for other, at in addresses.items() if other != name]):
            return True
    return False


def holds(t: torch.Tensor, addresses: Iterable[int]) -> bool:
    """Whether one of the addresses is in the tensor's storage."""
    storage = t.untyped_storage()
    begin = storage.data_ptr()
    end = begin + storage.nbytes()
    for address in addresses:  # any() takes 0.3 us more
        if begin <= address < end:
            return True
    return False


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements at the same addresses."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype


def check_strides(name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Raises ValueError if two elements of a written tensor share memory, unless it is empty."""
    if 0 not in shape and overlaps_itself(shape, strides):
        fail(name, f"strides {tuple(strides)} for shape {tuple(shape)}: elements share memory", _NEEDS)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share an address: some stride is below the extent of all smaller strides."""
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a byte of one tensor is a byte of the other. Neither is empty; a tensor on meta has the address 0."""
    return a.data_ptr() != 0 and _overlap(_axes(a), _axes(b), b.data_ptr() - a.data_ptr())


_Axes = tuple[tuple[int, int], ...]


def _axes(t: torch.Tensor) -> _Axes:
    """Returns (stride in bytes, size) of each axis; the last one is the bytes of an element."""
    itemsize = t.element_size()
    strides = zip(t.stride(), t.shape, strict=True)
    return (*((stride * itemsize, size) for stride, size in strides if stride and size > 1), (1, itemsize))


@functools.lru_cache(4096)
def _overlap(a: _Axes, b: _Axes, distance: int) -> bool:
    """Whether an offset in `a` is `distance` plus an offset in `b`."""
    most: dict[int, int] = {}
    for stride, size in (*a, *b):
        most[stride] = most.get(stride, 0) + size - 1
    # an offset in b is its largest offset less a multiple of each stride, so both sides are sums of multiples
    target = distance + sum(stride * (size - 1) for stride, size in b)
    return _is_sum(target, tuple(sorted(most.items(), reverse=True)))


def _is_sum(target: int, most: tuple[tuple[int, int], ...]) -> bool:
    """Whether target is a sum of multiples of strides, each with a largest factor; strides fall."""
    if not most:
        return target == 0
    (stride, times), *others = most
    least = target - sum(other * count for other, count in others)
    first, last = max(0, -(-least // stride)), min(times, target // stride)
    if last - first >= _MANY:
        return True
    rest = tuple(others)
    return any(_is_sum(target - stride * k, rest) for k in range(first, last + 1))
