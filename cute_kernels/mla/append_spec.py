"""What is fixed at compile time in the append kernel."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class MlaAppendSpec:
    """Compile-time facts of :class:`cute_kernels.mla.kernels.append.MlaAppendKernel`: constructor argument, cache key.

    tokens_per_warp  tokens whose loads a warp issues together: 1, 2 or 4. More keep more bytes in flight, fewer spread
                     a short call over more SMs
    warps            warps of a CTA
    """

    tokens_per_warp: int = 2
    warps: int = 4

    kernel: ClassVar[str] = "cute_kernels.mla.kernels.append:MlaAppendKernel"

    @classmethod
    def for_launch(cls, tokens: int) -> "MlaAppendSpec":
        """The variant for a call: one token a warp up to 32 warps for each of 132 SMs, then two."""
        return cls(tokens_per_warp=1 if tokens <= 132 * 32 else 2)

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        if self.tokens_per_warp not in (1, 2, 4):
            reasons.append(
                f"tokens_per_warp is {self.tokens_per_warp}; a warp copies the rope parts of 1, 2 or 4 tokens"
            )
        if not 1 <= self.warps <= 32:
            reasons.append(f"warps is {self.warps}; a CTA has 1 to 32")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {
            "registers": {1: 40, 2: 48, 4: 64}[self.tokens_per_warp],
            "instructions": ("LDG.E.128", "STG.E.128", "SATFINITE.E4M3"),
        }


def shipped_specs() -> list[MlaAppendSpec]:
    """Every specification that a call can ask for."""
    return [MlaAppendSpec.for_launch(tokens) for tokens in (1, 65536)]
