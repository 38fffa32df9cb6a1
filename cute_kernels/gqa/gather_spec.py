"""Compile-time facts of the kernel that copies pages of a quantized cache."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gqa.codes import CODES, DTYPES, KINDS, ROTATED, ROTATED_KINDS, TYPES, WIDENED, Codes
from cute_kernels.gqa.layouts import HEAD_DIMS, ROTATED_DIMS


@dataclass(frozen=True)
class KvGatherSpec:
    """Compile-time facts of :class:`cute_kernels.gqa.kernels.gather.KvGatherKernel`: constructor argument, cache key.

    kv_dtype  type of the cache, a widened type of `gqa.codes`; only of keys if values have another type
    dtype     dtype of the copies: "bfloat16" or "float16"
    d         head dimension
    v_dtype   type of values that are rotated 4-bit codes; else None
    one_scale whether all values share a scale, or each token and head has its own
    warps     warps of a CTA
    """

    kv_dtype: str
    dtype: str
    d: int
    one_scale: bool = False
    v_dtype: str | None = None
    warps: int = 8

    kernel: ClassVar[str] = "cute_kernels.gqa.kernels.gather:KvGatherKernel"

    @property
    def codes(self) -> tuple[Codes, Codes]:
        """The types of K and of V."""
        return TYPES[self.kv_dtype], TYPES[self.v_dtype or self.kv_dtype]

    def can_implement(self) -> list[str]:
        reasons = []
        for name, value, known in (
            ("kv_dtype", self.kv_dtype, WIDENED if self.v_dtype is None else (*WIDENED, *ROTATED)),
            ("v_dtype", self.v_dtype, (None, *ROTATED)),
            ("dtype", self.dtype, DTYPES),
            ("d", self.d, HEAD_DIMS),
        ):
            if value not in known:
                reasons.append(f"{name} is {value!r}; known are {known}")
        rotated = self.v_dtype is not None
        if rotated and (self.one_scale or (self.kv_dtype, self.v_dtype) not in KINDS.values()):
            reasons.append(f"v_dtype is {self.v_dtype}; it goes with int8 or uint8 keys and scales of tokens")
        if rotated and self.d not in ROTATED_DIMS:
            reasons.append(f"d is {self.d}; that of a rotated vector is one of {ROTATED_DIMS}")
        if not 1 <= self.warps <= 32:
            reasons.append(f"warps is {self.warps}; a CTA has 1 to 32")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        load = f"LDG.E.{128 // self.codes[0].values}"
        return {"registers": 40 if self.v_dtype is None else 64, "instructions": (load, "STG.E.128")}


def shipped_specs() -> list[KvGatherSpec]:
    """Returns every spec that a call can ask for."""
    kinds = [(kv_dtype, False) for kv_dtype in WIDENED]
    kinds += [(kv_dtype, True) for kv_dtype in WIDENED if not CODES[kv_dtype].needs_scales]
    specs = [KvGatherSpec(kv_dtype, dtype, d, one) for kv_dtype, one in kinds for dtype in DTYPES for d in HEAD_DIMS]
    rotated = [KINDS[kind] for kind in ROTATED_KINDS]
    return specs + [KvGatherSpec(k, dtype, d, v_dtype=v) for k, v in rotated for dtype in DTYPES for d in ROTATED_DIMS]
