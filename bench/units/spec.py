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
    """One warpgroup turns the codes of a tile into bf16 in shared memory: fp8 -> f16 -> f32, x scale, -> bf16."""

    kernel: ClassVar[str] = "bench.units.convert:ConvertKernel"
    name: ClassVar[str] = "unit conversion"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return []

    def predicted(self, rates: Rates) -> float:
        """Cycles by the rates of a card."""
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

    rows  that a CTA makes of each tile of 64, all of them in flight: 64, or 32 as one of two that share it. Cycles are
          of one of these rows
    """

    rows: int = 64

    kernel: ClassVar[str] = "bench.units.gather:GatherKernel"

    @property
    def name(self) -> str:
        """As `--only` matches it."""
        return f"unit gather, {self.rows} rows in flight"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return [] if self.rows in (32, 64) else [f"rows is {self.rows}; it is 32 or 64"]

    def predicted(self, rates: Rates) -> float:
        """Cycles of a row by the rates of a card: registers hold it from its loads to its conversion."""
        return rates.conversion_cycles(NOPE) + rates.row_cycles / self.rows

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 168, "instructions": ("LDG.E.128", "STS.128")}


UnitSpec = ConvertSpec | ExchangeSpec | GatherSpec


def shipped_specs() -> list[UnitSpec]:
    """All that bench/unit_rates.py runs."""
    return [ConvertSpec(), ExchangeSpec("async"), ExchangeSpec("bulk"), GatherSpec(64), GatherSpec(32)]
