"""Compile-time facts of the kernel that scores index keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

HEADS = (16, 32, 64)
KEYS = 64
"""Keys of a tile: rows of a wgmma."""
PAGE_STEP = 16
"""The number of keys of a page is a multiple of this."""
QUERIES = (1, 2, 3, 4)
"""Queries that a CTA may score together."""


@dataclass(frozen=True)
class ScoreSpec:
    """Compile-time facts of :class:`cute_kernels.indexer.kernels.score.ScoreKernel`: constructor argument, cache key.

    heads    heads of the indexer
    queries  most queries of a request that a CTA scores together
    stages   tiles of keys in shared memory
    """

    heads: int
    queries: int = 1
    stages: int = 4

    kernel: ClassVar[str] = "cute_kernels.indexer.kernels.score:ScoreKernel"
    threads: ClassVar[int] = 128

    @classmethod
    def for_launch(cls, heads: int, s_q: int) -> "ScoreSpec":
        """Chooses the variant for requests of `s_q` queries."""
        return cls(heads, -(-s_q // -(-s_q // QUERIES[-1])))

    def can_implement(self) -> list[str]:
        reasons = [] if self.heads in HEADS else [f"heads is {self.heads}; known are {HEADS}"]
        if self.queries not in QUERIES:
            reasons.append(f"queries is {self.queries}; known are {QUERIES}")
        if not 2 <= self.stages <= 8:
            reasons.append(f"stages is {self.stages}; needs 2 to 8")
        return reasons

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM: four, with 100 KB of keys in flight; three for several queries.

        Four queries of 64 heads take 69 KB of shared memory; two of them take 160 registers.
        """
        return 4 if self.queries == 1 else 3

    @property
    def weights(self) -> int:
        """Floats of the weights of a query in shared memory: the weights of four lanes begin in different banks."""
        return self.heads + 16

    @property
    def expected(self) -> dict[str, Any]:
        """Limits of the compiled kernel: 128 registers let four CTAs of 128 threads share an SM, 168 three."""
        instructions = ("LDGSTS.E.BYPASS.128", "QGMMA")
        return {"registers": 128 if self.queries == 1 else 168, "instructions": instructions}


def shipped_specs() -> list[ScoreSpec]:
    """Returns every spec that a call can ask for."""
    return [ScoreSpec(heads, queries) for heads in HEADS for queries in QUERIES]
