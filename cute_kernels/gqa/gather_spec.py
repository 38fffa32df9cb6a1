"""What is fixed at compile time in the kernel that copies pages of a quantized cache."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gqa.append_spec import DTYPES, HEAD_DIMS
from cute_kernels.gqa.spec import BYTE_TYPES


@dataclass(frozen=True)
class KvGatherSpec:
    """Compile-time facts of :class:`cute_kernels.gqa.kernels.gather.KvGatherKernel`: constructor argument, cache key.

    kv_dtype  of the cache: "int8", with a scale for each token and head, or "float8_e4m3fn", with one for all
    dtype     of the copies: "bfloat16" or "float16"
    d         head dimension
    warps     of a CTA
    """

    kv_dtype: str
    dtype: str
    d: int
    warps: int = 8

    kernel: ClassVar[str] = "cute_kernels.gqa.kernels.gather:KvGatherKernel"

    @property
    def one_scale(self) -> bool:
        """Whether all values share a scale."""
        return self.kv_dtype != "int8"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        for name, value, known in (
            ("kv_dtype", self.kv_dtype, BYTE_TYPES),
            ("dtype", self.dtype, DTYPES),
            ("d", self.d, HEAD_DIMS),
        ):
            if value not in known:
                reasons.append(f"{name} is {value!r}; known are {known}")
        if not 1 <= self.warps <= 32:
            reasons.append(f"warps is {self.warps}; a CTA has 1 to 32")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 40, "instructions": ("LDG.E.128", "STG.E.128")}


def shipped_specs() -> list[KvGatherSpec]:
    """Every specification that a call can ask for."""
    return [KvGatherSpec(kv_dtype, dtype, d) for kv_dtype in BYTE_TYPES for dtype in DTYPES for d in HEAD_DIMS]
