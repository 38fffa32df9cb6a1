"""The smallest kernel's spec, for tests of the machinery around kernels. Pure Python, as every spec."""

import sys
from collections.abc import Iterable, Iterator
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


@dataclass(frozen=True)
class TinyShape:
    """A model that needs two tiny kernels, one of them twice."""

    widths: tuple[int, ...] = (32, 64, 32)

    def specs(self, batch_sizes: Iterable[int], query_tokens: Iterable[int], num_sms: int) -> Iterator[TinySpec]:
        yield from map(TinySpec, self.widths)


def fill_without_torch(spec: TinySpec) -> None:
    """Compiles as a worker process does, which must not import torch."""
    from cute_kernels.runtime import compile

    compile._fill(spec)
    if sys.modules.get("torch"):
        raise RuntimeError("torch was imported")


def shipped_specs() -> list[TinySpec]:
    return [TinySpec()]
