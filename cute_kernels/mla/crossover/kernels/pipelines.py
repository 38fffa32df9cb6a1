"""Pipelines of the crossover kernel, and its named barriers."""

from enum import IntEnum
from typing import NamedTuple

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.mla.crossover.kernels.tile import CODES_BYTES, STAGES, THREADS, VALUES_BYTES
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.kernels.load_q import q_pipeline
from cute_kernels.mla.kernels.tile import QK


class NamedBarrier(IntEnum):
    """Hardware barriers of a CTA; 0 is `sync_threads`."""

    QK = 1  # 128, the QK warpgroup: Q is converted, QK of a tile is done (P may overwrite its rope part)
    STORED = 3  # 256, both PV warpgroups: a partial is in global memory
    LOAD = 4  # 128, the load warpgroup: its own rows are stored, or the other CTA's codes are read


class CrossoverPipelines(NamedTuple):
    """The edges between the roles, and between the two CTAs of a cluster.

    q      Q, which TMA brings
    keys   key tiles, filled by the load warpgroup and freed by PV
    p      P and what the softmax stores with it; PV frees it together with the keys' stage
    peer   says, tile by tile, that the other CTA's stage is empty: rows may be sent
    codes  rows that the other CTA sends as codes
    """

    q: Pipeline
    keys: Pipeline
    p: Pipeline
    peer: Pipeline
    codes: Pipeline


def pipelines(spec: MlaCrossoverSpec) -> CrossoverPipelines:
    """Makes the edges of a kernel."""
    values_bytes, codes_bytes = (VALUES_BYTES, 0) if spec.exchange == "values" else (0, CODES_BYTES)
    return CrossoverPipelines(
        q=q_pipeline(spec.heads, QK),
        keys=Pipeline(
            "keys",
            STAGES,
            producers=THREADS,
            consumers=2 * THREADS,
            bytes=values_bytes,
            full="all 64 rows of a key tile are stored",
            empty="the last wgmma of PV has read the stage",
        ),
        p=Pipeline("p", STAGES, producers=THREADS, full="P, rescaling factors and weights are stored"),
        peer=Pipeline("peer", STAGES, producers=1, full="the other CTA's stage is empty"),
        codes=Pipeline("codes", STAGES, producers=1, bytes=codes_bytes, full="the other CTA's codes have come"),
    )
