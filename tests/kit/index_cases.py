"""Rows of logits whose highest ones are hard to choose, for `index_topk`, and caches of index keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fp8_mla import INDEX_KEY, pack_index_keys, row_views
from fp8_mla.indexer import SCALE_RULES
from tests.kit.draws import generator, integers, normal, uniform

Draw = Callable[[tuple[int, int], torch.Generator], torch.Tensor]
"""Takes (rows, width) and a generator on the CPU."""


def _words(shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    """Random 32-bit patterns: every exponent, every kind of NaN, some infinities."""
    return integers(-(2**31), 2**31, shape, gen).int().view(torch.float32)


def _one_of(values: list[float]) -> Draw:
    known = torch.tensor(values, dtype=torch.float32, device="cpu")
    return lambda shape, gen: known[integers(0, len(values), shape, gen)]


def _plateau(value: float, higher: float) -> Draw:
    """Rows in which rank k lies among many equal numbers; some numbers are higher, and as many are lower."""

    def draw(shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
        drawn = uniform(shape, gen)
        row = torch.full_like(drawn, value)
        row = torch.where(drawn < higher, value + 1 + drawn, row)
        return torch.where(drawn > 1 - higher, value - 1 - drawn, row)

    return draw


FAMILIES: dict[str, Draw] = {
    "normal": normal,
    "far from zero": lambda *given: 100 + normal(*given),
    "all negative": lambda *given: -normal(*given).abs() - 0.01,
    "tiny": lambda *given: normal(*given) * 2.0**-30,
    "subnormal": lambda *given: normal(*given) * 2.0**-140,
    "huge": lambda *given: normal(*given) * 2.0**40,
    "any bits": _words,
    "neighbouring ulps": lambda *given: (0x3FC00000 + (uniform(*given) * 5000).int()).view(torch.float32),
    "negative neighbouring ulps": lambda *given: -(0x3FC00000 + (uniform(*given) * 300).int()).view(torch.float32),
    "all equal": _one_of([1.5]),
    "all zero": _one_of([0.0]),
    "zeros of both signs": _one_of([0.0, -0.0]),
    "NaN alone": _one_of([math.nan]),
    "two values": _one_of([1.0, -1.0]),
    "NaN and infinities": _one_of([math.nan, math.inf, -math.inf, 1.0, 2.0]),
    "few infinities": lambda *given: torch.where(uniform(*given) < 1e-3, math.inf, normal(*given)),
    "zeros, few positive": _plateau(0.0, 0.004),
    "zeros and numbers": lambda *given: normal(*given).clamp(min=0.0),
    "zeros of one sign above negative": lambda *given: -normal(*given).clamp(min=0.0),
    "equal numbers, few higher": _plateau(3.0, 0.004),
    "equal negative numbers, few higher": _plateau(-3.0, 0.004),
    "ascending": lambda *given: normal(*given).sort(dim=1).values,
    "descending": lambda *given: normal(*given).sort(dim=1, descending=True).values,
    "highest together": lambda *given: (
        normal(*given) + 10 * (torch.arange(given[0][1], dtype=torch.int64, device="cpu") // 3000 == 3)
    ),
    "integers": lambda *given: (8 * normal(*given)).round(),
}
"""Families of rows, by name."""


def logits_of(family: str, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """(rows, width) float32 on the CPU."""
    return FAMILIES[family]((rows, width), generator(seed))


def lengths_around(topk: int, width: int) -> torch.Tensor:
    """Lengths at which the algorithm changes, and some that no row can have."""
    found = (0, 1, 63, 64, 65, topk - 1, topk, topk + 1, topk + 3, 2 * topk, 511, 512, 513, width - 1, width)
    return torch.tensor([*found, -1, -(2**31), width + 1, 2**31 - 1], dtype=torch.int32, device="cpu")


def table_of(batch: int, width: int, page_size: int, seed: int = 0) -> torch.Tensor:
    """(batch, pages) int32 on the CPU. Pages are shuffled, some come twice, and some do not exist."""
    gen = generator(seed)
    pages = -(-width // page_size)
    table = integers(0, 4 * pages, (batch, pages), gen, torch.int32)
    table.view(-1)[:: 7 + pages // 3] = -1
    table.view(-1)[3 :: 11 + pages // 2] = 2**31 - 1
    return table


def index_keys(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """(tokens, 128) on the CPU: rows of random magnitudes, then rows at which a rule of scales changes."""
    gen = generator(0)
    k = normal((tokens, 128), gen) * (uniform((tokens, 1), gen) * 60 - 30).exp2()
    nearest = torch.finfo(dtype).eps
    special = [
        [0.0], [-0.0], [1e-5], [1e-4], [9.9e-5], [-1.01e-4], [math.nan], [math.nan, 3.0], [math.inf], [-math.inf, 2.0],
        [1e-40, -1e-39], [3.4e38], [3.3895e38, 1e-30], [6e-8], [448.0 * 2.0**-22], [448.0 * 2.0**-23],
        *([448.0 * 2.0**n * (1 + ulp)] for n in (-21, -3, 0, 7, 100) for ulp in (-nearest, 0.0, nearest)),
    ]  # fmt: skip
    for row, values in zip(k, special, strict=False):
        row.zero_()
        row[5 : 5 + len(values)] = torch.tensor(values, dtype=torch.float32, device="cpu")
        row[64:] = row[5] * uniform((64,), gen) * (0.5 if row[5].isfinite() else 0.0)
    return k.to(dtype)


def index_cache(num_pages: int, page_size: int, apart: int = 0, byte: int = 0xA5) -> torch.Tensor:
    """(num_pages, page_size, 132) uint8 on the CPU. Pages are `apart` bytes apart, by default adjacent."""
    apart = apart or page_size * 132
    whole = torch.full((num_pages * apart,), byte, dtype=torch.uint8, device="cpu")
    return whole.as_strided((num_pages, page_size, 132), (apart, 132, 1))


def index_call(
    seqlens: list[int],
    *,
    s_q: int = 1,
    heads: int = 64,
    page_size: int = 64,
    apart: int = 0,
    exact: bool = False,
    max_pages: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `index_decode` on the CPU. Pages are shuffled; codes and scales that no query sees are NaN.

    Args:
        seqlens: keys of each request.
        s_q: queries of each request.
        heads: heads of the indexer.
        page_size: keys of a page.
        apart: bytes from page to page; 0: one after the other.
        exact: codes are -1, 0 and 1, weights and scales powers of two, so that every sum is exact in any order.
        max_pages: width of the table; its tail names pages that do not exist.
        seed: seed of everything that is drawn.
    """
    gen = generator(seed)
    batch, needed = len(seqlens), [-(-n // page_size) for n in seqlens]
    num_pages = sum(needed) + 2
    cache = index_cache(num_pages, page_size, apart, 0xFF)
    codes, scales = row_views(cache, INDEX_KEY)
    order = torch.randperm(num_pages, generator=gen, dtype=torch.int32, device="cpu")
    table = torch.full((batch, max_pages or max(needed)), 2**31 - 1, dtype=torch.int32, device="cpu")
    table[:, 1::2] = -1

    def draw(*shape: int) -> torch.Tensor:
        if exact:
            return integers(-1, 2, shape, gen, torch.int32).float()
        return normal(shape, gen)

    def powers(*shape: int) -> torch.Tensor:
        return integers(-3, 4, shape, gen, torch.int32).float().exp2()

    begin = 0
    for row, (n, count) in enumerate(zip(seqlens, needed, strict=True)):
        pages = order[begin : begin + count]
        begin += count
        table[row, :count] = pages
        for i, page in enumerate(pages.tolist()):
            keys = min(page_size, n - i * page_size)
            if exact:
                codes[page, :keys] = draw(keys, 128).to(torch.float8_e4m3fn).view(torch.uint8)
                scales[page, :keys] = powers(keys, 1).view(torch.uint8)
            else:
                packed = pack_index_keys(draw(keys, 128) * powers(keys, 1), scale=SCALE_RULES[row % 2])
                codes[page, :keys], scales[page, :keys] = packed[:, :128], packed[:, 128:]
    weights = draw(batch, s_q, heads)
    return {
        "q": draw(batch, s_q, heads, 128).to(torch.float8_e4m3fn),
        "weights": weights * powers(batch, s_q, heads) if exact else weights,
        "k_cache": cache,
        "block_table": table,
        "cache_seqlens": torch.tensor(seqlens, dtype=torch.int32, device="cpu"),
    }


def on_gpu(call: dict[str, Any]) -> dict[str, Any]:
    """The call on a GPU; the cache keeps its strides."""
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    cache = call["k_cache"]
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(cache.untyped_storage()).cuda()
    return {**moved, "k_cache": whole.as_strided(cache.shape, cache.stride(), cache.storage_offset())}
