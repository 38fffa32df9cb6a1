"""Cycles per token, the unit that binds, and microseconds of a call, from a variant's demands and a card's rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from cute_kernels.budget.rates import H200, Rates
from cute_kernels.budget.variants import MLA_BUILT, QK_DIM, MlaVariant, Unit
from cute_kernels.mla.spec import PARTIAL_FLOATS, TOKENS_PER_TILE

MERGE_US = 1.0
"""Microseconds of a call with splits in addition to its bytes: counting, polling, two round trips to L2."""
L2_BYTES, L2_SPEED = 30e6, 2.0
"""Partials of up to L2_BYTES stay in L2 until they are merged, and move L2_SPEED times as fast as a copy."""
SHARE_US = 11.0
"""Microseconds that a balanced schedule adds: CTAs find their shares, and one merges 64 rows (dense 16 x 128)."""
RANGES_US = 6.2
"""Microseconds of a GQA call in addition to its bytes, if CTAs take ranges of the work list: 16 x 4096 takes 37.5 us,
its bytes 31.1."""
TOKEN_SCALES_US = 1.0
"""Microseconds that scales of tokens add, by loads of their own: fitted, all recorded cases are within 13%."""
CLUSTER_US = 4.9
"""Replaces `RANGES_US` if a cluster shares a sequence: 1 x 1024 takes 5.35 us, its bytes 0.5."""


class Variant(Protocol):
    """The properties of a kernel that `budget` needs."""

    @property
    def chains(self) -> tuple[tuple[Unit, ...], ...]:
        """Groups of units whose times add up."""

    def demands(self, rates: Rates, readers: int = 1) -> dict[Unit, float]:
        """Cycles per token of each unit."""


@dataclass(frozen=True)
class Budget:
    """Cycles per token of each unit and of the slowest chain of units, and the slowest unit of that chain."""

    demands: Mapping[Unit, float]
    cycles: float
    binds: Unit


def budget(variant: Variant, rates: Rates = H200, readers: int = 1) -> Budget:
    """Returns the cycle budget of a variant. `readers` CTAs read the same row at about the same time."""
    demands = variant.demands(rates, readers)

    def cycles(chain: tuple[Unit, ...]) -> float:
        return sum(demands[unit] for unit in chain)

    slowest = max(variant.chains, key=cycles)
    return Budget(demands, cycles(slowest), max(slowest, key=lambda unit: demands[unit]))


@dataclass(frozen=True)
class MlaLaunch:
    """How the plan of an `mla_fp8_decode` call cuts it.

    ctas     CTAs that decode
    tiles    key tiles of 64 tokens of a CTA, at most
    splits   CTAs that share the keys of a query and leave partials
    rows     batch x s_q x h_q
    readers  CTAs that read the same row of the cache
    shared   the schedule is balanced: CTAs have shares of all tiles, not splits of each query
    pages    tiles are ranges of a page, not rows of a list
    """

    ctas: int
    tiles: int
    splits: int
    rows: int
    readers: int = 1
    shared: bool = False
    pages: bool = False


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a call, and where they go.

    us        the whole call
    tiles_us  the tiles, in all waves
    ctas_us   fixed time of the waves of CTAs
    merge_us  the merge of splits
    waves     waves of CTAs over the SMs
    cycles    cycles per token of a busy SM
    binds     the unit that decides: one of the budget's, or LATENCY if more than half is time outside of the tiles
    """

    us: float
    tiles_us: float
    ctas_us: float
    merge_us: float
    waves: int
    cycles: float
    binds: Unit


