"""Compile-time facts of the MLA append kernel."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fp8_mla.formats import FORMATS, V3_2

E4M3_INSTRUCTIONS = ("LDG.E.128", "STG.E.128", "SATFINITE.E4M3")
UE8M0_INSTRUCTIONS = (*E4M3_INSTRUCTIONS, "STG.E.U8", "VHMNMX.BF16_V2")
E2M1_INSTRUCTIONS = ("LDG.E.128", "STG.E.64", "STG.E.U8", "VHMNMX.BF16_V2.NAN", "HSET2.BF16_V2", "HFMA2.BF16_V2")
E4M3_REGISTERS = {1: 40, 2: 48, 4: 64}
UE8M0_REGISTERS = {1: 32, 2: 40, 4: 64}
E2M1_REGISTERS = {1: 40, 2: 56, 4: 72}
BUDGETS = {
    ("float8_e4m3fn", "float32"): (E4M3_REGISTERS, E4M3_INSTRUCTIONS),
    ("float8_e4m3fn", "float8_e8m0fnu"): (UE8M0_REGISTERS, UE8M0_INSTRUCTIONS),
    ("float4_e2m1fn_x2", "float8_e4m3fn"): (E2M1_REGISTERS, E2M1_INSTRUCTIONS),
}
"""Budgets by dtypes of codes and scales: registers of a thread by tokens per warp, and required instructions."""
OTHER_BUDGET = (E2M1_REGISTERS, ("LDG.E.128",))
"""The budget for other dtypes, until their kernel has been measured: the most registers of those above."""


@dataclass(frozen=True)
class MlaAppendSpec:
    """Compile-time facts of `kernels.append.MlaAppendKernel`: constructor argument, cache key.

    tokens_per_warp  tokens whose loads a warp issues together: 1, 2 or 4. More tokens keep more bytes in flight, fewer
                     spread a short call over more SMs
    warps            warps of a CTA
    cache_format     a key of `FORMATS`. The launch says whether pages are planar or interleaved
    """

    tokens_per_warp: int = 2
    warps: int = 4
    cache_format: str = V3_2.name

    kernel: ClassVar[str] = "cute_kernels.mla.kernels.append:MlaAppendKernel"

    @classmethod
    def for_launch(cls, tokens: int, cache_format: str = V3_2.name) -> "MlaAppendSpec":
        """Chooses the variant for a call: one token a warp up to 32 warps for each of 132 SMs, then two."""
        return cls(tokens_per_warp=1 if tokens <= 132 * 32 else 2, cache_format=cache_format)

    def can_implement(self) -> list[str]:
        reasons = []
        if self.tokens_per_warp not in (1, 2, 4):
            reasons.append(f"tokens_per_warp is {self.tokens_per_warp}; a warp takes 1, 2 or 4 tokens")
        if not 1 <= self.warps <= 32:
            reasons.append(f"warps is {self.warps}; a CTA has 1 to 32")
        if self.cache_format not in FORMATS:
            reasons.append(f"cache_format is {self.cache_format!r}; known are {tuple(FORMATS)}")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        token_format = FORMATS[self.cache_format]
        registers, instructions = BUDGETS.get((token_format.codes.dtype, token_format.scales.dtype), OTHER_BUDGET)
        return {"registers": registers[self.tokens_per_warp], "instructions": instructions}


def shipped_specs() -> list[MlaAppendSpec]:
    """Returns every specification that a call can ask for."""
    return [MlaAppendSpec.for_launch(tokens, name) for name in FORMATS for tokens in (1, 65536)]
