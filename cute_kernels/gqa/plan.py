"""How one decode call is cut into CTAs: pure Python, from shapes to a specification and a number of ranges."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cute_kernels.gqa.spec import CLUSTER, COLUMNS, KEYS_PER_WARP, MAX_ACCUMULATORS, MAX_RANGES, GqaDecodeSpec

RANGE_TILES = 2.0
"""What a range costs beside its tiles (Q, the meeting of the warps, a state written and merged), in tiles."""


INT32_MAX = 2**31 - 1

SHORT = 8
"""Tiles that a CTA of a cluster can be given; above, more CTAs are worth the way through global memory."""


@dataclass(frozen=True)
class DecodePlan:
    """What to launch. The same shapes give the same plan, so the same call gives the same bits.

    ranges          parts of the work list, the line of all sequences' tiles; each is read by one CTA per head and block
    splits          parts of each sequence instead, where they were asked for; else 0
    ctas            to launch; a CTA takes every ctas-th unit of work
    states          slots for partial results; 0 where no sequence is shared
    state_floats    float32 values of one
    counters        words that count finished parts
    """

    ranges: int
    splits: int
    ctas: int
    states: int
    state_floats: int
    counters: int


def columns_for(rows: int, d: int) -> int:
    """Columns of a CTA for so many query rows (tokens x heads) of a KV head."""
    return next((n for n in COLUMNS if n >= rows or 2 * n * d > MAX_ACCUMULATORS), COLUMNS[-1])


def warps_for(d: int, itemsize: int) -> int:
    """Consumer warps of a CTA. The tiles of eight are too large for two stages where a token has 512 bytes."""
    return 8 if d * itemsize < 512 else 4


def cluster_for(batch: int, h_kv: int, rows: int, d: int, max_keys: int, num_sms: int, warps: int) -> int:
    """CTAs of a cluster that share a sequence and head: CLUSTER where that is enough of them, else 1.

    Up to SHORT tiles for each CTA, and no more clusters than fit on the card at a time.
    """
    units = batch * h_kv * -(-rows // columns_for(rows, d)) * CLUSTER
    short = max_keys <= SHORT * CLUSTER * KEYS_PER_WARP * warps
    return CLUSTER if warps == 8 and short and units <= num_sms * 31 // 32 else 1


@functools.lru_cache(maxsize=4096)
def plan_decode(
    spec: GqaDecodeSpec,
    *,
    batch: int,
    h_kv: int,
    rows: int,
    max_keys: int,
    num_sms: int,
    num_splits: int | None = None,
) -> DecodePlan:
    """Cuts the work list into ranges.

    Lengths are known to the device alone, so a plan must be right for all of them: it says into how many equal parts
    the line of tiles is cut, and CTAs find theirs. One part for every CTA that fits on the card is best (the memory is
    busy only while all of them read), unless there are more heads than CTAs, or fewer tiles than parts.

    Args:
        spec: of the kernel.
        batch: sequences.
        h_kv: heads of the cache.
        rows: query rows of each (tokens x heads).
        max_keys: tokens that a sequence can have.
        num_sms: of the device.
        num_splits: parts of each sequence, to force it.
    """
    blocks = -(-rows // spec.columns)
    heads = h_kv * blocks
    slots = num_sms
    tiles = max(1, -(-max_keys // spec.keys_per_tile))
    if spec.cluster > 1:
        ranges, splits, units, shared, slots = 1, 0, batch * heads * spec.cluster, False, batch * heads * spec.cluster
    elif num_splits is not None:
        splits = min(num_splits, tiles, MAX_RANGES, INT32_MAX // tiles)
        ranges, units, shared = 1, heads * splits * batch, splits > 1
    elif tiles * batch > INT32_MAX:  # the device adds up the tiles of all sequences in 32 bits
        ranges, splits, units, shared = 1, 1, heads * batch, False
    else:
        splits, total = 0, tiles * batch
        # the device computes range * tile in 32 bits
        candidates = range(1, max(1, min(MAX_RANGES, total, INT32_MAX // total - 1)) + 1)
        ranges = min(candidates, key=lambda n: (_rounds(heads * n, slots) * (total / n + RANGE_TILES), n))
        units, shared = heads * ranges, ranges > 1
    return DecodePlan(
        ranges=ranges,
        splits=splits,
        ctas=min(slots, units),
        states=2 * units if shared else 0,
        state_floats=spec.columns * (spec.d + 2),
        counters=batch * heads,
    )


def _rounds(units: int, slots: int) -> int:
    return -(-units // slots)
