"""Which key tiles of a work tile leave the fast path of MLA decoding over float32 scales, said without a kernel.

The rules of the kernel in plain Python: the power of two e_k of each token k, the power E_j of each quant tile j, which
moves as row_max does, lazily, and what makes a key tile slow. A kernel's counters must be equal to what this counts.

    t_k    the second largest exponent among the nonzero scales of a token; the only one where there is one
    e_k    t_k - largest t of the key tile + NEAR, clamped to -12 .. 0
    r_kj   exponent of s_kj - e_k, over nonzero scales; hi and lo are its ends in a key tile
    E_j    moves to hi + some room where it is not set, where hi is above it, or where lo is more than WINDOW below and
           hi - lo is not; it stays within -120 .. 40 and no more than DROP below its largest
    PV     is slow where hi > E_j, lo < E_j - WINDOW, e_k < SLOW_E for a token with a nonzero scale, or a scale is
           negative or not finite
    QK     is slow where the bits of a scale are above those of 2^80, or where Q needs a power for each quant tile
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from fp8_mla import read_pages
from fp8_mla.formats import V3_2, TokenFormat, as_format
from fp8_mla.slots import valid_slots
from tests.support.mla_cases import DecodeCase

KEYS: Final = 64
NEAR: Final = 10
LEAST_E: Final = -12
SLOW_E: Final = -8
WINDOW: Final = 18
ROOM: Final = 2
E_J_RANGE: Final = (-120, 40)
DROP: Final = 60
WEIGHT_EXPONENT: Final = 6
"""A weight is s_kj 2^(6 - e_k - E_j)."""
LARGEST_QK_SCALE: Final = 2.0**80
NOT_SET: Final = -999
Q_PEAK_EXPONENT, Q_ROPE_EXPONENT, Q_POWERS = 14, 60, (-100, 60)
Q_QUIET, Q_LOUD_POWER = 2.0**-8, -8


class KeyTile(NamedTuple):
    """One key tile.

    e        (keys,) int64, the power of each token
    e_j      (tiles,) int64, the power of each quant tile; `NOT_SET` before its first nonzero scale
    moved    quant tiles whose power has moved; one that is set for the first time has not
    qk_slow  whether its scores take the slow path because of scales
    pv_slow  whether its values do
    """

    e: torch.Tensor
    e_j: torch.Tensor
    moved: int
    qk_slow: bool
    pv_slow: bool


class SlowTiles(NamedTuple):
    """Counts over the key tiles of one work tile.

    qk, pv  slow ones
    moves   moves of E_j, each quant tile on its own
    moved   key tiles in which some E_j has moved
    tiles   all
    """

    qk: int
    pv: int
    moves: int
    moved: int
    tiles: int


def exponent(x: torch.Tensor) -> torch.Tensor:
    """Int64 exponents of |x| as its float32 bits say: -127 for zero and subnormal numbers, 128 for Inf and NaN."""
    return (_bits(x.abs()) >> 23) - 127


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of float32 numbers as unsigned integers, in int64."""
    return x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF


def key_tiles(scales: torch.Tensor) -> Iterator[KeyTile]:
    """The key tiles of a work tile in their order.

    Args:
        scales: (keys, tiles) float32; 0 for keys that are masked.
    """
    e_j = torch.full((scales.shape[1],), NOT_SET, dtype=torch.int64)
    highest = e_j.clone()
    limit = int(_bits(torch.tensor(LARGEST_QK_SCALE)))
    for tile in scales.cpu().float().split(KEYS):
        known, some = exponent(tile), tile != 0
        e = _token_powers(known, some)
        ratio = known - e.unsqueeze(1)
        high = ratio.masked_fill(~some, NOT_SET).amax(dim=0)
        low = ratio.masked_fill(~some, -NOT_SET).amin(dim=0)
        old = e_j
        e_j = _moved(old, highest, high, low)
        highest = torch.maximum(highest, e_j)
        live = some.any(dim=0)
        outside = (live & ((high > e_j) | (low < e_j - WINDOW))).any()
        far = (some.any(dim=1) & (e < SLOW_E)).any()
        wrong = ~(torch.isfinite(tile) & (tile >= 0)).all()
        yield KeyTile(
            e=e,
            e_j=e_j,
            moved=int(((e_j != old) & (old != NOT_SET)).sum()),
            qk_slow=bool((_bits(tile) > limit).any()),
            pv_slow=bool(outside | far | wrong),
        )


