"""Compile-time facts of the kernel that appends index keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

SCALE_RULES = ("float32", "ue8m0")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class IndexAppendSpec:
    """Compile-time facts of :class:`cute_kernels.indexer.kernels.append.IndexAppendKernel`: constructor argument, key.

    scale  how a key's scale is chosen: "float32" or "ue8m0"
    dtype  dtype of the keys: "bfloat16" or "float32"
    warps  warps of a CTA
    """

    scale: str
    dtype: str = "bfloat16"
    warps: int = 4

    kernel: ClassVar[str] = "cute_kernels.indexer.kernels.append:IndexAppendKernel"

    def can_implement(self) -> list[str]:
        reasons = []
        for name, value, known in (("scale", self.scale, SCALE_RULES), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                reasons.append(f"{name} is {value!r}; known are {known}")
        if not 1 <= self.warps <= 32:
            reasons.append(f"warps is {self.warps}; a CTA has 1 to 32")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        return {"registers": 40, "instructions": ("LDG.E.128", "STG.E.128", "SATFINITE.E4M3")}


def shipped_specs() -> list[IndexAppendSpec]:
    """Returns every spec that a call can ask for."""
    return [IndexAppendSpec(scale, dtype) for scale in SCALE_RULES for dtype in DTYPES]
