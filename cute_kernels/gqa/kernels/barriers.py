"""Barriers of the GQA decode kernel."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.gqa.spec import GqaDecodeSpec


class NamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA."""

    CONSUMERS = 1  # all consumer warps: Q, or results of the warps, change hands


def barriers(spec: GqaDecodeSpec) -> Rings:
    """One ring: the stages of K, V and their scales."""
    loads = 1 + 32 * spec.scale_warps
    what = "K, V and their scales are in the stage" if spec.scale_warps else "K and V are in the stage"
    return [
        [
            MBarrier("full", loads, spec.stages, spec.copied_bytes, what),
            MBarrier("empty", 32 * spec.warps, spec.stages, 0, "consumers have K and V in registers"),
        ]
    ]
