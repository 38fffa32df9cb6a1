"""Barriers of the GQA decode kernel."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.gqa.spec import GqaDecodeSpec


class NamedBarrier(IntEnum):
    """Hardware barriers of a CTA; 0 is `sync_threads`."""

    CONSUMERS = 1  # 32 x warps: where Q, and where the warps' results, change hands


def barriers(spec: GqaDecodeSpec) -> Rings:
    """Mbarriers, in the order of initialization."""
    stages = spec.stages
    return [
        [
            MBarrier("full", 1 + 32 * spec.scale_warps, stages, spec.copied_bytes, "K and V of a tile, and its scales"),
            MBarrier("empty", 32 * spec.warps, stages, says="consumers have K and V in registers"),
        ]
    ]
