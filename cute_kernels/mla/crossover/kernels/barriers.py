"""Barriers of the crossover kernel."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.mla.crossover.kernels.tile import CODES_BYTES, STAGES, VALUES_BYTES
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.kernels.tile import QK
from cute_kernels.mla.spec import WIDE


class NamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA."""

    QK = 1  # the QK warpgroup: QK is done, P may overwrite the rope part of its tile; hand-overs of Q
    STORED = 3  # both PV warpgroups: a partial is in global memory
    LOAD = 4  # the load warpgroup: own rows, or those of the other CTA, are complete


def barriers(spec: MlaCrossoverSpec) -> Rings:
    """Mbarriers, in the order of initialization. Those of the exchange that a spec does not have are idle."""
    values, codes = (spec.exchange == name for name in ("values", "codes"))
    rings = [
        MBarrier("q_full", 1, bytes=2 * QK * WIDE, says="TMA: Q"),
        MBarrier("full", 128, STAGES, VALUES_BYTES if values else 0, "load warpgroup, and the other CTA's rows"),
        MBarrier("empty", 256, STAGES, says="PV warpgroups, after their last wgmma"),
        MBarrier("p_full", 128, STAGES, says="QK warpgroup: P, and the rows' rescaling, row_max, row_sum"),
        MBarrier("peer_free", 1, STAGES, says="the other CTA has this stage free"),
        MBarrier("codes_full", 1, STAGES, CODES_BYTES if codes else 0, "codes of the other CTA"),
    ]
    return [[ring] for ring in rings]
