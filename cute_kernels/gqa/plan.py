"""Plans how a decode call is cut into work tiles: pure Python, from shapes to a spec and a number of ranges."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from cute_kernels.gqa.blocks_plan import DecodeShape
from cute_kernels.gqa.codes import TYPES
from cute_kernels.gqa.layouts import ScaleKind
from cute_kernels.gqa.spec import (
    CLUSTERS,
    COLUMNS,
    D_SPLIT,
    KEYS_PER_TEAM,
    MAX_ACCUMULATORS,
    MAX_RANGES,
    GqaDecodeSpec,
)

# Costs other than key tiles, in key tiles: from 64 x 8192, 256 x 512 and 16 x 4096 in 16 to 66 ranges of one H200
# (docs/journal/gqa_decode.md).
RANGE_TILES = 2.0  # a range: Q, page numbers and scales of its first tiles
CUT_TILES = 1.25  # an end of a range within a sequence: a partial, written and merged
SEQUENCE_TILES = 0.3  # each sequence of a range after its first
MOST_SPEED = 0.93  # time of a tile while some CTAs have no work, relative to all CTAs reading

MAX_S_Q = 8
"""Most query tokens of a sequence in one call."""
INT32_MAX = 2**31 - 1

SOFTCAPS = (2.0**-32, 2.0**64)
"""Range of softcaps that kernels get. Any smaller cap makes all scores equal in float32, as the lower bound does; any
larger cap leaves scores up to 2^52 unchanged, as the upper bound does."""

CLUSTERS_LOST = {8: 1, 4: 4, 2: 0}
"""Most clusters of a size that parts of a card's SMs cannot hold: 132 SMs of an H200 hold 15, 30 and 66."""
ALONE_TILES = 2
"""Key tiles that one CTA reads in less time than a cluster takes to merge: 4.3 us instead of 5.4 for one on an H100."""
CLUSTER_TILES = 8
"""Most key tiles of a CTA in a cluster; beyond, more CTAs gain more than merging through global memory costs."""


@dataclass(frozen=True)
class DecodePlan:
    """The launch that a call gets. The same shapes give the same plan, so the same call gives the same bits.

    ranges          ranges of the line of all sequences' key tiles (balanced schedule); one CTA reads a range for each
                    KV head and block of query rows
    splits          splits of each sequence instead (uniform schedule), if the caller asked for them; else 0
    ctas            CTAs to launch; a CTA takes every ctas-th work tile
    states          slots for partials; 0 if no sequence is shared
    state_floats    float32 values of a partial
    counters        words that count finished partials
    """

    ranges: int
    splits: int
    ctas: int
    states: int
    state_floats: int
    counters: int


def kernel_softcap(softcap: float) -> float:
    """Clamps a softcap for a kernel: its products with scales and log2(e) stay within float32's exponents."""
    return min(max(softcap, SOFTCAPS[0]), SOFTCAPS[1])


def columns_for(rows: int, d: int, itemsize: int) -> int:
    """Returns the query rows of a CTA if a KV head has `rows` of them (tokens x heads).

    If a token has 1024 bytes, two stages do not fit beside Q and O of 16 columns.
    """
    most = 8 if d * itemsize >= 1024 else MAX_ACCUMULATORS * D_SPLIT.get(d, 1) // d
    return next((n for n in COLUMNS if n >= rows or 2 * n > most), COLUMNS[-1])


def warps_for(d: int, itemsize: int) -> int:
    """Returns the consumer warps of a CTA: 8, or 4 if two stages with keys for 8 do not fit."""
    return 8 if d * itemsize < 512 * D_SPLIT.get(d, 1) else 4


def keys_for(d: int, warps: int) -> int:
    """Returns the keys of a tile with one block of 16 keys a team."""
    return KEYS_PER_TEAM * warps // D_SPLIT.get(d, 1)


def with_key_blocks(spec: GqaDecodeSpec, rows: int) -> GqaDecodeSpec:
    """Returns the kernel without clusters; with 4-bit keys, where consumers bind, a team gets two blocks of 16 keys.

    A warp then has two chains of dependent instructions, and fewer waits and votes per key. It needs registers for
    them. Sequences that a cluster shares are short: 1024 tokens in tiles of 256 take 7.8 us instead of 6.8.

    Args:
        spec: the kernel with one block.
        rows: rows of a page, or of the cache without pages.
    """
    if not spec.k_rotated or spec.columns > 8 or spec.d > 128:
        return spec
    tile = 2 * spec.keys_per_tile
    return replace(spec, key_blocks=2, box_rows=min(rows, tile) if spec.paged else tile)