def _token_powers(known: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
    """e_k of a key tile, from exponents (keys, tiles) and which scales are not zero."""
    if not some.any():
        return torch.full((len(known),), LEAST_E, dtype=torch.int64)
    ordered = known.masked_fill(~some, NOT_SET).sort(dim=1, descending=True).values
    second = ordered[:, min(1, ordered.shape[1] - 1)]
    typical = torch.where(second == NOT_SET, ordered[:, 0], second)
    return (typical - typical.max() + NEAR).clamp(LEAST_E, 0)


def _moved(e_j: torch.Tensor, highest: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """E_j after a key tile."""
    spread = high - low
    leaves = (high > e_j) | ((low < e_j - WINDOW) & (spread <= WINDOW))
    wanted = torch.where((e_j == NOT_SET) | leaves, high + (WINDOW - spread).clamp(0, ROOM), e_j)
    least = (highest - DROP).clamp_min(E_J_RANGE[0])
    wanted = torch.maximum(wanted.clamp_max(E_J_RANGE[1]), least)
    return torch.where(high == NOT_SET, e_j, wanted)


def needs_second_way(q: torch.Tensor, token_format: TokenFormat | str = V3_2) -> torch.Tensor:
    """(heads,) bool: heads of q (heads, d) that one power of two cannot bring into float16 for all quant tiles."""
    made = as_format(token_format)
    nope, rope = q[:, : made.nope_dim].float().abs(), q[:, made.nope_dim :].float().abs()
    power = exponent(nope.amax(dim=1)) - Q_PEAK_EXPONENT
    if made.rope_dim:
        power = torch.maximum(power, exponent(rope.amax(dim=1)) - Q_ROPE_EXPONENT)
    power = power.clamp(*Q_POWERS)
    peaks = nope.unflatten(1, (-1, made.quant_tile)).amax(dim=-1) * torch.exp2(-power.float()).unsqueeze(1)
    return ((peaks > 0) & (peaks < Q_QUIET)).any(dim=1) & (power > Q_LOUD_POWER)


def slow_tiles(
    scales: torch.Tensor, q: torch.Tensor | None = None, token_format: TokenFormat | str = V3_2
) -> SlowTiles:
    """Counts the slow key tiles of one work tile.

    Args:
        scales: (keys, tiles) float32 in the order of the keys; 0 for keys that are masked.
        q: (heads, d), the heads of a CTA. None: its scores need no second way.
        token_format: of the cache, with float32 scales.
    """
    tiles = list(key_tiles(scales))
    every = q is not None and bool(needs_second_way(q, token_format).any())
    return SlowTiles(
        qk=sum(every or tile.qk_slow for tile in tiles),
        pv=sum(tile.pv_slow for tile in tiles),
        moves=sum(tile.moved for tile in tiles),
        moved=sum(tile.moved > 0 for tile in tiles),
        tiles=len(tiles),
    )


def scales_of(case: DecodeCase, row: int, query: int, token_format: TokenFormat | str = V3_2) -> torch.Tensor:
    """(topk, tiles) float32 scales of the keys of one query of a sparse decode, 0 where a key is masked."""
    assert case.indices is not None
    made, slots = as_format(token_format), case.indices[row, query].long()
    seen = valid_slots(slots, case.kv_cache.shape[0] * case.kv_cache.shape[1])
    if case.topk_length is not None:
        length = case.topk_length.view(len(case.indices), -1)
        seen &= (
            torch.arange(len(slots), dtype=torch.int64, device=slots.device)
            < length[row, min(query, length.shape[1] - 1)]
        )
    start = made.start(made.scales)
    packed = read_pages(case.kv_cache, slots, token_format=made, cache_layout=case.cache_layout)
    scales = packed[:, start : start + made.scales.num_bytes].contiguous().view(torch.float32)
    return torch.where(seen.unsqueeze(1), scales, 0.0)
