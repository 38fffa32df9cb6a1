"""Named barriers of the MLA decode kernel."""

from enum import IntEnum


class NamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA."""

    QK = 1  # the QK warpgroups: votes on Q, and its hand-over
    STORED = 3  # both PV warpgroups: a partial is in global memory
    PV = 5  # and 6: one PV warpgroup, P x scale of 16 keys is complete
