"""Compile-time facts of the kernel that makes block tables from lists of blocks."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class BlockTableSpec:
    """Compile-time facts of :class:`cute_kernels.gqa.kernels.block_table.BlockTableKernel`: constructor argument, key.

    paged  whether the cache has a block table; else each sequence is one page
    """

    paged: bool

    kernel: ClassVar[str] = "cute_kernels.gqa.kernels.block_table:BlockTableKernel"
    warps: ClassVar[int] = 4

    def can_implement(self) -> list[str]:
        return []

    @property
    def expected(self) -> dict[str, Any]:
        return {"registers": 40, "instructions": ("VOTE", "SHFL.IDX", "STG.E")}


def shipped_specs() -> list[BlockTableSpec]:
    """Returns every spec that a call can ask for."""
    return [BlockTableSpec(paged) for paged in (True, False)]
