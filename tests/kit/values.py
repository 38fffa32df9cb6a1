"""Families of values for queries and caches, on which neither time nor accuracy may depend.

A family changes N(0,1) numbers in place and in whole tensors, so that it fills a benchmark's cache on a GPU as well as
a test's on a CPU. Changes of keys refer to "quant tiles", neighbouring elements of a token that share a scale. In GQA
caches a quant tile is a head, or a group of its elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from fp8_mla import pack, read_pages, slots_from_block_table, write_pages
from fp8_mla.formats import TokenFormat, as_format, format_of_cache
from tests.kit.draws import generator, normal, uniform
from tests.kit.mla_cases import POISON_BYTE, DecodeCase

TOKENS_PER_CHUNK: Final = 1 << 18
"""Number of tokens that are made at a time: 600 MB of float32 latents."""
DIRECTION_SEED: Final = 4711


@dataclass(frozen=True)
class Family:
    """A change of N(0,1) numbers.

    about      description of the family
    keys       changes tokens. Arguments are all elements (n, d), a view of the quantized ones (n, tiles, width), and a
               generator. Elements with rotary encoding are not quantized, so only the first argument has them
    query      changes queries (..., heads, d)
    unwritten  whether tokens of zeros are not packed but zero bytes, scales included
    sorted     1: keys are sorted by score, -1: in the opposite order, 0: not at all
    limit      the longest time of a call, relative to N(0,1)
    """

    about: str
    keys: Callable[[torch.Tensor, torch.Tensor, torch.Generator], object] | None = None
    query: Callable[[torch.Tensor], object] | None = None
    unwritten: bool = False
    sorted: int = 0
    limit: float = 1.10

    @property
    def of_query(self) -> bool:
        """Whether only queries change, so that keys are N(0,1)."""
        return self.keys is None and not self.sorted


def _powers(shape: tuple[int, ...], most: float, gen: torch.Generator) -> torch.Tensor:
    """Powers of two whose exponents are spread evenly over -most .. most."""
    return torch.exp2(most * (2 * uniform(shape, gen) - 1))


def _spread(least: float, most: float, number: int, like: torch.Tensor) -> torch.Tensor:
    """(number, 1) powers of two with evenly spaced exponents from least to most."""
    return torch.exp2(torch.linspace(least, most, number, dtype=torch.float32, device=like.device)).unsqueeze(-1)


def _one_of(period: int, factor: float, x: torch.Tensor, gen: torch.Generator) -> None:
    """Multiplies one row in each `period` rows, or one row if there are fewer."""
    first = torch.arange(0, len(x), period, dtype=torch.int64, device=x.device)
    place = (first + (period * uniform((len(first),), gen)).long()).clamp_max(max(0, len(x) - 1))
    x[place] *= factor


def _random_tokens(x: torch.Tensor, most: float, gen: torch.Generator) -> None:
    x *= _powers((len(x), 1), most, gen)


def _random_tiles(tiles: torch.Tensor, most: float, gen: torch.Generator) -> None:
    tiles *= _powers((*tiles.shape[:2], 1), most, gen)


def _tokens_and_tiles(x: torch.Tensor, tiles: torch.Tensor, gen: torch.Generator) -> None:
    _random_tokens(x, 8, gen)
    _random_tiles(tiles, 6, gen)


def _small_head(q: torch.Tensor) -> None:
    q[..., q.shape[-2] // 2, :] *= 1e-3


def _along(q: torch.Tensor) -> None:
    """Turns all queries in one direction, which gives sharp scores."""
    q.mul_(0.5).add_(6 * direction(q.shape[-1], q.device))


SLOW: Final = "tokens and tiles"
"""The family in which every key tile of V3.2 is slow. It has its own limit."""
ONE_OF_ZEROS: Final = 8
FAMILIES: Final = {
    "normal": Family("N(0, 1)"),
    "few small": Family("1 of 64 tokens x 0.01", keys=lambda x, _, gen: _one_of(64, 0.01, x, gen)),
    "one small": Family("1 of 2048 tokens x 0.01", keys=lambda x, _, gen: _one_of(2048, 0.01, x, gen)),
    "small": Family("all tokens x 0.03", keys=lambda x, *_: x.mul_(0.03)),
    "large": Family("all tokens x 300", keys=lambda x, *_: x.mul_(300.0)),
    "tokens": Family("tokens x 2^-8 .. 2^8", keys=lambda x, _, gen: _random_tokens(x, 8, gen)),
    "tiles": Family(
        "quant tiles x 2^-6 .. 2^6, each its own in all tokens",
        keys=lambda _, tiles, gen: tiles.mul_(_spread(-6, 6, tiles.shape[1], tiles)),
    ),
    "random tiles": Family(
        "quant tiles x 2^-6 .. 2^6, each at random", keys=lambda _, tiles, gen: _random_tiles(tiles, 6, gen)
    ),
    SLOW: Family(
        "tokens x 2^-8 .. 2^8, quant tiles x 2^-6 .. 2^6, each at random; q x 2^-8, so that scores are a model's",
        keys=_tokens_and_tiles,
        query=lambda q: q.mul_(2.0**-8),
        limit=1.5,
    ),
    "channel": Family("a channel x 60", keys=lambda x, *_: x[:, 5].mul_(60.0)),
    "heads": Family("heads of q x 2^-10 .. 2^3", query=lambda q: q.mul_(_spread(-10, 3, q.shape[-2], q))),
    "small q": Family("q x 1e-4", query=lambda q: q.mul_(1e-4)),
    "small head": Family("one head of q x 1e-3", query=_small_head),
    "unwritten": Family(
        "1 of 8 tokens unwritten", keys=lambda x, _, gen: _one_of(ONE_OF_ZEROS, 0.0, x, gen), unwritten=True
    ),
    "zeros": Family("1 of 8 tokens zero", keys=lambda x, _, gen: _one_of(ONE_OF_ZEROS, 0.0, x, gen)),
    "rising": Family("keys sorted by score, six times as sharp", query=_along, sorted=1),
    "falling": Family("keys sorted by score, the largest first, six times as sharp", query=_along, sorted=-1),
    "sharp": Family("scores six times as sharp", query=lambda q: q.mul_(6.0)),
}
"""The families by name, N(0,1) first."""


@functools.cache
def direction(d: int, device: torch.device) -> torch.Tensor:
    """(d,) float32 N(0,1): the direction that queries of sorted families share, along which keys are sorted."""
    drawn = normal((d,), generator(DIRECTION_SEED))
    return drawn.to(device)


def query(family: str, shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """(..., heads, d) bfloat16 queries of a family."""
    q = normal(shape, gen)
    if (change := FAMILIES[family].query) is not None:
        change(q)
    return q.bfloat16()


def keys(
    family: str,
    shape: tuple[int, int],
    width: int,
    gen: torch.Generator,
    *,
    quantized: int | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """(n, d) float32 tokens of a family, before quantization.

    Args:
        family: a key of `FAMILIES`.
        shape: n and d.
        width: elements of a quant tile.
        quantized: number of leading elements that are quantized. None: all.
        groups: (n,) int64, ascending: which sequence a token belongs to, within which families may sort. None: one.
    """
    chosen = FAMILIES[family]
    x = normal(shape, gen)
    if chosen.keys is not None:
        chosen.keys(x, x[:, : quantized or shape[1]].unflatten(1, (-1, width)), gen)
    if not chosen.sorted:
        return x
    order = (x @ direction(shape[1], x.device)).argsort(descending=chosen.sorted < 0, stable=True)
    return x[order if groups is None else order[groups[order].argsort(stable=True)]]


def tokens(
    family: str,
    n: int,
    token_format: TokenFormat | str,
    gen: torch.Generator,
    *,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """(n, bytes) uint8 tokens of a latent cache, as `fp8_mla.pack` returns them; the arguments are those of `keys`."""
    made = as_format(token_format)
    options = {"quantized": made.nope_dim, "groups": groups}
    latents = keys(family, (n, made.d_qk), made.quant_tile, gen, **options)
    packed = pack(latents.bfloat16(), token_format=made)
    if FAMILIES[family].unwritten:
        packed[(latents == 0).all(dim=1)] = 0
    return packed


def fill_pages(
    cache: torch.Tensor, family: str, token_format: TokenFormat | str, *, run: int = 0, seed: int = 0
) -> torch.Tensor:
    """Writes tokens of a family to all slots of a paged cache in place, and returns the cache.

    Args:
        cache: as `fp8_mla.write_pages` takes it.
        family: a key of `FAMILIES`.
        token_format: format of the cache.
        run: number of slots of a context, within which families may sort. 0: tokens are not sorted.
    """
    gen, slots = generator(seed, cache.device), cache.shape[0] * cache.shape[1]
    run = run if FAMILIES[family].sorted else 0
    step = max(1, TOKENS_PER_CHUNK // run) * run if run else TOKENS_PER_CHUNK
    for start in range(0, slots, step):
        places = torch.arange(start, min(start + step, slots), dtype=torch.int64, device=cache.device)
        groups = places // run if run else torch.arange(len(places), dtype=torch.int64, device=cache.device)
        packed = tokens(family, len(places), token_format, gen, groups=groups)
        write_pages(cache, places, packed, token_format=token_format)
    return cache


def refill(case: DecodeCase, family: str, *, seed: int = 0) -> DecodeCase:
    """The decode after its caches and queries got values of a family, in place. Poisoned slots stay poisoned.

    If the family sorts, index lists are sorted, too, each within its length. A softmax scale of the case stays.
    """
    gen = generator(seed, case.q.device)
    case.q.copy_(query(family, tuple(case.q.shape), gen))
    first = (
        as_format(case.cache_format)
        if case.cache_format
        else format_of_cache(case.kv_cache.shape[-1], case.q.shape[-1])
    )
    _refill_pages(case, case.kv_cache, first, family, gen)
    if case.extra_kv_cache is not None and case.extra_cache_format is not None:
        _refill_pages(case, case.extra_kv_cache, as_format(case.extra_cache_format), family, gen)
    if FAMILIES[family].sorted:
        for indices, length in (
            (case.indices, case.topk_length),
            (case.extra_indices, case.extra_topk_length),
        ):
            if indices is not None:
                sort_indices(indices, length)
    return case


def _refill_pages(
    case: DecodeCase, cache: torch.Tensor, token_format: TokenFormat, family: str, gen: torch.Generator
) -> None:
    every = torch.arange(cache.shape[0] * cache.shape[1], dtype=torch.int64, device=cache.device)
    kept = {"token_format": token_format, "cache_layout": case.cache_layout}
    groups = None
    if case.block_table is not None and case.cache_seqlens is not None:
        table, page_size = case.block_table, cache.shape[1]
        seen = slots_from_block_table(table, case.cache_seqlens, page_size, num_pages=cache.shape[0])
        groups, _ = (seen >= 0).nonzero(as_tuple=True)
        used = seen[seen >= 0].long()
    else:
        used = every[(read_pages(cache, every, **kept) != POISON_BYTE).any(dim=-1)]
    packed = tokens(family, len(used), token_format, gen, groups=groups)
    write_pages(cache, used, packed, **kept)


def sort_indices(indices: torch.Tensor, length: torch.Tensor | None = None) -> None:
    """Sorts index lists (batch, s_q, topk) by slot in place. Entries past a list's length stay there.

    Args:
        indices: int32.
        length: (batch,) or (batch, s_q) int32, or None where all entries count.
    """
    order = indices.long()
    if length is not None:
        past = torch.arange(indices.shape[-1], dtype=torch.int64, device=indices.device) >= length.view(
            len(indices), -1, 1
        )
        order = order + past * 2**40
    indices.copy_(indices.gather(-1, order.argsort(dim=-1)))
