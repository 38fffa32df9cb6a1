"""Pipelines of the GQA decode kernel, and its named barrier."""

from enum import IntEnum
from typing import NamedTuple

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.gqa.spec import GqaDecodeSpec


class NamedBarrier(IntEnum):
    """Named barriers. Barrier 0 is for all threads of the CTA."""

    CONSUMERS = 1  # all consumer warps: hand over Q, or results of the warps
    TEAM = 2  # the warps of team 0 exchange parts of S; team i has barrier TEAM + i


class GqaPipelines(NamedTuple):
    """Edges between the roles.

    kv      key tiles, from the load and scale warps to the consumers
    warp_o  O of each team of warps, which consumers read in the epilogue of a sequence; tiles are sequences
    """

    kv: Pipeline
    warp_o: Pipeline


def pipelines(spec: GqaDecodeSpec) -> GqaPipelines:
    """Makes the edges of a kernel."""
    consumers = 32 * spec.warps
    what = "K, V and their scales are in the stage" if spec.scale_warps else "K and V are in the stage"
    return GqaPipelines(
        kv=Pipeline(
            "kv",
            spec.stages,
            producers=1 + 32 * spec.scale_writers,
            consumers=consumers,
            bytes=spec.tile("k").copied + spec.tile("v").copied,
            full=what,
            empty="consumers have K and V in registers",
        ),
        warp_o=Pipeline("warp_o", consumers=consumers, empty="consumers have read the O of all warps"),
    )
