"""What is fixed at compile time in the MLA decoding kernel."""

from dataclasses import dataclass
from typing import Any, ClassVar

HEADS_PER_CTA = 64  # rows of one wgmma
TOKENS_PER_TILE = 64
MERGE_LANES = (0, 32, 128)


@dataclass(frozen=True)
class MlaDecodeSpec:
    """Compile-time facts of :class:`cute_kernels.mla.kernel.MlaDecodeKernel`; constructor argument and cache key.

    sparse    keys come from a list of slots per query; otherwise from a block table and a length per request
    merge_lanes  several CTAs share the keys of a query: each writes a float32 partial, and CTAs behind them merge with
              this many threads a row. 0: one CTA has all keys
    cluster   CTAs that share one token's dequantized keys: 2 is the crossover's place

    Sinks, lengths and the log-sum-exp are always there (a sink of -inf, a length of topk): they cost nothing
    measurable, and every fact less halves the number of kernels to compile.
    """

    sparse: bool
    merge_lanes: int = 0
    cluster: int = 1

    kernel: ClassVar[str] = "cute_kernels.mla.kernel:MlaDecodeKernel"
    # with the default (5) ptxas spills a few of the 200 registers of a consumer, with 0 none
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        if self.cluster != 1:
            reasons.append(f"cluster is {self.cluster}; only 1 is built: CTAs do not share keys yet")
        if self.merge_lanes not in MERGE_LANES:
            reasons.append(f"merge_lanes is {self.merge_lanes}; known are {MERGE_LANES}")
        return reasons

    @property
    def split(self) -> bool:
        """Whether several CTAs share the keys of one query."""
        return self.merge_lanes > 0

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        output = () if self.split else ("UTMASTG",)
        return {"registers": 168, "instructions": ("HGMMA", "UTMALDG", "LDG.E.128", "USETMAXREG", *output)}


def shipped_specs() -> list[MlaDecodeSpec]:
    """Every specification that the planner can ask for."""
    return [MlaDecodeSpec(sparse=sparse, merge_lanes=lanes) for sparse in (True, False) for lanes in MERGE_LANES]
