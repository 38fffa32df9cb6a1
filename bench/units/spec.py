"""What is fixed at compile time in the kernels that measure one unit of a card each. Pure Python.

Cycles are per token and CTA of 64 query heads, as in the budget, unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from cute_kernels.budget.rates import Rates
from cute_kernels.mla.spec import TOKENS_PER_TILE as TILE
from fp8_mla.formats import V3_2

NOPE, ROPE, QK = V3_2.nope_dim, V3_2.rope_dim, V3_2.d_qk
ROW_BYTES: Final = V3_2.token_bytes
HALF_BYTES: Final = TILE // 2 * QK * 2
"""Half a tile as bf16: what a CTA of a cluster sends the other one for each tile."""


@dataclass(frozen=True)
class ConvertSpec:
    """One warpgroup turns the codes of a tile into bf16 in shared memory, over and over.

    how  "scaled": fp8 -> f16 -> f32, x float32 scale, -> bf16; "exact": fp8 -> bf16, x a power of two in bf16
    """

    how: str = "scaled"

    kernel: ClassVar[str] = "bench.units.convert:ConvertKernel"

    @property
    def name(self) -> str:
        """As `--only` matches it."""
        return f"unit conversion, {self.how}"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return [] if self.how in ("scaled", "exact") else [f"how is {self.how}; known are scaled, exact"]

    def predicted(self, rates: Rates) -> float:
        """Cycles by the rates of a card: of the scaled way, which the budget takes for both."""
        return rates.conversion_cycles(NOPE)

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 168, "instructions": ("F2FP", "LDS.128", "STS.128")}


@dataclass(frozen=True)
class ExchangeSpec:
    """The two CTAs of a cluster send each other half tiles: every second token as bf16.

    how  "async": st.async of 16 bytes from registers; "bulk": copies of 4 KB from shared memory
    """

    how: str = "async"

    kernel: ClassVar[str] = "bench.units.exchange:ExchangeKernel"

    @property
    def name(self) -> str:
        """As `--only` matches it."""
        return f"unit exchange, {'st.async' if self.how == 'async' else 'bulk copy'}"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return [] if self.how in ("async", "bulk") else [f"how is {self.how}; known are async, bulk"]

    @property
    def rate(self) -> str:
        """The field of `Rates` that it measures, bytes per clock."""
        return f"dsm_{self.how}_bytes"

    def predicted(self, rates: Rates) -> float:
        """Cycles by the rates of a card."""
        return HALF_BYTES / TILE / float(getattr(rates, self.rate))

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 128, "instructions": ("UBLKCP",) if self.how == "bulk" else ("STAS.128",)}


@dataclass(frozen=True)
class GatherSpec:
    """A warpgroup gathers rows by a list and converts them; another one takes the tiles and does nothing with them.

    rows   that a CTA makes of each tile of 64: 64, or 32 as one of two that share it. Cycles are of one of these rows
    depth  tiles whose rows are in flight
    """

    rows: int = 64
    depth: int = 1

    kernel: ClassVar[str] = "bench.units.gather:GatherKernel"

    @property
    def name(self) -> str:
        """As `--only` matches it."""
        return f"unit gather, {self.rows} rows of a tile, {self.in_flight} in flight"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = [] if self.rows in (32, 64) else [f"rows is {self.rows}; it is 32 or 64"]
        if self.in_flight not in (32, 64):
            reasons.append(f"{self.in_flight} rows in flight; registers hold 32 or 64")
        return reasons

    @property
    def in_flight(self) -> int:
        """Rows that are asked for and not yet there."""
        return self.rows * self.depth

    def predicted(self, rates: Rates) -> float:
        """Cycles of a row by the rates of a card: registers hold it from its loads to its conversion."""
        return rates.conversion_cycles(NOPE) + rates.row_cycles / self.in_flight

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
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"  # with the default ptxas spills

    @property
    def name(self) -> str:
        """As `--only` matches it."""
        storing = ", a third one storing" if self.storing else ""
        return f"unit wgmma, {self.schedule}, {self.warpgroups} warpgroup{'s' * (self.warpgroups > 1)}{storing}"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = []
        if self.schedule not in ("qk", "pv", "seesaw"):
            reasons.append(f"schedule is {self.schedule}; known are qk, pv, seesaw")
        if self.warpgroups not in (1, 2):
            reasons.append(f"warpgroups is {self.warpgroups}; it is 1 or 2")
        return reasons

    @property
    def flops(self) -> int:
        """Of one token: 64 heads."""
        return 2 * TILE * {"qk": QK, "pv": NOPE, "seesaw": QK + NOPE}[self.schedule]

    @property
    def tokens(self) -> int:
        """Of one turn of the loop: a tile a warpgroup, or as many products as that is."""
        return TILE * self.warpgroups

    def predicted(self, rates: Rates) -> float:
        """Cycles by the rates of a card."""
        return rates.tensor_cycles(self.flops)

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to: wgmma of a turn, and stores of two tiles of 576 columns."""
        count = {"qk": 36, "pv": 8, "seesaw": 44}[self.schedule]
        least = {"HGMMA": count, **({"STS.128": 72} if self.storing else {})}
        return {"registers": 168, "instructions": ("HGMMA", "USETMAXREG"), "at_least": least}


UnitSpec = ConvertSpec | ExchangeSpec | GatherSpec | WgmmaSpec


def shipped_specs() -> list[UnitSpec]:
    """All that bench/unit_rates.py runs."""
    return [
        *(ConvertSpec(how) for how in ("scaled", "exact")),
        *(ExchangeSpec(how) for how in ("async", "bulk")),
        *(GatherSpec(rows, depth) for rows, depth in ((64, 1), (32, 1), (32, 2))),
        *(WgmmaSpec(schedule, n) for schedule in ("qk", "pv") for n in (1, 2)),
        *(WgmmaSpec(storing=storing) for storing in (False, True)),
    ]
