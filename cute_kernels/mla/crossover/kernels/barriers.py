"""Barriers of the crossover kernel."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.mla.crossover.kernels.tile import CODES_BYTES, STAGES, THREADS, VALUES_BYTES
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.kernels.tile import QK


class NamedBarrier(IntEnum):
    """Hardware barriers of a CTA; 0 is `sync_threads`."""

    QK = 1  # 128, the QK warpgroup: Q is converted, QK of a tile is done (P may overwrite its rope part)
    STORED = 3  # 256, both PV warpgroups: a partial is in global memory
    LOAD = 4  # 128, the load warpgroup: own rows are stored, or the other CTA's codes are read


def barriers(spec: MlaCrossoverSpec) -> Rings:
    """Mbarriers, in the order of initialization."""
    values_bytes, codes_bytes = (VALUES_BYTES, 0) if spec.exchange == "values" else (0, CODES_BYTES)
    rings = [
        MBarrier("q_full", 1, bytes=spec.heads * 2 * QK, says="Q is loaded"),
        MBarrier("full", THREADS, STAGES, values_bytes, "all 64 rows of a key tile are stored"),
        MBarrier("empty", 2 * THREADS, STAGES, says="the last wgmma of PV has read the stage"),
        MBarrier("p_full", THREADS, STAGES, says="P, rescaling factors and weights are stored"),
        MBarrier("peer_free", 1, STAGES, says="the other CTA's stage is empty"),
        MBarrier("codes_full", 1, STAGES, codes_bytes, "the other CTA's codes have come"),
    ]
    return [[ring] for ring in rings]
