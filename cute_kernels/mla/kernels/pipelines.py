"""Pipelines of the MLA decode kernel, and its named barriers."""

from enum import IntEnum
from typing import NamedTuple

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.mla.kernels.load_q import q_pipeline
from cute_kernels.mla.kernels.tile import TILE_BYTES
from cute_kernels.mla.spec import MlaDecodeSpec


class NamedBarrier(IntEnum):
    """Named barriers. Barrier 0 is for all threads of the CTA."""

    QK = 1  # the QK warpgroups: votes on Q, and the hand-over of Q
    PV = 3  # both PV warpgroups: a partial is in global memory; halves of P
    QK_TILE = 6  # and 7: one QK warpgroup, votes on the scales of a key tile
    SOFTMAX = 5  # the softmax: votes on the scales of a key tile


class MlaPipelines(NamedTuple):
    """Edges between the roles. Tiles are key tiles, counted through all work tiles of a CTA; for `q` they are loads.

    q     Q, which TMA brings, to QK
    keys  key tiles, from the load warpgroup, or from TMA that PV issues; PV frees them
    s     S, from QK to the softmax
    p     P, weights, flags and factors, from the softmax to PV
    rope  rope parts; if PV issues TMA, QK frees them before the codes are free
    raw   if PV expands codes: rows as they are copied, from the load warpgroup to PV
    """

    q: Pipeline
    keys: Pipeline
    s: Pipeline
    p: Pipeline
    rope: Pipeline
    raw: Pipeline


def pipelines(spec: MlaDecodeSpec) -> MlaPipelines:
    """Makes the edges of a kernel."""
    load = 257 if spec.pv_issues_tma else 256  # load threads and their copies; one more announces the bytes of TMA
    return MlaPipelines(
        q=q_pipeline(spec.heads, spec.d_qk),
        keys=Pipeline(
            "keys",
            spec.stages,
            producers=load,
            consumers=256,
            bytes=0 if spec.sparse else TILE_BYTES,  # bytes of a whole key tile of a page; others use cp.async
            full="a key tile is loaded, its mask set",
            empty="PV has its codes in registers",
        ),
        s=Pipeline(
            "s",
            spec.qk_warpgroups,
            producers=128,
            consumers=128,
            full="S is stored",
            empty="the softmax has read S",
        ),
        p=Pipeline(
            "p",
            spec.p_stages,
            producers=128,
            consumers=256,
            full="P, weights, flags and factors are stored",
            empty="the last wgmma of PV has read P",
        ),
        rope=Pipeline(
            "rope",
            spec.rope_slots,
            consumers=128 if spec.pv_issues_tma else 0,
            empty="QK has read the rope part",
        ),
        raw=Pipeline(
            "raw",
            spec.stages,
            producers=256 if spec.pv_expands else 0,
            full="the stage is ready to expand, needs no expansion, or is empty (NO_TILE)",
        ),
    )
