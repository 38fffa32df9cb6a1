"""Context parallelism on paper: a decode over a rank's share of the keys, what ranks send each other, and the merge."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_kernels.budget.rates import H200, Rates

LSE_BYTES = 16
"""Of a row that is sent, after its output: the log-sum-exp, padded to keep rows at multiples of 16 bytes."""
MERGE_LAUNCH_US = 4.7
"""What a launch of `merge_states` takes in addition to its bytes: eight float32 states of 128 x 128 heads take 71.6 us
on an H200, their bytes 66.8 at the rate of a copy."""


@dataclass(frozen=True)
class Link:
    """How fast ranks send to each other.

    gbps      that one rank receives while all of them send, GB/s
    start_us  what a collective takes in addition to its bytes
    measured  whether both were measured: tables say so
    """

    gbps: float
    start_us: float
    measured: bool = True


ASSUMED_NVLINK = Link(gbps=360, start_us=20, measured=False)
"""Assumptions, neither is measured: four fifths of the 450 GB/s that a Hopper GPU has in each direction, nominally; and
what a small collective of NCCL may take among the eight GPUs of a host."""


@dataclass(frozen=True)
class Exchange:
    """What ranks exchange in one call of `context_parallel_decode`.

    ranks   of the group
    rows    batch x s_q x heads of all ranks
    d       columns of the output, bfloat16
    heads   "gather" or "scatter": which heads a rank gets
    d_q     columns of q, bfloat16, where ranks gather it first; 0: every rank has it
    """

    ranks: int
    rows: int
    d: int
    heads: str = "gather"
    d_q: int = 0

    def __post_init__(self) -> None:
        if self.heads not in ("gather", "scatter"):
            raise ValueError(f"heads: got {self.heads!r}, needs 'gather' or 'scatter'")
        if self.ranks < 1 or self.rows % self.ranks:
            raise ValueError(f"rows: got {self.rows}, needs a multiple of ranks {self.ranks}, at least 1")

    @property
    def row_bytes(self) -> int:
        """Of a partial output and its log-sum-exp."""
        return 2 * self.d + LSE_BYTES

    @property
    def merged(self) -> int:
        """Rows that a rank merges."""
        return self.rows if self.heads == "gather" else self.rows // self.ranks

    @property
    def received(self) -> int:
        """Bytes that a rank receives from others: partials, and queries."""
        others = self.ranks - 1
        return others * self.merged * self.row_bytes + others * (self.rows // self.ranks) * 2 * self.d_q

    def link_us(self, link: Link = ASSUMED_NVLINK) -> float:
        """Microseconds of the collectives, one after the other. A group of one has none to wait for."""
        if self.ranks == 1:
            return 0.0
        collectives = 2 if self.d_q else 1
        return collectives * link.start_us + self.received / (link.gbps * 1e3)

    def merge_us(self, rates: Rates = H200) -> float:
        """Microseconds of the merge: states are read, and the output is written."""
        return MERGE_LAUNCH_US + rates.copy_us(self.merged * (self.ranks * self.row_bytes + 2 * self.d + 4))


@dataclass(frozen=True)
class RanksPrediction:
    """Microseconds of a call over all ranks, and its parts; `binds` names the longest."""

    decode_us: float
    link_us: float
    merge_us: float

    @property
    def us(self) -> float:
        """All of it: nothing overlaps."""
        return self.decode_us + self.link_us + self.merge_us

    @property
    def binds(self) -> str:
        """The longest part."""
        parts = {"decode": self.decode_us, "link": self.link_us, "merge": self.merge_us}
        return max(parts, key=lambda part: parts[part])


def predict_ranks(
    decode_us: float, exchange: Exchange, rates: Rates = H200, link: Link = ASSUMED_NVLINK
) -> RanksPrediction:
    """Time of a call of `context_parallel_decode`.

    Args:
        decode_us: of the op over one rank's share, from `predict_mla` or `predict_gqa`.
        exchange: what ranks send each other.
        rates: of each card.
        link: between cards.
    """
    return RanksPrediction(decode_us, exchange.link_us(link), exchange.merge_us(rates))


def crossing_rows(ranks: int, d: int, d_q: int, link: Link = ASSUMED_NVLINK) -> float:
    """Rows (batch x s_q x heads) from which gathering q and scattering heads costs the link less than "gather".

    With "gather" every rank has q. Gathering it is one more collective, and scattering heads moves fewer bytes.

    Returns:
        `math.inf` where it never does.
    """
    probe = ranks * 1024
    gather, scatter = Exchange(ranks, probe, d, "gather"), Exchange(ranks, probe, d, "scatter", d_q)
    saved = (gather.received - scatter.received) / probe / (link.gbps * 1e3)
    return link.start_us / saved if saved > 0 else math.inf