def cluster_for(spec: GqaDecodeSpec, batch: int, h_kv: int, rows: int, max_keys: int, num_sms: int) -> int:
    """Returns the CTAs of the cluster that shares a sequence and KV head, for small batches of short sequences; else 1.

    Short: more than ALONE_TILES key tiles, and at most CLUSTER_TILES for each CTA. Small: all clusters fit on the card
    at once.
    """
    sequences = batch * h_kv * -(-rows // spec.columns)
    for cluster in CLUSTERS if spec.warps == 8 else ():
        short = ALONE_TILES < max_keys / spec.keys_per_tile <= CLUSTER_TILES * cluster
        if short and sequences <= num_sms // cluster - CLUSTERS_LOST[cluster]:
            return cluster
    return 1


_CLASS_OF = {"per_tensor": "per_head", "per_token_head": "per_token"}


def choose_spec(
    shape: DecodeShape,
    kinds: tuple[ScaleKind | None, ScaleKind | None],
    *,
    kv_dtype: str,
    num_sms: int,
    num_splits: int | None = None,
    **facts: Any,
) -> GqaDecodeSpec:
    """Chooses the kernel of a call.

    Args:
        shape: shape of the call.
        kinds: kinds of the scales of K and of V; None without scales.
        kv_dtype: dtype of the caches, without "torch."; of keys if values are rotated.
        num_sms: SMs of the device.
        num_splits: splits of each sequence, if the caller asks for them.
        facts: other fields of the kernel's spec.
    """
    (batch, s_q, h_q), layout, sizes = shape.q_shape, shape.layout, shape.sizes
    d, rows = sizes.d, h_q // sizes.h_kv * s_q
    itemsize = TYPES[kv_dtype].itemsize
    warps = warps_for(d, itemsize)
    tile = keys_for(d, warps)
    spec = GqaDecodeSpec(
        kv_dtype=kv_dtype,
        d=d,
        columns=columns_for(rows, d, itemsize),
        k_scales=_scale_class(kinds[0]),
        v_scales=_scale_class(kinds[1]),
        layout=layout.kernel_layout,
        paged=layout.paged,
        box_rows=min(sizes.rows, tile) if layout.paged else tile,
        warps=warps,
        **facts,
    )
    cluster = 1 if num_splits is not None else cluster_for(spec, batch, sizes.h_kv, rows, shape.max_keys, num_sms)
    if cluster > 1:
        return replace(spec, cluster=cluster)
    return with_key_blocks(spec, sizes.rows)


def _scale_class(kind: ScaleKind | None) -> str:
    """Returns a spec's name of a granularity."""
    return "none" if kind is None else _CLASS_OF.get(kind.name, kind.name)


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
    """Cuts the line of all sequences' key tiles into ranges.

    Only the device knows the lengths, so a plan must be right for all of them: it says into how many equal ranges the
    line is cut, and CTAs find theirs. One range for every CTA that fits on the card is best, since the memory is busy
    only while all CTAs read, unless there are more heads than CTAs, or fewer key tiles than ranges.

    Args:
        spec: spec of the kernel.
        batch: number of sequences.
        h_kv: heads of the cache.
        rows: query rows of each KV head (tokens x heads).
        max_keys: most tokens of a sequence.
        num_sms: SMs of the device.
        num_splits: splits of each sequence; forces a uniform schedule.
    """
    heads = h_kv * -(-rows // spec.columns)  # KV heads x blocks of query rows
    most_ctas = num_sms
    tiles = max(1, -(-max_keys // spec.keys_per_tile))
    if spec.cluster > 1:
        most_ctas = batch * heads * spec.cluster
        ranges, splits, work_tiles, shared = 1, 0, most_ctas, False
    elif num_splits is not None:
        splits = min(num_splits, tiles, MAX_RANGES, INT32_MAX // tiles)
        ranges, work_tiles, shared = 1, heads * splits * batch, splits > 1
    elif tiles * batch > INT32_MAX:  # the device adds up the tiles of all sequences in 32 bits
        ranges, splits, work_tiles, shared = 1, 1, heads * batch, False
    else:
        splits, total = 0, tiles * batch
        # the device computes range * tile in 32 bits
        candidates = range(1, max(1, min(MAX_RANGES, total, INT32_MAX // total - 1)) + 1)
        ranges = min(candidates, key=lambda n: (_estimate_tiles(n, heads, most_ctas, batch, tiles), n))
        work_tiles, shared = heads * ranges, ranges > 1
    return DecodePlan(
        ranges=ranges,
        splits=splits,
        ctas=min(most_ctas, work_tiles),
        states=2 * work_tiles if shared else 0,
        state_floats=spec.columns * (spec.d + 2),
        counters=batch * heads,
    )


def _estimate_tiles(ranges: int, heads: int, ctas: int, batch: int, sequence_tiles: int) -> float:
    """Predicts the time of a launch whose sequences all have the greatest length, in key tiles of a CTA.

    The memory is busy as long as most CTAs read, so a few without work cost nothing; the beginning and the end of a
    range or a sequence do.
    """
    total, work_tiles = batch * sequence_tiles, heads * ranges
    rounds, length = -(-work_tiles // ctas), total / ranges
    cuts = 0 if length % sequence_tiles == 0 else 1 if batch == 1 or sequence_tiles % length == 0 else 2
    sequences = -(-length // sequence_tiles)  # sequences of a range
    each = RANGE_TILES + CUT_TILES * cuts + SEQUENCE_TILES * (sequences - 1)
    return max(MOST_SPEED * rounds * length, total * heads / ctas) + rounds * each