def predict_mla(launch: MlaLaunch, variant: MlaVariant = MLA_BUILT, rates: Rates = H200) -> Prediction:
    """Predicts the time of one call: waves of CTAs, each with a fixed part and its tiles, and then the merge."""
    if launch.pages:
        variant = replace(variant, latency_cycles=variant.latency_cycles - variant.page_cycles)
    token = budget(variant, rates, launch.readers)
    waves = math.ceil(launch.ctas / rates.sms)
    tiles_us = waves * rates.us(launch.tiles * TOKENS_PER_TILE * token.cycles)
    ctas_us = rates.us(waves * variant.cta_cycles) + start_us(launch, variant, rates)
    merge_us = 0.0
    if launch.splits > 1:  # partials are written once and read once
        moved = 2 * launch.splits * launch.rows * PARTIAL_FLOATS * 4
        merge_us = MERGE_US + rates.copy_us(moved) / (L2_SPEED if moved <= L2_BYTES else 1.0)
        if launch.shared:
            merge_us += SHARE_US
    binds = token.binds if tiles_us >= ctas_us + merge_us else Unit.LATENCY
    us = tiles_us + ctas_us + merge_us
    return Prediction(us, tiles_us, ctas_us, merge_us, waves, token.cycles, binds)


def start_us(launch: MlaLaunch, variant: MlaVariant, rates: Rates = H200) -> float:
    """Microseconds of a launch before its tiles: the variant's own part, and Q of the first wave."""
    first_wave = min(launch.rows, rates.sms * variant.heads)
    return rates.us(variant.start_cycles) + rates.read_us(first_wave * 2 * QK_DIM)


def predict_gqa(nbytes: float, clustered: bool, rates: Rates = H200, *, token_scales: bool = False) -> Prediction:
    """Predicts the time of a `gqa_decode` call: its bytes at the rate of a stream, and a fixed part.

    Args:
        nbytes: bytes that the call has to move.
        clustered: whether a cluster shares a sequence (`GqaDecodeSpec.cluster` above 1).
        rates: unit rates of the card.
        token_scales: whether tokens or groups have scales; a cluster hides the time that these take.
    """
    bytes_us, rest = rates.read_us(nbytes), RANGES_US + (TOKEN_SCALES_US if token_scales else 0.0)
    if clustered:
        rest = CLUSTER_US
    binds = Unit.HBM if bytes_us >= rest else Unit.LATENCY
    return Prediction(bytes_us + rest, bytes_us, rest, 0.0, 1, 0.0, binds)


def spread_cycles(us: float, sm_mhz: float, tokens: float, sms: int) -> float:
    """Returns SM cycles per token and CTA for work spread evenly over all SMs; only then comparable with a budget.

    Args:
        us: microseconds of the call.
        sm_mhz: SM clock.
        tokens: keys of all queries, times the groups of 64 heads.
        sms: SMs of the card.
    """
    return us * sm_mhz * sms / tokens


def calibrate(long: tuple[MlaLaunch, float], short: tuple[MlaLaunch, float]) -> tuple[float, float]:
    """Fits (latency_cycles, cta_cycles) of the built kernel on an H200 to two launches without splits and their times.

    They are two numbers from two measurements, given `start_us`; all other cases are predictions.

    Args:
        long: a launch whose CTAs have many tiles, and its microseconds.
        short: a launch whose CTAs have fewer, and its microseconds.
    """
    points = []
    for launch, us in (long, short):
        if launch.splits != 1:
            raise ValueError(f"splits: got {launch.splits}, needs a launch without")
        cycles = (us - start_us(launch, MLA_BUILT)) * H200.sm_mhz
        points.append((launch.tiles * TOKENS_PER_TILE, cycles / math.ceil(launch.ctas / H200.sms)))
    (tokens, cycles), (fewer_tokens, fewer_cycles) = points
    if tokens <= fewer_tokens:
        raise ValueError(f"long: its CTAs have {tokens} tokens, needs more than the {fewer_tokens} of short")
    per_token = (cycles - fewer_cycles) / (tokens - fewer_tokens)
    tensor = MLA_BUILT.demands(H200, long[0].readers)[Unit.TENSOR]
    return per_token - tensor, fewer_cycles - per_token * fewer_tokens
