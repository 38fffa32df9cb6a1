"""What is fixed at compile time in the forward kernel of sink attention, and in the one that lists its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

SMEM_PER_CTA = 232_448
ROWS = 64  # of a wgmma, and so of a consumer warpgroup
DTYPES = ("bfloat16", "float16")
WARPGROUPS = (2, 3, 4)
TILES = (64, 96, 128, 160, 192)
SMALL_WINDOW = 512  # up to here most tiles are boundary tiles, and smaller ones waste less


@dataclass(frozen=True)
class SinkForwardSpec:
    """Compile-time facts of :class:`cute_kernels.sink.forward_kernel.SinkForwardKernel`; constructor argument and key.

    dtype       "bfloat16" or "float16", of q, k, v and out
    d           head dimension: 64 or 128
    packed      sequences of different lengths lie one behind the other; otherwise batches of one length
    window      whether there is a left window; without one its comparisons are not compiled
    warpgroups  consumer warpgroups of a CTA, 64 rows each: 2 or 3
    tile        keys of a tile
    turns       whether the warpgroups issue their products in turns, so that one's softmax meets another's products
    emulated    of every 8 exponentials, how many are polynomials, which spares the MUFU at d 64
    grouped     whether a CTA takes 64 rows of all query heads of a KV head, a warpgroup every warpgroups-th head, and
                loads their keys once, where all tiles fit into shared memory; otherwise 64 rows a warpgroup of one head
    """

    dtype: str
    d: int
    packed: bool = False
    window: bool = False
    warpgroups: int = 2
    tile: int = 128
    turns: bool = True
    emulated: int = 0
    grouped: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.forward_kernel:SinkForwardKernel"
    # with the default (5) ptxas serializes the products of d 128 with a window: an arrival lands in a divergent branch
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    @classmethod
    def for_launch(cls, dtype: str, d: int, *, packed: bool, window: int | None) -> SinkForwardSpec:
        """The variant for a call; `window` is the number of keys that a query sees at most, or None."""
        if window is not None and window <= SMALL_WINDOW:
            return cls(dtype, d, packed, True, 3 if d == 64 else 2, 64, False)
        return cls(dtype, d, packed, window is not None, 3 if d == 64 else 2, 128, True)

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        if self.dtype not in DTYPES:
            reasons.append(f"dtype is {self.dtype}; it is {' or '.join(DTYPES)}")
        if self.d not in (64, 128):
            reasons.append(f"d is {self.d}; it is 64 or 128")
        if self.warpgroups not in WARPGROUPS:
            reasons.append(f"{self.warpgroups} warpgroups; there are 2 to 4")
        if not 0 <= self.emulated <= 8:
            reasons.append(f"{self.emulated} of 8 exponentials are emulated; that is 0 to 8")
        if self.tile not in TILES:
            reasons.append(f"tile is {self.tile}; known are {TILES}")
        elif self.accumulators > self.consumer_registers - 24:
            reasons.append(f"{self.accumulators} values in registers; a consumer has {self.consumer_registers}")
        if self.grouped and self.turns:
            reasons.append("warpgroups with heads of their own take no turns")
        if not reasons and self.stages < 2:
            reasons.append(f"{self.stages} stages in shared memory; two are needed")
        return reasons

    @property
    def rows(self) -> int:
        """Query rows of an item."""
        return ROWS if self.grouped else ROWS * self.warpgroups

    @property
    def slots(self) -> int:
        """Blocks of 64 rows of Q in shared memory."""
        return 2 * self.warpgroups if self.grouped else self.warpgroups

    @property
    def threads(self) -> int:
        """Of a CTA: the producer's warpgroup and the consumers'."""
        return 128 * (self.warpgroups + 1)

    @property
    def producer_registers(self) -> int:
        """Of a thread after the roles have parted."""
        return {2: 40, 3: 32, 4: 24}[self.warpgroups]

    @property
    def consumer_registers(self) -> int:
        """40 + 2 x 232 = 3 x 168 of 384 threads; 32 + 3 x 160 = 4 x 128 of 512; 24 + 4 x 112 < 5 x 96 of 640."""
        return {2: 232, 3: 160, 4: 112}[self.warpgroups]

    @property
    def accumulators(self) -> int:
        """Registers of a consumer for O, S and P."""
        return self.d // 2 + self.tile // 2 + self.tile // 4

    @property
    def stages(self) -> int:
        """Tiles of K, and as many of V, in flight: a power of two, at most 128 KB."""
        room = min(SMEM_PER_CTA - (self.slots + self.warpgroups) * ROWS * self.d * 2 - 1024, 131_072)
        fit = room // (4 * self.tile * self.d)
        return 1 << (fit.bit_length() - 1) if fit else 0

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        registers = {2: 168, 3: 128, 4: 96}[self.warpgroups]
        return {"registers": registers, "instructions": ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU.EX2")}


@dataclass(frozen=True)
class SinkWorkListSpec:
    """Compile-time facts of :class:`cute_kernels.sink.work_list_kernel.SinkWorkListKernel`.

    keys  whether blocks of keys are listed, for the backward; otherwise blocks of queries
    """

    keys: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.work_list_kernel:SinkWorkListKernel"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return []

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 64, "instructions": ("ATOMS", "SHFL", "STG")}


def shipped_specs() -> list[SinkForwardSpec | SinkWorkListSpec]:
    """Every variant that `for_launch` can name for bfloat16; those of float16 are compiled when first asked for."""
    cases = [(d, packed, window) for d in (64, 128) for packed in (False, True) for window in (None, 128, 4096)]
    specs = [SinkForwardSpec.for_launch("bfloat16", d, packed=packed, window=window) for d, packed, window in cases]
    float16 = SinkForwardSpec.for_launch("float16", 64, packed=False, window=None)
    emulated = SinkForwardSpec("bfloat16", 64, warpgroups=3, emulated=2)
    return [*specs, float16, emulated, SinkWorkListSpec(), SinkWorkListSpec(keys=True)]
