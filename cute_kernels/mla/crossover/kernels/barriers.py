"""Named barriers of the crossover kernel."""

from enum import IntEnum


class NamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA."""

    QK = 1  # the QK warpgroup: QK is done, P may overwrite the rope part of its tile; hand-overs of Q
    STORED = 3  # both PV warpgroups: a partial is in global memory
    LOAD = 4  # the load warpgroup: own rows, or those of the other CTA, are complete
