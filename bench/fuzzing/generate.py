"""Makes the call that a seed names, out of a fixed list of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from bench.fuzzing import gqa, mla, small
from bench.fuzzing.calls import Call
from bench.fuzzing.draws import Draw

MAX_SPECS: Final = 450
GENERATORS: Final[tuple[tuple[int, Callable[[Draw], Call]], ...]] = (
    (36, mla.decode_call),
    (8, mla.append_call),
    (34, gqa.decode_call),
    (8, gqa.append_call),
    (7, small.merge_call),
    (7, small.sink_call),
)
"""Share of each public op in percent, and the function that draws its calls."""


@functools.cache
def kernel_specs() -> tuple[Any, ...]:
    """All kernels that calls may launch. They are compiled first, so that no call waits for the compiler."""
    return tuple(dict.fromkeys([*mla.kernel_specs(), *gqa.kernel_specs(), *small.kernel_specs()]))


@functools.cache
def _known() -> frozenset[Any]:
    return frozenset(kernel_specs())


def draw_call(seed: int, device: torch.device, *, may_be_large: bool = True) -> Call:
    """The call that a seed names on a device. Draws again, up to 1000 times, while a kernel is not in the list."""
    for attempt in range(1000):
        draw = Draw(seed, device, attempt)
        draw.large = draw.large and may_be_large
        shares, makers = zip(*GENERATORS, strict=True)
        call = draw.rng.choices(makers, shares)[0](draw)
        if _known().issuperset(call.specs):
            return call
    raise RuntimeError(f"seed {seed}: no call within the {len(_known())} specifications after 1000 tries")
