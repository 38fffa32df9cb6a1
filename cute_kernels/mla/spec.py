"""What is fixed at compile time in the MLA decoding kernel."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.merge.spec import MergeSpec

HEADS_PER_CTA = 64  # rows of one wgmma
TOKENS_PER_TILE = 64


@dataclass(frozen=True)
class MlaDecodeSpec:
    """Compile-time facts of :class:`cute_kernels.mla.kernel.MlaDecodeKernel`; constructor argument and cache key.

    sparse    keys come from a list of slots per query; otherwise from a block table and a length per request
    merge     the kernel that follows when every CTA writes a float32 partial of its range of keys; None: bf16 output
    cluster   CTAs that share one token's dequantized keys: 2 is the crossover's place

    Sinks, lengths and the log-sum-exp are always there (a sink of -inf, a length of topk): they cost nothing
    measurable, and every fact less halves the number of kernels to compile.
    """

    sparse: bool
    merge: MergeSpec | None = None
    cluster: int = 1

    kernel: ClassVar[str] = "cute_kernels.mla.kernel:MlaDecodeKernel"
    # with the default (5) ptxas spills a few of the 200 registers of a consumer, with 0 none
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        if self.cluster != 1:
            reasons.append(f"cluster is {self.cluster}; only 1 is built: CTAs do not share keys yet")
        if self.merge is not None:
            takes = (self.merge.d, self.merge.in_dtype, self.merge.out_dtype, self.merge.has_sink, self.merge.has_lse)
            if takes != (512, "float32", "bfloat16", True, True):
                reasons.append(
                    f"merge is {self.merge}; partials are 512 float32, the result bfloat16 with sink and lse"
                )
            reasons += self.merge.can_implement()
        return reasons

    @property
    def split(self) -> bool:
        """Whether several CTAs share the keys of one query."""
        return self.merge is not None

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        output = () if self.split else ("UTMASTG",)
        return {"registers": 168, "instructions": ("HGMMA", "UTMALDG", "LDG.E.128", "USETMAXREG", *output)}


def shipped_specs() -> list[MlaDecodeSpec]:
    """Every specification that the planner can ask for."""
    merges = [
        MergeSpec.for_launch(rows=rows, num_states=n, d=512, in_dtype="float32", out_dtype="bfloat16", has_sink=True)
        for rows, n in ((128, 8), (128, 64), (64, 64), (65536, 2))
    ]
    return [MlaDecodeSpec(sparse=sparse, merge=merge) for sparse in (True, False) for merge in (None, *merges)]
