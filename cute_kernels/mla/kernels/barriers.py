"""Barriers of the MLA decode kernel."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.mla.kernels.tile import TILE_BYTES
from cute_kernels.mla.spec import MlaDecodeSpec


class NamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA."""

    QK = 1  # the QK warpgroups: votes on Q, and its hand-over
    PV = 3  # both PV warpgroups: a partial is in global memory; halves of P
    QK_TILE = 6  # and 7: one QK warpgroup, votes on the scales of a key tile of the latent kernel
    SOFTMAX = 5  # the softmax: votes on the scales of a key tile


def barriers(spec: MlaDecodeSpec) -> Rings:
    """In the order of their initialization."""
    load = 257 if spec.pv_issues_tma else 256  # load threads and their copies; one more announces the bytes of TMA
    tma_bytes = 0 if spec.sparse else TILE_BYTES  # of a whole key tile of a page; others come by cp.async
    rings = [
        MBarrier("q_full", 1, bytes=2 * spec.heads * spec.d_qk, says="Q is loaded"),
        MBarrier("full", load, spec.stages, tma_bytes, says="a key tile is loaded, its mask set"),
        MBarrier("empty", 256, spec.stages, says="PV has its codes in registers"),
        MBarrier("s_full", 128, spec.qk_warpgroups, says="S is stored"),
        MBarrier("s_empty", 128, spec.qk_warpgroups, says="the softmax has read S"),
        MBarrier("p_full", 128, spec.p_stages, says="P, weights, flags and factors are stored"),
        MBarrier("p_empty", 256, spec.p_stages, says="the last wgmma of PV has read P"),
    ]
    if spec.pv_issues_tma:
        rings.append(MBarrier("rope_empty", 128, spec.rope_stages, says="QK has read the rope part"))
    if spec.pv_expands:
        rings.append(MBarrier("raw", 256, spec.stages, says="rows to expand are copied; or others come, or none do"))
    return [[ring] for ring in rings]
