"""Mbarriers of a kernel as a table: initialization reads it, and the kernel's docstring shows it.

All threads of a role arrive, not one for each of its warps: that costs nothing measurable, and racecheck can follow it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass.cute as cute


class MBarrier(NamedTuple):
    """One mbarrier, or one for each stage of a ring.

    name      of the field of shared memory
    arrivals  that complete a phase; an arrival that announces bytes counts as one
    copies    stages
    bytes     that TMA, or the other CTA of a cluster, brings in a phase; 0: none
    says      what is true when a phase completes
    """

    name: str
    arrivals: int
    copies: int = 1
    bytes: int = 0
    says: str = ""


Rings = Sequence[Sequence[MBarrier]]
"""Barriers of one ring stand together: they are initialized stage by stage."""


def initialize(smem: Any, rings: Rings) -> None:
    """Initializes all barriers; called by one thread, which fences and synchronizes afterwards."""
    for ring in rings:
        for stage in range(max(barrier.copies for barrier in ring)):
            for barrier in ring:
                if stage < barrier.copies:
                    cute.arch.mbarrier_init(pointer(smem, barrier) + stage, barrier.arrivals)


def pointer(smem: Any, barrier: MBarrier) -> Any:
    """The first word of a barrier's field, which is a pointer, a number or, with stages, a range."""
    field = getattr(smem, barrier.name)
    if isinstance(field, cute.Pointer):
        return field
    return field.data_ptr() if hasattr(field, "data_ptr") else field.ptr


def table(rings: Rings) -> str:
    """Lines for a docstring: name[copies], arrivals, bytes, and what it says."""
    rows = []
    for barrier in (barrier for ring in rings for barrier in ring):
        name = f"{barrier.name}[{barrier.copies}]" if barrier.copies > 1 else barrier.name
        transaction = f"+ {barrier.bytes:,} bytes" if barrier.bytes else ""
        rows.append(f"  {name:<16}{barrier.arrivals:>5} {transaction:<15} {barrier.says}".rstrip())
    return "\n".join(rows)
