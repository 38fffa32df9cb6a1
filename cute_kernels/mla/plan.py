"""Plans how a decode call is cut into CTAs: pure Python, from shapes to a specification and a number of splits.

Costs are microseconds of one H200 (docs/journal/mla_decode.md).
"""

import functools
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

from cute_kernels.mla.crossover import spec as crossover
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.spec import (
    CUT_TILES,
    HALF,
    NARROW,
    PARTIAL_FLOATS,
    TOKENS_PER_TILE,
    WIDE,
    WORK_TILE_OVERHEAD,
    MlaDecodeSpec,
)
from fp8_mla.formats import V3_2

EXCHANGES = ("none", *crossover.EXCHANGES)  # exchanges that a call may ask for
MAX_SPLITS = 256
MAX_BALANCED = 1024  # queries of a balanced schedule: each may leave partials, and every CTA reads all lengths
START_US = {8: 4.3, 16: 4.3, HALF: 4.1, WIDE: 5.6}  # us of a call, by the heads of a CTA
TILE_US = {8: 1.45, 16: 1.45, HALF: 1.85, WIDE: 2.15}  # us of a key tile in steady state
WORK_TILE_US = 5.0  # us of the first load, Q and the epilogue
MERGE_US = 2.0  # us from the last partial to the result
MERGE_US_PER_MB = 0.3  # partials are written once and read once, from L2 if they are few
MERGE_US_PER_SPLIT = 0.03
# Constants of other formats and of two caches, fitted to splits of 128 + 1024 keys (docs/journal/latent.md). The first
# tiles of a split cost less than later ones; a higher cost for each split makes up for it.
LATENT_START_US = {8: 4.3, 16: 4.3, HALF: 1.5, WIDE: 3.4}
LATENT_TILE_US = {8: 1.45, 16: 1.45, HALF: 1.5, WIDE: 2.0}
LATENT_MERGE_US_PER_SPLIT = 0.2

Spec = MlaDecodeSpec | MlaCrossoverSpec


