"""How one decode call is cut into CTAs: pure Python, from shapes to a specification and a number of splits.

Costs are microseconds of one H200 (docs/journal/mla_decode.md).
"""

import functools
import itertools
from dataclasses import dataclass, replace

from cute_kernels.mla.crossover import spec as crossover
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.spec import (
    CUT_TILES,
    NARROW,
    PARTIAL_FLOATS,
    TOKENS_PER_TILE,
    WIDE,
    WORK_TILE_OVERHEAD,
    MlaDecodeSpec,
)

EXCHANGES = ("none", *crossover.EXCHANGES)  # what a call may ask for
MAX_SPLITS = 256
MAX_BALANCED = 1024  # queries: each may leave partial results, and every CTA looks at the lengths of all
HALF = 32  # heads, into which 64 are cut where that is faster: over few keys, by up to 15%
START_US = {8: 4.3, 16: 4.3, HALF: 4.1, WIDE: 5.6}  # of a call, by the heads of a CTA
TILE_US = {8: 1.45, 16: 1.45, HALF: 1.85, WIDE: 2.15}  # a tile of 64 tokens in steady state
CTA_US = 5.0  # first gather, Q, epilogue
MERGE_US = 2.0  # from the last partial to the result
MERGE_US_PER_MB = 0.3  # partials are written once and read once, from L2 where they are few
MERGE_US_PER_SPLIT = 0.03


@dataclass(frozen=True)
class DecodePlan:
    """What to launch. The same shapes give the same plan, so the same call gives the same bits.

    Where shares are balanced, CTAs find out what they have; splits, tiles and items are those of queries that are all
    as long as they can be.
    """

    spec: MlaDecodeSpec | MlaCrossoverSpec
    num_splits: int
    merge_ctas: int  # that merge the partials of 64 heads of a query
    tiles_per_split: int
    ctas: int  # items of work
    max_ctas: int  # that decode; each takes every max_ctas-th item, or a share of all
    partial_rows: int  # of heads, that partial results have room for
    estimated_us: float


