"""Barriers of the GQA decode kernel."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.gqa.spec import GqaDecodeSpec


class NamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA."""

    CONSUMERS = 1  # all consumer warps: Q, or results of the warps, change hands


def barriers(spec: GqaDecodeSpec) -> Rings:
    """The stages of K, V and their scales; O of the warps."""
    loads = 1 + 32 * spec.scale_writers
    what = "K, V and their scales are in the stage" if spec.scale_warps else "K and V are in the stage"
    return [
        [
            MBarrier("full", loads, spec.stages, spec.copied_bytes, what),
            MBarrier("empty", 32 * spec.warps, spec.stages, 0, "consumers have K and V in registers"),
        ],
        [MBarrier("o_empty", 32 * spec.warps, 1, 0, "consumers have read the O of all warps")],
    ]