@dataclass(frozen=True)
class DecodePlan:
    """The launch that a call gets. The same shapes give the same plan, so the same call gives the same bits.

    If a call gives `num_splits`, `spec` and `num_splits` follow from that number, h_q and the formats alone. Nothing
    else in a plan changes a bit, so a row has the same bits in every batch.

    With a balanced schedule CTAs find their shares in the lengths on the device; num_splits, tiles_per_split and ctas
    then describe queries of the greatest length.
    """

    spec: Spec
    num_splits: int
    merge_ctas: int  # CTAs that merge the partials of a query's block of heads
    tiles_per_split: int
    ctas: int  # number of work tiles
    max_ctas: int  # CTAs that decode; each takes every max_ctas-th work tile, or a share of all key tiles
    partial_rows: int  # rows of heads that the scratch memory of partials holds


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
    cache_format: str = V3_2.name,
    extra_format: str = "",
    extra_keys: int = 0,
    **facts: Any,
) -> DecodePlan:
    """Choose the kernel, the heads of a CTA and the number of splits.

    Args:
        sparse: keys come from a list per query, else from a block table.
        batch: number of requests.
        s_q: query tokens of each request.
        h_q: query heads.
        max_keys: topk, or the tokens that the block table can name. Lengths are on the device: a plan is valid for all
            of them, and optimal for the greatest.
        num_sms: SMs of the device; one CTA fills one.
        ragged: lengths may differ. CTAs then share key tiles instead of queries, unless num_splits or exchange is
            forced. They also do if splits would otherwise fill the last of several waves.
        num_splits: forces the number; at most MAX_SPLITS. If it exceeds the number of key tiles, some CTAs have no
            work. The planner then leaves everything that changes bits alone.
        exchange: forces the exchange.
        heads: forces the heads of a CTA.
        cache_format: format of the cache.
        extra_format: format of a second cache that joins the softmax; "" without one.
        extra_keys: topk of the second cache.
        facts: other fields of the kernel's spec.
    """
    if heads is None:
        heads = next((n for n in NARROW if n >= h_q), WIDE)
        # two CTAs of 32 heads take up to 15% less than one of 64 over few keys, but give other bits
        choices = (heads, HALF) if heads == WIDE and exchange is None and num_splits is None else (heads,)
    else:
        choices = (heads,)
    queries = batch * s_q
    tiles = max(1, -(-max_keys // TOKENS_PER_TILE) + -(-extra_keys // TOKENS_PER_TILE))  # no tile has keys of both
    candidates = [num_splits] if num_splits is not None else range(1, min(tiles, MAX_SPLITS) + 1)
    one = MlaDecodeSpec(sparse=sparse, cache_format=cache_format, extra_format=extra_format, **facts)
    specs: list[Spec] = [replace(one, heads=choice) for choice in choices]
    if exchange not in (None, "none"):
        for name in facts.keys() - {field.name for field in fields(MlaCrossoverSpec)}:
            if facts.pop(name):
                raise ValueError(f"{name}: got a value with exchange {exchange!r}; needs exchange None or 'none'")
        specs = [MlaCrossoverSpec(sparse=sparse, exchange=exchange, **facts)]

    def estimate(spec: Spec, n: int) -> float:
        work_tiles = queries * spec.head_blocks(h_q) * n
        return _estimate_us(spec, work_tiles, -(-tiles // n), n, queries * h_q, num_sms)

    spec, best = min(itertools.product(specs, candidates), key=lambda choice: estimate(*choice))
    blocks = spec.head_blocks(h_q)
    shares, work_tiles = num_sms // blocks, queries * blocks
    can_share = num_splits is None and 1 < queries <= MAX_BALANCED and shares > 1
    can_share &= queries * (tiles + WORK_TILE_OVERHEAD) < 2**31 - num_sms  # CTAs add these up in 32 bits
    wants_shares = ragged or (best > 1 and work_tiles >= num_sms)  # shares need fewer cuts than splits of all queries
    if isinstance(spec, MlaDecodeSpec) and can_share and wants_shares:
        return _plan_shares(spec, queries, h_q, blocks, tiles, num_sms)
    # Many rows of few partials are merged by a warp each, 16 rows at a time; else a warpgroup each, 4 rows at a time,
    # has all loads of a row in flight. A warpgroup adds in another order, so only a given number of splits decides.
    many_rows = num_splits is not None or queries * h_q >= 512
    merge_lanes = 0 if best == 1 else 32 if best <= 8 and many_rows else 128
    return DecodePlan(
        spec=replace(spec, merge_lanes=merge_lanes),
        num_splits=best,
        merge_ctas=_merge_ctas(spec, h_q, merge_lanes, work_tiles, num_sms),
        tiles_per_split=-(-tiles // best),
        ctas=work_tiles * best,
        max_ctas=num_sms // spec.cluster * spec.cluster,
        partial_rows=best * queries * h_q if best > 1 else 0,
    )


def _plan_shares(spec: MlaDecodeSpec, queries: int, h_q: int, blocks: int, tiles: int, num_sms: int) -> DecodePlan:
    """Makes a balanced plan. Its numbers assume the greatest lengths: whole queries or equal parts, or shares."""
    shares = num_sms // blocks
    merge_lanes = 32 if shares <= 8 * queries else 128
    queries_per_share, parts = -(-queries // shares), max(shares // queries, 1)
    work_tiles, tiles_per_part = queries * parts, -(-tiles // parts)
    spare = CUT_TILES if parts == 1 else 2 * WORK_TILE_OVERHEAD
    mean = queries * (tiles + WORK_TILE_OVERHEAD) // shares
    if queries_per_share * (tiles_per_part + WORK_TILE_OVERHEAD) > mean + spare:
        work_tiles, parts = (queries_per_share + 1) * shares, -(-(shares + queries) // queries)
        tiles_per_part = -(-queries * tiles // work_tiles)
    return DecodePlan(
        spec=replace(spec, merge_lanes=merge_lanes, balanced=True),
        num_splits=parts,
        merge_ctas=_merge_ctas(spec, h_q, merge_lanes, min(queries, shares - 1) * blocks, num_sms),
        tiles_per_split=tiles_per_part,
        ctas=work_tiles * blocks,
        max_ctas=shares * blocks,
        partial_rows=(shares + queries) * h_q,
    )


def _merge_ctas(spec: Spec, h_q: int, merge_lanes: int, groups: int, num_sms: int) -> int:
    """Returns the CTAs that merge each group of heads: at most one per round of rows, and num_sms for all groups."""
    rounds = max(1, -(-min(h_q, spec.heads) * merge_lanes // spec.threads))
    return -(-rounds // max(1, -(-groups * rounds // num_sms)))


def _estimate_us(spec: Spec, work_tiles: int, tiles: int, num_splits: int, rows: int, num_sms: int) -> float:
    """Predicts the launch time in us, merge of splits included. `tiles` is the number of key tiles of a work tile."""
    start, tile, per_split = START_US, TILE_US, MERGE_US_PER_SPLIT
    if isinstance(spec, MlaDecodeSpec) and not spec.is_plain:
        start, tile, per_split = LATENT_START_US, LATENT_TILE_US, LATENT_MERGE_US_PER_SPLIT
    decode = start[spec.heads] + -(-work_tiles // num_sms) * (tiles * tile[spec.heads] + WORK_TILE_US)
    if num_splits == 1:
        return decode
    partial_mb = num_splits * rows * 4 * PARTIAL_FLOATS / 1e6
    return decode + MERGE_US + MERGE_US_PER_MB * partial_mb + per_split * num_splits
