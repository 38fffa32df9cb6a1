"""What is fixed at compile time in the kernel that scores index keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

HEADS = (16, 32, 64)
KEYS = 64
"""Of a tile: rows of a wgmma."""
PAGE_STEP = 16
"""A page has a multiple of so many keys."""


@dataclass(frozen=True)
class ScoreSpec:
    """Compile-time facts of :class:`cute_kernels.indexer.kernels.score.ScoreKernel`: constructor argument, cache key.

    heads   of the indexer
    stages  tiles of keys in shared memory
    """

    heads: int
    stages: int = 4

    kernel: ClassVar[str] = "cute_kernels.indexer.kernels.score:ScoreKernel"
    threads: ClassVar[int] = 128
    ctas_per_sm: ClassVar[int] = 4
    """With 4 stages 42 KB each, so that 100 KB of keys are in flight."""

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = [] if self.heads in HEADS else [f"heads is {self.heads}; known are {HEADS}"]
        if not 2 <= self.stages <= 8:
            reasons.append(f"stages is {self.stages}; needs 2 to 8")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        instructions = ("LDGSTS.E.BYPASS.128", "QGMMA")
        return {"registers": 128, "instructions": instructions}


def ctas_a_row(rows: int, num_sms: int) -> int:
    """CTAs that share the keys of a row: as many as run at the same time, in all."""
    return max(1, ScoreSpec.ctas_per_sm * num_sms // max(rows, 1))


def shipped_specs() -> list[ScoreSpec]:
    """Every specification that a call can ask for."""
    return [ScoreSpec(heads) for heads in HEADS]
