"""What one rank holds of a whole decode: its tokens, dealt out one at a time in plain Python, and the call it makes.

Nothing here uses `cute_kernels.distributed`: a rank's share is a list of positions, and its cache is filled from it.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from cute_kernels.gqa.layouts import LAYOUTS, CacheSizes, cache_sizes, scale_kind, scale_shapes
from cute_kernels.gqa.reference import ScaledCache
from fp8_mla import V3_2, read_pages, write_pages
from tests.kit.gqa_cases import GqaCase
from tests.kit.mla_cases import POISON_BYTE, DecodeCase

SPARE_PAGES: Final = 2


def kept(length: int, rank: int, world_size: int, interleave: int) -> list[int]:
    """Positions below `length` that a rank holds, ascending."""
    return [p for p in range(max(length, 0)) if p // interleave % world_size == rank]


class LocalPages:
    """A rank's block table with its pages in shuffled order, and where each of its tokens comes from.

    table    (batch, width) int32; past a sequence's last page -1 and pages that do not exist, at least `garbage` times
    sources  for each slot that holds a token, (slot, sequence, position in the whole context)
    """

    def __init__(
        self, lengths: list[int], page_size: int, rank: int, world_size: int, interleave: int, garbage: int = 1
    ) -> None:
        positions = [kept(length, rank, world_size, interleave) for length in lengths]
        needed = [-(-len(of) // page_size) for of in positions]
        # every rank's table has the width that the rank with the most tokens needs
        most = [max(len(kept(n, r, world_size, interleave)) for r in range(world_size)) for n in lengths]
        width = max(-(-n // page_size) for n in most) + garbage
        self.num_pages = sum(needed) + SPARE_PAGES
        pages = torch.randperm(self.num_pages, generator=torch.Generator("cpu").manual_seed(rank), dtype=torch.int64,
                               device="cpu").tolist()  # fmt: skip
        rows, self.sources = [], []
        for sequence, own in enumerate(positions):
            row = [pages.pop() for _ in range(needed[sequence])]
            self.sources += [(row[i // page_size] * page_size + i % page_size, sequence, p) for i, p in enumerate(own)]
            no_pages = [-1, self.num_pages, -(2**31), 2**31 - 1]
            rows.append(row + [no_pages[i % 4] for i in range(width - len(row))])
        self.table = torch.tensor(rows, dtype=torch.int32, device="cpu")


def mla_dense(case: DecodeCase, rank: int, world_size: int, interleave: int, page_size: int) -> dict[str, Any]:
    """This rank's arguments: the case's, with its own cache and table. Lengths stay those of the whole context."""
    assert case.block_table is not None and case.cache_seqlens is not None
    device, whole_page = case.q.device, case.kv_cache.shape[1]
    pages = LocalPages(case.cache_seqlens.tolist(), page_size, rank, world_size, interleave)
    cache = _poison((pages.num_pages, page_size, case.kv_cache.shape[2]), torch.uint8, device)
    table = case.block_table.tolist()
    for slot, sequence, position in pages.sources:
        page = table[sequence][position // whole_page]
        cache[slot // page_size, slot % page_size] = case.kv_cache[page, position % whole_page]
    return {**case.arguments(), "kv_cache": cache, "block_table": pages.table.to(device)}


def mla_caches(case: DecodeCase, rank: int, world_size: int, interleave: int) -> dict[str, torch.Tensor]:
    """This rank's tokens of one or two caches, slot after slot. Page sizes must be multiples of a stripe."""
    caches = {}
    for prefix in ("", "extra_"):
        cache = getattr(case, f"{prefix}kv_cache")
        if cache is None:
            continue
        num_pages, page_size, width = cache.shape
        own = torch.tensor(kept(num_pages * page_size, rank, world_size, interleave), dtype=torch.int64, device="cpu")
        named = {"token_format": getattr(case, f"{prefix}cache_format") or V3_2, "cache_layout": case.cache_layout}
        tokens = read_pages(cache, own.to(cache.device), **named)
        pages = _poison((num_pages, page_size // world_size, width), torch.uint8, cache.device)
        write_pages(pages, torch.arange(len(own), dtype=torch.int64, device=cache.device), tokens, **named)
        caches[f"{prefix}kv_cache"] = pages
    return caches


def gqa(case: GqaCase, rank: int, world_size: int, interleave: int, page_size: int) -> dict[str, Any]:
    """This rank's arguments of a GQA case. Layouts without pages keep a row per sequence and ignore `page_size`.

    ALiBi over runs of tokens wants a table that has no room for a second run.
    """
    assert case.cache_seqlens is not None
    layout, device = LAYOUTS[case.layout], case.q.device
    lengths = case.cache_seqlens.tolist()
    sizes = cache_sizes(layout, tuple(case.k_cache.shape), tuple(case.v_cache.shape), case.k_cache.element_size())
    changed: dict[str, Any] = {}
    if layout.paged:
        assert case.block_table is not None
        garbage = 0 if case.alibi_slopes is not None and interleave > 1 else 1
        pages = LocalPages(lengths, page_size, rank, world_size, interleave, garbage)
        own = CacheSizes(pages.num_pages, page_size, sizes.h_kv, sizes.d)
        table = case.block_table.tolist()
        sources = [(slot, table[b][p // sizes.rows], p % sizes.rows) for slot, b, p in pages.sources]
        changed["block_table"] = pages.table.to(device)
    else:
        rows = max(len(kept(max(lengths), r, world_size, interleave)) for r in range(world_size)) + 1
        own = CacheSizes(len(lengths), rows, sizes.h_kv, sizes.d)
        sources = [
            (b * rows + i, b, p)
            for b, length in enumerate(lengths)
            for i, p in enumerate(kept(length, rank, world_size, interleave))
        ]
    to, outer, inner = (torch.tensor(column, dtype=torch.int64, device=device) for column in _columns(sources))
    for which in ("k", "v"):
        codes, scale = getattr(case, f"{which}_cache"), getattr(case, f"{which}_scale")
        from_cache = ScaledCache(codes, scale, layout, which, sizes)
        own_codes = _poison(layout.shape(which, own, codes.element_size()), codes.dtype, device)
        own_scale = None if scale is None else _own_scale(scale, which, case, own)
        to_cache = ScaledCache(own_codes, own_scale, layout, which, own)
        taken, taken_scale = from_cache.parts(outer, inner, slice(None))
        to_cache.put(*own.place(to), taken)
        if from_cache.kind is not None and from_cache.kind.granularity not in ("per_tensor", "per_head"):
            assert taken_scale is not None
            to_cache.put_scale(*own.place(to), taken_scale)
        changed[f"{which}_cache"], changed[f"{which}_scale"] = own_codes, own_scale
    return {**case.arguments(), **changed}


def _own_scale(scale: torch.Tensor, which: str, case: GqaCase, own: CacheSizes) -> torch.Tensor:
    layout = LAYOUTS[case.layout]
    codes = getattr(case, f"{which}_cache")
    sizes = cache_sizes(layout, tuple(case.k_cache.shape), tuple(case.v_cache.shape), codes.element_size())
    kind = scale_kind(f"{which}_scale", tuple(scale.shape), layout, sizes)
    if kind.granularity in ("per_tensor", "per_head"):
        return scale
    return torch.full(scale_shapes(layout, own)[kind], float("nan"), dtype=scale.dtype, device=scale.device)


def _columns(rows: list[tuple[int, int, int]]) -> list[list[int]]:
    return [[row[i] for row in rows] for i in range(3)]


def _poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The poison of a dtype: NaN for floats, -1 for int8."""
    nbytes = dtype.itemsize
    return torch.full((*shape[:-1], shape[-1] * nbytes), POISON_BYTE, dtype=torch.uint8, device=device).view(dtype)
