"""A table of a kernel's mbarriers: initialization reads it, and the kernel's docstring shows it.

All threads of a role arrive, not one per warp: that costs nothing measurable, and racecheck can follow it.
"""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute

from cute_kernels.device.pipeline import MBarrier, field_pointer, lines

Rings = Sequence[Sequence[MBarrier]]
"""Barriers of a ring are listed together, because they are initialized stage by stage."""


def initialize(smem: Any, rings: Rings) -> None:
    """Initializes all barriers; called by one thread, which fences and synchronizes afterwards."""
    for ring in rings:
        for stage in range(max(barrier.stages for barrier in ring)):
            for barrier in ring:
                if stage < barrier.stages:
                    cute.arch.mbarrier_init(field_pointer(smem, barrier.name) + stage, barrier.arrivals)


def table(rings: Rings) -> str:
    """Returns lines for a docstring, in the format of `pipeline.table`."""
    return lines(barrier for ring in rings for barrier in ring)
