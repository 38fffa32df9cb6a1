"""Lists of blocks for `gqa_decode(indices=)`, and calls in which every key that no list names is poison."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from cute_kernels.gqa.layouts import LAYOUTS, Which
from cute_kernels.gqa.reference import ScaledCache, sizes_of, visible_keys
from tests.kit.draws import generator, integers
from tests.kit.gqa_cases import GqaCase, gqa_case

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def listed_case(
    *, n: int = 5, index_block: int = 64, own: bool = True, seed: int = 0, padded: bool | None = None, **options: Any
) -> GqaCase:
    """A `gqa_case` with lists of blocks. Other options go to `gqa_case`.

    Args:
        n: number of blocks of a list.
        index_block: tokens of a block.
        own: whether each KV head has lists of its own; otherwise all heads share them.
        seed: the seed of the case and the lists.
        padded: as in `gqa_case`; by default only if strides may differ between caches and scales.
    """
    token_scales = options.get("kv_dtype", "int8") not in ("bf16", "fp16")
    case = gqa_case(seed=seed, padded=not (own and token_scales) if padded is None else padded, **options)
    return with_lists(case, n=n, index_block=index_block, own=own, seed=seed)


def with_lists(case: GqaCase, *, n: int, index_block: int, own: bool, seed: int = 0) -> GqaCase:
    """The call with random lists. Keys that no query sees become NaN, if the dtype has NaN."""
    layout = LAYOUTS[case.layout]
    sizes = sizes_of(layout, case.k_cache, case.v_cache)
    batch, s_q = case.q.shape[:2]
    capacity = sizes.rows * (1 if case.block_table is None else case.block_table.shape[1])
    lengths = [capacity] * batch if case.cache_seqlens is None else case.cache_seqlens.tolist()
    gen = generator(seed + 1)
    indices = torch.empty((batch, s_q, sizes.h_kv if own else 1, n), dtype=torch.int32, device="cpu")
    for row, length in enumerate(lengths):
        for query in range(s_q):
            for head in range(indices.shape[2]):
                indices[row, query, head] = random_list(n, -(-length // index_block), gen)
    wide = torch.full((*indices.shape[:-1], n + 3), INT32_MAX, dtype=torch.int32, device="cpu")
    wide[..., :n] = indices
    listed = dataclasses.replace(case, indices=wide.to(case.q.device)[..., :n], index_block=index_block)
    poison_unlisted(listed)
    return listed


def random_list(n: int, blocks: int, gen: torch.Generator) -> torch.Tensor:
    """A list in random order. The last block comes often, some blocks come twice, and some entries name no block."""
    none = torch.tensor([-1, INT32_MIN, INT32_MAX, blocks, blocks + 1, -7], dtype=torch.int64, device="cpu")

    def drawn(most: int, count: int = n) -> torch.Tensor:
        return integers(0, most, (count,), gen)

    found = none[drawn(len(none))]
    if blocks:
        chosen = torch.randperm(blocks, generator=gen, dtype=torch.int64, device="cpu")[:n]
        found[: len(chosen)] = chosen
        if drawn(10, 1) < 7:
            found[0] = blocks - 1
    found = torch.where(drawn(10) == 0, found.flip(0), found)
    found = torch.where(drawn(10) == 0, none[0], found)
    return found[torch.randperm(n, generator=gen, dtype=torch.int64, device="cpu")].int()


def poison_unlisted(case: GqaCase) -> None:
    """Writes NaN to each key, value and token scale that no query of its head sees; int8 codes stay.

    A KV head sees a key if one of its queries sees it. `gqa_case` poisons only keys that no head sees.
    """
    layout = LAYOUTS[case.layout]
    sizes = sizes_of(layout, case.k_cache, case.v_cache)
    given: dict[Which, tuple[Any, Any]] = {"k": (case.k_cache, case.k_scale), "v": (case.v_cache, case.v_scale)}
    caches = [ScaledCache(*tensors, layout, which, sizes) for which, tensors in given.items()]
    batch, s_q = case.q.shape[:2]
    visible = visible_keys(
        batch, s_q, sizes, layout, cache_seqlens=case.cache_seqlens, block_table=case.block_table, causal=case.causal,
        window=None, device=case.q.device, indices=case.indices, index_block=case.index_block,
    )  # fmt: skip
    for work in visible:
        for head in range(sizes.h_kv):
            unseen = torch.ones(len(work.positions), dtype=torch.bool, device=case.q.device)
            for query in range(s_q):
                unseen[work.keys_seen(query, slice(head, head + 1))] = False
            outer, rows = work.outer[unseen], work.rows[unseen]
            for cache in caches:
                if cache.codes.dtype not in (torch.int8, torch.uint8):
                    bits = cache.codes.view(torch.int8 if cache.codes.itemsize == 1 else torch.int16)
                    bits[outer, rows, head] = -1
                if cache.kind is not None and cache.kind.granularity in ("per_token_head", "per_group"):
                    assert cache.scale is not None
                    cache.scale[outer, rows, head] = math.nan


def table_of_lists(
    indices: torch.Tensor,
    pages: torch.Tensor | None,
    lengths: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    capacity: int,
    causal: int,
    block_shift: int,
    rows_shift: int,
    page_shift: int,
    num_pages: int,
    page_step: int,
    part_step: int,
    head_step: int,
) -> None:
    """Computes in plain Python what `BlockTableKernel` computes; the arguments are the kernel's, on a CPU."""
    _, s_q, heads, _ = indices.shape
    per_block, per_page = 1 << (block_shift - rows_shift), 1 << max(page_shift - rows_shift, 0)
    page_rows = None if pages is None else pages.tolist()
    for row in range(len(keys)):
        query_row, head = divmod(row, heads)
        b, query = divmod(query_row, s_q)
        length = min(max(int(lengths[b]), 0), capacity)
        end = max(length - s_q + query + 1, 0) if causal else length
        whole, rest = end >> block_shift, end % (1 << block_shift)
        listed = list(dict.fromkeys(indices[b, query, head].tolist()))
        found = [block for block in listed if 0 <= block < whole]
        firsts = [block * per_block + part for block in found for part in range(per_block)]
        keys[row] = len(found) << block_shift
        if rest and whole in listed:
            firsts += [whole * per_block + part for part in range(-(-rest // (1 << rows_shift)))]
            keys[row] += rest
        numbers = []
        for first in firsts:
            page, part = (b, first) if page_rows is None else (page_rows[b][first // per_page], first % per_page)
            exists = 0 <= page < num_pages
            numbers.append(page * page_step + part * part_step + head * head_step if exists else -1)
        table[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32, device="cpu")
