"""The smallest kernel's spec, for tests of the machinery around kernels. Pure Python, as every spec."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class TinySpec:
    """y (n, width) = x (n, width) * alpha, float32.

    width  columns, one thread each
    fault  what the kernel does wrong on purpose: "" for nothing, "spill" for local memory,
           "setmaxnreg" for an instruction that ptxas ignores with a warning
    """

    width: int = 128
    fault: str = ""

    kernel: ClassVar[str] = "tests.cpu.tiny_kernel:TinyKernel"

    def can_implement(self) -> list[str]:
        return [] if self.width % 32 == 0 else [f"width is {self.width}, not a multiple of 32"]

    @property
    def expected(self) -> dict[str, Any]:
        return {"registers": 16, "instructions": ("LDG.E", "FMUL")}


def shipped_specs() -> list[TinySpec]:
    return [TinySpec()]
