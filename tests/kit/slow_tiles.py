"""Plain Python that says which key tiles of a work tile leave the fast path of MLA decoding over float32 scales.

The rules of the kernel (`mla/kernels/value_units.py`, `convert_q.py`, `qk.py`) in plain Python:

    E_j    the exponent of the unit of quant tile j, 0 at first. hi and lo are the largest and smallest exponent of the
           nonzero scales of a key tile. E_j moves to hi + some room if hi > E_j, or if lo < E_j - WINDOW while
           hi - lo <= WINDOW. It is at most LARGEST_E and no more than DROP below its largest value
    PV     is slow if hi > E_j or lo < E_j - WINDOW
    QK     is slow if the bits of a scale are above those of LARGEST_QK_SCALE, or if Q needs a power of two for each
           quant tile
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from fp8_mla import read_pages
from fp8_mla.formats import V3_2
from fp8_mla.slots import valid_slots
from tests.kit.mla_cases import DecodeCase

KEYS: Final = 64
WINDOW: Final = 20
ROOM: Final = 2
LARGEST_E: Final = 40
DROP: Final = 60
WEIGHT_EXPONENT: Final = 6
"""A weight is s_kj 2^(6 - E_j)."""
LARGEST_QK_SCALE: Final = 2.0**40
NONE: Final = 1000
Q_PEAK_EXPONENT, Q_ROPE_EXPONENT, Q_LARGEST_POWER = 14, 60, 110
Q_QUIET_EXPONENT = -8


class KeyTile(NamedTuple):
    """One key tile.

    e_j      (tiles,) int64, the exponent of the unit of each quant tile
    moved    quant tiles whose unit has moved
    qk_slow  whether its scores take the slow path because of scales
    pv_slow  whether its values take the slow path
    """

    e_j: torch.Tensor
    moved: int
    qk_slow: bool
    pv_slow: bool


class SlowTiles(NamedTuple):
    """Counts over the key tiles of one work tile.

    qk, pv  key tiles on the slow path of QK, of PV
    moves   moves of E_j, summed over quant tiles
    moved   key tiles in which some E_j has moved
    tiles   key tiles
    """

    qk: int
    pv: int
    moves: int
    moved: int
    tiles: int


def exponent(x: torch.Tensor) -> torch.Tensor:
    """Int64 exponents of |x| from its float32 bits: -127 for zero and subnormal numbers, 128 for Inf and NaN."""
    return (_bits(x.abs()) >> 23) - 127


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of float32 numbers as unsigned integers in int64."""
    return x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF


def key_tiles(scales: torch.Tensor) -> Iterator[KeyTile]:
    """The key tiles of a work tile in their order.

    Args:
        scales: (keys, tiles) float32; 0 for keys that are masked.
    """
    e_j = torch.zeros(scales.shape[1], dtype=torch.int64, device="cpu")
    highest = e_j.clone()
    limit = int(_bits(torch.tensor(LARGEST_QK_SCALE, dtype=torch.float32, device="cpu")))
    for tile in scales.cpu().float().split(KEYS):
        known, some = exponent(tile), tile != 0
        high = known.masked_fill(~some, -NONE).amax(dim=0)
        low = known.masked_fill(~some, NONE).amin(dim=0)
        old = e_j
        spread = high - low
        leaves = (high > old) | ((low < old - WINDOW) & (spread <= WINDOW))
        e_j = torch.where(leaves, high + (WINDOW - spread).clamp(0, ROOM), old)
        e_j = torch.maximum(e_j, highest - DROP).clamp_max(LARGEST_E)
        highest = torch.maximum(highest, e_j)
        yield KeyTile(
            e_j=e_j,
            moved=int((e_j != old).sum()),
            qk_slow=bool((_bits(tile) > limit).any()),
            pv_slow=bool(((high > e_j) | (low < e_j - WINDOW)).any()),
        )


def needs_second_way(q: torch.Tensor) -> torch.Tensor:
    """Which heads of q (heads, d) no single power of two brings into float16 for all quant tiles, (heads,) bool."""
    nope, rope = q[:, : V3_2.nope_dim].float().abs(), q[:, V3_2.nope_dim :].float().abs()
    peaks = nope.unflatten(1, (-1, V3_2.quant_tile)).amax(dim=-1)
    power = exponent(peaks.amax(dim=1)) - Q_PEAK_EXPONENT
    power = torch.maximum(power, exponent(rope.amax(dim=1)) - Q_ROPE_EXPONENT)
    power = power.clamp(-Q_LARGEST_POWER, Q_LARGEST_POWER)
    quiet = (peaks > 0) & (exponent(peaks) - power.unsqueeze(1) < Q_QUIET_EXPONENT)
    return quiet.any(dim=1)


def slow_tiles(scales: torch.Tensor, q: torch.Tensor | None = None) -> SlowTiles:
    """Counts the slow key tiles of one work tile.

    Args:
        scales: (keys, tiles) float32 in the order of the keys; 0 for keys that are masked.
        q: (heads, d), the heads of a CTA. None means that one power of two is enough for Q.
    """
    tiles = list(key_tiles(scales))
    every = q is not None and bool(needs_second_way(q).any())
    return SlowTiles(
        qk=sum(every or tile.qk_slow for tile in tiles),
        pv=sum(tile.pv_slow for tile in tiles),
        moves=sum(tile.moved for tile in tiles),
        moved=sum(tile.moved > 0 for tile in tiles),
        tiles=len(tiles),
    )


def scales_of(case: DecodeCase, row: int, query: int) -> torch.Tensor:
    """Scales (topk, tiles) float32 of the keys of one query of a sparse decode, 0 if a key is masked."""
    assert case.indices is not None
    slots = case.indices[row, query].long()
    seen = valid_slots(slots, case.kv_cache.shape[0] * case.kv_cache.shape[1])
    if case.topk_length is not None:
        length = case.topk_length.view(len(case.indices), -1)
        seen &= (
            torch.arange(len(slots), dtype=torch.int64, device=slots.device)
            < length[row, min(query, length.shape[1] - 1)]
        )
    start = V3_2.start(V3_2.scales)
    packed = read_pages(case.kv_cache, slots, token_format=V3_2, cache_layout=case.cache_layout)
    scales = packed[:, start : start + V3_2.scales.num_bytes].contiguous().view(torch.float32)
    return torch.where(seen.unsqueeze(1), scales, 0.0)