@functools.lru_cache(maxsize=4096)
def plan_decode(
    *,
    sparse: bool,
    batch: int,
    s_q: int,
    h_q: int,
    max_keys: int,
    num_sms: int,
    ragged: bool = False,
    num_splits: int | None = None,
    exchange: str | None = None,
    heads: int | None = None,
) -> DecodePlan:
    """Chooses the number of splits, and what CTAs exchange.

    Args:
        sparse: keys from a list per query, else from a block table.
        batch: requests.
        s_q: query tokens of each.
        h_q: query heads.
        max_keys: topk, or the tokens that the block table can name. Lengths are known to the device alone: a plan must
            be right for all of them and is made for the longest.
        num_sms: of the device; one CTA fills one.
        ragged: queries may have fewer keys than that, and not all the same number: CTAs then share tiles instead of
            queries, unless the number of splits is forced, or rows are exchanged. They also do where it would take
            splits to fill the last of several waves.
        num_splits: to force it; at most MAX_SPLITS, and more than there are tiles leave CTAs without work.
        exchange: to force it.
        heads: of a CTA, to force it.
    """
    if heads is None:
        heads = next((n for n in NARROW if n >= h_q), WIDE)
        choices = (heads, HALF) if heads == WIDE and exchange is None else (heads,)
    else:
        choices = (heads,)
    queries = batch * s_q
    tiles = max(1, -(-max_keys // TOKENS_PER_TILE))
    candidates = [num_splits] if num_splits is not None else range(1, min(tiles, MAX_SPLITS) + 1)
    specs: list[MlaDecodeSpec | MlaCrossoverSpec] = [MlaDecodeSpec(sparse=sparse, heads=choice) for choice in choices]
    if exchange not in (None, "none"):
        specs = [MlaCrossoverSpec(sparse=sparse, exchange=exchange)]

    def estimate(spec: MlaDecodeSpec | MlaCrossoverSpec, n: int) -> float:
        items = queries * spec.head_blocks(h_q) * n
        return _estimate_us(spec.heads, items, -(-tiles // n), n, queries * h_q, num_sms)

    spec, best = min(itertools.product(specs, candidates), key=lambda choice: estimate(*choice))
    blocks = spec.head_blocks(h_q)
    shares, items = num_sms // blocks, queries * blocks
    can_share = num_splits is None and 1 < queries <= MAX_BALANCED and shares > 1
    # CTAs add up the tiles of all queries in 32 bits
    can_share &= queries * (tiles + WORK_TILE_OVERHEAD) < 2**31 - num_sms
    wants_shares = ragged or (best > 1 and items >= num_sms)  # a share has fewer cuts than splits of all
    if isinstance(spec, MlaDecodeSpec) and can_share and wants_shares:
        return _plan_shares(spec, queries, h_q, blocks, tiles, num_sms)
    # Many rows of few partials: a warp each, 16 rows at a time. Else a warpgroup each, 4 rows at a time, because loads
    # of a row are then in flight together. And no more merging CTAs than SMs: each of them fills one.
    merge_lanes = 0 if best == 1 else 32 if best <= 8 and queries * h_q >= 512 else 128
    return DecodePlan(
        spec=replace(spec, merge_lanes=merge_lanes),
        num_splits=best,
        merge_ctas=_merge_ctas(spec, h_q, merge_lanes, items, num_sms),
        tiles_per_split=-(-tiles // best),
        ctas=items * best,
        max_ctas=num_sms // spec.cluster * spec.cluster,
        partial_rows=best * queries * h_q if best > 1 else 0,
        estimated_us=estimate(spec, best),
    )


def _plan_shares(spec: MlaDecodeSpec, queries: int, h_q: int, blocks: int, tiles: int, num_sms: int) -> DecodePlan:
    """A plan for balanced shares: where queries are all as long as they can be, whole ones or equal parts."""
    shares = num_sms // blocks
    merge_lanes = 32 if shares <= 8 * queries else 128
    of_share, parts = -(-queries // shares), max(shares // queries, 1)
    items, each = queries * parts, -(-tiles // parts)
    spare = CUT_TILES if parts == 1 else 2 * WORK_TILE_OVERHEAD
    if of_share * (each + WORK_TILE_OVERHEAD) > queries * (tiles + WORK_TILE_OVERHEAD) // shares + spare:
        items, parts = (of_share + 1) * shares, -(-(shares + queries) // queries)
        each = -(-queries * tiles // items)
    return DecodePlan(
        spec=replace(spec, merge_lanes=merge_lanes, balanced=True),
        num_splits=parts,
        merge_ctas=_merge_ctas(spec, h_q, merge_lanes, min(queries, shares - 1) * blocks, num_sms),
        tiles_per_split=each,
        ctas=items * blocks,
        max_ctas=shares * blocks,
        partial_rows=(shares + queries) * h_q,
        estimated_us=_estimate_us(spec.heads, items * blocks, each, parts, queries * h_q, num_sms),
    )


def _merge_ctas(spec: MlaDecodeSpec | MlaCrossoverSpec, h_q: int, merge_lanes: int, groups: int, num_sms: int) -> int:
    """CTAs that share the rows of a group, one for each head: as many as there are SMs for all, or turns of a CTA."""
    turns = max(1, -(-min(h_q, spec.heads) * merge_lanes // spec.threads))
    return -(-turns // max(1, -(-groups * turns // num_sms)))


def _estimate_us(heads: int, items: int, tiles: int, num_splits: int, rows: int, num_sms: int) -> float:
    """Of so many items of work with so many tiles each, which are `num_splits` parts of each query."""
    decode = START_US[heads] + -(-items // num_sms) * (tiles * TILE_US[heads] + CTA_US)
    if num_splits == 1:
        return decode
    partial_mb = num_splits * rows * 4 * PARTIAL_FLOATS / 1e6
    return decode + MERGE_US + MERGE_US_PER_MB * partial_mb + MERGE_US_PER_SPLIT * num_splits
