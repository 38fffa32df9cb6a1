"""What is fixed at compile time in the kernels that measure one unit of a card each. Pure Python."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fp8_mla.formats import V3_2

TILE = 64  # tokens
NOPE, ROPE, QK = V3_2.nope_dim, V3_2.rope_dim, V3_2.d_qk
ROW_BYTES = V3_2.token_bytes
HALF_BYTES = TILE // 2 * QK * 2  # half a tile as bf16: what a CTA of a cluster sends the other one for each tile
CONVERSIONS = ("scaled", "exact")
TRANSPORTS = ("async", "bulk")
SCHEDULES = ("qk", "pv", "seesaw")
STREAM_WORDS, STREAM_STAGES = 4096, 8  # words of 4 bytes in a tile; tiles in flight: 128 KB an SM, 30 are enough


@dataclass(frozen=True)
class ConvertSpec:
    """One warpgroup turns the codes of a tile into bf16 in shared memory, over and over.

    how  "scaled": fp8 -> f16 -> f32, x float32 scale, -> bf16; "exact": fp8 -> bf16, x a power of two in bf16
    """

    how: str = "scaled"

    kernel: ClassVar[str] = "bench.units.convert:ConvertKernel"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return [] if self.how in CONVERSIONS else [f"how is {self.how}; known are {', '.join(CONVERSIONS)}"]

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 168, "instructions": ("F2FP", "LDS.128", "STS.128")}


@dataclass(frozen=True)
class ExchangeSpec:
    """The two CTAs of a cluster send each other half tiles.

    how  "async": st.async of 16 bytes from registers; "bulk": copies of 4 KB from shared memory
    """

    how: str = "async"

    kernel: ClassVar[str] = "bench.units.exchange:ExchangeKernel"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return [] if self.how in TRANSPORTS else [f"how is {self.how}; known are {', '.join(TRANSPORTS)}"]

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 128, "instructions": ("UBLKCP",) if self.how == "bulk" else ("STAS.128",)}


@dataclass(frozen=True)
class GatherSpec:
    """A warpgroup gathers rows by a list and converts them; another one takes the tiles and does nothing with them.

    rows   that a CTA makes of each tile of 64: 64, or 32 as one of two that share it
    depth  tiles whose rows are in flight
    """

    rows: int = 64
    depth: int = 1

    kernel: ClassVar[str] = "bench.units.gather:GatherKernel"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = [] if self.rows in (32, 64) else [f"rows is {self.rows}; it is 32 or 64"]
        if self.rows * self.depth not in (32, 64):
            reasons.append(f"{self.rows * self.depth} rows in flight; registers hold 32 or 64")
        return reasons

    @property
    def in_flight(self) -> int:
        """Rows that are asked for and not yet there."""
        return self.rows * self.depth

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 168, "instructions": ("LDG.E.128", "STS.128")}


@dataclass(frozen=True)
class WgmmaSpec:
    """Loops of wgmma over two resident tiles, nothing else in the way.

    schedule    "qk": S of the own tile; "pv": 256 columns of O over both tiles; "seesaw": both
    warpgroups  1 or 2 that multiply
    storing     a further warpgroup stores both tiles meanwhile
    """

    schedule: str = "seesaw"
    warpgroups: int = 2
    storing: bool = False

    kernel: ClassVar[str] = "bench.units.wgmma:WgmmaKernel"
    # as the decode kernel: with the default ptxas spills
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        if self.schedule not in SCHEDULES:
            reasons.append(f"schedule is {self.schedule}; known are {', '.join(SCHEDULES)}")
        if self.warpgroups not in (1, 2):
            reasons.append(f"warpgroups is {self.warpgroups}; it is 1 or 2")
        return reasons

    @property
    def flops(self) -> int:
        """Of one turn of the loop, all warpgroups."""
        qk, pv = 2 * TILE * TILE * QK, 2 * 2 * TILE * TILE * (NOPE // 2)
        return self.warpgroups * {"qk": qk, "pv": pv, "seesaw": qk + pv}[self.schedule]

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 168, "instructions": ("HGMMA", "USETMAXREG")}


@dataclass(frozen=True)
class StreamSpec:
    """Every SM reads tiles of 16 KB by bulk copies, eight in flight, and adds up their words."""

    kernel: ClassVar[str] = "bench.units.stream:StreamKernel"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return []

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 96, "instructions": ("UBLKCP", "LDS.128")}


def shipped_specs() -> list[Any]:
    """All that bench/unit_rates.py runs."""
    return [
        *(ConvertSpec(how) for how in CONVERSIONS),
        *(ExchangeSpec(how) for how in TRANSPORTS),
        *(GatherSpec(rows, depth) for rows, depth in ((64, 1), (32, 1), (32, 2))),
        *(WgmmaSpec("qk", n) for n in (1, 2)),
        *(WgmmaSpec("pv", n) for n in (1, 2)),
        *(WgmmaSpec("seesaw", 2, storing) for storing in (False, True)),
        StreamSpec(),
    ]
