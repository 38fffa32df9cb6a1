"""Context parallelism on paper: a decode over a rank's share of the keys, what ranks send each other, and the merge."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_kernels.budget.rates import H200, Rates

LSE_BYTES = 16
"""Bytes of the log-sum-exp that follows each sent row, padded to keep rows at multiples of 16 bytes."""
HALF_BYTES = 32 << 20
"""Bytes of a rank's buffer over symmetric memory for one call, as `distributed.symmetric` makes it."""
MERGE_LAUNCH_US = 4.7
"""Microseconds of a `merge_states` launch in addition to its bytes: eight float32 states of 128 x 128 heads take 71.6
us on an H200, their bytes 66.8 at the rate of a copy."""


@dataclass(frozen=True)
class Link:
    """How fast ranks exchange.

    gbps                GB/s that one rank receives by a large collective while all of them send
    start_us            microseconds of a collective in addition to its bytes
    symmetric_gbps      GB/s of the launch over symmetric memory, whose time includes the merge
    symmetric_start_us  microseconds of that launch in addition to its bytes
    """

    gbps: float
    start_us: float
    symmetric_gbps: float
    symmetric_start_us: float


NVLINK = Link(gbps=232, start_us=5.8, symmetric_gbps=199, symmetric_start_us=6.1)
"""The link of two H100s of one host (results/ranks), from an all-gather of 64 MiB and one of 1 KB. The constants of
symmetric memory are fitted to exchanges of 1 and of 64 query tokens of 128 heads, d 512. Exchanges of four H200s took
0.76 to 0.90 of this prediction over symmetric memory, and 0.85 to 1.5 of it by collectives."""


@dataclass(frozen=True)
class Exchange:
    """The exchange of ranks in one call of `context_parallel_decode`.

    ranks   ranks of the group
    rows    batch x s_q x heads of all ranks
    d       columns of the output, bfloat16
    heads   "gather" or "scatter": which heads a rank gets
    d_q     columns of q, bfloat16, if ranks gather it first; 0: every rank has it
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
        """Bytes of a partial output row and its log-sum-exp."""
        return 2 * self.d + LSE_BYTES

    @property
    def merged(self) -> int:
        """Number of rows that a rank merges."""
        return self.rows if self.heads == "gather" else self.rows // self.ranks

    @property
    def received(self) -> int:
        """Bytes that a rank receives from others: partials and queries."""
        return self.partial_bytes + self.query_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes of received partials."""
        return (self.ranks - 1) * self.merged * self.row_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of received queries."""
        return (self.ranks - 1) * (self.rows // self.ranks) * 2 * self.d_q

    def link_us(self, link: Link = NVLINK) -> float:
        """Microseconds of the collectives, one after the other. A group of one rank waits for none."""
        if self.ranks == 1:
            return 0.0
        collectives = 2 if self.d_q else 1
        return collectives * link.start_us + self.received / (link.gbps * 1e3)

    def merge_us(self, rates: Rates = H200) -> float:
        """Microseconds of the merge: it reads states and writes the output."""
        return MERGE_LAUNCH_US + rates.copy_us(self.merged * (self.ranks * self.row_bytes + 2 * self.d + 4))

    def collective_us(self, rates: Rates = H200, link: Link = NVLINK) -> float:
        """Microseconds of the collectives and the merge."""
        return self.link_us(link) + self.merge_us(rates)

    def symmetric_us(self, link: Link = NVLINK) -> float:
        """Microseconds over symmetric memory; `math.inf` if the default buffers are too small.

        A collective gathers the queries before.
        """
        if self.ranks == 1 or self.ranks * self.merged * self.row_bytes > HALF_BYTES:
            return math.inf
        queries = link.start_us + self.query_bytes / (link.gbps * 1e3) if self.d_q else 0.0
        return queries + link.symmetric_start_us + self.partial_bytes / (link.symmetric_gbps * 1e3)


@dataclass(frozen=True)
class RanksPrediction:
    """Microseconds of a call over all ranks, and its parts.

    way  "symmetric" or "collective": the one whose exchange and merge take less
    """

    decode_us: float
    exchange_us: float
    way: str

    @property
    def us(self) -> float:
        """Microseconds of the whole call: nothing overlaps."""
        return self.decode_us + self.exchange_us

    @property
    def binds(self) -> str:
        """Name of the longer part."""
        return "decode" if self.decode_us >= self.exchange_us else "exchange"


def predict_ranks(decode_us: float, exchange: Exchange, rates: Rates = H200, link: Link = NVLINK) -> RanksPrediction:
    """Predicts the time of a `context_parallel_decode` call.

    Args:
        decode_us: microseconds of the op over one rank's share, from `predict_mla` or `predict_gqa`.
        exchange: what ranks send each other.
        rates: unit rates of each card.
        link: the link between cards.
    """
    collective, symmetric = exchange.collective_us(rates, link), exchange.symmetric_us(link)
    if symmetric < collective:
        return RanksPrediction(decode_us, symmetric, "symmetric")
    return RanksPrediction(decode_us, collective, "collective")


def crossing_tokens(ranks: int, heads: int, d: int, d_q: int) -> int | None:
    """Returns the query tokens from which it is faster to gather q and scatter heads than to "gather".

    With "gather" every rank has q. Gathering q is one more collective, and scattering heads moves fewer bytes.

    Returns:
        The number of tokens; None if it is not faster with 4096 tokens either.
    """
    for tokens in range(1, 4097):
        gather = predict_ranks(0.0, Exchange(ranks, tokens * heads, d, "gather"))
        scatter = predict_ranks(0.0, Exchange(ranks, tokens * heads, d, "scatter", d_q))
        if scatter.us < gather.us:
            return tokens
    return None
